"""The checks of triage, in the order in which a person would make them, and the next command. Pure: what they need is handed to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from surefoot.core.events import Event
from surefoot.core.records import Asks, LedgerEntry
from surefoot.heal.alert_kinds import CORRUPTION_RULES
from surefoot.heal.triage import SUSPECT_OF_CAUSE, Check, Diagnosed, Signs, Suspect, Symptom, Told, rule_of, step_of

_BEFORE_STEPS: Final = 500
"""How far back a change is looked for: an optimizer forgets the past in a thousand steps, and most of it in half of them."""
_MEDIAN_STEPS: Final = 20
_REASONS: Final = 3
_EARLY_STEPS: Final = 20
"""Up to here nothing was learnt yet: any document surprises, and of what can be wrong with a run that begins, its rate is the commonest."""
_CAUGHT_IN: Final[Mapping[str, Suspect]] = {"corruption": "cluster", "schedule": "code", "ill-weights": "state", "unrepeatable": "code"}
_OUT_OF_MEMORY: Final = ("out of memory", "outofmemory", "oom")


@dataclass(frozen=True, slots=True)
class DocumentLook:
    """The documents of a step, those that stand out most first, or why nobody could look (`missing`). `limit` is the score from which on
    one stands out: below it, the oddest of so many documents is as odd as chance makes it. `where` says which steps or samples were looked
    at."""

    documents: tuple[Mapping[str, Any], ...] = ()
    num_documents: int = 0
    where: str = ""
    limit: float = 0.0
    missing: str = ""

    @property
    def standing_out(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(document for document in self.documents if float(document.get("score", 0.0)) >= self.limit)


@dataclass(frozen=True, slots=True)
class Facts:
    """What triage knows beside the ledger. `run` as it is typed; `rows` are those of the metrics store on the run's present line, by step;
    `documents` by step; `inventory` are the checks of what a resume brought back, by attempt.

    `clean_step` is the oldest step that can be gone back to, None where there is no clean checkpoint; `is_stopped` says that the run stands
    until a person resumes it; without `has_data` it is a loop of somebody's own, which cannot be replayed.
    """

    run: str
    entries: tuple[LedgerEntry, ...] = ()
    rows: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    documents: Mapping[int, DocumentLook] = field(default_factory=dict)
    inventory: Mapping[int, tuple[Check, ...]] = field(default_factory=dict)
    replayed: Mapping[str, Check] = field(default_factory=dict)
    num_ranks: int = 1
    audit_interval_steps: int = 0
    step: int = 0
    clean_step: int | None = 0
    is_stopped: bool = False
    ledger_fault: str = ""
    has_data: bool = True


def symptom(signs: Signs, told: Told, facts: Facts) -> Symptom:
    """What `signs` mean, after all checks that this symptom asks for."""
    diagnosed = told.about(signs)
    checks = tuple(_checks(signs, facts, diagnosed))
    suspect, reason = _suspect(signs, checks, diagnosed, told)
    look = facts.documents.get(signs.gravest_step, DocumentLook())
    documents = look.standing_out if suspect == "data" and not look.missing else ()
    return Symptom(
        name=signs.name,
        onset_step=signs.onset_step,
        suspect=suspect,
        checks=checks,
        evidence=_evidence(signs, facts, diagnosed),
        action=_action(signs, suspect, checks, documents, told, facts),
        documents=documents,
        reason=reason,
    )


def _checks(signs: Signs, facts: Facts, diagnosed: Diagnosed | None) -> list[Check]:
    if signs.name == "rebound":
        attempt = signs.entries[-1].attempt if signs.entries else 0
        unknown = Check("inventory", "unknown", "the checkpoint that the run went on from cannot be read any more")
        return [*facts.inventory.get(attempt, (unknown,)), software(signs, facts), configuration(signs, facts), lr_log(signs, facts)]
    if signs.name == "ranks-differ":
        found = [documents(signs, facts, diagnosed), configuration(signs, facts), software(signs, facts)]
        return [*found, audit(signs, facts), ranks(signs, facts), losses(signs, facts)]
    if signs.name == "corruption":
        return [software(signs, facts), audit(signs, facts), ranks(signs, facts), losses(signs, facts)]
    if signs.name == "ledger-cut":
        return [Check("ledger", "found", facts.ledger_fault)]
    if signs.name == "unrepeatable":
        return [configuration(signs, facts), software(signs, facts)]
    if signs.name == "schedule":
        return [stages(signs, facts), configuration(signs, facts), lr_log(signs, facts)]
    found = [documents(signs, facts, diagnosed), stages(signs, facts), configuration(signs, facts), software(signs, facts)]
    found += [audit(signs, facts), lr_log(signs, facts), precision(signs, facts)]
    by_replay = nonfinite_tensor(facts) if signs.name in ("nan", "occasional-nan") else attention_heads(facts)
    return [*found, by_replay, ranks(signs, facts), losses(signs, facts)]


def documents(signs: Signs, facts: Facts, diagnosed: Diagnosed | None = None) -> Check:
    look = facts.documents.get(signs.gravest_step, DocumentLook(missing="nobody has looked at the documents of this step"))
    if look.missing:
        return Check("documents", "unknown", look.missing, "data")
    if not (standing := look.standing_out):
        return Check("documents", "ok", f"none of the {look.num_documents} documents of {look.where} stands out", "data")
    first = standing[0]
    why = "; ".join(map(str, first.get("reasons", ())[:_REASONS]))
    words = f"{len(standing)} of the {look.num_documents} documents of {look.where} stand out, most {first.get('document')}: {why}"
    if diagnosed is not None and (diagnosed.accused or (diagnosed.cause in SUSPECT_OF_CAUSE and diagnosed.cause != "data")):
        return Check("documents", "ok", f"{words}; but repetition found that the data is not to blame", "data")
    if signs.gravest_step <= _EARLY_STEPS and (diagnosed is None or diagnosed.cause != "data"):
        return Check("documents", "unknown", f"{words}; but nothing was learnt yet, so that no document can be told from others", "data")
    return Check("documents", "found", words, "data")


def stages(signs: Signs, facts: Facts) -> Check:
    """A stage, a mixture, a blocklist, a lost shard: what changes the loss without being wrong."""
    names = (Event.STAGE_CHANGED, Event.DATA_ACCEPTED, Event.BLOCK_TAKEN, Event.SHARD_QUARANTINED)
    return _changes("data-changes", _before(signs, facts, names), of="data", none="neither stage nor blocklist nor data changed")


def configuration(signs: Signs, facts: Facts) -> Check:
    names = (Event.CONFIG_ACCEPTED, Event.RUN_BRANCHED)
    return _changes("config-changes", _before(signs, facts, names), of="code", none="no setting was changed")


def software(signs: Signs, facts: Facts) -> Check:
    found = _before(signs, facts, (Event.ENVIRONMENT_CHANGED,))
    return _changes("software-changes", found, of="code", none="versions, kernels and devices are as they were")


def audit(signs: Signs, facts: Facts) -> Check:
    """Bits that several ranks must hold alike, and atoms computed by a neighbour."""
    name = "replica-audit"
    found = [entry for entry in _near(signs, facts, Event.ANOMALY_FOUND) if rule_of(entry) in CORRUPTION_RULES]
    found += _near(signs, facts, Event.REPLAY_DIFFERED)
    if found:
        return Check(name, "found", found[-1].reason, "cluster")
    if facts.num_ranks < 2:
        return Check(name, "unknown", "one rank has nobody to compare itself with", "cluster")
    if not facts.audit_interval_steps:
        return Check(name, "unknown", "audits are off: monitor.audit_interval_steps = 0", "cluster")
    due = -(-max(1, signs.onset_step) // facts.audit_interval_steps) * facts.audit_interval_steps
    if facts.step < due:
        return Check(name, "unknown", f"the first audit after it is due at step {due}", "cluster")
    return Check(name, "ok", f"audits every {facts.audit_interval_steps} steps, that of step {due} too, found nothing", "cluster")


def lr_log(signs: Signs, facts: Facts) -> Check:
    found = [entry for entry in _near(signs, facts, Event.ANOMALY_FOUND) if rule_of(entry) in ("lr_jump", "lr_not_applied")]
    if found:
        return Check("lr-log", "found", found[0].reason, "code")
    now, before = (_number(facts.rows.get(step, {}), "lr") for step in (signs.onset_step, signs.onset_step - 1))
    if now is None:
        return Check("lr-log", "unknown", f"the metrics have no learning rate of step {signs.onset_step}", "code")
    was = f", {before:.4g} the step before" if before is not None else ""
    if _is_of_rate(signs):
        return Check("lr-log", "found", f"{now:.4g} at step {signs.onset_step}{was}: ill before anything was learnt", "code")
    return Check("lr-log", "ok", f"{now:.4g} at step {signs.onset_step}{was}; no rule on it fired", "code")


def precision(signs: Signs, facts: Facts) -> Check:
    """A run that ran out of memory is often gone on with in another precision, and forgotten."""
    name = "precision-fallback"
    short = [entry for entry in facts.entries if entry.event in (Event.RANK_LOST, Event.RESTART_DECIDED) and _is_out_of_memory(entry)]
    short = [entry for entry in short if entry.step <= signs.onset_step]
    if not short:
        return Check(name, "ok", "no rank ran out of memory before", "code")
    later = [entry for entry in facts.entries if entry.seq > short[0].seq and entry.step <= signs.onset_step]
    changes = [entry for entry in later if entry.event in (Event.CONFIG_ACCEPTED, Event.ENVIRONMENT_CHANGED) and _is_of_numbers(entry)]
    if changes:
        what = f"after running out of memory at step {short[0].step}: {_words_of(changes[-1])}"
        return Check(name, "found", what, "code")
    return Check(name, "ok", f"a rank ran out of memory at step {short[0].step}, and precision and kernels stayed as they were", "code")


def attention_heads(facts: Facts) -> Check:
    unknown = Check("attention-head", "unknown", f"only a replay sees the logits of each head{_unless_ours(facts)}", "state")
    return facts.replayed.get("attention-head", unknown)


def nonfinite_tensor(facts: Facts) -> Check:
    words = f"only a replay names the first tensor that is not finite{_unless_ours(facts)}"
    return facts.replayed.get("nonfinite-tensor", Check("nonfinite-tensor", "unknown", words, "state"))


def _unless_ours(facts: Facts) -> str:
    return "" if facts.has_data else ", and a loop of your own cannot be replayed"


def ranks(signs: Signs, facts: Facts) -> Check:
    """What the steps that were computed again, and the figures by rank, say about single ranks."""
    if facts.num_ranks < 2:
        return Check("rank-figures", "unknown", "one rank has no other beside it", "cluster")
    rules = ("rank_norm", "rank_loss", "ranks_differ")
    found = [entry for entry in _near(signs, facts, Event.ANOMALY_FOUND) if rule_of(entry) in rules]
    found += [entry for entry in _near(signs, facts, Event.STEP_RECHECKED) if entry.fields.get("cause") == "hardware"]
    if found:
        return Check("rank-figures", "found", found[0].reason, "cluster")
    return Check("rank-figures", "ok", "no rank's loss or gradient stood apart from the others'", "cluster")


def losses(signs: Signs, facts: Facts) -> Check:
    lost = _before(signs, facts, (Event.RANK_LOST, Event.NURSERY_LOST))
    return _changes("lost-ranks", lost, of="unknown", none="no rank was lost")


def _suspect(signs: Signs, checks: Sequence[Check], diagnosed: Diagnosed | None, told: Told) -> tuple[Suspect, str]:
    """What replays found out comes first, then what kind of symptom it is, then the first check that found something, in its order."""
    rate = next((check for check in checks if check.name == "lr-log" and check.outcome == "found"), None)
    if diagnosed is not None and diagnosed.cause == "state" and _is_of_rate(signs) and rate is not None:
        return "code", f"the learning rate, {rate.detail}; by repetition: {diagnosed.reason}"
    if diagnosed is not None and diagnosed.accused:
        return "cluster", f"ranks {', '.join(map(str, diagnosed.accused))}; by repetition: {diagnosed.reason}"
    if diagnosed is not None and diagnosed.cause in SUSPECT_OF_CAUSE:
        return SUSPECT_OF_CAUSE[diagnosed.cause], f"diagnosed by repetition: {diagnosed.reason}"
    if signs.name == "ledger-cut":
        return "unknown", "the checkpoints know of entries that the ledger has not: what else is said here may lack the end of the story"
    if signs.name in _CAUGHT_IN:
        return _CAUGHT_IN[signs.name], signs.entries[0].reason if signs.entries else ""
    # That several ranks stand apart (with two, both always do) accuses nobody.
    accused = [check for check in checks if check.outcome == "found" and check.of != "unknown"]
    first = next((check for check in accused if check.name != "rank-figures" or len(_ranks_apart(signs, diagnosed)) == 1), None)
    if first is not None:
        return first.of, first.name
    if accused:
        return "unknown", f"ranks {', '.join(map(str, signs.ranks))} stand apart from each other, which names neither"
    others = {one.name for one in told.signs if one.onset_step <= signs.last_step and one.last_step >= signs.onset_step}
    if {"spike", "canary"} <= others:
        return "state", "the loss and the canary rose together, so it is in the weights"
    if "rebound" in others:
        return "state", "it began with a resume"
    if signs.onset_step == 1:
        return "unknown", "no update had been made yet: a threshold bound by hand, or the weights that it began with"
    unknown = [check.name for check in checks if check.outcome == "unknown"]
    return "unknown", f"nothing found; not looked at: {', '.join(unknown)}" if unknown else "nothing found by any check"


def _ranks_apart(signs: Signs, diagnosed: Diagnosed | None) -> tuple[int, ...]:
    return (diagnosed.ranks if diagnosed is not None else ()) or signs.ranks


def _action(
    signs: Signs,
    suspect: Suspect,
    checks: Sequence[Check],
    found: Sequence[Mapping[str, Any]],
    told: Told,
    facts: Facts,
) -> str:
    """The next command. Where nobody is to blame yet, it is the one that makes the next check."""
    run, diagnosed = facts.run, told.about(signs)
    if signs.name == "ledger-cut":
        return f"surefoot ledger {run} --verify"
    if suspect == "data" and found:
        document = str(found[0].get("hash", ""))[:12]
        return f"surefoot data block {run} --document {document} --evidence-step {signs.gravest_step} --reason {signs.name}"
    if suspect == "cluster" and diagnosed is not None and diagnosed.accused:
        return " && ".join(f"surefoot triage {run} --vendor {rank}" for rank in diagnosed.accused)
    if suspect == "cluster" and (named := _ranks_apart(signs, diagnosed)):
        return f"surefoot triage {run} --vendor {named[0]}"
    if (healed := told.healed_by(signs)) is not None:
        return f"surefoot triage {run} --incident {healed.episode}"
    if suspect == "data":
        return _look_at_data(signs, diagnosed, facts)
    if suspect == "cluster" or signs.name in ("ranks-differ", "unrepeatable"):
        return _replay(signs, facts)
    if signs.name == "rebound":
        return f"surefoot checkpoint verify {run}"
    if suspect in ("code", "state"):
        return _way_back(signs, checks, suspect, facts)
    names = {check.name for check in checks if check.outcome == "unknown"}
    if "nonfinite-tensor" in names:
        return _replay(signs, facts, "--name-nonfinite")
    if "attention-head" in names:
        return _replay(signs, facts, "--logits")
    return f"surefoot data report {run} --window {max(1, signs.onset_step)}" if facts.has_data else _ledger(facts)


def _look_at_data(signs: Signs, diagnosed: Diagnosed | None, facts: Facts) -> str:
    """No document stands out, so that none is blocked: a person reads what the step took."""
    if diagnosed is not None and diagnosed.episode:
        return f"surefoot triage {facts.run} --incident {diagnosed.episode}"
    return f"surefoot data locate {facts.run} --step {signs.gravest_step} --excerpt" if facts.has_data else _ledger(facts)


def _replay(signs: Signs, facts: Facts, *options: str) -> str:
    if not facts.has_data:
        return _ledger(facts)
    return " ".join(("surefoot replay", facts.run, f"--from {max(1, signs.onset_step) - 1} --steps 1", *options))


def _ledger(facts: Facts) -> str:
    """A loop of somebody's own is neither replayed nor has it data of ours: what is left is what was said."""
    return f"surefoot ledger {facts.run} --tail 50"


