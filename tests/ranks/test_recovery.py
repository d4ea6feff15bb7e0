"""Verified recovery on real ranks: nothing wrong is nothing said, and a forged checkpoint is seen by the replay alone."""

from __future__ import annotations

import io
import os
import struct
import time
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.checkpoint.manifest import DIGESTED_PREFIXES, MANIFEST_NAME, checksum_file, manifest_bytes, read_manifest, sealed
from surefoot.checkpoint.verify import read_metadata, verify
from surefoot.core.clock import SystemClock
from surefoot.core.events import Event
from surefoot.core.identity import section_hashes
from surefoot.core.records import LedgerEntry, Manifest, StepReport
from surefoot.core.sections import (
    CheckpointSection,
    DataSection,
    LaunchSection,
    ModelSection,
    ParallelSection,
    RunConfig,
    RunSection,
    ScheduleSection,
    TrainSection,
)
from surefoot.observe.ledger import Ledger, manifest_positions, read_ledger, verify_ledger
from surefoot.observe.ledger_lines import encode_entry, seal
from surefoot.tensors.digest import as_hex, box_digest, combine, state_digest
from surefoot.train.loop import training_steps
from tests.texts import prepare_documents

RunRanks = Callable[..., list[Any]]
LAYOUTS = {
    "alone": ParallelSection(),
    "ddp-2": ParallelSection(dp_replicate=2),
    "fsdp-2": ParallelSection(dp_shard=2),
    "ddp-3": ParallelSection(dp_replicate=3),
}
NUM_STEPS = 24


@pytest.fixture(scope="session")
def text_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_documents(tmp_path_factory.mktemp("text"), sentence="pack my box with five dozen liquor jugs. ")


def config_of(
    data: Path, run_dir: Path, *, layout: str = "ddp-2", lr: float = 3e-4, threads: int = 1, eval_interval_steps: int = 0, **checkpoint: Any
) -> RunConfig:
    config = RunConfig(
        run=RunSection(name="test", dir=str(run_dir), seed=11),
        data=DataSection(path=str(data), seq_len=32),
        model=ModelSection(num_layers=2, d_model=32, num_heads=2),
        train=TrainSection(
            num_steps=NUM_STEPS, global_batch_size=12, micro_batch_size=3, eval_interval_steps=eval_interval_steps, eval_num_samples=4
        ),
        schedule=ScheduleSection(kind="constant", warmup_steps=2),
        parallel=LAYOUTS[layout],
        checkpoint=CheckpointSection(**{"interval_steps": 5, "keep_last": 4, "replay_steps": 6, **checkpoint}),
        launch=LaunchSection(threads_per_rank=threads),
    )
    return replace(config, optimizer=replace(config.optimizer, lr=lr))


def run_to(*, rank: int, world_size: int, config: RunConfig, stop_step: int) -> None:
    """Crash once the save before `stop_step` is committed: nothing is closed, nothing said. Every rank writes its part of that save."""
    saved_step = stop_step - stop_step % int(config.checkpoint.interval_steps)
    for report in training_steps(config):
        if report.step == stop_step:
            deadline_s = time.monotonic() + 50.0
            while saved_step not in [entry.fields["step"] for entry in entries(config, "checkpoint.committed")]:
                assert time.monotonic() < deadline_s
                time.sleep(0.005)
            os._exit(0)


def run_on(*, rank: int, world_size: int, config: RunConfig) -> list[StepReport]:
    return list(training_steps(config))


def crash(run_ranks: RunRanks, config: RunConfig, *, at: int) -> None:
    with pytest.raises(AssertionError, match="died"):
        run_ranks(run_to, config.parallel.num_ranks, init=False, config=config, stop_step=at)


def finish(run_ranks: RunRanks, config: RunConfig) -> list[StepReport]:
    reports: list[StepReport] = run_ranks(run_on, config.parallel.num_ranks, init=False, config=config)[0]
    return reports


def entries(config: RunConfig, event: str) -> list[LedgerEntry]:
    return [entry for entry in read_ledger(Path(config.run.dir) / "ledger.jsonl") if entry.event == event]


def verified(config: RunConfig) -> list[tuple[object, ...]]:
    """(checkpoint, steps, mode) of each resume's outcome."""
    return [tuple(entry.fields[name] for name in ("checkpoint", "num_steps", "mode")) for entry in entries(config, "replay.verified")]


def final_digest(config: RunConfig) -> str:
    return str(entries(config, "run.finished")[-1].fields["state_digest"])


