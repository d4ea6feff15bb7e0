"""Every rule by name: what it asks for unless told otherwise, and how often it is wrong on healthy runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from surefoot.core.errors import ConfigError
from surefoot.core.records import Asks
from surefoot.core.sections import HealSection
from surefoot.monitor.probe_figures import PLACELESS, PROBE_KINDS

OFF = "off"
ADVISORY = "cusum"
"""All advisory sums at once; `cusum:<kind>` binds those of one kind, `cusum:<kind>:<place>` one of them."""

RATIO, RATIO_BURST = "update_ratio", "update_ratio_burst"
SIGNAL_KINDS = (*PROBE_KINDS, RATIO)
_MUTED = "off:"
"""Before the name of an advisory rule that is off while another one, for more signals, is not."""


@dataclass(frozen=True, slots=True)
class Rule:
    """`tiers` and `classic` are what the presets bind it to, None where they leave it out. `false_alarms` is in words: episodes per
    10,000 healthy steps as docs/detectors.md measures them."""

    tiers: Asks | None
    classic: Asks | None
    false_alarms: str


RULES: Mapping[str, Rule] = {
    "nonfinite": Rule(Asks.SKIP, Asks.SKIP, "0"),
    "outlier_loss": Rule(Asks.SKIP, None, "0; 2 where the noise is Student's t of 3 degrees"),
    "outlier_loss_mild": Rule(Asks.RECORD, None, "1.3"),
    "outlier_loss_and_norm": Rule(Asks.SKIP, None, "0.6"),
    "sustained_loss": Rule(Asks.ROLL_BACK, None, "0.24"),
    "sustained_loss_slow": Rule(Asks.ALERT, None, "1.2"),
    "grad_level": Rule(Asks.ROLL_BACK, None, "0.24"),
    "grad_outlier": Rule(Asks.RECORD, None, "0.72"),
    "grad_burst": Rule(Asks.SKIP, None, "0"),
    "rank_norm": Rule(Asks.SKIP, None, "0 on small runs; public curves do not have it"),
    "rank_loss": Rule(Asks.RECORD, None, "0 on small runs; public curves do not have it"),
    "lr_jump": Rule(Asks.SKIP, Asks.SKIP, "0: it compares figures that are told"),
    "lr_not_applied": Rule(Asks.ROLL_BACK, Asks.ROLL_BACK, "0: it compares figures that are told"),
    "canary_rise": Rule(Asks.ROLL_BACK, None, "0 of 1,126 evaluations"),
    "canary_apart": Rule(Asks.ALERT, None, "0 of 1,126 evaluations"),
    "diverged": Rule(Asks.ROLL_BACK, Asks.ALERT, "0: it is a rise that has not come back when the time to decide comes"),
    "replica_differs": Rule(Asks.ROLL_BACK, Asks.ROLL_BACK, "0: it compares bits"),
    "recompute_differs": Rule(Asks.ROLL_BACK, Asks.ROLL_BACK, "0: it compares bits"),
    "bits_do_not_repeat": Rule(Asks.ALERT, Asks.ALERT, "0: it compares bits"),
    RATIO_BURST: Rule(Asks.ALERT, None, "not measured on public curves"),
    ADVISORY: Rule(Asks.RECORD, None, "not measured on public curves"),
    "plateau": Rule(Asks.RECORD, None, "0"),
    "rebound": Rule(Asks.ALERT, None, "one resume in 1,000, by its own threshold"),
    "norm_over_clip": Rule(None, Asks.SKIP, "thousands where the usual norm is near the threshold"),
    "norm_5x_mean_1000": Rule(None, Asks.ALERT, "0.75"),
    "norm_100x_mean_1000": Rule(None, Asks.PAUSE, "0"),
    "loss_n_sigma": Rule(None, Asks.ROLL_BACK, "58.6, 42.2, 15.8, 6.0, 2.5 for N of 2, 3, 4, 5, 6"),
    "recover_5pct_200": Rule(None, Asks.RECORD, "none; but half of a run's progress is within its 5%"),
    "canary_2sigma_500": Rule(None, Asks.ALERT, "19 evaluations of 100, nearly all because the model learns"),
    "replica_norm_compare": Rule(None, Asks.ALERT, "thousands: healthy ranks see other samples"),
}


def bindings(heal: HealSection) -> Mapping[str, Asks]:
    """What each rule asks for, by the preset and `[heal] rules` over it. A rule that is off is left out.

    Raises ConfigError for a rule or an action that does not exist, and where an update that is not finite would be let through.
    """
    bound: dict[str, Asks] = {}
    for name, rule in RULES.items():
        asks = rule.classic if heal.preset == "classic" else rule.tiers
        if asks is not None:
            bound[name] = asks
    for name, action in heal.rules:
        _check_name(name)
        if action == OFF:
            bound.pop(name, None)
            if name not in RULES:
                bound[f"{_MUTED}{name}"] = Asks.RECORD
        elif action in tuple(Asks):
            bound[name] = Asks(action)
        else:
            choices = ", ".join((*Asks, OFF))
            raise ConfigError(f"rule {name} cannot be bound to {action!r}", where="[heal] rules", hint=f"one of {choices}")
    if bound.get("nonfinite") in (None, Asks.RECORD, Asks.ALERT):
        what = "nonfinite must skip at least: an update that is not finite ends the run's weights"
        raise ConfigError(what, where="[heal] rules", hint="bind it to skip, rollback or pause")
    return bound


def bound_by_hand(heal: HealSection) -> tuple[str, ...]:
    """A line for each rule that `[heal]` binds otherwise than by default, one by one or by its preset, with what is known of its false
    alarms: to be said at the start of a run."""
    by_hand = dict(heal.rules)
    preset = {
        name: f"{rule.classic} by preset {heal.preset}"
        for name, rule in RULES.items()
        if heal.preset == "classic" and rule.classic not in (None, rule.tiers) and name not in by_hand
    }
    return tuple(
        f"rule {name} is bound to {action}; false alarms per 10,000 healthy steps: {RULES[name.partition(':')[0]].false_alarms}"
        for name, action in {**preset, **by_hand}.items()
        if action != OFF
    )


def advisory_rule(signal: str, rules: Mapping[str, Asks]) -> str | None:
    """The rule that binds an advisory signal, the one for the fewest signals first; None where that is off, or there is none."""
    for rule in (f"{ADVISORY}:{signal}", f"{ADVISORY}:{signal.partition(':')[0]}", ADVISORY):
        if rule in rules:
            return rule
        if f"{_MUTED}{rule}" in rules:
            return None
    return None


def _check_name(name: str) -> None:
    if name in RULES:
        return
    rule, _, signal = name.partition(":")
    kind, _, place = signal.partition(":")
    if rule != ADVISORY or not signal:
        raise ConfigError(f"there is no rule {name}", where="[heal] rules", hint=f"the rules are {', '.join(RULES)}")
    if kind not in SIGNAL_KINDS:
        hint = f"{ADVISORY}:<kind> or {ADVISORY}:<kind>:<place>; the kinds are {', '.join(SIGNAL_KINDS)}"
        raise ConfigError(f"there is no signal {kind}, for rule {name}", where="[heal] rules", hint=hint)
    if kind in PLACELESS and place:
        raise ConfigError(f"{kind} is one figure of the whole model, in rule {name}", where="[heal] rules", hint=f"{ADVISORY}:{kind}")
