#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Boots this machine's own system in a container, with kvtier installed in it, and looks at the
service from inside (booted_checks), then runs the commands of docs/operations.md there.
systemd_boot_test.py KVTIERD KVTIERCTL"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

from overlay_root import ROOT, OverlayRoot, enter_namespace, run, skip

BOOT_SECONDS_MAX = 100

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


def documented_commands():
    """The lines of the sh blocks of docs/operations.md."""
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    return "".join(re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S))


def add_checks(root):
    folder = root / "usr/lib/kvtier-test"
    folder.mkdir()
    shutil.copy(pathlib.Path(__file__).with_name("booted_checks"), folder)
    (folder / "documented_commands").write_text(documented_commands())
    units = root / "etc/systemd/system"
    (units / "kvtier-test.target").write_text(TARGET)
    (units / "kvtier-test.service").write_text(SERVICE)


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


def main(kvtierd, kvtierctl):
    enter_namespace("systemd-nspawn", "systemd-container")
    with OverlayRoot(kvtierd, kvtierctl) as root:
        add_checks(root.path)
        status = boot(root.path)
    if status is None:
        skip("a container does not boot here")
    sys.exit(status)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*(pathlib.Path(path).resolve() for path in sys.argv[1:]))
