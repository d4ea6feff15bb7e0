"""The list of denied nodes, on a real disk; and what is asked of it and of other backends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from surefoot.coordinate.isolation.commands import ask_site
from surefoot.coordinate.isolation.denylist import DENYLIST_NAME, DenylistIsolator, denied_nodes, read_denylist
from surefoot.coordinate.isolation.policy import IsolationDecision
from surefoot.coordinate.isolation.records import Wish
from surefoot.coordinate.isolation.site import SiteFacts, account, backends_of, carry_out, facts_of, scheduler_of, site_commands
from surefoot.coordinate.isolation.slurm import SlurmIsolator, parse_node
from surefoot.core.clock import ManualClock
from surefoot.core.errors import ConfigError

REASON = "surefoot:g3: lost"


def denylist(folder: Path, clock: ManualClock) -> DenylistIsolator:
    return DenylistIsolator(folder / DENYLIST_NAME, clock=clock, limit_s=1.0)


def test_a_node_is_listed_once_until_its_time_is_over(tmp_path: Path) -> None:
    clock = ManualClock()
    isolator = denylist(tmp_path, clock)
    assert isolator.isolate("n1", reason=REASON, ttl_s=60.0, evidence={"rank": 2}).action == "isolated"
    before = (tmp_path / DENYLIST_NAME).read_bytes()
    assert isolator.isolate("n1", reason="surefoot:g4: again", ttl_s=60.0, evidence={}).action == "already"
    assert (tmp_path / DENYLIST_NAME).read_bytes() == before
    assert isolator.status("n1").state == "ours"
    assert denied_nodes([tmp_path / DENYLIST_NAME, tmp_path / "absent"], now_utc=clock.utc()) == ["n1"]
    clock.now_s = 61.0
    assert isolator.status("n1").state == "serving"
    assert denied_nodes([tmp_path / DENYLIST_NAME], now_utc=clock.utc()) == []


def test_a_node_is_let_back_and_another_stays(tmp_path: Path) -> None:
    isolator = denylist(tmp_path, ManualClock())
    for node in ("n2", "n1"):
        isolator.isolate(node, reason=REASON, ttl_s=60.0, evidence={})
    assert isolator.release("n1").action == "released"
    assert isolator.release("n1").action == "already"
    assert [each.node for each in read_denylist(tmp_path / DENYLIST_NAME, now_utc=ManualClock().utc())] == ["n2"]


def test_what_somebody_else_listed_is_left_alone(tmp_path: Path) -> None:
    isolator = denylist(tmp_path, ManualClock())
    isolator.isolate("n1", reason="fans", ttl_s=60.0, evidence={})
    before = (tmp_path / DENYLIST_NAME).read_bytes()
    assert isolator.isolate("n1", reason=REASON, ttl_s=60.0, evidence={}).action == "left_alone"
    assert isolator.release("n1").action == "left_alone"
    assert (tmp_path / DENYLIST_NAME).read_bytes() == before


@pytest.mark.parametrize("content", ["", "[]", '{"version": 9, "nodes": []}', '{"version": 1}', '{"version": 1, "nodes": [{"node": 1}]}'])
def test_a_list_that_cannot_be_read_is_said_and_never_overwritten(content: str, tmp_path: Path) -> None:
    path = tmp_path / DENYLIST_NAME
    path.write_text(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_denylist(path, now_utc=ManualClock().utc())
    isolator = denylist(tmp_path, ManualClock())
    assert isolator.status("n1").state == "unknown"
    assert isolator.isolate("n1", reason=REASON, ttl_s=60.0, evidence={}).action == "failed"
    assert path.read_text() == content


def test_a_lock_that_is_held_ends_the_wait(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    clock = ManualClock()
    done = denylist(tmp_path, clock).isolate("n1", reason=REASON, ttl_s=60.0, evidence={})
    os.close(fd)
    assert done.action == "failed"
    assert "more than 1 s" in done.reason
    assert denylist(tmp_path, clock).isolate("n1", reason=REASON, ttl_s=60.0, evidence={}).action == "isolated"


def test_commands_have_a_deadline_and_their_failure_is_told() -> None:
    late = ask_site(("sleep", "30"), limit_s=0.1)
    assert (late.exit_code, late.is_good) == (None, False)
    assert "no answer within 0.1 s" in late.why()
    assert "No such file" in ask_site(("surefoot-no-such-program",), limit_s=1.0).why()
    denied = ask_site(("sh", "-c", "echo 'slurm_update error: Invalid user id' >&2; exit 1"), limit_s=5.0)
    assert denied.is_denied
    assert not ask_site(("true",), limit_s=5.0).is_denied


@pytest.mark.parametrize(
    ("text", "state", "reason"),
    [
        ("NodeName=n1 State=IDLE ThreadsPerCore=1", "serving", "IDLE"),
        ("NodeName=n1 State=MIXED+PLANNED Reason=", "serving", "MIXED+PLANNED"),
        ("NodeName=n1 State=IDLE+DRAIN Reason=surefoot:g3: lost [root@2026-01-01T00:00:00]", "ours", "surefoot:g3: lost"),
        ("NodeName=n1 State=IDLE+DRAIN Reason=fans [ada@2026-01-01T00:00:00]", "others", "fans"),
        ("NodeName=n1 State=DOWN* Reason=Not responding [slurm@2026-01-01T00:00:00]", "others", "Not responding"),
        ("NodeName=n1 State=DOWN Reason=surefoot:g3: lost [root@2026-01-01T00:00:00]", "others", "surefoot:g3: lost"),
        ("nothing", "unknown", "scontrol says no state: nothing"),
    ],
)
def test_what_scontrol_says_of_a_node(text: str, state: str, reason: str) -> None:
    standing = parse_node("n1", text)
    assert (standing.state, standing.reason) == (state, reason)


def test_where_the_scheduler_fails_the_list_still_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    wish = Wish("n1", "g3", "lost")
    backends = (SlurmIsolator(limit_s=1.0), denylist(tmp_path, ManualClock()))
    decision = IsolationDecision("isolate", "lost")
    done = carry_out(decision, wish, backends=backends, ttl_s=60.0)
    assert [(each.backend, each.action) for each in done] == [("slurm", "failed"), ("denylist", "isolated")]
    told = account(decision, wish, done=done, facts=SiteFacts("none", "run", "n1", "g3"))
    assert [each["action"] for each in told["done"]] == ["failed", "isolated"]
    for kind in ("ask", "say", "refuse", "already"):
        assert carry_out(IsolationDecision(kind, ""), wish, backends=backends, ttl_s=60.0) == ()


@pytest.mark.parametrize("scheduler", ["slurm", "kubernetes", "none"])
def test_every_site_has_the_same_commands_to_type(scheduler: str) -> None:
    told = site_commands(SiteFacts(scheduler, "a run", "n1", "g3", reason="it's lost"))  # type: ignore[arg-type]
    assert {"show_job", "show_node", "drain", "probe", "readmit"} <= told.keys()
    assert told["readmit"] == "surefoot drain n1 --run 'a run' --readmit"


def test_the_site_is_known_by_what_it_left_in_the_environment(tmp_path: Path) -> None:
    assert scheduler_of({"SLURM_JOB_ID": "7"}) == "slurm"
    assert scheduler_of({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == "kubernetes"
    assert scheduler_of({}) == "none"
    facts = facts_of({"SLURM_JOB_ID": "7"}, run="run", node="n1", incident="g3", reason="lost")
    told = site_commands(facts)
    assert told["show_job"] == "scontrol show job 7"
    assert told["drain"] == "scontrol update NodeName=n1 State=DRAIN Reason='surefoot:g3: lost'"
    names = [
        each.name for each in backends_of({"SLURM_JOB_ID": "7"}, run_dir=tmp_path, site_denylist="/site", limit_s=1.0, clock=ManualClock())
    ]
    assert names == ["slurm", "denylist", "denylist"]
