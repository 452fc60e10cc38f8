#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Replays agents over a daemon whose hbm, host and nvme all overflow into the next tier.

Usage: replay_test.py KVTIERD KVTIERCTL (trace | generated)

`trace` replays all of agents_30m.jsonl.xz and needs KVTIER_TRACES; `generated` replays the built-in
workload. Every block must have the right bytes, and the token hit rate must be within one point of
an exact simulation of the same policy and sizes.
"""

import json
import os
import pathlib
import subprocess
import sys

from kvtierd_process import Kvtierd

SKIPPED = 77

# The small layout takes 4 KiB a block in memory and 8 KiB on nvme. agents_30m has 101,024 blocks:
# hbm holds 1 % of them, host 5 %, nvme about a third.
TRACE_TIERS = [
    "--hbm.capacity_bytes=4 MiB",
    "--hbm.segment_bytes=256 KiB",
    "--host.capacity_bytes=20 MiB",
    "--host.segment_bytes=1 MiB",
    "--nvme.capacity_bytes=288 MiB",
    "--nvme.segment_bytes=4 MiB",
]
# The built-in workload of 150 agents has about 18,000 blocks.
GENERATED_TIERS = [
    "--hbm.capacity_bytes=1 MiB",
    "--hbm.segment_bytes=64 KiB",
    "--host.capacity_bytes=2 MiB",
    "--host.segment_bytes=128 KiB",
    "--nvme.capacity_bytes=16 MiB",
    "--nvme.segment_bytes=1 MiB",
]


def expect(condition, message):
    if not condition:
        raise AssertionError(message)


def check(report, tier_must_overflow):
    rates = report["token_hit_rate"]
    expect(report["wrong_block_count"] == 0, "wrong bytes")
    expect(report["verified_block_count"] > 0, "nothing was verified")
    expect(report["client_copied_bytes"] == 0, "the client copied payload bytes")
    expect(report["decode_check_count"] > 0, "no decode step was checked")
    expect(report["decode_error_max"] < report["decode_error_tolerance"], "decode is off")
    expect(report["simulation"]["within"], "the simulation disagrees")
    moved = {(link["source"], link["target"]): link["moved_bytes"] for link in report["links"]}
    for link in [("hbm", "host"), ("host", "nvme")]:
        expect(moved.get(link, 0) > 0, f"nothing moved from {link[0]} to {link[1]}")
    for tier in ["hbm", "host", "nvme"]:
        expect(rates[tier] > 0, f"no hit on {tier}")
    if tier_must_overflow:
        best = 0.933  # of this trace, with room for every block
        expect(rates["total"] < best - 0.01, "nvme never overflowed")


def main():
    kvtierd, kvtierctl, kind = sys.argv[1:]
    if kind == "trace":
        traces = os.environ.get("KVTIER_TRACES", "")
        path = pathlib.Path(traces) / "agents_30m.jsonl.xz"
        if not traces or not path.exists():
            print("SKIPPED: KVTIER_TRACES names no directory with agents_30m.jsonl.xz")
            return SKIPPED
        tiers = TRACE_TIERS
        workload = [str(path)]
    else:
        tiers = GENERATED_TIERS
        workload = ["--generate", "--sessions", "150", "--decode-every", "16"]

    with Kvtierd(kvtierd, tiers) as daemon:
        command = [kvtierctl, "--run-dir", str(daemon.run_dir), "--json", "replay", *workload]
        command += ["--simulate", "--progress"]
        replay = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        print(replay.stdout, flush=True)
        expect(replay.returncode == 0, f"kvtierctl replay ended with {replay.returncode}")
        check(json.loads(replay.stdout), tier_must_overflow=kind == "trace")
        daemon.stop()
    print("ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
