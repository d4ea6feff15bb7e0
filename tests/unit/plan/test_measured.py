from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from surefoot.core.errors import DataError, PlanInfeasible
from surefoot.plan.hardware import accelerator
from surefoot.plan.layouts.calibration import DEFAULT, Calibration, fit
from surefoot.plan.layouts.judge import judge, step_model
from surefoot.plan.layouts.measured import MeasuredRun, published_flops, read_measured
from surefoot.plan.layouts.measured_sizes import guess_sizes
from surefoot.plan.layouts.validation import calibrate, kendall_tau, spread_out, validate
from surefoot.plan.memory.implementations import MEGATRON, SUREFOOT
from surefoot.plan.records import Layout, Workload
from tests.unit.plan.models import LLAMA_8B, LLAMA_70B, llama

HEADER = "gpu,n_gpus,model,params,hidden,layers,heads,seq,tp,pp,vp,cp,ep,dp,zero_or_fsdp,act_recompute,mbs,grad_accum,gbs_seq,mfu_pct,notes"
ROW = "h100_80gb,512,8.86B,8.86e9,4096,32,32,4096,4,1,,,,128,ZeRO-0,,2,1,256,18.69,vocab 131072; as published"


def table(path: Path, *rows: str, header: str = HEADER) -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_a_row_is_a_layout_and_a_step_time(tmp_path: Path) -> None:
    (run,) = read_measured(table(tmp_path / "runs.csv", ROW))
    assert run.layout == Layout(tp=4, dp_replicate=128, micro_batch_size=2)
    assert run.hardware is accelerator("h100")
    assert run.implementation.name == "nanotron"
    assert (run.workload.global_batch_size, run.workload.sizes.vocab_size) == (256, 131_072)
    assert run.workload.sizes.num_parameters == pytest.approx(8.86e9, rel=1e-3)
    assert run.mfu(run.step_s) == pytest.approx(0.1869)


@pytest.mark.parametrize(
    ("column", "value", "seconds"),
    [
        ("tokens_per_s_per_gpu", 1000.0, 256 * 4096 / (1000.0 * 512)),
        ("tflops_per_gpu", 400.0, None),
        ("mfu_pct", 40.0, None),
    ],
)
def test_any_speed_will_do(tmp_path: Path, column: str, value: float, seconds: float | None) -> None:
    header, row = HEADER.replace("mfu_pct", column), ROW.replace("18.69", str(value))
    (run,) = read_measured(table(tmp_path / "runs.csv", row, header=header))
    flops = 0.4 * 989.4e12 if column == "mfu_pct" else 400e12
    assert run.step_s == pytest.approx(seconds or published_flops(run.workload) / (flops * 512))


def test_published_flops_count_every_pair() -> None:
    """6 for each parameter but the embedding, and 12 layers x heads x head_dim x positions (arXiv 2204.02311)."""
    work = Workload(LLAMA_8B, 4096, 1)
    matrices = LLAMA_8B.num_parameters - LLAMA_8B.num_embedding_parameters - (2 * 32 + 1) * 4096
    assert published_flops(work) == pytest.approx(4096 * (6 * matrices + 12 * 32 * 4096 * 4096), rel=1e-9)
    assert published_flops(work) > work.flops_per_step


def test_what_is_blank_has_its_usual_value(tmp_path: Path) -> None:
    path = table(tmp_path / "runs.csv", "a100,16,2048,6.7e9,3000", header="gpu,n_gpus,seq,params,tokens_per_s_per_gpu")
    (run,) = read_measured(path)
    assert run.layout == Layout(dp_replicate=16)
    assert run.workload.global_batch_size == 16
    assert run.workload.sizes.num_parameters == pytest.approx(6.7e9, rel=0.02)
    assert (run.workload.sizes.d_model, run.workload.sizes.num_layers) == (4096, 32)


