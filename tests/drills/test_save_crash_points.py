"""A real loop that saves, stopped or refused by the kernel at each system call of its saves, one after the other, under strace.

An undisturbed run is traced first: it lists the calls and says which state belongs to which step. Then the same run meets `kill -9` (or an
error) at one call, an observer outside notes which checkpoints were published meanwhile, and what is left must be whole, not older than
what was seen, and end with the bits of the undisturbed run.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from surefoot.checkpoint.inspect import published
from surefoot.checkpoint.manifest import parse_id
from surefoot.checkpoint.verify import verify
from surefoot.core.records import LedgerEntry
from surefoot.observe.ledger import read_ledger, verify_ledger

PROGRAM = Path(__file__).with_name("saving_program.py")
NUM_STEPS = 8
FIRST_TRACED_STEP = 5  # saves at 6 and 8 are traced, those at 2 and 4 were made before
KINDS = (
    "openat write pwrite64 writev pwritev pwritev2 sendfile copy_file_range ftruncate fallocate fsync fdatasync sync_file_range "
    "rename renameat renameat2 link linkat unlink unlinkat mkdir mkdirat rmdir"
).split()
_CALL = re.compile(r"(?:(\d+) +)?(\w+)\((.*)")
EFFECTS = ["signal=KILL", "error=ENOSPC", "error=EDQUOT", "error=EIO"]
_LIMIT_S = 60.0  # against a hang: everything here takes a second or two


@dataclass(frozen=True, order=True)
class Point:
    """The `number`-th call of its kind by one thread since the trace began. Threads count in the order of their start: 0 is the loop's."""

    thread: int
    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.number} of thread {self.thread}"


