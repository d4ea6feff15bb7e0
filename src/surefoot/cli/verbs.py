"""The table of verbs: where each one lives and what it does in one line. Nothing here imports a verb."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verb:
    """`target` is `module:name` of a function, or of a Typer app when the verb has verbs of its own."""

    target: str
    help: str

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]


VERBS: Mapping[str, Verb] = {
    "init": Verb("surefoot.cli.init:init", "Write a commented starter config."),
    "doctor": Verb("surefoot.cli.doctor:doctor", "Check that this machine can train, and say what to mend."),
    "config": Verb("surefoot.cli.config:app", "Show a config with the origin of every value."),
    "plan": Verb("surefoot.cli.plan:plan", "From a budget to a run that can be trained, with reasons."),
    "fit": Verb("surefoot.cli.fit:fit", "Fit a scaling law to a table of finished runs."),
    "simulate": Verb("surefoot.cli.simulate:simulate", "How much of a run's time stays useful on machines that fail."),
    "sweep": Verb("surefoot.cli.sweep:app", "Small runs that say what the large one should be."),
    "data": Verb("surefoot.cli.data:app", "Prepare text, look into it, leave parts of it out."),
    "train": Verb("surefoot.cli.train:train", "Start a run, go on with it, or say that it is finished."),
    "submit": Verb("surefoot.cli.submit:app", "A run for Slurm or Kubernetes, printed or handed in."),
    "stop": Verb("surefoot.cli.stop:stop", "Have a live run save and end."),
    "save": Verb("surefoot.cli.save:save", "Have a live run save at its next step."),
    "pause": Verb("surefoot.cli.pause:pause", "Have a live run stand still until it is resumed."),
    "resume": Verb("surefoot.cli.resume:resume", "Let a paused or halted run go on."),
    "rollback": Verb("surefoot.cli.rollback:rollback", "Have a run go back to an older checkpoint."),
    "drain": Verb("surefoot.cli.drain:drain", "Have a node leave a run in good order, or take it out of service."),
    "status": Verb("surefoot.cli.status:status", "Where a run stands."),
    "replay": Verb("surefoot.cli.replay:replay", "Compute steps of a run again, and compare the bits."),
    "triage": Verb("surefoot.cli.triage:triage", "What is wrong with a run, whom to suspect, what to type next."),
    "ledger": Verb("surefoot.cli.ledger:ledger", "What was seen, decided and done in a run."),
    "calibrate": Verb("surefoot.cli.calibrate:calibrate", "How often detectors are wrong, and how soon they see a fault."),
    "drill": Verb("surefoot.cli.drill:app", "Faults into a real run, and whether it survives them."),
    "inspect": Verb("surefoot.cli.inspect:inspect", "What the processes of a live run are doing, hung or not."),
    "checkpoint": Verb("surefoot.cli.checkpoint:app", "List, verify, prove, move and export checkpoints."),
}

NOT_IN_THIS_RELEASE = ("launch", "runs", "watch", "report")


def available_verbs() -> dict[str, Verb]:
    """The verbs whose module is there, in the order of the help page. Finds modules without importing them."""
    return {name: verb for name, verb in VERBS.items() if importlib.util.find_spec(verb.module) is not None}
