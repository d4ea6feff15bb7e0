"""The life of a checkpoint after it was made, on a real run: proven, branched, imported, exported, carried to another folder."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_stock
from torch.distributed.checkpoint.state_dict_saver import save as save_stock

from surefoot.cli.main import run

_LIMIT_S = 280.0  # against a hang: the longest takes 10 s on a quiet machine

pytestmark = pytest.mark.timeout(300)

_CONFIG = """
[run]
name = "tiny"
[model]
num_layers = 2
d_model = 32
num_heads = 4
num_kv_heads = 2
rope_base = 777.0
tie_embeddings = false
[data]
path = "data"
tokenizer = "bpe:320"
seq_len = 32
heldout_fraction = 0.1
[[data.sources]]
name = "t"
files = ["text.jsonl"]
[train]
num_steps = 8
global_batch_size = 4
micro_batch_size = 2
eval_interval_steps = 0
eval_num_samples = 4
[schedule]
warmup_steps = 2
decay_steps = 3
[parallel]
dp_shard = 2
[checkpoint]
interval_steps = 4
num_slots = 8   # so many that no save is put off to a later step, however busy the machine is
[launch]
threads_per_rank = 1
"""


def surefoot(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("surefoot")
    return subprocess.run(
        [program, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=_LIMIT_S, check=False, stdin=subprocess.DEVNULL
    )


def answer_of(*arguments: str | Path, cwd: Path, exit_code: int = 0) -> dict[str, Any]:
    result = surefoot(*arguments, "--json", cwd=cwd)
    assert result.returncode == exit_code, result.stdout + result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data and a finished run `runs/tiny` of two ranks. Tests copy it."""
    folder = tmp_path_factory.mktemp("life")
    lines = (json.dumps({"text": f"document {i} says that {i * 7} plus {i % 13} is {i * 7 + i % 13}, and some more"}) for i in range(400))
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "tiny.toml").write_text(_CONFIG)
    result = surefoot("train", "tiny.toml", cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.fixture
def place(trained: Path, tmp_path: Path) -> Path:
    """A copy of everything, somewhere else: nothing in a run may name where it was made."""
    return Path(shutil.copytree(trained, tmp_path / "elsewhere"))


def test_no_file_of_a_run_names_the_place_where_it_was_made(trained: Path) -> None:
    """Logs aside: they say what was said, and are read by nobody but people."""
    files = [path for path in (trained / "runs" / "tiny").rglob("*") if path.is_file() and "logs" not in path.parts]
    assert len(files) > 8
    naming = [str(path) for path in files if str(trained).encode() in path.read_bytes()]
    assert naming == []


def test_a_run_in_another_folder_lists_verifies_and_proves(place: Path) -> None:
    rows = answer_of("checkpoint", "list", "runs/tiny", "--shards", cwd=place)["checkpoints"]
    assert [row["id"] for row in rows] == ["s4-a1", "s8-a1"]
    assert answer_of("checkpoint", "verify", "runs/tiny", cwd=place)["ok"]
    proof = answer_of("checkpoint", "prove", "runs/tiny", cwd=place)
    assert (proof["ok"], proof["ledgered"], proof["problems"]) == (True, True, [])
    assert [(row["world_size"], row["rung"]) for row in proof["proofs"]] == [(1, "loadable"), (3, "proven")]
    assert proof["model"]["skipped"] == ""
    rows = answer_of("checkpoint", "list", "runs/tiny", cwd=place)["checkpoints"]
    assert rows[-1]["rung"] == "proven"
    assert surefoot("ledger", "runs/tiny", "--verify", cwd=place).returncode == 0


def test_a_branch_goes_on_under_another_config(place: Path) -> None:
    arguments = ("--from", "4", "--dir", "cooldown", "train.num_steps=7", "train.global_batch_size=8", "schedule.decay_steps=2")
    branched = answer_of("checkpoint", "branch", "runs/tiny", *arguments, cwd=place)
    assert (branched["from"], branched["id"], branched["step"]) == ("s4-a1", "s4-a0", 4)
    result = surefoot("train", "cooldown", cwd=place)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = answer_of("checkpoint", "list", "cooldown", cwd=place)["checkpoints"]
    assert (rows[0]["id"], rows[0]["lineage"]) == ("s4-a0", "current")
    assert rows[-1]["step"] == 7
    entries = [json.loads(line) for line in surefoot("ledger", "cooldown", "--json", cwd=place).stdout.splitlines()]
    told = {entry["event"]: entry["fields"] for entry in entries}
    assert (told["run.branched"]["from_run"], told["run.branched"]["checkpoint"]) == ("tiny", "s4-a1")
    assert told["run.branched"]["state_digest"] == branched["state_digest"]
    assert told["run.resumed"]["checkpoint"] == "s4-a0"
    assert surefoot("ledger", "cooldown", "--verify", cwd=place).returncode == 0
    assert surefoot("checkpoint", "verify", "runs/tiny/checkpoints/s4-a1", cwd=place).returncode == 0


def test_an_import_waits_in_a_run_that_has_checkpoints(place: Path) -> None:
    shutil.copytree(place / "runs" / "tiny" / "checkpoints" / "s8-a1", place / "kept")
    found = answer_of("checkpoint", "import", "kept", "runs/tiny", cwd=place)
    assert (found["id"], found["resumes_next"], found["differs"]) == ("s8-a0", False, [])
    again = answer_of("checkpoint", "import", "kept", "runs/tiny", cwd=place)
    assert (found["was_there"], again["was_there"], again["id"]) == (False, True, "s8-a0")
    printed = surefoot("checkpoint", "import", "kept", "runs/tiny", cwd=place).stdout
    assert "is there already, as s8-a0," in printed
    rows = answer_of("checkpoint", "list", "runs/tiny", cwd=place)["checkpoints"]
    assert [(row["id"], row["lineage"]) for row in rows if row["attempt"] == 0] == [("s8-a0", "abandoned")]
    assert surefoot("ledger", "runs/tiny", "--verify", cwd=place).returncode == 0
    assert answer_of("checkpoint", "verify", "runs/tiny/checkpoints/s8-a0", cwd=place)["ok"]


def test_a_stock_folder_becomes_a_checkpoint_of_a_run(place: Path) -> None:
    """Named as torchtitan and DCP's own helpers name things, by the stock library alone."""
    ours = place / "runs" / "tiny" / "checkpoints" / "s8-a1"
    metadata = FileSystemReader(ours).read_metadata()
    sizes = {key: entry for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)}
    tensors = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in sizes.items() if not key.startswith("rng/")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # no process group: said by DCP, and meant
        load_stock(tensors, checkpoint_id=ours, no_dist=True)
        theirs = {re.sub(r"^optim\.", "optim.state.", key): tensor for key, tensor in tensors.items()}
        save_stock(theirs, checkpoint_id=place / "theirs", no_dist=True)
    new = place / "runs" / "new"
    new.mkdir()
    shutil.copy(place / "runs" / "tiny" / "config.toml", new)
    found = answer_of("checkpoint", "import", "theirs", "runs/new", cwd=place)
    assert (found["id"], found["resumes_next"], found["differs"]) == ("s8-a0", True, [])
    rows = answer_of("checkpoint", "list", "runs/tiny", cwd=place)["checkpoints"]
    assert found["state_digest"] == rows[-1]["state_digest"]
    result = surefoot("train", "runs/new", "train.num_steps=10", cwd=place)
    assert result.returncode == 2, "what it was imported under is protected like what it was trained under"
    assert "--accept-changes train" in result.stderr
    result = surefoot("train", "runs/new", "train.num_steps=10", "--accept-changes", "train", cwd=place)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = answer_of("checkpoint", "list", "runs/new", cwd=place)["checkpoints"]
    assert [row["step"] for row in rows] == [8, 10]
    del theirs["model.norm.weight"]
    shutil.rmtree(place / "theirs")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        save_stock(theirs, checkpoint_id=place / "theirs", no_dist=True)
    error = answer_of("checkpoint", "import", "theirs", "runs/new", cwd=place, exit_code=5)["error"]
    assert "norm.weight" in error["what"] + error["where"]