class Programs:
    """The process that forks the program, see there."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def start(self, run_dir: Path, **options: Any) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"run_dir": str(run_dir), "num_steps": NUM_STEPS, **options}) + "\n")
        self._process.stdin.flush()
        return int(self._answer())

    def end(self) -> int:
        return os.waitstatus_to_exitcode(int(self._answer()))

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.kill()  # every answer that was wanted has come
        self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@dataclass
class Observer:
    """Notes every published checkpoint that it sees, from outside."""

    root: Path
    seen: set[str] = field(default_factory=set)
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Observer:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.seen.update(published(self.root))

    def _watch(self) -> None:
        while not self._over.wait(0.003):
            self.seen.update(published(self.root))


@dataclass
class Undisturbed:
    """`base` has saved at steps 2 and 4; `digests` are those of the state after each step."""

    base: Path
    points: list[Point]
    digests: dict[int, str]


@pytest.fixture(scope="module")
def programs() -> Iterator[Programs]:
    started = Programs()
    yield started
    started.close()


@pytest.fixture(scope="module")
def undisturbed(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("crash_points")
    skip_without_strace(folder)
    base, whole = folder / "base", folder / "whole"
    programs.start(base, leave_in=4)
    assert programs.end() == 75, told(base)
    shutil.copytree(base, whole)
    code, threads = run_traced(programs, whole)
    assert code == 0, told(whole)
    told_digests = re.findall(r"^digest (\d+) (\S+)$", told(base) + told(whole), re.MULTILINE)
    digests = {int(step): digest for step, digest in told_digests}
    assert sorted(digests) == list(range(1, NUM_STEPS + 1))
    assert {entry.step: entry.fields["state_digest"] for entry in commits_of(whole)} == {step: digests[step] for step in (2, 4, 6, 8)}
    return Undisturbed(base, points_of(whole, threads), digests)


def skip_without_strace(folder: Path) -> None:
    """Aloud: a machine without it proves nothing about these calls."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("NOT RUN: no strace on this machine (apt-get install strace): saves were not interrupted at their system calls")
    tried = subprocess.run([strace, "-o", str(folder / "tried"), "-e", "inject=?mkdir:error=EIO", "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"NOT RUN: strace may not trace here, saves were not interrupted at their system calls: {tried.stderr.strip()}")


def run_traced(
    programs: Programs, run_dir: Path, *, thread: int | None = None, inject: str | None = None, do: str = "train"
) -> tuple[int, list[str]]:
    """The steps from FIRST_TRACED_STEP on, or an upload, under strace: all threads or one. The exit code, and which threads there are."""
    pid = programs.start(run_dir, do=do, stop_before=FIRST_TRACED_STEP)
    try:
        wait_until_stopped(pid, run_dir)
        threads = sorted((path.name for path in Path(f"/proc/{pid}/task").iterdir()), key=int)
        with attached(["-f", "-p", str(pid)] if thread is None else ["-p", threads[thread]], run_dir, inject=inject):
            os.kill(pid, signal.SIGCONT)
            return programs.end(), threads
    except BaseException:
        os.kill(pid, signal.SIGKILL)  # also when this test is out of time: a stopped process would stay for ever
        raise


@contextmanager
def attached(to: Sequence[str], run_dir: Path, *, inject: str | None) -> Iterator[None]:
    """strace on threads that are stopped; it ends with them."""
    command = ["strace", "-y", "-o", str(trace_of(run_dir)), "-e", "trace=" + ",".join(f"?{kind}" for kind in KINDS), *to]
    strace = subprocess.Popen(command + (["-e", f"inject={inject}"] if inject else []), stderr=subprocess.PIPE, text=True)
    assert strace.stderr is not None
    try:
        said = strace.stderr.readline()
        assert "attached" in said, said
        yield
        strace.communicate(timeout=_LIMIT_S)
    finally:
        strace.kill()
        strace.wait()
        strace.stderr.close()


def wait_until_stopped(pid: int, run_dir: Path) -> None:
    deadline_s = time.monotonic() + _LIMIT_S
    stat = Path(f"/proc/{pid}/stat")
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline_s, f"it never came to step {FIRST_TRACED_STEP}\n{told(run_dir)}"
        time.sleep(0.002)
    assert stat.exists(), f"it ended before step {FIRST_TRACED_STEP}\n{told(run_dir)}"


def points_of(run_dir: Path, threads: Sequence[str]) -> list[Point]:
    """Every call that changes the checkpoints or the ledger: of opens those for writing, and none that changed nothing anyway."""
    counts: Counter[tuple[str, str]] = Counter()
    points = set()
    for thread, kind, arguments in calls_of(run_dir):
        counts[thread, kind] += 1
        changes = " = -1 " not in arguments and (kind != "openat" or re.search("O_WRONLY|O_RDWR|O_CREAT", arguments))
        changes = changes and f'"{run_dir}/checkpoints",' not in arguments  # there already, which a line cut in two does not show
        if changes and (f"{run_dir}/checkpoints" in arguments or f"{run_dir}/ledger" in arguments):
            assert thread in threads, f"a thread that began later calls {kind}({arguments}"
            points.add(Point(threads.index(thread), kind, counts[thread, kind]))
    return sorted(points)


def calls_of(run_dir: Path) -> list[tuple[str, str, str]]:
    """(thread, kind, arguments and result) in the order of their beginning; without a thread where only one was traced."""
    matches = (_CALL.match(line) for line in trace_of(run_dir).read_text(errors="replace").splitlines())
    return [(match[1] or "", match[2], match[3]) for match in matches if match]


def trace_of(run_dir: Path) -> Path:
    return run_dir.with_suffix(".trace")


def entries_of(run_dir: Path) -> list[LedgerEntry]:
    return read_ledger(run_dir / "ledger.jsonl")


def commits_of(run_dir: Path) -> list[LedgerEntry]:
    """A commit may be ledgered steps after its state, so `step` is put to that of the state."""
    commits = [entry for entry in entries_of(run_dir) if entry.event == "checkpoint.committed"]
    return [dataclasses.replace(entry, step=int(str(entry.fields["step"]))) for entry in commits]


def told(run_dir: Path) -> str:
    return run_dir.with_suffix(".out").read_text(errors="replace")[-3000:]


def sample(points: Sequence[Point], *, number: int) -> list[Point]:
    """So many of them, every kind among them, the same ones every time."""
    chooser = random.Random(0)
    kinds = sorted({(point.thread, point.kind) for point in points})
    of_kinds = [chooser.choice([point for point in points if (point.thread, point.kind) == kind]) for kind in kinds]
    others = [point for point in points if point not in of_kinds]
    return sorted(of_kinds + chooser.sample(others, min(max(0, number - len(of_kinds)), len(others))))


def check_what_is_left(programs: Programs, run_dir: Path, *, undisturbed: Undisturbed, seen: set[str]) -> None:
    """All that is published is whole; the run goes on from nothing older than was seen, ends with the same bits and leaves no litter."""
    root = run_dir / "checkpoints"
    there = published(root)
    for name in there:
        assert verify(root / name) == [], f"{name} is damaged"
    newest_seen = max(step_of(name) for name in seen)
    assert max(step_of(name) for name in there) >= newest_seen, f"seen {sorted(seen)}, left {there}"
    num_before = len(entries_of(run_dir))
    programs.start(run_dir)
    assert programs.end() == 0, told(run_dir)
    entries = entries_of(run_dir)
    for entry in entries[num_before:]:
        assert entry.event != "run.resumed" or entry.step >= newest_seen, f"resumed at {entry.step}, but {newest_seen} had been published"
    for entry in commits_of(run_dir):
        assert entry.fields["state_digest"] == undisturbed.digests[entry.step], f"other bits at step {entry.step}"
    finished = [entry for entry in entries if entry.event == "run.finished"]
    assert finished, told(run_dir)
    assert all(entry.fields["state_digest"] == undisturbed.digests[NUM_STEPS] for entry in finished)
    assert verify_ledger(run_dir / "ledger.jsonl").ok
    assert [path.name for path in root.iterdir() if path.name.startswith(".")] == []
    assert all(verify(root / name) == [] for name in published(root))


def step_of(name: str) -> int:
    parsed = parse_id(name)
    assert parsed is not None
    return parsed[0]


def disturb(programs: Programs, folder: Path, *, undisturbed: Undisturbed, point: Point, effect: str) -> str:
    """One run with `effect` at `point`, and everything that must hold afterwards; where it struck."""
    run_dir = folder / f"{effect}-{point.thread}-{point.kind}-{point.number}"
    shutil.copytree(undisturbed.base, run_dir)
    with Observer(run_dir / "checkpoints") as observer:
        code, _ = run_traced(programs, run_dir, thread=point.thread, inject=f"{point.kind}:{effect}:when={point.number}")
    try:
        if effect == "signal=KILL":
            assert code in (-signal.SIGKILL, 0), told(run_dir)
            struck = " ".join(calls_of(run_dir)[-1][1:]) if code else "nowhere"  # the timing of threads may save a call or two
        else:
            struck = next((" ".join(call[1:]) for call in calls_of(run_dir) if "(INJECTED)" in call[2]), "nowhere")
            check_the_error_was_survived(run_dir, code=code, struck=struck, name=effect.removeprefix("error="))
        check_what_is_left(programs, run_dir, undisturbed=undisturbed, seen=observer.seen)
    except AssertionError as error:
        raise AssertionError(f"{effect} at {point}: {error}") from None
    shutil.rmtree(run_dir)
    return struck


@pytest.fixture(scope="module")
def upload_points(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> list[Point]:
    folder = tmp_path_factory.mktemp("upload_points")
    skip_without_strace(folder)
    run_dir = folder / "whole"
    run_dir.mkdir()
    programs.start(run_dir, do="stage", id="s1-a1")
    assert programs.end() == 0, told(run_dir)
    code, threads = run_traced(programs, run_dir, do="upload")
    assert code == 0, told(run_dir)
    return points_of(run_dir, threads)


def disturb_upload(programs: Programs, folder: Path, *, point: Point, effect: str) -> str:
    """An uploader that meets `effect`, and a second one on the same memory. Killed: the second brings it home. Refused: it says so, and
    leaves nothing; the save is made again."""
    run_dir = folder / f"upload-{effect}-{point.thread}-{point.kind}-{point.number}"
    root = run_dir / "checkpoints"
    run_dir.mkdir()
    programs.start(run_dir, do="stage", id="s1-a1")
    assert programs.end() == 0, told(run_dir)
    code, _ = run_traced(programs, run_dir, do="upload", thread=point.thread, inject=f"{point.kind}:{effect}:when={point.number}")
    calls = [" ".join(call[1:]) for call in calls_of(run_dir)]
    try:
        struck = calls[-1] if effect == "signal=KILL" else next(call for call in calls if "(INJECTED)" in call)
        there = ["s1-a1"]
        if effect == "signal=KILL":
            assert code == -signal.SIGKILL, told(run_dir)
            assert all(verify(root / name) == [] for name in published(root))
        elif code:
            text = os.strerror(getattr(errno, effect.removeprefix("error=")))
            assert text in told(run_dir), f"nobody says {text!r} after {struck}: {told(run_dir)}"
            left = [path.name for path in root.iterdir()] if root.exists() else []
            # After the rename nobody knows whether it would outlast a power cut: it counts as failed, but it is whole.
            assert left == (there if struck.startswith("fsync ") and f"<{root}>" in struck else []), f"left after {struck}: {left}"
            there = [*left, "s1-a1-r1"]
            programs.start(run_dir, do="stage", id=there[-1])
            assert programs.end() == 0, told(run_dir)
        programs.start(run_dir, do="upload")
        assert programs.end() == 0, f"after {struck}: {told(run_dir)}"
        assert sorted(path.name for path in root.iterdir()) == there, f"after {struck}"
        assert all(verify(root / name) == [] for name in there)
    except AssertionError as error:
        raise AssertionError(f"{effect} at {point} of an upload: {error}") from None
    shutil.rmtree(run_dir)
    return struck


def check_the_error_was_survived(run_dir: Path, *, code: int, struck: str, name: str) -> None:
    """One refused call costs nothing but a second try, and is called by its name."""
    text = os.strerror(getattr(errno, name))
    if f"{run_dir}/checkpoints" in struck:
        assert code == 0, f"it gave up after {struck}: {told(run_dir)}"
    if struck != "nowhere":
        reasons = [f"{entry.reason} {entry.fields}" for entry in entries_of(run_dir)]
        assert any(text in told_by for told_by in (told(run_dir), *reasons)), f"nobody says {text!r} after {struck}: {told(run_dir)}"


def disturb_all(disturb_one: Callable[[Point], str], *, points: Sequence[Point], effect: str) -> None:
    """All of them even when one fails, so that a campaign says everything at once."""
    struck: Counter[str] = Counter()
    failures = []
    for point in points:
        try:
            struck[disturb_one(point).split(" ", 1)[0]] += 1
        except AssertionError as error:
            failures.append(str(error))
    print(f"{effect} at {len(points)} calls: {dict(sorted(struck.items()))}")
    assert not failures, f"{len(failures)} of {len(points)}:\n" + "\n\n".join(failures)


@pytest.mark.timeout(900)
def test_killed_at_some_of_all_kinds_of_calls(programs: Programs, undisturbed: Undisturbed, tmp_path: Path) -> None:
    disturb_one = partial(disturb, programs, tmp_path, undisturbed=undisturbed, effect="signal=KILL")
    disturb_all(lambda point: disturb_one(point=point), points=sample(undisturbed.points, number=16), effect="signal=KILL")


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_refused_once_at_each_kind_of_call(programs: Programs, undisturbed: Undisturbed, tmp_path: Path) -> None:
    disturb_one = partial(disturb, programs, tmp_path, undisturbed=undisturbed, effect="error=ENOSPC")
    disturb_all(lambda point: disturb_one(point=point), points=sample(undisturbed.points, number=0), effect="error=ENOSPC")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("effect", ["signal=KILL"])
def test_an_uploader_disturbed_at_each_kind_of_call(programs: Programs, upload_points: list[Point], tmp_path: Path, effect: str) -> None:
    disturb_one = partial(disturb_upload, programs, tmp_path, effect=effect)
    disturb_all(lambda point: disturb_one(point=point), points=sample(upload_points, number=0), effect=effect)


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("effect", EFFECTS)
def test_disturbed_at_every_call(programs: Programs, undisturbed: Undisturbed, tmp_path: Path, effect: str) -> None:
    disturb_one = partial(disturb, programs, tmp_path, undisturbed=undisturbed, effect=effect)
    disturb_all(lambda point: disturb_one(point=point), points=undisturbed.points, effect=effect)


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("effect", EFFECTS)
def test_an_uploader_disturbed_at_every_call(programs: Programs, upload_points: list[Point], tmp_path: Path, effect: str) -> None:
    disturb_one = partial(disturb_upload, programs, tmp_path, effect=effect)
    disturb_all(lambda point: disturb_one(point=point), points=upload_points, effect=effect)
