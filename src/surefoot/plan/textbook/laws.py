"""Classic rules of budgets, scaling laws, learning rates and batches, computed again."""

from __future__ import annotations

from dataclasses import replace

from surefoot.plan.hardware import accelerator
from surefoot.plan.sizing.allocation import Serving, as_good_at, at_size, best, bowl, for_serving
from surefoot.plan.sizing.budget import budget, training_cost
from surefoot.plan.sizing.published import EPOCH, HOFFMANN, HOFFMANN_ROUNDED, law
from surefoot.plan.surface_record import Surface
from surefoot.plan.textbook.row import LLAMA_7B, Row, short
from surefoot.plan.tuning.laws import LEARNING_RATES, Run, critical_by_data, critical_by_loss
from surefoot.plan.tuning.laws import batches as batch_laws

_SMALL, _LARGE, _CHINCHILLA = 2e23, 1e24, 5.76e23
_EPOCH = "Besiroglu et al., arXiv 2404.10102"
_PORIAN = "Porian et al., arXiv 2406.19146"


def rows() -> tuple[Row, ...]:
    return (
        *(_month(), _square_root(), _long_trained(), _square_root_large(), _sweep_cost(), _minimum(), _exponents(), _rounded_constants()),
        *(_kaplan_ratio(), _non_embedding(), _six_nd(), _modern_ratios(), _experts(), _critical_batch(), _rate_by_width()),
    )


def _month() -> Row:
    hardware = accelerator("h100")
    flops = budget(hardware, num_devices=1000, days=30, mfu=0.4).flops
    mfu = budget(hardware, num_devices=1000, days=30, flops=_SMALL).mfu
    devices = budget(hardware, days=30, flops=_SMALL, mfu=0.4).num_devices
    days = budget(hardware, num_devices=1000, flops=_SMALL, mfu=0.4).days
    return Row(
        "budget-of-a-month",
        "1,000 H100 for 30 days at 40% MFU are about 2e23 FLOPs",
        f"{flops:.3e}; 2e23 would be an MFU of {mfu:.1%}, or {devices} devices, or {days:.1f} days",
        "wrong",
        f"peak x devices x seconds x MFU is {flops / _SMALL:.1f} times as much; the peak is the dense one, the sparse one would double it",
        hardware.source,
        {"flops": flops, "mfu": mfu, "devices": devices, "days": days, "factor": flops / _SMALL},
    )


def _square_root() -> Row:
    n = law("chinchilla-20").best_n(_SMALL)
    point = best(bowl(law("epoch"), _SMALL), _SMALL)
    return Row(
        "square-root-of-c-over-120",
        "At 20 tokens a parameter C = 120 N^2: for 2e23 about 41B parameters and 0.8T tokens",
        f"{short(n)} and {short(20 * n)}; the fitted surface says {short(point.n)} and {short(point.tokens)}, loss {point.loss:.3f}",
        "right",
        "6 N x 20 N = 120 N^2, and at this budget the corrected fit lies close to 20",
        _EPOCH,
        {"n": n, "tokens": 20 * n, "epoch_n": point.n, "epoch_tokens": point.tokens, "epoch_loss": point.loss},
    )


def _long_trained() -> Row:
    of = bowl(law("epoch"), _SMALL)
    point = at_size(of, 7e9, _SMALL)
    equal = as_good_at(of, point)
    return Row(
        "seven-billion-on-2e23",
        "2e23 FLOPs train a 7B for 4.8T tokens, 686 a parameter",
        f"{point.tokens / 1e12:.3f}T, {point.tokens_per_parameter:.1f} a parameter; loss {point.loss:.4f}, which the best size reaches "
        "with "
        f"{equal:.2g} FLOPs",
        "incomplete",
        f"rounding, and the price is not told: {1 - equal / _SMALL:.0%} of the compute buys a small model and nothing else. That pays when "
        "enough tokens are served",
        _EPOCH,
        {
            "tokens": point.tokens,
            "ratio": point.tokens_per_parameter,
            "loss": point.loss,
            "equal_flops": equal,
            "share": 1 - equal / _SMALL,
        },
    )


