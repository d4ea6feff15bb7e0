"""Which files a source is made of: the inputs a person named, turned into one sorted list that every pass over the corpus repeats."""

from __future__ import annotations

import logging
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Final, Literal

from surefoot.core.errors import DataError

logger = logging.getLogger(__name__)

PYTHON_STDLIB: Final = "builtin:python-stdlib"
JSONL_SUFFIXES: Final = frozenset({".jsonl", ".ndjson"})
# What a folder contributes, one file one document. A file that is named outright is read whatever its ending.
_TEXT_ENDINGS: Final = """
txt text md rst tex org adoc html xml csv tsv json yaml yml toml ini cfg
py pyi c h cc cpp hpp cu rs go java kt scala js jsx ts tsx rb pl pm pod php lua r jl hs ml sh bash sql css swift el lisp clj ex erl
"""
TEXT_SUFFIXES: Final = frozenset(f".{ending}" for ending in _TEXT_ENDINGS.split())
PARQUET_SUFFIX: Final = ".parquet"
Packing = Literal["", "gzip", "zstd"]
_PACKINGS: Final[dict[str, Packing]] = {".gz": "gzip", ".zst": "zstd"}
_UNREADABLE_SUFFIXES: Final = frozenset({".bz2", ".xz", ".lz4", ".zip", ".7z", ".tar", ".tgz"})
_STDLIB_LEFT_OUT: Final = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload"})


@dataclass(frozen=True, slots=True)
class CorpusFile:
    """One file of a source. `name` is relative and is what provenance keeps; `path` is where it lies on this machine."""

    path: Path
    name: str
    num_bytes: int

    @property
    def packing(self) -> Packing:
        return _PACKINGS.get(self.path.suffix.lower(), "")

    @property
    def kind(self) -> Literal["text", "jsonl", "parquet"]:
        """What it holds once it is unpacked, by its ending."""
        suffix = _inner_suffix(self.path)
        if suffix == PARQUET_SUFFIX:
            return "parquet"
        return "jsonl" if suffix in JSONL_SUFFIXES else "text"


def _inner_suffix(path: Path) -> str:
    """The ending, in small letters, without that of a packing: `.jsonl` of `a.jsonl.gz`."""
    return Path(path.stem if path.suffix.lower() in _PACKINGS else path.name).suffix.lower()


def list_files(inputs: Sequence[str | Path], *, source: str) -> list[CorpusFile]:
    """The files of `source` in their lasting order: inputs as given, each folder and pattern sorted by relative name.

    An input is a file, a folder, a pattern (`corpus/**/*.md`), or builtin:python-stdlib. Raises DataError when there are none, one does not
    exist, matches or holds no file, or is packed in a way this release does not read. A file that is named twice is warned about.
    """
    where = f"source {source!r}"
    if not inputs:
        raise DataError("no input files", where=where, hint=f"name files or folders, or {PYTHON_STDLIB}")
    files: list[CorpusFile] = []
    labels: set[str] = set()
    for given in inputs:
        short_name, found = _find(str(given), where=where)
        label, number = short_name, 1
        while label in labels:
            number += 1
            label = f"{short_name}#{number}"
        labels.add(label)
        files += [CorpusFile(path=path, name=f"{label}/{name}" if name else label, num_bytes=path.stat().st_size) for path, name in found]
    for file in files:
        if not file.name.isprintable() and _has_surrogates(file.name):
            raise DataError(f"the name {file.name!r} is not UTF-8", where=where, hint="rename the file: provenance keeps names as text")
        if _inner_suffix(file.path) in _UNREADABLE_SUFFIXES or (file.kind == "parquet" and file.packing):
            hint = "unpack it first: read are text and JSONL, each also as .gz and .zst, and Parquet as it is"
            raise DataError(f"{file.path} is packed", where=where, hint=hint)
    _warn_of_repeats(files, where=where)
    return files


def _warn_of_repeats(files: Sequence[CorpusFile], *, where: str) -> None:
    times = Counter(os.path.realpath(file.path) for file in files)
    repeated = [path for path, count in times.items() if count > 1]
    if repeated:
        logger.warning("%s: %s is named more than once; copies of documents are dropped (%d such files)", where, repeated[0], len(repeated))


def _has_surrogates(name: str) -> bool:
    """Bytes of a file name that are no UTF-8 come as lone surrogates."""
    return any("\ud800" <= character <= "\udfff" for character in name)


def _find(given: str, *, where: str) -> tuple[str, list[tuple[Path, str]]]:
    """A short name for what one input names, and its files with their names below that; a file named outright has none."""
    if given == PYTHON_STDLIB:
        return "python-stdlib", [found for found in _walk(_stdlib_root(), leave_out=_STDLIB_LEFT_OUT) if found[0].suffix == ".py"]
    root = Path(given)
    if not root.exists():
        if not has_magic(given):
            hint = "check the path; relative ones start at the config file, on the command line where you are"
            raise DataError(f"{root} does not exist", where=where, hint=hint)
        root, names = _match(root, where=where)
        return _short_name(root), [(root / name, name) for name in names]
    if root.is_file():
        return _short_name(root), [(root, "")]
    texts = _text_files(root)
    if not texts:
        hint = "a folder contributes text endings and .jsonl, each also as .gz and .zst, and .parquet"
        raise DataError(f"{root} holds no text file", where=where, hint=hint)
    return _short_name(root), texts


def _match(pattern: Path, *, where: str) -> tuple[Path, list[str]]:
    """The folder that `pattern` starts in, its longest part that exists as it is spelled, and the sorted names of the files below it."""
    root = next(parent for parent in pattern.parents if parent.exists())
    matches = set(glob(str(pattern.relative_to(root)), root_dir=root, recursive=True))
    names = sorted(name for name in matches if (root / name).is_file())
    if not names:
        is_folder = any((root / name).is_dir() for name in matches)
        hint = "it matches folders only: end it in /**" if is_folder else "check the pattern; * stays in one folder, ** goes into all below"
        raise DataError(f"{pattern} matches no file", where=where, hint=hint)
    return root, names


def _short_name(path: Path) -> str:
    return path.resolve().name or "root"


def _text_files(root: Path) -> list[tuple[Path, str]]:
    found = list(_walk(root))
    texts = [(path, name) for path, name in found if _is_read_in_a_folder(path)]
    left_out = Counter(path.suffix or "no ending" for path, _ in found) - Counter(path.suffix or "no ending" for path, _ in texts)
    if left_out:
        endings = ", ".join(f"{suffix} ({count})" for suffix, count in left_out.most_common(5))
        logger.warning("%s: %d files are not read, by their ending: %s", root, left_out.total(), endings)
    return texts


def _is_read_in_a_folder(path: Path) -> bool:
    return _inner_suffix(path) in TEXT_SUFFIXES | JSONL_SUFFIXES or path.suffix.lower() == PARQUET_SUFFIX


def _walk(root: Path, *, leave_out: frozenset[str] = frozenset()) -> Iterator[tuple[Path, str]]:
    """Visible files below `root` with their relative names, sorted by these. Folders named in `leave_out` are not entered."""
    found: list[tuple[str, Path]] = []
    for folder, folders, names in os.walk(root, onerror=_refuse_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in leave_out]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                found.append((path.relative_to(root).as_posix(), path))
    return ((path, relative) for relative, path in sorted(found))


def _refuse_unreadable(error: OSError) -> None:
    raise DataError(f"cannot list {error.filename}: {error.strerror}", hint="give read access, or leave the folder out") from error


def _stdlib_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])
