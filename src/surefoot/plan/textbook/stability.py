"""Classic rules of loss spikes, canaries and number formats: what theory says is computed; what runs did is cited as measured.

The measured figures are of public training curves: 11 healthy runs of 124M to 350M parameters, 200,000 steps in all, and the logs of
BLOOM, OPT and GLM-130B. The project does not ship them; false alarms are episodes per 10,000 healthy steps.
"""

from __future__ import annotations

import math
from statistics import NormalDist, fmean, pstdev, stdev

from surefoot.plan.failures.retention import retention_for
from surefoot.plan.sizing.published import EPOCH
from surefoot.plan.textbook.row import Row

_CURVES = "measured on 11 public curves of healthy runs (llm.c and others), 200,000 steps"
_LOGS = "training logs of BLOOM (arXiv 2211.05100), OPT (arXiv 2205.01068), GLM-130B (arXiv 2210.02414)"


def rows() -> tuple[Row, ...]:
    return (
        *(_canary_alert(), _gradient_example(), _near_zero(), _scaler(), _adam()),
        *(_sigmas(), _five_times_mean(), _leads(), _within_five(), _own_window(), _worked_example(), _three_saves(), _touch_the_rate()),
    )


def student_t_tails(t: float) -> float:
    """Both tails of Student's t with 4 degrees of freedom, in closed form."""
    u = t / math.sqrt(1.0 + t * t / 4.0)
    return 1.0 - 2.0 * (3.0 / 8.0) * u * (1.0 - t * t / (12.0 * (1.0 + t * t / 4.0)))


def false_alarms_of_five(k: float) -> float:
    """How often a new value lies more than k standard deviations from the mean of five before it, all normal and alike."""
    return student_t_tails(k / math.sqrt(1.0 + 1.0 / 5.0))


def k_for(probability: float) -> float:
    """The k with so many false alarms, by bisection."""
    low, high = 0.0, 1e3
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if false_alarms_of_five(middle) > probability else (low, middle)
    return high


def _canary_alert() -> Row:
    five, known = false_alarms_of_five(2.0), 2.0 * NormalDist().cdf(-2.0)
    return Row(
        "canary-at-two-sigma",
        "Alert when the canary is 2 sigma from its mean over 500 steps, evaluated each 100",
        f"{five:.1%} false alarms with five values; {known:.1%} if sigma were known, {1000 * known:.0f} in 1,000 evaluations",
        "wrong",
        "five values hardly tell a standard deviation: Student's t with 4 degrees of freedom",
        "theory of normal samples",
        {"five": five, "known": known},
    )


def _gradient_example() -> Row:
    return Row(
        "gradient-norm-leads",
        "The gradient norm crosses five times its mean 10 to 50 steps before the loss spikes",
        f"in the rule's own trace 5 x 1.3 is crossed at step 14,960 and the loss spikes at 14,963: {14_963 - 14_960} steps",
        "contradiction",
        "and a usual norm of 1.3 over a clip of 1.0 means that every step is clipped",
        "the rule's own example",
        {"lead": 14_963 - 14_960, "threshold": 5 * 1.3},
    )


def _near_zero() -> Row:
    return Row(
        "near-zero-perplexity",
        "The document behind a spike had a perplexity near zero",
        f"perplexity is at least {math.exp(0.0):.0f}; a loss of 9 is a perplexity of {math.exp(9.0):,.0f}",
        "wrong",
        "a repeated pattern has a low loss: it cannot lift the mean to 9",
        "definition",
        {"least": math.exp(0.0), "at_9": math.exp(9.0)},
    )


def _scaler() -> Row:
    normal, subnormal, bf16 = 2.0**-14, 2.0**-24, 2.0**-126
    return Row(
        "bf16-needs-a-scaler",
        "Mixed precision needs a loss scaler: below 6e-5 half precision is zero",
        f"fp16 has {normal:.1e} as its smallest normal number and goes on to {subnormal:.0e}; bf16 reaches {bf16:.0e}",
        "wrong",
        "bf16 has the exponents of float32 and needs no scaler; between the two limits fp16 loses digits, not the value",
        "IEEE 754 binary16; bfloat16",
        {"normal": normal, "subnormal": subnormal},
    )


def _adam() -> Row:
    elements, num_bytes = 2.0, (4 + 4 + 4) / 2
    return Row(
        "adam-is-twice-the-parameters",
        "Adam's state is about twice the parameters",
        f"{elements:.0f} times the elements; {num_bytes:.0f} times the bytes where bf16 weights have float32 masters and moments",
        "imprecise",
        "elements and bytes are not the same, and the masters belong to the optimizer's state",
        "arithmetic",
        {"elements": elements, "bytes": num_bytes},
    )


def _sigmas() -> Row:
    theory = {k: 10_000 * NormalDist().cdf(-k) for k in (2, 3, 4, 6)}
    return Row(
        "n-sigma-of-the-loss",
        "Alert when the loss is N sigma above the mean of the last 128 steps",
        f"measured: 58.6, 42.2, 15.8, 6.0, 2.5 false alarms for N of 2, 3, 4, 5, 6; a normal distribution would give {theory[3]:.3g} at N "
        "= 3 and "
        f"{theory[6]:.0e} at N = 6. At N = 6 a rise of 0.1 nats is found no more often than nothing is",
        "wrong",
        "losses have heavier tails, N is not told, and a roll-back at N = 3 would come every 240 steps",
        _CURVES,
        {"theory_3": theory[3], "theory_6": theory[6], "measured_3": 42.2, "measured_6": 2.5},
        basis="computed and measured",
    )


