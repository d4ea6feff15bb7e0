"""The rows that a plan shows, which of them it chooses and why, and what it warns of."""

from __future__ import annotations

import pytest

from surefoot.core.errors import ConfigError
from surefoot.plan.sizing.allocation import Serving
from surefoot.plan.sizing.frontier import Frontier, Wish, frontier
from surefoot.plan.sizing.published import law

FLAGSHIP = 9.95e23
SERVED = Serving(1e13)


def made(name: str = "epoch", *, wish: Wish | None = None, flops: float = FLAGSHIP) -> Frontier:
    return frontier(law(name), flops, wish=wish)


def test_without_a_serving_figure_both_answers_are_there() -> None:
    found = made()
    assert found.choice.mark == "least loss"
    assert found.choice.n == pytest.approx(96.9e9, rel=0.003)
    other = next(row for row in found.rows if "as much as training" in row.mark)
    assert other.n == pytest.approx(36.7e9, rel=0.01)
    assert "nothing says" in found.reason.why
    assert found.choice.serve_ratio is None


def test_with_one_the_cheapest_life_is_chosen() -> None:
    found = made(wish=Wish(serving=SERVED))
    assert found.choice.mark == "cheapest life"
    assert found.choice.n == pytest.approx(41.5e9, rel=0.003)
    assert found.choice.serve_ratio == pytest.approx(0.83, abs=0.005)
    assert found.choice.over_best == pytest.approx(0.0065, abs=1e-4)
    assert "2401.00448" in found.reason.source


def test_a_size_that_is_asked_for_is_kept() -> None:
    found = made(wish=Wish(serving=SERVED, n=8e9))
    assert (found.choice.n, found.choice.mark) == (8e9, "asked for")
    assert {row.mark for row in found.rows} == {"", "least loss", "cheapest life", "asked for"}


def test_bands_and_the_price_of_a_factor_of_two() -> None:
    found = made()
    assert found.n_band == pytest.approx((69e9, 164e9), rel=0.03)
    assert (found.larger_by_2, found.smaller_by_2) == pytest.approx((0.0044, 0.0044), abs=1e-4)
    for row in found.rows:
        assert row.loss_band is not None
        assert row.over_best_band is not None
        assert row.loss_band[0] < row.loss < row.loss_band[1]
        assert 0.0 <= row.over_best_band[0] <= row.over_best_band[1]
    assert found.extrapolation == pytest.approx(76.5, rel=0.01)


def test_rows_go_from_large_to_small() -> None:
    for wish in (Wish(), Wish(serving=SERVED), Wish(unique_tokens=1e12)):
        found = made(wish=wish)
        sizes = [row.n for row in found.rows]
        assert sizes == sorted(sizes, reverse=True)
        assert found.choice in found.rows
        assert found.best is min(found.rows, key=lambda row: row.loss)
        assert all(row.as_good_at <= 1.0 + 1e-9 for row in found.rows)


def test_sizes_can_be_given() -> None:
    found = frontier(law("epoch"), FLAGSHIP, sizes=(70e9, 50e9))
    assert {70e9, 50e9} <= {row.n for row in found.rows}
    assert len(found.rows) == 4


def test_what_is_warned_of() -> None:
    far = made(wish=Wish(serving=Serving(1e14)))
    assert any("tokens per parameter" in text for text in far.warnings)
    assert any("76.5 times beyond" in text for text in far.warnings)
    near = made(flops=1e21)
    assert near.warnings == ()
    assert any("sizes, not losses" in text for text in made("porian").warnings)
    assert any("no band" in text for text in made("hoffmann").warnings)


def test_scarce_data_makes_the_model_smaller() -> None:
    """Compute goes to further epochs rather than to parameters (Muennighoff et al., their abstract)."""
    scarce, enough = (made(wish=Wish(unique_tokens=unique)) for unique in (2e11, 5e12))
    assert scarce.best.n < enough.best.n
    assert enough.best.n == pytest.approx(96.9e9, rel=0.003)
    assert scarce.choice.epochs == pytest.approx(scarce.choice.tokens / 2e11)
    assert any("passes over" in text for text in scarce.warnings)
    assert not any("passes over" in text for text in enough.warnings)


@pytest.mark.parametrize("flops", [0.0, -1.0, float("inf"), float("nan")])
def test_no_budget(flops: float) -> None:
    with pytest.raises(ConfigError):
        made(flops=flops)


@pytest.mark.parametrize("serving", [Serving(0.0), Serving(-1e12), Serving(1e12, 0.0)])
def test_no_serving(serving: Serving) -> None:
    with pytest.raises(ConfigError, match="served tokens"):
        made(wish=Wish(serving=serving))


def test_no_size() -> None:
    with pytest.raises(ConfigError):
        made(wish=Wish(n=0.0))


def test_a_bad_ratio_is_seen_to_be_one() -> None:
    """Losses of a law that knows none are not moved along with it."""
    good, bad = made("ratio:20").choice, made("ratio:1000").choice
    assert good.over_best < 0.001
    assert bad.over_best > 0.02
    assert bad.loss > good.loss
