"""The command line as a person and a script meet it: help, exit codes, errors, and what it loads."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.cli.init import STARTER
from surefoot.cli.verbs import NOT_IN_THIS_RELEASE, VERBS, available_verbs
from surefoot.config.presets import PRESETS
from surefoot.core.model_sizes import resolve_sizes
from surefoot.core.sections import ModelSection

Surefoot = Callable[..., subprocess.CompletedProcess[str]]
HEAVY = {"torch", "pyarrow", "wandb", "tokenizers"}
WITH_VERBS = {
    "config": ("show",),
    "data": ("prepare", "report", "locate", "block", "rules"),
    "checkpoint": ("list", "verify", "audit", "prove", "import", "export", "branch"),
    "drill": ("list", "run", "campaign"),
    "sweep": ("plan", "run", "gather", "fit", "probe"),
    "submit": ("slurm", "kubernetes", "denied"),
}


def help_calls() -> list[tuple[str, ...]]:
    calls: list[tuple[str, ...]] = [()]
    for verb in available_verbs():
        calls += [(verb,), *((verb, inner) for inner in WITH_VERBS.get(verb, ()))]
    return calls


def examples_of(page: str) -> str:
    """The examples of a help page, in one line."""
    return " ".join(re.split(r"^\w+:$", page.partition("Example")[2].partition(":")[2], flags=re.MULTILINE)[0].split())


def commands_of(page: str) -> set[str]:
    """The verbs that a help page lists."""
    listed = re.split(r"^\S|^  Examples:", page.partition("Commands:\n")[2], flags=re.MULTILINE)[0]
    return {line.split()[0] for line in listed.splitlines() if line.strip()}


def test_pages_are_read_as_people_read_them() -> None:
    page = "Usage: surefoot x\n\n  Example: surefoot x\n  now\n\nOptions:\n  --help  surefoot y\n\nCommands:\n  a  One.\n  b  Two.\n"
    assert examples_of(page) == "surefoot x now"
    assert commands_of(page) == {"a", "b"}
    assert examples_of(page.replace("Example", "For")) == ""


@pytest.mark.parametrize("call", help_calls(), ids=" ".join)
def test_help_has_examples_and_loads_nothing_heavy(
    call: tuple[str, ...], modules_after: Callable[[str], set[str]], surefoot: Surefoot
) -> None:
    page = surefoot(*call, "--help")
    assert page.returncode == 0, page.stderr
    if len(call) == 1 and call[0] in WITH_VERBS:
        assert commands_of(page.stdout) == set(WITH_VERBS[call[0]])
    else:
        assert " ".join(("surefoot", *call)) in examples_of(page.stdout)
    loaded = modules_after(f"import surefoot.cli.main as main\nassert main.run({[*call, '--help']!r}) == 0")
    assert not loaded & HEAVY


def test_config_show_loads_nothing_heavy(modules_after: Callable[[str], set[str]]) -> None:
    loaded = modules_after("import surefoot.cli.main as main\nassert main.run(['config', 'show', 'examples/quickstart.toml']) == 0")
    assert not loaded & (HEAVY | {"numpy"})


@pytest.mark.parametrize("call", [["plan", "--gpus", "8", "--flops", "1e20"], ["simulate", "--gpus", "8"], ["plan", "--textbook"]])
def test_planning_loads_nothing_heavy(call: list[str], modules_after: Callable[[str], set[str]]) -> None:
    assert not modules_after(f"import surefoot.cli.main as main\nassert main.run({call!r}) == 0") & {*HEAVY, "scipy"}


def test_help_lists_every_verb_that_is_there_and_no_other(surefoot: Surefoot) -> None:
    assert commands_of(surefoot("--help").stdout) == set(available_verbs())
    assert set(available_verbs()) <= set(VERBS)
    assert not set(NOT_IN_THIS_RELEASE) & set(VERBS)


def test_no_verb_is_the_help_page(surefoot: Surefoot) -> None:
    assert surefoot().stdout == surefoot("--help").stdout


def test_version(surefoot: Surefoot) -> None:
    import surefoot as package

    assert surefoot("--version").stdout == f"surefoot {package.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("trian",), "did you mean train?"),
        (("drill", "run", "kill-a-rnak"), "did you mean kill-a-rank?"),
        (("plan",), "--days, or --flops"),
        (("config", "show"), "Missing argument"),
        (("config", "show", "--nope", "x"), "No such option"),
        (("config", "shwo"), "No such command"),
        (("config",), "Usage: surefoot config"),
        (("--nope",), "No such option"),
        (("config", "show", "absent.toml"), "absent.toml: there is no such file"),
        (("config", "show", "examples/quickstart.toml", "train.nun_steps=5"), "did you mean num_steps?"),
    ],
)
def test_bad_usage_is_exit_2_with_a_remedy_and_no_traceback(arguments: tuple[str, ...], words: str, surefoot: Surefoot) -> None:
    result = surefoot(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("config", "show", "absent.toml", "--json"), "config"),
        (("config", "show", "--json"), "usage"),
        (("drill", "run", "node-joins", "--json"), "config"),
    ],
)
def test_with_json_an_error_is_one_object(arguments: tuple[str, ...], code: str, surefoot: Surefoot) -> None:
    result = surefoot(*arguments)
    assert result.returncode == 2
    answer = json.loads(result.stdout)
    assert answer["schema_version"] == 1
    assert answer["error"]["code"] == code
    assert set(answer["error"]) >= {"code", "what", "where", "hint"}


def test_every_problem_of_a_config_is_told(tmp_path: Path, surefoot: Surefoot) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[train]\nnum_steps = 0\nnope = 1\n")
    result = surefoot("config", "show", str(path))
    assert result.returncode == 2
    assert f"{path}:2:" in result.stderr
    assert f"{path}:3:" in result.stderr


def test_config_show_is_a_config_again_with_hashes(tmp_path: Path, surefoot: Surefoot) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[run]\nseed = 3\n")
    shown = surefoot("config", "show", str(path), "train.num_steps=2000")
    assert shown.returncode == 0
    again = tmp_path / "again.toml"
    again.write_text(shown.stdout)
    first = json.loads(surefoot("config", "show", str(path), "train.num_steps=2000", "--json").stdout)
    second = json.loads(surefoot("config", "show", str(again), "--json").stdout)
    assert first["config"] == second["config"]
    assert first["hashes"] == second["hashes"]
    assert first["origins"]["train.num_steps"] == "override"
    assert first["origins"]["run.seed"] == "run.toml:2"
    for name, value in first["hashes"].items():
        assert f"{name:<10} {value}" in shown.stdout


def test_warnings_go_to_stderr_only(tmp_path: Path, surefoot: Surefoot) -> None:
    path = tmp_path / "run.toml"
    path.write_text("")
    result = surefoot("config", "show", str(path), "train.num_steps=60")
    assert result.returncode == 0
    assert "decay begins before the warm-up ends" in result.stderr
    assert "decay begins before the warm-up ends" not in result.stdout


def test_init_writes_a_config_that_loads_and_never_overwrites(tmp_path: Path, surefoot: Surefoot) -> None:
    first = surefoot("init", "my-run", cwd=tmp_path)
    assert first.returncode == 0
    assert "surefoot train my-run/run.toml" in first.stdout
    shown = surefoot("config", "show", "my-run/run.toml", cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    before = (tmp_path / "my-run" / "run.toml").read_bytes()
    second = surefoot("init", "my-run", cwd=tmp_path)
    assert second.returncode == 2
    assert "there is a config already" in second.stderr
    assert (tmp_path / "my-run" / "run.toml").read_bytes() == before


@pytest.mark.parametrize("text", [STARTER, (Path(__file__).parents[2] / "examples" / "quickstart.toml").read_text()])
def test_the_size_that_a_config_tells_is_that_of_its_preset(text: str) -> None:
    told = re.search(r'preset = "quickstart" +# ([\d.]+)M parameters', text)
    assert told
    assert f"{resolve_sizes(ModelSection(**PRESETS['quickstart']), 8192).num_parameters / 1e6:.1f}" == told[1]


def test_init_into_a_file_is_refused(tmp_path: Path, surefoot: Surefoot) -> None:
    (tmp_path / "taken").write_text("")
    result = surefoot("init", "taken", cwd=tmp_path)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_the_quickstart_config_has_no_warnings(surefoot: Surefoot) -> None:
    assert json.loads(surefoot("config", "show", "examples/quickstart.toml", "--json").stdout)["warnings"] == []


def test_doctor_answers_for_people_and_programs(surefoot: Surefoot) -> None:
    answer = json.loads(surefoot("doctor", "--json").stdout)
    names = {check["name"] for check in answer["checks"]}
    assert answer["ok"] is True
    assert names >= {"python", "torch", "gloo", "cores", "bf16", "memory", "shared memory", "disk", "open files", "host name", "extra dev"}
    page = surefoot("doctor", env={"PYTHONDONTWRITEBYTECODE": "1"})
    assert "this machine can train" in page.stdout
    assert "PYTHONDONTWRITEBYTECODE is set" in page.stdout


def test_doctor_fails_when_torch_is_broken(tmp_path: Path, surefoot: Surefoot) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no kernel image')")
    result = surefoot("doctor", env={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 1
    assert "no kernel image" in result.stdout


def test_a_reader_that_leaves_early_is_no_defect(root: Path) -> None:
    command = f'"{sys.executable}" -m surefoot.cli.main config show examples/quickstart.toml | head -n 0'
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, cwd=root, check=False)
    assert result.stderr == ""


def test_a_defect_is_exit_1_with_the_place_of_its_traceback(tmp_path: Path) -> None:
    code = (
        "import sys, surefoot.cli.main as main, surefoot.cli.init as init\n"
        "def broken() -> None:\n    raise ZeroDivisionError('boom')\n"
        "init.init = broken\n"
        "sys.exit(main.run(['init']))"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert result.returncode == 1
    assert "unexpected ZeroDivisionError: boom" in result.stderr
    assert "Traceback" not in result.stderr
    (log,) = tmp_path.glob("surefoot-*.log")
    assert str(log) in result.stderr
    assert "Traceback" in log.read_text()


@pytest.mark.parametrize(("verb", "exit_code"), [("init", 1), ("train", 75)])
def test_ctrl_c_is_worth_a_retry_for_train_alone(verb: str, exit_code: int) -> None:
    code = (
        f"import sys, surefoot.cli.main as main, surefoot.cli.{verb} as module\n"
        "def stopped() -> None:\n    raise KeyboardInterrupt\n"
        f"module.{verb} = stopped\n"
        f"sys.exit(main.run(['{verb}']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == exit_code
    assert "Traceback" not in result.stderr
