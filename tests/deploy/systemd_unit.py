# SPDX-License-Identifier: Apache-2.0
"""What the tests of deploy/ read from unit files and from systemd's sets of system calls."""

import pathlib
import shutil
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
UNITS = ROOT / "deploy" / "systemd"


def is_debian_12s():
    """Whether there is a systemd here and it is 252."""
    if shutil.which("systemd-analyze") is None:
        return False
    version = subprocess.run(["systemd-analyze", "--version"], capture_output=True, text=True,
                             check=True).stdout
    return version.startswith("systemd 252 ")


def settings(name):
    """{key: [values]} of the [Service] section, in order; comments and line breaks resolved."""
    found = {}
    section = ""
    for line in (UNITS / name).read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        line = line.strip()
        if line.startswith("["):
            section = line
        elif section == "[Service]" and line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(" ".join(value.split()))
    return found


def expand(names):
    """The system calls of a list of names and @sets, as this systemd knows them."""
    calls = set()
    for name in names:
        if not name.startswith("@"):
            calls.add(name)
            continue
        listed = subprocess.run(["systemd-analyze", "--no-pager", "syscall-filter", name],
                                capture_output=True, text=True, check=True).stdout
        calls |= expand(line.strip() for line in listed.splitlines()[1:]
                        if line.strip() and not line.strip().startswith("#"))
    return calls


def allowed_system_calls(name="kvtierd.service"):
    """What SystemCallFilter= of a unit leaves."""
    calls = set()
    for value in settings(name)["SystemCallFilter"]:
        if value.startswith("~"):
            calls -= expand(value[1:].split())
        else:
            calls |= expand(value.split())
    return calls
