"""The pods of rendered manifests as plain processes of this machine: their own commands, arguments, variables and
mounted files, with the addresses of services, the ports and the places of files replaced by some of this machine.
"""

from __future__ import annotations

import base64
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.k8s.kustomize import Resource, find, pod_spec
from tests.run.simulated import ROOT, free_port
from vllm_locust.store.embedded import server_binary

_COMMANDS = {
    "locust": [sys.executable, "-m", "locust"],
    "vllm-locust": [sys.executable, "-m", "vllm_locust"],
    "valkey-server": [str(server_binary())],
}
NODE = "node-7.example"
"""On which every pod runs."""
_IN_THE_IMAGE = {"/locustfiles": ROOT / "locustfiles"}


def _expanded(text: str, variables: dict[str, str]) -> str:
    """``$(NAME)``, which the kubelet puts in. What is not known stays as it is."""
    return re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), text)


class Cluster:
    def __init__(self, directory: Path, resources: list[Resource]) -> None:
        self._directory = directory
        self._resources = resources
        self._ports = {str(port): str(free_port()) for port in (5557, 6379, 8089)}
        self._processes: list[subprocess.Popen[str]] = []

    @property
    def web(self) -> str:
        return f"http://127.0.0.1:{self._ports['8089']}"

    @property
    def runs(self) -> list[Path]:
        """The run directories on the volume of the results."""
        return sorted(path.parent for path in (self._directory / "claims" / "results" / "runs").glob("*/run.json"))

    def start(self, kind: str, name: str, *more_arguments: str) -> subprocess.Popen[str]:
        """One more pod of a resource, with further arguments where this machine needs them."""
        spec = pod_spec(find(self._resources, kind, name))
        assert spec is not None
        for command in self.init_commands(kind, name):
            subprocess.run(command, check=True, timeout=30)
        (container,) = spec["containers"]
        places = self._mount(f"{name}-{len(self._processes)}", spec, container)
        command = [*_COMMANDS[container["command"][0]], *container["command"][1:]]
        variables = {name: self._here(text, places) for name, text in self._variables(container).items()}
        arguments = [_expanded(self._here(text, places), variables) for text in container["args"]]
        process = subprocess.Popen(
            [*command, *arguments, *more_arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=places.get(container.get("workingDir", ""), self._directory),
            env={"PATH": os.environ["PATH"], **variables},
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def init_commands(self, kind: str, name: str) -> list[list[str]]:
        spec = pod_spec(find(self._resources, kind, name))
        assert spec is not None
        return [
            [*container["command"], *(self._here(text, {}) for text in container["args"])]
            for container in spec.get("initContainers", ())
        ]

    def await_ready(self, service: str) -> None:
        """As the readiness probe of its pods does."""
        (port, *_) = find(self._resources, "Service", service)["spec"]["ports"]
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", int(self._ports[str(port["port"])]))).close()
            except ConnectionRefusedError:
                time.sleep(0.05)
            else:
                return
        raise AssertionError(f"{service} did not listen")

    def end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()

    def _mount(self, pod: str, spec: Resource, container: Resource) -> dict[str, Path]:
        """Where each path of the container lies here."""
        places = dict(_IN_THE_IMAGE)
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        for volume in spec["volumes"]:
            place = self._directory / "pods" / pod / volume["name"]
            if "persistentVolumeClaim" in volume:
                place = self._directory / "claims" / volume["persistentVolumeClaim"]["claimName"]
            place.mkdir(parents=True, exist_ok=True)
            if "secret" in volume:
                self._write_secret(volume["secret"], place)
            places[mounts[volume["name"]]] = place
        return places

    def _write_secret(self, source: Resource, place: Path) -> None:
        data = find(self._resources, "Secret", source["secretName"])["data"]
        items = source.get("items") or [{"key": key, "path": key} for key in data]
        for item in items:
            (place / item["path"]).write_bytes(base64.b64decode(data[item["key"]]))

    def _variables(self, container: Resource) -> dict[str, str]:
        def config(name: str) -> dict[str, str]:
            data: dict[str, str] = find(self._resources, "ConfigMap", name)["data"]
            return data

        variables: dict[str, str] = {}
        for source in container.get("envFrom", ()):
            variables |= config(source["configMapRef"]["name"])
        for variable in container.get("env", ()):
            if "value" in variable:
                variables[variable["name"]] = variable["value"]
            elif "fieldRef" in variable["valueFrom"]:
                assert variable["valueFrom"]["fieldRef"] == {"fieldPath": "spec.nodeName"}
                variables[variable["name"]] = NODE
            else:
                reference = variable["valueFrom"]["configMapKeyRef"]
                variables[variable["name"]] = config(reference["name"])[reference["key"]]
        return variables

    def _here(self, text: str, places: dict[str, Path]) -> str:
        """In one pass, so that nothing is replaced twice: what it puts in has paths and numbers too."""
        paths = "|".join(re.escape(path) for path in sorted(places, key=len, reverse=True))
        services = "|".join(one["metadata"]["name"] for one in self._resources if one["kind"] == "Service")
        ports = "|".join(self._ports)
        pattern = (
            rf"(?:(?<=^)|(?<==))(?P<path>{paths or '(?!)'})(?=/|$)"
            rf"|(?<=/dev/tcp/)(?:{services})/(?P<device>{ports})\b"
            rf"|(?<=@)(?:{services}):(?P<at>{ports})(?=/)"
            rf"|(?<=-host=)(?P<host>{services})$"
            rf"|(?:(?<=^)|(?<=-port=))(?P<port>{ports})$"
        )

        def replaced(match: re.Match[str]) -> str:
            found = {name: value for name, value in match.groupdict().items() if value is not None}
            ((what, value),) = found.items()
            if what == "path":
                return str(places[value])
            if what == "host":
                return "127.0.0.1"
            if what == "device":
                return f"127.0.0.1/{self._ports[value]}"
            return self._ports[value] if what == "port" else f"127.0.0.1:{self._ports[value]}"

        return re.sub(pattern, replaced, text)