def _five_times_mean() -> Row:
    level, spike, window = 0.2, 960.0, 1000
    lifted = 5.0 * fmean([level] * (window - 1) + [spike]) / level
    return Row(
        "gradient-over-five-means",
        "Alert when the gradient norm exceeds five times its mean over 1,000 steps",
        f"measured: 0.75 false alarms, but a doubled level is found in 8% within 400 steps, a tripled one in 21%. Computed: one spike of "
        f"{spike:g} at a level of {level} lifts the threshold to {lifted:.0f} times the level for as long as it is in the window",
        "wrong",
        "not noisy but blind: a mean lets the outlier raise its own bar; the median does not",
        f"{_CURVES}; a spike as in BLOOM's log",
        {"lifted": lifted, "measured_false_alarms": 0.75},
        basis="computed and measured",
    )


def _leads() -> Row:
    return Row(
        "gradient-leads-by-tens-of-steps",
        "The gradient norm leads the loss by 10 to 50 steps, so somebody can act",
        "measured: 3 steps in BLOOM 176B, 1 to 3 in BLOOM 104B; in GLM-130B the loss scale led by 30, in Marin 32B the update norm",
        "wrong",
        "no person has a window there: the decision must fall inside the step, before the update",
        f"{_LOGS}; Marin 32B retrospective",
        {"bloom_176b": 3, "glm_130b": 30},
        basis="measured",
    )


def _within_five() -> Row:
    n, tokens = 7e9, 140e9
    wanted = 1.05 * EPOCH.loss(n, tokens)
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2.0
        low, high = (middle, high) if middle == 0.0 or EPOCH.loss(n, middle * tokens) > wanted else (low, middle)
    return Row(
        "recovered-within-five-per-cent",
        "A run has recovered when its loss is back within 5% in 200 steps",
        "measured: 5% of the loss are the last 42 to 61% of a run's progress, and a rank's own loss leaves that range in 21% of healthy "
        "steps. "
        f"By the fitted surface a 7B on 140B tokens is within 5% of its end after {high:.0%} of its tokens",
        "wrong",
        "half the run may be lost and count as recovered. 200 steps: BLOOM 104B needed about 2,000, a mixture of experts 15 to 30",
        f"{_CURVES}; {_LOGS}; arXiv 2404.10102",
        {"share_of_tokens": high},
        basis="computed and measured",
    )


def _own_window() -> Row:
    quiet = [0.0] * 4 + [1.0]
    sample, population = ((quiet[-1] - fmean(quiet)) / spread(quiet) for spread in (stdev, pstdev))
    before = [1.0, 2.0, 3.0, 4.0, 5.0]
    ramp = (6.0 - fmean(before)) / stdev(before)
    return Row(
        "canary-in-its-own-window",
        "The canary's mean and deviation are taken over the five evaluations of the last 500 steps, the newest among them",
        f"then no value can be further than 4 / sqrt(5) = {sample:.2f} deviations away ({population:.2f} with n in the denominator): 2 "
        "sigma never "
        f"fire. Without the newest: {false_alarms_of_five(2.0):.1%} by theory, measured 19.1%, all but one because the loss fell; a "
        "steady ramp "
        f"gives {ramp:.3f}, below 2 for ever",
        "contradiction",
        f"two-sided, it reports that the model learns; one false alarm in 1,000 takes {k_for(1e-3):.1f} deviations. Upward only, "
        "measured, it had "
        "0.09%",
        f"theory of normal samples; {_CURVES}",
        {"most": sample, "most_population": population, "ramp": ramp, "k": k_for(1e-3), "measured": 0.191},
        basis="computed and measured",
    )


def _worked_example() -> Row:
    implied = 0.09 / 3.2
    return Row(
        "canary-worked-example",
        "A canary that is 0.09 nats up stands 3.2 sigma out, 2,100 steps after the fault",
        f"that is a sigma of {implied:.3f}; measured on real canaries: 0.0005 to 0.003, so it is seen after 250 to 500 steps",
        "wrong",
        f"{implied / 0.003:.0f} to {implied / 0.0005:.0f} times too noisy: a fixed held-out set is far quieter than the training loss",
        _CURVES,
        {"implied": implied, "least_factor": implied / 0.003, "most_factor": implied / 0.0005},
        basis="computed and measured",
    )


def _three_saves() -> Row:
    plan = retention_for(2100.0, step_s=1.0, interval_steps=500, total_steps=100_000)
    return Row(
        "three-rolling-saves",
        "Three rolling saves, each 500 steps, let a canary that speaks after 2,100 steps roll back",
        f"they reach back {2 * 500:,} steps behind the newest; it takes cover_steps of {plan.cover_steps:,}, at most {plan.num_rolling} "
        "checkpoints "
        "at distances that double",
        "contradiction",
        "retention must exceed the detection latency, with a margin; which ones are verified must be marked",
        "arXiv 1310.8486; surefoot.plan.failures.retention",
        {"reach": 1000, "cover_steps": plan.cover_steps, "num_rolling": plan.num_rolling},
    )


def _touch_the_rate() -> Row:
    return Row(
        "never-touch-the-rate",
        "Never touch the learning rate of a running pre-training",
        "measured: OPT finished by lowering it, to 0.9 and then 2/3; GLM-130B too; halving it helped BLOOM 104B",
        "imprecise",
        "a policy, no law: a second line of action, explicit and written down",
        _LOGS,
        {"opt_last": 2 / 3},
        basis="measured",
    )
