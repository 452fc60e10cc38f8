#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The manifests of deploy/kubernetes: valid, narrow, and right about the daemon they start.
kubernetes_test.py KVTIERD KVTIERCTL [--may-skip]

Needs kubernetes-validate, which build/venv has. kubectl is used where there is one."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
import unittest

import systemd_unit

ROOT = pathlib.Path(__file__).resolve().parents[2]
KVTIERD = KVTIERCTL = ""
MANIFESTS = ROOT / "deploy" / "kubernetes"
# The oldest release whose fields are used, and the newest that is known.
VERSIONS = ("1.29", "1.37")
HOST_PATHS = {"/run/kvtierd", "/var/lib/kvtierd"}
GIB = 1 << 30


def output(*command, **options):
    return subprocess.run(command, check=True, capture_output=True, text=True, **options).stdout


def skip(test, reason):
    """Skips one test of several, and says so where tests/run looks for it."""
    print(f"\nSKIPPED: {test.id()}: {reason}", flush=True)
    test.skipTest(reason)


def bytes_of(text):
    """\"6Gi\" and \"1 GiB\" as numbers."""
    number, unit = re.fullmatch(r"(\d+) ?([KMGT]i)?B?", str(text)).groups()
    return int(number) << {None: 0, "Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}[unit]


def roots(folder):
    """All that can be applied: the base, the examples, the base with each component. `folder` gets
    a copy of the manifests."""
    copy = pathlib.Path(folder) / "manifests"
    shutil.copytree(MANIFESTS, copy)
    found = [copy / "base", *sorted((copy / "examples").iterdir())]
    for component in sorted((copy / "components").iterdir()):
        root = copy / "with" / component.name
        root.mkdir(parents=True)
        (root / "kustomization.yaml").write_text(
            f"resources: [../../base]\ncomponents: [../../components/{component.name}]\n")
        found.append(root)
    return found


def every_rendering():
    with tempfile.TemporaryDirectory(prefix="kvtier-manifests.") as folder:
        return [(root.name, kustomize.render(root)) for root in roots(folder)]


def daemon_pod(objects):
    (pod,) = kustomize.pods(objects)
    return pod


def main_container(objects):
    (container,) = daemon_pod(objects)["containers"]
    return container


def configuration_of(objects):
    """What kvtierd makes of the ConfigMap and the environment: {"section.key": value}."""
    (config,) = [each for each in objects if each["kind"] == "ConfigMap"]
    environment = {each["name"]: each["value"] for each in main_container(objects).get("env", [])}
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(config["data"]["kvtierd.toml"])
        file.flush()
        printed = output(KVTIERD, "--config", file.name, "--print-config", env=environment)
    return tomllib.loads(printed)


class RenderingTest(unittest.TestCase):

    def test_every_object_fits_its_schema(self):
        for name, objects in every_rendering():
            for each in objects:
                if each["kind"] == "PodMonitor":  # of an operator, not of Kubernetes
                    continue
                for version in VERSIONS:
                    with self.subTest(name=name, kind=each["kind"], version=version):
                        kubernetes_validate.validate(each, version, strict=True)

    def test_renders_as_kubectl_does(self):
        if shutil.which("kubectl") is None:
            skip(self, "no kubectl here: the renderer is compared where there is one")

        def by_name(objects):
            return sorted(objects, key=lambda each: (each["kind"], each["metadata"]["name"]))

        with tempfile.TemporaryDirectory(prefix="kvtier-manifests.") as folder:
            for root in roots(folder):
                theirs = list(yaml.safe_load_all(output("kubectl", "kustomize", root)))
                self.assertEqual(by_name(kustomize.render(root)), by_name(theirs), root)

    def test_every_file_is_used(self):
        for listing in MANIFESTS.rglob("kustomization.yaml"):
            (kustomization,) = kustomize.load_all(listing)
            used = set(kustomization.get("resources", [])) | {"kustomization.yaml"}
            for entry in kustomization.get("configMapGenerator", []):
                used |= set(entry["files"])
            there = {path.name for path in listing.parent.iterdir() if path.is_file()}
            self.assertEqual(there, {name for name in used if "/" not in name}, listing)


class RightsTest(unittest.TestCase):

    def test_pods_have_no_more_than_they_need(self):
        for name, objects in every_rendering():
            for pod in kustomize.pods(objects):
                with self.subTest(name=name):
                    for key in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
                        self.assertNotIn(key, pod)
                    self.assertIs(pod["automountServiceAccountToken"], False)
                    self.assertIs(pod["securityContext"]["runAsNonRoot"], True)
                    self.assertIn("seccompProfile", pod["securityContext"])
                    paths = {volume["hostPath"]["path"] for volume in pod["volumes"]
                             if "hostPath" in volume}
                    self.assertLessEqual(paths, HOST_PATHS)
                    for container in pod.get("initContainers", []) + pod["containers"]:
                        self.check_container(container)

    def check_container(self, container):
        context = container["securityContext"]
        self.assertIs(context["allowPrivilegeEscalation"], False)
        self.assertNotIn("privileged", context)
        self.assertEqual(context["capabilities"]["drop"], ["ALL"])
        # Only the container that makes the directories is root, and may do that alone.
        if container["name"] == "directories":
            self.assertEqual(context["capabilities"]["add"], ["CHOWN", "FOWNER"])
        else:
            self.assertNotIn("add", context["capabilities"])
            self.assertNotIn("runAsUser", context)
        resources = container["resources"]
        self.assertEqual(resources["requests"]["memory"], resources["limits"]["memory"])
        self.assertIn("cpu", resources["requests"])
        self.assertNotIn("cpu", resources["limits"])
        self.assertRegex(container["image"], r":\d")

    def test_the_daemon_writes_to_its_directories_only(self):
        for container in daemon_pod(base())["initContainers"] + daemon_pod(base())["containers"]:
            self.assertIs(container["securityContext"]["readOnlyRootFilesystem"], True)
            writable = {mount["mountPath"] for mount in container["volumeMounts"]
                        if not mount.get("readOnly")}
            self.assertEqual(writable, HOST_PATHS)

    def test_no_network(self):
        (policy,) = [each for each in base() if each["kind"] == "NetworkPolicy"]
        (daemon_set,) = [each for each in base() if each["kind"] == "DaemonSet"]
        self.assertEqual(policy["spec"]["podSelector"]["matchLabels"],
                         daemon_set["spec"]["template"]["metadata"]["labels"])
        self.assertEqual(policy["spec"]["policyTypes"], ["Ingress", "Egress"])
        self.assertNotIn("ingress", policy["spec"])
        self.assertNotIn("egress", policy["spec"])

    def test_metrics_are_let_in_where_the_daemon_has_them(self):
        (objects,) = [objects for name, objects in every_rendering() if name == "monitoring"]
        (port,) = main_container(objects)["ports"]
        listen = configuration_of(objects)["metrics"]["listen"]
        self.assertEqual(listen, f"0.0.0.0:{port['containerPort']}")
        (policy,) = [each for each in objects if each["kind"] == "NetworkPolicy"]
        (rule,) = policy["spec"]["ingress"]
        self.assertEqual(rule["ports"], [{"protocol": "TCP", "port": port["name"]}])
        self.assertTrue(rule["from"])
        self.assertNotIn("egress", policy["spec"])
        (monitor,) = [each for each in objects if each["kind"] == "PodMonitor"]
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        self.assertEqual(endpoint["port"], port["name"])
        (daemon_set,) = [each for each in objects if each["kind"] == "DaemonSet"]
        self.assertLessEqual(
            monitor["spec"]["selector"]["matchLabels"].items(),
            daemon_set["spec"]["template"]["metadata"]["labels"].items())

    def test_seccomp_profile_is_the_filter_of_the_systemd_unit(self):
        profile = json.loads((MANIFESTS / "seccomp/kvtierd.json").read_text())
        (allowed,) = profile["syscalls"]
        self.assertEqual(profile["defaultAction"], "SCMP_ACT_ERRNO")
        self.assertEqual(allowed["action"], "SCMP_ACT_ALLOW")
        self.assertIn("io_uring_setup", allowed["names"])
        if not systemd_unit.is_debian_12s():
            skip(self, "not systemd 252, whose sets of system calls the profile has")
        self.assertEqual(allowed["names"], sorted(systemd_unit.allowed_system_calls()))


class DaemonTest(unittest.TestCase):
    """What the manifests say of kvtierd, asked of the program."""

    def test_configurations_are_valid(self):
        for name, objects in every_rendering():
            if name == "engine":
                continue
            with self.subTest(name=name):
                config = configuration_of(objects)
                self.assertEqual({config["server"]["run_dir"], config["server"]["data_dir"]},
                                 HOST_PATHS)
                self.assertEqual(config["hbm"]["device"],
                                 "cuda" if name in ("cuda", "cdi", "gpu-node") else "cpu")

    def test_the_container_reads_the_file_that_is_mounted(self):
        container = main_container(base())
        self.assertEqual(container["args"], ["--config", "/etc/kvtier/kvtierd.toml"])
        self.assertIn("/etc/kvtier", [mount["mountPath"] for mount in container["volumeMounts"]])

    def test_memory_limit_holds_the_tiers(self):
        config = configuration_of(base())
        tiers = sum(bytes_of(config[tier]["capacity_bytes"]) for tier in ("hbm", "host"))
        limit = bytes_of(main_container(base())["resources"]["limits"]["memory"])
        self.assertGreaterEqual(limit, tiers + GIB)

    def test_huge_pages_hold_host(self):
        (objects,) = [objects for name, objects in every_rendering() if name == "hugepages"]
        host = configuration_of(objects)["host"]
        self.assertEqual(host["huge_pages"], "reserved")
        resources = main_container(objects)["resources"]
        for part in ("requests", "limits"):
            self.assertGreaterEqual(bytes_of(resources[part]["hugepages-2Mi"]),
                                    bytes_of(host["capacity_bytes"]))

    def test_time_to_stop_is_more_than_the_daemon_takes(self):
        drain_ms = configuration_of(base())["server"]["drain_timeout_ms"]
        grace_seconds = daemon_pod(base())["terminationGracePeriodSeconds"]
        self.assertGreaterEqual(1000 * grace_seconds, drain_ms + 5000)

    def test_probes_tell_a_daemon_that_serves(self):
        container = main_container(base())
        probes = [container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
        program, *arguments = probes[0]["exec"]["command"]
        self.assertEqual(program, "kvtierctl")
        timeout = float(arguments[arguments.index("--timeout") + 1])
        for probe in probes:
            self.assertEqual(probe["exec"], probes[0]["exec"])
            self.assertLess(timeout, probe["timeoutSeconds"])
        self.assertGreaterEqual(probes[0]["periodSeconds"] * probes[0]["failureThreshold"], 600)
        with Kvtierd(KVTIERD, ["--nvme.enabled=false"]) as daemon:
            command = [KVTIERCTL, "--run-dir", daemon.run_dir, *arguments]

            def status():
                return subprocess.run(command, capture_output=True, check=False).returncode

            self.assertEqual(status(), 0)
            os.kill(daemon.pid, signal.SIGSTOP)
            self.assertEqual(status(), 124, "alive, but stuck")
            daemon.kill()
            self.assertEqual(status(), 3, "dead")

    def test_engines_are_tenants_and_no_admins(self):
        daemon = daemon_pod(base())["securityContext"]
        (engine,) = kustomize.pods(kustomize.render(MANIFESTS / "examples/engine"))
        uid = engine["securityContext"]["runAsUser"]
        self.assertNotIn(uid, (0, daemon["runAsUser"]))
        self.assertIn(uid, configuration_of(base())["tenant"][0]["uids"])
        self.assertIn(daemon["runAsGroup"], engine["securityContext"]["supplementalGroups"])
        (mount,) = engine["containers"][0]["volumeMounts"]
        self.assertIs(mount["readOnly"], True)
        self.assertEqual(mount["mountPath"], "/run/kvtierd")


def base():
    return kustomize.render(MANIFESTS / "base")


if __name__ == "__main__":
    may_skip = "--may-skip" in sys.argv
    programs = [argument for argument in sys.argv[1:] if argument != "--may-skip"]
    if len(programs) != 2:
        sys.exit(__doc__)
    try:
        import kubernetes_validate
        import yaml

        import kustomize
    except ImportError as error:
        if not may_skip:
            raise
        print(f"SKIPPED: {error}; deploy/setup --python makes an environment that has it")
        sys.exit(77)
    sys.path.insert(0, str(ROOT / "tests" / "replay"))
    from kvtierd_process import Kvtierd

    KVTIERD, KVTIERCTL = (str(pathlib.Path(path).resolve()) for path in programs)
    unittest.main(argv=sys.argv[:1])
