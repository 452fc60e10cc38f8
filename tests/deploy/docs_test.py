#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""What docs/operations.md and docs/security.md name exists: messages, keys, tests.
docs_test.py KVTIERD"""

import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
KVTIERD = ""
# Of systemd and of the wire, not messages of ours.
NOT_OURS = {"NRestarts", "Result=oom-kill", "Permission denied", "kvtierctl status", "pread"}


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


def operations():
    return read("docs/operations.md")


def literals():
    """Every string literal of what operators see, adjacent ones joined."""
    found = []
    for folder in ("daemon", "tiers", "client", "proto/base"):
        for path in sorted((ROOT / folder).rglob("*.cc")):
            if not re.search(r"_test\.cc$|/fake_", path.as_posix()):
                text = re.sub(r'"\s*\n\s*"', "", path.read_text(encoding="utf-8"))
                found += re.findall(r'"((?:\\.|[^"\\\n])*)"', text)
    return "\n".join(found)


class OperationsTest(unittest.TestCase):

    def test_messages_are_those_of_the_programs(self):
        tables = re.findall(r"^\| (?:the line has|you see) \|.*\n\|---.*\n((?:\|.*\n)+)",
                            operations(), re.M)
        self.assertEqual(len(tables), 2)
        known = literals()
        for text in re.findall(r"\blogs `([^`]+)`", operations()):
            self.assertTrue(text in known, f"nobody logs `{text}`")
        for row in "".join(tables).splitlines():
            seen, because = row.split(" | ")[:2]
            # A cause may quote messages, too; there, other names stand in backticks as well.
            quoted = re.findall(r"`([^`]+)`", seen)
            quoted += [text for text in re.findall(r"`([^`]+)`", because)
                       if " " in text and "=" not in text]
            for text in quoted:
                if text not in NOT_OURS:
                    self.assertTrue(text in known, f"nobody says `{text}`: {row}")

    def test_keys_exist(self):
        printed = subprocess.run([KVTIERD, "--help"], check=True, capture_output=True,
                                 text=True).stdout
        known = set(re.findall(r"--([a-z]+\.[a-z_]+)=VALUE", printed))
        sections = "|".join(sorted({key.split(".")[0] for key in known}))
        for path in ("docs/operations.md", "docs/security.md", "deploy/kubernetes/README.md"):
            named = set(re.findall(rf"`((?:{sections})\.[a-z_]+)", read(path)))
            self.assertLessEqual(named, known, path)
        self.assertIn("server.drain_timeout_ms", known)

    def test_the_unit_gives_the_time_that_is_said(self):
        unit = read("deploy/systemd/kvtierd.service")
        for line in ("TimeoutStartSec=600", "StartLimitIntervalSec=300", "StartLimitBurst=10",
                     "RestartSec=1"):
            self.assertIn(f"\n{line}\n", unit)


class SecurityTest(unittest.TestCase):

    def test_named_tests_exist(self):
        (table,) = re.findall(r"^\| claim \| test \|\n\|---.*\n((?:\|.*\n)+)",
                              read("docs/security.md"), re.M)
        files = {path.name: path for path in ROOT.rglob("*")
                 if re.search(r"_test\.(cc|py)$|/booted_checks$", path.as_posix())
                 and "/build/" not in path.as_posix()}
        for row in table.splitlines():
            cited = re.findall(r"`([\w.]+)` ([^`]*)", row.split(" | ", 1)[1])
            self.assertTrue(cited, row)
            for name, rest in cited:
                text = files[name].read_text(encoding="utf-8")
                checks = re.findall(r'"([^"]+)"', rest)
                tests = re.findall(r"\b([A-Z][A-Za-z]*[a-z][A-Z]\w*|test_\w+)", rest)
                self.assertTrue(checks + tests, row)
                for check in checks:
                    self.assertIn(f'"{check}"', text, row)
                for test in tests:
                    self.assertRegex(text, rf"TEST(_F|_P)?\(\w+, {test}\)|def {test}\(", row)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    KVTIERD = sys.argv[1]
    unittest.main(argv=sys.argv[:1])