def _way_back(signs: Signs, checks: Sequence[Check], suspect: Suspect, facts: Facts) -> str:
    """Back to before it began; where no clean checkpoint is that old, the run starts over, with another rate if that is what it was."""
    to = max(0, signs.onset_step - 1)
    if facts.clean_step is not None and facts.clean_step <= to:
        return f"surefoot rollback {facts.run} --to {to} --reason {signs.name}"
    released = f'surefoot resume {facts.run} --cause "{signs.name}" && ' if facts.is_stopped else ""
    if facts.has_data and suspect == "code" and any(check.name == "lr-log" and check.outcome == "found" for check in checks):
        return f"{released}surefoot train {facts.run} optimizer.lr=LR --accept-changes optimizer"
    return f"surefoot checkpoint list {facts.run}"


def _is_of_rate(signs: Signs) -> bool:
    """Whether it is ill before anything was learnt, and after the first update: before that no rate has done anything."""
    is_grave = any(entry.fields.get("asks") != Asks.RECORD for entry in signs.entries)
    is_of_steps = signs.name in ("nan", "occasional-nan", "ill-weights", "divergence", "spike")
    return is_grave and is_of_steps and 1 < signs.onset_step <= _EARLY_STEPS


def _evidence(signs: Signs, facts: Facts, diagnosed: Diagnosed | None) -> dict[str, Any]:
    row = facts.rows.get(signs.onset_step, {})
    steps = range(signs.onset_step - _MEDIAN_STEPS, signs.onset_step)
    before = [value for step in steps if (value := _number(facts.rows.get(step, {}), "loss")) is not None]
    told: dict[str, Any] = {"last_step": signs.last_step, "rules": list(signs.rules), "ranks": list(signs.ranks)}
    told["loss"], told["grad_norm"] = _number(row, "loss"), _number(row, "grad_norm")
    told |= {name: row[name] for name in ("rank_losses", "rank_norms") if row.get(name)}
    told["loss_before"] = sorted(before)[len(before) // 2] if before else None
    told["findings"] = [
        {"seq": entry.seq, "step": step_of(entry), "rule": rule_of(entry), "reason": entry.reason, "action": entry.fields.get("action")}
        for entry in signs.entries[:20]
    ]
    if diagnosed is not None:
        told["diagnosed"] = {"cause": diagnosed.cause, "reason": diagnosed.reason, "episode": diagnosed.episode or None}
        told["diagnosed"] |= {"ranks": list(diagnosed.ranks), "samples": list(diagnosed.samples or ()) or None}
    return told


def _before(signs: Signs, facts: Facts, names: Sequence[Event]) -> list[LedgerEntry]:
    """Entries of these events at most `_BEFORE_STEPS` before the onset."""
    wanted = {name.value for name in names}
    until = max((entry.seq for entry in signs.entries), default=None)
    return [
        entry
        for entry in facts.entries
        if entry.event in wanted
        and signs.onset_step - _BEFORE_STEPS <= entry.step <= signs.onset_step
        and (until is None or entry.seq < until)
    ]


def _near(signs: Signs, facts: Facts, event: Event) -> list[LedgerEntry]:
    """What was found in the same steps, by whatever rule; corruption is found at the audit after it."""
    late = max(facts.audit_interval_steps, 1)
    return [entry for entry in facts.entries if entry.event == event and signs.onset_step <= step_of(entry) <= signs.last_step + late]


def _changes(name: str, found: Sequence[LedgerEntry], *, of: Suspect, none: str) -> Check:
    if not found:
        return Check(name, "ok", f"{none} in the {_BEFORE_STEPS} steps before", of)
    more = f"; {len(found) - 1} more" if len(found) > 1 else ""
    return Check(name, "found", f"at step {found[-1].step}: {_words_of(found[-1])}{more}", of)


def _words_of(entry: LedgerEntry) -> str:
    changed = entry.fields.get("changed")
    if isinstance(changed, Mapping):
        return ", ".join(f"{name} was {pair[0]}, is {pair[1]}" for name, pair in changed.items() if isinstance(pair, Sequence))
    return entry.reason or str(entry.fields.get("section") or entry.event)


def _is_out_of_memory(entry: LedgerEntry) -> bool:
    text = f"{entry.rule} {entry.reason}".lower()
    return any(words in text for words in _OUT_OF_MEMORY)


def _is_of_numbers(entry: LedgerEntry) -> bool:
    text = f"{entry.reason} {entry.fields.get('changed', '')}"
    return any(word in text for word in ("precision", "dtype", "tf32", "kernel", "numerics"))


def _number(row: Mapping[str, Any], name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) else None
