from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.config import load_config
from surefoot.core.errors import ConfigError

Write = Callable[[str], Path]

SOURCES = """[data]
path = "tokens"
seq_len = 256
[[data.sources]]
name = "web"
files = ["web"]
[[data.sources]]
name = "code"
files = ["code"]
"""
FIRST = SOURCES.count("\n") + 2
"""The line after the header of the first stage."""

BROKEN = [
    ("first_sample = 9\n[[stage]]\nfirst_sample = 9", 2, "stage[1].first_sample: 9 does not rise after 9", ""),
    ("first_sample = 9\n[[stage]]\nlr = 1.0", 1, "stage[1].first_sample: 0 does not rise after 9", ""),
    ("first_sample = 9\nweights = { wbe = 1 }", 1, 'stage[0].weights: there is no source "wbe"', "did you mean web?"),
    ("weights = { web = -1, code = 1 }", 0, "stage[0].weights: web = -1 is below 0", ""),
    ("weights = { web = 0 }", 0, "stage[0].weights: no weight is above 0", ""),
    ("seq_len = 384", 0, "data.seq_len: 256 does not divide the longest of all stages = 384", "use a divisor"),
    ("seq_len = 1", 0, "stage[0].seq_len: 1 is below 2", ""),
    ("first_sample = 9\nseq_len = 200", 1, "stage[0].seq_len: 200 does not divide the longest of all stages = 256", "use a divisor"),
    ("global_batch_size = 2", 0, "global_batch_size = 2 is below train.micro_batch_size = 4", ""),
    ("rope_base = 0.5", 0, "stage[0].rope_base: 0.5 is below 1", ""),
    ("rope_base = 9e5\n[model]\nfactory = 'a.b:c'", 0, "rotary embeddings of its own", "leave it out"),
]


@pytest.mark.parametrize(("stage", "line", "what", "hint"), BROKEN, ids=[item[2][:40] for item in BROKEN])
def test_a_stage_that_breaks_a_rule_is_refused_where_it_stands(write_toml: Write, stage: str, line: int, what: str, hint: str) -> None:
    path = write_toml(f"{SOURCES}[[stage]]\n{stage}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert what in caught.value.what
    assert hint in caught.value.hint
    wanted = 3 if what.startswith("data.seq_len") else FIRST + line
    assert caught.value.where == f"{path}:{wanted}"


def test_every_length_must_suit_the_layout_and_not_only_the_first(write_toml: Write) -> None:
    path = write_toml("[data]\nseq_len = 256\n[parallel]\ncp = 2\n[[stage]]\nfirst_sample = 9\nseq_len = 2\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert "cp = 2 does not divide stage[0].seq_len = 2 into two equal pieces" in caught.value.what
    assert load_config(path, ["stage=[{first_sample = 9, seq_len = 64}]"]).config.parallel.cp == 2


def test_a_length_beyond_the_declared_longest_is_refused(write_toml: Write) -> None:
    path = write_toml("[data]\nmax_seq_len = 512\n[[stage]]\nfirst_sample = 9\nseq_len = 1024\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.where == f"{path}:5"
    assert "1024 is above data.max_seq_len = 512" in caught.value.what
    assert load_config(path, ["data.max_seq_len=1024"]).config.stage[0].seq_len == 1024


def test_a_rule_broken_by_an_override_names_the_override(write_toml: Write) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write_toml(SOURCES), ["stage=[{rope_base = 0.5}]"])
    assert caught.value.where == "override stage=[{rope_base = 0.5}]"


def test_stages_that_keep_the_rules_pass_in_silence(write_toml: Write) -> None:
    text = "first_sample = 100\nweights = { web = 1 }\nlr = 1e-4\n[[stage]]\nfirst_sample = 15999\nseq_len = 1024\nrope_base = 5e5\n"
    assert load_config(write_toml(f"{SOURCES}[[stage]]\n{text}")).warnings == ()


@pytest.mark.parametrize(
    ("stages", "first_warned"),
    [
        ("[{first_sample = 16000}]", 16000),  # 1000 steps of 16
        ("[{first_sample = 100, global_batch_size = 4}, {first_sample = 4084}]", 4084),  # 7 steps of 16, then 993 of 4 from 112 on
        ("[{first_sample = 100, global_batch_size = 32}, {first_sample = 31888}]", 31888),
    ],
)
def test_a_stage_after_the_last_sample_is_a_warning(write_toml: Write, stages: str, first_warned: int) -> None:
    (warning,) = load_config(write_toml(""), [f"stage={stages}"]).warnings
    assert f"begins at sample {first_warned}, after the last one" in warning
    assert load_config(write_toml(""), [f"stage={stages.replace(str(first_warned), str(first_warned - 1))}"]).warnings == ()


def test_a_source_that_no_stage_weighs_is_a_warning(write_toml: Write) -> None:
    path = write_toml(SOURCES.replace('"code"\nfiles', '"code"\nweight = 0\nfiles'))
    (warning,) = load_config(path, ["stage=[{lr = 1.0}]"]).warnings
    assert 'source "code" has no weight in any stage' in warning
    assert load_config(path, ["stage=[{first_sample = 9, weights = {web = 1, code = 1}}]"]).warnings == ()
