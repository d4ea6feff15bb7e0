from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.core.clock import ManualClock
from surefoot.core.errors import Corrupt, Incompatible, PeerLost, SurefootError
from surefoot.core.events import Event
from surefoot.core.hashing import ZERO_HASH, sha256_json
from surefoot.observe.ledger import Ledger, manifest_positions, read_ledger, verify_ledger, what_is_missing
from surefoot.observe.ledger_lines import encode


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def ledger(path: Path) -> Ledger:
    return Ledger(path, clock=ManualClock(), by="agent", wait_limit_s=1.0)


def fill(ledger: Ledger, num_entries: int) -> None:
    for step in range(1, num_entries + 1):
        ledger.append(
            Event.UPDATE_SKIPPED, generation=1, attempt=1, step=step, rule="nonfinite", reason="NaN", fields={"num_nonfinite": step}
        )


def run_in_child(action: Callable[[], None]) -> int:
    """Exit code of a fork that runs `action`: 0 when it returned."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_entries_read_back_as_they_were_returned(ledger: Ledger, path: Path) -> None:
    first = ledger.append(Event.ATTEMPT_STARTED, generation=1, attempt=1, step=0)
    second = ledger.append(Event.UPDATE_SKIPPED, generation=1, attempt=1, step=7, rule="r", reason="ü", fields={"b": 1, "a": [1.5, None]})
    assert read_ledger(path) == [first, second]
    assert (first.seq, second.seq) == (1, 2)
    assert (first.prev, second.prev) == (ZERO_HASH, first.hash)
    assert ledger.position() == (2, second.hash)


def test_position_of_an_empty_ledger_is_zero(ledger: Ledger) -> None:
    assert ledger.position() == (0, ZERO_HASH)


def test_hash_is_taken_over_the_canonical_json_of_everything_else(ledger: Ledger, path: Path) -> None:
    fill(ledger, 2)
    for line in path.read_text().splitlines():
        raw = json.loads(line)
        claimed = raw.pop("hash")
        assert list(raw) == ["seq", "time_utc", "generation", "attempt", "step", "event", "by", "rule", "reason", "fields", "prev"]
        assert claimed == sha256_json(raw)


def test_nonfinite_values_are_null_with_a_flag(ledger: Ledger, path: Path) -> None:
    fill(ledger, 1)
    entry = ledger.append(Event.UPDATE_SKIPPED, generation=1, attempt=1, step=1, fields={"loss": float("nan")})
    assert entry.fields == {"loss": None, "nonfinite": {"loss": "nan"}}
    assert verify_ledger(path).ok


def test_an_event_outside_the_list_is_refused(ledger: Ledger) -> None:
    with pytest.raises(ValueError, match=r"run\.sang"):
        ledger.append("run.sang", generation=1, attempt=1, step=0)  # type: ignore[arg-type]  # what a caller without types may do


def test_a_long_last_line_is_found_from_the_tail(ledger: Ledger, path: Path) -> None:
    fill(ledger, 3)
    ledger.append(Event.RUN_HALTED, generation=1, attempt=1, step=3, reason="x" * 100_000)
    assert ledger.append(Event.RUN_RELEASED, generation=1, attempt=1, step=3).seq == 5
    assert verify_ledger(path).ok


def test_an_older_generation_is_fenced(ledger: Ledger, path: Path) -> None:
    ledger.append(Event.GENERATION_STARTED, generation=4, attempt=1, step=0)
    before = path.read_bytes()
    with pytest.raises(PeerLost, match="generation 3 writes to a ledger that is at generation 4") as caught:
        ledger.append(Event.CHECKPOINT_COMMITTED, generation=3, attempt=1, step=9)
    assert caught.value.exit_code == 75
    assert path.read_bytes() == before
    assert ledger.append(Event.ATTEMPT_STARTED, generation=4, attempt=1, step=0).seq == 2


def test_a_ledger_is_not_inherited_over_a_fork(ledger: Ledger) -> None:
    def append() -> None:
        with pytest.raises(SurefootError, match="belongs to process"):
            ledger.append(Event.ATTEMPT_STARTED, generation=1, attempt=1, step=0)

    assert run_in_child(append) == 0


def test_waiting_for_another_writer_is_bounded(ledger: Ledger, path: Path) -> None:
    with path.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(SurefootError, match="held the ledger for 1 s"):
            fill(ledger, 1)


@pytest.mark.parametrize("torn", [b'{"seq":3,"time_utc":"2026', b"not an entry\n", b"\0" * 700, b"{}\n[1]\n{", b"1"])
def test_a_torn_tail_is_moved_aside_and_ledgered(ledger: Ledger, path: Path, torn: bytes) -> None:
    fill(ledger, 2)
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert [entry.seq for entry in read_ledger(path, up_to_damage=True)] == [1, 2]
    entry = ledger.append(Event.RUN_RESUMED, generation=2, attempt=2, step=0)
    assert path.read_bytes().startswith(whole)
    assert (path.parent / "ledger.torn-1").read_bytes() == torn
    moved = read_ledger(path)[2]
    assert (moved.event, moved.fields) == ("ledger.tail_moved", {"file": "ledger.torn-1", "num_bytes": len(torn), "offset": len(whole)})
    assert entry.seq == 4
    assert verify_ledger(path) == verify_ledger(path, manifests=[(4, entry.hash, "s0-a1")])
    assert verify_ledger(path).ok


def test_a_whole_entry_without_its_newline_was_never_acknowledged(ledger: Ledger, path: Path) -> None:
    fill(ledger, 3)
    path.write_bytes(path.read_bytes()[:-1])
    assert len(read_ledger(path)) == 2
    assert verify_ledger(path).ok
    assert ledger.append(Event.RUN_RESUMED, generation=1, attempt=2, step=0).seq == 4


def test_a_second_torn_tail_gets_its_own_file(ledger: Ledger, path: Path) -> None:
    for _ in range(2):
        fill(ledger, 1)
        with path.open("ab") as file:
            file.write(b"torn")
    fill(ledger, 1)
    assert sorted(found.name for found in path.parent.glob("ledger.torn-*")) == ["ledger.torn-1", "ledger.torn-2"]
    assert verify_ledger(path).ok


@pytest.mark.parametrize("torn", [b"", b'{"seq":9'])
def test_a_full_disk_leaves_the_file_as_it_was(ledger: Ledger, path: Path, torn: bytes) -> None:
    fill(ledger, 3)
    with path.open("ab") as file:
        file.write(torn)
    before = path.read_bytes()

    def append() -> None:
        # A file size limit makes the kernel cut a write short and then refuse it, just as a full disk does.
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 60, resource.RLIM_INFINITY))
        own = Ledger(path, clock=ManualClock(), by="rank 0")
        with pytest.raises(SurefootError, match="could not append: File too large") as caught:
            own.append(Event.RUN_LEFT, generation=1, attempt=1, step=3)
        assert caught.value.where == str(path)
        assert "free some space" in caught.value.hint
        assert caught.value.values["errno"] == errno.EFBIG
        assert caught.value.exit_code == 5

    assert run_in_child(append) == 0
    assert path.read_bytes() == before
    assert verify_ledger(path).ok


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    gone = Ledger(tmp_path / "gone" / "ledger.jsonl", clock=ManualClock(), by="agent")
    with pytest.raises(SurefootError, match="could not open the ledger: No such file"):
        gone.append(Event.ATTEMPT_STARTED, generation=1, attempt=1, step=0)


def test_a_missing_file_is_an_empty_ledger(path: Path) -> None:
    assert read_ledger(path) == []
    assert verify_ledger(path).ok


def test_damage_in_the_middle_is_an_error_that_names_the_line(ledger: Ledger, path: Path) -> None:
    fill(ledger, 4)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"garbage\n" + lines[2] + lines[3])
    with pytest.raises(Corrupt, match="line 2"):
        read_ledger(path)
    assert len(read_ledger(path, up_to_damage=True)) == 1


def test_a_later_format_is_refused(ledger: Ledger, path: Path) -> None:
    raw = {"seq": 1, "time_utc": "2030-01-01T00:00:00.000Z", "generation": 1, "attempt": 1, "step": 0, "event": "run.created"}
    raw |= {"by": "agent", "rule": "", "reason": "", "fields": {"ledger_format": 2}, "prev": ZERO_HASH}
    path.write_bytes(encode({**raw, "hash": sha256_json(raw)}))
    with pytest.raises(Incompatible, match="ledger format 2"):
        read_ledger(path)
    with pytest.raises(Incompatible, match="ledger format 2"):
        fill(ledger, 1)


def test_keys_that_a_later_release_adds_still_verify(ledger: Ledger, path: Path) -> None:
    fill(ledger, 1)
    raw = json.loads(path.read_text())
    later = {**{key: value for key, value in raw.items() if key != "hash"}, "seq": 2, "prev": raw["hash"], "severity": 3}
    with path.open("ab") as file:
        file.write(encode({**later, "hash": sha256_json(later)}))
    assert verify_ledger(path).ok
    assert read_ledger(path)[1].seq == 2


# --- What verification finds: the entry that was due where the file stops being what was written ---


def rehash(line: bytes, **changes: object) -> bytes:
    raw = {**json.loads(line), **changes}
    del raw["hash"]
    return encode({**raw, "hash": sha256_json(raw)})


Damage = Callable[[list[bytes]], list[bytes]]
DAMAGE: dict[str, tuple[Damage, int]] = {
    "edited": (lambda x: [*x[:4], x[4].replace(b"NaN", b"inf"), *x[5:]], 5),
    "edited, still JSON of another type": (lambda x: [*x[:4], b"[]\n", *x[5:]], 5),
    "edited last line": (lambda x: [*x[:8], x[8].replace(b"NaN", b"inf")], 9),
    "edited and hashed again": (lambda x: [*x[:4], rehash(x[4], step=99), *x[5:]], 5),
    "edited first line and hashed again": (lambda x: [rehash(x[0], step=99), *x[1:]], 1),
    "a space added": (lambda x: [*x[:4], x[4].replace(b":", b": ", 1), *x[5:]], 5),
    "a key given twice": (lambda x: [*x[:4], x[4].replace(b'{"seq":5', b'{"seq":1,"seq":5'), *x[5:]], 5),
    "removed": (lambda x: x[:4] + x[5:], 5),
    "first removed": (lambda x: x[1:], 1),
    "swapped": (lambda x: [*x[:4], x[5], x[4], *x[6:]], 5),
    "repeated": (lambda x: [*x[:5], x[4], *x[5:]], 6),
    "an empty line": (lambda x: [*x[:4], b"\n", *x[4:]], 5),
    "a lone surrogate": (lambda x: [*x[:4], x[4].replace(b"NaN", b"\\ud800"), *x[5:]], 5),
    "nested too deep": (lambda x: [*x[:4], b"[" * 100_000 + b"\n", *x[5:]], 5),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_verification_names_the_first_bad_entry(ledger: Ledger, path: Path, name: str) -> None:
    damage, first_bad = DAMAGE[name]
    fill(ledger, 9)
    path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True))))
    check = verify_ledger(path)
    assert (check.ok, check.first_bad) == (False, first_bad)
    assert check.detail


def test_a_whole_ledger_verifies(ledger: Ledger, path: Path) -> None:
    fill(ledger, 9)
    check = verify_ledger(path, manifests=[(seq, read_ledger(path)[seq - 1].hash, "s1-a1") for seq in (3, 9)])
    assert (check.ok, check.entries, check.first_bad) == (True, 9, None)


def test_a_tail_cut_below_a_manifest_is_found(ledger: Ledger, path: Path) -> None:
    fill(ledger, 9)
    positions = [(seq, read_ledger(path)[seq - 1].hash, f"s{seq}-a1") for seq in (2, 7)]
    lines = path.read_bytes().splitlines(keepends=True)
    for num_kept, first_bad in ((8, None), (7, None), (6, 7), (3, 4), (1, 2), (0, 1)):
        path.write_bytes(b"".join(lines[:num_kept]))
        assert verify_ledger(path, manifests=positions).first_bad == first_bad


def test_what_checkpoints_know_of_a_ledger_is_compared_with_what_was_read_of_it(ledger: Ledger, path: Path) -> None:
    fill(ledger, 3)
    entries = read_ledger(path)
    known = [(entry.seq, entry.hash, f"s{entry.seq}-a1") for entry in entries]
    assert what_is_missing(entries, [(0, ZERO_HASH, "s0-a0"), *known]) == ""
    assert what_is_missing(entries[:1], known) == "the tail is cut: checkpoint s2-a1 was written at seq 2, the ledger ends at 1"
    assert what_is_missing(entries, [(2, "other", "s1-a1")]) == "entry 2 is not the one that checkpoint s1-a1 was written after"


def test_a_ledger_written_anew_does_not_fit_the_manifests(ledger: Ledger, path: Path) -> None:
    fill(ledger, 5)
    position = (4, read_ledger(path)[3].hash, "s4-a1")
    path.unlink()
    ledger.append(Event.ATTEMPT_STARTED, generation=1, attempt=1, step=0)
    fill(ledger, 4)
    assert verify_ledger(path).ok
    assert verify_ledger(path, manifests=[position]).first_bad == 4


def test_manifest_positions_leave_out_what_cannot_be_read(tmp_path: Path) -> None:
    for name, text in (
        ("s1-a1", '{"ledger_seq": 3, "ledger_hash": "ab", "id": "s1-a1"}'),
        ("s2-a1", "{"),
        ("s3-a1", "[]"),
        ("s4-a1", None),
        ("s5-a1", "[" * 200_000),
    ):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        if text is not None:
            (folder / "manifest.json").write_text(text)
    os.mkfifo(tmp_path / "checkpoints" / "s4-a1" / "manifest.json")  # nobody will ever write into it
    assert manifest_positions(tmp_path) == [(3, "ab", "s1-a1")]
