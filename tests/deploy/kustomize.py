# SPDX-License-Identifier: Apache-2.0
"""Renders the part of kustomize that deploy/kubernetes uses, and refuses the rest.

Debian has no kustomize. Where kubectl is installed, kubernetes_test.py compares the two."""

import copy
import hashlib
import json
import pathlib

import yaml

KNOWN = {"apiVersion", "kind", "namespace", "resources", "components", "configMapGenerator",
         "patches", "images"}
CLUSTER_WIDE = {"Namespace", "PriorityClass"}


def load_all(path):
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
            if document is not None]


def render(folder):
    """The objects of a kustomization, in the order they are named."""
    return _apply(pathlib.Path(folder), [])


def _apply(folder, objects):
    (kustomization,) = load_all(folder / "kustomization.yaml")
    if unknown := set(kustomization) - KNOWN:
        raise ValueError(f"{folder}: not supported here: {sorted(unknown)}")
    for name in kustomization.get("resources", []):
        path = folder / name
        objects = objects + (render(path) if path.is_dir() else load_all(path))
    objects = objects + [_config_map(folder, entry)
                         for entry in kustomization.get("configMapGenerator", [])]
    for name in kustomization.get("components", []):
        objects = _apply(folder / name, objects)
    for patch in kustomization.get("patches", []):
        objects = _patch(objects, patch)
    for image in kustomization.get("images", []):
        _rename_image(objects, image)
    if "namespace" in kustomization:
        for each in objects:
            if each["kind"] not in CLUSTER_WIDE:
                each["metadata"]["namespace"] = kustomization["namespace"]
    return _resolve(objects)


def _config_map(folder, entry):
    if set(entry) != {"name", "files"}:
        raise ValueError(f"configMapGenerator {entry}: only name and files are supported here")
    data = {pathlib.Path(name).name: (folder / name).read_text(encoding="utf-8")
            for name in entry["files"]}
    # As kustomize hashes: Go's JSON of these three, without the name, some digits as letters.
    encoded = json.dumps({"data": data, "kind": "ConfigMap", "name": ""},
                         sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&":
        encoded = encoded.replace(character, f"\\u{ord(character):04x}")
    digest = hashlib.sha256(encoded.encode()).hexdigest()[:10]
    suffix = digest.translate(str.maketrans("013ae", "ghkmt"))
    return {"apiVersion": "v1", "kind": "ConfigMap", "data": data,
            "metadata": {"name": f"{entry['name']}-{suffix}"}, "generated-from": entry["name"]}


def _resolve(objects):
    """Gives references to generated ConfigMaps their names."""
    names = {each.pop("generated-from"): each["metadata"]["name"]
             for each in objects if "generated-from" in each}
    for pod in pods(objects):
        for volume in pod.get("volumes", []):
            if "configMap" in volume:
                name = volume["configMap"]["name"]
                volume["configMap"]["name"] = names.get(name, name)
    return objects


def pods(objects):
    """The pod specs in them."""
    return [each["spec"]["template"]["spec"] for each in objects
            if each["kind"] in ("DaemonSet", "Deployment")]


def _rename_image(objects, image):
    if set(image) != {"name", "newName", "newTag"}:
        raise ValueError(f"images {image}: only name, newName and newTag are supported here")
    for pod in pods(objects):
        for container in pod.get("initContainers", []) + pod["containers"]:
            if container["image"].split(":")[0] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"


def _patch(objects, patch):
    target = patch["target"]
    found = [each for each in objects if each["kind"] == target["kind"]
             and each["metadata"]["name"] == target["name"]]
    if len(found) != 1:
        raise ValueError(f"patch of {target}: {len(found)} objects match")
    for step in yaml.safe_load(patch["patch"]):
        if step["op"] != "add":
            raise ValueError(f"patch {step['op']}: only add is supported here")
        *path, last = [part.replace("~1", "/").replace("~0", "~")
                       for part in step["path"].split("/")[1:]]
        place = found[0]
        for part in path:
            place = place[int(part)] if isinstance(place, list) else place[part]
        value = copy.deepcopy(step["value"])
        if isinstance(place, list):
            place.insert(len(place) if last == "-" else int(last), value)
        else:
            place[last] = value
    return objects
