#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""What deploy/monitoring names exists, and promtool likes it. monitoring_test.py KVTIERD
promtool comes from deploy/setup --tools; without it, the tests that need it are skipped."""

import json
import pathlib
import re
import subprocess
import sys
import unittest
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
MONITORING = ROOT / "deploy/monitoring"
PROMTOOL = ROOT / "build/tools/prometheus/usr/bin/promtool"
KVTIERD = ""

sys.path.insert(0, str(ROOT / "tests" / "replay"))
from kvtierd_process import Kvtierd  # noqa: E402


def promtool(*arguments, stdin=None):
    return subprocess.run([PROMTOOL, *arguments], input=stdin, capture_output=True, text=True,
                          check=False, cwd=MONITORING)


def names_in(text):
    return set(re.findall(r"\bkvtier_[a-z_]+", text))


def scrape():
    """What a daemon that nobody has used exposes."""
    with Kvtierd(KVTIERD, ["--metrics.listen=127.0.0.1:0"]) as daemon:
        (port,) = re.findall(r"metrics and status page .*port=(\d+)", daemon.log_tail())
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            return answer.read().decode()


class NamesTest(unittest.TestCase):

    def test_every_name_that_is_used_exists(self):
        exposed = set(re.findall(r"^# TYPE (\S+)", scrape(), re.M))
        self.assertGreater(len(exposed), 25)
        dashboard = json.loads((MONITORING / "grafana/dashboards/kvtier.json").read_text())
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                used = names_in(target["expr"])
                self.assertTrue(used, panel["title"])
                self.assertLessEqual(used, exposed, panel["title"])
        rules = (MONITORING / "alerts.yml").read_text()
        recorded = set(re.findall(r"record: \w+:(kvtier_\w+):", rules))
        self.assertLessEqual(names_in(rules), exposed | recorded)
        documented = names_in((ROOT / "docs/operations.md").read_text())
        self.assertLessEqual(documented, exposed)

    def test_panels_do_not_overlap(self):
        dashboard = json.loads((MONITORING / "grafana/dashboards/kvtier.json").read_text())
        taken = set()
        for panel in dashboard["panels"]:
            at = panel["gridPos"]
            self.assertLessEqual(at["x"] + at["w"], 24, panel["title"])
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"])
                     for y in range(at["y"], at["y"] + at["h"])}
            self.assertFalse(cells & taken, panel["title"])
            taken |= cells


class PromtoolTest(unittest.TestCase):

    def setUp(self):
        if not PROMTOOL.exists():
            print("\nSKIPPED: no promtool; deploy/setup --tools unpacks it", flush=True)
            self.skipTest("no promtool")

    def test_exposition_is_clean(self):
        checked = promtool("check", "metrics", stdin=scrape())
        self.assertEqual((checked.returncode, checked.stdout + checked.stderr), (0, ""))

    def test_configuration_and_rules_are_valid(self):
        for arguments in (["check", "config", "prometheus.yml"], ["check", "rules", "alerts.yml"],
                          ["test", "rules", "alerts_test.yml"]):
            checked = promtool(*arguments)
            self.assertEqual(checked.returncode, 0, checked.stdout + checked.stderr)

    def test_every_alert_is_seen_firing(self):
        rules = (MONITORING / "alerts.yml").read_text()
        tests = (MONITORING / "alerts_test.yml").read_text()
        for alert in re.findall(r"- alert: (\w+)", rules):
            self.assertRegex(tests, rf"alertname: {alert}\n        exp_alerts:")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    KVTIERD = sys.argv[1]
    unittest.main(argv=sys.argv[:1])
