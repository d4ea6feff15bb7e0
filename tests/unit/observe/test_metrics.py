from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surefoot.core.clock import ManualClock
from surefoot.core.records import StepReport
from surefoot.observe.metrics import STEP_SCHEMA, MetricsWriter, compact, read_steps

Report = Callable[..., StepReport]

FROZEN = Path(__file__).parent / "frozen"


def writer(run_dir: Path, *, generation: int = 1, rows_per_segment: int = 4096) -> MetricsWriter:
    return MetricsWriter(run_dir, generation=generation, clock=ManualClock(), rows_per_segment=rows_per_segment)


def steps(run_dir: Path) -> list[int]:
    return [row["step"] for row in read_steps(run_dir).to_pylist()]


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "metrics").iterdir())


def write_steps(out: MetricsWriter, report: Report, first: int, last: int, **given: object) -> None:
    for step in range(first, last + 1):
        out.write(report(step, **given))


def test_the_schema_holds_every_field_of_a_report() -> None:
    arrow: dict[Any, pa.DataType] = {
        int: pa.int64(),
        float: pa.float64(),
        str: pa.utf8(),
        tuple[float, ...]: pa.list_(pa.float64()),
        tuple[int, ...]: pa.list_(pa.int64()),
        Mapping[str, float]: pa.map_(pa.utf8(), pa.float64()),
    }
    hints = get_type_hints(StepReport)
    wanted = {}
    for item in fields(StepReport):
        hint = hints[item.name]
        known = [kind for kind in (hint, *get_args(hint)) if kind in arrow]
        wanted[item.name] = arrow[known[0]]
    found = {item.name: item.type for item in STEP_SCHEMA}
    assert found == {**wanted, "time_utc": pa.timestamp("ms", tz="UTC"), "mono_s": pa.float64()}
    assert STEP_SCHEMA.metadata == {b"surefoot.format_version": b"1"}


def test_rows_read_back_as_they_were_written(tmp_path: Path, report: Report) -> None:
    clock = ManualClock(now_s=2.5)
    out = MetricsWriter(tmp_path, generation=3, clock=clock)
    by_name: dict[str, Any] = {"rank_norms": (0.5, float("inf")), "rank_tokens": (3, 4), "probes": {"log_z": 1.5, "act_rms:blocks.0": 0.25}}
    written = report(7, generation=3, attempt=2, val_loss=4.5, saved="s7-a2", loss=float("inf"), **by_name)
    out.write(written)
    (row,) = read_steps(tmp_path).to_pylist()
    assert (row.pop("time_utc").isoformat(), row.pop("mono_s")) == ("2026-01-01T00:00:02.500000+00:00", 2.5)
    values = {item.name: getattr(written, item.name) for item in fields(StepReport)}
    for name in ("rank_losses", "rank_tokens", "rank_norms", "group_norms", "update_ratios", "probes", "val_losses"):
        values[name] = list(values[name].items() if isinstance(values[name], dict) else values[name]) or None
    assert row == values
    assert out.dropped == 0


def test_a_segment_of_the_first_release_reads_beside_one_of_today(tmp_path: Path, report: Report) -> None:
    (tmp_path / "metrics").mkdir()
    shutil.copy(FROZEN / "steps-g1-1.arrows", tmp_path / "metrics")
    write_steps(writer(tmp_path, generation=2), report, 3, 3, generation=2, probes={"log_z": 1.5})
    expected = [(1, 5.5, None), (2, 5.25, None), (3, 4.997, [("log_z", 1.5)])]
    assert [(row["step"], row["loss"], row["probes"]) for row in read_steps(tmp_path).to_pylist()] == expected
    assert compact(tmp_path) is not None
    assert [(row["step"], row["loss"], row["probes"]) for row in read_steps(tmp_path).to_pylist()] == expected


def test_a_run_without_metrics_has_no_rows(tmp_path: Path) -> None:
    assert read_steps(tmp_path).num_rows == 0
    assert read_steps(tmp_path).schema.names == STEP_SCHEMA.names
    assert compact(tmp_path) is None


def test_readers_see_each_step_at_once(tmp_path: Path, report: Report) -> None:
    out = writer(tmp_path)
    for step in range(1, 4):
        out.write(report(step))
        assert steps(tmp_path) == list(range(1, step + 1))


def test_a_killed_writer_loses_nothing(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
from dataclasses import MISSING, fields
from surefoot.core.records import StepReport
from surefoot.observe.metrics import MetricsWriter
out = MetricsWriter(Path(sys.argv[1]), generation=1)
for step in range(1, 51):
    needed = [item.name for item in fields(StepReport) if item.default is MISSING and item.default_factory is MISSING]
    values = dict.fromkeys(needed, 0) | {"action": "proceed", "step": step}
    out.write(StepReport(**values))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)]).returncode == -9
    assert steps(tmp_path) == list(range(1, 51))


