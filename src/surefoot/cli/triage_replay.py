"""The replay that triage asks for, run and read: `surefoot replay` in a process of its own, as a person would type it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from surefoot.core.errors import SurefootError, error_from_json
from surefoot.heal.triage import Check, Symptom

LARGE_LOGIT: Final = 100.0
"""A head whose largest logit is beyond this looks at one token and nothing else: softmax of fp32 is 0 beside it from 104 on. Healthy models
stay far below; runs with growing logits diverge (arXiv 2309.14322)."""
_APART: Final = 4.0


def replay_for(symptoms: Sequence[Symptom], run_dir: Path) -> tuple[int | None, dict[str, Check]]:
    """(the symptom whose next command is a replay, what it found); (None, nothing) when none is. Raises what the replay ended with."""
    number = next((index for index, one in enumerate(symptoms) if one.action.startswith("surefoot replay ")), None)
    if number is None:
        return None, {}
    arguments = shlex.split(symptoms[number].action)[3:]
    command = [sys.executable, "-m", "surefoot.cli.main", "replay", str(run_dir), *arguments, "--json"]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        answer = json.loads(child.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        words = (child.stderr.strip().splitlines() or [""])[-1]
        raise SurefootError(f"the replay ended with {child.returncode}: {words}", where="triage --replay") from None
    if "error" in answer:
        raise error_from_json(answer)
    return number, checks_of(answer)


def checks_of(answer: Mapping[str, Any]) -> dict[str, Check]:
    """What a replay's answer says."""
    found = {}
    if answer.get("looked_for_nonfinite"):
        found["nonfinite-tensor"] = _nonfinite(answer)
    if answer.get("logits"):
        found["attention-head"] = _heads(answer["logits"])
    return found


def _nonfinite(answer: Mapping[str, Any]) -> Check:
    first = answer["first_nonfinite"]
    if first is None:
        return Check("nonfinite-tensor", "ok", "computed again, everything is finite: a fault that is over", "cluster")
    words = ", ".join(f"{name} {value}" for name, value in first.items() if value is not None)
    return Check("nonfinite-tensor", "found", words, "state")


def _heads(layers: Sequence[Mapping[str, Any]]) -> Check:
    """A head stands out when its logits saturate the softmax, and most other heads are far from it."""
    heads = [
        (value if value is not None else float("inf"), layer["module"], head, sample)
        for layer in layers
        for head, (value, sample) in enumerate(zip(layer["logits"], layer["samples"], strict=True))
    ]
    usual = median(value for value, *_ in heads)
    largest, module, head, sample = max(heads, key=lambda one: one[0])
    words = f"head {head} of {module} has a logit of {largest:.4g} in sample {sample}; the median head has {usual:.4g}"
    is_large = largest > LARGE_LOGIT and largest > _APART * usual
    return Check("attention-head", "found" if is_large else "ok", words, "state")
