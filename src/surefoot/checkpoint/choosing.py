"""Which source serves which file of a checkpoint: each rank looks into the memory of its host, and all share out the rest.

A folder with a wrong list of files serves nothing that the list puts in doubt: a file of another size not at all, and with files that
nobody wrote none of the others either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from surefoot.checkpoint.manifest import EXTRAS_NAME, MANIFEST_NAME, METADATA_NAME, checksum_bytes, read_manifest
from surefoot.checkpoint.metadata import stored_in
from surefoot.checkpoint.readback import check_listing
from surefoot.checkpoint.sources import Choice, FileSource, FolderSource, choose, is_shared, read_all
from surefoot.checkpoint.verify import check_tensors, raise_first
from surefoot.core.errors import CheckpointError, Corrupt
from surefoot.core.records import Manifest, ManifestFile, Problem
from surefoot.tensors.world import World, broadcast_json, gather_json, lead

_ALL_READ = (METADATA_NAME, EXTRAS_NAME)
"""Small files that every rank reads whole, checked and used from the same bytes."""


@dataclass
class Places:
    """The sources of one checkpoint in the order in which they are asked, and what the lists of files say against its folders."""

    path: Path
    sources: Sequence[FileSource]
    listings: Mapping[str, Sequence[Problem]]

    @property
    def folders(self) -> list[FolderSource]:
        return [source for source in self.sources if isinstance(source, FolderSource)]

    def against(self, source: FileSource, file: ManifestFile) -> list[Problem]:
        """Why the folder may not serve the file."""
        found = self.listings.get(str(source.folder), ()) if isinstance(source, FolderSource) else ()
        return [problem for problem in found if problem.kind == "extra-file" or problem.file in (file.name, MANIFEST_NAME)]

    def choose(self, file: ManifestFile, sources: Iterable[FileSource]) -> Choice:
        """Local. The first of `sources` that has the right bytes and nothing against it."""
        refused = {source.name: problems for source in sources if (problems := self.against(source, file))}
        choice = choose(file, [source for source in sources if source.name not in refused])
        if not refused:
            return choice
        seen = [problem for problem in choice.problems if problem.kind != "missing-file"]
        return Choice(choice.source, (*(problem for problems in refused.values() for problem in problems), *seen))

    def read_small(self, manifest: Manifest, name: str) -> tuple[bytes, list[Problem]]:
        """Local. The content of a small file from the first source that has it right, and what is wrong with those before it.

        Raises CheckpointError when none has it.
        """
        file = next((file for file in manifest.files if file.name == name), None)
        if file is None:
            raise Corrupt("the manifest does not list it", where=name)
        problems: list[Problem] = []
        for source in self.sources:
            problems += (against := self.against(source, file))
            if against or not source.has(file):
                continue
            try:
                raw = read_all(file, source)
            except (CheckpointError, OSError) as error:
                problems.append(Problem(kind="unreadable", file=name, detail=f"{source.name}: {error}"))
                continue
            if checksum_bytes(raw) == file.xxh3_128:
                return raw, problems
            problems.append(Problem(kind="wrong-checksum", file=name, detail=f"{source.name}: its bytes are not those that were written"))
        raise_first(problems or [Problem(kind="missing-file", file=name, detail="no source has it")], where=self.path)
        raise AssertionError("raise_first raises when there is a problem")


def find_manifest(path: Path, folders: Sequence[FolderSource], *, expected_state_digest: str | None) -> tuple[Manifest, list[Problem]]:
    """Local. The manifest of the first folder that has the right one, the checkpoint's own first, and what is wrong in those before."""
    first: CheckpointError | None = None
    problems: list[Problem] = []
    for folder in sorted(folders, key=lambda folder: folder.folder != path):
        try:
            manifest = read_manifest(folder.folder)
            if expected_state_digest not in (None, manifest.state_digest):
                what = f"state_digest {manifest.state_digest}, the ledger says {expected_state_digest}"
                raise Corrupt(what, where=str(folder.folder))
            return manifest, problems
        except CheckpointError as error:
            first = first or error
            problems.append(Problem(kind="bad-manifest", file=MANIFEST_NAME, detail=f"{folder.name}: {error.what}"))
    assert first is not None
    raise first


