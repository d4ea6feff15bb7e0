"""The site that a run is on, what a person types there about a node, and the way from a decision to its account."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from surefoot.coordinate.isolation.denylist import DENYLIST_NAME, DenylistIsolator
from surefoot.coordinate.isolation.kubernetes import KubernetesIsolator, client_of_site
from surefoot.coordinate.isolation.policy import IsolationDecision
from surefoot.coordinate.isolation.records import Isolation, Isolator, Wish
from surefoot.coordinate.isolation.slurm import SlurmIsolator
from surefoot.core.clock import Clock

Scheduler = Literal["slurm", "kubernetes", "none"]


@dataclass(frozen=True, slots=True)
class SiteFacts:
    """Where a run is and which node is meant. `job` is the scheduler's own id: SLURM_JOB_ID, or the name of the pod."""

    scheduler: Scheduler
    run: str
    node: str
    incident: str
    job: str = ""
    namespace: str = ""
    reason: str = ""


def scheduler_of(environ: Mapping[str, str]) -> Scheduler:
    """Who started this process, by what they leave in its environment."""
    if environ.get("SLURM_JOB_ID"):
        return "slurm"
    return "kubernetes" if environ.get("KUBERNETES_SERVICE_HOST") else "none"


def facts_of(environ: Mapping[str, str], *, run: str, node: str, incident: str, reason: str = "") -> SiteFacts:
    """`node` is the name that the run knows; under Slurm and Kubernetes the site's own name of this node is in the environment."""
    scheduler = scheduler_of(environ)
    job = {"slurm": "SLURM_JOB_ID", "kubernetes": "HOSTNAME"}.get(scheduler, "")
    return SiteFacts(scheduler, run, node, incident, environ.get(job, ""), environ.get("POD_NAMESPACE", "default"), reason)


def this_node(environ: Mapping[str, str]) -> str:
    """The site's own name of this machine: a scheduler's where it says one, else the host's."""
    return environ.get("SLURMD_NODENAME") or environ.get("SUREFOOT_NODE") or os.uname().nodename


def site_commands(facts: SiteFacts) -> dict[str, str]:
    """What a person types, ready to paste: show_job, show_node, drain, probe, readmit. Keys are the same at every site."""
    node, run = shlex.quote(facts.node), shlex.quote(facts.run)
    words = shlex.quote(Wish(facts.node, facts.incident, facts.reason or "see the incident").words())
    ours = {
        "drain_run": f"surefoot drain {node} --run {run} --cause {words}",
        "readmit": f"surefoot drain {node} --run {run} --readmit",
    }
    if facts.scheduler == "slurm":
        job = facts.job or "<job>"
        return {
            "show_job": f"scontrol show job {job}",
            "show_node": f"scontrol show node {node}",
            "drain": f"scontrol update NodeName={node} State=DRAIN Reason={words}",
            "probe": f"srun --nodelist={node} --nodes=1 --ntasks=1 surefoot doctor",
            "undrain": f"scontrol update NodeName={node} State=RESUME",
            **ours,
        }
    if facts.scheduler == "kubernetes":
        at = f"--namespace {shlex.quote(facts.namespace)}"
        return {
            "show_job": f"kubectl describe pod {shlex.quote(facts.job) if facts.job else '<pod>'} {at}",
            "show_node": f"kubectl describe node {node}",
            "drain": f"kubectl cordon {node}",
            "probe": f"kubectl exec {at} {shlex.quote(facts.job) if facts.job else '<pod>'} -- surefoot doctor",
            "undrain": f"kubectl uncordon {node}",
            **ours,
        }
    return {
        "show_job": f"surefoot status {run}",
        "show_node": f"surefoot triage {run}",
        "drain": f"surefoot drain {node} --run {run} --isolate --yes",
        "probe": f"ssh {node} surefoot doctor",
        **ours,
    }


def backends_of(environ: Mapping[str, str], *, run_dir: Path, site_denylist: str, limit_s: float, clock: Clock) -> tuple[Isolator, ...]:
    """Where a node of this run can be taken out of service: the scheduler that it runs under, the run's own list, and that of the site.

    The denylists come last and always: they help where this user has no right to drain. Raises ConfigError when the cluster that this pod
    is in cannot be reached.
    """
    lists = (run_dir / DENYLIST_NAME, *([Path(site_denylist)] if site_denylist else []))
    denylists = tuple(DenylistIsolator(path, clock=clock, limit_s=limit_s) for path in lists)
    scheduler = scheduler_of(environ)
    if scheduler == "slurm" or (scheduler == "none" and shutil.which("scontrol") is not None):
        return (SlurmIsolator(limit_s=limit_s), *denylists)
    if scheduler == "kubernetes":
        return (KubernetesIsolator(client_of_site(), limit_s=limit_s), *denylists)
    return denylists


def carry_out(
    decision: IsolationDecision, wish: Wish, *, backends: Sequence[Isolator], ttl_s: float, evidence: Mapping[str, Any] | None = None
) -> tuple[Isolation, ...]:
    """Ask each backend in its order, whatever became of the one before: where the scheduler says no, the denylist still helps.

    Empty when the decision is not `isolate`. Raises nothing: what failed is in the account.
    """
    if decision.kind != "isolate":
        return ()
    return tuple(backend.isolate(wish.node, reason=wish.words(), ttl_s=ttl_s, evidence=evidence or {}) for backend in backends)


def account(decision: IsolationDecision, wish: Wish, *, done: Sequence[Isolation], facts: SiteFacts) -> dict[str, Any]:
    """For the incident: what was decided and why, what each backend said, and what a person can type."""
    return {
        "node": wish.node,
        "decision": decision.kind,
        "reason": decision.reason,
        "done": [asdict(each) for each in done],
        "commands": site_commands(facts),
    }
