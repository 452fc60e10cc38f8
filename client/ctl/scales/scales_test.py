#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the commands of docs/scale-sets.md, and kvtierctl scales with what it must refuse.

  scales_test.py KVTIERCTL
"""

import json
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import unittest

KVTIERCTL = ""
DOCS = pathlib.Path(__file__).resolve().parents[3] / "docs" / "scale-sets.md"
LAYERS, TOKENS, HEADS, DIM = 2, 256, 2, 64


def values(seed, count):
    """BF16 bytes of numbers between -4 and 4, never the largest before seed is used up."""
    state, out = seed, bytearray()
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        number = (state >> 8) % 2049 / 256 - 4
        out += struct.pack("<f", number)[2:]
    return bytes(out)


def npy(shape, data, descr="<V2"):
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {tuple(shape)}, }}\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + data


def safetensors(tensors):
    """tensors: name -> (dtype, shape, bytes)"""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape,
                        "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def dump(seed):
    count = TOKENS * HEADS * DIM
    return safetensors({f"layers.{layer}.{side}": ("BF16", [TOKENS, HEADS, DIM],
                                                   values(seed + 2 * layer + i, count))
                        for layer in range(LAYERS) for i, side in enumerate("kv")})


def scale_tensors(stored):
    return safetensors({f"model.layers.{layer}.self_attn.{side}_proj.{side}_scale":
                        ("F32", [], struct.pack("<f", stored))
                        for layer in range(LAYERS) for side in "kv"})


class ScalesTest(unittest.TestCase):
    def setUp(self):
        self._folder = tempfile.TemporaryDirectory()
        self.folder = pathlib.Path(self._folder.name)
        count = LAYERS * TOKENS * HEADS * DIM
        shape = (LAYERS, TOKENS, HEADS, DIM)
        self.write("K.npy", npy(shape, values(1, count)))
        self.write("V.npy", npy(shape, values(2, count)))
        self.write("first.safetensors", dump(10))
        self.write("second.safetensors", dump(20))
        self.write("old.safetensors", scale_tensors(8 / 2688))
        (self.folder / "checkpoint").mkdir()
        self.write("checkpoint/model.safetensors", scale_tensors(8 / 448))
        self.write("checkpoint/config.json", json.dumps(
            {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "hidden_size": 4 * DIM,
             "num_key_value_heads": HEADS,
             "quantization_config": {"quant_method": "modelopt",
                                     "kv_cache_scheme": {"num_bits": 8}}}).encode())

    def tearDown(self):
        self._folder.cleanup()

    def write(self, name, data):
        (self.folder / name).write_bytes(data)

    def run_ctl(self, *arguments, status=0):
        done = subprocess.run([KVTIERCTL, *arguments], cwd=self.folder, capture_output=True,
                              text=True, check=False)
        self.assertEqual(done.returncode, status, f"{arguments}\n{done.stdout}{done.stderr}")
        return done

    def test_documented_commands_run(self):
        text = DOCS.read_text(encoding="utf-8")
        commands = [line.split() for block in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
                    for line in block.replace("\\\n", " ").splitlines()]
        self.assertGreaterEqual(len(commands), 6)
        for command in commands:
            self.assertEqual(command[0], "kvtierctl")
            out = self.run_ctl(*command[1:]).stdout
            self.assertIn("ss1-", out)

    def test_documented_file_is_a_scale_set(self):
        text = re.search(r"^```json\n(.*?)^```", DOCS.read_text(encoding="utf-8"), re.M | re.S)
        self.write("documented.json", text.group(1).encode())
        self.run_ctl("scales", "show", "documented.json")

    def test_scales_are_those_of_the_largest_magnitude(self):
        # The largest magnitude is 4: g = 2^ceil(log2(4 / 448)) = 2^-6.
        out = self.run_ctl("--json", "scales", "calibrate", "--k", "K.npy", "--v", "V.npy",
                           "--out", "s.json").stdout
        shown = json.loads(out)
        self.assertEqual(shown["layers"][1]["g_k"], {"min": 2**-6, "max": 2**-6})
        self.assertEqual(shown["provenance"]["token_count"], TOKENS)
        self.assertEqual([f["name"] for f in shown["provenance"]["files"]], ["K.npy", "V.npy"])
        self.assertEqual(json.loads(self.run_ctl("scales", "show", "s.json", "--json").stdout),
                         shown)
        # Imports of amax = 8 stored in two ways are the same set.
        first = self.run_ctl("scales", "import", "checkpoint", "--out", "a.json", "--json")
        second = self.run_ctl("scales", "import", "old.safetensors", "--convention",
                              "modelopt-2688", "--layers", "2", "--kv-heads", "2", "--head-dim",
                              "64", "--out", "b.json", "--json")
        first, second = json.loads(first.stdout), json.loads(second.stdout)
        self.assertEqual(first["layers"][0]["g_v"], {"min": 2**-5, "max": 2**-5})
        self.assertEqual(first["id"], second["id"])
        self.assertEqual(first["provenance"]["convention"], "fp8")

    def test_out_may_be_standard_output(self):
        text = self.run_ctl("scales", "calibrate", "--k", "K.npy", "--v", "V.npy",
                            "--out", "/dev/stdout").stdout
        self.assertEqual(json.JSONDecoder().raw_decode(text)[0]["format"], "kvtier.scale_set")

    def test_names_of_files_are_bytes(self):
        name = b"K\xff.npy"
        (self.folder / os.fsdecode(name)).write_bytes(npy((TOKENS, DIM), values(3, TOKENS * DIM)))
        out = self.run_ctl("--json", "eval-kv", "--k", name, "--v", name, "--methods", "bf16")
        self.assertEqual(json.loads(out.stdout)["datasets"][0]["dataset"], "K\ufffd.npy")

    def test_mistakes_have_their_status(self):
        self.write("fp8.npy", npy((TOKENS, DIM), bytes(TOKENS * DIM), "<V1"))
        out = ("--out", "x.json")
        npy_pair = ("--k", "K.npy", "--v", "V.npy")
        refused = [
            (2, "no dumps", ("calibrate", *out)),
            (2, "requires", ("calibrate", "--k", "K.npy", *out)),
            (2, "--out is required", ("calibrate", *npy_pair)),
            (2, "--smooth", ("calibrate", *npy_pair, "--smooth", "2", *out)),
            (2, "must be numbers", ("calibrate", *npy_pair, "--k-scale", "nan", *out)),
            (2, "2 files of keys", ("calibrate", "--k", "K.npy", "K.npy", "--v", "V.npy", *out)),
            (4, "none.npy", ("calibrate", "--k", "none.npy", "--v", "V.npy", *out)),
            (1, "its scale must be given",
             ("calibrate", "--k", "fp8.npy", "--v", "fp8.npy", *out)),
            (1, "not a .npy file",
             ("calibrate", "--k", "old.safetensors", "--v", "V.npy", *out)),
            (1, "too few tokens",
             ("calibrate", *npy_pair, "--mean", "--min-tokens", "257", *out)),
            (2, "say it with --convention", ("import", "old.safetensors", *out)),
            (1, "--force if you know better",
             ("import", "checkpoint", "--convention", "llm-compressor", *out)),
            (4, "none", ("import", "none", "--convention", "fp8", *out)),
            (2, "--convention", ("import", "checkpoint", "--convention", "guess", *out)),
            (4, "none.json", ("show", "none.json")),
            (1, "not JSON", ("show", "K.npy")),
            (2, "subcommand", ()),
        ]
        for status, message, arguments in refused:
            done = self.run_ctl("scales", *arguments, status=status)
            self.assertIn(message, done.stderr + done.stdout, arguments)
            self.assertFalse((self.folder / "x.json").exists(), arguments)

    def test_dumps_with_heads_first_are_warned_of(self):
        data = values(3, HEADS * TOKENS * DIM)
        self.write("heads.npy", npy((HEADS, TOKENS, DIM), data))
        self.write("tokens.npy", npy((TOKENS, HEADS, DIM), data))
        for name, warned in (("heads.npy", True), ("tokens.npy", False)):
            done = self.run_ctl("scales", "calibrate", "--k", name, "--v", name, "--out", "s.json")
            self.assertEqual("[token][kv head][dim]?" in done.stderr, warned, done.stderr)

    def test_an_edited_file_is_refused(self):
        self.run_ctl("scales", "calibrate", "--k", "K.npy", "--v", "V.npy", "--out", "s.json")
        text = (self.folder / "s.json").read_text(encoding="utf-8")
        self.write("s.json", text.replace("0.015625", "0.03125", 1).encode())
        done = self.run_ctl("scales", "show", "s.json", status=1)
        self.assertIn("was it edited?", done.stderr)


if __name__ == "__main__":
    KVTIERCTL = sys.argv.pop(1)
    unittest.main()