@pytest.mark.parametrize("tail", ["cut", "zeros", "noise"])
def test_a_torn_last_row_is_left_out(tmp_path: Path, report: Report, tail: str) -> None:
    write_steps(writer(tmp_path), report, 1, 5)
    path = tmp_path / "metrics" / "steps-g1-1.arrows"
    content = path.read_bytes()
    path.write_bytes(
        {"cut": content[:-100], "zeros": content + bytes(300), "noise": content + b"\xff\xff\xff\xff\x90\x01\x00\x00abc"}[tail]
    )
    assert steps(tmp_path) == list(range(1, 5 if tail == "cut" else 6))


def test_every_cut_of_a_segment_reads_as_whole_rows(tmp_path: Path, report: Report) -> None:
    write_steps(writer(tmp_path), report, 1, 3)
    path = tmp_path / "metrics" / "steps-g1-1.arrows"
    content = path.read_bytes()
    counts = []
    for num_bytes in range(0, len(content) + 1, 61):
        path.write_bytes(content[:num_bytes])
        counts.append(read_steps(tmp_path).num_rows)
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 2)


def test_a_new_process_writes_its_own_segment(tmp_path: Path, report: Report) -> None:
    write_steps(writer(tmp_path, generation=1), report, 1, 3)
    write_steps(writer(tmp_path, generation=1), report, 4, 5)
    write_steps(writer(tmp_path, generation=10), report, 4, 6, generation=10, attempt=2)
    write_steps(writer(tmp_path, generation=9), report, 4, 4, generation=9, attempt=2)
    assert names(tmp_path) == ["steps-g1-1.arrows", "steps-g1-2.arrows", "steps-g10-1.arrows", "steps-g9-1.arrows"]
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 4, 4, 5, 6]


def test_of_two_rows_of_one_step_and_attempt_the_last_stays(tmp_path: Path, report: Report) -> None:
    out = writer(tmp_path)
    out.write(report(1, loss=3.0))
    out.write(report(1, loss=2.0))
    out.write(report(1, loss=1.0, attempt=2))
    assert [(row["attempt"], row["loss"]) for row in read_steps(tmp_path).to_pylist()] == [(1, 2.0), (2, 1.0)]


def test_segments_end_after_so_many_rows(tmp_path: Path, report: Report) -> None:
    out = writer(tmp_path, rows_per_segment=2)
    write_steps(out, report, 1, 5)
    assert names(tmp_path) == ["steps-g1-1.arrows", "steps-g1-2.arrows", "steps-g1-3.arrows"]
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    assert [row["step"] for row in read_steps(tmp_path, newest=2).to_pylist()] == [3, 4, 5]


# --- Dropping ---


def test_a_sink_that_fails_drops_with_a_count_and_never_raises(tmp_path: Path, report: Report, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics").write_text("a file where the folder should be")
    out = writer(tmp_path)
    with caplog.at_level(logging.WARNING):
        write_steps(out, report, 1, 3)
    out.close()
    assert out.dropped == 3
    assert [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()] == [caplog.records[0].getMessage()]


def test_a_row_that_does_not_fit_the_schema_is_dropped_alone(tmp_path: Path, report: Report) -> None:
    out = writer(tmp_path)
    out.write(report(1))
    out.write(report(2, loss="high"))
    out.write(report(3))
    assert out.dropped == 1
    assert steps(tmp_path) == [1, 3]


def test_a_full_disk_leaves_whole_rows_and_writing_goes_on_when_there_is_space(tmp_path: Path, report: Report) -> None:
    pid = os.fork()
    if pid == 0:
        out = writer(tmp_path)
        write_steps(out, report, 1, 3)
        num_bytes = (tmp_path / "metrics" / "steps-g1-1.arrows").stat().st_size
        # A file size limit makes the kernel cut a write short and then refuse it, just as a full disk does.
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes + 100, resource.RLIM_INFINITY))
        write_steps(out, report, 4, 6)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        write_steps(out, report, 7, 8)
        os._exit(out.dropped)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert steps(tmp_path) == [1, 2, 3, 7, 8]


# --- Compaction ---


def test_closed_segments_move_to_parquet(tmp_path: Path, report: Report) -> None:
    write_steps(writer(tmp_path, generation=1), report, 1, 3)
    out = writer(tmp_path, generation=2, rows_per_segment=2)
    write_steps(out, report, 4, 6, generation=2)
    before = read_steps(tmp_path).to_pylist()
    assert compact(tmp_path) == tmp_path / "metrics" / "steps-1.parquet"
    assert names(tmp_path) == ["steps-1.parquet", "steps-g2-2.arrows"]
    assert read_steps(tmp_path).to_pylist() == before
    assert [row["step"] for row in read_steps(tmp_path, newest=1).to_pylist()] == [6]
    out.write(report(7, generation=2))
    out.close()
    compact(tmp_path)
    assert names(tmp_path) == ["steps-1.parquet", "steps-2.parquet"]
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    metadata = pq.read_metadata(tmp_path / "metrics" / "steps-1.parquet").metadata
    assert json.loads(metadata[b"surefoot.segments"]) == ["steps-g1-1.arrows", "steps-g2-1.arrows"]


def test_the_open_segment_is_left_alone(tmp_path: Path, report: Report) -> None:
    write_steps(writer(tmp_path), report, 1, 3)
    assert compact(tmp_path) is None
    assert names(tmp_path) == ["steps-g1-1.arrows"]


