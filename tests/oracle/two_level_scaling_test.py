#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Two-level scaling against one global scale: the published comparison, reproduced.

  two_level_scaling_test.py NVFP4_DUMP

Data: random.seed(20261106); 4,096 x random.gauss(0, 0.02); then 8 x random.randrange(4096) are the
positions of outliers of 6.0. Root mean square error of the quantized values:

  scales not rounded, as published:  block + global          0.003412
                                     one global only         0.019623
  kvtier's encoder, E4M3 scales:     g = 1                   0.003519
                                     g = 2^ceil(log2(amax / 448)) = 2^-6   0.003424
                                     the same g, 4-over-6    0.003342

Not rounded means E2M1 codes under the exact scale amax / 6 of each 16 values, or of all 4,096.
The first two lines show what the second scale level is worth and fix the data; the others are the
encoder's own figures, so that a change of its rounding shows here.
"""

import array
import math
import random
import sys

from nvfp4_dump import Dump, VECTOR_DIMS

COUNT = 4096
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def data():
    random.seed(20261106)
    values = [random.gauss(0, 0.02) for _ in range(COUNT)]
    for _ in range(8):
        values[random.randrange(COUNT)] = 6.0
    return values


def nearest(value, scale):
    """Nearest E2M1 multiple of an exact scale; a tie goes to the even code."""
    if scale == 0:
        return 0.0
    a = abs(value) / scale
    code = min(range(8), key=lambda i: (abs(a - MAGNITUDES[i]), i % 2))
    return math.copysign(MAGNITUDES[code] * scale, value)


def unrounded(values, vector_dims):
    out = []
    for i in range(0, len(values), vector_dims):
        vector = values[i:i + vector_dims]
        scale = max(map(abs, vector)) / 6
        out += [nearest(x, scale) for x in vector]
    return out


def rmse(expected, actual):
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(expected, actual)) / len(expected))


def encoder_rmse(dump, values, g, four_over_six=False):
    codes, scales = dump.quantize(array.array("f", values).tobytes(), g, four_over_six)
    return rmse(values, dump.dequantize(codes, scales, g))


def main():
    dump = Dump(sys.argv[1])
    values = data()
    amax = max(map(abs, values))
    g = 2.0 ** math.ceil(math.log2(amax / 448))
    results = (
        ("block + global, scales not rounded", rmse(values, unrounded(values, VECTOR_DIMS)),
         0.003412),
        ("global only, scale not rounded", rmse(values, unrounded(values, COUNT)), 0.019623),
        ("kvtier, g = 1", encoder_rmse(dump, values, 1.0), 0.003519),
        (f"kvtier, g = 2^{round(math.log2(g))}", encoder_rmse(dump, values, g), 0.003424),
        ("kvtier, the same g, 4-over-6", encoder_rmse(dump, values, g, True), 0.003342),
    )
    failed = False
    for name, actual, expected in results:
        ok = abs(actual - expected) < 1e-6
        failed |= not ok
        print(f"{name:38} RMSE {actual:.6f} expected {expected:.6f} {'ok' if ok else 'WRONG'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