def _square_root_large() -> Row:
    n = law("chinchilla-20").best_n(_LARGE)
    return Row(
        "square-root-at-1e24",
        "1e24 FLOPs at 20 tokens a parameter: 91B and 1.8T",
        f"{short(n)} and {20 * n / 1e12:.3f}T",
        "right",
        "the square root of C / 120; whether 20 still holds there is another question: no run behind it is that large",
        "arithmetic",
        {"n": n, "tokens": 20 * n},
    )


def _sweep_cost() -> Row:
    low, high = 5 / 100, 7 / 100
    return Row(
        "cost-of-a-proxy-sweep",
        "Five to seven proxy models at C / 100 each cost about 1%",
        f"{low:.0%} to {high:.0%}",
        "wrong",
        "each costs 1%",
        "arithmetic",
        {"low": low, "high": high},
    )


def _minimum() -> Row:
    of = bowl(law("epoch"), _SMALL)
    trained, served = best(of, _SMALL), for_serving(of, _SMALL, serving=Serving(1e13))
    return Row(
        "minimum-tells-of-serving",
        "When the minimum of the isoFLOP curve moves to smaller N, that points to a regime that is best for inference",
        f"at 2e23 the least loss is at {short(trained.n)} whatever is served; with 1e13 tokens served the cheapest life is at "
        f"{short(served.n)}",
        "wrong",
        "the loss at equal training compute knows nothing of serving. A minimum that moves says that the data or the recipe is another one",
        "Sardana et al., arXiv 2401.00448",
        {"trained_n": trained.n, "served_n": served.n},
    )


def _exponents() -> Row:
    return Row(
        "exponents",
        "alpha and beta are both about 0.34",
        f"{HOFFMANN.alpha:.4f} and {HOFFMANN.beta:.4f} as published, {EPOCH.alpha:.3f} and {EPOCH.beta:.3f} corrected",
        "imprecise",
        f"their ratio sets how N grows with C: C^{HOFFMANN.a:.3f} as published, C^{EPOCH.a:.3f} corrected",
        f"Hoffmann et al., arXiv 2203.15556; {_EPOCH}",
        {"alpha": EPOCH.alpha, "beta": EPOCH.beta, "a": EPOCH.a, "published_a": HOFFMANN.a},
    )


def _rounded_constants() -> Row:
    def ratio(surface: Surface) -> float:
        chinchilla = replace(law("epoch"), rule=surface)
        return chinchilla.best_tokens(_CHINCHILLA) / chinchilla.best_n(_CHINCHILLA)

    rounded, printed, corrected = ratio(HOFFMANN_ROUNDED), ratio(HOFFMANN), ratio(EPOCH)
    return Row(
        "constants-of-approach-3",
        "The constants of Hoffmann's third approach give 20 tokens a parameter",
        f"at 5.76e23 FLOPs: {rounded:.1f} as printed, {printed:.0f} with four digits, {corrected:.1f} when the fit is repeated to its end",
        "wrong",
        "that fit stopped before it had converged, and two digits of an exponent do not carry over decades",
        _EPOCH,
        {"rounded": rounded, "four_digits": printed, "corrected": corrected},
    )


def _kaplan_ratio() -> Row:
    kaplan = law("kaplan")
    at = {flops: kaplan.best_tokens(flops) / kaplan.best_n(flops) for flops in (1e21, 1e23)}
    return Row(
        "kaplan-ratio",
        "Kaplan's law asks for 5 to 10 tokens a parameter, because its cosine schedules were cut short",
        f"{at[1e21]:.2g} at 1e21 FLOPs, {at[1e23]:.2g} at 1e23",
        "wrong",
        "the ratio falls as C^-0.46; and the difference to Chinchilla comes from FLOPs counted without the head, a long warm-up and "
        "tuning that "
        "did not follow size: a constant learning rate gives Chinchilla's exponent too",
        f"Kaplan et al., arXiv 2001.08361; {_PORIAN}",
        {"at_1e21": at[1e21], "at_1e23": at[1e23]},
    )


def _non_embedding() -> Row:
    return Row(
        "count-non-embedding",
        "Fit laws on parameters without embedding",
        "leave out the embedding, which costs no FLOPs, but count the head, which does: exponent 0.835 without it, 0.706 with it, 0.497 "
        "with "
        "everything put right",
        "wrong",
        "on small models the head is a large part of the FLOPs, and leaving it out bends the law more than anything else",
        _PORIAN,
        {"without_head": 0.835, "with_head": 0.706, "corrected": 0.497},
        basis="measured",
    )


