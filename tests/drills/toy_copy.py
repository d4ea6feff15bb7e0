"""Copies one checkpoint to a store and says what it did: `toy_copy.py FOLDER URL BYTES_PER_S`. Killed in the middle by its test."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from surefoot.checkpoint.object_store import ObjectStore
from surefoot.checkpoint.remote import Throttle, copy_checkpoint

copied = copy_checkpoint(Path(sys.argv[1]), ObjectStore.open(sys.argv[2]), throttle=Throttle(int(sys.argv[3])))
print(json.dumps(asdict(copied)))