@pytest.mark.parametrize(
    ("name", "stage", "shard"), [("FULL_SHARD", 3, 128), ("SHARD_GRAD_OP", 2, 128), ("dist-opt", 1, 128), ("ZeRO-1", 1, 128), ("", 3, 1)]
)
def test_shardings_have_several_names(tmp_path: Path, name: str, stage: int, shard: int) -> None:
    (run,) = read_measured(table(tmp_path / "runs.csv", ROW.replace("ZeRO-0", name)))
    assert (run.layout.zero_stage, run.layout.dp_shard) == (stage, shard)


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("18.69", "fast", "mfu_pct is 'fast'"),
        ("18.69", "0.1869", "mfu_pct is 0.1869"),
        ("512,8.86B", "500,8.86B", r"tp \* pp \* cp \* dp = 512, n_gpus is 500"),
        ("h100_80gb", "h900", "'h900' is not known"),
        ("ZeRO-0", "magic", "zero_or_fsdp is 'magic'"),
        ("8.86e9", "1e9", "fewer than attention, embedding and head"),
        ("4096,4,1", "4096.5,4,1", "seq is 4096.5"),
    ],
)
def test_slips_are_named_with_their_line(tmp_path: Path, old: str, new: str, match: str) -> None:
    path = table(tmp_path / "runs.csv", ROW, ROW.replace(old, new))
    with pytest.raises(DataError, match=match) as refused:
        read_measured(path)
    assert refused.value.where == f"{path}:3"


def test_a_share_where_per_cents_belong_is_said_to_be_one(tmp_path: Path) -> None:
    """Beside another speed it is not read."""
    with pytest.raises(DataError) as refused:
        read_measured(table(tmp_path / "a.csv", ROW.replace("18.69", "1.5")))
    assert refused.value.hint == "in per cent: write 45 for 45%"
    (slow,) = read_measured(table(tmp_path / "b.csv", ROW.replace("18.69", "1.6")))
    assert slow.mfu(slow.step_s) == pytest.approx(0.016)
    header = HEADER.replace("mfu_pct", "mfu_pct,tokens_per_s_per_gpu")
    (told,) = read_measured(table(tmp_path / "c.csv", ROW.replace("18.69", "0.45,1000"), header=header))
    assert told.step_s == pytest.approx(256 * 4096 / (1000.0 * 512))


def test_tables_that_say_too_little_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no column 'seq'"):
        read_measured(table(tmp_path / "a.csv", "h100,8,40", header="gpu,n_gpus,mfu_pct"))
    with pytest.raises(DataError, match="no speed"):
        read_measured(table(tmp_path / "b.csv", "h100,8,4096,7e9", header="gpu,n_gpus,seq,params"))
    with pytest.raises(DataError, match="no row has a speed"):
        read_measured(table(tmp_path / "c.csv", ROW.replace("18.69", "")))
    with pytest.raises(DataError, match="neither params nor hidden and layers"):
        read_measured(table(tmp_path / "d.csv", "h100,8,4096,40", header="gpu,n_gpus,seq,mfu_pct"))
    with pytest.raises(DataError, match="cannot be read"):
        read_measured(tmp_path / "absent.csv")


def test_sizes_are_guessed_from_what_is_told() -> None:
    """Llama's 13B: of the parameters alone, of the width, of width and depth; tied below 4e9."""

    def told(
        params: float, d_model: int | None = None, num_layers: int | None = None, vocab_size: int = 32_000
    ) -> tuple[int, int, float, bool]:
        sizes = guess_sizes(
            params=params,
            d_model=d_model,
            num_layers=num_layers,
            num_heads=None,
            num_kv_heads=None,
            vocab_size=vocab_size,
            notes="",
            where="",
        )
        return sizes.d_model, sizes.num_layers, sizes.num_parameters, sizes.tie_embeddings

    for known in ((None, None), (5120, None), (5120, 40)):
        width, depth, params, ties = told(13.0e9, *known)
        assert (width, depth, ties) == (5120, 40, False)
        assert params == pytest.approx(13.0e9, rel=0.01)
    assert told(1.24e9, 2048, 16, 128_256)[3]


def runs_of(truth: Calibration, layouts: list[tuple[Workload, Layout]]) -> list[MeasuredRun]:
    """Runs that the model itself times, under a calibration that is not the default."""
    hardware = accelerator("h100")
    runs = []
    for number, (work, layout) in enumerate(layouts):
        run = MeasuredRun(f"run {number}", work, layout, hardware, MEGATRON, "bf16", 1.0)
        runs.append(replace(run, step_s=run.predict(truth).total_s))
    return runs


