from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surefoot.cli.main import run
from surefoot.core.clock import ManualClock
from surefoot.core.errors import ConfigError, DataError
from surefoot.core.sections import SourceSection
from surefoot.core.version import __version__
from surefoot.data.choosing import heldout_limit
from surefoot.data.documents import OnBadRecord
from surefoot.data.manifest import Manifest, Split, load_manifest
from surefoot.data.prepare import prepare
from surefoot.data.prepared import check_prepared, prepare_command
from surefoot.data.shards import TokenStore
from surefoot.data.survey import Progress, paced
from surefoot.data.tokenizer import bytes_tokenizer, load_tokenizer

# Prepares argv[1] into argv[2], says each stage, and waits at the tokenizing stage for a line that never comes.
WAITING_PREPARE = """
import signal, sys
from surefoot.core.sections import SourceSection
from surefoot.core.version import __version__
from surefoot.data.prepare import prepare

def tell(progress):
    print(progress.stage, flush=True)
    if progress.stage == "tokenizing":
        sys.stdin.readline()

signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
prepare([SourceSection(name="text", files=(sys.argv[1],))], out=sys.argv[2], tokenizer="bytes", force="--force" in sys.argv, progress=tell)
"""
# Prepares argv[1] on the small disk argv[2]; when that fails it is made larger, and the same is asked for again.
FULL_DISK_PREPARE = """
import os, subprocess, sys
from surefoot.core.errors import DataError
from surefoot.core.sections import SourceSection
from surefoot.core.version import __version__
from surefoot.data.prepare import prepare

corpus, disk, tokenizer = sys.argv[1:]
told = []
sources = [SourceSection(name="text", files=(corpus,))]
try:
    prepare(sources, out=f"{disk}/out", tokenizer=tokenizer)
except DataError as error:
    print(error)
print(os.listdir(disk))
subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
prepare(sources, out=f"{disk}/out", tokenizer=tokenizer, progress=lambda progress: told.append(progress.stage))
print(told[0], os.listdir(disk))
"""


