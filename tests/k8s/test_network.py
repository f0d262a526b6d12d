"""Who may connect to whom, by the network policies."""

from __future__ import annotations

import pytest

from tests.k8s.directories import K8S, LOADS, pods
from tests.k8s.kustomize import Resource, pod_labels, render

SELF = "vllm-locust"


def selects(selector: Resource, labels: dict[str, str]) -> bool:
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def allowed(
    policies: list[Resource], source: dict[str, str], namespace: str, target: dict[str, str], port: int
) -> bool:
    """As the API defines it: closed by any policy that selects the target, opened by any rule that lets it in."""
    selecting = [one["spec"] for one in policies if selects(one["spec"]["podSelector"], target)]
    if not selecting:
        return True
    for rule in (rule for spec in selecting for rule in spec.get("ingress", ())):
        for peer in rule["from"]:
            assert set(peer) == {"podSelector"}, "which is of the policy's own namespace"
            if namespace == SELF and selects(peer["podSelector"], source) and {"port": port} in rule["ports"]:
                return True
    return False


@pytest.mark.parametrize("directory", LOADS)
def test_network(directory: str) -> None:
    policies = [one for one in render(K8S / directory) if one["kind"] == "NetworkPolicy"]
    labels = {one["metadata"]["name"]: pod_labels(one) for one, _ in (*pods(directory), *pods("results"))}
    labels["stranger"] = {"app": "something-else"}
    reached: dict[tuple[str, int], set[str]] = {}
    for target in set(labels) - {"stranger"}:
        for port in (5557, 8089, 6379, 22):
            everybody = {name for name in labels if allowed(policies, labels[name], SELF, labels[target], port)}
            if everybody:
                reached[target, port] = everybody
            assert not allowed(policies, labels["worker"], "default", labels[target], port)
    web: dict[tuple[str, int], set[str]] = {} if directory == "headless" else {("master", 8089): set(labels)}
    valkey = {"master", "worker", "gpu-collector", "results"}
    assert reached == {("master", 5557): {"worker"}, ("valkey", 6379): valkey} | web
