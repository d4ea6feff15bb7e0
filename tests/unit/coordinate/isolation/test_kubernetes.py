"""Nodes of Kubernetes, through its official client, over HTTP, against an emulator of the API server (kmock): it keeps objects and
answers as a server does, but checks no schema and runs no controller. A real cluster is not to be had in a test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import kmock
import pytest
from kubernetes import client

from surefoot.coordinate.isolation.kubernetes import MARK, KubernetesIsolator

NODES = kmock.resource("", "v1", "nodes")
REASON = "surefoot:g3: lost"


@pytest.fixture
def api() -> Iterator[Any]:
    """A client of an emulator that runs in a thread of its own."""
    ready, urls, stop = threading.Event(), [], None
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        nonlocal stop
        stop = asyncio.Event()
        async with kmock.KubernetesEmulator() as emulator, kmock.Server(emulator) as server:
            emulator.resources[NODES] = {"namespaced": False, "kind": "Node"}  # type: ignore[assignment]
            urls.append(str(server.url).rstrip("/"))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(20)
    configuration = client.Configuration(host=urls[0])
    configuration.retries = False
    with client.ApiClient(configuration) as connection:
        core: Any = client.CoreV1Api(connection)
        core.create_node({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}, "spec": {}})
        yield core
    assert stop is not None
    loop.call_soon_threadsafe(stop.set)
    thread.join(20)
    loop.close()
    assert not thread.is_alive()


def isolate(isolator: KubernetesIsolator, node: str = "n1", reason: str = REASON) -> Any:
    return isolator.isolate(node, reason=reason, ttl_s=60.0, evidence={})


def test_a_node_is_cordoned_tainted_labelled_and_let_back(api: Any) -> None:
    isolator = KubernetesIsolator(api, limit_s=10.0)
    assert isolator.status("n1").state == "serving"
    done = isolate(isolator)
    assert done.action == "isolated", done.reason
    node = api.read_node("n1")
    assert node.spec.unschedulable is True
    assert [(taint.key, taint.effect) for taint in node.spec.taints] == [(MARK, "NoSchedule")]
    assert node.metadata.labels[MARK] == "true"
    assert (isolator.status("n1").state, isolator.status("n1").reason) == ("ours", REASON)
    assert isolate(isolator, reason="surefoot:g4: again").action == "already"
    assert api.read_node("n1").metadata.annotations[MARK] == REASON
    assert isolator.release("n1").action == "released"
    node = api.read_node("n1")
    assert not node.spec.unschedulable
    assert not node.spec.taints
    assert isolator.release("n1").action == "already"


def test_what_somebody_else_cordoned_is_left_alone_and_another_taint_stays(api: Any) -> None:
    isolator = KubernetesIsolator(api, limit_s=10.0)
    api.patch_node("n1", {"spec": {"unschedulable": True}})
    assert isolate(isolator).action == "left_alone"
    assert isolator.release("n1").action == "left_alone"
    assert not (api.read_node("n1").metadata.labels or {}).get(MARK)
    api.patch_node("n1", {"spec": {"unschedulable": False, "taints": [{"key": "site/fans", "value": "loud", "effect": "NoExecute"}]}})
    assert isolate(isolator).action == "isolated"
    assert isolator.release("n1").action == "released"
    assert [taint.key for taint in api.read_node("n1").spec.taints] == ["site/fans"]


def test_a_node_that_is_none_and_a_server_that_is_gone_are_told_apart(api: Any) -> None:
    isolator = KubernetesIsolator(api, limit_s=10.0)
    assert isolator.status("n9").state == "absent"
    assert isolate(isolator, "n9").action == "failed"
    configuration = client.Configuration(host="http://127.0.0.1:9")
    configuration.retries = False
    with client.ApiClient(configuration) as connection:
        gone = KubernetesIsolator(client.CoreV1Api(connection), limit_s=2.0)
        assert gone.status("n1").state == "unknown"
        assert isolate(gone).action == "failed"
