from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import tomlkit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surefoot.config import load_config, resolved_toml
from surefoot.config.schema import Setting, sections, settings_of, table_lists
from surefoot.core.config_paths import absolute_path, relative_path

Write = Callable[[str], Path]


def test_says_where_each_value_came_from(write_toml: Write) -> None:
    path = write_toml('[model]\npreset = "tiny"\n[train]\nnum_steps = 300\n')
    loaded = load_config(path, ["run.seed=9"])
    rows = [" ".join(row.split()) for row in resolved_toml(loaded, loaded.config.run.dir).splitlines()]
    assert "num_steps = 300 # run.toml:4" in rows
    assert "seed = 9 # override" in rows
    assert "num_layers = 2 # preset" in rows
    assert "seq_len = 256 # default" in rows
    assert 'dir = "." # default' in rows


def test_a_value_of_any_length_keeps_its_origin_apart(write_toml: Write) -> None:
    files = ", ".join(f'"{number:02}.txt"' for number in range(9))
    loaded = load_config(write_toml(f'[[data.sources]]\nfiles = [{files}]\n[run]\nname = "{"a" * 35}"\n'))
    rows = resolved_toml(loaded, loaded.config.run.dir).splitlines()
    origins = [row for row in rows if " # run.toml:" in row]
    assert [row.split(" = ")[0] for row in origins] == ["name", "files"]
    assert origins[0] == f'name = "{"a" * 35}" # run.toml:4'


def test_a_copied_run_folder_finds_its_data_beside_it(write_toml: Write) -> None:
    path = write_toml('[data]\npath = "tokens"\n')
    loaded = load_config(path)
    text = resolved_toml(loaded, loaded.config.run.dir)
    assert str(path.parent) not in text
    copy = path.parent / "elsewhere" / "runs" / "run"
    copy.mkdir(parents=True)
    (copy / "config.toml").write_text(text)
    moved = load_config(copy).config
    assert moved.run.dir == str(copy)
    assert moved.data.path == str(path.parent / "elsewhere" / "tokens")


@pytest.mark.parametrize(
    "value", ["/a/b", "/a/r/bytes", "/a/r/bpe:5", "/a/r/~x", "/a/r/builtin:x", "/", "bytes", "", "builtin:x", "s3://b/k"]
)
def test_relative_and_absolute_paths_are_inverse(value: str) -> None:
    folder = Path("/a/r")
    assert absolute_path(relative_path(value, folder=folder), folder=folder) == value


# Paths and texts a person could write, quotes and special names included.
TEXTS = st.text(alphabet="ab/.~:#\"'\\ é\n", max_size=8) | st.sampled_from(["bytes", "bpe:64", "builtin:x", "s3://b/k", "../x", "~"])
# What the rules tie together is drawn from values that keep them.
FIXED: dict[str, st.SearchStrategy[Any]] = {
    "run.name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True),
    "model.preset": st.sampled_from(["", "tiny"]),
    "model.factory": st.sampled_from(["", "pkg.sub:build"]),
    "model.d_model": st.sampled_from([192, 384]),
    "model.num_heads": st.sampled_from([4, 8]),
    "model.num_kv_heads": st.sampled_from([0, 2]),
    "model.parametrization": st.just("standard"),
    "model.mup_base_width": st.just(0),
    "model.mup_base_head_dim": st.just(0),
    "data.sources[].files": st.lists(TEXTS, min_size=1, max_size=3),
    "data.sources[].weight": st.floats(0.1, 9.0),
    "train.num_steps": st.integers(10, 1 << 40),
    "train.global_batch_size": st.integers(16, 1 << 40),
    "train.micro_batch_size": st.integers(1, 4),
    "train.batch_ramp": st.just([]),
    "train.fp16_initial_scale": st.just(65_536.0),
    "train.fp16_min_scale": st.just(1.0),
    "train.fp16_growth_interval_steps": st.just(2000),
    "train.fp16_hysteresis": st.just(1),
    "data.max_seq_len": st.just(0),
    "stage[].weights": st.just({}),
    "stage[].seq_len": st.just(0),
    "stage[].rope_base": st.just(0.0),
    "stage[].global_batch_size": st.sampled_from([0, 4, 1 << 40]),
    "optimizer.factory": st.sampled_from(["", "a.b:c"]),
    "optimizer.beta1": st.floats(0.0, 0.999),
    "optimizer.beta2": st.floats(0.0, 0.999),
    "schedule.decay_steps": st.integers(-1, 10),
    "parallel.tp": st.just(1),
    "parallel.cp": st.just(1),
    "parallel.pp": st.just(1),
    "parallel.pp_schedule": st.just("1f1b"),
    "parallel.pp_chunks": st.just(0),
    "numerics.sums": st.just("float"),
    "checkpoint.interval_steps": st.integers(1, 1 << 40),
    "checkpoint.keep_steps": st.lists(st.integers(0, 1 << 40), max_size=3),
    "launch.telemetry_limits": st.sampled_from([{}, {"gpu_hot": 85.0, "port_symbols": 1e9}]),
    "heal.rules": st.sampled_from([{}, {"loss_n_sigma": "alert"}, {"cusum:log_z": "off", "grad_outlier": "skip"}]),
    "checkpoint.tiers": st.sampled_from([["disk"], ["memory", "disk"], ["disk", "s3://bucket/prefix", "file:///a/folder"]]),
}


