#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Keeps a daemon busy for a long time and looks at what it holds on to.

Usage: soak.py [--seconds N] [--engines N] [--speed N] [--json] KVTIERD KVTIERCTL

Engines replay agents one after another, each time with new keys, against tiers far smaller than
what they use, so that every block is put, demoted, reclaimed and evicted. Once a second the
daemon's memory, descriptors and threads and the bytes of its directory are read.

Fails on a wrong byte, on an engine that fails, on descriptors or threads that grow, on a data
directory above its capacity, and on memory whose growth, from the median of the second quarter to
the median of the last, is more than --growth-mib. A run of minutes cannot tell a small leak from
an allocator that settles: the figure that counts is the slope of an hour.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "replay"))
from kvtierd_process import Kvtierd  # pylint: disable=wrong-import-position

MIB = 1 << 20
NVME_CAPACITY_BYTES = 64 * MIB
TIERS = [
    "--hbm.capacity_bytes=4 MiB",
    "--hbm.segment_bytes=256 KiB",
    "--host.capacity_bytes=16 MiB",
    "--host.segment_bytes=1 MiB",
    f"--nvme.capacity_bytes={NVME_CAPACITY_BYTES}",
    "--nvme.segment_bytes=2 MiB",
]
SAMPLE_SECONDS = 1.0
SESSIONS_PER_REPLAY = 60


