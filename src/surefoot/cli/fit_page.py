"""The page of `surefoot fit`, read off its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.core.units import show_count

Answer = Mapping[str, Any]


def page(answer: Answer) -> list[str]:
    """The law with its bands, what it rests on, what it says of budgets, and the warnings last."""
    body = {"parametric": _parametric, "isoflop": _isoflop}.get(answer["law"], _tuning)
    return [*body(answer), *_counts(answer), *(f"  warning: {warning}" for warning in answer["warnings"])]


def _parametric(answer: Answer) -> list[str]:
    lines = [
        f"L = {answer['E']:.4f} + {answer['A']:.4g} / N^{answer['alpha']:.4f} + {answer['B']:.4g} / D^{answer['beta']:.4f}   "
        f"({answer['num_rows']} runs{_dropped(answer)})"
    ]
    for name, meaning in (("E", ""), ("A", ""), ("B", ""), ("alpha", ""), ("beta", ""), ("a", "   N* ~ C^a")):
        lines.append(f"  {name:<6} {answer[name]:<9.5g} {_band(answer['bands'].get(name))}{meaning}")
    residuals = answer["residuals"]
    lines.append(f"  objective {answer['objective']:.6g} (sum of Huber losses of log L), condition {answer['condition']:.3g}")
    worst = ", ".join(f"line {one['line']} {one['error']:+.2%}" for one in residuals["worst"])
    lines.append(f"  residuals: rms {residuals['rms']:.3%}, median {residuals['median']:.3%}; worst {worst}")
    lines.append(_held_out(answer["held_out"]))
    if beside := answer["without_highest"]:
        lines.append(f"  without the {beside['num_dropped']} highest losses: a {beside['a']:.4f}, E {beside['E']:.4f}")
    for one in answer["at"]:
        lines += [*_prediction(one), f"    half the size loses {one['loss_of_half_size']:.4f} nats, twice {one['loss_of_twice_size']:.4f}"]
    return lines


def _dropped(answer: Answer) -> str:
    return f"; the {answer['num_dropped']} of the highest losses left out" if answer["num_dropped"] else ""


def _held_out(held_out: Answer | None) -> str:
    if held_out is None:
        return "  held out: nothing, there are too few runs"
    return (
        f"  held out: {held_out['num_rows']} runs of {held_out['from_flops']:.3g} FLOPs and more, predicted from the others: "
        f"error mean {held_out['mean']:.2%}, max {held_out['max']:.2%} (the others: {held_out['of_rest']:.2%})"
    )


def _isoflop(answer: Answer) -> list[str]:
    laws = answer["laws"]
    lines = []
    for name, symbol in (("n", "N*"), ("tokens", "D*"), ("tokens_per_parameter", "D*/N*")):
        law = laws[name]
        lines.append(f"{symbol:<5} = {law['coef']:<10.4g} C^{law['exponent']:<8.4f} {_band(law['bands']['exponent'])}")
    if loss := laws["loss"]:
        lines.append(f"L*    = {loss['E']:.4f} + {loss['k']:.4g} / C^{loss['exponent']:.3f}")
    for one in answer["optima"]:
        lines.append(
            f"  {one['flops']:<9.3g} N* {show_count(one['n']):<7} +- {one['log_n_std']:<5.1%}  D*/N* {one['tokens_per_parameter']:<7.3g} "
            f"loss {one['loss']:.4f}  ({one['num_points']} runs)"
        )
    lines += [f"  {one['flops']:<9.3g} left out: {one['why']}" for one in answer["left_out"]]
    return lines + [line for one in answer["at"] for line in _prediction(one)]


def _tuning(answer: Answer) -> list[str]:
    powers = " ".join(f"{_symbol(name)}^{exponent:.4f}" for name, exponent in answer["exponents"].items())
    beside = f", with {answer['varied_beside']} varied beside" if answer["varied_beside"] else ""
    lines = [f"{answer['column']} = {answer['coef']:.4g} {powers}   ({len(answer['sweeps'])} sweeps{beside})"]
    lines += [f"  {_symbol(name):<5} {_band(limits, digits=4)}" for name, limits in answer["bands"].items()]
    for one in answer["sweeps"]:
        lines.append(f"  N {show_count(one['n']):<7} D {show_count(one['tokens']):<7} best {one['value']:<9.4g} loss {one['loss']:.4f}")
    lines += [f"  N {show_count(one['n']):<7} D {show_count(one['tokens']):<7} left out: {one['why']}" for one in answer["left_out"]]
    lines.append(f"  held out: a sweep by a law through the others is off by {answer['held_out_error']:.1%} on average")
    for one in answer["at"]:
        where = f"N {show_count(one['n'])}, D {show_count(one['tokens'])}, the largest sweep"
        lines.append(f"  {where}: {one['value']:.4g} {_band(one['bands']['value'])}; seen there {one['best_seen']:.4g}")
    return lines


def _counts(answer: Answer) -> list[str]:
    derived = f"; {' and '.join(answer['derived'])} from C = 6 N D" if answer["derived"] else ""
    named = ", ".join(f"{name} is {column!r}" for name, column in answer["columns"].items() if name != column)
    lines = [f"  N is {answer['count']}: {answer['count_is']}{derived}" + (f"; {named}" if named else "")]
    for other in answer.get("other_counts", ()):
        lines.append(f"  with N = {other['count']}: {other.get('problem') or _fit_of(other)}")
    return lines


def _fit_of(other: Answer) -> str:
    constants = [f"{name} {other[name]:.4g}" for name in ("E", "A", "B", "alpha", "beta", "coef") if name in other]
    return ", ".join([f"a {other['a']:.4f} {_band(other['bands'].get('a'))}".rstrip(), *constants])


def _prediction(one: Answer) -> list[str]:
    bands = one["bands"]
    loss = f", loss {one['loss']:.4f} {_band(bands.get('loss'))}".rstrip() if "loss" in one else ""
    ratio = f"{one['tokens_per_parameter']:.3g} {_band(bands.get('tokens_per_parameter'), digits=3)}".rstrip()
    return [
        f"  at {one['flops']:.4g} FLOPs, {_distance(one['times_largest'])}",
        f"    N* {_counted(one['n'], bands.get('n'))}, D* {_counted(one['tokens'], bands.get('tokens'))}, D*/N* {ratio}{loss}",
    ]


def _distance(times: float) -> str:
    if times > 1.0 + 1e-9:
        return f"extrapolated {times:.3g} times past the largest budget"
    return "the largest budget" if times > 1.0 - 1e-9 else f"{times:.3g} of the largest budget"


def _counted(value: float, limits: Sequence[float] | None) -> str:
    return f"{show_count(value)} ({show_count(limits[0])} to {show_count(limits[1])})" if limits else show_count(value)


def _band(limits: Sequence[float] | None, *, digits: int = 5) -> str:
    return f"({limits[0]:.{digits}g} to {limits[1]:.{digits}g})" if limits else ""


def _symbol(name: str) -> str:
    return {"n": "N", "tokens": "D"}.get(name, name)
