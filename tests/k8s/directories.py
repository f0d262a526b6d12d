"""What is under ``k8s/``, rendered, and the pods in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.k8s.kustomize import Resource, pod_spec, render

K8S = Path(__file__).parents[2] / "k8s"
LOADS = ("base", "headless")
DIRECTORIES = (*LOADS, "results")


def pods(directory: str) -> Iterator[tuple[Resource, Resource]]:
    """Every resource that starts pods, and its pods' spec."""
    for resource in render(K8S / directory):
        spec = pod_spec(resource)
        if spec is not None:
            yield resource, spec


def containers(directory: str) -> Iterator[tuple[Resource, Resource]]:
    for _, spec in pods(directory):
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            yield spec, container