def share_listings(folders: Sequence[FolderSource], manifest: Manifest, *, world: World) -> dict[str, list[Problem]]:
    """Collective over the save group. Rank 0 compares the lists of files for all: problems by folder."""

    def look() -> dict[str, list[dict[str, Any]]]:
        return {str(folder.folder): [asdict(problem) for problem in _listing(folder.folder, manifest)] for folder in folders}

    listed = broadcast_json(world, lead(world, look, unexpected=CheckpointError))
    return {folder: [Problem(**problem) for problem in problems] for folder, problems in listed.items()}


def choose_local(
    places: Places, manifest: Manifest, *, needed: set[str], num_threads: int
) -> tuple[dict[str, FileSource], list[Problem], list[str]]:
    """Local. From the memory of this host: the sources of needed files, what is damaged there, and the files to look for elsewhere.

    A file that memory holds and nobody here needs is not looked at.
    """
    local = [source for source in places.sources if not is_shared(source)]
    rest = [file for file in manifest.files if file.name not in _ALL_READ]
    held = [file for file in rest if any(source.has(file) for source in local)]
    wanted = [file for file in held if file.name in needed]
    with ThreadPoolExecutor(num_threads) as pool:
        choices = dict(zip((file.name for file in wanted), pool.map(lambda file: places.choose(file, local), wanted), strict=True))
    chosen = {name: choice.source for name, choice in choices.items() if choice.source is not None}
    problems = [problem for choice in choices.values() for problem in choice.problems]
    settled = {file.name for file in held if file.name not in needed} | chosen.keys()
    return chosen, problems, [file.name for file in rest if file.name not in settled]


def agree_wanted(world: World, wanted: Sequence[str]) -> set[str]:
    """Collective over the save group. What any rank looks for."""
    return {name for names in gather_json(world, list(wanted)) for name in names}


def choose_shared(
    places: Places, manifest: Manifest, metadata: Metadata, *, wanted: set[str], world: World, num_threads: int
) -> list[list[Any]]:
    """Local. [file, number of its source, problems] for this rank's share of the wanted files, the same bytes for each rank.

    Raises CheckpointError that names file and tensors when no source has a file.
    """
    shared = [source for source in places.sources if is_shared(source)]
    mine = shares([file for file in manifest.files if file.name in wanted], num_ranks=world.size)[world.rank]
    with ThreadPoolExecutor(num_threads) as pool:
        choices = list(pool.map(lambda file: places.choose(file, shared), mine))
    lost = [(file, choice) for file, choice in zip(mine, choices, strict=True) if choice.source is None]
    for file, choice in lost[:1]:
        hit = [tensor for tensor in manifest.tensors if file.name in stored_in(metadata, tensor.key)]
        readable = places.path.is_dir() and any(problem.kind != "missing-file" for problem in choice.problems)
        raise_first([*choice.problems, *(check_tensors(places.path, metadata, hit) if readable else ())], where=places.path)
    return [
        [file.name, _number(choice.source, shared), [asdict(problem) for problem in choice.problems]]
        for file, choice in zip(mine, choices, strict=True)
    ]


def shares(files: Sequence[ManifestFile], *, num_ranks: int) -> list[list[ManifestFile]]:
    """`files` over the ranks, about the same bytes for each; the same on every rank."""
    shared: list[list[ManifestFile]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for file in sorted(files, key=lambda file: (-file.num_bytes, file.name)):
        rank = load.index(min(load))
        shared[rank].append(file)
        load[rank] += file.num_bytes
    return shared


def agree_shared(places: Places, world: World, share: Sequence[Sequence[Any]]) -> tuple[dict[str, FileSource], list[Problem]]:
    """Collective over the save group. Everybody's shares together: source by file, and the damage that was gone around."""
    shared = [source for source in places.sources if is_shared(source)]
    chosen: dict[str, FileSource] = {}
    problems: list[Problem] = []
    for rank in gather_json(world, list(share)):
        for name, number, found in rank:
            chosen[name] = shared[number]
            problems += [Problem(**problem) for problem in found]
    return chosen, problems


def _number(source: FileSource | None, shared: Sequence[FileSource]) -> int:
    return next(number for number, other in enumerate(shared) if other is source)


def _listing(folder: Path, manifest: Manifest) -> list[Problem]:
    if not folder.is_dir():
        return [Problem(kind="missing-file", file=MANIFEST_NAME, detail=f"no folder {folder}")]
    return check_listing(folder, manifest)
