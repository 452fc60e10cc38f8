#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""kvtierctl doctor on this machine, with faults that a process can be given.
doctor_test.py KVTIERD KVTIERCTL"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import unittest

KVTIERD = KVTIERCTL = ""


def doctor(*arguments, config=None, **options):
    """{check: its entry}, and the exit status."""
    if config is not None:
        arguments += ("--config", "-")
    run = subprocess.run([KVTIERCTL, "--json", "doctor", *arguments], input=config,
                         capture_output=True, text=True, check=False, **options)
    return {each["check"]: each for each in json.loads(run.stdout)["checks"]}, run.returncode


def print_config(*flags):
    return subprocess.run([KVTIERD, *flags, "--print-config"], check=True, capture_output=True,
                          text=True).stdout


class DoctorTest(unittest.TestCase):

    def test_its_defaults_are_those_of_the_daemon(self):
        mine, _ = doctor()
        daemons, _ = doctor(config=print_config())
        for check in ("memory", "data directory", "gpu"):
            self.assertEqual(mine[check]["advice"], daemons[check]["advice"])
        self.assertEqual(mine["memory"]["found"].split(",")[0],
                         daemons["memory"]["found"].split(",")[0])

    def test_finds_what_a_process_was_given(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

        found, _ = doctor(preexec_fn=limit)
        self.assertEqual((found["descriptors"]["verdict"], found["descriptors"]["found"]),
                         ("warning", "256 at most"))

    def test_a_directory_of_another_user(self):
        if os.geteuid() != 0:
            print("\nSKIPPED: not root, so every directory here is this user's", flush=True)
            self.skipTest("not root")
        with tempfile.TemporaryDirectory(prefix="kvtier-doctor.") as folder:
            os.chmod(folder, 0o755)
            config = print_config(f"--server.data_dir={folder}", f"--server.run_dir={folder}")
            found, status = doctor(config=config, user=65534, group=65534, extra_groups=[])
            for check in ("data directory", "run directory"):
                self.assertEqual(found[check]["verdict"], "problem")
                self.assertIn("Permission denied", found[check]["found"])
            self.assertEqual(status, 1)
            self.assertEqual(os.listdir(folder), [])

    def test_measures_a_disk_and_leaves_nothing(self):
        with tempfile.TemporaryDirectory(prefix="kvtier-doctor.") as folder:
            config = print_config(f"--server.data_dir={folder}", f"--server.run_dir={folder}")
            found, _ = doctor("--disk", config=config)
            if found["O_DIRECT"]["verdict"] == "ok":
                self.assertRegex(found["disk speed"]["found"], r"writes [0-9.]+ GB/s")
            self.assertEqual(os.listdir(folder), [])

    def test_a_configuration_that_is_none(self):
        run = subprocess.run([KVTIERCTL, "doctor", "--config", "-"], input="[hbm", text=True,
                             capture_output=True, check=False)
        self.assertEqual(run.returncode, 2)
        self.assertIn("-: line 1", run.stderr)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    KVTIERD, KVTIERCTL = sys.argv[1:]
    unittest.main(argv=sys.argv[:1])