@pytest.mark.parametrize("layout", ["ddp-2", "fsdp-2"])
def test_kill_after_kill_the_replay_gives_the_same_bits(layout: str, run_ranks: RunRanks, text_data: Path, tmp_path: Path) -> None:
    undisturbed = config_of(text_data, tmp_path / "undisturbed", layout=layout)
    finish(run_ranks, undisturbed)
    config = config_of(text_data, tmp_path / "run", layout=layout)
    crash(run_ranks, config, at=9)
    crash(run_ranks, config, at=8)  # in the middle of its replay, which starts anew
    crash(run_ranks, config, at=14)
    finish(run_ranks, config)
    assert verified(config) == [("s5-a1", 4, "bits"), ("s10-a3", 4, "bits")]
    assert [entry.fields["largest_difference"] for entry in entries(config, "replay.verified")] == [0.0, 0.0]
    assert not entries(config, "replay.differed")
    assert not entries(config, "checkpoint.rejected")
    assert final_digest(config) == final_digest(undisturbed)


@pytest.mark.parametrize("layout", ["alone", "ddp-2", "fsdp-2"])
def test_a_forged_moment_is_seen_by_the_replay_alone_and_the_run_goes_back_a_generation(
    layout: str, run_ranks: RunRanks, text_data: Path, tmp_path: Path
) -> None:
    undisturbed = config_of(text_data, tmp_path / "undisturbed", layout=layout)
    finish(run_ranks, undisturbed)
    config = config_of(text_data, tmp_path / "run", layout=layout)
    crash(run_ranks, config, at=14)
    forge_moment(tmp_path / "run", "s10-a1")
    reports = finish(run_ranks, config)
    assert [report.step for report in reports] == [11, 12, *range(6, NUM_STEPS + 1)]  # the first step reads the weights alone
    (difference,) = entries(config, "replay.differed")
    assert (difference.step, difference.fields["checkpoint"]) == (12, "s10-a1")
    assert [entry.fields["id"] for entry in entries(config, "checkpoint.rejected")] == ["s10-a1"]
    assert [entry.fields["checkpoint"] for entry in entries(config, "attempt.started")] == [None, "s10-a1", "s5-a1"]
    assert verified(config) == [("s5-a1", 6, "bits")]
    assert final_digest(config) == final_digest(undisturbed)


def test_a_crash_in_the_replay_of_a_forged_checkpoint_hides_nothing(run_ranks: RunRanks, text_data: Path, tmp_path: Path) -> None:
    config = config_of(text_data, tmp_path / "run", interval_steps=4)
    crash(run_ranks, config, at=15)
    forge_moment(tmp_path / "run", "s12-a1")
    crash(run_ranks, config, at=13)
    finish(run_ranks, config)
    assert [entry.fields["checkpoint"] for entry in entries(config, "replay.differed")] == ["s12-a1"]
    assert verified(config)[-1] == ("s8-a1", 6, "bits")


def test_two_forged_ones_in_a_row_fall_back_two_generations(run_ranks: RunRanks, text_data: Path, tmp_path: Path) -> None:
    config = config_of(text_data, tmp_path / "run", layout="alone", replay_tolerance=1e-12)
    crash(run_ranks, config, at=17)
    for checkpoint in ("s10-a1", "s15-a1"):
        forge_moment(tmp_path / "run", checkpoint)
    finish(run_ranks, config)
    assert [entry.fields["id"] for entry in entries(config, "checkpoint.rejected")] == ["s15-a1", "s10-a1"]
    assert verified(config) == [("s5-a1", 6, "bits")]


def test_where_no_checkpoint_repeats_the_record_a_person_must_look(run_ranks: RunRanks, text_data: Path, tmp_path: Path) -> None:
    config = config_of(text_data, tmp_path / "run", layout="alone", replay_tolerance=1e-12)
    crash(run_ranks, config, at=8)
    forge_moment(tmp_path / "run", "s5-a1")
    with pytest.raises(AssertionError, match="SystemExit: 6"):
        finish(run_ranks, config)
    (halted,) = entries(config, "run.halted")
    assert halted.rule == "replay"
    assert "no checkpoint repeats" in halted.reason


def test_a_machine_that_does_not_repeat_its_own_bits_goes_on_from_the_newest(run_ranks: RunRanks, text_data: Path, tmp_path: Path) -> None:
    """As far as the run can tell: both checkpoints go on to other bits than were recorded, and stay near them."""
    config = config_of(text_data, tmp_path / "run", layout="alone", replay_tolerance=0.1)
    crash(run_ranks, config, at=17)
    for checkpoint in ("s10-a1", "s15-a1"):
        forge_moment(tmp_path / "run", checkpoint, factor=1.0001)
    reports = finish(run_ranks, config)
    assert len(entries(config, "replay.differed")) == 2
    (outcome,) = entries(config, "replay.verified")
    assert (outcome.rule, outcome.fields["checkpoint"]) == ("not-reproduced", "s15-a1")
    assert [report.step for report in reports[-9:]] == list(range(16, NUM_STEPS + 1))


