"""From the ledger of a run to symptoms, a suspect and the next command: a branch at a time, and silence where nothing is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from surefoot.core.events import Event
from surefoot.heal.triage import Check, Symptom, read_signs
from surefoot.heal.triage_checks import DocumentLook, Facts, symptom
from tests.unit.heal.ledgers import Story

BAD = {"document": "web/7", "hash": "abcdef0123456789", "score": 6.0, "reasons": ["its tokens surprise by 9 nats each"]}
ODD = {"document": "web/8", "hash": "1234", "score": 1.0, "reasons": ["it has 9 tokens"]}
CLEAN = DocumentLook((ODD,), 40, "steps 39 to 40", limit=3.6)
POISONED = DocumentLook((BAD, ODD), 40, "steps 39 to 40", limit=3.6)


def triaged(story: Story, *, asked: int | None = None, **known: Any) -> list[Symptom]:
    told = read_signs(story.entries, step=asked)
    facts = Facts(run="runs/mine", entries=tuple(story.entries), **{"num_ranks": 2, "audit_interval_steps": 100, "step": 1000, **known})
    return [symptom(signs, told, facts) for signs in told.signs]


def outcomes(one: Symptom) -> dict[str, str]:
    return {check.name: check.outcome for check in one.checks}


def test_a_healthy_run_has_no_symptoms() -> None:
    story = Story()
    story.tell(Event.ATTEMPT_STARTED)
    story.tell(Event.CHECKPOINT_COMMITTED, step=100)
    story.tell(Event.UPDATE_SKIPPED, step=3, rule="loss_scale", reason="a back-off")
    story.found("cusum:act_rms", step=50, asks="record")  # advisory: never a symptom by itself
    assert triaged(story) == []
    story.found("outlier_loss", step=60)  # control
    assert [one.name for one in triaged(story)] == ["spike"]


def test_a_spike_with_a_document_that_stands_out_is_the_datas() -> None:
    story = Story()
    story.found("outlier_loss", step=40)
    (one,) = triaged(story, documents={40: POISONED})
    assert (one.name, one.onset_step, one.suspect) == ("spike", 40, "data")
    assert one.documents == (BAD,)
    assert one.action == "surefoot data block runs/mine --document abcdef012345 --evidence-step 40 --reason spike"
    (one,) = triaged(story, documents={40: CLEAN})
    assert (one.suspect, one.documents) == ("unknown", ())
    assert one.action == "surefoot replay runs/mine --from 39 --steps 1 --logits"


def test_checks_go_from_data_over_code_to_the_cluster() -> None:
    story = Story()
    story.found("outlier_loss", step=40)
    (one,) = triaged(story, documents={40: CLEAN}, rows={40: {"lr": 1e-3, "loss": 9.0}, 39: {"lr": 1e-3, "loss": 3.0}})
    assert outcomes(one) == {
        "documents": "ok",
        "data-changes": "ok",
        "config-changes": "ok",
        "software-changes": "ok",
        "replica-audit": "ok",
        "lr-log": "ok",
        "precision-fallback": "ok",
        "attention-head": "unknown",
        "rank-figures": "ok",
        "lost-ranks": "ok",
    }
    assert (one.evidence["loss"], one.evidence["loss_before"]) == (9.0, 3.0)
    assert one.reason == "nothing found; not looked at: attention-head"


def test_a_check_that_nobody_made_is_no_good_sign() -> None:
    story = Story()
    story.found("outlier_loss", step=40)
    (one,) = triaged(story, num_ranks=1)
    assert {name for name, outcome in outcomes(one).items() if outcome == "unknown"} == {
        *("documents", "replica-audit", "lr-log", "attention-head", "rank-figures")
    }
    for facts in ({"audit_interval_steps": 0}, {"step": 50}):  # off; not due yet
        (one,) = triaged(story, **facts)
        assert outcomes(one)["replica-audit"] == "unknown"


@pytest.mark.parametrize(
    ("event", "fields", "check", "suspect"),
    [
        (Event.STAGE_CHANGED, {}, "data-changes", "data"),
        (Event.CONFIG_ACCEPTED, {"section": "optimizer"}, "config-changes", "code"),
        (Event.ENVIRONMENT_CHANGED, {"changed": {"torch": ["2.13", "2.14"]}}, "software-changes", "code"),
    ],
)
def test_what_was_changed_shortly_before_is_suspected(event: Event, fields: Mapping[str, object], check: str, suspect: str) -> None:
    story = Story()
    story.tell(event, step=30, reason="", fields=fields)
    story.found("outlier_loss", step=40)
    (one,) = triaged(story, documents={40: CLEAN})
    assert (one.suspect, outcomes(one)[check]) == (suspect, "found")
    late = Story()
    late.tell(event, step=30, fields=fields)
    late.found("outlier_loss", step=4000)
    assert triaged(late)[0].suspect == "unknown"


def test_another_precision_after_running_out_of_memory_is_remembered() -> None:
    story = Story()
    story.tell(Event.RANK_LOST, step=20, reason="rank 0 left with exit code 1: CUDA out of memory", fields={"rank": 0})
    story.found("grad_outlier", step=40, asks="record")
    assert outcomes(triaged(story)[0])["precision-fallback"] == "ok"
    story = Story()
    story.tell(Event.RANK_LOST, step=20, reason="rank 0 left with exit code 1: CUDA out of memory", fields={"rank": 0})
    story.tell(Event.CONFIG_ACCEPTED, step=20, reason="train.precision: fp32 -> bf16", fields={"section": "train"})
    story.found("grad_outlier", step=40, asks="record")
    assert outcomes(triaged(story)[0])["precision-fallback"] == "found"


def test_a_jump_of_the_learning_rate_is_the_codes_whatever_it_did_to_the_loss() -> None:
    story = Story()
    story.found("lr_jump", step=40)
    story.found("outlier_loss", step=42)
    schedule, spike = triaged(story, documents={42: CLEAN})
    assert (schedule.name, schedule.suspect, spike.name) == ("schedule", "code", "spike")
    assert schedule.action == "surefoot rollback runs/mine --to 39 --reason schedule"


@pytest.mark.parametrize(
    ("rule", "asks", "name", "suspect", "action"),
    [
        ("diverged", "rollback", "divergence", "unknown", "surefoot replay runs/mine --from 39 --steps 1 --logits"),
        ("state_is_ill", "rollback", "ill-weights", "state", "surefoot rollback runs/mine --to 39 --reason ill-weights"),
        ("rank_is_wrong", "pause", "corruption", "cluster", "surefoot triage runs/mine --vendor 2"),
        ("bits_do_not_repeat", "alert", "unrepeatable", "code", "surefoot replay runs/mine --from 39 --steps 1"),
    ],
)
def test_each_rule_that_acts_has_a_symptom(rule: str, asks: str, name: str, suspect: str, action: str) -> None:
    story = Story()
    story.found(rule, step=40, asks=asks, evidence={"ranks": [2] if rule == "rank_is_wrong" else []})
    (one,) = triaged(story, documents={40: CLEAN}, num_ranks=4)
    assert (one.name, one.suspect, one.action) == (name, suspect, action)


def test_bits_that_differ_are_the_clusters_and_name_the_rank() -> None:
    story = Story()
    story.found("replica_differs", step=100, asks="rollback", onset=51, evidence={"ranks": [1]})
    (one,) = triaged(story)
    assert (one.name, one.onset_step, one.suspect, one.evidence["ranks"]) == ("corruption", 51, "cluster", [1])
    assert one.action == "surefoot triage runs/mine --vendor 1"
    assert outcomes(one)["replica-audit"] == "found"


def test_steps_that_replayed_to_other_bits_are_corruption_too() -> None:
    story = Story()
    story.tell(Event.REPLAY_DIFFERED, step=80, reason="step 78 gave another loss")
    (one,) = triaged(story)
    assert (one.name, one.suspect, one.action) == ("corruption", "cluster", "surefoot replay runs/mine --from 79 --steps 1")


@pytest.mark.parametrize(("num", "name"), [(1, "occasional-nan"), (2, "occasional-nan"), (3, "nan")])
def test_a_nan_now_and_then_and_a_run_of_them(num: int, name: str) -> None:
    story = Story()
    for step in range(10, 10 + num):
        story.found("nonfinite", step=step)
        story.tell(Event.UPDATE_SKIPPED, step=step, rule="nonfinite")  # the same step, said twice
    (one,) = triaged(story, documents={10: CLEAN})
    assert one.name == name
    assert one.action == "surefoot replay runs/mine --from 9 --steps 1 --name-nonfinite"


def test_documents_are_those_of_the_gravest_finding() -> None:
    story = Story()
    story.found("outlier_loss_mild", step=20, asks="record")
    story.found("outlier_loss", step=40)
    story.found("outlier_loss", step=60)
    (one,) = triaged(story, documents={20: CLEAN, 40: POISONED, 60: CLEAN})
    assert (one.onset_step, one.documents) == (20, (BAD,))
    assert "--evidence-step 40" in one.action


def test_findings_far_apart_are_two_symptoms() -> None:
    story = Story()
    for step in (10, 12, 900):
        story.found("outlier_loss", step=step)
    assert [(one.onset_step, one.evidence["last_step"]) for one in triaged(story)] == [(900, 900), (10, 12)]


def test_what_a_repetition_found_out_comes_before_every_check() -> None:
    story = Story()
    story.found("outlier_loss", step=40)
    fields = {"of_step": 40, "rule": "outlier_loss", "cause": "hardware", "ranks": [1]}
    story.tell(Event.STEP_RECHECKED, step=39, rule="outlier_loss", reason="rank 1 gave other bits", fields=fields)
    (one,) = triaged(story, documents={40: POISONED})
    assert (one.suspect, one.reason) == ("cluster", "diagnosed by repetition: rank 1 gave other bits")
    assert one.action == "surefoot triage runs/mine --vendor 1"
    fields = {"episode": "e9", "cause": "data", "ranks": [], "samples": [160, 168], "steps": [40, 41]}
    story.tell(Event.EPISODE_DIAGNOSED, step=70, reason="it came back with its samples", fields=fields)
    (one,) = triaged(story, documents={40: CLEAN})  # the newest diagnosis
    assert (one.suspect, one.evidence["diagnosed"]["samples"]) == ("data", [160, 168])
    assert (one.documents, one.action) == ((), "surefoot triage runs/mine --incident e9")  # one that does not stand out is never blocked


def test_an_ordinary_document_is_never_blocked_whatever_was_diagnosed() -> None:
    story = Story()
    story.found("outlier_loss", step=40)
    story.tell(Event.STEP_RECHECKED, step=39, reason="the weights are well", fields={"of_step": 40, "cause": "data", "ranks": []})
    (one,) = triaged(story, documents={40: CLEAN})
    assert (one.suspect, one.documents) == ("data", ())
    assert one.action == "surefoot data locate runs/mine --step 40 --excerpt"
    assert "data block" in triaged(story, documents={40: POISONED})[0].action  # control


@pytest.mark.parametrize(("step", "suspect"), [(1, "unknown"), (7, "code"), (60, "data")])
def test_before_anything_was_learnt_no_document_is_to_blame(step: int, suspect: str) -> None:
    story = Story()
    story.found("norm_over_clip", step=step)
    (one,) = triaged(story, documents={step: POISONED}, rows={step: {"lr": 3500.0}}, clean_step=None, is_stopped=True)
    assert one.suspect == suspect
    assert ("data block" in one.action) is (step == 60)


def test_a_silly_rate_is_suspected_where_a_run_is_ill_at_once_and_it_starts_over() -> None:
    story = Story()
    story.tell(Event.STEP_RECHECKED, step=6, reason="on all ranks alike", fields={"of_step": 7, "cause": "state", "ranks": []})
    story.found("state_is_ill", step=7, asks="rollback")
    rows = {7: {"lr": 3500.0}, 6: {"lr": 3000.0}}
    (one,) = triaged(story, documents={7: POISONED}, rows=rows, clean_step=None, is_stopped=True)
    assert (one.suspect, outcomes(one)["lr-log"], outcomes(one)["documents"], one.documents) == ("code", "found", "ok", ())
    start = "surefoot train runs/mine optimizer.lr=LR --accept-changes optimizer"
    assert one.action == f'surefoot resume runs/mine --cause "ill-weights" && {start}'
    assert triaged(story, rows=rows, clean_step=None)[0].action == start
    assert triaged(story, rows=rows, clean_step=5)[0].action == "surefoot rollback runs/mine --to 6 --reason ill-weights"
    assert triaged(story, clean_step=None)[0].action == "surefoot checkpoint list runs/mine"  # the state's, and nothing to go back to


def test_ranks_whose_figures_do_not_move_with_the_atoms_are_suspected_both() -> None:
    story = Story()
    story.found("nonfinite", step=40, evidence={"ranks": [1]})
    fields = {"of_step": 40, "cause": "inconclusive", "ranks": [0, 1], "transient": False}
    story.tell(Event.STEP_RECHECKED, step=39, reason="the figures do not move with the atoms", fields=fields)
    (one,) = triaged(story, documents={40: POISONED})
    assert (one.suspect, one.documents, outcomes(one)["documents"]) == ("cluster", (), "ok")
    assert one.reason.startswith("ranks 0, 1;")
    assert one.action == "surefoot triage runs/mine --vendor 0 && surefoot triage runs/mine --vendor 1"


def test_a_healed_episode_asks_for_no_way_back() -> None:
    story = Story()
    story.found("state_is_ill", step=40, asks="rollback")
    opened = story.tell(Event.EPISODE_OPENED, step=40, fields={"onset_step": 40, "detected_step": 40})
    assert "rollback" in triaged(story)[0].action  # control: it is open
    story.tell(Event.EPISODE_CLOSED, step=60, fields={"episode": f"e{opened.seq}"})
    assert triaged(story)[0].action == f"surefoot triage runs/mine --incident e{opened.seq}"
    story.found("state_is_ill", step=90, asks="rollback")
    assert "rollback" in triaged(story)[0].action  # it is back


def test_a_step_that_is_not_finite_is_one_symptom_whatever_other_rules_say() -> None:
    story = Story()
    story.found("grad_outlier", step=40)
    story.found("nonfinite", step=40)
    assert [one.name for one in triaged(story)] == ["occasional-nan"]
    story.found("grad_outlier", step=60)
    assert [one.name for one in triaged(story)] == ["spike", "occasional-nan"]


def test_a_loop_of_somebodys_own_is_not_told_to_replay() -> None:
    story = Story()
    for rule, step in (("nonfinite", 40), ("diverged", 400), ("bits_do_not_repeat", 800), ("plateau", 1200)):
        story.found(rule, step=step)
    found = triaged(story, has_data=False)
    assert len(found) == 4
    assert not [one.action for one in found if "replay" in one.action or "surefoot data" in one.action]
    assert any("a loop of your own cannot be replayed" in check.detail for one in found for check in one.checks)


def test_an_inconclusive_diagnosis_leaves_it_to_the_checks() -> None:
    story = Story()
    story.found("outlier_loss", step=40)
    fields = {"episode": "e9", "cause": "inconclusive", "ranks": [], "samples": [0, 8], "steps": [40, 41]}
    story.tell(Event.EPISODE_DIAGNOSED, step=70, reason="it differs", fields=fields)
    (one,) = triaged(story, documents={40: POISONED})
    assert (one.suspect, one.evidence["diagnosed"]["cause"]) == ("data", "inconclusive")


def test_a_canary_apart_asks_for_the_audit_and_with_a_spike_it_is_in_the_weights() -> None:
    story = Story()
    story.found("canary_rise", step=100, asks="rollback")
    (one,) = triaged(story, documents={100: CLEAN})
    assert (one.name, one.suspect) == ("canary", "unknown")
    story.found("sustained_loss", step=110, asks="rollback", onset=98)
    canary, spike = triaged(story, documents={98: CLEAN, 100: CLEAN})
    assert {canary.suspect, spike.suspect} == {"state"}


def test_a_rebound_asks_what_the_resume_brought_back() -> None:
    story = Story()
    story.attempt = 2
    story.found("rebound", step=150, asks="alert", onset=101)
    lost = (Check("moments", "found", "s100-a1 holds 0 tensors of optimizer state", "state"), Check("step", "ok", "", "code"))
    (one,) = triaged(story, inventory={2: lost})
    assert (one.name, one.onset_step, one.suspect) == ("rebound", 101, "state")
    assert [check.name for check in one.checks] == ["moments", "step", "software-changes", "config-changes", "lr-log"]
    (one,) = triaged(story)
    assert outcomes(one)["inventory"] == "unknown"


def test_a_rank_that_stands_apart_is_suspected_when_its_documents_are_clean() -> None:
    story = Story()
    story.found("rank_loss", step=60, asks="record", evidence={"ranks": [0]})
    (one,) = triaged(story, documents={60: CLEAN}, num_ranks=4)
    assert (one.name, one.suspect, one.evidence["ranks"]) == ("ranks-differ", "cluster", [0])
    assert one.action == "surefoot triage runs/mine --vendor 0"
    assert triaged(story, documents={60: POISONED}, num_ranks=4)[0].suspect == "data"


def test_two_ranks_that_differ_accuse_neither() -> None:
    story = Story()
    story.found("rank_loss", step=60, asks="record", evidence={"ranks": [0, 1]})
    (one,) = triaged(story, documents={60: CLEAN})
    assert (one.suspect, outcomes(one)["rank-figures"]) == ("unknown", "found")
    assert one.action == "surefoot replay runs/mine --from 59 --steps 1"


def test_plateau() -> None:
    story = Story()
    story.found("plateau", step=600, asks="record", onset=400)
    (one,) = triaged(story)
    assert (one.name, one.onset_step) == ("plateau", 400)


def test_a_step_that_somebody_asks_about() -> None:
    story = Story()
    story.found("outlier_loss", step=40)
    assert [one.name for one in triaged(story, asked=40)] == ["spike"]
    (one,) = triaged(story, asked=500, documents={500: POISONED})
    assert (one.name, one.onset_step, one.suspect) == ("asked", 500, "data")


def test_what_a_replay_found_takes_the_place_of_the_question() -> None:
    story = Story()
    story.found("nonfinite", step=40)
    named = Check("nonfinite-tensor", "found", "module blocks.0.attn", "state")
    (one,) = triaged(story, documents={40: CLEAN}, replayed={"nonfinite-tensor": named})
    assert (one.suspect, one.reason) == ("state", "nonfinite-tensor")
    assert "--name-nonfinite" not in one.action


def test_the_answer_has_the_keys_that_others_build_on() -> None:
    story = Story()
    story.found("outlier_loss", step=40)
    told = triaged(story)[0].as_json()
    assert set(told) >= {"name", "onset_step", "suspect", "checks", "evidence", "documents", "action"}
    assert all(set(check) == {"name", "outcome", "detail"} for check in told["checks"])
