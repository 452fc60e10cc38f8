#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Boots this machine's own system in a container, with kvtier installed in it, and looks at the
service from inside (booted_checks).  systemd_boot_test.py KVTIERD KVTIERCTL

Nothing outside the container changes: its root is an overlay whose upper half is in memory, mounted
in a mount namespace that ends with this process."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BOOT_SECONDS_MAX = 50
IN_NAMESPACE = "KVTIER_BOOT_TEST_IN_NAMESPACE"

TARGET = """[Unit]
Requires=basic.target kvtier-test.service
After=basic.target
AllowIsolate=yes
"""
SERVICE = """[Unit]
SuccessAction=exit-force
FailureAction=exit-force
FailureActionExitStatus=1
[Service]
Type=oneshot
ExecStart=/bin/bash /usr/lib/kvtier-test/booted_checks
StandardOutput=file:/kvtier-checks.log
StandardError=file:/kvtier-checks.log
"""


def skip(reason):
    print(f"SKIPPED: {reason}", flush=True)
    sys.exit(77)


def run(*command, **options):
    return subprocess.run(command, check=False, **options)


def make_root(folder, kvtierd, kvtierctl):
    """An overlay over / with kvtier and the checks in it, or None where overlays are refused."""
    memory, root = folder / "memory", folder / "root"
    memory.mkdir()
    root.mkdir()
    if run("mount", "-t", "tmpfs", "tmpfs", memory, capture_output=True).returncode != 0:
        return None
    (memory / "upper").mkdir()
    (memory / "work").mkdir()
    if run("mount", "-t", "overlay", "overlay", "-o",
           f"lowerdir=/,upperdir={memory}/upper,workdir={memory}/work", root,
           capture_output=True).returncode != 0:
        return None
    build = memory / "build"
    for path, program in (("daemon/kvtierd", kvtierd), ("client/ctl/kvtierctl", kvtierctl)):
        (build / path).parent.mkdir(parents=True)
        (build / path).symlink_to(program)
    # The machine may have kvtier, and its configuration, already.
    for path in ("etc/kvtier", "var/lib/kvtierd"):
        shutil.rmtree(root / path, ignore_errors=True)
    run(ROOT / "deploy/systemd/install", "--root", root, "--build", build).check_returncode()
    (root / "usr/lib/kvtier-test").mkdir()
    shutil.copy(HERE / "booted_checks", root / "usr/lib/kvtier-test")
    units = root / "etc/systemd/system"
    (units / "kvtier-test.target").write_text(TARGET)
    (units / "kvtier-test.service").write_text(SERVICE)
    return root


def main(kvtierd, kvtierctl):
    if os.geteuid() != 0:
        skip("needs root, to boot a container")
    if shutil.which("systemd-nspawn") is None:
        skip("no systemd-nspawn here (package systemd-container)")
    if IN_NAMESPACE not in os.environ:
        if run("unshare", "--mount", "true", capture_output=True).returncode != 0:
            skip("mount namespaces are refused here")
        os.execvpe("unshare", ["unshare", "--mount", "--propagation", "private", sys.executable,
                               "-B", *sys.argv], os.environ | {IN_NAMESPACE: "1"})
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kvtier-boot."))
    # Only directories that are mounted over; a removal must never walk into what is mounted.
    try:
        root = make_root(folder, kvtierd, kvtierctl)
        status = boot(root) if root is not None else None
    finally:
        for name in ("root", "memory"):
            run("umount", "--lazy", folder / name, capture_output=True)
            (folder / name).rmdir()
        folder.rmdir()
    if root is None:
        skip("overlay file systems are refused here")
    if status is None:
        skip("a container does not boot here")
    sys.exit(status)


def boot(root):
    """Exit status of the checks, or None when the system did not come as far."""
    command = ["timeout", "--kill-after=5", str(BOOT_SECONDS_MAX),
               "systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--private-network",
               "--link-journal=no", "--console=pipe", f"--machine=kvtier-boot-{os.getpid()}",
               f"--directory={root}", "--boot", "systemd.unit=kvtier-test.target"]
    done = run(*command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
               stderr=subprocess.STDOUT, text=True, errors="replace")
    log = root / "kvtier-checks.log"
    text = log.read_text(errors="replace") if log.exists() else ""
    if not text:
        print(done.stdout, f"systemd-nspawn ended with status {done.returncode}", sep="\n")
        return None
    print(text, flush=True)
    return 0 if done.returncode == 0 and "kvtier-checks: all passed" in text else 1


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*(pathlib.Path(path).resolve() for path in sys.argv[1:]))
