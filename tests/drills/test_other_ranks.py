"""A sharded run is killed whole, twice, and goes on each time on another number of ranks: by the command, seen from outside alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from surefoot.observe.live import read_live

HERE = Path(__file__).parent
NUM_STEPS = 90
INTERVAL_STEPS = 20
NUM_ATOMS = 12  # of a step: as many for each of 2, 3 and 4 ranks
TOLERANCE = 1e-3
CONFIG = f"""
[run]
name = "NAME"
dir = "NAME"
seed = 5
[data]
path = "prepared"
tokenizer = "bytes"
seq_len = 64
[[data.sources]]
name = "text"
files = ["text"]
[model]
factory = "model_of_the_drill:build"
num_layers = 2
d_model = 48
num_heads = 2
[train]
num_steps = {NUM_STEPS}
global_batch_size = {NUM_ATOMS}
micro_batch_size = 1
eval_interval_steps = 0
eval_num_samples = 4
[schedule]
warmup_steps = 5
[parallel]
dp_shard = 3
[checkpoint]
interval_steps = {INTERVAL_STEPS}
num_slots = 8   # so many that no save is put off to a later step, however busy the machine is
replay_tolerance = {TOLERANCE}
[observe]
status_interval_s = 0.1
[launch]
threads_per_rank = 1
"""
# The prover's processes build the model too, and there is nothing to write down there.
MODEL = """
import os
import recording_model
from surefoot.model.transformer import Transformer
def build(section, vocab_size):
    make = recording_model.build if "SUREFOOT_GENERATION" in os.environ else Transformer
    return make(section, vocab_size)
"""

pytestmark = pytest.mark.timeout(400)  # seven starts of Python and torch, on up to four ranks each


class Place:
    """A folder with data, configs and runs, and the command in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"

    @classmethod
    def furnish(cls, folder: Path) -> Place:
        (folder / "text").mkdir()
        for index in range(150):
            words = " ".join(f"w{(index * 31 + word * 17) % 97}" for word in range(120 + index))
            (folder / "text" / f"{index:03d}.txt").write_text(f"document {index}: {words}")
        (folder / "model_of_the_drill.py").write_text(MODEL)
        for name in ("run", "undisturbed", "other"):
            (folder / f"{name}.toml").write_text(CONFIG.replace("NAME", name))
        return cls(folder)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        path = os.pathsep.join(filter(None, (str(self.folder), str(HERE), os.environ.get("PYTHONPATH", ""))))
        environment = {**os.environ, "PYTHONPATH": path, "DRILL_FOLDER": str(self.folder)}  # a mark that all its processes inherit
        command = [sys.executable, "-m", "surefoot.cli.main", *arguments]
        with (self.folder / "out").open("w") as out:
            return subprocess.Popen(command, cwd=self.folder, env=environment, stdout=out, stderr=out, text=True)

    def printed(self) -> str:
        return (self.folder / "out").read_text()

    def surefoot(self, *arguments: str, expect: int = 0) -> str:
        process = self.start(*arguments)
        assert process.wait(timeout=200) == expect, self.printed()
        return self.printed()

    def entries(self, event: str, *, run: str = "run") -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in self.surefoot("ledger", run, "--json").splitlines()]
        return [row for row in rows if row["event"] == event]

    def processes(self) -> dict[int, str]:
        """pid -> command line of what lives of the run, wherever it hangs in the tree."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                mark = (folder / "environ").read_bytes().split(b"\0")
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                is_dead = (folder / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if f"DRILL_FOLDER={self.folder}".encode() in mark and not is_dead:
                found[int(folder.name)] = line
        return found

    def newest_commit(self) -> int:
        """Step of the newest checkpoint that stands in the folder under its own name; 0 where there is none."""
        found = [re.fullmatch(r"s(\d+)-a\d+", path.name) for path in (self.run / "checkpoints").glob("s*")]
        return max((int(match[1]) for match in found if match), default=0)

    def until(self, look: Callable[[], object], *, process: subprocess.Popen[str], what: str) -> None:
        give_up_s = time.monotonic() + 100.0
        while not look():
            assert process.poll() is None, f"it ended before {what}: {self.printed()}"
            assert time.monotonic() < give_up_s, f"no {what}: {self.printed()}"
            time.sleep(0.01)

    def train_and_kill(self, *arguments: str, num_ranks: int) -> int:
        """Train on `num_ranks` until a new save was committed and three steps more were done, and kill all. The newest commit seen."""
        before = self.newest_commit()
        process = self.start("train", *arguments)

        def stands_past_a_commit() -> bool:
            live, commit = read_live(self.run), self.newest_commit()
            return (
                commit > before
                and live is not None
                and live.pid == process.pid
                and len(live.ranks) == num_ranks
                and all(rank.step >= commit + 3 for rank in live.ranks)
            )

        # The first prover of a run is started only a while after the first save; later ones are there from the beginning.
        aides = ["surefoot.cli.uploader", "surefoot.cli.prover"] if before else ["surefoot.cli.uploader"]

        def all_work() -> bool:
            lines = " ".join(self.processes().values())
            return stands_past_a_commit() and all(aide in lines for aide in aides)

        self.until(all_work, process=process, what="commit")
        seen, live, victims = self.newest_commit(), read_live(self.run), self.processes()
        assert live is not None
        assert {process.pid, *(rank.pid for rank in live.ranks)} < set(victims)
        assert len(victims) >= num_ranks + 2 + len(aides)  # with the agent and the nursery
        os.kill(process.pid, signal.SIGKILL)  # first, or it would start others
        for pid in victims:
            if pid != process.pid:
                kill(pid)
        assert process.wait(timeout=30) == -signal.SIGKILL
        self.end_all()
        return seen

    def end_all(self) -> None:
        give_up_s = time.monotonic() + 30.0
        while left := self.processes():
            assert time.monotonic() < give_up_s, left
            for pid in left:
                kill(pid)
            time.sleep(0.01)

    def consumed(self, name: str) -> dict[int, set[tuple[str, ...]]]:
        """step -> what each execution of it consumed, in the order of samples. One element when all agree."""
        steps: dict[int, set[tuple[str, ...]]] = defaultdict(set)
        for started in self.entries("attempt.started", run=name):
            num_ranks = started["fields"]["environment"]["world_size"]
            files = [self.folder / name / "consumed" / f"g{started['generation']}-rank{rank}.log" for rank in range(num_ranks)]
            atoms = [atom for atoms in zip(*(file.read_text().splitlines() for file in files), strict=False) for atom in atoms]
            for index in range(len(atoms) // NUM_ATOMS):
                steps[started["step"] + index + 1].add(tuple(atoms[index * NUM_ATOMS : (index + 1) * NUM_ATOMS]))
        return dict(steps)


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it ended with its agent


@pytest.fixture(scope="module")
def killed_on_three(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A folder with a run on 3 ranks that was killed, and the newest commit that was seen before. Tests copy it."""
    place = Place.furnish(tmp_path_factory.mktemp("killed"))
    try:
        return place.folder, place.train_and_kill("run.toml", num_ranks=3)
    finally:
        place.end_all()


