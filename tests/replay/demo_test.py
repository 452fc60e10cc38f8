#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The demo must end well and say so in both forms, and exit statuses must be as documented.

Usage: demo_test.py KVTIERD KVTIERCTL
"""

import json
import subprocess
import sys
import tempfile

from kvtierd_process import Kvtierd


def expect(condition, message):
    if not condition:
        raise AssertionError(message)


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False)


def check_demo(kvtierd, kvtierctl, json_flag):
    with tempfile.TemporaryDirectory(prefix="kvtier-demo.") as root:
        demo = run(kvtierctl, *json_flag, "demo", "--daemon", kvtierd, "--dir", root)
        expect(demo.returncode == 0, f"demo: {demo.returncode}\n{demo.stdout}\n{demo.stderr}")
    return demo


def check_exit_statuses(kvtierd, kvtierctl):
    expect(run(kvtierctl).returncode == 2, "no command is a usage error")
    expect(run(kvtierctl, "where").returncode == 2, "where needs a context or a key")
    expect(run(kvtierctl, "--help").returncode == 0, "help")
    absent = run(kvtierctl, "--run-dir", "/nonexistent", "status")
    expect(absent.returncode == 3, f"no daemon: {absent.returncode}")
    with Kvtierd(kvtierd, []) as daemon:
        ctl = [kvtierctl, "--run-dir", str(daemon.run_dir)]
        for command in ["status", "tiers", "contexts", "version"]:
            shown = run(*ctl, command)
            expect(shown.returncode == 0 and shown.stdout, f"{command}: {shown.stderr}")
            json.loads(run(*ctl, command, "--json").stdout)
        expect(run(*ctl, "where", "--context", "nobody").returncode == 4, "no such context")
        expect(run(*ctl, "where", "--key", "5a" * 32).returncode == 4, "no such key")
        expect(run(*ctl, "where", "--key", "xyz").returncode == 2, "not a key")
        expect(run(*ctl, "replay", "/nonexistent.jsonl").returncode == 4, "no such trace")
        daemon.stop()


def main():
    kvtierd, kvtierctl = sys.argv[1:]
    check_exit_statuses(kvtierd, kvtierctl)
    text = check_demo(kvtierd, kvtierctl, []).stdout
    for part in ["Tiers after the first part:", "kill -9", "RESUMED AFTER KILL -9", "What to try"]:
        expect(part in text, f"the demo does not say {part!r}:\n{text}")
    report = json.loads(check_demo(kvtierd, kvtierctl, ["--json"]).stdout)
    expect(report["wrong_block_count"] == 0, "wrong bytes")
    expect(report["resumed"]["nvme_block_count"] > 0, "nothing came back from nvme")
    expect(report["resumed"]["missing_block_count"] == 0, "blocks were lost")
    print("ok")


if __name__ == "__main__":
    main()
