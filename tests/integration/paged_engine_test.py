# SPDX-License-Identifier: Apache-2.0
"""Two processes of client/examples, with one daemon: what attention gives with kvtier is what it
gives without.

usage: paged_engine_test.py KVTIERD PAGED_ENGINE
"""

import pathlib
import re
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "replay"))
from kvtierd_process import Kvtierd  # pylint: disable=wrong-import-position

# Room for one engine on hbm: blocks are 16 KiB in BF16.
FLAGS = ["--hbm.capacity_bytes=1 MiB", "--hbm.segment_bytes=64 KiB",
         "--host.capacity_bytes=1 MiB", "--host.segment_bytes=64 KiB",
         "--nvme.capacity_bytes=64 MiB", "--nvme.segment_bytes=4 MiB"]
LINE = re.compile(
    r"(?P<requests>\d+) requests in \d+ steps, (?P<pauses>\d+) pauses; "
    r"blocks: (?P<loaded>\d+) loaded, (?P<stored>\d+) stored; "
    r"prefilled tokens: (?P<prefilled>\d+), without kvtier (?P<alone>\d+); "
    r"outputs: (?P<outputs>\w+), error (?P<error>[\d.]+)\n")
REQUESTS_EACH = 6
# Full blocks of the prompt that all requests begin with.
SHARED_BLOCKS = 4


class EngineProcess:
    """Serves its requests, then stays with its session open until it is closed."""

    def __init__(self, program, run_dir, codec, first, *flags):
        self._process = subprocess.Popen(
            [program, run_dir, codec, str(first), str(REQUESTS_EACH), "--hold", *flags],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        line = self._process.stdout.readline()
        match = LINE.fullmatch(line)
        assert match, line
        print(f"{codec} {first}: {line}", end="", flush=True)
        self.outputs = match["outputs"]
        self.error = float(match["error"])
        for name in ("pauses", "loaded", "stored", "prefilled", "alone"):
            setattr(self, name, int(match[name]))

    def close(self):
        """Its exit status."""
        self._process.stdin.close()
        return self._process.wait(timeout=60)


def check_sharing(first, second):
    for engine in (first, second):
        assert engine.pauses == REQUESTS_EACH // 2
        assert engine.loaded > 0 and engine.prefilled < engine.alone
    # All but the very first request find the shared prompt; the second engine found that of the
    # first one, which has stored it.
    assert second.loaded >= first.loaded + SHARED_BLOCKS
    assert second.stored <= first.stored - SHARED_BLOCKS


def main(kvtierd, program):
    with Kvtierd(kvtierd, FLAGS) as daemon:
        first = EngineProcess(program, daemon.run_dir, "bf16", 0)
        second = EngineProcess(program, daemon.run_dir, "bf16", REQUESTS_EACH)
        check_sharing(first, second)
        assert first.outputs == second.outputs == "equal"
        assert first.close() == 0 and second.close() == 0

        # One bit of one block.
        spoilt = EngineProcess(program, daemon.run_dir, "bf16", 0, "--flip-a-bit")
        assert spoilt.outputs == "different" and spoilt.close() == 1

        first = EngineProcess(program, daemon.run_dir, "nvfp4", 0)
        second = EngineProcess(program, daemon.run_dir, "nvfp4", REQUESTS_EACH)
        check_sharing(first, second)
        # Above: what was loaded was used. The program checks the bound.
        assert first.error > 0.01 and second.error > 0.01
        assert first.close() == 0 and second.close() == 0
        daemon.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
