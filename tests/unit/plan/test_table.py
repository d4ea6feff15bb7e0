"""Tables as people write them: which column is which, what follows from what, and the line of everything that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from surefoot.core.errors import ConfigError, DataError
from surefoot.plan.fits.table import Table, numbers, read_runs, read_table

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(text: str | bytes) -> Path:
        path = tmp_path / "runs.csv"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return written


@pytest.fixture
def table(write: Write) -> Callable[[str], Table]:
    return lambda text: read_table(write(text))


@pytest.mark.parametrize(
    ("text", "derived"),
    [
        ("n,tokens,loss\n10,20,3\n", ("flops",)),
        ("n,flops,loss\n10,1200,3\n", ("tokens",)),
        ("tokens,flops,loss\n20,1200,3\n", ("n",)),
        ("flops,loss,n,tokens,host\n1200,3,10,20,a\n", ()),
    ],
)
def test_of_parameters_tokens_and_flops_two_are_enough(text: str, derived: tuple[str, ...], table: Callable[[str], Table]) -> None:
    runs = read_runs(table(text))
    assert [float(column[0]) for column in (runs.n, runs.tokens, runs.flops, runs.loss)] == [10.0, 20.0, 1200.0, 3.0]
    assert runs.derived == derived


def test_what_a_spreadsheet_adds_does_no_harm(table: Callable[[str], Table]) -> None:
    read = table('\ufeff"Model Size", Training FLOP ,loss,\r\n10,"1.2e3",3,\r\n\r\n20,2400,2.5,\r\n')
    runs = read_runs(read)
    assert runs.n.tolist() == [10.0, 20.0]
    assert runs.tokens.tolist() == [20.0, 20.0]
    assert runs.lines == (2, 4)
    assert (read.name_of("n"), read.name_of("flops")) == ("model_size", "training_flop")


def test_a_mixture_of_experts_is_fitted_on_its_active_parameters(table: Callable[[str], Table]) -> None:
    runs = read_runs(table("n,n_active,n_without_embedding,tokens,loss\n100,10,90,20,3\n"))
    assert (runs.count, runs.n[0], runs.flops[0]) == ("n_active", 10.0, 1200.0)
    assert runs.other_counts == ("n", "n_without_embedding")


def test_another_count_changes_neither_the_tokens_nor_the_compute_of_a_run(table: Callable[[str], Table]) -> None:
    read = table("n,n_without_embedding,flops,loss\n10,5,1200,3\n")
    one, other = read_runs(read), read_runs(read, count="n_without_embedding")
    assert (one.n[0], other.n[0]) == (10.0, 5.0)
    assert (one.tokens[0], one.flops[0]) == (other.tokens[0], other.flops[0]) == (20.0, 1200.0)
    assert other.other_counts == ("n",)


def test_any_column_can_be_the_count_and_one_that_is_missing_is_bad_usage(table: Callable[[str], Table]) -> None:
    read = table("params,width_squared,tokens,loss\n10,7,20,3\n")
    assert read_runs(read, count="width_squared").n[0] == 7.0
    assert (read_runs(read, count="params").count, read_runs(read, count="params").other_counts) == ("n", ())
    with pytest.raises(ConfigError, match="there are params, width_squared"):
        read_runs(read, count="n_active")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "runs.csv: is empty"),
        ("\n\n", "runs.csv: is empty"),
        ("n,tokens,loss\n", "runs.csv:1: a header and no runs"),
        ("n;tokens;loss\n1;2;3\n", "runs.csv:1: separated by semicolons"),
        ("n\ttokens\tloss\n1\t2\t3\n", "runs.csv:1: separated by tabs"),
        ("10,20,3\n11,21,3\n", "runs.csv:1: the first line has numbers in it"),
        ("n,tokens,n,loss\n1,2,3,4\n", "runs.csv:1: two columns 'n'"),
        ("n,tokens,loss\n10,20,3\n10,20\n", "runs.csv:3: 2 cells under 3 columns"),
        ("n,tokens\n10,20\n", "runs.csv:1: no column 'loss'"),
        ("n,loss\n10,3\n", "runs.csv:1: no column 'tokens' nor 'flops'"),
        ("n,tokens,loss\n10,20,3\n\n10,20,nan\n", "runs.csv:4: loss is 'nan'"),
        ("n,tokens,loss\n10,20,inf\n", "runs.csv:2: loss is 'inf'"),
        ("n,tokens,loss\n10,-20,3\n", "runs.csv:2: tokens is '-20'"),
        ("n,tokens,loss\n0,20,3\n", "runs.csv:2: n is '0'"),
        ("n,tokens,loss\n10,20,\n", "runs.csv:2: loss is empty"),
        ('n,tokens,loss\n10,20,"3,1"\n', "decimal points"),
        ("n,tokens,loss\n10,20,diverged\n", "runs.csv:2: loss is 'diverged'"),
        ("n,tokens,loss\n0.07,20,3\n0.4,9,3\n", "no n reaches 1"),
        ('n,tokens,loss\n10,20,"3\n', "cannot be read as CSV"),
        (b"\xff\xfen\x00,\x00", "cannot be read as CSV"),
        (b"n,tokens,loss\n1,2,\x80\n", "cannot be read as CSV"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str | bytes, words: str, write: Write) -> None:
    with pytest.raises(DataError) as caught:
        read_runs(read_table(write(text)))
    assert words in str(caught.value)
    assert caught.value.hint


def test_a_table_that_is_not_there_or_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "gone.csv", tmp_path):
        with pytest.raises(DataError, match="cannot be read as CSV"):
            read_table(path)


def test_further_bad_cells_are_named_with_the_first(table: Callable[[str], Table]) -> None:
    read = table("n,loss\n" + "10,x\n" * 7 + "10,3\n")
    with pytest.raises(DataError) as caught:
        numbers(read, "loss")
    others = caught.value.values["others"]
    assert isinstance(others, list)
    assert [str(other.where).rpartition(":")[2] for other in others] == ["3", "4", "5", "6"]
    assert caught.value.values["count"] == 7


def test_rows_keep_their_lines(table: Callable[[str], Table]) -> None:
    runs = read_runs(table("n,tokens,loss\n1,2,3\n4,5,6\n7,8,9\n"))
    assert runs.take(np.array([2, 0])).lines == (4, 2)
    assert runs.take(np.array([2, 0])).loss.tolist() == [9.0, 3.0]
