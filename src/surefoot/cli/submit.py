"""`surefoot submit`: a run for a scheduler, printed; `--yes` hands it in."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from surefoot import __version__
from surefoot.cli.console import say
from surefoot.core.clock import SystemClock
from surefoot.core.errors import ConfigError, SurefootError
from surefoot.core.strict_json import dumps

if TYPE_CHECKING:
    from surefoot.launch.submission import Submission

SCHEMA_VERSION = 1
_SUBMIT_LIMIT_S = 60.0

app = typer.Typer(no_args_is_help=True, help="A run for a scheduler, printed; `--yes` hands it in.")

File = Annotated[Path, typer.Argument(metavar="FILE|RUN", help="A TOML config, or the folder of a run to go on with.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="For `surefoot train`, such as train.num_steps=60.")]
Nodes = Annotated[int, typer.Option("--nodes", min=0, help="Machines, an agent on each. Default: what launch.nodes asks for.")]
Name = Annotated[str, typer.Option("--name", metavar="NAME", help="Of the job. Default: run.name.")]
Program = Annotated[str, typer.Option("--program", metavar="PATH", help="What is called on the nodes.")]
Gpus = Annotated[int, typer.Option("--gpus", min=0, help="Accelerators per node.")]
Cpus = Annotated[int, typer.Option("--cpus", min=0, help="Cores per node.")]
MemoryGib = Annotated[float, typer.Option("--memory-gib", min=0.0, help="Memory per node.")]
SaveS = Annotated[float, typer.Option("--save-s", min=0.0, help="The longest that a save takes. Default: the longest in the run's ledger.")]
MaxRequeues = Annotated[int, typer.Option("--max-requeues", min=0, help="Then it stays down: a chain has an end.")]
Yes = Annotated[bool, typer.Option("--yes", help="Hand it in. Without it nothing is done.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def slurm(
    target: File,
    overrides: Overrides = None,
    nodes: Nodes = 0,
    time: Annotated[
        str, typer.Option("--time", metavar="TIME", help="Of one job of the chain, as Slurm spells it: 24:00:00.")
    ] = "24:00:00",
    partition: Annotated[str, typer.Option("--partition")] = "",
    account: Annotated[str, typer.Option("--account")] = "",
    name: Name = "",
    program: Program = "surefoot",
    gpus: Gpus = 0,
    cpus: Cpus = 0,
    memory_gib: MemoryGib = 0.0,
    save_s: SaveS = 0.0,
    max_requeues: MaxRequeues = 100,
    option: Annotated[list[str] | None, typer.Option("--option", metavar="OPTION", help="One more for sbatch, such as --qos=high.")] = None,
    yes: Yes = False,
    json_output: Json = False,
) -> None:
    """A batch script for Slurm: one agent per node, told before its time is over, requeued on exit code 75 and on nothing else.

    \b
    Examples:
      surefoot submit slurm run.toml --nodes 4 --gpus 8 --time 24:00:00
      surefoot submit slurm run.toml --nodes 4 --gpus 8 --partition long --yes
    """
    from surefoot.launch.slurm import SlurmOptions, sbatch_script
    from surefoot.launch.submission import parse_time_s

    asked = _submission(target, overrides or (), nodes, name, program, gpus, cpus, memory_gib, save_s, max_requeues)
    try:
        time_s = parse_time_s(time)
    except ValueError as error:
        raise ConfigError(str(error), where="--time") from error
    if time_s <= asked.notice_s:
        what = f"a job of {time_s} s is told {asked.notice_s} s before its end: nothing is left to train in"
        raise ConfigError(what, where="--time", hint="a longer --time, or a smaller launch.grace_s", got=time_s, limit=asked.notice_s)
    bad = next((each for each in option or () if not re.fullmatch(r"--[a-z-]+(=\S+)?", each)), None)
    if bad is not None:
        raise ConfigError(f"{bad!r} is no option of sbatch", where="--option", hint="as --qos=high")
    output = str(Path(asked.config).parent / f"{asked.name}-%j.out")
    script = sbatch_script(asked, SlurmOptions(time, output, partition, account, tuple(option or ())))
    job = _hand_in(("sbatch", "--parsable"), script).partition(";")[0] if yes else None
    _tell("slurm", script, job=job, output=output.replace("%j", job or "%j"), json_output=json_output)


@app.command()
def kubernetes(
    target: File,
    image: Annotated[str, typer.Option("--image", metavar="IMAGE", help="With surefoot in it.")],
    claim: Annotated[str, typer.Option("--claim", metavar="NAME", help="The volume claim with config, data and run folder.")],
    mount: Annotated[str, typer.Option("--mount", metavar="PATH", help="Where pods see it: paths in the config are those of a pod.")],
    overrides: Overrides = None,
    kind: Annotated[Literal["jobset", "trainjob"], typer.Option("--kind", help="A JobSet, or a TrainJob of Kubeflow.")] = "jobset",
    namespace: Annotated[str, typer.Option("--namespace")] = "default",
    shm: Annotated[str, typer.Option("--shm", metavar="SIZE", help="Of /dev/shm, such as 16Gi. Default: half of the memory.")] = "",
    nodes: Nodes = 0,
    name: Name = "",
    program: Program = "surefoot",
    gpus: Gpus = 0,
    cpus: Cpus = 0,
    memory_gib: MemoryGib = 0.0,
    save_s: SaveS = 0.0,
    max_requeues: MaxRequeues = 100,
    yes: Yes = False,
    json_output: Json = False,
) -> None:
    """Manifests for Kubernetes: one pod per node with an agent in it; what a person must look at fails for good, all else restarts.

    \b
    Examples:
      surefoot submit kubernetes /shared/run.toml --image registry/surefoot:1 --claim shared --mount /shared --nodes 4 --gpus 8
      surefoot submit kubernetes /shared/run.toml --image registry/surefoot:1 --claim shared --mount /shared --kind trainjob --yes
    """
    import yaml

    from surefoot.launch.kubernetes import KubernetesOptions, manifests
    from surefoot.launch.submission import header

    asked = _submission(target, overrides or (), nodes, name, program, gpus, cpus, memory_gib, save_s, max_requeues)
    made = manifests(asked, KubernetesOptions(image, claim, mount, namespace, shm), kind=kind)
    text = "\n".join(header(asked)) + "\n" + yaml.safe_dump_all(made, sort_keys=False, width=1000)
    job = _hand_in(("kubectl", "create", "--filename=-", "--output=name"), text).split()[-1] if yes else None
    _tell("kubernetes", text, job=job, output="", json_output=json_output)


@app.command()
def denied(run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")]) -> None:
    """The nodes that a run does not want, as Slurm takes them: n1,n2. Empty when there are none, or no list can be read.

    \b
    Examples:
      surefoot submit denied runs/quickstart
    """
    try:
        names = _denied_by(run, _config_of(run).launch.site_denylist)
    except SurefootError as error:  # a batch script calls this: its requeue must not fail for it
        say(f"surefoot: {error}", err=True)
        names = []
    say(",".join(names))


def _submission(
    target: Path,
    overrides: Sequence[str],
    nodes: int,
    name: str,
    program: str,
    gpus: int,
    cpus: int,
    memory_gib: float,
    save_s: float,
    max_requeues: int,
) -> Submission:
    from surefoot.launch.submission import Submission

    config = _config_of(target, overrides)
    run_dir = Path(config.run.dir).absolute()
    most = int(config.launch.nodes.rpartition(":")[2])
    return Submission(
        name=name or re.sub(r"[^A-Za-z0-9_.-]", "-", config.run.name),
        config=str(target.absolute()),
        run_dir=str(run_dir),
        num_nodes=nodes or most,
        version=__version__,
        made_by=_command_line(),
        program=program,
        overrides=(*overrides, *((f"launch.nodes={nodes}",) if nodes not in (0, most) else ())),
        save_s=save_s or _longest_save_s(run_dir),
        grace_s=config.launch.grace_s,
        max_requeues=max_requeues,
        num_gpus=gpus,
        num_cpus=cpus,
        memory_bytes=math.ceil(memory_gib * (1 << 30)),
        denied=_denied_by(run_dir, config.launch.site_denylist),
    )


def _config_of(target: Path, overrides: Sequence[str] = ()) -> Any:
    from surefoot.config import load_config
    from surefoot.observe.run_dir import CONFIG_NAME

    return load_config(target / CONFIG_NAME if target.is_dir() else target, tuple(overrides)).config


def _denied_by(run_dir: Path, site_denylist: str) -> list[str]:
    from surefoot.coordinate.isolation.denylist import DENYLIST_NAME, denied_nodes

    paths = [run_dir / DENYLIST_NAME, *([Path(site_denylist)] if site_denylist else [])]
    return denied_nodes(paths, now_utc=SystemClock().utc())


def _longest_save_s(run_dir: Path) -> float:
    """Of what the run has measured; 0 before its first save, and the grace stands for it then."""
    from surefoot.core.events import Event
    from surefoot.observe.ledger import LEDGER_NAME, read_ledger

    if not (run_dir / LEDGER_NAME).exists():
        return 0.0
    entries = read_ledger(run_dir / LEDGER_NAME, up_to_damage=True)
    times = [entry.fields.get("upload_s") for entry in entries if entry.event == Event.CHECKPOINT_COMMITTED]
    return max((float(seconds) for seconds in times if isinstance(seconds, int | float)), default=0.0)


def _command_line() -> str:
    """As it was typed, in one line, without `--yes` and `--json`: they change nothing about what is made."""
    return shlex.join(["surefoot", *(argument for argument in sys.argv[1:] if argument not in ("--yes", "--json"))]).replace("\n", " ")


def _hand_in(argv: Sequence[str], text: str) -> str:
    import subprocess

    try:
        result = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=_SUBMIT_LIMIT_S, check=False)
    except FileNotFoundError as error:
        hint = "without --yes it is printed: hand it in where the scheduler is"
        raise ConfigError(f"there is no {argv[0]} here", where="PATH", hint=hint) from error
    except subprocess.TimeoutExpired as error:
        what, hint = f"`{argv[0]}` did not answer within {_SUBMIT_LIMIT_S:g} s", "look whether it was taken before you ask again"
        raise SurefootError(what, where=argv[0], hint=hint) from error
    if result.returncode != 0:
        raise SurefootError(f"`{shlex.join(argv)}` refused it: {result.stderr.strip()}", where=argv[0], exit_status=result.returncode)
    return result.stdout.strip()


def _tell(scheduler: str, text: str, *, job: str | None, output: str, json_output: bool) -> None:
    if json_output:
        say(
            dumps(
                {
                    "schema_version": SCHEMA_VERSION,
                    "scheduler": scheduler,
                    "submitted": job is not None,
                    "job": job,
                    "output": output,
                    "text": text,
                }
            )
        )
    elif job is None:
        say(text.rstrip("\n"))
    else:
        say(f"submitted: {job}" + (f"; its words: {output}" if output else ""))
