# SPDX-License-Identifier: Apache-2.0
"""kvtierd whose GPU is lost ends by itself, with a status and a message for its supervisor.

usage: lost_gpu_test.py KVTIERD LIBRARY

LIBRARY stands in for libcuda.so.1, and its GPU fails after some queries of events.
"""

import os
import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "replay"))
from kvtierd_process import Kvtierd  # pylint: disable=wrong-import-position

FLAGS = ["--hbm.device=cuda", "--hbm.capacity_bytes=4MiB", "--hbm.segment_bytes=1MiB",
         "--host.capacity_bytes=4MiB", "--host.segment_bytes=1MiB"]
# The start takes one, an idle daemon two a second.
QUERIES = 3
DEADLINE_SECONDS = 60
# What it serves on without its GPU.
GRACE_SECONDS = 2


def exit_status(daemon):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        pid, status = os.waitpid(daemon.pid, os.WNOHANG)
        if pid != 0:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    raise AssertionError("kvtierd runs on without its GPU")


def main(program, library):
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(library, pathlib.Path(folder) / "libcuda.so.1")
        os.environ["LD_LIBRARY_PATH"] = folder
        os.environ["KVTIER_STAND_IN_QUERIES"] = str(QUERIES)
        with Kvtierd(program, FLAGS) as daemon:
            served_at = time.monotonic()
            status = exit_status(daemon)
            seconds = time.monotonic() - served_at
            lines = daemon.log_tail().splitlines()
            assert status == 1, status
            assert seconds >= GRACE_SECONDS, seconds
            assert any("hbm is lost; host and nvme serve until the end" in line
                       for line in lines), lines
            assert lines[-1].startswith("kvtierd: hbm: CUDA device 0 is lost: "), lines[-1]
    print(f"ended with status {status} after {seconds:.1f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
