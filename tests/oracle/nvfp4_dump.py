# SPDX-License-Identifier: Apache-2.0
"""Python face of the program nvfp4_dump (kernels/nvfp4_dump_main.cc), standard library only."""

import array
import subprocess

VECTOR_DIMS = 16
CODE_BYTES = 8


class Dump:
    """Runs the program at `path`; each call is one process over all items."""

    def __init__(self, path):
        self._path = path

    def run(self, arguments, data):
        """Standard output for standard input `data`. Raises CalledProcessError on a failure."""
        return subprocess.run([self._path, *arguments], input=data, stdout=subprocess.PIPE,
                              check=True).stdout

    def quantize(self, floats, g, four_over_six=False):
        """(code bytes, scale bytes) of little-endian float32 bytes, 16 values a vector."""
        arguments = ["quantize", repr(g)] + (["4over6"] if four_over_six else [])
        out = self.run(arguments, floats)
        item = CODE_BYTES + 2
        codes = b"".join(out[i:i + CODE_BYTES] for i in range(0, len(out), item))
        return codes, out[CODE_BYTES::item]

    def dequantize(self, codes, scales, g):
        """array('f') of the values."""
        items = b"".join(codes[i * CODE_BYTES:(i + 1) * CODE_BYTES] + scales[i:i + 1]
                         for i in range(len(scales)))
        return array.array("f", self.run(["dequantize", repr(g)], items))