SMALL = llama(16, 2048, 16, 7168)
CASES = [
    (Workload(sizes, 4096, 256), Layout(tp=tp, dp_shard=shard, zero_stage=1, micro_batch_size=2))
    for sizes in (SMALL, LLAMA_8B, LLAMA_70B)
    for tp, shard in ((1, 8), (1, 128), (4, 64), (8, 8))
]


def test_a_slow_cluster_is_learned_from_six_runs() -> None:
    """Products at half, links at a third: predictions of the rest are within a few per cent, where the default is off by half."""
    truth = replace(DEFAULT, products=0.4, link=0.3, hidden_data=0.4)
    runs = runs_of(truth, CASES)
    default = [abs(run.predict().total_s / run.step_s - 1) for run in runs]
    told = validate(runs)
    assert told is not None
    assert len(told.calibrated_on) == 6
    assert len(told.held_out) == 6
    assert told.mape < 0.05 < 0.2 < sum(default) / len(default)
    assert told.constant_mape > 0.2
    assert told.kendall_tau is not None
    assert told.kendall_tau > 0.8


def test_few_rows_move_only_what_they_tell_of() -> None:
    """One device has no links: what is believed of them stays."""
    runs = runs_of(replace(DEFAULT, products=0.5, link=0.3), [(Workload(LLAMA_8B, 4096, 8), Layout())])
    found = calibrate(runs)
    assert found.products < DEFAULT.products
    assert (found.link, found.latency) == pytest.approx((DEFAULT.link, DEFAULT.latency), rel=1e-6)
    assert found.num_rows == 1
    assert found.program == "megatron"


def test_one_wild_row_does_not_decide() -> None:
    truth = replace(DEFAULT, products=0.6)
    runs = runs_of(truth, CASES)
    spoilt = [replace(runs[0], step_s=3 * runs[0].step_s), *runs[1:]]
    assert calibrate(spoilt).products == pytest.approx(calibrate(runs).products, rel=0.1)


def test_no_rows_are_no_calibration() -> None:
    with pytest.raises(PlanInfeasible, match="no measured runs"):
        fit([], lambda _: [])
    assert validate(runs_of(DEFAULT, CASES[:7])) is None


def test_a_calibration_says_what_it_is_worth() -> None:
    assert DEFAULT.stamp.startswith("not calibrated: MFU +- ")
    found = calibrate(runs_of(replace(DEFAULT, products=0.6), CASES[:3]))
    assert found.stamp.startswith("calibrated on 3 measured runs")
    assert found.as_dict()["calibrated"] is True
    assert DEFAULT.as_dict()["calibrated"] is False


def test_a_calibration_of_another_program_predicts_that_program() -> None:
    """Its reductions are hidden as it hides them; memory and legality stay surefoot's."""
    work, hardware = Workload(LLAMA_8B, 4096, 256), accelerator("h100")
    measured = replace(DEFAULT, num_rows=6, program="megatron")
    assert step_model(work, hardware, measured, SUREFOOT).implementation is MEGATRON
    assert step_model(work, hardware, DEFAULT, SUREFOOT).implementation is SUREFOOT
    layout = Layout(pp=4, dp_shard=16, zero_stage=1)
    assert judge(work, hardware, layout, calibration=measured).step.data_s < judge(work, hardware, layout).step.data_s


def test_rows_are_chosen_by_what_they_are_not_by_what_was_measured() -> None:
    runs = runs_of(DEFAULT, CASES)
    chosen = spread_out(runs)
    assert len(set(chosen)) == 6
    assert chosen == spread_out([replace(run, step_s=1.0) for run in runs])
    assert {runs[index].workload.sizes.num_layers for index in chosen} == {16, 32, 80}


def test_rank_correlation() -> None:
    assert kendall_tau([1, 2, 3, 4], [10, 20, 30, 40]) == 1.0
    assert kendall_tau([1, 2, 3, 4], [4, 3, 2, 1]) == -1.0
    assert kendall_tau([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(4 / 6)
    assert kendall_tau([1, 1, 1], [1, 2, 3]) is None