def values(path: str, setting: Setting) -> st.SearchStrategy[Any]:
    if path in FIXED:
        return FIXED[path]
    if setting.item_section:
        return st.lists(tables(setting.item_section, path=f"{path}[]"), max_size=2, unique_by=lambda item: item["name"])
    if get_origin(setting.type) is tuple:
        return st.lists(TEXTS, max_size=3)
    if setting.type is bool:
        return st.booleans()
    if setting.type is str:
        return TEXTS
    if setting.type is int:
        low = int(setting.low or 0)
        return st.integers(low, low if setting.high == low else 1 << 40)
    if setting.type is float:
        return st.floats(setting.low, setting.high, allow_nan=False, allow_infinity=False)
    return st.sampled_from(get_args(setting.type))


def tables(section: type, *, path: str) -> st.SearchStrategy[dict[str, Any]]:
    strategies = {key: values(f"{path}.{key}", item) for key, item in settings_of(section).items()}
    required = {key: strategies.pop(key) for key in ("name", "files") if path.endswith("sources[]")}
    return st.fixed_dictionaries(required, optional=strategies)


documents = st.fixed_dictionaries(
    {
        **{name: tables(section, path=name) for name, section in sections().items()},
        **{name: st.lists(tables(section, path=f"{name}[]"), max_size=1) for name, section in table_lists().items()},
    }
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100)
@given(document=documents)
def test_loading_the_resolved_config_gives_the_same_config(tmp_path: Path, document: dict[str, Any]) -> None:
    source = tmp_path / "source" / "run.toml"
    source.parent.mkdir(exist_ok=True)
    source.write_text(tomlkit.dumps(document))
    loaded = load_config(source)
    # the document may ask for any run folder; the test may write to this one only
    run_dir = tmp_path / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir()
    config = replace(loaded.config, run=replace(loaded.config.run, dir=str(run_dir)))
    text = resolved_toml(loaded, run_dir)
    (run_dir / "config.toml").write_text(text)
    again = load_config(run_dir)
    assert again.config == config
    assert again.hashes == loaded.hashes
    assert set(again.origins) == set(loaded.origins)
    assert str(tmp_path) not in text


def test_a_batch_ramp_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[train]\nglobal_batch_size = 16\nbatch_ramp = [[0, 4], [100, 8], [400, 16]]\n")
    loaded = load_config(path)
    run_dir = tmp_path / "runs" / "run"
    run_dir.mkdir(parents=True)
    (run_dir / "config.toml").write_text(resolved_toml(loaded, run_dir))
    assert load_config(run_dir).config.train.batch_ramp == ((0, 4), (100, 8), (400, 16))


STAGED = """
[data]
path = "tokens"
[[data.sources]]
name = "web"
files = ["web"]
[[data.sources]]
name = "code"
files = ["code"]
[[stage]]
first_sample = 5
weights = { web = 7, code = 3 }
[[stage]]
first_sample = 9
lr = 1e-4
"""


def test_stages_come_back_with_their_weights_as_a_table(write_toml: Write) -> None:
    loaded = load_config(write_toml(STAGED))
    run_dir = loaded.path.parent / "runs" / "run"
    run_dir.mkdir(parents=True)
    text = resolved_toml(loaded, run_dir)
    (run_dir / "config.toml").write_text(text)
    assert re.search(r"^weights = \{ web = 7.0, code = 3.0 \} +# run.toml:12$", text, re.MULTILINE)
    again = load_config(run_dir)
    assert [stage.weights for stage in again.config.stage] == [(("web", 7.0), ("code", 3.0)), ()]
    assert again.config.stage == loaded.config.stage
    assert again.hashes == loaded.hashes


def test_a_double_slash_is_one() -> None:
    assert absolute_path("//a/b", folder=Path("/r")) == "/a/b"
    assert absolute_path("//", folder=Path("/r")) == "/"
