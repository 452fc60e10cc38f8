#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the pods of deploy/kubernetes as containers: the same users, capabilities, system calls,
mounts, commands and probes, by runc instead of a kubelet.
container_test.py KVTIERD KVTIERCTL [--may-skip]"""

import json
import os
import pathlib
import subprocess
import sys
import time

from overlay_root import ROOT, OverlayRoot, enter_namespace, run, skip

MANIFESTS = ROOT / "deploy" / "kubernetes"
DEADLINE_SECONDS = 20
# Run in an engine's container: what the daemon says to its user. 0: served, 2: forbidden, as
# proto/base/handle_wire.h has it; "refused" by the socket's mode.
HELLO = """
import socket, struct, sys
handles = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    handles.connect("/run/kvtierd/handles.sock")
except PermissionError:
    sys.exit("refused")
# Who is forbidden is told so and cut off, perhaps before this is sent: then errors come first.
try:
    handles.send(struct.pack("<6I", 2, 1, 0, 0, 0, 0))
except (BrokenPipeError, ConnectionResetError):
    pass
try:
    reply = handles.recv(56)
except ConnectionResetError:
    reply = handles.recv(56)
print(struct.unpack_from("<2I", reply)[1])
"""
OPEN = """
import socket, sys
socket.socket(socket.AF_UNIX).connect("/run/kvtierd/" + sys.argv[1])
"""
REPLACE = "import os; os.unlink('/run/kvtierd/kvtierd.sock')"
# What most runtimes' own profile does about io_uring.
WITHOUT_IO_URING = {
    "defaultAction": "SCMP_ACT_ALLOW",
    "syscalls": [{"names": ["io_uring_setup", "io_uring_enter", "io_uring_register"],
                  "action": "SCMP_ACT_ERRNO"}],
}


def expect(wanted, actual, what):
    print(f"{'ok ' if actual == wanted else 'BAD'} {what}: {actual!r}", flush=True)
    if actual != wanted:
        raise AssertionError(f"{what}: {actual!r}, wanted {wanted!r}")


class Node:
    """Directories of a host, and containers on it."""

    def __init__(self, root):
        self.root = root.path
        self.folder = root.folder
        self.host = self.folder / "host"
        self._state = self.folder / "runc"
        self._containers = []

    def runc(self, *arguments, **options):
        return run("runc", "--root", self._state, *arguments, **options)

    def bundle(self, name, pod, container, seccomp, command=None):
        folder = self.folder / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(
            specification(self, pod, container, seccomp, command)))
        return folder

    def run_once(self, name, *arguments, **options):
        """Runs a container to its end: its exit status and what it printed."""
        folder = self.bundle(name, *arguments, **options)
        done = self.runc("run", "--bundle", folder, f"kvtier-{os.getpid()}-{name}",
                         stdin=subprocess.DEVNULL, capture_output=True, text=True)
        return done.returncode, (done.stdout + done.stderr).strip()

    def start(self, name, *arguments, **options):
        """Starts a container; its process is a child of this one."""
        folder = self.bundle(name, *arguments, **options)
        log = open(folder / "log", "wb")
        process = subprocess.Popen(
            ["runc", "--root", self._state, "run", "--bundle", folder,
             f"kvtier-{os.getpid()}-{name}"], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        log.close()
        self._containers.append((name, process))
        return process

    def log(self, name):
        return (self.folder / name / "log").read_text(errors="replace")

    def exec(self, name, command):
        return self.runc("exec", f"kvtier-{os.getpid()}-{name}", *command, capture_output=True,
                         stdin=subprocess.DEVNULL, text=True)

    def end(self):
        for name, process in self._containers:
            if process.poll() is None:
                self.runc("delete", "--force", f"kvtier-{os.getpid()}-{name}",
                          capture_output=True)
                process.wait()


def specification(node, pod, container, seccomp, command):
    """The OCI runtime's configuration of a pod's container."""
    context = pod["securityContext"] | container["securityContext"]
    added = [f"CAP_{name}" for name in context["capabilities"].get("add", [])]
    entry = container.get("command", ["/usr/bin/kvtierd"])
    arguments = command or entry + container.get("args", [])
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"]},
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]},
    ]
    for mount in container["volumeMounts"]:
        (volume,) = [each for each in pod["volumes"] if each["name"] == mount["name"]]
        source = volume["hostPath"]["path"] if "hostPath" in volume else "/config"
        mounts.append({"destination": mount["mountPath"], "type": "bind",
                       "source": f"{node.host}{source}",
                       "options": ["rbind", "ro" if mount.get("readOnly") else "rw"]})
    return {
        "ociVersion": "1.0.2",
        "root": {"path": str(node.root), "readonly": context.get("readOnlyRootFilesystem", False)},
        "process": {
            "user": {"uid": context["runAsUser"], "gid": context["runAsGroup"],
                     "additionalGids": context.get("supplementalGroups", [])},
            "args": arguments, "cwd": "/", "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin",
                    *(f"{each['name']}={each['value']}" for each in container.get("env", []))],
            "noNewPrivileges": not context["allowPrivilegeEscalation"],
            "capabilities": {kind: added for kind in ("bounding", "effective", "permitted")},
        },
        "mounts": mounts,
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts", "network")],
            "seccomp": seccomp,
        },
    }


def await_probe(node, name, process, probe):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while node.exec(name, probe).returncode != 0:
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"{name} does not get ready:\n{node.log(name)}")
        time.sleep(0.05)


def io_engine(node, name):
    return json.loads(node.exec(name, ["kvtierctl", "--json", "status"]).stdout)["io_engine"]


def stop(node, name, process):
    node.runc("kill", f"kvtier-{os.getpid()}-{name}", "TERM")
    expect(0, process.wait(timeout=30), f"{name}: exit status after SIGTERM")


def check_directories(node, pod):
    (directories,) = pod["initContainers"]
    for times in ("first", "second"):
        expect((0, ""), node.run_once(f"directories-{times}", pod, directories, WITHOUT_IO_URING),
               f"init container, {times} time")
    for path, mode in (("run/kvtierd", 0o750), ("var/lib/kvtierd", 0o700)):
        info = (node.host / path).stat()
        expect((10001, 10001, mode), (info.st_uid, info.st_gid, info.st_mode & 0o7777), path)


def check_engines(node):
    (pod,) = kustomize.pods(kustomize.render(MANIFESTS / "examples/engine"))
    (engine,) = pod["containers"]

    def hello(name, **context):
        other = pod | {"securityContext": pod["securityContext"] | context}
        return node.run_once(name, other, engine, WITHOUT_IO_URING,
                             command=["/usr/bin/python3", "-c", HELLO])

    def attempt(name, *command):
        status, _ = node.run_once(name, pod, engine, WITHOUT_IO_URING,
                                  command=["/usr/bin/python3", "-c", *command])
        return status

    expect((0, "0"), hello("engine"), "the engine of the example is served")
    expect((0, "2"), hello("other-uid", runAsUser=20002), "a uid without a tenant is forbidden")
    expect((1, "refused"), hello("no-group", supplementalGroups=[]),
           "an engine without the group does not get in")
    expect(0, attempt("engine-socket", OPEN, "kvtierd.sock"), "the engine opens kvtierd.sock")
    expect(1, attempt("engine-admin", OPEN, "admin.sock"), "the engine does not open admin.sock")
    expect(1, attempt("engine-replaces", REPLACE), "the engine cannot remove a socket")


def check_daemon(node, pod):
    (container,) = pod["containers"]
    probe = container["readinessProbe"]["exec"]["command"]
    profile = json.loads((MANIFESTS / "seccomp/kvtierd.json").read_text())
    process = node.start("profile", pod, container, profile)
    await_probe(node, "profile", process, probe)
    expect("io_uring", io_engine(node, "profile"), "nvme with seccomp/kvtierd.json")
    replay = ["kvtierctl", "replay", "--generate", "--sessions", "2", "--requests", "6"]
    expect(0, node.exec("profile", replay).returncode, "a replay, every byte checked")
    check_engines(node)
    stop(node, "profile", process)
    expect([], [line for line in node.log("profile").splitlines() if not line.startswith("{")],
           "lines of its log that are not JSON")
    process = node.start("default", pod, container, WITHOUT_IO_URING)
    await_probe(node, "default", process, probe)
    expect("pread", io_engine(node, "default"), "nvme where io_uring is refused")
    expect(1, node.log("default").count("no io_uring, using a pool of pread threads"),
           "lines that say so")
    stop(node, "default", process)


def main(kvtierd, kvtierctl):
    objects = kustomize.render(MANIFESTS / "base")
    (pod,) = kustomize.pods(objects)
    (config,) = [each for each in objects if each["kind"] == "ConfigMap"]
    with OverlayRoot(kvtierd, kvtierctl) as root:
        node = Node(root)
        for path in ("run/kvtierd", "var/lib/kvtierd", "config"):
            (node.host / path).mkdir(parents=True)
        # Smaller tiers: the test's machine may be.
        (node.host / "config/kvtierd.toml").write_text(
            config["data"]["kvtierd.toml"].replace("GiB", "MiB").replace("1 MiB", "64 MiB")
            .replace("4 MiB", "64 MiB"))
        try:
            status, text = node.run_once("probe", pod, pod["initContainers"][0], WITHOUT_IO_URING,
                                         command=["/bin/true"])
            if status == 0:
                check_directories(node, pod)
                check_daemon(node, pod)
        finally:
            node.end()
    if status != 0:
        print(text)
        skip("containers do not start here")


if __name__ == "__main__":
    may_skip = "--may-skip" in sys.argv
    programs = [argument for argument in sys.argv[1:] if argument != "--may-skip"]
    if len(programs) != 2:
        sys.exit(__doc__)
    enter_namespace("runc", "runc")
    try:
        import kustomize
    except ImportError as error:
        if not may_skip:
            raise
        skip(f"{error}; deploy/setup --python makes an environment that has it")
    main(*(pathlib.Path(path).resolve() for path in programs))
