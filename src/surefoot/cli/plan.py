"""`surefoot plan`: from a budget to a run that can be trained, with every number's reason."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from surefoot.core import strict_json
from surefoot.core.durable import write_atomic
from surefoot.core.errors import ConfigError
from surefoot.plan.hardware import accelerator as accelerator_of
from surefoot.plan.request import Aim, Cluster, Request

if TYPE_CHECKING:
    from surefoot.plan.layouts.measured_report import MeasuredReport
    from surefoot.plan.sizing.laws import Law as ScalingLaw

Gpus = Annotated[int | None, typer.Option("--gpus", help="Devices; without them they follow from FLOPs and days.")]
MinGpus = Annotated[int | None, typer.Option("--min-gpus", help="Fewest that the run may shrink to: its batch is even on all between.")]
AcceleratorName = Annotated[
    str | None, typer.Option("--accelerator", help="A name (h100, a100, cpu, ...), or a TOML that describes your own [default: h100].")
]
Days = Annotated[float | None, typer.Option("--days", help="Wall time there is.")]
Mfu = Annotated[float | None, typer.Option("--mfu", help="Share of the dense peak, such as 0.4 [default: measured, else 0.4].")]
Flops = Annotated[float | None, typer.Option("--flops", help="Compute for training as 6 N D, instead of --days.")]
Law = Annotated[str, typer.Option("--law", help="epoch, hoffmann, chinchilla-20, ratio:R, kaplan, ..., or the JSON of a fit.")]
ServeTokens = Annotated[float | None, typer.Option("--serve-tokens", help="Tokens that the model will serve in its life.")]
ServeCost = Annotated[float, typer.Option("--serve-cost", help="Price of a FLOP of serving, in FLOPs of training.")]
UniqueTokens = Annotated[float | None, typer.Option("--unique-tokens", help="Tokens there are; more are repeated [default: enough].")]
Params = Annotated[float | None, typer.Option("--params", help="Fix the number of parameters.")]
Tokens = Annotated[float | None, typer.Option("--tokens", help="Fix the number of tokens.")]
SeqLen = Annotated[int | None, typer.Option("--seq-len", help="Tokens of a sample [default: usual for the size].")]
VocabSize = Annotated[int | None, typer.Option("--vocab-size", help="[default: usual for the size, or that of --data]")]
NumExperts = Annotated[int, typer.Option("--experts", help="Experts of a layer; 0 is a dense model.")]
PerToken = Annotated[int, typer.Option("--experts-per-token", help="Of them, for each token.")]
Batch = Annotated[int | None, typer.Option("--batch", help="Samples of a step [default: by published laws].")]
LayoutText = Annotated[str, typer.Option("--layout", metavar="tp=8,pp=4,...|recipe", help="Judge this one instead of searching.")]
MeasuredFile = Annotated[Path | None, typer.Option("--measured", metavar="FILE", help="CSV of measured runs to calibrate on.")]
Dtype = Annotated[Literal["bf16", "fp32"] | None, typer.Option("--dtype", help="Of products [default: bf16; fp32 on a CPU].")]
MaxBubble = Annotated[float, typer.Option("--max-bubble", help="Idle share of a step that a pipeline may have.")]
FailureRate = Annotated[float | None, typer.Option("--failures-per-node-day", help="Unplanned interruptions [default: published].")]
StallS = Annotated[float | None, typer.Option("--stall-s", help="How long a save blocks training [default: 1].")]
RestartS = Annotated[float, typer.Option("--restart-s", help="From a failure to the next step.")]
DetectionS = Annotated[float, typer.Option("--detection-s", help="How late the slowest detector speaks.")]
Price = Annotated[float | None, typer.Option("--price", help="USD for a device hour [default: 3; 0.05 for a core].")]
FromRun = Annotated[Path | None, typer.Option("--from", metavar="RUN", help="Plan the rest of this run from what it has measured.")]
DataFolder = Annotated[Path | None, typer.Option("--data", metavar="DIR", help="Prepared data: its vocabulary and how much there is.")]
Textbook = Annotated[bool, typer.Option("--textbook", help="Rules of thumb, each computed again, and nothing else.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the plan: .toml for `surefoot train`, .md for the page.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def plan(
    gpus: Gpus = None,
    min_gpus: MinGpus = None,
    accelerator: AcceleratorName = None,
    days: Days = None,
    mfu: Mfu = None,
    flops: Flops = None,
    law: Law = "epoch",
    serve_tokens: ServeTokens = None,
    serve_cost: ServeCost = 1.0,
    unique_tokens: UniqueTokens = None,
    params: Params = None,
    tokens: Tokens = None,
    seq_len: SeqLen = None,
    vocab_size: VocabSize = None,
    experts: NumExperts = 0,
    experts_per_token: PerToken = 0,
    batch: Batch = None,
    layout: LayoutText = "",
    measured: MeasuredFile = None,
    dtype: Dtype = None,
    max_bubble: MaxBubble = 0.15,
    failures_per_node_day: FailureRate = None,
    stall_s: StallS = None,
    restart_s: RestartS = 900.0,
    detection_s: DetectionS = 6 * 3600.0,
    price: Price = None,
    from_run: FromRun = None,
    data: DataFolder = None,
    textbook: Textbook = False,
    out: Out = None,
    json_output: Json = False,
) -> None:
    """Turn a budget into a run: size, data, layout, batch, schedule, saves, spares, what it costs and what will break.

    \b
    Examples:
      surefoot plan --gpus 1000 --accelerator h100 --days 30 --serve-tokens 1e13
      surefoot plan --gpus 512 --flops 2e23 --layout tp=8,pp=8
      surefoot plan --gpus 2 --accelerator cpu --flops 2e13 --out small.toml
      surefoot plan --from runs/quickstart
      surefoot plan --textbook
    """
    if textbook:
        _textbook(json_output, out=out)
        return
    hardware = accelerator_of(accelerator or "h100")
    prepared = _prepared(data)
    cluster = Cluster(
        accelerator=hardware,
        num_devices=gpus,
        min_devices=min_gpus,
        dtype=dtype or ("bf16" if "bf16" in hardware.peaks else "fp32"),
        price_per_hour=price,
        failures_per_node_day=failures_per_node_day,
        stall_s=stall_s,
        restart_s=restart_s,
        detection_s=detection_s,
    )
    aim = Aim(
        days=days,
        flops=flops,
        mfu=mfu,
        n=params,
        tokens=tokens,
        served_tokens=serve_tokens,
        serving_cost=serve_cost,
        unique_tokens=unique_tokens if unique_tokens is not None else (prepared[1] if prepared else None),
        seq_len=seq_len,
        vocab_size=vocab_size if vocab_size is not None else (prepared[0] if prepared else None),
        num_experts=experts,
        experts_per_token=experts_per_token,
        global_batch_size=batch,
    )
    request = Request(cluster, aim, layout=layout, max_bubble=max_bubble)
    if from_run is not None:
        given: dict[str, object] = {
            "--gpus": gpus,
            "--min-gpus": min_gpus,
            "--days": days,
            "--flops": flops,
            "--mfu": mfu,
            "--layout": layout,
        }
        given |= {"--params": params, "--tokens": tokens, "--batch": batch, "--seq-len": seq_len, "--experts": experts}
        given |= {"--out": out, "--measured": measured, "--data": data}
        _refuse_beside_from({name for name, value in given.items() if value})
        from surefoot.cli.plan_from_run import cluster_for, plan_from_run

        cluster = cluster_for(from_run, cluster, is_named=accelerator is not None)
        plan_from_run(from_run, cluster, law=_law(law), json_output=json_output)
        return
    _plan(request, law, measured=measured, data=data, out=out, json_output=json_output)


def _plan(request: Request, law: str, *, measured: Path | None, data: Path | None, out: Path | None, json_output: bool) -> None:
    from surefoot.plan.answer import answer_of
    from surefoot.plan.compose import make_plan
    from surefoot.plan.page import terminal_page

    if out is not None:
        _refuse_place(out)
    told = _report(measured)
    made = make_plan(request, law=_law(law), calibration=told.calibration if told else None, validated=_is_of_a_sweep(law))
    written = ""
    if out is not None:
        from surefoot.cli.plan_file import write_plan

        written = write_plan(made, out, data=data)
    if json_output:
        typer.echo(strict_json.dumps({**answer_of(made), "measured": told.as_dict() if told else None}))
        return
    typer.echo(terminal_page(made))
    if told is not None:
        typer.echo(f"\nMeasured runs\n  {told.told}")
    if written:
        typer.echo(f"\n{written}")


def _law(name: str) -> ScalingLaw:
    if name.endswith(".json"):
        from surefoot.plan.sizing.from_fit import fitted_law

        return fitted_law(Path(name))
    from surefoot.plan.sizing.published import law

    return law(name)


def _is_of_a_sweep(law: str) -> bool:
    """`sweep fit` says in its fit how many runs it finished; a fit of any other table validates nothing."""
    return law.endswith(".json") and "sweep" in strict_json.loads(Path(law).read_text(encoding="utf-8"))


def _report(measured: Path | None) -> MeasuredReport | None:
    if measured is None:
        return None
    from surefoot.plan.layouts.measured import read_measured
    from surefoot.plan.layouts.measured_report import report

    return report(read_measured(measured))


def _prepared(data: Path | None) -> tuple[int, float] | None:
    """Vocabulary and tokens of a prepared folder."""
    if data is None:
        return None
    from surefoot.data.manifest import load_manifest

    manifest = load_manifest(data)
    return manifest.tokenizer.vocab_size, float(sum(source.splits["train"].tokens for source in manifest.sources.values()))


def _refuse_beside_from(given: set[str]) -> None:
    if given:
        hint = "a run's size, data and layout are what they are; give what it cannot measure: --accelerator, --price, --detection-s"
        raise ConfigError(f"{', '.join(sorted(given))} beside --from", where="--from", hint=hint)


def _refuse_place(out: Path) -> None:
    """Before anything is computed."""
    if out.suffix not in (".toml", ".md"):
        raise ConfigError("is neither a TOML nor a page", where=str(out), hint="name it run.toml, or plan.md for the page", got=out.suffix)
    if out.exists():
        raise ConfigError("there is a file already", where=str(out), hint="name another one, or move it away")
    if not out.absolute().parent.is_dir():
        raise ConfigError("its folder does not exist", where=str(out), hint=f"mkdir -p {out.parent}")


def _textbook(json_output: bool, *, out: Path | None) -> None:
    from dataclasses import asdict

    from surefoot.plan.textbook.page import markdown, terminal_lines, textbook

    if out is not None:
        if out.suffix != ".md":
            raise ConfigError("the textbook is a page", where=str(out), hint="name it textbook.md", got=out.suffix)
        _refuse_place(out)
        write_atomic(out, markdown())
        typer.echo(f"wrote {out}")
    elif json_output:
        typer.echo(strict_json.dumps({"schema_version": 1, "rows": [asdict(row) for row in textbook()]}))
    else:
        typer.echo("\n".join(terminal_lines()))
