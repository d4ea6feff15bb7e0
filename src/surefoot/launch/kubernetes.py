"""The manifests of a run under Kubernetes: a JobSet, or a TrainJob of Kubeflow with the runtime that it refers to.

One pod per node, an agent in each. What a person must look at fails for good; a kill, a preemption and 75 restart within a budget.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from surefoot.core.errors import ConfigError
from surefoot.launch.submission import NEVER_AGAIN, Submission

JOBSET_API: Final = "jobset.x-k8s.io/v1alpha2"
TRAINER_API: Final = "trainer.kubeflow.org/v1alpha1"
_CONTAINER: Final = "node"  # Kubeflow looks for this name
_MARGIN_S: Final = 30  # the agent kills ranks at the end of the grace, and the kernel may take its time with them
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class KubernetesOptions:
    """`claim` is a volume claim that all pods mount at `mount`: run folder, data and config lie there. `shm`: size of /dev/shm, as 16Gi."""

    image: str
    claim: str
    mount: str
    namespace: str = "default"
    shm: str = ""


def manifests(submission: Submission, options: KubernetesOptions, *, kind: Literal["jobset", "trainjob"]) -> list[dict[str, Any]]:
    """What is created, in its order. Raises ConfigError for a name that Kubernetes does not take."""
    if not _NAME.fullmatch(submission.name):
        hint = "--name: lower-case letters, digits and -, at most 40, beginning with a letter"
        raise ConfigError(f"{submission.name!r} is no name for Kubernetes", where="--name", hint=hint)
    if kind == "jobset":
        return [
            {"apiVersion": JOBSET_API, "kind": "JobSet", "metadata": _metadata(submission, options), "spec": _jobset(submission, options)}
        ]
    runtime = f"{submission.name}-runtime"
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    template = {"spec": _jobset(submission, options, labels=labels)}
    trainer = {"image": options.image, "numNodes": submission.num_nodes, "command": _command(submission)}
    if resources := _resources(submission):
        trainer["resourcesPerNode"] = resources
    return [
        {
            "apiVersion": TRAINER_API,
            "kind": "TrainingRuntime",
            "metadata": {"name": runtime, "namespace": options.namespace},
            "spec": {"mlPolicy": {"numNodes": submission.num_nodes}, "template": template},
        },
        {
            "apiVersion": TRAINER_API,
            "kind": "TrainJob",
            "metadata": _metadata(submission, options),
            "spec": {"runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": runtime}, "trainer": trainer},
        },
    ]


def _metadata(submission: Submission, options: KubernetesOptions) -> dict[str, Any]:
    return {"name": submission.name, "namespace": options.namespace, "labels": {"app.kubernetes.io/managed-by": "surefoot"}}


def _jobset(submission: Submission, options: KubernetesOptions, *, labels: Mapping[str, str] | None = None) -> dict[str, Any]:
    job = {
        "name": _CONTAINER,
        "replicas": 1,
        "template": {**({"metadata": {"labels": dict(labels)}} if labels else {}), "spec": job_spec(submission, options)},
    }
    policy = {
        "maxRestarts": submission.max_requeues,
        "rules": [{"name": "looked-at-first", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
    }
    return {"failurePolicy": policy, "replicatedJobs": [job]}


def job_spec(submission: Submission, options: KubernetesOptions) -> dict[str, Any]:
    """The spec of the batch/v1 Job within. Codes come before disruptions: a run that halts while its node is drained has halted."""
    rules = [
        {"action": "FailJob", "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": list(NEVER_AGAIN)}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    return {
        "backoffLimit": 0,
        "completionMode": "Indexed",
        "completions": submission.num_nodes,
        "parallelism": submission.num_nodes,
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": _pod(submission, options)},
    }


def _pod(submission: Submission, options: KubernetesOptions) -> dict[str, Any]:
    memory = {"medium": "Memory", **({"sizeLimit": options.shm} if options.shm else {})}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(max(submission.grace_s, submission.save_s)) + _MARGIN_S,
        "containers": [_container(submission, options)],
        "volumes": [
            {"name": "shm", "emptyDir": memory},
            {"name": "shared", "persistentVolumeClaim": {"claimName": options.claim}},
        ],
    }
    affinity = _apart_from(submission.denied)
    return {**pod, "affinity": affinity} if affinity else pod


def _container(submission: Submission, options: KubernetesOptions) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": _CONTAINER,
        "image": options.image,
        "command": _command(submission),
        "env": [
            {"name": "SUREFOOT_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
        ],
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "shared", "mountPath": options.mount}],
    }
    resources = _resources(submission)
    return {**container, "resources": resources} if resources else container


def _command(submission: Submission) -> list[str]:
    return [submission.program, *submission.train_arguments()]


def _resources(submission: Submission) -> dict[str, Any]:
    """Requests and limits alike: whoever trains is not to be squeezed, and an accelerator is given whole."""
    wanted = {
        "cpu": str(submission.num_cpus or ""),
        "memory": f"{-(-submission.memory_bytes // (1 << 20))}Mi" if submission.memory_bytes else "",
        "nvidia.com/gpu": str(submission.num_gpus or ""),
    }
    told = {name: value for name, value in wanted.items() if value}
    return {"requests": told, "limits": dict(told)} if told else {}


def _apart_from(denied: Sequence[str]) -> dict[str, Any]:
    if not denied:
        return {}
    wanted = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(denied)}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [wanted]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
