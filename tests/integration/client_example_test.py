# SPDX-License-Identifier: Apache-2.0
"""The program of docs/client.md, built by the command there, does what the page says.

usage: client_example_test.py REPOSITORY BUILD_DIR KVTIERD CXX

BUILD_DIR takes the place of build/release in the command, CXX that of g++.
"""

import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "replay"))
from kvtierd_process import Kvtierd  # pylint: disable=wrong-import-position

FLAGS = ["--hbm.capacity_bytes=4MiB", "--hbm.segment_bytes=1MiB",
         "--host.capacity_bytes=4MiB", "--host.segment_bytes=1MiB", "--nvme.enabled=false"]


def only_match(pattern, text):
    matches = re.findall(pattern, text, re.DOTALL)
    assert len(matches) == 1, f"{len(matches)} matches of {pattern}"
    return matches[0]


def main(repository, build_dir, kvtierd, compiler):
    page = (pathlib.Path(repository) / "docs/client.md").read_text(encoding="utf-8")
    program = only_match(r"```cpp\n(.*?)```", page)
    command = only_match(r"```sh\n(g\+\+ .*?)```", page)
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "engine.cc"
        engine = pathlib.Path(folder) / "engine"
        source.write_text(program, encoding="utf-8")
        command = command.replace("build/release", shlex.quote(build_dir))
        command = command.replace("g++ ", shlex.quote(compiler) + " ", 1)
        command = command.replace("engine.cc -o engine", f"{source} -o {engine}")
        subprocess.run(command, shell=True, check=True, cwd=repository)
        with Kvtierd(kvtierd, FLAGS) as daemon:
            # The second run finds the block stored.
            for _ in range(2):
                output = subprocess.run([engine, daemon.run_dir], check=True, text=True,
                                        stdout=subprocess.PIPE).stdout
                assert re.fullmatch(r"block [0-9a-f]{64}: 1152 bytes on tier 1, equal\n",
                                    output), output
            daemon.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
