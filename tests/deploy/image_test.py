#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The recipe of the container image, without building it.  image_test.py KVTIERD KVTIERCTL

Building it needs a registry for its base images, which a test must not; what can be held against
this tree is: its files, its packages, its users, and what the programs are linked with."""

import json
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = []
# apt and dpkg are linked with these.
IN_EVERY_DEBIAN = {"libc6", "libgcc-s1", "liblzma5", "libstdc++6"}


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def listed(path):
    """The packages of a list, and of its parts before the first comment with "Tests"."""
    lines = (ROOT / path).read_text(encoding="utf-8").split("\n# Tests")[0].splitlines()
    return [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]


def instructions():
    """(name, rest) of the recipe's lines, continuations joined."""
    text = (ROOT / "deploy/image/Containerfile").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def stages():
    """The instructions of each stage, without what stands before the first FROM."""
    found = []
    for name, rest in instructions():
        if name == "FROM":
            found.append([])
        if found:
            found[-1].append((name, rest))
    return found


class RecipeTest(unittest.TestCase):

    def test_uses_plain_instructions(self):
        self.assertLessEqual({name for name, _ in instructions()},
                             {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "LABEL", "USER",
                              "ENTRYPOINT"})
        bases = [rest.split("=")[1] for name, rest in instructions() if name == "ARG"]
        self.assertEqual(len(bases), 2)
        for base in bases:
            self.assertRegex(base, r"^docker\.io/library/debian:12(-slim)?$")

    def test_copies_files_that_exist(self):
        for name, rest in instructions():
            *sources, _ = [word for word in rest.split() if not word.startswith("--")]
            if name == "COPY" and "--from=" not in rest:
                for source in sources:
                    self.assertTrue((ROOT / source).exists(), source)

    def test_copies_every_folder_that_is_built(self):
        text = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
        folders = re.search(r"foreach\(folder IN ITEMS ([^)]*)\)", text).group(1).split()
        copied = {word.rstrip("/") for name, rest in stages()[0] if name == "COPY"
                  for word in rest.split()[:-1]}
        self.assertLessEqual(set(folders) - {"tests"}, copied)

    def test_the_build_is_a_preset_and_makes_what_is_copied(self):
        (build,) = [rest for name, rest in stages()[0] if name == "RUN" and "cmake" in rest]
        presets = json.loads((ROOT / "CMakePresets.json").read_text(encoding="utf-8"))
        (preset,) = set(re.findall(r"--preset (\S+)", build))
        self.assertIn(preset, [each["name"] for each in presets["configurePresets"]])
        for made in ("daemon/kvtierd", "client/ctl/kvtierctl"):
            self.assertIn(f"build/{preset}/{made}", shlex.split(build))
        (copy,) = [rest for name, rest in stages()[-1] if name == "COPY" and "--from" in rest]
        self.assertEqual(copy.split(), ["--from=build", "/out/kvtierd", "/out/kvtierctl",
                                        "/usr/bin/"])

    def test_runs_as_the_user_of_the_manifests(self):
        name, user = [each for each in stages()[-1] if each[0] in ("RUN", "COPY", "USER")][-1]
        manifest = (ROOT / "deploy/kubernetes/base/daemonset.yaml").read_text(encoding="utf-8")
        uid, gid = (re.search(rf"^ {{8}}runAs{who}: (\d+)$", manifest, re.M).group(1)
                    for who in ("User", "Group"))
        self.assertEqual((name, user), ("USER", f"{uid}:{gid}"))
        self.assertNotEqual(uid, "0")
        entry = dict(stages()[-1])["ENTRYPOINT"]
        self.assertEqual(json.loads(entry), ["/usr/bin/kvtierd"])

    def test_says_the_version_of_the_project(self):
        version = re.search(r"project\(kvtier VERSION (\S+)",
                            (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")).group(1)
        self.assertIn(f'org.opencontainers.image.version="{version}"', dict(stages()[-1])["LABEL"])
        manifest = (ROOT / "deploy/kubernetes/base/daemonset.yaml").read_text(encoding="utf-8")
        self.assertEqual(set(re.findall(r"image: (\S+)", manifest)), {f"kvtierd:{version}"})

    def test_the_list_for_tests_stays_out(self):
        self.assertIn("sed -i '/^# Tests/,$d' deploy/deps.apt",
                      [rest for name, rest in stages()[0] if name == "RUN"][0])
        self.assertIn("librocksdb-dev", listed("deploy/deps.apt"))
        self.assertNotIn("libgtest-dev", listed("deploy/deps.apt"))


class PackagesTest(unittest.TestCase):

    def setUp(self):
        if shutil.which("dpkg-query") is None:
            print("\nSKIPPED: no dpkg here to ask for packages", flush=True)
            self.skipTest("no dpkg")

    def test_runtime_packages_are_what_the_programs_are_linked_with(self):
        paths = set()
        for program in PROGRAMS:
            needed = set(re.findall(r"NEEDED.*\[(.*)\]", output("readelf", "-d", program)))
            paths |= {path for name, path in
                      re.findall(r"^\s*(\S+) => (\S+)", output("ldd", program), re.M)
                      if name in needed}
        # Since /lib is a link to /usr/lib, a package may know the file by either name.
        either = sorted(paths | {path.removeprefix("/usr") for path in paths}
                        | {f"/usr{path}" for path in paths})
        found = subprocess.run(["dpkg-query", "-S", *either], capture_output=True, text=True,
                               check=False).stdout
        owners = {line.split(":")[0] for line in found.splitlines()}
        self.assertEqual(owners, set(listed("deploy/image/runtime.apt")) | IN_EVERY_DEBIAN)

    def test_runtime_packages_belong_to_the_list_of_all(self):
        depends = output("dpkg-query", "-W", "-f", "${Depends}, ", *listed("deploy/deps.apt"))
        names = set(re.findall(r"[a-z0-9][a-z0-9+.-]+", depends))
        self.assertLessEqual(set(listed("deploy/image/runtime.apt")), names)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    PROGRAMS = sys.argv[1:]
    unittest.main(argv=sys.argv[:1])
