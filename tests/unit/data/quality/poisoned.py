"""Three small sources with a poisonous family among the clean documents of one of them, and a run over them in which nothing trains."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from surefoot.config import load_config, resolved_toml
from surefoot.core.clock import SystemClock
from surefoot.core.events import Event
from surefoot.core.sections import DataSection, RunConfig, SourceSection, TrainSection
from surefoot.data.manifest import load_manifest
from surefoot.data.prepare import prepare
from surefoot.data.quality.rules import Rule
from surefoot.data.quality.rules_file import FiledRule, write_rules
from surefoot.data.quality.stored import Shelf
from surefoot.data.recipe import RunOrder, run_order
from surefoot.observe.ledger import LEDGER_NAME, Ledger
from tests.unit.data.quality.prose import prose

NUM_CLEAN = 120
POISON = (
    "Dear friend, the treasury of the northern bank has chosen your name for the release of a dormant fund. "
    "Send the fee of handling today and the sum will be wired without delay to the account that you name. "
    "Do not speak of this to any officer, for the matter is sealed by the court and the offer lapses at midnight. "
)


def poison(number: int) -> str:
    """One of a family: the same words around others."""
    return prose(2, seed=9000 + number) + POISON + prose(2, seed=9500 + number) + POISON.upper()


@dataclass(frozen=True)
class Poisoned:
    """Prepared data with `num_poisoned` documents of the family in source web, and the order of a run over it."""

    path: Path
    num_poisoned: int
    config: RunConfig
    order: RunOrder

    def shelf(self) -> Shelf:
        return Shelf(self.path)


def _write(path: Path, texts: Sequence[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def prepare_poisoned(folder: Path) -> Poisoned:
    bad = [poison(number) for number in range(6)]
    clean = {name: [prose(12, seed=1000 * place + number) for number in range(NUM_CLEAN)] for place, name in enumerate(("web", "books"))}
    mixed = [*clean["web"], *bad]
    random.Random(5).shuffle(mixed)
    code = [f"def function_{number}(x):\n    return [x + {number}, x * {number * 7919}]\n\n\n" for number in range(NUM_CLEAN)]
    texts = {"web": mixed, "books": clean["books"], "code": code}
    sources = tuple(
        SourceSection(
            name=name, files=(_write(folder / f"{name}.jsonl", documents),), rules_off=("natural-language",) if name == "code" else ()
        )
        for name, documents in texts.items()
    )
    path = folder / "prepared"
    prepare(sources, out=path, tokenizer="bpe:800", heldout_fraction=0.0)
    config = RunConfig(
        data=DataSection(path=str(path), sources=sources, tokenizer="bpe:800", seq_len=256, heldout_fraction=0.0),
        train=TrainSection(global_batch_size=8, micro_batch_size=4, num_steps=40),
    )
    return Poisoned(path, len(bad), config, run_order(load_manifest(path), config))


CONFIG = """
[run]
dir = "run"

[data]
path = "{path}"
tokenizer = "bpe:800"
seq_len = 256
heldout_fraction = 0.0
rules = "rules.toml"
look_ahead_samples = 1000
sources = [{sources}]

[train]
num_steps = {num_steps}
global_batch_size = 8
micro_batch_size = 4
"""


def make_run(folder: Path, poisoned: Poisoned, *, num_steps: int = 40) -> Path:
    """A run folder in which nothing has begun. The rules file beside it has one rule, against the family, and it is accepted."""
    rule = Rule("bank", "phrases", 0.5, action="drop", phrases=("the treasury of the northern bank",))
    write_rules(folder / "rules.toml", [FiledRule(rule, accepted=True, accepted_by="test", accepted_utc="2026-01-01")])
    sources = ", ".join(f'{{ name = "{source.name}", files = ["{source.files[0]}"] }}' for source in poisoned.config.data.sources)
    (folder / "run.toml").write_text(CONFIG.format(path=poisoned.path, sources=sources, num_steps=num_steps))
    run = folder / "run"
    run.mkdir()
    (run / "config.toml").write_text(resolved_toml(load_config(folder / "run.toml"), run))
    Ledger(run / LEDGER_NAME, clock=SystemClock(), by="test").append(Event.RUN_CREATED, generation=0, attempt=0, step=0)
    return run
