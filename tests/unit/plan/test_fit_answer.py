"""What a table of runs is answered: which N, how far, what is wrong; and that a saved answer is the same law again."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surefoot.core import strict_json
from surefoot.core.errors import ConfigError, DataError
from surefoot.plan.bands import band
from surefoot.plan.fits.answer import LAWS, Question, answer_of
from surefoot.plan.fits.fitted import FittedIsoFlop, FittedSurface, FittedTuning, read_fit
from surefoot.plan.fits.table import read_table
from surefoot.plan.surface_record import Surface

SURFACE = Surface(E=1.8, A=480.0, B=2100.0, alpha=0.35, beta=0.37)
Columns = Mapping[str, Sequence[object]]
Answer = Callable[..., dict[str, Any]]


def isoflop_columns(*, noise: float = 1e-3) -> dict[str, list[float]]:
    generator = np.random.default_rng(4)
    columns: dict[str, list[float]] = {"n": [], "flops": [], "loss": []}
    for flops in (1e18, 1e19, 1e20, 1e21):
        for factor in (0.3, 0.55, 1.0, 1.8, 3.3):
            n = SURFACE.best_n(flops) * factor
            columns["n"].append(n)
            columns["flops"].append(flops)
            columns["loss"].append(SURFACE.loss(n, flops / (6.0 * n)) * math.exp(generator.normal(0.0, noise)))
    return columns


def rate_columns() -> dict[str, list[float]]:
    columns: dict[str, list[float]] = {"n": [], "tokens": [], "learning_rate": [], "batch_size": [], "loss": []}
    for n in (1e8, 4e8, 1e9):
        for tokens in (2e9, 1e10, 4e10):
            for rate in 2.0 ** np.arange(-13.0, -5.0):
                for batch in 2.0 ** np.arange(5.0, 13.0):
                    off = math.log(rate / (1.8 * n**-0.7 * tokens**0.3)), math.log(batch / (5e-4 * tokens**0.57))
                    row = (n, tokens, rate, batch, 2.5 + 0.02 * off[0] ** 2 + 0.01 * off[1] ** 2)
                    for name, value in zip(columns, row, strict=True):
                        columns[name].append(float(value))
    return columns


@pytest.fixture
def answer(tmp_path: Path) -> Answer:
    def answered(columns: Columns, *, law: str, **question: Any) -> dict[str, Any]:
        path = tmp_path / "runs.csv"
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([list(columns), *zip(*columns.values(), strict=True)])
        return answer_of(read_table(path), law=law, question=Question(**{"num_draws": 10, **question}))

    return answered


@pytest.mark.parametrize(("name", "unit"), [("n", 1e6), ("n", 1e9), ("tokens", 1e9)])
def test_counts_in_millions_are_warned_about(answer: Answer, name: str, unit: float) -> None:
    columns = isoflop_columns()
    columns["tokens"] = [flops / (6.0 * n) for n, flops in zip(columns["n"], columns["flops"], strict=True)]
    in_units = answer(columns, law="isoflop")
    columns[name] = [value / unit for value in columns[name]]
    said = [warning for warning in answer(columns, law="isoflop")["warnings"] if "counts are expected" in warning]
    assert [warning.split()[0] for warning in said] == [name]
    assert not any("counts are expected" in warning for warning in in_units["warnings"])


def test_parametric_says_what_the_issue_of_a_fit_needs(answer: Answer) -> None:
    told = answer(isoflop_columns(), law="parametric", at=(1e22, 1e24))
    assert told["a"] == told["beta"] / (told["alpha"] + told["beta"])
    for name in ("E", "A", "B", "alpha", "beta", "a"):
        low, high = told["bands"][name]
        assert low < told[name] < high
    assert 0.0 < told["held_out_error"] == told["held_out"]["mean"] < 0.01
    assert told["residuals"]["worst"][0]["line"] >= 2
    assert (told["num_rows"], told["count"], told["derived"]) == (20, "n", ["tokens"])
    assert [one["times_largest"] for one in told["at"]] == pytest.approx([10.0, 1000.0])
    near, far = told["at"]
    assert near["n"] * near["tokens"] * 6.0 == pytest.approx(1e22)
    assert far["bands"]["n"][1] / far["bands"]["n"][0] > near["bands"]["n"][1] / near["bands"]["n"][0]
    assert far["bands"]["loss"][0] < far["loss"] < far["bands"]["loss"][1]
    assert 0.0 < near["loss_of_half_size"] < 0.05


def test_without_a_budget_the_largest_is_shown(answer: Answer) -> None:
    for law in ("parametric", "isoflop"):
        (one,) = answer(isoflop_columns(), law=law)["at"]
        assert (one["flops"], one["times_largest"]) == (pytest.approx(1e21), pytest.approx(1.0))


def test_isoflop_says_minima_laws_and_what_was_left_out(answer: Answer) -> None:
    columns = isoflop_columns(noise=0.0)
    one_sided = {name: values[:-2] for name, values in columns.items()}
    told = answer(one_sided, law="isoflop", at=(1e22,))
    assert told["a"] == pytest.approx(SURFACE.a, abs=0.005)
    assert [one["flops"] for one in told["optima"]] == [1e18, 1e19, 1e20]
    assert [one["flops"] for one in told["left_out"]] == [1e21]
    assert told["at"][0]["times_largest"] == pytest.approx(100.0)
    assert "loss" not in told["at"][0]
    assert any("3 budgets have a minimum" in warning for warning in told["warnings"])
    laws = told["laws"]
    assert laws["n"]["exponent"] + laws["tokens"]["exponent"] == pytest.approx(1.0)
    full = answer(columns, law="isoflop", at=(1e22,))
    best = SURFACE.best_n(1e22)
    assert full["at"][0]["loss"] == pytest.approx(SURFACE.loss(best, 1e22 / (6.0 * best)), abs=0.005)


def test_rates_and_batches_say_which_column_they_are_and_what_was_varied_beside(answer: Answer) -> None:
    rate, batch = (answer(rate_columns(), law=law) for law in ("lr", "batch"))
    assert rate["exponents"] == pytest.approx({"n": -0.7, "tokens": 0.3}, abs=1e-6)
    assert batch["exponents"] == pytest.approx({"tokens": 0.57}, abs=1e-6)
    assert (rate["column"], rate["varied_beside"]) == ("learning_rate", "batch_size")
    assert (batch["column"], batch["varied_beside"]) == ("batch_size", "learning_rate")
    assert set(rate["bands"]) == {"coef", "n", "tokens"}
    assert (rate["at"][0]["n"], rate["at"][0]["tokens"]) == (1e9, 4e10)
    assert rate["at"][0]["value"] == pytest.approx(1.8 * 1e9**-0.7 * 4e10**0.3, rel=1e-6)


def test_every_count_of_the_table_is_fitted_and_the_active_one_first(answer: Answer) -> None:
    columns: dict[str, Sequence[object]] = {**isoflop_columns(), "n_active": [0.25 * n for n in isoflop_columns()["n"]]}
    columns["tokens"] = [c / (6.0 * n) for c, n in zip(isoflop_columns()["flops"], isoflop_columns()["n"], strict=True)]
    del columns["flops"]
    told = answer(columns, law="parametric")
    assert told["count"] == "n_active"
    assert [other["count"] for other in told["other_counts"]] == ["n"]
    assert told["other_counts"][0]["alpha"] == pytest.approx(told["alpha"], rel=1e-6)
    assert told["other_counts"][0]["A"] == pytest.approx(told["A"] * 4.0 ** told["alpha"], rel=1e-4)
    again = answer(columns, law="parametric", count="n")
    assert (again["count"], again["A"]) == ("n", pytest.approx(told["other_counts"][0]["A"]))


def test_leaving_out_the_head_is_warned_about_and_moves_the_exponent(answer: Answer) -> None:
    """What an embedding of 20M parameters is to small models, and not to large ones."""
    columns = isoflop_columns(noise=0.0)
    told = answer(
        {**columns, "n_without_embedding": [max(n - 2e7, 0.1 * n) for n in columns["n"]]}, law="isoflop", count="n_without_embedding"
    )
    assert told["a"] > told["other_counts"][0]["a"] + 0.005
    assert any("leaves out the head" in warning for warning in told["warnings"])


def test_a_count_that_has_no_fit_says_so_beside_one_that_has(answer: Answer) -> None:
    columns = isoflop_columns()
    for law in ("parametric", "isoflop"):
        told = answer({**columns, "n_total": [1e9] * len(columns["n"])}, law=law)
        assert "problem" in told["other_counts"][0]


COLUMNS = isoflop_columns()


@pytest.mark.parametrize(
    ("law", "change", "question", "words"),
    [
        ("isoflop", {"flops": [2.0 * c for c in COLUMNS["flops"]], "tokens": [20.0 * n for n in COLUMNS["n"]]}, {}, "times 6 N D"),
        ("parametric", {"finished": ["yes"] * 19 + ["no"]}, {}, "1 runs are not finished (line 21)"),
        ("parametric", {}, {"at": (1e27,)}, "beyond 4 decades"),
        (
            "parametric",
            {**{name: [*COLUMNS[name], COLUMNS[name][2]] for name in COLUMNS}, "loss": [*COLUMNS["loss"], 3.5]},
            {},
            "of the same size",
        ),
        ("parametric", {"loss": [*COLUMNS["loss"][:-5], *(1.1 * loss for loss in COLUMNS["loss"][-5:])]}, {}, "largest budgets are missed"),
    ],
)
def test_what_is_wrong_is_a_warning(law: str, change: Columns, question: dict[str, Any], words: str, answer: Answer) -> None:
    assert any(words in warning for warning in answer({**COLUMNS, **change}, law=law, **question)["warnings"])


def test_a_good_table_has_no_warnings(answer: Answer) -> None:
    columns = isoflop_columns()
    assert answer({**columns, "finished": ["true"] * 20}, law="parametric", at=(2e21,))["warnings"] == []
    assert answer(columns, law="isoflop", at=(2e21,))["warnings"] == []


def test_a_few_high_losses_that_decide_are_pointed_at_and_can_be_left_out(answer: Answer) -> None:
    columns = {name: values * 3 for name, values in isoflop_columns().items()}
    columns["loss"][0] = columns["loss"][20] = columns["loss"][40] = 1.5 * columns["loss"][0]
    columns["loss"][1], columns["loss"][21] = 1.4 * columns["loss"][1], 1.4 * columns["loss"][21]
    told = answer(columns, law="parametric")
    assert told["without_highest"]["num_dropped"] == 1
    dropped = answer(columns, law="parametric", drop_highest=5)
    assert (dropped["num_rows"], dropped["without_highest"]) == (55, None)
    assert dropped["residuals"]["max"] < 0.01 < told["residuals"]["max"]


@pytest.mark.parametrize(
    ("law", "question"),
    [
        ("parametric", {"at": (0.0,)}),
        ("parametric", {"at": (math.nan,)}),
        ("parametric", {"drop_highest": 20}),
        ("isoflop", {"drop_highest": 1}),
        ("parametric", {"count": "width"}),
        ("lr", {"at": (1e24,)}),
    ],
)
def test_a_question_that_does_not_fit_is_bad_usage(law: str, question: dict[str, Any], answer: Answer) -> None:
    with pytest.raises(ConfigError):
        answer(isoflop_columns(), law=law, **question)


def test_a_law_of_rates_needs_rates(answer: Answer) -> None:
    with pytest.raises(DataError, match="no column 'lr'"):
        answer(isoflop_columns(), law="lr")


@pytest.mark.parametrize("law", LAWS)
def test_a_saved_fit_is_the_same_law_again(law: str, answer: Answer, tmp_path: Path) -> None:
    told = answer(isoflop_columns() if law in ("parametric", "isoflop") else rate_columns(), law=law)
    path = tmp_path / "fit.json"
    path.write_text(strict_json.dumps({"schema_version": 1, **told}))
    fitted = read_fit(path)
    assert (fitted.count, fitted.source) == ("n", str(tmp_path / "runs.csv"))
    assert (fitted.smallest_flops, fitted.largest_flops) == (told["smallest_flops"], told["largest_flops"])
    assert 0.0 < fitted.smallest_flops < fitted.largest_flops
    (one,) = told["at"]
    if isinstance(fitted, FittedSurface):
        assert fitted.surface.best_n(one["flops"]) == one["n"]
        assert list(band(drawn.best_n(one["flops"]) for drawn in fitted.draws)) == pytest.approx(one["bands"]["n"])
    elif isinstance(fitted, FittedIsoFlop):
        assert fitted.loss_law is not None
        for name, kept in (
            ("n", fitted.n_law),
            ("tokens", fitted.token_law),
            ("tokens_per_parameter", fitted.ratio_law),
            ("loss", fitted.loss_law),
        ):
            assert kept(one["flops"]) == pytest.approx(one[name])
            assert list(band(kept.values(one["flops"]))) == pytest.approx(one["bands"][name])
    else:
        assert isinstance(fitted, FittedTuning)
        assert fitted.law == law
        assert fitted.fit(n=one["n"], tokens=one["tokens"]) == pytest.approx(one["value"])
        assert list(fitted.fit.band_at(n=one["n"], tokens=one["tokens"])) == pytest.approx(one["bands"]["value"])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"law": "kaplan"}', '{"law": "parametric", "E": 1.8}', '{"law": "lr", "exponents": []}'])
def test_what_is_no_fit_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    path.write_text(text)
    with pytest.raises(DataError, match="is no fit"):
        read_fit(path)
    with pytest.raises(ConfigError, match="no such file"):
        read_fit(tmp_path / "gone.json")


def test_a_table_of_optima_is_fitted_as_one(tmp_path: Path) -> None:
    """One row for each budget: nothing to minimise, and errors weigh."""
    path = tmp_path / "optima.csv"
    rows = [
        f"{flops:g},{0.05 * flops**0.5:.9g},{2 + 300 * flops**-0.1:.9g},{std}" for flops, std in ((1e18, 0.1), (1e19, 0.1), (1e20, 0.1))
    ]
    path.write_text("\n".join(["flops,n_opt,loss_opt,n_log_std", *rows, f"1e21,{0.1 * 1e21**0.5:g},2.5,50"]) + "\n")
    found = answer_of(read_table(path), law="isoflop")
    assert found["a"] == pytest.approx(0.5, abs=1e-3)
    assert any("one row for each budget" in warning for warning in found["warnings"])
    path.write_text(path.read_text().replace(",50\n", ",0.01\n"))
    assert answer_of(read_table(path), law="isoflop")["a"] > 0.55
