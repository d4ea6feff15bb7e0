"""A node's keeper as a process: `toy_keeper.py RUN BUDGET_BYTES`, the token in the environment. Prints its port."""

from __future__ import annotations

import logging
import signal
import sys

from surefoot.checkpoint.keeper import KeeperServer
from surefoot.checkpoint.keeper_wire import run_token
from surefoot.checkpoint.kept import KeptBytes

logging.basicConfig(level=logging.WARNING)
server = KeeperServer(KeptBytes(budget_bytes=int(sys.argv[2])), run=sys.argv[1], token=run_token())
signal.signal(signal.SIGTERM, lambda *_: server.stop())
print(server.address[1], flush=True)
server.serve()
