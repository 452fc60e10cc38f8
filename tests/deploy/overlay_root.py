# SPDX-License-Identifier: Apache-2.0
"""This machine's root with kvtier installed in it, to be booted or run as a container.

Nothing of the machine changes: the root is an overlay whose upper half is in memory, mounted in a
mount namespace that ends with the test."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
IN_NAMESPACE = "KVTIER_TEST_IN_NAMESPACE"


def skip(reason):
    print(f"SKIPPED: {reason}", flush=True)
    sys.exit(77)


def run(*command, **options):
    return subprocess.run(command, check=False, **options)


def enter_namespace(program, package):
    """Starts the test again in a mount namespace of its own, if it can run here at all."""
    if os.geteuid() != 0:
        skip("needs root, to start a container")
    if shutil.which(program) is None:
        skip(f"no {program} here (package {package})")
    if IN_NAMESPACE in os.environ:
        return
    if run("unshare", "--mount", "true", capture_output=True).returncode != 0:
        skip("mount namespaces are refused here")
    os.execvpe("unshare", ["unshare", "--mount", "--propagation", "private", sys.executable, "-B",
                           *sys.argv], os.environ | {IN_NAMESPACE: "1"})


class OverlayRoot:
    """Use as a context manager; `path` is the root, `folder` is on this machine's disk."""

    def __init__(self, kvtierd, kvtierctl):
        self._programs = {"daemon/kvtierd": kvtierd, "client/ctl/kvtierctl": kvtierctl}
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="kvtier-container."))
        self.path = self.folder / "root"
        self._memory = self.folder / "memory"

    def __enter__(self):
        self.path.mkdir()
        self._memory.mkdir()
        if not self._mount():
            self.__exit__()
            skip("overlay file systems are refused here")
        try:
            self._install()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        # What stays mounted must not be walked into by a removal: rmdir fails then.
        for folder in (self.path, self._memory):
            run("umount", "--lazy", folder, capture_output=True)
            folder.rmdir()
        shutil.rmtree(self.folder)

    def _mount(self):
        if run("mount", "-t", "tmpfs", "tmpfs", self._memory, capture_output=True).returncode != 0:
            return False
        upper, work = self._memory / "upper", self._memory / "work"
        upper.mkdir()
        work.mkdir()
        options = f"lowerdir=/,upperdir={upper},workdir={work}"
        return run("mount", "-t", "overlay", "overlay", "-o", options, self.path,
                   capture_output=True).returncode == 0

    def _install(self):
        build = self._memory / "build"
        for path, program in self._programs.items():
            (build / path).parent.mkdir(parents=True)
            (build / path).symlink_to(program)
        # The machine may have kvtier, and its configuration, already.
        for path in ("etc/kvtier", "var/lib/kvtierd"):
            shutil.rmtree(self.path / path, ignore_errors=True)
        run(ROOT / "deploy/systemd/install", "--root", self.path, "--build",
            build).check_returncode()
