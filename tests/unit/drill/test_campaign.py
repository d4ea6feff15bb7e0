"""Campaign files: what is asked, and what is refused before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.core.errors import ConfigError
from surefoot.drill.campaign import read_campaign, refuse_order, scratch_folder, whole_catalogue
from surefoot.drill.rehearse import draw


def campaign(folder: Path, text: str) -> Path:
    (folder / "c.toml").write_text(text)
    return folder / "c.toml"


def test_a_campaign_is_a_list_of_drills(tmp_path: Path) -> None:
    first, second = read_campaign(
        campaign(tmp_path, '[[drill]]\nname = "kill-a-rank"\nrepeat = 3\nseed = 5\n[[drill]]\nname = "stop-a-rank"\nranks = 4\n')
    )
    assert (first.drill.name, first.num_repeats, first.num_ranks, first.seed) == ("kill-a-rank", 3, 2, 5)
    assert (second.drill.name, second.num_repeats, second.num_ranks) == ("stop-a-rank", 1, 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no .*drill"),
        ("[[drill]]\nrepeat = 1\n", "1: it has no name"),
        ('[[drill]]\nname = "kill-a-rank"\nrepaet = 1\n', "repaet: no such key"),
        ('[[drill]]\nname = "kill-a-rank"\nrepeat = "1"\n', "repeat: no whole number"),
        ('[[drill]]\nname = "kill-a-rank"\nrepeat = 0\n', "repeat is 0"),
        ('[[drill]]\nname = "kill-a-rank"\nranks = 1\n', "ranks is 1"),
        ('[[drill]]\nname = "node-joins"\n', "needs several nodes"),
        ("drill = [1]\n", "1: it has no name"),
        ("[[", "no TOML"),
    ],
)
def test_what_is_wrong_is_named_before_anything_runs(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_campaign(campaign(tmp_path, text))


def test_a_file_that_is_not_there_is_no_campaign(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_campaign(tmp_path / "absent.toml")


def test_all_is_whatever_can_run() -> None:
    orders = whole_catalogue(num_repeats=2, num_ranks=2, seed=1)
    assert {"kill-a-rank", "hung-rank"} <= {order.drill.name for order in orders}
    for order in orders:
        refuse_order(order, where="test")


def test_folders_go_away_unless_they_are_kept() -> None:
    with scratch_folder(keep=False) as gone:
        assert gone.is_dir()
    assert not gone.exists()
    with scratch_folder(keep=True) as kept:
        pass
    assert kept.is_dir()
    kept.rmdir()


def test_seeds_in_a_row_strike_every_rank_within_the_run() -> None:
    drawn = [draw(seed, num_ranks=4, num_steps=100) for seed in range(40)]
    assert {rank for rank, _ in drawn} == {0, 1, 2, 3}
    assert all(20 <= step <= 50 for _, step in drawn)
    assert drawn == [draw(seed, num_ranks=4, num_steps=100) for seed in range(40)]
    assert len({step for _, step in drawn}) > 10
