#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The systemd units, without starting them.  systemd_test.py KVTIERD KVTIERCTL"""

import difflib
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

import systemd_unit
from systemd_unit import ROOT, UNITS

KVTIERD = KVTIERCTL = ""
UNIT_NAMES = ("kvtierd.service", "kvtierd@.service")
# Tenths, of 100: systemd calls less than 10 safe. What is left is named in docs/security.md.
EXPOSURE_MAX = 10


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class UnitsTest(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="kvtier-units.")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def analyze(self, unit, *arguments):
        """systemd-analyze on a unit file whose program is the one that was built."""
        text = (UNITS / unit).read_text(encoding="utf-8")
        (self.folder / unit).write_text(text.replace("/usr/bin/kvtierd", KVTIERD))
        instance = unit.replace("@.", "@0.")
        return subprocess.run(["systemd-analyze", "--no-pager", *arguments, self.folder / instance],
                              capture_output=True, text=True, check=False)

    def test_systemd_knows_every_line(self):
        for unit in UNIT_NAMES:
            done = self.analyze(unit, "verify")
            self.assertEqual((done.returncode, done.stdout + done.stderr), (0, ""), unit)

    def test_exposure_is_low(self):
        # The security verb takes the path of a template only.
        text = (UNITS / "kvtierd.service").read_text(encoding="utf-8")
        path = self.folder / "kvtierd.service"
        path.write_text(text.replace("/usr/bin/kvtierd", KVTIERD))
        done = subprocess.run(["systemd-analyze", "--no-pager", "security", "--offline=true",
                               f"--threshold={EXPOSURE_MAX}", path],
                              capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout)

    def test_the_template_differs_in_names_and_gpu_only(self):
        plain, template = ((UNITS / name).read_text().split("\n[Unit]\n")[1].splitlines()
                           for name in UNIT_NAMES)
        changed = [line for line in difflib.ndiff(plain, template) if line[0] in "+-"]
        self.assertEqual(changed, [
            "- Description=KV cache of LLM contexts on hbm, host and nvme",
            "+ Description=KV cache of LLM contexts on hbm, host and nvme, GPU %i",
            "- ExecStart=/usr/bin/kvtierd --config /etc/kvtier/kvtierd.toml",
            "+ ExecStart=/usr/bin/kvtierd --config /etc/kvtier/kvtierd.toml \\",
            "+   --server.run_dir=/run/kvtierd-%i --server.data_dir=/var/lib/kvtierd-%i \\",
            "+   --hbm.device=cuda --hbm.cuda_device_idx=%i",
            "- RuntimeDirectory=kvtierd",
            "+ RuntimeDirectory=kvtierd-%i",
            "- StateDirectory=kvtierd",
            "+ StateDirectory=kvtierd-%i",
        ])

    def test_agrees_with_the_defaults_of_kvtierd(self):
        printed = output(KVTIERD, "--print-config").splitlines()
        defaults = dict(line.split(" = ", 1) for line in printed
                        if " = " in line and not line.startswith("#"))
        unit = systemd_unit.settings("kvtierd.service")
        self.assertEqual(defaults["run_dir"], f'"/run/{unit["RuntimeDirectory"][0]}"')
        self.assertEqual(defaults["data_dir"], f'"/var/lib/{unit["StateDirectory"][0]}"')
        stop_ms = 1000 * int(unit["TimeoutStopSec"][0])
        self.assertGreaterEqual(stop_ms, int(defaults["drain_timeout_ms"]) + 5000)

    def test_the_instance_passes_flags_that_kvtierd_takes(self):
        command = systemd_unit.settings("kvtierd@.service")["ExecStart"][0].replace("%i", "3")
        flags = [word for word in command.split()[1:] if word.startswith("--") and "=" in word]
        printed = output(KVTIERD, *flags, "--print-config")
        for line in ('run_dir = "/run/kvtierd-3"', 'data_dir = "/var/lib/kvtierd-3"',
                     'device = "cuda"', "cuda_device_idx = 3"):
            self.assertIn(line, printed.splitlines())

    def test_leaves_the_system_calls_that_tiers_need(self):
        calls = systemd_unit.allowed_system_calls()
        for call in ("io_uring_setup", "io_uring_enter", "io_uring_register", "memfd_create",
                     "fallocate", "ftruncate", "flock", "madvise", "mlock", "prlimit64", "sendmsg"):
            self.assertIn(call, calls)
        for call in ("mount", "ptrace", "bpf", "setuid", "chown", "reboot", "init_module"):
            self.assertNotIn(call, calls)

    def test_keeps_what_the_daemon_cannot_do_without(self):
        unit = systemd_unit.settings("kvtierd.service")
        # In a user namespace, SO_PEERCRED could not tell tenants apart.
        self.assertEqual(unit["PrivateUsers"], ["no"])
        # Engines' containers hold mounts of it.
        self.assertEqual(unit["RuntimeDirectoryPreserve"], ["yes"])
        # The daemon answers it: daemon_lifecycle_test.
        self.assertEqual(unit["WatchdogSec"], ["30"])


class InstallTest(unittest.TestCase):

    def test_installs_below_a_root_and_keeps_a_configuration(self):
        with tempfile.TemporaryDirectory(prefix="kvtier-install.") as folder:
            build, root = pathlib.Path(folder, "build"), pathlib.Path(folder, "root")
            for program, where in ((KVTIERD, "daemon"), (KVTIERCTL, "client/ctl")):
                (build / where).mkdir(parents=True)
                (build / where / pathlib.Path(program).name).symlink_to(program)
            install = [ROOT / "deploy/systemd/install", "--root", root, "--build", build]
            self.assertEqual(output(*install), "")
            config = root / "etc/kvtier/kvtierd.toml"
            self.assertEqual(output(root / "usr/bin/kvtierd", "--config", config, "--print-config"),
                             output(KVTIERD, "--print-config"))
            self.assertEqual(output(root / "usr/bin/kvtierctl", "version"),
                             output(KVTIERCTL, "version"))
            installed = {path.relative_to(root).as_posix()
                         for path in root.rglob("*") if path.is_file()}
            self.assertEqual(installed, {
                "etc/kvtier/kvtierd.toml", "usr/bin/kvtierctl", "usr/bin/kvtierd",
                "usr/lib/systemd/system/kvtierd.service",
                "usr/lib/systemd/system/kvtierd@.service",
                "usr/lib/sysusers.d/kvtier.conf", "usr/lib/tmpfiles.d/kvtier.conf",
                "usr/share/kvtier/metrics.conf", "usr/share/kvtier/tcp.conf"})
            config.write_text("# mine\n")
            self.assertIn("kept", output(*install))
            self.assertEqual(config.read_text(), "# mine\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    if shutil.which("systemd-analyze") is None:
        print("SKIPPED: no systemd-analyze here (package systemd)")
        sys.exit(77)
    KVTIERD, KVTIERCTL = (str(pathlib.Path(path).resolve()) for path in sys.argv[1:])
    unittest.main(argv=sys.argv[:1])
