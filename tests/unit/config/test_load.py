from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from surefoot.config import load_config
from surefoot.core.errors import ConfigError
from surefoot.core.sections import RunConfig, SourceSection

Write = Callable[[str], Path]

SMALL = """
[run]
name = "small"
[data]
path = "tokens"
[[data.sources]]
name = "web"
files = ["raw/*.jsonl", "builtin:python-stdlib", "https://example.org/a.jsonl", "/abs/file.txt"]
[model]
preset = "tiny"
d_model = 128
[train]
num_steps = 20
[optimizer]
lr = 1
[schedule]
warmup_steps = 2
"""


def test_an_empty_file_is_all_defaults_beside_the_run_folder(write_toml: Write) -> None:
    path = write_toml("")
    loaded = load_config(path)
    default = RunConfig()
    assert loaded.config == replace(default, run=replace(default.run, dir=str(path.parent / "runs" / "run")))
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.warnings == ()


def test_values_come_with_their_origins(write_toml: Write) -> None:
    loaded = load_config(write_toml(SMALL), ["train.num_steps=60", "run.name=other"])
    config, origins = loaded.config, loaded.origins
    assert (config.train.num_steps, origins["train.num_steps"]) == (60, "override")
    assert (config.run.name, origins["run.name"]) == ("other", "override")
    assert (config.model.num_layers, origins["model.num_layers"]) == (2, "preset")
    assert (config.model.d_model, origins["model.d_model"]) == (128, "run.toml:11")
    assert (config.data.seq_len, origins["data.seq_len"]) == (256, "default")
    assert origins["data.sources"] == "run.toml:6"
    assert origins["data.sources[0].files"] == "run.toml:8"
    assert origins["data.sources[0].weight"] == "default"
    assert loaded.text == SMALL


def test_integers_are_accepted_for_floats_and_become_floats(write_toml: Write) -> None:
    lr = load_config(write_toml(SMALL)).config.optimizer.lr
    assert isinstance(lr, float)
    assert lr == 1.0


