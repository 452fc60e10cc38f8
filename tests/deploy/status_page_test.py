#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The status page in a real browser, beside what kvtierctl says.
status_page_test.py KVTIERD KVTIERCTL [--screenshot FILE.png]
Needs Debian's chromium, which no package of deploy/deps.apt brings; without it this is skipped."""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
KVTIERD = KVTIERCTL = SCREENSHOT = ""

sys.path.insert(0, str(ROOT / "tests" / "replay"))
from kvtierd_process import Kvtierd  # noqa: E402


def chromium(*arguments):
    with tempfile.TemporaryDirectory(prefix="kvtier-chromium.") as profile:
        return subprocess.run(
            ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1100,900",
             f"--user-data-dir={profile}", "--virtual-time-budget=9000", *arguments],
            check=True, capture_output=True, text=True, timeout=120).stdout


def cells_of(dom, table):
    """The rows of a table of the page, as lists of texts."""
    (body,) = re.findall(rf'<tbody id="{table}">(.*?)</tbody>', dom, re.S)
    return [[re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<td>(.*?)</td>", row, re.S)]
            for row in re.findall(r"<tr>(.*?)</tr>", body, re.S)]


class StatusPageTest(unittest.TestCase):

    def test_shows_what_kvtierctl_says(self):
        with Kvtierd(KVTIERD, ["--metrics.listen=127.0.0.1:0", "--hbm.capacity_bytes=4MiB",
                               "--hbm.segment_bytes=1MiB"]) as daemon:
            (port,) = re.findall(r"metrics and status page .*port=(\d+)", daemon.log_tail())
            ctl = [KVTIERCTL, "--run-dir", daemon.run_dir]
            subprocess.run([*ctl, "replay", "--generate", "--sessions", "4", "--requests", "40"],
                           check=True, capture_output=True)
            url = f"http://127.0.0.1:{port}/"
            dom = chromium("--dump-dom", url)
            tiers = json.loads(subprocess.run([*ctl, "--json", "tiers"], check=True,
                                              capture_output=True, text=True).stdout)
            if SCREENSHOT:
                self.take_screenshot(ctl, url)
        self.assertRegex(dom, r'<span id="state" class="good">serving</span>')
        shown = {row[0]: row for row in cells_of(dom, "tiers")}
        self.assertEqual(set(shown), {"hbm", "host", "nvme"})
        for tier in tiers["tiers"]:
            row = shown[tier["tier"]]
            self.assertEqual(row[5:9], [str(tier[key]) for key in (
                "block_count", "hit_block_count", "evicted_block_count", "corrupt_block_count")])
        moved = {row[0]: row[3] for row in cells_of(dom, "links")}
        for link in tiers["links"]:
            self.assertEqual(moved[f"{link['source']} \u2192 {link['target']}"],
                             str(link["moved_block_count"]))
        asked = tiers["store"]["lookup_block_count"]
        self.assertGreater(asked, 0)
        self.assertIn(f"of {asked} blocks looked up", dom)

    def take_screenshot(self, ctl, url):
        """Of a daemon at work. The browser's time runs ahead: the graph is of seconds."""
        with subprocess.Popen([*ctl, "replay", "--generate", "--sessions", "200", "--requests",
                               "20000", "--speed", "20"], stdout=subprocess.DEVNULL) as replay:
            chromium("--virtual-time-budget=500000", f"--screenshot={SCREENSHOT}", url)
            replay.terminate()


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if "--screenshot" in arguments:
        at = arguments.index("--screenshot")
        SCREENSHOT = str(pathlib.Path(arguments[at + 1]).resolve())
        del arguments[at:at + 2]
    if len(arguments) != 2:
        sys.exit(__doc__)
    if shutil.which("chromium") is None:
        print("SKIPPED: no chromium here (apt-get install chromium)")
        sys.exit(77)
    KVTIERD, KVTIERCTL = arguments
    unittest.main(argv=sys.argv[:1])
