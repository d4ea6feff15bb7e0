"""The laws that were published, by name. Figures are as their authors print them unless a comment says how they follow."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from functools import cache

from surefoot.core.errors import ConfigError
from surefoot.plan.sizing.epoch_draws import epoch_draws
from surefoot.plan.sizing.laws import Law, Power, Ratio, TokenCost, power_draws
from surefoot.plan.surface_record import Surface

PF_DAY = 1e15 * 86_400.0

# The 240 runs again, descended to the very bottom. Besiroglu et al. stopped a little above: 1.8169, 482.0, 2085, 0.3478, 0.3659.
EPOCH = Surface(E=1.817218, A=477.826, B=2143.417, alpha=0.3473105, beta=0.3671724)
HOFFMANN = Surface(E=1.6934, A=406.4, B=410.7, alpha=0.3392, beta=0.2849)
HOFFMANN_ROUNDED = Surface(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)

_MASSIVE_TEXT = "MassiveText (web, books, news, code; English)"
_CHINCHILLA = "Hoffmann et al., arXiv 2203.15556"
_CHINCHILLA_RUNS = (1.4e18, 1.3e22)

_PORIAN = Power(0.118926, 0.496895)

TUNING_NAMES = ("steplaw", "lr ~ 1/width", "mccandlish", "critical-batch")
"""What is published under these names sets learning rates or batches, not sizes."""


@cache
def published_laws() -> Mapping[str, Law]:
    """All but `ratio R`, which is made when it is asked for."""
    return {law.name: law for law in (*_of_hoffmann(), *_others())}


def law(name: str) -> Law:
    """By name; `ratio 40` (also `ratio:40`, `ratio=40`) is 40 tokens per parameter. Raises ConfigError that lists what there is."""
    key = name.strip().lower()
    told = re.fullmatch(r"ratio(?:[\s:=]+|-)([0-9.]+(?:e[0-9]+)?)", key)
    if told:
        return _ratio(told.group(1))
    laws = published_laws()
    if key in laws:
        return laws[key]
    known = f"known: {', '.join(laws)}, ratio:R, or the JSON file of a fit"
    if key in TUNING_NAMES or key.replace(" ", "") == "lr~1/width":
        raise ConfigError(f"{name!r} is a law of learning rate or batch, and says no size", where="--law", hint=known, got=name)
    near = difflib.get_close_matches(key, laws, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"law {name!r} is not known", where="--law", hint=meant + known, got=name)


def _ratio(told: str) -> Law:
    try:
        ratio = float(told)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio < float("inf"):
        raise ConfigError(f"a ratio of {told} tokens per parameter", where="--law", hint="write ratio:40", got=told)
    note = "a ratio fixed beforehand: no run says that it is best at this budget"
    return Law(f"ratio:{ratio:g}", Ratio(ratio), counts="all", source="asked for", corpus="none", note=note)


def _of_hoffmann() -> tuple[Law, ...]:
    return (
        Law(
            "epoch",
            EPOCH,
            counts="all",
            source="Besiroglu et al. (Epoch AI), arXiv 2404.10102: runs of Hoffmann et al. read off a figure, fitted again",
            corpus=_MASSIVE_TEXT,
            flops_range=_CHINCHILLA_RUNS,
            draws=epoch_draws(),
        ),
        Law(
            "chinchilla-20",
            Ratio(20.0),
            counts="all",
            source=f"{_CHINCHILLA}, approaches 1 and 2, as commonly rounded: N and D both grow as the square root of C",
            corpus=_MASSIVE_TEXT,
            flops_range=(6e18, 3e21),
        ),
        Law(
            "hoffmann",
            HOFFMANN,
            counts="all",
            source=f"{_CHINCHILLA}, approach 3, constants to four digits from the source of the paper",
            corpus=_MASSIVE_TEXT,
            flops_range=_CHINCHILLA_RUNS,
            note="the fit behind `hoffmann` had not converged (arXiv 2404.10102): its tokens per parameter are some three times too high",
        ),
        Law(
            "hoffmann-rounded",
            HOFFMANN_ROUNDED,
            counts="all",
            source=f"{_CHINCHILLA}, approach 3, constants as printed",
            corpus=_MASSIVE_TEXT,
            flops_range=_CHINCHILLA_RUNS,
            note="two printed digits of an exponent do not carry: rounding alone takes 59 tokens per parameter to 93 at 5.76e23 FLOPs",
        ),
    )


def _others() -> tuple[Law, ...]:
    return (
        Law(
            "kaplan",
            Power(1.3e9 * PF_DAY**-0.73, 0.73),
            counts="body",
            source="Kaplan et al., arXiv 2001.08361: 1.3e9 parameters at one PF-day, growing as C^0.73",
            corpus="WebText2 (English web)",
            flops_range=(1e-7 * PF_DAY, 10.0 * PF_DAY),  # read off their figures
            note="`kaplan` grows models too fast: no head in its FLOPs, warm-up too long, not tuned by size (arXiv 2406.19146)",
        ),
        Law(
            "porian",
            _PORIAN,
            counts="without embedding",
            source="Porian et al., arXiv 2406.19146: RefinedWeb, all corrections, tuned by size, constant learning rate",
            corpus="RefinedWeb (English web)",
            flops_range=(1.25e16, 2.56e19),
            # The exponent's published 95% is 0.4907 to 0.5045; twelve optima of about 0.114 each, weighted, meet at 5.4e17.
            draws=power_draws(_PORIAN, pivot_flops=5.43e17, log_n_std=0.033, exponent_std=0.00353),
        ),
        Law(
            "deepseek",
            Power(0.1715 / 6.0, 0.5243),
            counts="flops/6",
            source="DeepSeek LLM, arXiv 2401.02954: M = 0.1715 C^0.5243 FLOPs per token without the head; N is M / 6 here",
            corpus="DeepSeek's own (Chinese and English web)",
            flops_range=(1e17, 3e20),
        ),
        Law(
            "hunyuan-moe",
            Power(5.9e-3, 0.5305),
            counts="active",
            source="Hunyuan-Large, arXiv 2411.02265: N = 0.0059 C^0.5305 active parameters, C = 9.59 N D + 2.3e8 D",
            corpus="Tencent's own (Chinese and English)",
            flops_range=(3.3e19, 9.8e20),  # 10M and 1B active parameters on 100B tokens
            cost=TokenCost(9.59, 2.3e8),
            note="`hunyuan-moe` counts 9.59 FLOPs per active parameter and token, where routing and long attention are in; 6 is usual",
        ),
    )
