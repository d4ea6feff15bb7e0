"""Nodes of a Kubernetes site: cordoned, tainted and labelled through the official client (extra `kubernetes`).

Tested against an emulator of the API server, which runs no controllers and checks no schema: see docs/kubernetes.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from surefoot.coordinate.isolation.records import Isolation, NodeStanding, is_node_name, is_ours
from surefoot.core.errors import ConfigError

MARK: Final = "surefoot.dev/isolated"
"""Label (true), taint (NoSchedule) and annotation (the reason) of a node that we took out."""
_NUM_TRIES = 3  # somebody else, the kubelet mostly, changed the node between our look and our patch


class KubernetesIsolator:
    """`api` is a CoreV1Api of the client. Pods that run on the node are not evicted: the run leaves it at a step boundary."""

    name = "kubernetes"

    def __init__(self, api: Any, *, limit_s: float) -> None:
        self._api = api
        self._limit_s = limit_s

    def isolate(self, node: str, *, reason: str, ttl_s: float, evidence: Mapping[str, Any]) -> Isolation:
        """Nothing ends by itself here: `ttl_s` is for those who look, in the list of the run."""

        def change(found: Any) -> dict[str, Any] | Isolation:
            before = standing_of(node, found)
            if before.state != "serving":
                return Isolation(self.name, node, "already" if before.state == "ours" else "left_alone", before.reason)
            taints = [*_taints(found), {"key": MARK, "value": "true", "effect": "NoSchedule"}]
            return _patch(found, unschedulable=True, taints=taints, mark="true", reason=reason)

        return self._change(node, "isolated", change, reason=reason)

    def status(self, node: str) -> NodeStanding:
        try:
            return standing_of(node, self._read(node))
        except Exception as error:  # the client raises what its transport does, of several libraries
            return NodeStanding(node, "absent" if _status(error) == 404 else "unknown", _words(error))

    def release(self, node: str) -> Isolation:
        def change(found: Any) -> dict[str, Any] | Isolation:
            before = standing_of(node, found)
            if before.state != "ours":
                return Isolation(self.name, node, "already" if before.state == "serving" else "left_alone", before.reason)
            taints = [taint for taint in _taints(found) if taint.get("key") != MARK]
            return _patch(found, unschedulable=False, taints=taints, mark=None, reason=None)

        return self._change(node, "released", change, reason="")

    def _read(self, node: str) -> Any:
        if not is_node_name(node):
            raise ConfigError(f"{node!r} is no name of a node", where="kubernetes")
        return self._api.read_node(node, _request_timeout=self._limit_s)

    def _change(
        self, node: str, action: Literal["isolated", "released"], change: Callable[[Any], dict[str, Any] | Isolation], *, reason: str
    ) -> Isolation:
        """Read, then patch that very version: what changed in between is read again."""
        command = f"PATCH nodes/{node}"
        for _ in range(_NUM_TRIES):
            try:
                patch = change(self._read(node))
                if isinstance(patch, Isolation):
                    return patch
                self._api.patch_node(node, patch, _request_timeout=self._limit_s)
                return Isolation(self.name, node, action, reason, command)
            except Exception as error:  # as in `status`
                if _status(error) != 409:
                    return Isolation(self.name, node, "denied" if _status(error) in (401, 403) else "failed", _words(error), command)
        return Isolation(self.name, node, "failed", f"it changed under {_NUM_TRIES} tries", command)


def standing_of(node: str, found: Any) -> NodeStanding:
    """What the object of a node says. Cordoned without our mark is another's, and so is our mark with another's reason."""
    labels, notes = found.metadata.labels or {}, found.metadata.annotations or {}
    if not found.spec.unschedulable:
        return NodeStanding(node, "serving")
    if labels.get(MARK) == "true" and is_ours(reason := str(notes.get(MARK, ""))):
        return NodeStanding(node, "ours", reason)
    return NodeStanding(node, "others", "cordoned by somebody else")


def client_of_site() -> Any:
    """A CoreV1Api from within a pod, else from KUBECONFIG. Raises ConfigError when neither is there, or the extra is not installed."""
    try:
        client: Any = importlib.import_module("kubernetes.client")
        config: Any = importlib.import_module("kubernetes.config")
    except ImportError as error:
        raise ConfigError("the client of Kubernetes is not installed", hint="pip install 'surefoot[kubernetes]'") from error
    try:
        try:
            config.load_incluster_config()
        except config.ConfigException:
            config.load_kube_config()
    except Exception as error:  # as in `status`
        raise ConfigError(f"no cluster to talk to: {_words(error)}", hint="set KUBECONFIG, or give the pod a service account") from error
    return client.CoreV1Api()


def _patch(found: Any, *, unschedulable: bool, taints: list[dict[str, Any]], mark: str | None, reason: str | None) -> dict[str, Any]:
    """A taint list is replaced as a whole, so the version that it was made from goes with it: another's taint is never lost."""
    metadata = {"labels": {MARK: mark}, "annotations": {MARK: reason}, "resourceVersion": found.metadata.resource_version}
    if found.metadata.resource_version is None:
        del metadata["resourceVersion"]
    return {"metadata": metadata, "spec": {"unschedulable": unschedulable, "taints": taints}}


def _taints(found: Any) -> list[dict[str, Any]]:
    """As the API spells them."""
    told = []
    for taint in found.spec.taints or ():
        each = {"key": taint.key, "value": taint.value, "effect": taint.effect}
        if taint.time_added is not None:
            each["timeAdded"] = taint.time_added.isoformat().replace("+00:00", "Z")
        told.append({name: value for name, value in each.items() if value is not None})
    return told


def _status(error: Exception) -> int | None:
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else None


def _words(error: Exception) -> str:
    words = " ".join(str(getattr(error, "reason", "") or error).split())
    return f"{type(error).__name__}: {words}"[:300]
