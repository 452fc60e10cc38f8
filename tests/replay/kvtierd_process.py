# SPDX-License-Identifier: Apache-2.0
"""A kvtierd in a temporary directory, for tests that drive it with kvtierctl."""

import os
import pathlib
import shutil
import signal
import subprocess
import tempfile

STOP_TIMEOUT_SECONDS = 60


class Kvtierd:
    """Owns the directory and the process. Use as a context manager."""

    def __init__(self, program, flags):
        self._program = program
        self._flags = flags
        self.root = pathlib.Path(tempfile.mkdtemp(prefix="kvtier-test."))
        self.run_dir = self.root / "run"
        self.data_dir = self.root / "data"
        self.log_path = self.root / "kvtierd.log"
        self.run_dir.mkdir()
        self.data_dir.mkdir()
        self._process = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, error_type, *_):
        self.kill()
        if error_type is not None:
            print(f"--- last lines of {self.log_path}:\n{self.log_tail()}", flush=True)
        shutil.rmtree(self.root, ignore_errors=True)

    def log_tail(self, line_count=40):
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-line_count:])

    def start(self):
        """Returns once the daemon says that it serves."""
        read_end, write_end = os.pipe()
        with open(self.log_path, "ab") as log:
            self._process = subprocess.Popen(
                [
                    self._program,
                    f"--server.run_dir={self.run_dir}",
                    f"--server.data_dir={self.data_dir}",
                    *self._flags,
                    "--ready-fd",
                    str(write_end),
                ],
                pass_fds=[write_end],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        os.close(write_end)
        with os.fdopen(read_end) as ready:
            # Ends with the daemon, so there is no need for a timer.
            if ready.readline() != "READY\n":
                raise RuntimeError(f"kvtierd did not start:\n{self.log_tail()}")

    @property
    def pid(self):
        return self._process.pid

    def kill(self):
        """SIGKILL, wherever it is."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self):
        """SIGTERM; the exit status must be 0."""
        self._process.send_signal(signal.SIGTERM)
        status = self._process.wait(timeout=STOP_TIMEOUT_SECONDS)
        self._process = None
        if status != 0:
            raise AssertionError(f"kvtierd ended with status {status}:\n{self.log_tail()}")


