#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Replays agents while the daemon is killed with -9 at random moments and restarted.

Usage: replay_with_kills.py KVTIERD KVTIERCTL [KILLS]

With KVTIER_TRACES, agents_30m.jsonl.xz; without, the built-in workload. At least KILLS kills
(default 20) must fall into the replay, which begins again with another seed until they do. Each
replay must end by itself with no wrong byte, have opened its session again after every kill it
noticed, and hit blocks on nvme in every epoch that began with a good many of them.
"""

import json
import os
import pathlib
import random
import re
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "replay"))
from kvtierd_process import Kvtierd  # pylint: disable=wrong-import-position

TIERS = [
    "--hbm.capacity_bytes=4 MiB",
    "--hbm.segment_bytes=256 KiB",
    "--host.capacity_bytes=20 MiB",
    "--host.segment_bytes=1 MiB",
    "--nvme.capacity_bytes=512 MiB",
    "--nvme.segment_bytes=4 MiB",
]
KILL_AFTER_SECONDS = (0.5, 4.0)
REPLAY_TIMEOUT_SECONDS = 900
# Fewer recovered blocks may all belong to agents that have ended. Before memory overflows for the
# first time there are none.
RECOVERED_BLOCKS_MIN = 1000


def expect(condition, message):
    if not condition:
        raise AssertionError(message)


def workload(seed):
    traces = os.environ.get("KVTIER_TRACES", "")
    path = pathlib.Path(traces) / "agents_30m.jsonl.xz"
    if traces and path.exists():
        return [str(path), "--seed", str(seed)]
    return ["--generate", "--sessions", "400", "--seed", str(seed)]


def replay_once(kvtierctl, daemon, rng, seed, kills_wanted):
    """Runs one replay to its end; returns the number of kills that fell into it."""
    command = [kvtierctl, "--run-dir", str(daemon.run_dir), "--json", "replay", *workload(seed)]
    deadline = time.monotonic() + REPLAY_TIMEOUT_SECONDS
    replay = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    kills = 0
    output = None
    while output is None:
        expect(time.monotonic() < deadline, "the replay does not end")
        try:
            output = replay.communicate(timeout=rng.uniform(*KILL_AFTER_SECONDS))[0]
        except subprocess.TimeoutExpired:
            if kills >= kills_wanted + 10:
                continue
            daemon.kill()
            kills += 1
            daemon.start()
    print(output, flush=True)
    expect(replay.returncode == 0, f"kvtierctl replay ended with {replay.returncode}")
    check(json.loads(output), kills, recovered_blocks(daemon.log_path.read_text()))
    return kills


def recovered_blocks(log):
    """Epoch -> blocks that the daemon of that epoch found on nvme at its start."""
    found = re.findall(r"recovered_blocks=(\d+).*?epoch=(\d+)", log, re.DOTALL)
    return {f"{int(epoch):016x}": int(count) for count, epoch in found}


def check(report, kills, recovered):
    expect(report["wrong_block_count"] == 0, "wrong bytes")
    expect(report["verified_block_count"] > 0, "nothing was verified")
    expect(report["client_copied_bytes"] == 0, "the client copied payload bytes")
    # The last kill may fall between the last call and the end.
    expect(kills - 1 <= report["reopen_count"], f"{kills} kills, {report['reopen_count']} reopens")
    # An epoch of a moment may hold a single request that shares nothing with earlier ones.
    judged = [epoch for epoch in report["epochs"]
              if recovered[epoch["epoch"]] >= RECOVERED_BLOCKS_MIN and epoch["requests"] > 3]
    expect(judged, "no epoch began with blocks on nvme")
    # Ends of chains leave memory first: until their beginnings have followed, a kill leaves what
    # nothing can hit. That is so in the first epochs, and not in most.
    fruitful = sum(epoch["recovered_hit_tokens"] > 0 for epoch in judged)
    expect(2 * fruitful > len(judged),
           f"only {fruitful} of {len(judged)} epochs hit what was kept")


def main():
    kvtierd, kvtierctl = sys.argv[1:3]
    kills_wanted = int(sys.argv[3]) if len(sys.argv) > 3 else 20
    seed = int(os.environ.get("KVTIER_TEST_SEED", time.time_ns() % 1_000_000))
    print(f"seed {seed} (set KVTIER_TEST_SEED to repeat)", flush=True)
    rng = random.Random(seed)
    kills = 0
    with Kvtierd(kvtierd, TIERS) as daemon:
        replay_seed = seed
        while kills < kills_wanted:
            kills += replay_once(kvtierctl, daemon, rng, replay_seed, kills_wanted - kills)
            replay_seed += 1
        daemon.stop()
    print(f"ok: {kills} kills")


if __name__ == "__main__":
    main()
