#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The configure-time layer check refuses links that go up or sideways, and only those."""

import pathlib
import subprocess
import tempfile
import unittest

CMAKE = pathlib.Path(__file__).resolve().parents[2] / "deploy" / "cmake"


def configure(*edges):
    """Configures a project of empty libraries with these (from, to) links; returns the errors."""
    layers = sorted({layer for edge in edges for layer in edge if "::" not in layer})
    lines = ["cmake_minimum_required(VERSION 3.25)", "project(layers LANGUAGES NONE)",
             f'list(APPEND CMAKE_MODULE_PATH "{CMAKE}")', "include(KvtierLayers)"]
    for layer in layers:
        lines += [f"add_library(kvtier_{layer} INTERFACE)",
                  f"add_library(kvtier::{layer} ALIAS kvtier_{layer})",
                  f'kvtier_set_layer(kvtier_{layer} "{layer}")']
    for source, target in edges:
        linked = target if "::" in target else f"kvtier::{target}"
        lines.append(f"target_link_libraries(kvtier_{source} INTERFACE {linked})")
    lines.append("kvtier_check_layers()")
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "CMakeLists.txt").write_text("\n".join(lines), encoding="utf-8")
        done = subprocess.run(["cmake", "-S", folder, "-B", folder + "/build"],
                              capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


class LayersTest(unittest.TestCase):

    def test_accepts_links_down(self):
        self.assertEqual(configure(("tiers", "proto"), ("policy", "kernels"), ("daemon", "tiers"),
                                   ("daemon", "policy"), ("client", "kernels"), ("ctl", "client"),
                                   ("ctl", "policy"), ("tests", "daemon"), ("gpu", "proto"),
                                   ("tiers", "gpu"), ("client", "gpu")), "")

    def test_refuses_links_up_and_sideways(self):
        for edge in [("kernels", "tiers"), ("tiers", "policy"), ("policy", "tiers"),
                     ("client", "daemon"), ("client", "policy"), ("ctl", "daemon"),
                     ("tiers", "daemon"), ("kernels", "proto"), ("gpu", "tiers")]:
            self.assertIn(f"kvtier_{edge[0]} ({edge[0]}) may not link kvtier::{edge[1]}",
                          configure(edge), edge)

    def test_refuses_libraries_that_do_not_exist(self):
        self.assertIn("does not exist", configure(("tiers", "kvtier::none")))


if __name__ == "__main__":
    unittest.main()
