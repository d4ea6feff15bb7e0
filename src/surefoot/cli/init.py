"""`surefoot init`: a commented config to start from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from surefoot.cli.console import say
from surefoot.core.errors import ConfigError

FILE_NAME = "run.toml"

STARTER = """\
# A surefoot run. Relative paths start at this file. All settings with their reasons: docs/config.md
# Every value as it will be used, and where it comes from: surefoot config show run.toml

[run]
name = "first"                     # the run folder is runs/first beside this file
seed = 1

[data]
path = "data/first"                # prepared from the sources below when it does not exist
tokenizer = "bpe:8192"             # trained on the sources; or "bytes", or the path of a tokenizer.json
seq_len = 256

[[data.sources]]
name = "stdlib"
files = ["builtin:python-stdlib"]  # Python's own library; replace by your text: ["corpus/*.jsonl", "notes"]

[model]
preset = "quickstart"              # 1.9M parameters; then 124m, 350m, 774m, 1b, 8b, or your own sizes

[train]
num_steps = 240
global_batch_size = 16             # samples of seq_len tokens per step, over all ranks
micro_batch_size = 4               # samples that one rank computes at once

[optimizer]
lr = 2e-3                          # peak; larger models want smaller ones

[schedule]
warmup_steps = 20                  # then constant, and the last fifth of the steps decays

[parallel]
dp_replicate = 1                   # local processes, each with a whole copy of the model
dp_shard = 1                       # or processes that share one copy

[checkpoint]
interval_steps = 40
keep_last = 3
"""


def init(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where run.toml goes; made when missing.")] = Path(".")) -> None:
    """Write a commented starter config into DIR. Never overwrites one.

    \b
    Examples:
      surefoot init
      surefoot init my-run
    """
    path = folder / FILE_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        if path.exists():
            raise ConfigError("there is a config already", where=str(path), hint="name another folder, or move it away") from None
        raise ConfigError("a file stands where the folder should be", where=str(folder), hint="name another folder") from None
    except OSError as error:
        raise ConfigError(f"cannot write the config: {error.strerror}", where=str(path), hint="name a folder you may write to") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(STARTER)
    say(f"wrote {path}")
    say("")
    say(f"  surefoot config show {path}    every setting and where it comes from")
    say(f"  surefoot train {path}          trains on Python's own library: put your text under [[data.sources]] first")
