from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.config import load_config
from surefoot.core.errors import ConfigError

Write = Callable[[str], Path]

BROKEN = [
    ("[run]\nname = 'a/b'", 2, "does not suit as a folder name"),
    ("[model]\nfactory = 'nonsense'", 2, "is not a factory"),
    ("[optimizer]\nfactory = 'a.b'", 2, "is not a factory"),
    ("[model]\nd_model = 100\nnum_heads = 3", 2, "not a multiple of num_heads"),
    ("[model]\nd_model = 12\nnum_heads = 4", 2, "rotary embeddings turn pairs"),
    ("[model]\nnum_kv_heads = 4", 2, "num_kv_heads = 4 does not divide num_heads = 6"),
    ("[train]\nmicro_batch_size = 32", 2, "micro_batch_size = 32 is above global_batch_size = 16"),
    ("[train]\nbatch_ramp = [[0, 8], [0, 16]]", 2, "does not rise"),
    ("[train]\nbatch_ramp = [[0, 8], [10, 4]]", 2, "does not rise"),
    ("[train]\nbatch_ramp = [[0, 64]]", 2, "global_batch_size = 16"),
    ("[train]\nbatch_ramp = [[0, 8]]", 2, "the last entry has batch 8"),
    ("[train]\nbatch_ramp = [[4, 8], [9, 16]]", 2, "begins at sample 4"),
    ("[train]\nnum_steps = 50\n[schedule]\ndecay_steps = 51", 4, "decay_steps = 51 is above train.num_steps = 50"),
    ("[optimizer]\nbeta2 = 1.0", 2, "never forgets"),
    ("[checkpoint]\ninterval_steps = 0", 2, "nothing would be saved"),
    ("[checkpoint]\ntiers = ['memory']", 2, '"disk" is not among them'),
    ("[checkpoint]\ntiers = ['disk', 'disk']", 2, "stands there twice"),
    ("[checkpoint]\ntiers = ['disk', 's3://abc/p', 's3://abc/p/']", 2, '"s3://abc/p" stands there twice'),
    ("[checkpoint]\ntiers = ['dsk', 'disk']", 2, 'there is no tier "dsk"'),
    ("[checkpoint]\ntiers = ['disk', 's3://']", 2, "names no bucket"),
    ("[checkpoint]\ntiers = ['disk', 's3:///prefix']", 2, "names no bucket"),
    ("[checkpoint]\ntiers = ['disk', 'gs://bucket/prefix']", 2, "no store is known by gs://"),
    ("[checkpoint]\ntiers = ['disk', 'file://folder']", 2, "is no absolute folder"),
    ("[checkpoint]\ntiers = ['disk', 's3://key:hidden@bucket/p']", 2, "credentials never stand in a config"),
    ("[train]\nprecision = 'bf16'\nfp16_min_scale = 2.0", 3, "train.precision is bf16, whose range is float32's"),
    ("[train]\nfp16_hysteresis = 2", 2, "train.precision is fp32, whose range is float32's"),
    ("[train]\nprecision = 'fp16'\nfp16_initial_scale = 1000.0", 3, "is not a power of two"),
    (
        "[train]\nprecision = 'fp16'\nfp16_min_scale = 2.0\nfp16_initial_scale = 1.0",
        3,
        "fp16_min_scale = 2 is above fp16_initial_scale = 1",
    ),
    ("[[data.sources]]\nname = 'x'", 1, "has no files"),
    ("[[data.sources]]\nfiles = ['a']\n[[data.sources]]\nfiles = ['b']", 1, "two sources have one name"),
    ("[[data.sources]]\nfiles = ['a']\nweight = 0", 1, "weights of all sources are 0"),
]


@pytest.mark.parametrize(("text", "line", "what"), BROKEN, ids=[item[2] + str(index) for index, item in enumerate(BROKEN)])
def test_a_broken_rule_is_refused_where_it_stands(write_toml: Write, text: str, line: int, what: str) -> None:
    path = write_toml(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert what in caught.value.what
    assert caught.value.where == f"{path}:{line}"


def test_a_rule_broken_by_an_override_names_the_override(write_toml: Write) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write_toml(""), ["train.micro_batch_size=64"])
    assert caught.value.where == "override train.micro_batch_size=64"


EXACT = {
    "numerics.sums": "exact",
    "optimizer.kernel": "foreach",
    "launch.threads_per_rank": "1",
}

NOT_EXACT = [
    ({"numerics.deterministic": "false"}, "differ from run to run"),
    ({"parallel.tp": "2"}, "tp = 2 changes the arithmetic inside a layer"),
    ({"parallel.cp": "2"}, "cp = 2 changes the arithmetic inside a layer"),
    ({"parallel.pp": "2", "model.tie_embeddings": "false", "parallel.pp_schedule": "zero_bubble"}, "zero_bubble computes gradients"),
    ({"parallel.pp": "2"}, "a tied embedding on two stages"),
    ({"optimizer.kernel": "fused"}, "the fused kernel rounds"),
    ({"launch.threads_per_rank": "0"}, "0 shares the cores out"),
]


@pytest.mark.parametrize(("changed", "what"), NOT_EXACT, ids=[what for _, what in NOT_EXACT])
def test_what_would_let_the_layout_change_a_bit_is_refused_with_exact_sums(write_toml: Write, changed: dict[str, str], what: str) -> None:
    def load(settings: dict[str, str]) -> None:
        load_config(write_toml(""), [f"{key}={value}" for key, value in settings.items()])

    with pytest.raises(ConfigError, match=what):
        load(EXACT | changed)
    load(EXACT)


def test_pipelines_and_copies_may_have_exact_sums(write_toml: Write) -> None:
    settings = EXACT | {"parallel.pp": "2", "parallel.pp_schedule": "interleaved", "model.tie_embeddings": "false"}
    load_config(write_toml(""), [f"{key}={value}" for key, value in settings.items()])


def test_an_optimizer_of_ones_own_with_exact_sums_is_a_warning(write_toml: Write) -> None:
    (warning,) = load_config(write_toml(""), [f"{key}={value}" for key, value in (EXACT | {"optimizer.factory": "a.b:c"}).items()]).warnings
    assert "look at each element by itself" in warning


@pytest.mark.parametrize(
    "text",
    [
        "[model]\nnum_kv_heads = 3",
        "[model]\nfactory = 'my.models:build'\nd_model = 100\nnum_heads = 3",
        "[train]\nbatch_ramp = [[0, 4], [100, 8], [200, 16]]",
        "[train]\nnum_steps = 1000\n[schedule]\ndecay_steps = 900",
        "[checkpoint]\ninterval_steps = 0\ninterval_s = 60",
        "[checkpoint]\ntiers = ['disk', 's3://bucket', 's3://bucket/a/b', 'file:///a/folder']",
        "[[data.sources]]\nname = 'a'\nfiles = ['a']\nweight = 0\n[[data.sources]]\nname = 'b'\nfiles = ['b']\n[data]\npath = 'p'",
    ],
)
def test_what_keeps_the_rules_passes_in_silence(write_toml: Write, text: str) -> None:
    assert load_config(write_toml(text)).warnings == ()


def test_a_warm_up_and_decay_that_do_not_fit_are_a_warning(write_toml: Write) -> None:
    (warning,) = load_config(write_toml(""), ["train.num_steps=60"]).warnings
    assert "decay begins before the warm-up ends" in warning


def test_sources_without_a_place_for_the_prepared_data_are_a_warning(write_toml: Write) -> None:
    (warning,) = load_config(write_toml("[[data.sources]]\nfiles = ['a']")).warnings
    assert "no data.path" in warning
