"""Which files data was prepared from, by name and size: enough to notice that a config now names other ones. Reads no document."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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


def write_inputs(folder: Path, files: Mapping[str, Sequence[CorpusFile]]) -> None:
    """Note the files of each source beside the manifest. It is no part of the data's identity: the documents are."""
    write_atomic(folder / INPUTS_NAME, dumps(_summary(files), indent=2))


def changed_inputs(path: Path, sources: Sequence[SourceSection]) -> str | None:
    """What differs between the files that `path` was prepared from and those that `sources` name now, in words; None when nothing does.

    Unknown is no difference: an older folder has no note, and files may be gone once they are prepared.
    """
    try:
        before = json.loads((path / INPUTS_NAME).read_bytes())
        files = {source.name: list_files(source.files, source=source.name) for source in sources}
    except (OSError, ValueError, DataError):
        return None
    now = _summary(files)
    if before.get("sha256") == now["sha256"]:
        return None
    return (
        f"the data in {path} was prepared from {before.get('num_files')} files ({show_bytes(before.get('num_bytes', 0))}), "
        f"[[data.sources]] now names {now['num_files']} ({show_bytes(int(str(now['num_bytes'])))}) with other names or sizes"
    )


def _summary(files: Mapping[str, Sequence[CorpusFile]]) -> dict[str, object]:
    """A single source goes without its name, as it always did."""
    of_sources = [sorted([file.name, file.num_bytes] for file in of_source) for of_source in files.values()]
    listed = of_sources[0] if len(files) == 1 else sorted(zip(files, of_sources, strict=True))
    every = [file for of_source in files.values() for file in of_source]
    return {"num_files": len(every), "num_bytes": sum(file.num_bytes for file in every), "sha256": sha256_json(listed)}
