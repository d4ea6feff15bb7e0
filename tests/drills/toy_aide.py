"""An aide that writes down what it is asked. argv: BEHAVIOUR, then what the agent gives. It says what happens to it in `aide.jsonl`.

`good`; `deaf` (answers nothing, never leaves); `short` (drains, but says that something is missing); `exit:<code>` at once; `parent`
(starts a process of its own and names it).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from surefoot.launch.aide_duty import Duty


def main() -> int:
    behaviour = sys.argv[1]
    duty = Duty.begin(sys.argv[2:], prog="toy_aide")
    say(duty.run_dir, event="began", pid=os.getpid(), generation=duty.generation, fds=num_fds(), slots=os.environ.get("SUREFOOT_SLOTS"))
    kind, _, code = behaviour.partition(":")
    if kind == "exit":
        print("no good, says the aide", file=sys.stderr)
        return int(code)
    if kind == "deaf":
        time.sleep(1000)
    if kind == "parent":
        say(duty.run_dir, event="child", pid=start_child())
    while not duty.is_over:
        request = duty.wait(1.0)
        if request is not None:
            say(duty.run_dir, event="drain", pid=os.getpid(), generation=request.generation, fds=num_fds())
            duty.drained(request, failures=["half of it is missing"] if kind == "short" else [])
    say(duty.run_dir, event="left", pid=os.getpid(), generation=duty.generation)
    return 0


def say(run_dir: Path, **facts: object) -> None:
    with (run_dir / "aide.jsonl").open("a") as file:
        file.write(json.dumps(facts) + "\n")


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def start_child() -> int:
    pid = os.fork()
    if pid == 0:
        time.sleep(1000)
        os._exit(0)
    return pid


if __name__ == "__main__":
    sys.exit(main())