def test_relative_paths_start_at_the_toml_and_other_names_stay(write_toml: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_toml(SMALL)
    monkeypatch.chdir(path.parent.parent)
    config = load_config(os.path.relpath(path), ["run.dir=../out", "data.tokenizer=tok/tokenizer.json"]).config
    folder = path.parent
    assert config.run.dir == str(folder.parent / "out")
    assert config.data.path == str(folder / "tokens")
    assert config.data.tokenizer == str(folder / "tok" / "tokenizer.json")
    assert config.data.sources[0].files == (
        str(folder / "raw" / "*.jsonl"),
        "builtin:python-stdlib",
        "https://example.org/a.jsonl",
        "/abs/file.txt",
    )


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:4096"])
def test_tokenizers_that_are_no_files_stay(write_toml: Write, tokenizer: str) -> None:
    assert load_config(write_toml(""), [f"data.tokenizer={tokenizer}"]).config.data.tokenizer == tokenizer


def test_a_run_folder_stands_for_its_config(write_toml: Write) -> None:
    path = write_toml("[run]\nseed = 3\n")
    path.rename(path.parent / "config.toml")
    assert load_config(path.parent).config.run.seed == 3


def test_overrides_are_toml_values_or_bare_words(write_toml: Write) -> None:
    overrides = [
        "train.batch_ramp=[[0, 4], [100, 16]]",
        "train.precision=bf16",
        'optimizer.kernel="foreach"',
        "numerics.deterministic=false",
        "optimizer.lr = 1e-3",
        "run.name=2024",
        'data.sources=[{name = "a", files = ["b"]}]',
        "train.num_steps=5",
        "train.num_steps=200",
    ]
    path = write_toml("")
    config = load_config(path, overrides).config
    assert config.train.batch_ramp == ((0, 4), (100, 16))
    assert (config.train.precision, config.train.num_steps) == ("bf16", 200)
    assert (config.optimizer.kernel, config.optimizer.lr) == ("foreach", 1e-3)
    assert config.numerics.deterministic is False
    assert config.run.name == "2024"
    assert config.data.sources == (SourceSection(name="a", files=(str(path.parent / "b"),)),)


BAD_FILES = [
    ("[train]\nnum_stesp = 5", 2, '[train] has no key "num_stesp"', "did you mean num_steps?"),
    ("[optimizer]\nnum_steps = 5", 2, '[optimizer] has no key "num_steps"', "num_steps belongs in [train]"),
    ("[optimizer]\n\nnum_stepz = 5", 3, '[optimizer] has no key "num_stepz"', "did you mean num_steps in [train]?"),
    ("[monitor]\nzzz = 5", 2, '[monitor] has no key "zzz"', "its keys are log_interval_steps, probe_interval_steps"),
    ("[checkpoint]\ninterval_steps = -1", 2, 'got -1, wanted an integer of at least 0 (steps) or "auto"', ""),
    ('[checkpoint]\ninterval_steps = "often"', 2, 'got "often", wanted an integer', ""),
    ("[objectives]\nxyzzy = 5", 2, '[objectives] has no key "xyzzy"', "it has no settings in this release"),
    ("num_steps = 5", 1, 'key "num_steps" stands outside its section', "num_steps belongs in [train]"),
    ("[modle]\nd_model = 5", 1, "there is no section [modle]", "did you mean [model]?"),
    ("[xyzzy]", 1, "there is no section [xyzzy]", "the sections are run, model"),
    ("[run]\n[[stage]]\nfirst_samples = 1", 3, '[[stage]] has no key "first_samples"', "did you mean first_sample?"),
    ("[parallel]\nzero_stage = 9", 2, "parallel.zero_stage: got 9, wanted one of 1, 2, 3", ""),
    ("train = 3", 1, "train is a section, got 3", "write [train]"),
    ("[[train]]\nnum_steps = 3", 1, "train is a section, got a list of tables", "write [train]"),
    ("[train]\nnum_steps = true", 2, "train.num_steps: got true, wanted an integer of at least 1 (steps)", ""),
    ("[train]\nnum_steps = 5.0", 2, "train.num_steps: got 5.0, wanted an integer", ""),
    ("[train]\nnum_steps = 0", 2, "train.num_steps: got 0, wanted an integer of at least 1 (steps)", ""),
    ("[train]\nnum_steps = 99999999999999999999", 2, "in 64 bits", ""),
    ("[train]\nprecision = 'fp8'", 2, 'train.precision: got "fp8", wanted one of "fp32", "bf16"', "float8 is not in this release"),
    ("[train]\nbatch_ramp = [[0, 4.5]]", 2, "train.batch_ramp: got [[0, 4.5]], wanted a list, each item [integer, integer]", ""),
    ("[run]\nname = 3", 2, "run.name: got 3, wanted a string", ""),
    ("[run]\nseed = 2026-01-01", 2, "run.seed: got 2026-01-01, wanted an integer", ""),
    ("[optimizer]\nlr = true", 2, "optimizer.lr: got true, wanted a number of at least 0", ""),
    ("[optimizer]\nlr = nan", 2, "optimizer.lr: got nan", "nan and inf are refused everywhere"),
    ("[optimizer]\nlr = inf", 2, "optimizer.lr: got inf", "nan and inf are refused everywhere"),
    ("[optimizer]\nbeta1 = 1.5", 2, "wanted a number from 0 to 1", ""),
    ("[parallel]\nep = 2", 2, "parallel.ep: got 2, wanted an integer: only 1", ""),
    ("[model]\npreset = 'tyny'", 2, 'model.preset: there is no preset "tyny"', "did you mean tiny?"),
    ("[model]\npreset = 'zzz'", 2, 'there is no preset "zzz"', "the presets are tiny, quickstart"),
    ("[data]\nsources = 'x'", 2, "wanted a list of tables", "write [[data.sources]]"),
    ("[[data.sources]]\nnam = 'x'\nfiles = ['a']", 2, '[[data.sources]] has no key "nam"', "did you mean name?"),
    ("[[data.sources]]\nfiles = ['a']\ntext_field = 'body'", 3, '[[data.sources]] has no key "text_field"', "text_field belongs in [data]"),
    ("[[data.sources]]\nfiles = ['a']\n[[data.sources]]\nfiles = [1]", 4, "data.sources[1].files: got [1], wanted a list of strings", ""),
]


@pytest.mark.parametrize(("text", "line", "what", "hint"), BAD_FILES, ids=[item[0].replace("\n", " ") for item in BAD_FILES])
def test_a_bad_file_is_refused_with_line_and_remedy(write_toml: Write, text: str, line: int, what: str, hint: str) -> None:
    path = write_toml(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.where == f"{path}:{line}"
    assert what in caught.value.what
    assert hint in caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("train.nun_steps=60", '[train] has no key "nun_steps"'),
        ("num_steps=60", 'key "num_steps" stands outside its section'),
        ("train=60", '[train] has no key ""'),
        ("trian.num_steps=60", "there is no section [trian]"),
        ("train.num_steps", "an override has no value"),
        ("train.num_steps=6O", 'got "6O", wanted an integer'),
        ("train.num_steps=", 'got "", wanted an integer'),
        ("optimizer.lr=nan", "got nan"),
        ("optimizer.lr=-inf", "got -inf"),
        ("train.precision=half", 'got "half", wanted one of "fp32", "bf16", "fp16"'),
    ],
)
def test_a_bad_override_is_refused_as_it_was_given(write_toml: Write, override: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write_toml(""), [override])
    assert caught.value.where == f"override {override}"
    assert what in caught.value.what


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[run]\nname = \n", 2),
        ("[run\nname = 1\n", 1),
        ("[train]\nnum_steps = 1\nnum_steps = 2\n", 3),
        ("[run]\n[train]\n[run]\n", 3),
        ('[run]\nname = "open\n', 2),
    ],
)
def test_a_syntax_error_names_its_line(write_toml: Write, text: str, line: int) -> None:
    path = write_toml(text)
    with pytest.raises(ConfigError, match="not valid TOML") as caught:
        load_config(path)
    assert caught.value.where == f"{path}:{line}"


