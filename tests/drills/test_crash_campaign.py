"""The second promise on one machine: kill -9 of anything at any step, and the run ends with the bits of an undisturbed one."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from surefoot.core.records import LedgerEntry
from surefoot.observe.ledger import manifest_positions, read_ledger, verify_ledger
from surefoot.observe.live import read_live

HERE = Path(__file__).parent
INTERVAL_STEPS = 10
NUM_MICRO_STEPS = 2
CONFIG = """
[run]
name = "{name}"
dir = "{name}"
seed = {seed}
[data]
path = "{data}"
tokenizer = "bytes"
seq_len = 64
[[data.sources]]
name = "text"
files = ["text"]
[model]
factory = "recording_model:build"
num_layers = 2
d_model = 64
num_heads = 2
[train]
num_steps = {num_steps}
global_batch_size = 16
micro_batch_size = 4
eval_interval_steps = 25
eval_num_samples = 8
[schedule]
warmup_steps = 5
[parallel]
dp_replicate = 2
[checkpoint]
prove = false
interval_steps = 10
[monitor]
audit_interval_steps = 0  # an audit is a forward too, and what forwards see is counted
[observe]
status_interval_s = 0.1
[launch]
max_restarts = 100
restart_wait_s = 0.1
threads_per_rank = 1
"""


@dataclass
class Run:
    folder: Path
    name: str
    num_steps: int
    seed: int = 77
    data: str = "prepared"
    process: subprocess.Popen[bytes] | None = None
    output: Path = field(init=False)

    def __post_init__(self) -> None:
        self.output = self.folder / f"{self.name}.out"
        self.config.write_text(CONFIG.format(name=self.name, num_steps=self.num_steps, seed=self.seed, data=self.data))

    @property
    def config(self) -> Path:
        return self.folder / f"{self.name}.toml"

    @property
    def dir(self) -> Path:
        return self.folder / self.name

    def start(self) -> None:
        path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH", ""))))
        with self.output.open("ab") as output:
            command = [sys.executable, "-m", "surefoot.cli.main", "train", str(self.config)]
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "PYTHONPATH": path})

    def finish(self, *, limit_s: float) -> None:
        assert self.process is not None
        assert self.process.wait(timeout=limit_s) == 0, self.output.read_text()[-3000:]

    def entries(self) -> list[LedgerEntry]:
        return read_ledger(self.dir / "ledger.jsonl")

    def commits(self) -> list[LedgerEntry]:
        return [entry for entry in self.entries() if entry.event in ("checkpoint.committed", "checkpoint.adopted")]

    def digest(self) -> str:
        finished = [entry for entry in self.entries() if entry.event == "run.finished"]  # twice when killed while it says so
        return str(finished[-1].fields["state_digest"])

    def is_over(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None

    def wait_for(self, ready: Callable[[], bool], *, what: str, limit_s: float = 100.0) -> None:
        deadline_s = time.monotonic() + limit_s
        while not ready():
            assert not self.is_over(), f"it ended before {what}: {self.output.read_text()[-3000:]}"
            assert time.monotonic() < deadline_s, f"no {what} within {limit_s} s: {self.output.read_text()[-3000:]}"
            time.sleep(0.01)

    def consumed(self) -> dict[int, set[tuple[str, ...]]]:
        """step -> what each execution of it consumed, over all ranks in the order of samples. One element when all agree."""
        resumed_at = {entry.generation: entry.step for entry in self.entries() if entry.event == "attempt.started"}
        steps: dict[int, set[tuple[str, ...]]] = defaultdict(set)
        for generation, first in resumed_at.items():
            ranks = [(self.dir / "consumed" / f"g{generation}-rank{rank}.log").read_text().splitlines() for rank in (0, 1)]
            forwards = list(zip(*ranks, strict=False))
            for index in range(len(forwards) // NUM_MICRO_STEPS):
                part = forwards[index * NUM_MICRO_STEPS : (index + 1) * NUM_MICRO_STEPS]
                steps[first + index + 1].add(tuple(row for atoms in part for atom in atoms for row in atom.split()))
        return dict(steps)


def kill_rank(run: Run, draw: random.Random) -> None:
    os.kill(draw.choice(rank_pids(run)), signal.SIGKILL)


def kill_both_ranks(run: Run, draw: random.Random) -> None:
    for pid in rank_pids(run):
        os.kill(pid, signal.SIGKILL)


def kill_nursery(run: Run, draw: random.Random) -> None:
    started = [entry for entry in run.entries() if entry.event == "generation.started"]
    os.kill(int(str(started[-1].fields["nursery_pid"])), signal.SIGKILL)


def kill_agent(run: Run, draw: random.Random) -> None:
    assert run.process is not None
    run.process.kill()
    run.process.wait(timeout=30)
    run.start()


def kill_uploader(run: Run, draw: random.Random) -> None:
    assert run.process is not None
    children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()
    for pid in children:
        if b"surefoot.cli.uploader" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(int(pid), signal.SIGKILL)


KILLS = (kill_rank, kill_both_ranks, kill_nursery, kill_agent, kill_uploader)


def rank_pids(run: Run) -> list[int]:
    live = read_live(run.dir)
    assert live is not None
    return [rank.pid for rank in live.ranks]


def is_training(run: Run) -> bool:
    """Ranks of the newest generation are past their restore, and live.json tells their pids."""
    live, entries = read_live(run.dir), run.entries()
    started = [entry.generation for entry in entries if entry.event == "attempt.started"]
    return bool(live and started and live.generation == started[-1] and len(live.ranks) == 2 and all(rank.pid for rank in live.ranks))


def check_ledger(run: Run) -> None:
    check = verify_ledger(run.dir / "ledger.jsonl", manifests=manifest_positions(run.dir))
    assert check.ok, check


def crash(run: Run, kinds: Sequence[Callable[[Run, random.Random], None]], draw: random.Random) -> int:
    """Kill in the given order, each after a new commit and a random further while. Returns how many kills hit."""
    hits = 0
    run.start()
    for kind in kinds:
        num_commits = len(run.commits())
        run.wait_for(lambda n=num_commits: len(run.commits()) > n and is_training(run), what=f"commit before {kind.__name__}")  # type: ignore[misc]
        time.sleep(draw.uniform(0.0, 0.3))
        if run.is_over():
            break
        print(f"{kind.__name__} after {run.commits()[-1].fields['id']}")
        kind(run, draw)
        hits += 1
        check_ledger(run)
    run.finish(limit_s=200)
    return hits


def run_campaign(folder: Path, *, kinds: Sequence[Callable[[Run, random.Random], None]], num_steps: int) -> None:
    seed = int(os.environ.get("CAMPAIGN_SEED", random.SystemRandom().randrange(1_000_000)))
    draw = random.Random(seed)
    print(f"CAMPAIGN_SEED={seed}")
    write_text(folder)

    undisturbed = Run(folder, "undisturbed", num_steps)
    undisturbed.start()
    undisturbed.finish(limit_s=300)
    disturbed = Run(folder, "disturbed", num_steps)
    hits = crash(disturbed, draw.sample(kinds, len(kinds)), draw)

    assert hits == len(kinds), "the run ended before all kills: give it more steps"
    assert disturbed.digest() == undisturbed.digest()
    check_ledger(disturbed)
    expected, got = undisturbed.consumed(), disturbed.consumed()
    assert sorted(got) == sorted(expected) == list(range(1, num_steps + 1))
    assert got == expected, "a step consumed other samples, or two executions of it differ"
    check_resumes(disturbed)
    executed = executed_steps(disturbed)
    assert executed <= num_steps + hits * INTERVAL_STEPS
    print(json.dumps({"kills": hits, "planned": num_steps, "executed": executed, "state_digest": disturbed.digest()}))


def check_resumes(run: Run) -> None:
    """Every resume stands on the newest commit, and none starts over."""
    newest: str | None = None
    for entry in run.entries():
        if entry.event in ("checkpoint.committed", "checkpoint.adopted"):
            newest = str(entry.fields["id"])
        if entry.event == "run.resumed":
            assert entry.fields["checkpoint"] == newest
            assert entry.step > 0
    printed = run.output.read_text().splitlines()
    restored = [line for line in printed if line.startswith("restored step ")]
    resumed = [entry for entry in run.entries() if entry.event == "run.resumed"]
    assert len(restored) == len(resumed)
    for line, entry in zip(restored, resumed, strict=True):
        assert f"checkpoint {entry.fields['checkpoint']}," in line
    check_replays(run, [line for line in printed if line.startswith("resumed from step ")])


def check_replays(run: Run, lines: list[str]) -> None:
    """Every replay that was not killed itself gave the same bits, as many steps as were recorded, and said so."""
    assert not [entry for entry in run.entries() if entry.event in ("replay.differed", "checkpoint.rejected")]
    verified = [entry for entry in run.entries() if entry.event == "replay.verified"]
    assert verified
    assert len(lines) <= len(verified)  # a kill between the ledger and the line costs the line
    for entry in verified:
        fields = entry.fields
        assert fields["mode"] == ("bits" if fields["num_steps"] else "none")
        assert fields["largest_difference"] == 0.0
    said = {(entry.fields["checkpoint"], entry.fields["num_steps"]) for entry in verified}
    for line in lines:
        found = re.match(r"resumed from step \d+, checkpoint (\S+), config \w{8}, verified (\d+) steps?: ", line)
        assert found is not None, line
        assert (found[1], int(found[2])) in said
    last = {entry.attempt: entry for entry in verified}.get(max(entry.attempt for entry in run.entries()))
    assert last is not None, "the last resume was not verified"


def executed_steps(run: Run) -> int:
    """Steps that rank 0 began over all generations, replays included."""
    logs = [path.read_text().splitlines() for path in (run.dir / "consumed").glob("g*-rank0.log")]
    return sum(len(lines[::NUM_MICRO_STEPS]) for lines in logs)


def write_text(folder: Path) -> None:
    text = folder / "text"
    text.mkdir()
    for index in range(80):
        words = " ".join(f"w{(index * 31 + place * 17) % 97}" for place in range(40 + index))
        (text / f"{index:03d}.txt").write_text(f"document {index}: {words}")


def run_leaving(folder: Path, *, num_signals: int, num_steps: int) -> None:
    """Signals at random moments of a run's life, from data preparation to the end; each start must leave with 75 or be finished."""
    seed = int(os.environ.get("CAMPAIGN_SEED", random.SystemRandom().randrange(1_000_000)))
    draw = random.Random(seed)
    print(f"CAMPAIGN_SEED={seed}")
    write_text(folder)
    undisturbed = Run(folder, "undisturbed", num_steps)
    undisturbed.start()
    undisturbed.finish(limit_s=300)
    told = Run(folder, "told", num_steps, data="prepared-while-told")
    for _ in range(num_signals):
        told.start()
        assert told.process is not None
        time.sleep(draw.uniform(0.3, 6.0))  # a Python that is still starting has no handlers yet, and dies of the signal
        number = draw.choice([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
        told.process.send_signal(number)
        code = told.process.wait(timeout=90)
        print(f"{number.name}: exit {code} at {told.entries()[-1].step if told.entries() else 'no ledger yet'}")
        assert code in (0, 75), told.output.read_text()[-3000:]
        check_ledger(told)
    told.start()
    told.finish(limit_s=200)
    assert told.digest() == undisturbed.digest()
    assert told.consumed() == undisturbed.consumed()
    assert executed_steps(told) <= num_steps, "a step was computed twice although every leave saved"


@pytest.mark.timeout(400)
def test_signals_in_any_phase_leave_with_75_and_lose_no_step(tmp_path: Path) -> None:
    run_leaving(tmp_path, num_signals=5, num_steps=300)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_thirty_signals_in_any_phase_leave_with_75_and_lose_no_step(tmp_path: Path) -> None:
    run_leaving(tmp_path, num_signals=30, num_steps=2000)


@pytest.mark.timeout(400)
def test_kills_of_every_kind_end_with_the_same_bits(tmp_path: Path) -> None:
    run_campaign(tmp_path, kinds=KILLS, num_steps=300)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_five_kills_of_every_kind_in_one_run_end_with_the_same_bits(tmp_path: Path) -> None:
    run_campaign(tmp_path, kinds=KILLS * 5, num_steps=1500)


@pytest.mark.timeout(200)
def test_another_seed_ends_with_other_bits(tmp_path: Path) -> None:
    """The control: were the digest blind, the campaign could not fail."""
    write_text(tmp_path)
    digests = set()
    for seed in (1, 2):
        run = Run(tmp_path, f"seed{seed}", 12, seed=seed)
        run.start()
        run.finish(limit_s=100)
        digests.add(run.digest())
    assert len(digests) == 2