def test_nothing_damaged_is_taken_in_or_out(place: Path) -> None:
    file = place / "runs" / "tiny" / "checkpoints" / "s8-a1" / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    for position in range(0, len(content), 499):  # so that weights are hit too: an export reads nothing else
        content[position] ^= 1
    file.write_bytes(content)
    (place / "other").mkdir()
    (place / "other" / "config.toml").write_text("")
    for arguments in (
        ("import", "runs/tiny", "other"),
        ("branch", "runs/tiny", "--dir", "new", "train.num_steps=20"),
        ("export", "runs/tiny", "--format", "safetensors", "--out", "new"),
    ):
        error = answer_of("checkpoint", *arguments, cwd=place, exit_code=5)["error"]
        assert error["code"] == "checkpoint-corrupt"
        assert "__1_0.distcp" in error["what"] + error["where"]
    assert not (place / "new").exists()
    assert [path.name for path in place.iterdir() if path.name.startswith(".")] == []
    proof = answer_of("checkpoint", "prove", "runs/tiny", cwd=place, exit_code=1)
    assert (proof["ok"], proof["ledgered"], proof["problems"][0]["file"]) == (False, True, "__1_0.distcp")
    rows = answer_of("checkpoint", "list", "runs/tiny", cwd=place)["checkpoints"]
    assert [row["damaged"] for row in rows] == [False, True]