@pytest.fixture
def place(killed_on_three: tuple[Path, int], tmp_path: Path) -> Iterator[Place]:
    made = Place(Path(shutil.copytree(killed_on_three[0], tmp_path / "copy")))
    yield made
    made.end_all()


def check_resume(place: Place, *, before: int, now: int, seen: int) -> None:
    """The newest start went on from no older commit than was seen, and said from what, on which layout, and what was compared how."""
    resumed, verified = place.entries("run.resumed")[-1], place.entries("replay.verified")[-1]
    checkpoint = resumed["fields"]["checkpoint"]
    assert resumed["step"] >= seen
    assert verified["attempt"] == resumed["attempt"]
    fields = verified["fields"]
    assert (fields["checkpoint"], fields["from_step"], fields["mode"]) == (checkpoint, resumed["step"], "tolerance")
    assert 1 <= fields["num_steps"] == fields["num_compared"] <= 8
    assert fields["largest_difference"] <= TOLERANCE
    assert f"within {TOLERANCE:g}" in verified["reason"]
    started, changed = place.entries("attempt.started")[-1], place.entries("environment.changed")[-1]
    assert (started["attempt"], changed["attempt"]) == (resumed["attempt"], resumed["attempt"])
    assert (started["fields"]["topology"]["dp_shard"], started["fields"]["environment"]["world_size"]) == (now, now)
    assert changed["fields"]["changed"] == {"dp_shard": [before, now], "world_size": [before, now]}


def check_said(printed: str, *, before: int, now: int) -> None:
    assert f"dp_shard was {before}, is {now}" in printed
    assert re.search(r"resumed from step \d+, checkpoint \S+, config \w{8}, verified [1-8] steps?: within 0.001", printed), printed


def test_killed_whole_on_three_ranks_then_on_two_it_ends_on_four(killed_on_three: tuple[Path, int], place: Place) -> None:
    _, seen = killed_on_three
    seen_on_two = place.train_and_kill("run.toml", "parallel.dp_shard=2", num_ranks=2)
    check_said(place.printed(), before=3, now=2)
    check_resume(place, before=3, now=2, seen=seen)
    printed = place.surefoot("train", "run.toml", "parallel.dp_shard=4")
    check_said(printed, before=2, now=4)
    check_resume(place, before=2, now=4, seen=seen_on_two)
    assert f"the run is finished: {NUM_STEPS} steps" in printed
    assert not place.entries("replay.differed")
    assert not place.entries("checkpoint.rejected")
    assert "none changed or missing" in place.surefoot("ledger", "run", "--verify")

    assert place.surefoot("checkpoint", "verify", "run").startswith(f"ok: run/checkpoints/s{NUM_STEPS}-a3: ")
    proof = json.loads(place.surefoot("checkpoint", "prove", "run", "--json"))
    assert (proof["ok"], proof["ledgered"], proof["problems"], proof["model"]["skipped"]) == (True, True, [], "")
    assert [(row["rung"], row["saved_world_size"]) for row in proof["proofs"]] == [("loadable", 4), ("proven", 4)]

    place.surefoot("train", "undisturbed.toml", "parallel.dp_shard=1", "checkpoint.prove=false")
    consumed, expected = place.consumed("run"), place.consumed("undisturbed")
    assert sorted(expected) == list(range(1, NUM_STEPS + 1))
    assert consumed == expected, "a step consumed other samples than it would have, or two executions of it differ"


@pytest.mark.campaign
def test_a_loss_that_another_training_recorded_is_refused_on_other_ranks(place: Place) -> None:
    """The control: were any loss near enough, or none looked at, the drill above could not fail."""
    place.surefoot("train", "other.toml", "parallel.dp_shard=1", "checkpoint.prove=false", "model.init_std=0.03")
    shutil.rmtree(place.run / "metrics")
    shutil.copytree(place.folder / "other" / "metrics", place.run / "metrics")  # the same samples, from other weights
    printed = place.surefoot("train", "run.toml", "parallel.dp_shard=2", expect=6)
    assert "no checkpoint repeats what was recorded after it" in printed
    differed = place.entries("replay.differed")
    assert {entry["fields"]["what"] for entry in differed} == {"loss"}
    assert all(entry["fields"]["relative"] > TOLERANCE for entry in differed)
    assert not place.entries("replay.verified")