def _six_nd() -> Row:
    def attention(seq_len: int) -> float:
        cost = training_cost(LLAMA_7B, tokens=1.0, seq_len=seq_len)
        return cost.attention / cost.six_nd

    large = replace(LLAMA_7B, vocab_size=128_256)
    head = training_cost(large, tokens=1.0, seq_len=4096)
    found = {"s4096": attention(4096), "s8192": attention(8192), "s32768": attention(32_768), "head": head.head / head.six_nd}
    return Row(
        "six-n-d-within-ten-per-cent",
        "C = 6 N D holds within 10% when D is much larger than the square root of N",
        f"for a 7B causal attention adds {found['s4096']:.1%} at 4,096 tokens, {found['s8192']:.1%} at 8,192, {found['s32768']:.0%} at "
        "32,768; "
        f"a head of 128k rows is {found['head']:.1%} of 6 N D",
        "wrong",
        "D has no part in it: attention over 6 N grows as length over width, and full attention costs twice the causal one",
        "every product counted: surefoot.core.model_sizes",
        found,
    )


def _modern_ratios() -> Row:
    large, small = 15.6e12 / 405e9, 15e12 / 8e9
    return Row(
        "modern-ratios",
        "Modern models are trained on 40 to 700 tokens a parameter; Llama 3 on 39",
        f"Llama 3 405B on {large:.1f}, Llama 3 8B on {small:,.0f}",
        "wrong",
        "the upper end is far higher: small models are trained for what serving them saves",
        "Llama 3, arXiv 2407.21783 (15.6T tokens; 15T for the 8B)",
        {"large": large, "small": small},
    )


def _experts() -> Row:
    hunyuan = law("hunyuan-moe")
    n, tokens = 58.1e9, 5.6e12
    ratio = hunyuan.cost.flops(n, tokens) / (6.0 * n * tokens)
    return Row(
        "experts",
        "Mixtures of experts: C = 6 N D on active parameters, best at 96 tokens each (Hunyuan-Large)",
        f"their C is 9.59 N D + 2.3e8 D, {ratio:.2f} times 6 N D at {short(n)}; {tokens / n:.0f} is their optimum, {7e12 / 52e9:.0f} what "
        "they "
        "trained (52B active, 7T)",
        "wrong",
        "routing and long attention are in their count. A ratio and the cost it was found with belong together",
        hunyuan.source,
        {"cost_ratio": ratio, "optimum": tokens / n, "trained": 7e12 / 52e9},
    )


def _critical_batch() -> Row:
    tokens = _SMALL / (6 * 7e9)
    by_loss, by_data = critical_by_loss(2.0), critical_by_data(tokens)
    step_law = next(one.value for one in batch_laws(Run(7e9, tokens, 2.0)).suggestions if one.law == "steplaw")
    return Row(
        "critical-batch",
        "The critical batch of a 7B at loss 2.0 is 1 to 4M tokens, as Chinchilla derives",
        f"{short(by_loss)} by loss (Kaplan), {short(step_law)} as best batch (Step Law), {short(by_data)} by data (Zhang), after "
        f"{short(tokens)} tokens",
        "wrong",
        "low by a factor of 2 and more, and Chinchilla derives none; it grows with the data seen, hardly with the size of the model",
        "arXiv 2001.08361; arXiv 2503.04715; arXiv 2410.21676",
        {"by_loss": by_loss, "step_law": step_law, "by_data": by_data},
    )


def _rate_by_width() -> Row:
    step_law = LEARNING_RATES[0].value
    narrow, wide = step_law(Run(1e9, 1e11)), step_law(Run(4e9, 1e11))
    ratio = (wide or 0.0) / (narrow or 1.0)
    return Row(
        "rate-goes-as-one-over-width",
        "The best learning rate goes as 1 / width",
        f"under muP, for hidden matrices: x 0.5 for twice the width; in the usual parametrization Step Law has x {ratio:.2f} for the four "
        "times "
        "larger N, and D counts too",
        "imprecise",
        "1 / width is a property of a parametrization; elsewhere it is N^-0.71 D^0.31",
        "Yang et al., arXiv 2203.03466; Step Law, arXiv 2503.04715",
        {"step_law": ratio, "mup": 0.5},
    )