def test_all_problems_are_told_at_once_and_survive_pickling(write_toml: Write) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write_toml("[train]\nnum_steps = 0\nnope = 1\n[optimizer]\nlr = nan\n"))
    others = caught.value.values["others"]
    assert isinstance(others, list)
    assert len(others) == 2
    assert pickle.loads(pickle.dumps(caught.value)).values["others"] == others


def test_a_missing_file_and_a_folder_without_config_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="surefoot init"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="no run folder"):
        load_config(tmp_path)


def test_a_file_of_another_encoding_is_refused_with_its_line(write_toml: Write) -> None:
    path = write_toml("")
    path.write_bytes(b'[run]\nname = "caf\xe9"\n')
    with pytest.raises(ConfigError, match="not UTF-8") as caught:
        load_config(path)
    assert caught.value.where == f"{path}:2"


@pytest.mark.parametrize(("override", "value"), [("5", 5), ("auto", "auto"), ('"auto"', "auto")])
def test_a_setting_that_is_a_number_or_a_word_is_overridden_by_either(write_toml: Write, override: str, value: int | str) -> None:
    assert load_config(write_toml(""), [f"checkpoint.interval_steps={override}"]).config.checkpoint.interval_steps == value


def test_a_setting_of_an_earlier_release_is_said_and_refuses_no_run_that_has_it(write_toml: Write) -> None:
    loaded = load_config(write_toml("[monitor]\nmax_skips_in_a_row = 3\n"))
    assert loaded.warnings[0].startswith("monitor.max_skips_in_a_row has no effect any more: heal.breaker_in_a_row")
    with pytest.raises(ConfigError, match="max_skips"):
        load_config(write_toml("[monitor]\nmax_skips_in_a_roww = 3\n"))
