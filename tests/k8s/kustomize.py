"""Renders the kustomizations under ``k8s/`` as kustomize does. What it does not know it refuses: a file that uses more
would not be checked.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import yaml

Resource = dict[str, Any]

_KNOWN = {"apiVersion", "kind", "namespace", "resources", "patches", "generatorOptions", "secretGenerator"}


def render(directory: Path) -> list[Resource]:
    spec = yaml.safe_load((directory / "kustomization.yaml").read_text(encoding="utf-8"))
    _refuse_unknown(spec, _KNOWN, directory)
    rendered: list[Resource] = []
    for name in spec.get("resources", ()):
        path = (directory / name).resolve()
        rendered += render(path) if path.is_dir() else documents(path)
    for generator in spec.get("secretGenerator", ()):
        assert spec["generatorOptions"] == {"disableNameSuffixHash": True}
        rendered.append(_secret(generator, directory))
    for patch in spec.get("patches", ()):
        _apply(patch, rendered, directory)
    if "namespace" in spec:
        for resource in rendered:
            key = "name" if resource["kind"] == "Namespace" else "namespace"
            resource["metadata"][key] = spec["namespace"]
    return rendered


def documents(path: Path) -> list[Resource]:
    return [one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one is not None]


def find(resources: list[Resource], kind: str, name: str) -> Resource:
    (found,) = [one for one in resources if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def pod_spec(resource: Resource) -> Resource | None:
    """None where the resource starts no pods."""
    if resource["kind"] == "Pod":
        spec: Resource = resource["spec"]
        return spec
    template: Resource | None = resource.get("spec", {}).get("template")
    return None if template is None else template["spec"]


def pod_labels(resource: Resource) -> dict[str, str]:
    pod = resource if resource["kind"] == "Pod" else resource["spec"]["template"]
    labels: dict[str, str] = pod["metadata"]["labels"]
    return labels


def _refuse_unknown(value: Resource, known: set[str], where: Path) -> None:
    assert set(value) <= known, f"{where}: the renderer does not know {sorted(set(value) - known)}"


def _secret(generator: Resource, directory: Path) -> Resource:
    _refuse_unknown(generator, {"name", "files"}, directory)
    data = {name: base64.b64encode((directory / name).read_bytes()).decode() for name in generator["files"]}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {"name": generator["name"]},
        "data": data,
    }


def _apply(patch: Resource, resources: list[Resource], directory: Path) -> None:
    _refuse_unknown(patch, {"path", "patch", "target", "options"}, directory)
    _refuse_unknown(patch["target"], {"kind", "name"}, directory)
    target = find(resources, patch["target"]["kind"], patch["target"]["name"])
    kind = target["kind"]
    text = patch["patch"] if "patch" in patch else (directory / patch["path"]).read_text(encoding="utf-8")
    for operation in yaml.safe_load(text):
        _operate(operation, target)
    assert target["kind"] == kind or patch["options"] == {"allowKindChange": True}


def _operate(operation: Resource, target: Resource) -> None:
    """One step of RFC 6902. A path that is not there is a KeyError or an IndexError, as it is an error there."""
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    place: Any = target
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place[part]
    key: Any = int(last) if isinstance(place, list) else last
    match operation["op"]:
        case "remove":
            del place[key]
        case "add":
            assert isinstance(place, dict)
            place[key] = operation["value"]
        case "replace":
            assert place[key] is not None
            place[key] = operation["value"]
        case unknown:
            raise AssertionError(f"the renderer does not know the operation {unknown}")
