"""Which files data was prepared from, by name and size: enough to notice that a config now names other ones. Reads no document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from surefoot.core.durable import write_atomic
from surefoot.core.errors import DataError
from surefoot.core.hashing import sha256_json
from surefoot.core.sections import SourceSection
from surefoot.core.strict_json import dumps
from surefoot.core.units import show_bytes
from surefoot.data.corpus import CorpusFile, list_files

INPUTS_NAME: Final = "inputs.json"


def write_inputs(folder: Path, files: Sequence[CorpusFile]) -> None:
    """Note the files beside the manifest. It is no part of the data's identity: the documents are."""
    write_atomic(folder / INPUTS_NAME, dumps(_summary(files), indent=2))


def changed_inputs(path: Path, sources: Sequence[SourceSection]) -> str | None:
    """What differs between the files that `path` was prepared from and those that `sources` name now, in words; None when nothing does.

    Unknown is no difference: an older folder has no note, and files may be gone once they are prepared.
    """
    try:
        before = json.loads((path / INPUTS_NAME).read_bytes())
        files = [file for source in sources for file in list_files(source.files, source=source.name)]
    except (OSError, ValueError, DataError):
        return None
    now = _summary(files)
    if before.get("sha256") == now["sha256"]:
        return None
    return (
        f"the data in {path} was prepared from {before.get('num_files')} files ({show_bytes(before.get('num_bytes', 0))}), "
        f"[[data.sources]] now names {now['num_files']} ({show_bytes(sum(file.num_bytes for file in files))}) with other names or sizes"
    )


def _summary(files: Sequence[CorpusFile]) -> dict[str, object]:
    listed = sorted([file.name, file.num_bytes] for file in files)
    return {"num_files": len(files), "num_bytes": sum(file.num_bytes for file in files), "sha256": sha256_json(listed)}