def test_on_another_number_of_ranks_the_loss_is_compared_within_the_tolerance(run_ranks: RunRanks, text_data: Path, tmp_path: Path) -> None:
    crash(run_ranks, config_of(text_data, tmp_path / "run", layout="ddp-3"), at=8)
    crash(run_ranks, config_of(text_data, tmp_path / "run", layout="ddp-2"), at=12)
    config = config_of(text_data, tmp_path / "run", layout="fsdp-2")
    finish(run_ranks, config)
    assert verified(config) == [("s5-a1", 3, "tolerance"), ("s10-a2", 2, "tolerance")]
    assert all(0.0 <= float(str(entry.fields["largest_difference"])) < 1e-4 for entry in entries(config, "replay.verified"))
    assert not entries(config, "checkpoint.rejected")


def test_other_surroundings_ask_for_the_tolerance_and_are_ledgered(run_ranks: RunRanks, text_data: Path, tmp_path: Path) -> None:
    crash(run_ranks, config_of(text_data, tmp_path / "run", layout="alone", threads=1), at=8)
    config = config_of(text_data, tmp_path / "run", layout="alone", threads=2)
    finish(run_ranks, config)
    assert verified(config) == [("s5-a1", 3, "tolerance")]
    (changed,) = entries(config, "environment.changed")
    assert changed.fields["changed"] == {"num_threads": [1, 2]}


def test_under_another_config_the_difference_is_shown_and_nothing_is_judged(run_ranks: RunRanks, text_data: Path, tmp_path: Path) -> None:
    crash(run_ranks, config_of(text_data, tmp_path / "run", layout="alone"), at=9)
    config = config_of(text_data, tmp_path / "run", layout="alone", lr=3e-2)
    ledger = Ledger(tmp_path / "run" / "ledger.jsonl", clock=SystemClock(), by="a person")
    fields = {"section": "optimizer", "hash": section_hashes(config)["optimizer"]}
    ledger.append(Event.CONFIG_ACCEPTED, generation=1, attempt=1, step=9, fields=fields)
    finish(run_ranks, config)
    (outcome,) = entries(config, "replay.verified")
    assert (outcome.fields["num_steps"], outcome.fields["mode"], outcome.fields["num_compared"]) == (0, "none", 4)
    assert float(str(outcome.fields["largest_difference"])) > 1e-6
    assert "config, code or data differ" in outcome.reason


def test_a_save_during_the_replay_says_what_it_stands_on(run_ranks: RunRanks, text_data: Path, tmp_path: Path) -> None:
    config = config_of(text_data, tmp_path / "run", layout="alone")
    crash(run_ranks, config, at=9)
    finish(run_ranks, replace(config, checkpoint=replace(config.checkpoint, interval_steps=2)))
    reasons = {entry.fields["id"]: entry.reason for entry in entries(config, "checkpoint.committed")}
    assert reasons["s6-a2"] == "every 2 steps; stands on s5-a1, 1 of whose 4 steps to compare are verified"
    assert reasons[f"s{NUM_STEPS}-a2"] == "the run is finished"


def test_a_replay_of_no_steps_is_off_and_says_so(run_ranks: RunRanks, text_data: Path, tmp_path: Path) -> None:
    config = config_of(text_data, tmp_path / "run", layout="alone", replay_steps=0)
    crash(run_ranks, config, at=9)
    finish(run_ranks, config)
    assert verified(config) == [("s5-a1", 0, "none")]


# --- The canary ---


@pytest.mark.parametrize("layout", ["ddp-2", "fsdp-2"])
def test_the_canary_of_a_checkpoint_is_evaluated_again(layout: str, run_ranks: RunRanks, text_data: Path, tmp_path: Path) -> None:
    config = config_of(text_data, tmp_path / "run", layout=layout, eval_interval_steps=5)
    crash(run_ranks, config, at=9)
    finish(run_ranks, config)
    assert not entries(config, "checkpoint.rejected")
    assert verified(config) == [("s5-a1", 4, "bits")]


def test_forged_weights_are_seen_by_the_canary_before_a_step_is_made(run_ranks: RunRanks, text_data: Path, tmp_path: Path) -> None:
    config = config_of(text_data, tmp_path / "run", eval_interval_steps=5)
    crash(run_ranks, config, at=14)
    forge_moment(tmp_path / "run", "s10-a1", prefix="model.", slot="weight")
    reports = finish(run_ranks, config)
    assert [report.step for report in reports] == list(range(6, NUM_STEPS + 1))
    (rejected,) = entries(config, "checkpoint.rejected")
    assert rejected.fields["id"] == "s10-a1"
    assert "its held-out loss was" in rejected.reason