def parse_arguments():
    parser = argparse.ArgumentParser(
        description="Keeps a daemon busy and looks at what it holds on to."
    )
    parser.add_argument("kvtierd")
    parser.add_argument("kvtierctl")
    parser.add_argument("--seconds", type=float, default=3600, help="how long (default: an hour)")
    parser.add_argument("--engines", type=int, default=2, help="replays at once (default: 2)")
    parser.add_argument(
        "--speed",
        type=float,
        default=0,
        help="seconds of the agents in one second; 0: as fast as possible (default: 0)",
    )
    parser.add_argument(
        "--growth-mib", type=float, default=8, help="memory growth that fails the run (default: 8)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


class Engine:
    """One replay after another, each with a seed of its own."""

    def __init__(self, arguments, run_dir, seed):
        self._command = [arguments.kvtierctl, "--run-dir", str(run_dir), "--json", "replay"]
        self._command += ["--generate", "--sessions", str(SESSIONS_PER_REPLAY)]
        self._command += ["--speed", str(arguments.speed), "--seed"]
        self._seed = seed
        self._process = None
        self.replay_count = 0
        self.request_count = 0

    def poll(self):
        """Starts the next replay when the last one has ended; checks what it says."""
        if self._process is not None:
            if self._process.poll() is None:
                return
            self._check()
        self._seed += 1
        self._process = subprocess.Popen(
            [*self._command, str(self._seed)], stdout=subprocess.PIPE, text=True
        )

    def finish(self):
        """Waits for the replay that is under way."""
        if self._process is not None:
            self._check()

    def kill(self):
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _check(self):
        output = self._process.communicate(timeout=600)[0]
        status = self._process.returncode
        self._process = None
        if status != 0:
            raise AssertionError(f"seed {self._seed}: kvtierctl replay ended with {status}")
        report = json.loads(output)
        if report["wrong_block_count"] != 0:
            raise AssertionError(f"seed {self._seed}: wrong bytes:\n{output}")
        self.replay_count += 1
        self.request_count += report["request_count"]


def directory_bytes(path):
    """What `du` says, apart from files that go away meanwhile."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                pass
    return total


def cpu_seconds(pid):
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    ticks = stat.rpartition(")")[2].split()
    return (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")


def descriptor_count(pid, data_dir):
    """Without the files of nvme: there are more of them until it is full, which is no leak, and how
    soon that is depends on the machine. What they may take is checked by their bytes."""
    count = 0
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            count += not os.readlink(entry.path).startswith(f"{data_dir}/")
        except FileNotFoundError:  # closed meanwhile
            pass
    return count


def sample(pid, data_dir, start):
    status = pathlib.Path(f"/proc/{pid}/status").read_text(encoding="ascii")

    def field(name):
        return int(re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE).group(1))

    return {
        "seconds": time.monotonic() - start,
        # Without the tiers, which are shared memory.
        "private_bytes": field("RssAnon") * 1024,
        "descriptor_count": descriptor_count(pid, data_dir),
        "thread_count": field("Threads"),
        "directory_bytes": directory_bytes(data_dir),
        "cpu_seconds": cpu_seconds(pid),
    }


def slope_per_hour(samples, name):
    """Theil-Sen: the median slope between pairs of samples, so that single peaks do not matter."""
    step = max(1, len(samples) // 200)
    thinned = samples[::step]
    slopes = [
        (b[name] - a[name]) / (b["seconds"] - a["seconds"]) * 3600
        for i, a in enumerate(thinned)
        for b in thinned[i + 1 :]
    ]
    return statistics.median(slopes)


def report_of(samples, engines):
    quarter = len(samples) // 4
    settled = samples[quarter:]

    def middle(part, name):
        return statistics.median(sample[name] for sample in part)

    names = ("private_bytes", "descriptor_count", "thread_count")
    return {
        "seconds": samples[-1]["seconds"],
        "replay_count": sum(engine.replay_count for engine in engines),
        "request_count": sum(engine.request_count for engine in engines),
        "growth": {
            name: middle(samples[-quarter:], name) - middle(samples[quarter : 2 * quarter], name)
            for name in names
        },
        "private_bytes_per_hour": slope_per_hour(settled, "private_bytes"),
        "private_bytes": middle(samples[-quarter:], "private_bytes"),
        "cpu_seconds": samples[-1]["cpu_seconds"],
        "directory_bytes_max": max(sample["directory_bytes"] for sample in samples),
        "directory_capacity_bytes": NVME_CAPACITY_BYTES,
    }


def complaints(report, growth_mib):
    if report["growth"]["private_bytes"] > growth_mib * MIB:
        yield f"memory grew by {report['growth']['private_bytes'] / MIB:.1f} MiB"
    # Engines come and go: their sessions hold a few of each.
    for name in ("descriptor_count", "thread_count"):
        if report["growth"][name] > 16:
            yield f"{name} grew by {report['growth'][name]}"
    if report["directory_bytes_max"] > NVME_CAPACITY_BYTES:
        yield f"the directory took {report['directory_bytes_max']} bytes"
    if report["replay_count"] == 0:
        yield "no replay ended"


def run(arguments, seed):
    samples = []
    with Kvtierd(arguments.kvtierd, TIERS) as daemon:
        engines = [
            Engine(arguments, daemon.run_dir, seed + 100_000 * number)
            for number in range(arguments.engines)
        ]
        start = time.monotonic()
        try:
            while not samples or samples[-1]["seconds"] < arguments.seconds:
                for engine in engines:
                    engine.poll()
                samples.append(sample(daemon.pid, daemon.data_dir, start))
                if len(samples) % 60 == 0 and not arguments.json:
                    print(json.dumps(samples[-1]), flush=True)
                time.sleep(SAMPLE_SECONDS)
            for engine in engines:
                engine.finish()
        finally:
            for engine in engines:
                engine.kill()
        daemon.stop()
    return report_of(samples, engines)


def main():
    arguments = parse_arguments()
    seed = int(os.environ.get("KVTIER_TEST_SEED", time.time_ns() % 1_000_000))
    print(f"seed {seed} (set KVTIER_TEST_SEED to repeat)", file=sys.stderr, flush=True)
    report = run(arguments, seed)
    report["complaints"] = list(complaints(report, arguments.growth_mib))
    print(json.dumps(report, indent=None if arguments.json else 2))
    return 1 if report["complaints"] else 0


if __name__ == "__main__":
    sys.exit(main())