def write_texts(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def prepare_file(path: Path, out: Path, **settings: Any) -> Manifest:
    return prepare([SourceSection(name="text", files=(str(path),))], out=out, **{"tokenizer": "bytes", "heldout_fraction": 0.0, **settings})


def texts_in(out: Path, *, split: Split) -> list[str]:
    """The documents of a split, read back from the shards."""
    manifest = load_manifest(out)
    store = TokenStore(out, source="text", split=split, manifest=manifest)
    tokens = store.read(0, store.num_tokens)
    store.close()
    ends = np.flatnonzero(tokens == manifest.tokenizer.eos_id)
    tokenizer = load_tokenizer(out / "tokenizer.json")
    return [tokenizer.decode(part[part != manifest.tokenizer.eos_id].tolist()) for part in np.split(tokens, ends + 1)[:-1]]


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


TEXTS = [f"document {number} of größe {number * number}" for number in range(300)]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_documents_come_back_from_the_shards(tmp_path: Path, tokenizer: str) -> None:
    manifest = prepare_file(write_texts(tmp_path / "a.jsonl", TEXTS), tmp_path / "out", tokenizer=tokenizer)
    assert texts_in(tmp_path / "out", split="train") == TEXTS
    entry = manifest.sources["text"].splits["train"]
    assert (entry.docs, entry.text_bytes) == (300, sum(len(text.encode()) for text in TEXTS))
    assert load_manifest(tmp_path / "out") == manifest


def test_the_same_input_gives_the_same_bytes_wherever_it_lies(tmp_path: Path) -> None:
    for place in ("one", "two/deeper"):
        prepare_file(write_texts(tmp_path / place / "a.jsonl", TEXTS), tmp_path / place / "out", tokenizer="bpe:300", heldout_fraction=0.1)
    first, second = bytes_of(tmp_path / "one" / "out"), bytes_of(tmp_path / "two/deeper" / "out")
    assert first == second
    assert sorted(first) == [
        "inputs.json",
        "manifest.json",
        *(f"text/heldout/00000.{suffix}" for suffix in ("idx", "len", "sig", "src.parquet", "sum", "tok")),
        "text/rejects.jsonl",
        *(f"text/train/00000.{suffix}" for suffix in ("idx", "len", "sig", "src.parquet", "sum", "tok")),
        "tokenizer.json",
    ]
    assert not [name for name, data in first.items() if str(tmp_path).encode() in data]


def test_held_out_documents_are_not_in_train_and_stay_held_out_when_text_is_added(tmp_path: Path) -> None:
    prepare_file(write_texts(tmp_path / "a.jsonl", TEXTS[:200]), tmp_path / "few", heldout_fraction=0.2)
    prepare_file(write_texts(tmp_path / "b.jsonl", TEXTS), tmp_path / "more", heldout_fraction=0.2)
    few, more = (set(texts_in(tmp_path / name, split="heldout")) for name in ("few", "more"))
    assert few == more & set(TEXTS[:200])
    assert 20 < len(few) < 60
    assert set(texts_in(tmp_path / "few", split="train")) == set(TEXTS[:200]) - few


@pytest.mark.parametrize(("num_documents", "fraction", "num_heldout"), [(1, 0.5, 0), (2, 1e-9, 1), (2, 0.0, 0), (40, 1e-9, 1)])
def test_at_least_one_document_is_held_out_where_that_can_be(tmp_path: Path, num_documents: int, fraction: float, num_heldout: int) -> None:
    manifest = prepare_file(write_texts(tmp_path / "a.jsonl", TEXTS[:num_documents]), tmp_path / "out", heldout_fraction=fraction)
    splits = manifest.sources["text"].splits
    assert (splits["heldout"].docs, splits["train"].docs) == (num_heldout, num_documents - num_heldout)


def test_train_keeps_a_document_even_when_every_hash_is_low(tmp_path: Path) -> None:
    """With two documents and half held out, one pair in four falls below the limit together."""
    for number in range(12):
        path = write_texts(tmp_path / f"{number}.jsonl", [f"{number} a", f"{number} b"])
        splits = prepare_file(path, tmp_path / f"out{number}", heldout_fraction=0.5).sources["text"].splits
        assert (splits["train"].docs, splits["heldout"].docs) == (1, 1)


def test_bad_records_are_counted_and_listed_or_fatal(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", TEXTS[:3])
    path.write_text(path.read_text() + "{broken\n" + '{"body": 1}\n')
    with pytest.raises(DataError, match="broken JSON"):
        prepare_file(path, tmp_path / "out")
    assert names_in(tmp_path) == ["a.jsonl"]
    manifest = prepare_file(path, tmp_path / "out", on_bad_record="skip")
    assert manifest.sources["text"].bad_records == 2
    rejects = [json.loads(line) for line in (tmp_path / "out" / "text" / "rejects.jsonl").read_text().splitlines()]
    assert [(reject["file"], reject["line"]) for reject in rejects] == [("a.jsonl", 4), ("a.jsonl", 5)]


def test_the_cure_for_a_bad_record_is_a_command_that_works(tmp_path: Path) -> None:
    """Whoever called: `surefoot train` has no such option itself."""
    (tmp_path / "a b.jsonl").write_text('{"body": "one"}\n{broken\n')
    source = SourceSection(name="mine", files=(str(tmp_path / "a b.jsonl"),))
    asked: dict[str, Any] = {"tokenizer": "bpe:300", "heldout_fraction": 0.25}
    with pytest.raises(DataError, match="broken JSON") as caught:
        prepare([source], out=tmp_path / "out", text_field="body", **asked)
    command = shlex.split(caught.value.hint.split("`")[1])
    assert command[0] == "surefoot"
    assert run(command[1:]) == 0
    check_prepared(tmp_path / "out", sources=[source], **asked)


def test_of_many_inputs_the_command_names_one() -> None:
    section = SourceSection(files=tuple(f"{number}.txt" for number in range(9)))
    command = prepare_command([section], out="out", tokenizer="bytes", heldout_fraction=0.0)
    assert command == "surefoot data prepare 0.txt ... --out out --name text --tokenizer bytes --heldout-fraction 0.0"


def test_copies_and_empty_documents_are_counted(tmp_path: Path) -> None:
    source = prepare_file(write_texts(tmp_path / "a.jsonl", ["a", "", "b", "a"]), tmp_path / "out").sources["text"]
    assert (source.duplicates, source.empty, source.splits["train"].docs) == (1, 1, 2)


@pytest.mark.parametrize("on_bad_record", ["fail", "skip"])
def test_an_empty_corpus_is_refused(tmp_path: Path, on_bad_record: OnBadRecord) -> None:
    with pytest.raises(DataError, match="no document in 1 files"):
        prepare_file(write_texts(tmp_path / "a.jsonl", ["", " "]), tmp_path / "new" / "out", on_bad_record=on_bad_record)
    assert names_in(tmp_path) == ["a.jsonl"]


def test_a_given_tokenizer_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_bytes(bytes_tokenizer().json_bytes)
    manifest = prepare_file(write_texts(tmp_path / "a.jsonl", TEXTS), tmp_path / "out", tokenizer=str(tmp_path / "mine.json"))
    assert manifest.tokenizer.sha256 == bytes_tokenizer().sha256
    assert manifest.tokenizer.recipe == f"file:{bytes_tokenizer().sha256}"
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "mine.json").read_bytes()


def test_a_tokenizer_is_trained_without_the_held_out_documents(tmp_path: Path) -> None:
    texts = [*TEXTS[:50], "zqzqzqzqzqzq" * 50]
    path = write_texts(tmp_path / "a.jsonl", texts)
    prepare_file(path, tmp_path / "all", tokenizer="bpe:300")
    assert b"zqzq" in (tmp_path / "all" / "tokenizer.json").read_bytes()
    for number in range(200):  # find a prefix under which the odd document is the one held out
        path = write_texts(tmp_path / "b.jsonl", [f"{number} {text}" for text in texts])
        limit = 1e-9
        digests = np.array([list(hashlib.sha256(f"{number} {text}".encode()).digest()) for text in texts], dtype=np.uint8)
        bound = heldout_limit(digests, kept=np.ones(len(texts), dtype=np.bool_), fraction=limit)
        if int.from_bytes(digests[-1].tobytes(), "big") < bound:
            break
    prepare_file(path, tmp_path / "held", tokenizer="bpe:300", heldout_fraction=limit)
    assert texts_in(tmp_path / "held", split="heldout") == [f"{number} {texts[-1]}"]
    assert b"zqzq" not in (tmp_path / "held" / "tokenizer.json").read_bytes()


def test_preparing_again_leaves_equal_data_alone(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", TEXTS)
    first = prepare_file(path, tmp_path / "out")
    before = (tmp_path / "out" / "manifest.json").stat().st_ino
    assert prepare_file(path, tmp_path / "out") == first
    assert (tmp_path / "out" / "manifest.json").stat().st_ino == before
    assert names_in(tmp_path) == ["a.jsonl", "out"]


def test_other_data_is_refused_with_the_cure_and_replaced_by_force(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", TEXTS[:10])
    prepare_file(path, tmp_path / "out")
    before = bytes_of(tmp_path / "out")
    write_texts(path, TEXTS[:20])
    for changes, what in (({}, "documents"), ({"tokenizer": "bpe:300"}, "tokenizer"), ({"heldout_fraction": 0.2}, "heldout_fraction 0.0")):
        with pytest.raises(DataError, match=what) as caught:
            prepare_file(path, tmp_path / "out", **changes)
        assert "--force" in caught.value.hint
        assert "another folder" in caught.value.hint
    assert bytes_of(tmp_path / "out") == before
    prepare_file(path, tmp_path / "out", force=True)
    assert texts_in(tmp_path / "out", split="train") == TEXTS[:20]
    assert names_in(tmp_path) == ["a.jsonl", "out"]


def test_a_folder_with_other_things_is_never_replaced(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", TEXTS[:10])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("x")
    for force in (False, True):
        with pytest.raises(DataError, match="holds no prepared data"):
            prepare_file(path, tmp_path / "out", force=force)
    assert names_in(tmp_path) == ["a.jsonl", "out"]
    (tmp_path / "out" / "thesis.tex").unlink()
    prepare_file(path, tmp_path / "out")


def test_damaged_data_is_found_when_preparing_again_and_mended_by_force(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", TEXTS[:10])
    prepare_file(path, tmp_path / "out")
    (tmp_path / "out" / "text" / "train" / "00000.tok").unlink()
    with pytest.raises(DataError, match=r"cannot open 00000\.tok") as caught:
        prepare_file(path, tmp_path / "out")
    assert "--force" in caught.value.hint
    prepare_file(path, tmp_path / "out", force=True)
    assert texts_in(tmp_path / "out", split="train") == TEXTS[:10]


def test_sources_without_a_name_of_their_own_and_none_are_refused(tmp_path: Path) -> None:
    for names, message in (
        (("a", "a"), "2 sources are named 'a'"),
        ((), "no source"),
        (("../up",), "cannot name"),
        ((".x",), "cannot name"),
    ):
        with pytest.raises(DataError, match=message):
            prepare([SourceSection(name=name, files=("x",)) for name in names], out=tmp_path / "out")


def test_a_fraction_that_is_none_is_refused(tmp_path: Path) -> None:
    for fraction in (-0.1, 0.6, math.nan):
        with pytest.raises(ConfigError, match="held-out fraction"):
            prepare_file(write_texts(tmp_path / "a.jsonl", TEXTS), tmp_path / "out", heldout_fraction=fraction)


@contextmanager
def waiting_prepare(path: Path, out: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A process in the middle of writing shards. Killed at the end."""
    with subprocess.Popen(
        [sys.executable, "-c", WAITING_PREPARE, str(path), str(out), *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        try:
            while (stage := process.stdout.readline().strip()) != "tokenizing":
                assert stage, "it ended before it wrote"
            yield process
        finally:
            process.kill()


def test_a_kill_leaves_nothing_at_the_place_and_the_next_call_goes_through(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", TEXTS)
    with waiting_prepare(path, tmp_path / "out") as process:
        process.kill()
        process.wait()
    assert names_in(tmp_path) == [".out.preparing", "a.jsonl"]
    prepare_file(path, tmp_path / "out")
    assert texts_in(tmp_path / "out", split="train") == TEXTS
    assert names_in(tmp_path) == ["a.jsonl", "out"]


def test_a_kill_while_replacing_leaves_the_old_data(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", TEXTS[:5])
    prepare_file(path, tmp_path / "out")
    before = bytes_of(tmp_path / "out")
    with waiting_prepare(write_texts(path, TEXTS), tmp_path / "out", "--force") as process:
        process.kill()
        process.wait()
    assert bytes_of(tmp_path / "out") == before


def test_a_kill_between_the_two_renames_is_mended(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", TEXTS[:5])
    prepare_file(path, tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / ".out.replaced")
    with pytest.raises(DataError, match="other data"):
        prepare_file(write_texts(path, TEXTS[:7]), tmp_path / "out")
    assert texts_in(tmp_path / "out", split="train") == TEXTS[:5]
    assert names_in(tmp_path) == [".out.preparing", "a.jsonl", "out"]  # what was read, for --force
    told: list[Progress] = []
    prepare_file(path, tmp_path / "out", force=True, progress=told.append)
    assert told[0].stage == "tokenizing"
    assert names_in(tmp_path) == ["a.jsonl", "out"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_kill_behind_the_last_rename_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_there: bool
) -> None:
    path = write_texts(tmp_path / "a.jsonl", TEXTS)

    def interrupt(folder: Path, **_: object) -> None:
        if folder.name == ".out.replaced":  # what comes right behind it
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare_file(path, tmp_path / "out")
    caplog.clear()
    assert names_in(tmp_path) == [".out.preparing", "a.jsonl", "out"]
    if not is_there:
        shutil.rmtree(tmp_path / "out")
    told: list[Progress] = []
    prepare_file(path, tmp_path / "out", progress=told.append)
    assert bool(told) != is_there
    assert ("it begins anew" in caplog.text) != is_there
    assert texts_in(tmp_path / "out", split="train") == TEXTS
    assert names_in(tmp_path) == ["a.jsonl", "out"]


def test_a_rename_that_fails_leaves_the_old_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_texts(tmp_path / "a.jsonl", TEXTS[:5])
    prepare_file(path, tmp_path / "out")
    before, rename = bytes_of(tmp_path / "out"), os.rename

    def fail(source: Path, target: Path) -> None:
        if Path(source).name == "data":
            raise OSError(errno.EIO, "Input/output error", str(target))
        rename(source, target)

    write_texts(path, TEXTS)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises(DataError, match="the device failed"):
            prepare_file(path, tmp_path / "out", force=True)
    assert bytes_of(tmp_path / "out") == before
    prepare_file(path, tmp_path / "out", force=True)
    assert texts_in(tmp_path / "out", split="train") == TEXTS


def test_a_signal_leaves_what_the_next_call_goes_on_from(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", TEXTS)
    with waiting_prepare(path, tmp_path / "deep" / "out") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 75
    assert names_in(tmp_path / "deep") == [".out.preparing"]
    told: list[Progress] = []
    prepare_file(path, tmp_path / "deep" / "out", heldout_fraction=0.01, progress=told.append)
    assert (told[0].stage, told[0].done_bytes) == ("tokenizing", 0)
    assert names_in(tmp_path / "deep") == ["out"]


def test_a_second_process_at_the_same_place_is_refused(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", TEXTS)
    with waiting_prepare(path, tmp_path / "out"), pytest.raises(DataError, match="another process is preparing"):
        prepare_file(path, tmp_path / "out")


def prepare_on_small_disk(path: Path, disk: Path, *, tokenizer: str, size_bytes: int) -> str:
    """What a preparation on a tmpfs of that size says, and then what is left there. Needs a mount namespace of one's own."""
    disk.mkdir()
    script = f'mount -t tmpfs -o size={size_bytes} none "$2" && exec "$0" -c "$1" "$3" "$2" "$4"'
    command = [
        "unshare",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        script,
        sys.executable,
        FULL_DISK_PREPARE,
        str(disk),
        str(path),
        tokenizer,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def can_mount() -> bool:
    if not shutil.which("unshare"):
        return False
    return (
        subprocess.run(["unshare", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode
        == 0
    )


@pytest.mark.skipif(not can_mount(), reason="needs a mount namespace of its own for a small disk")
def test_a_disk_that_fills_up_is_named_and_with_room_the_same_command_goes_on(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", [f"{number} " * 500 for number in range(1000, 1400)])
    said, left, after = prepare_on_small_disk(path, tmp_path / "disk", tokenizer="bpe:257", size_bytes=1 << 20).splitlines()
    assert "no space left while writing" in said
    assert "make room" in said
    assert f"the same command goes on from what is finished; to give that up, delete {tmp_path / 'disk' / '.out.preparing'}" in said
    assert left == "['.out.preparing']"
    assert after == "tokenizing ['out']"


@pytest.mark.skipif(not can_mount(), reason="needs a mount namespace of its own for a small disk")
def test_a_disk_that_is_hopelessly_small_is_refused_before_the_first_token(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", [f"{number} " * 500 for number in range(1000, 1400)])
    said, left, after = prepare_on_small_disk(path, tmp_path / "disk", tokenizer="bytes", size_bytes=1 << 20).splitlines()
    assert "the data need about 1.9 MiB" in said
    assert "no token was written" in said
    assert left == "['.out.preparing']"
    assert after == "tokenizing ['out']"


def test_progress_is_told_per_stage_and_then_by_the_clock() -> None:
    clock = ManualClock()
    told: list[Progress] = []
    tell = paced(told.append, interval_s=2.0, clock=clock)
    for done in range(10):
        tell(Progress("reading", done, 10))
        clock.sleep(0.5)
    tell(Progress("tokenizing", 0, 10))
    assert [(progress.stage, progress.done_bytes) for progress in told] == [
        ("reading", 0),
        ("reading", 4),
        ("reading", 8),
        ("tokenizing", 0),
    ]
    assert str(told[0]) == "reading              0 B of 10 B"


def test_every_stage_is_told(tmp_path: Path) -> None:
    told: list[Progress] = []
    prepare_file(write_texts(tmp_path / "a.jsonl", TEXTS), tmp_path / "out", tokenizer="bpe:300", progress=told.append)
    assert list(dict.fromkeys(progress.stage for progress in told)) == ["reading", "training tokenizer", "tokenizing"]


def check(out: Path, **changes: Any) -> None:
    settings: dict[str, Any] = {"tokenizer": "bytes", "heldout_fraction": 0, "sources": [SourceSection(name="text", files=("gone.txt",))]}
    check_prepared(out, **{**settings, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer": "bpe:300"}, "tokenizer bytes, the config asks for bpe:300"),
        ({"tokenizer": "absent.json"}, "tokenizer bytes, the config asks for absent.json"),
        ({"heldout_fraction": 0.1}, "heldout_fraction 0.0, the config asks for 0.1"),
        ({"sources": [SourceSection(name="mine", files=("a.jsonl",))]}, "name text, the config asks for mine"),
    ],
)
def test_data_that_was_prepared_in_another_way_is_refused_with_the_cure(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    prepare_file(write_texts(tmp_path / "a.jsonl", TEXTS[:9]), tmp_path / "out")
    check(tmp_path / "out")
    with pytest.raises(DataError, match="prepared in another way") as caught:
        check(tmp_path / "out", **changes)
    assert words in caught.value.what
    assert f"--out {tmp_path / 'out'}" in caught.value.hint
    assert "--force" in caught.value.hint


def test_a_tokenizer_file_is_compared_by_its_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_texts(tmp_path / "a.jsonl", TEXTS[:9])
    mine, other = tmp_path / "mine.json", tmp_path / "other.json"
    mine.write_bytes(bytes_tokenizer().json_bytes)
    other.write_bytes(bytes_tokenizer().json_bytes + b"\n")
    prepare_file(path, tmp_path / "out", tokenizer=str(mine))
    check(tmp_path / "out", tokenizer=str(shutil.copy(mine, tmp_path / "copy.json")))
    for spec in ("bytes", str(other)):
        with pytest.raises(DataError, match="tokenizer file:"):
            check(tmp_path / "out", tokenizer=spec)
    assert not caplog.records
    check(tmp_path / "out", tokenizer=str(tmp_path / "gone.json"))
    assert "gone.json is not here" in caplog.text


def test_the_tokenizer_that_was_trained_is_the_one_of_its_file(tmp_path: Path) -> None:
    prepare_file(write_texts(tmp_path / "a.jsonl", TEXTS), tmp_path / "out", tokenizer="bpe:300")
    check(tmp_path / "out", tokenizer="bpe:300")
    check(tmp_path / "out", tokenizer=str(tmp_path / "out" / "tokenizer.json"))


def test_a_failure_of_whoever_is_told_is_not_one_of_the_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def nobody_listens(progress: Progress) -> None:
        if progress.stage == "tokenizing":
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        prepare_file(write_texts(tmp_path / "a.jsonl", TEXTS), tmp_path / "deep" / "out", progress=nobody_listens)
    assert names_in(tmp_path / "deep") == [".out.preparing"]
    assert f"delete {tmp_path / 'deep' / '.out.preparing'}" in caplog.text


def test_a_device_that_fails_is_told_as_one_and_costs_no_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_texts(tmp_path / "a.jsonl", [f"{number} and some words" for number in range(2000)])
    fsync = os.fsync

    def fail_at_the_second_pass(fd: int) -> None:
        if (tmp_path / ".out.preparing" / "data" / "text" / "train" / "00001.tok").exists():
            raise OSError(errno.EIO, "Input/output error")
        fsync(fd)

    sizes: dict[str, Any] = {"chunk_bytes": 1500, "shard_bytes": 30_000}
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_at_the_second_pass)
        with pytest.raises(DataError, match="the device failed at the shards: Input/output error") as caught:
            prepare_file(path, tmp_path / "out", **sizes)
    assert "may write" not in caught.value.hint
    assert str(tmp_path / ".out.preparing") in caught.value.hint
    told: list[Progress] = []
    prepare_file(path, tmp_path / "out", progress=told.append, **sizes)
    assert told[0].stage == "tokenizing"
    assert told[0].done_bytes > 10_000
    prepare_file(path, tmp_path / "whole", **sizes)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


def test_an_input_that_changed_leaves_nothing_to_go_on_from(tmp_path: Path) -> None:
    """Else the next call would find the same survey, should the file's times be put back, and fail in the same way for ever."""
    path = write_texts(tmp_path / "a.jsonl", TEXTS)

    def change(progress: Progress) -> None:
        if progress.stage == "tokenizing":
            path.write_text(path.read_text().replace("document", "Document"))

    with pytest.raises(DataError, match="the input changed"):
        prepare_file(path, tmp_path / "out", progress=change)
    assert names_in(tmp_path) == ["a.jsonl"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(DataError, match="choose a folder that you may write") as caught:
        prepare_file(path, path / "out")
    assert caught.value.where == str(path / "out")


def test_a_write_that_fails_is_named_and_the_next_call_goes_on(tmp_path: Path) -> None:
    """A file size limit makes the kernel refuse a write half-way."""
    path = write_texts(tmp_path / "a.jsonl", [f"{number} " * 500 for number in range(400)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
    try:
        with pytest.raises(DataError, match="cannot write") as caught:
            prepare_file(path, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, former)
    assert caught.value.where == str(tmp_path / "out")
    assert names_in(tmp_path) == [".out.preparing", "a.jsonl"]
    told: list[Progress] = []
    prepare_file(path, tmp_path / "out", progress=told.append)
    assert told[0].stage == "tokenizing"
    assert names_in(tmp_path) == ["a.jsonl", "out"]


def test_the_manifest_names_the_version_that_is_running(tmp_path: Path) -> None:
    assert prepare_file(write_texts(tmp_path / "a.jsonl", TEXTS), tmp_path / "out").tool_version == __version__


def test_preparing_loads_no_torch() -> None:
    script = "import sys, surefoot.data.prepare, surefoot.cli.data; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "False\n"
