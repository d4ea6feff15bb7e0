"""Four processes write one ledger while they are killed at random: it verifies, and nothing that was acknowledged is lost."""

from __future__ import annotations

import fcntl
import json
import random
import subprocess
import sys
import time
from pathlib import Path

from surefoot.observe.ledger import read_ledger, verify_ledger

NUM_WRITERS = 4
NUM_KILLS = 24
DURATION_S = 6.0

# Acknowledgements go to the writer's own file by one unbuffered write after append has returned, so a kill cannot lose or tear one.
WRITER = """
import os, sys
from pathlib import Path
from surefoot.core.clock import SystemClock
from surefoot.core.events import Event
from surefoot.observe.ledger import Ledger
name, path, acknowledged = sys.argv[1:]
ledger = Ledger(Path(path), clock=SystemClock(), by=name)
fd = os.open(acknowledged, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
step = 0
while True:
    step += 1
    entry = ledger.append(Event.UPDATE_SKIPPED, generation=1, attempt=1, step=step, reason="x" * (step * 37 % 3000))
    os.write(fd, f'["{entry.seq}", "{entry.hash}"]\\n'.encode())
"""


def start(run_dir: Path, number: int) -> subprocess.Popen[bytes]:
    name = f"writer{number}"
    return subprocess.Popen([sys.executable, "-c", WRITER, name, str(run_dir / "ledger.jsonl"), str(run_dir / name)])


def test_nothing_acknowledged_is_lost_when_writers_are_killed(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    path = tmp_path / "ledger.jsonl"
    writers = [start(tmp_path, number) for number in range(NUM_WRITERS)]
    try:
        for kill in range(NUM_KILLS):
            time.sleep(chance.uniform(0.3, 1.7) * DURATION_S / NUM_KILLS)
            victim = chance.randrange(NUM_WRITERS)
            writers[victim].kill()
            writers[victim].wait()
            if kill % 6 == 5:
                tear(path)
            writers[victim] = start(tmp_path, victim)
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()

    check = verify_ledger(path)
    assert check.ok, f"seed {seed}: {check}"
    hashes = {entry.seq: entry.hash for entry in read_ledger(path)}
    num_acknowledged = 0
    for number in range(NUM_WRITERS):
        for line in (tmp_path / f"writer{number}").read_text().splitlines():
            seq, expected = json.loads(line)
            assert hashes.get(int(seq)) == expected, f"seed {seed}: entry {seq} was acknowledged and is not there"
            num_acknowledged += 1
    assert num_acknowledged >= NUM_WRITERS * NUM_KILLS, f"seed {seed}: the drill wrote next to nothing"


def tear(path: Path) -> None:
    """What a power loss in the middle of a write would leave; other writers are at work meanwhile, so it is done under their lock."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(b'{"seq":12345,"time_utc":"20')
        file.flush()
