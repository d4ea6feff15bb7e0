"""A poisonous document, from the spike to the rule: found from the step, left out, trained again without it, its like listed and caught.

The whole story by the public commands, over a mixture of three sources.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from surefoot.observe.ledger import read_ledger, verify_ledger
from surefoot.observe.metrics import read_steps

CONFIG = """
[run]
name = "run"
dir = "run"
[data]
path = "prepared"
tokenizer = "bytes"
seq_len = 32
heldout_fraction = 0.02
[[data.sources]]
name = "web"
files = ["web"]
weight = 2
[[data.sources]]
name = "code"
files = ["code"]
[[data.sources]]
name = "books"
files = ["books"]
[model]
num_layers = 1
d_model = 32
num_heads = 2
[train]
num_steps = 36
global_batch_size = 8
micro_batch_size = 4
eval_interval_steps = 0
eval_num_samples = 2
[optimizer]
lr = 5e-3
[schedule]
kind = "constant"
warmup_steps = 1
[checkpoint]
interval_steps = 4
num_slots = 8
keep_last = 99
prove = false
[launch]
threads_per_rank = 1
"""
POISON = "КУПИ СЕЙЧАС ДЁШЕВО 7777 {} ЖМИ СЮДА БЕЗ РЕГИСТРАЦИИ ВЫИГРАЙ ПРИЗ {} ТОЛЬКО СЕГОДНЯ СКИДКИ ДО НЕБЕС ЗВОНИ "
NUM_CLEAN = {"web": 700, "code": 250, "books": 250}
BAD, LIKE_IT = 100, (200, 300, 400)  # lines of the web


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of made-up words, each source from its own; among those of the web a poisonous one and three that are like it."""
    folder = tmp_path_factory.mktemp("poison")
    draw = random.Random(5)
    for source, count in NUM_CLEAN.items():
        words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 8))) for _ in range(90)]
        texts = [" ".join(draw.choices(words, k=draw.randint(8, 24))) for _ in range(count)]
        if source == "web":
            texts[BAD] = POISON.format("abc", "def") * 2
            for number, index in enumerate(LIKE_IT):
                texts[index] = POISON.format(number, number * 7)
        (folder / source).mkdir()
        lines = (json.dumps({"text": text}, ensure_ascii=False) for text in texts)
        (folder / source / "part.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "run.toml").write_text(CONFIG)
    return folder


def surefoot(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "surefoot.cli.main", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def answer(folder: Path, *arguments: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(surefoot(folder, *arguments, "--json"))
    return told


def rows_of(folder: Path, attempt: int) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in read_steps(folder / "run").to_pylist() if row["attempt"] == attempt}


def spike(rows: dict[int, dict[str, Any]]) -> int:
    """The step whose loss stands highest above that of the eight before it."""
    return max(range(9, len(rows) + 1), key=lambda step: rows[step]["loss"] / median(rows[step - back]["loss"] for back in range(1, 9)))


@pytest.mark.timeout(200)
def test_a_poisonous_document_is_found_left_out_and_its_like_are_caught(place: Path) -> None:
    surefoot(place, "train", "run.toml")
    before = rows_of(place, 1)
    step = spike(before)
    hits = answer(place, "data", "locate", "run", "--step", str(step), "--excerpt")["hits"]
    (poison,) = {hit["hash"] for hit in hits if "ЖМИ СЮДА" in hit["excerpt"]}
    (source,) = {hit["source"] for hit in hits if hit["hash"] == poison}
    assert source == "web"

    held = steps_that_hold(place, poison)
    assert step in held
    back_to = (held[0] - 2) // 4 * 4
    surefoot(place, "data", "block", "run", "--document", poison, "--reason", "advertising", "--evidence-step", str(step))
    printed = surefoot(place, "train", "run.toml", "--resume-from", str(back_to), "--cause", "poisoned from here on")

    after, num_clean = rows_of(place, 2), held[0] - 1 - back_to
    assert num_clean > 0
    assert f"verified {num_clean} step{'s' if num_clean > 1 else ''}: the same bits; what follows was recorded with samples" in printed
    same = ("loss", "grad_norm", "num_live_tokens", "next_sample")
    assert all(after[clean][name] == before[clean][name] for clean in range(back_to + 1, held[0]) for name in same)
    assert [changed for changed in after if after[changed]["num_live_tokens"] < before[changed]["num_live_tokens"]] == held
    assert after[step]["loss"] < before[step]["loss"]
    assert steps_that_hold(place, poison) == []
    entries = read_ledger(place / "run" / "ledger.jsonl")
    (taken,) = [entry for entry in entries if entry.event == "block.taken"]
    assert (taken.attempt, taken.step, taken.reason) == (2, back_to, "advertising")
    assert verify_ledger(place / "run" / "ledger.jsonl").ok

    proposed = answer(place, "data", "rules", "propose", "run", "--out", "rules.toml")
    assert sorted(sibling["record"] for sibling in proposed["siblings"]) == [line + 1 for line in LIKE_IT]
    (rule,) = [found for found in proposed["proposals"] if found["measured"]["siblings"] == len(LIKE_IT)]
    assert rule["measured"]["clean_share"] <= 0.001
    surefoot(place, "data", "rules", "accept", "rules.toml", "--rule", rule["id"])
    sources = [argument for source in NUM_CLEAN for argument in ("--source", f"{source}={source}")]
    surefoot(place, "data", "prepare", *sources, "--out", "cleaned", "--tokenizer", "bytes", "--rules", "rules.toml", "--workers", "1")
    rejected = {source: (place / "cleaned" / source / "rejects.jsonl").read_text().splitlines() for source in NUM_CLEAN}
    assert sorted(json.loads(line)["line"] for line in rejected["web"]) == [line + 1 for line in (BAD, *LIKE_IT)]
    assert not rejected["code"] + rejected["books"]


def steps_that_hold(folder: Path, document: str) -> list[int]:
    """The finished steps that trained on a token of it."""
    hits = answer(folder, "data", "locate", "run", "--document", document)["hits"]
    return sorted({hit["step"] for hit in hits if hit["seen"] and not hit["masked"]})