def test_a_crash_between_publishing_and_deleting_counts_nothing_twice(tmp_path: Path, report: Report) -> None:
    write_steps(writer(tmp_path, generation=1), report, 1, 3)
    write_steps(writer(tmp_path, generation=2), report, 4, 4, generation=2)
    segment = tmp_path / "metrics" / "steps-g1-1.arrows"
    kept = segment.read_bytes()
    compact(tmp_path)
    segment.write_bytes(kept)
    assert steps(tmp_path) == [1, 2, 3, 4]
    assert compact(tmp_path) is None
    assert not segment.exists()


def test_a_crash_before_publishing_changes_nothing(tmp_path: Path, report: Report) -> None:
    write_steps(writer(tmp_path, generation=1), report, 1, 3)
    write_steps(writer(tmp_path, generation=2), report, 4, 4, generation=2)
    (tmp_path / "metrics" / "steps-1.tmp").write_bytes(b"PAR1 half")
    assert steps(tmp_path) == [1, 2, 3, 4]
    compact(tmp_path)
    assert names(tmp_path) == ["steps-1.parquet", "steps-g2-1.arrows"]


def test_the_name_of_a_compacted_segment_is_never_used_again(tmp_path: Path, report: Report) -> None:
    out = writer(tmp_path)
    write_steps(out, report, 1, 3)
    out.close()
    compact(tmp_path)
    write_steps(writer(tmp_path), report, 4, 5)
    assert names(tmp_path) == ["steps-1.parquet", "steps-g1-2.arrows"]
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


def test_a_damaged_parquet_file_is_said_and_left_out(tmp_path: Path, report: Report, caplog: pytest.LogCaptureFixture) -> None:
    out = writer(tmp_path)
    write_steps(out, report, 1, 3)
    out.close()
    compact(tmp_path)
    (tmp_path / "metrics" / "steps-1.parquet").write_bytes(b"PAR1")
    assert steps(tmp_path) == []
    assert "steps-1.parquet is damaged" in caplog.text


def test_columns_of_other_releases_are_kept(tmp_path: Path, report: Report) -> None:
    write_steps(writer(tmp_path), report, 1, 1)
    later = STEP_SCHEMA.append(pa.field("not_yet", pa.float64())).remove(STEP_SCHEMA.get_field_index("cpu_s"))
    row: dict[str, Any] = {**read_steps(tmp_path).to_pylist()[0], "step": 2, "generation": 2, "not_yet": 0.4}
    with pa.OSFile(str(tmp_path / "metrics" / "steps-g2-1.arrows"), "wb") as file, pa.ipc.new_stream(file, later) as stream:
        stream.write_batch(pa.RecordBatch.from_pylist([row], schema=later))
    assert [(row["not_yet"], row["cpu_s"]) for row in read_steps(tmp_path).to_pylist()] == [(None, 2.0), (0.4, None)]
    compact(tmp_path)
    assert [(row["not_yet"], row["cpu_s"]) for row in read_steps(tmp_path).to_pylist()] == [(None, 2.0), (0.4, None)]


def test_a_reader_is_right_while_another_process_compacts(tmp_path: Path, report: Report) -> None:
    num_generations = 30
    for generation in range(1, num_generations + 1):
        write_steps(writer(tmp_path, generation=generation), report, generation, generation, generation=generation)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for generation in range(num_generations + 1, num_generations + 21):
                compact(tmp_path)
                write_steps(writer(tmp_path, generation=generation), report, generation, generation, generation=generation)
            code = 0
        finally:
            os._exit(code)
    done = 0
    while done == 0:
        done, status = os.waitpid(pid, os.WNOHANG)
        found = steps(tmp_path)
        assert found == list(range(1, len(found) + 1))
        assert len(found) >= num_generations
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_reader_takes_what_it_asks_for(tmp_path: Path, report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.observe.metrics._ROWS_PER_GROUP", 4)
    out = writer(tmp_path)
    write_steps(out, report, 1, 20, rank_norms=(1.0, 2.0), probes={"log_z": 1.5})
    out.close()
    compact(tmp_path)
    write_steps(writer(tmp_path, generation=2), report, 21, 24, generation=2, rank_norms=(3.0, 4.0))
    taken: list[tuple[int, int]] = []
    read = pq.ParquetFile.read_row_groups

    def counted(file: pq.ParquetFile, groups: list[int], **named: Any) -> pa.Table:
        table = read(file, groups, **named)
        taken.append((table.num_rows, table.num_columns))
        return table

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", counted)
    table = read_steps(tmp_path, steps=range(14, 23), columns=("rank_norms", "loss", "no_such"))
    assert table.schema.names == ["generation", "attempt", "step", "rank_norms", "loss"]
    assert [(row["step"], row["rank_norms"]) for row in table.to_pylist()] == [
        (step, [1.0, 2.0] if step <= 20 else [3.0, 4.0]) for step in range(14, 23)
    ]
    assert taken == [(8, 5)]  # two groups of four rows
    whole = read_steps(tmp_path, steps=range(14, 23))
    assert whole.select(table.schema.names).to_pylist() == table.to_pylist()