@pytest.mark.parametrize("format_", ["safetensors", "dcp", "hf"])
def test_an_export_is_read_back(place: Path, format_: str) -> None:
    found = answer_of("checkpoint", "export", "runs/tiny", "--format", format_, "--out", "out", cwd=place)
    assert (found["id"], found["num_tensors"], found["notes"]) == ("s8-a1", 21, [])
    names = {path.name for path in (place / "out").iterdir()}
    if format_ == "dcp":
        assert names == {".metadata", "__0_0.distcp"}
    else:
        assert names >= {"model.safetensors", "surefoot_export.json"}
    if format_ == "hf":
        assert names >= {"config.json", "tokenizer.json", "tokenizer_config.json"}
        assert found["logits"]["architecture"] == "LlamaForCausalLM"
        assert found["logits"]["relative"] <= 1e-5
    assert surefoot("checkpoint", "audit", "out", cwd=place).returncode == 0
    assert surefoot("checkpoint", "export", "runs/tiny", "--out", "out", cwd=place).returncode == 2


_MUP = ("model.parametrization=mup",)
_MUP_HEADS = ("model.mup_base_width=32", "model.mup_base_head_dim=4")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("prove", "runs/tiny", "--on", "another"), "starts nothing on another"),
        (("branch", "runs/tiny", "--dir", "new", "--from", "5", "train.num_steps=20"), "no checkpoint of step 5"),
        (("branch", "runs/tiny", "--dir", "new", "--from", "x", "train.num_steps=20"), "no checkpoint 'x'"),
        (("branch", "runs/tiny", "--dir", "new"), "nothing would be trained"),
        (("branch", "runs/tiny", "--dir", "new", "run.seed=3", "train.num_steps=20"), "[run] seed decides the order"),
        (("branch", "runs/tiny", "--dir", "new", "model.num_layers=3", "train.num_steps=20"), "another shape"),
        (("branch", "runs/tiny", "--dir", "new", "model.d_model=64", "train.num_steps=20"), "another shape"),
        (("branch", "runs/tiny", "--dir", "new", *_MUP, "model.mup_base_width=16", "train.num_steps=20"), "another parametrization"),
        (("branch", "runs/tiny", "--dir", "new", *_MUP, *_MUP_HEADS, "train.num_steps=20"), "attention logits would be scaled"),
        (("branch", "runs/tiny", "--dir", "/proc/nope/new", "train.num_steps=20"), "no folder can be made there"),
        (("branch", "runs/tiny", "--dir", "data", "train.num_steps=20"), "there is something already"),
        (("branch", "runs/tiny", "--dir", "new", "train.nun_steps=20"), "nun_steps"),
        (("import", "runs/tiny", "runs/tiny"), "a checkpoint of this run already"),
        (("import", "runs/tiny", "absent"), "no such run folder"),
        (("import", "absent", "runs/tiny"), "no such folder"),
        (("export", "runs/tiny", "--out", "new", "--id", "s5-a1"), "no checkpoint 's5-a1'"),
        (("export", "runs/tiny", "--out", "/proc/nope"), "no folder can be made there"),
        (("export", "bare", "--out", "new"), "this is a bare checkpoint"),
        (("audit", "absent"), "no such folder"),
    ],
)
def test_bad_usage_says_what_to_do(
    place: Path, arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(place / "runs" / "tiny" / "checkpoints" / "s8-a1", place / "bare")
    monkeypatch.chdir(place)
    assert run(["checkpoint", *arguments, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert words in error["what"]
    assert error["where"]
    assert error["hint"]
    assert not (place / "new").exists()
