"""The manifests as a cluster would get them: valid, closed, without secrets, and with everything that they name."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.k8s.conftest import SECRET_FILES
from tests.k8s.directories import DIRECTORIES, K8S, LOADS, containers, pods
from tests.k8s.kustomize import Resource, documents, find, pod_labels, render
from tests.run.simulated import ROOT
from vllm_locust.config import RunConfig

KUBERNETES = ("1.29", kubernetes_validate.latest_version())
"""The oldest that the files are for, whose Jobs have a backoffLimitPerIndex, and the newest there is a schema of."""


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("directory", DIRECTORIES)
def test_schema(directory: str, version: str) -> None:
    resources = render(K8S / directory)
    assert resources
    for resource in resources:
        kubernetes_validate.validate(resource, version, strict=True)


def test_schema_refuses_a_misspelt_key() -> None:
    (claim,) = documents(K8S / "base" / "results.yaml")
    claim["spec"]["accessMode"] = claim["spec"].pop("accessModes")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(claim, KUBERNETES[0], strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, which has kustomize in it")
@pytest.mark.parametrize("directory", DIRECTORIES)
def test_kustomize_renders_the_same(directory: str) -> None:
    text = subprocess.run(["kubectl", "kustomize", K8S / directory], capture_output=True, check=True).stdout
    assert _sorted(list(yaml.safe_load_all(text))) == _sorted(render(K8S / directory))


def _sorted(resources: list[Resource]) -> list[Resource]:
    return sorted(resources, key=lambda one: (one["kind"], one["metadata"]["name"]))


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_restricted(directory: str) -> None:
    """As the level ``restricted`` of the pod security standards asks for, and with a read-only root file system."""
    for spec, container in containers(directory):
        pod_security, security = spec["securityContext"], container["securityContext"]
        assert pod_security["runAsNonRoot"] is True
        assert pod_security["runAsUser"] > 0
        assert pod_security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert security == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        kinds = {key for volume in spec["volumes"] for key in volume} - {"name"}
        assert kinds <= {"emptyDir", "secret", "persistentVolumeClaim"}
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False, "a service's variables could be taken for flags"


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_resources_are_requested_and_cpu_is_not_throttled(directory: str) -> None:
    for _, container in containers(directory):
        resources = container["resources"]
        assert set(resources["requests"]) == {"cpu", "memory"}
        assert set(resources["limits"]) == {"memory"}


@pytest.mark.parametrize("directory", LOADS)
def test_grace_period_is_the_drain_and_a_minute(directory: str) -> None:
    drain_s = RunConfig.from_options({"host": "http://x"}, host="http://x", run_time_s=None).drain_timeout_ns // 10**9
    graced = {
        resource["metadata"]["name"]: spec.get("terminationGracePeriodSeconds") for resource, spec in pods(directory)
    }
    assert graced["master"] == graced["worker"] == drain_s + 60


def test_secrets_are_files_of_the_right_pods(secrets: list[Resource]) -> None:
    data = {secret["metadata"]["name"]: secret["data"] for secret in secrets}
    assert set(data["redis"]) == {"master", "worker", "collector", "users.acl"}
    mounted = {}
    for directory in DIRECTORIES:
        for resource, spec in pods(directory):
            keys = set()
            for volume in spec["volumes"]:
                if "secret" in volume:
                    source = volume["secret"]
                    named = {item["key"] for item in source.get("items", ())} or set(data[source["secretName"]])
                    assert named <= set(data[source["secretName"]])
                    assert source["defaultMode"] == 0o440
                    keys |= named
            mounted[resource["metadata"]["name"]] = keys
    assert mounted == {
        "valkey": {"users.acl"},
        "master": {"master", "api-key"},
        "worker": {"worker", "api-key"},
        "gpu-collector": {"collector"},
        "results": {"master"},
    }


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_no_secret_is_a_variable_or_an_argument(directory: str) -> None:
    text = json.dumps(render(K8S / directory))
    assert "secretKeyRef" not in text
    assert "secretRef" not in text
    for _, container in containers(directory):
        for word in (*container["command"], *container.get("args", ())):
            assert not re.search(r"//[^/@]*:[^/@]*@", word), "a password in a URL"
            assert not word.startswith(("--requirepass", "--user ", "--masterauth"))


def test_script_makes_private_files_whose_digests_the_users_have(secrets_dir: Path, secrets: list[Resource]) -> None:
    acl = (secrets_dir / "users.acl").read_text()
    passwords = [(secrets_dir / user).read_bytes() for user in ("master", "worker", "collector")]
    assert len(set(passwords)) == 3
    for user, password in zip(("master", "worker", "collector"), passwords, strict=True):
        assert len(password) == 64
        assert f"user {user} on #{hashlib.sha256(password).hexdigest()} " in acl
        assert password.decode() not in acl
    assert "{" not in acl
    assert all(stat.S_IMODE((secrets_dir / name).stat().st_mode) == 0o600 for name in SECRET_FILES)
    assert base64.b64decode(find(secrets, "Secret", "api-key")["data"]["api-key"]) == b"sk-of-the-test"
    ignored = (K8S / "secrets" / ".gitignore").read_text().split()
    assert set(ignored) == {f"/{name}" for name in SECRET_FILES}


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_everything_that_a_pod_names_is_there(directory: str) -> None:
    resources = render(K8S / directory) + render(K8S / "base")
    for spec, container in containers(directory):
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert {mount["name"] for mount in container.get("volumeMounts", ())} in (set(volumes), set())
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                name = volume["persistentVolumeClaim"]["claimName"]
                assert [
                    one
                    for one in resources
                    if (one["kind"], one["metadata"]["name"]) == ("PersistentVolumeClaim", name)
                ]
        load = _config_map(resources)
        for source in container.get("envFrom", ()):
            assert source == {"configMapRef": {"name": "load"}}
        for variable in container.get("env", ()):
            source = variable.get("valueFrom", {})
            if "fieldRef" in source:
                assert source == {"fieldRef": {"fieldPath": "spec.nodeName"}}
                assert any(f"$({variable['name']})" in word for word in container["args"])
            elif source:
                assert source["configMapKeyRef"]["key"] in load


def _config_map(resources: list[Resource]) -> dict[str, str]:
    (load, *_) = [one for one in resources if one["kind"] == "ConfigMap"]
    data: dict[str, str] = load["data"]
    return data


@pytest.mark.parametrize("directory", LOADS)
def test_services_lead_to_ports_of_pods(directory: str) -> None:
    services = [one for one in render(K8S / directory) if one["kind"] == "Service"]
    assert {one["metadata"]["name"] for one in services} == {"master", "valkey"}
    for service in services:
        chosen = [
            spec
            for resource, spec in pods(directory)
            if service["spec"]["selector"].items() <= pod_labels(resource).items()
        ]
        (spec,) = chosen
        ports = {port["name"]: port["containerPort"] for port in spec["containers"][0]["ports"]}
        assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports


def test_workers_of_a_headless_run_are_as_many_as_its_master_expects() -> None:
    resources = render(K8S / "headless")
    assert not [one for one in resources if one["kind"] == "Deployment" and one["metadata"]["name"] != "valkey"]
    master, worker = (find(resources, "Job", name)["spec"] for name in ("master", "worker"))
    assert worker["completions"] == worker["parallelism"]
    assert f"--expect-workers={worker['completions']}" in master["template"]["spec"]["containers"][0]["args"]
    assert master["backoffLimit"] == 0
    assert {one["template"]["spec"]["restartPolicy"] for one in (master, worker)} == {"Never"}


def test_image_runs_as_the_user_of_the_pods_and_has_what_they_name() -> None:
    text = (K8S / "image" / "Dockerfile").read_text(encoding="utf-8")
    users = {spec["securityContext"]["runAsUser"] for spec, one in containers("base") if "vllm-locust" in one["image"]}
    (user,) = users
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE) == [f"{user}:{user}"]
    assert f"--uid {user} " in text
    own = [words.split() for words in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE)]
    sources = {source for *names, _ in own for source in names}
    assert {"pyproject.toml", "vllm_locust", "locustfiles", "workloads"} <= sources
    kept = set((K8S / "image" / "Dockerfile.dockerignore").read_text().split()) - {"*", "**/__pycache__"}
    assert kept == {f"!{source}" for source in sources}
    assert all((ROOT / source).exists() for source in sources)
    assert ["locustfiles", "/locustfiles"] in own
    load: Any = find(render(K8S / "base"), "ConfigMap", "load")["data"]
    assert (ROOT / load["LOCUST_LOCUSTFILE"].removeprefix("/")).exists()
    images = {one["image"] for directory in DIRECTORIES for _, one in containers(directory)}
    assert images == {"vllm-locust:latest", "docker.io/valkey/valkey:8.1"}
