"""What a replay found, over all ranks, and in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_DIRECTIONS = ("forward output", "backward gradient", "parameter gradient")
_NAMES = {"grad_norm": "gradient norm", "next_sample": "next sample", "num_live_tokens": "number of live tokens"}


def first_nonfinite(seen: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Over ranks: of the earliest step, and there forwards come before backwards, and both before gradients, which reach other ranks."""
    found = [rank["first_nonfinite"] for rank in seen if rank["first_nonfinite"]]

    def order(one: Mapping[str, Any]) -> tuple[int, int, bool, int]:
        return int(one["step"]), _DIRECTIONS.index(one["direction"]), one["atom"] is None, int(one["rank"])

    return min(found, key=order, default=None)


def heads_by_layer(seen: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Over ranks, the largest of each head; `samples` are those in which they are."""
    found: dict[tuple[int, str], dict[int, list[Any]]] = {}
    for rank in seen:
        for layer in rank["logits"]:
            heads = found.setdefault((int(layer["step"]), str(layer["module"])), {})
            for head, value in enumerate(layer["heads"], start=int(layer["first_head"])):
                heads[head] = max(heads.get(head, value), value, key=_largest)
    return [
        {
            "step": step,
            "module": module,
            "logits": [heads[head][0] for head in sorted(heads)],
            "samples": [heads[head][1] for head in sorted(heads)],
        }
        for (step, module), heads in sorted(found.items(), key=lambda item: item[0][0])
    ]


def lines_of(answer: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    start = answer["start"]["checkpoint"] or "the start of the run"
    first, last = answer["from"] + 1, answer["from"] + answer["steps"]
    for one in answer["interventions"]:
        verb = "left out" if one["left_out"] else "as decided"
        yield f"  {verb}: entry {one['seq']}, {one['event']} at step {one['step']} {one['rule']}: {one['reason']}".rstrip(": ")
    for step in answer["did_not_recur"]:
        yield f"  step {step} was skipped as it was then; what it was skipped for did not come again: a fault that is over"
    yield from (f"note: {note}" for note in answer["notes"])
    if answer["not_recorded"]:
        yield f"note: {len(answer['not_recorded'])} steps were not recorded, the first is {answer['not_recorded'][0]}"
    if answer["looked_for_nonfinite"]:
        yield _nonfinite(answer["first_nonfinite"], first, last)
    for layer in answer["logits"]:
        heads = ", ".join(f"{value:.3g}" if value is not None else "not finite" for value in layer["logits"])
        yield f"step {layer['step']}  {layer['module']}  largest logits by head: {heads}"
    how = f"steps {answer['start']['step'] + 1} to {last}, from {start}"
    difference = answer["first_difference"]
    if difference is None:
        yield f"the same bits: {answer['num_compared']} {how}"
    else:
        many = f"{answer['num_differing']} of {answer['num_compared']} {how}"
        yield f"differs at step {difference['step']}, and in {many}: {_words(difference)}"


def _words(difference: Mapping[str, Any]) -> str:
    name = _NAMES.get(difference["what"], difference["what"])
    text = f"{name} was {difference['recorded']!r} in attempt {difference['attempt']}, is {difference['replayed']!r}"
    relative = difference["relative"]
    return text + (f" (relative difference {relative:.2g})" if relative is not None else "")


def _nonfinite(found: Mapping[str, Any] | None, first: int, last: int) -> str:
    if found is None:
        return f"every tensor of steps {first} to {last} is finite"
    atom = f"atom {found['atom']}, samples {', '.join(map(str, found['samples']))}" if found["atom"] is not None else "summed over ranks"
    text = (
        f"the first that is not finite: step {found['step']}, rank {found['rank']}, {atom}: {found['direction']} of "
        f"{found['module'] or 'the model'} ({found['tensor']}), {found['dtype']} {found['shape']}, "
        f"{found['num_nan']} nan, {found['num_inf']} inf"
    )
    if found["inputs_finite"] is None:
        return text
    inputs, parameters = ("finite" if found[name] else "not finite" for name in ("inputs_finite", "parameters_finite"))
    return f"{text}; its inputs are {inputs}, its parameters {parameters}"


def _largest(item: Sequence[Any]) -> float:
    """What is not a number is the largest."""
    return float("inf") if item[0] is None else float(item[0])