def test_a_canary_on_other_ranks_may_differ_within_the_tolerance(run_ranks: RunRanks, text_data: Path, tmp_path: Path) -> None:
    crash(run_ranks, config_of(text_data, tmp_path / "run", layout="ddp-3", eval_interval_steps=5), at=9)
    config = config_of(text_data, tmp_path / "run", layout="alone", eval_interval_steps=5)
    finish(run_ranks, config)
    assert not entries(config, "checkpoint.rejected")


# --- A checkpoint changed by somebody who knows the format: every checksum, digest and hash fits, in the ledger too ---


def forge_moment(run_dir: Path, checkpoint: str, *, prefix: str = "optim.", slot: str = "exp_avg", factor: float = 1.5) -> str:
    """Multiply one moment of one parameter, or another tensor; its key. Checkpoint and ledger verify afterwards."""
    path = run_dir / "checkpoints" / checkpoint
    manifest = read_manifest(path)
    key = next(tensor.key for tensor in manifest.tensors if tensor.key.startswith(prefix) and tensor.key.endswith(f".{slot}"))
    digest = _change_tensor(path, key, factor)
    forged = _reseal(path, manifest, key, digest)
    _rewrite_ledger(run_dir, checkpoint, forged.state_digest)
    assert verify(path) == []
    return key


def _change_tensor(path: Path, key: str, factor: float) -> str:
    """Changes every stored part in place; the digest of the changed tensor."""
    metadata: Any = read_metadata(path)
    entry = metadata.state_dict_metadata[key]
    parts = []
    for index, info in metadata.storage_data.items():
        if index.fqn != key:
            continue
        file = path / info.relative_path
        raw = bytearray(file.read_bytes())
        region = raw[info.offset : info.offset + info.length]
        part = path.with_name("part")
        part.write_bytes(region)
        tensor = torch.load(part, weights_only=True)
        part.unlink()
        changed = tensor * factor
        old, new = (value.contiguous().view(torch.uint8).numpy().tobytes() for value in (tensor, changed))
        at = region.find(old)
        assert at >= 0
        assert old != new
        region[at : at + len(old)] = new
        raw[info.offset : info.offset + info.length] = _with_crc(region, new)
        file.write_bytes(raw)
        parts.append(box_digest(changed, global_shape=entry.size, offsets=index.offset))
    return as_hex(combine(parts))


def _with_crc(region: bytearray, payload: bytes) -> bytearray:
    """The zip with the CRC of its changed member, wherever the old one stands; one without CRCs stays without."""
    with zipfile.ZipFile(io.BytesIO(bytes(region))) as archive:
        member = next(info for info in archive.infolist() if info.filename.endswith("data/0"))
    if member.CRC:
        region = bytearray(bytes(region).replace(struct.pack("<I", member.CRC), struct.pack("<I", zlib.crc32(payload))))
    return region


def _reseal(path: Path, manifest: Manifest, key: str, digest: str) -> Manifest:
    tensors = tuple(replace(tensor, digest=digest) if tensor.key == key else tensor for tensor in manifest.tensors)
    files = tuple(
        replace(file, xxh3_128=checksum_file(path / file.name), num_bytes=(path / file.name).stat().st_size) for file in manifest.files
    )
    covered = state_digest(tensor for tensor in tensors if tensor.key.startswith(DIGESTED_PREFIXES))
    forged = sealed(replace(manifest, tensors=tensors, files=files, state_digest=covered))
    (path / MANIFEST_NAME).write_bytes(manifest_bytes(forged))
    return forged


def _rewrite_ledger(run_dir: Path, checkpoint: str, digest: str) -> None:
    ledger = run_dir / "ledger.jsonl"
    prev = None
    lines = []
    for entry in read_ledger(ledger):
        values = {name: getattr(entry, name) for name in entry.__slots__ if name != "hash"}
        if entry.event.startswith("checkpoint.") and entry.fields.get("id") == checkpoint and "state_digest" in entry.fields:
            values["fields"] = {**entry.fields, "state_digest": digest}
        made = seal(values if prev is None else {**values, "prev": prev})
        prev = made.hash
        lines.append(encode_entry(made))
    ledger.write_bytes(b"".join(lines))
    hashes = {entry.seq: entry.hash for entry in read_ledger(ledger)}
    for path in (run_dir / "checkpoints").glob("s*"):
        manifest = read_manifest(path)
        (path / MANIFEST_NAME).write_bytes(manifest_bytes(sealed(replace(manifest, ledger_hash=hashes[manifest.ledger_seq]))))
    check = verify_ledger(ledger, manifests=manifest_positions(run_dir))
    assert check.ok, check
