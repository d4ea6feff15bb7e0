"""A folder of safetensors files: what can be checked of it. The format has no checksums, so its bytes cannot. No torch.

`HuggingFaceStorageWriter` with one file per rank writes no list of the files and no mark that the save ended: then nobody can know whether
the last shard is missing. That is said.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.core.records import Problem

INDEX_NAME = "model.safetensors.index.json"
_SHARDING_KEY = "DCP_SHARDING_INFO"
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8, "I16": 16, "U16": 16,
    "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
_NOT_WHOLE = "each rank wrote its own files and nothing says how many there were: whether the last are missing cannot be known"
_NO_CHECKSUMS = "safetensors has no checksums: a changed bit in a value would not be seen"


@dataclass(frozen=True, slots=True)
class _Stored:
    """One tensor, or one part of it at `offsets`, as a header describes it."""

    key: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...] | None


def audit_safetensors(path: Path) -> dict[str, Any]:
    """The fields of an Audit."""
    files = sorted([*path.glob("*.safetensors"), *path.glob("sharded/*.safetensors")])
    problems: list[Problem] = []
    stored: list[_Stored] = []
    for file in files:
        name = str(file.relative_to(path))
        try:
            found = list(_read_header(file, name))
            problems += [item for item in found if isinstance(item, Problem)]
            stored += [item for item in found if isinstance(item, _Stored)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            problems.append(Problem(kind="unreadable", file=name, detail=f"its header: {type(error).__name__}: {error}"))
    problems += _compare_index(path, stored)
    problems += _uncovered(stored)
    is_sharded = any(item.offsets is not None for item in stored)
    return {
        "problems": tuple(problems),
        "notes": (_NO_CHECKSUMS, *([_NOT_WHOLE] if is_sharded and not (path / INDEX_NAME).is_file() else [])),
        "num_files": len(files),
        "num_tensors": len({item.key for item in stored}),
        "num_parts": len(stored),
        "num_bytes": sum(file.stat().st_size for file in files),
    }


def _read_header(file: Path, name: str) -> Iterator[_Stored | Problem]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size < 8:
            raise ValueError(f"a file of {size} bytes, and 8 say how long its header is")
        (length,) = struct.unpack("<Q", stream.read(8))
        if not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        header: dict[str, Any] = json.loads(stream.read(length), object_pairs_hook=_without_repeats)
    sharding = json.loads(header.pop("__metadata__", {}).get(_SHARDING_KEY, "{}"))
    end = 0
    for key, item in sorted(header.items(), key=lambda named: named[1]["data_offsets"]):
        start, stop = _numbers(item["data_offsets"])
        shape = _numbers(item["shape"])
        num_bytes = math.prod(shape) * _BITS[item["dtype"]] // 8
        if start != end:
            yield Problem(kind="hole", file=name, tensor=key, detail=f"its bytes start at {start}, those before end at {end}")
        if stop - start != num_bytes:
            detail = f"{stop - start} bytes are stored, {num_bytes} belong to {item['dtype']} {shape}"
            yield Problem(kind="wrong-shape", file=name, tensor=key, detail=detail)
        if 8 + length + stop > size:
            yield Problem(kind="hole", file=name, tensor=key, detail="its bytes lie outside of the file")
        end = max(end, stop)
        offsets = _numbers(sharding[key]["saved_offsets"]) if key in sharding else None
        if offsets is not None and len(offsets) != len(shape):
            raise ValueError(f"{key} is of shape {shape} and lies at {offsets}")
        yield _Stored(key, file=name, dtype=item["dtype"], shape=shape, offsets=offsets)
    if 8 + length + end != size:
        yield Problem(kind="wrong-size", file=name, detail=f"{size} bytes, its header tells of {8 + length + end}")


def _compare_index(path: Path, stored: list[_Stored]) -> list[Problem]:
    """The index and the files must name the same tensors."""
    if not (path / INDEX_NAME).is_file():
        return []
    try:
        index: Mapping[str, str] = json.loads((path / INDEX_NAME).read_bytes())["weight_map"]
        wanted = {(key, os.path.normpath(name)) for key, name in index.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return [Problem(kind="unreadable", file=INDEX_NAME, detail=f"{type(error).__name__}: {error}")]
    found = {(item.key, item.file) for item in stored if not item.file.startswith("sharded/")}
    missing = sorted({name for _, name in wanted if not (path / name).is_file()})
    problems = [Problem(kind="missing-file", file=name, detail=f"{INDEX_NAME} names it") for name in missing]
    lost = sorted((key, name) for key, name in wanted - found if name not in missing)
    problems += [Problem(kind="missing-tensor", file=name, tensor=key, detail="the index says it is there") for key, name in lost]
    extra = sorted(found - wanted)
    return problems + [Problem(kind="extra-tensor", file=name, tensor=key, detail="the index does not know it") for key, name in extra]


def _uncovered(stored: list[_Stored]) -> list[Problem]:
    """Sharded tensors whose parts do not fill the box around them, or fill it twice, and whole ones that are stored twice."""
    parts: dict[str, list[_Stored]] = {}
    for item in stored:
        parts.setdefault(item.key, []).append(item)
    problems = []
    for key, items in sorted(parts.items()):
        whole = [item for item in items if item.offsets is None]
        if len(whole) > 1:
            problems.append(Problem(kind="extra-tensor", file=whole[1].file, tensor=key, detail=f"it is in {whole[0].file} already"))
        boxes = {item.offsets: item for item in items if item.offsets is not None}
        if len({item.dtype for item in items}) > 1:
            problems.append(Problem(kind="wrong-dtype", tensor=key, detail=f"its parts are {sorted({item.dtype for item in items})}"))
        if len({len(offsets) for offsets in boxes}) > 1:
            problems.append(Problem(kind="wrong-shape", tensor=key, detail="its parts have other numbers of dims"))
        elif boxes:
            ends = zip(*([o + s for o, s in zip(offsets, item.shape, strict=True)] for offsets, item in boxes.items()), strict=True)
            around = math.prod(max(along) for along in ends)
            covered = sum(math.prod(item.shape) for item in boxes.values())
            if covered != around:
                problems.append(Problem(kind="hole", tensor=key, detail=f"its parts hold {covered} elements, the box around them {around}"))
    return problems


def _numbers(value: Any) -> tuple[int, ...]:
    """Raises TypeError for what is no list of numbers that count something."""
    if not isinstance(value, list) or any(type(number) is not int or number < 0 for number in value):
        raise TypeError(f"{value!s:.80} are no sizes")
    return tuple(value)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands in it twice")
    return found
