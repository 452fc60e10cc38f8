#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the NVFP4 reference, byte by byte, with float4_e2m1fn and float8_e4m3fn of ml_dtypes.

  ml_dtypes_oracle_test.py NVFP4_DUMP [--may-skip]

Every BF16 pattern under every scale byte it can meet and several global scales, ties and their
neighbours, zeros of both signs, denormals, infinities. NaN is compared with kvtier's own rule
(code 0x7; ml_dtypes gives 0x8). Prints what was compared; exit status 1 on a mismatch, 77 if
ml_dtypes is missing and --may-skip was given.
"""

import sys

try:
    import ml_dtypes
    import numpy as np
except ImportError as error:
    if "--may-skip" not in sys.argv:
        raise
    print(f"SKIPPED: {error}; run deploy/setup --python and configure again")
    sys.exit(77)

from nvfp4_dump import CODE_BYTES, Dump, VECTOR_DIMS

SCALE_BYTE_MAX = 0x7E
SEED = 20261106
EVERY_BF16 = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
E4M3_VALUES = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
TIES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=np.float32)


class Report:
    def __init__(self):
        self.failed = False

    def compare(self, what, expected, actual):
        expected, actual = np.asarray(expected), np.asarray(actual)
        assert expected.shape == actual.shape, (what, expected.shape, actual.shape)
        wrong = np.flatnonzero(expected != actual)
        print(f"{what:58} {expected.size:10,} compared, {wrong.size:,} differ")
        if wrong.size or not expected.size:
            self.failed = True
            for i in wrong[:4]:
                print(f"    item {i}: expected {expected.flat[i]}, got {actual.flat[i]}")


def around(values, ulps):
    """Each positive float32 with its `ulps` neighbours on both sides."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.int64)
    bits = (bits[:, None] + np.arange(-ulps, ulps + 1)).ravel()
    return bits[bits >= 0].astype(np.uint32).view(np.float32)


def e2m1_codes(quotients):
    return quotients.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0xF


def e4m3_bytes(scales):
    """float8_e4m3fn does not saturate; the format does."""
    return np.minimum(scales, np.float32(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def expected_codes(x, scale, g):
    """Codes of x under the scale bytes `scale` (broadcast): the FP64 quotient, NaN by our rule."""
    step = E4M3_VALUES[scale].astype(np.float64) * g
    codes = e2m1_codes(x.astype(np.float64) / step)
    codes = np.where(np.isnan(x), 0x7, codes)
    return np.where(np.broadcast_to(scale == 0, x.shape), 0, codes).astype(np.uint8)


def quantize(dump, vectors, g):
    codes, scales = dump.quantize(vectors.astype("<f4").tobytes(), g)
    codes = np.frombuffer(codes, np.uint8).reshape(-1, CODE_BYTES)
    nibbles = np.stack([codes & 0xF, codes >> 4], axis=-1).reshape(-1, VECTOR_DIMS)
    return nibbles, np.frombuffer(scales, np.uint8)


def compare_tables(dump, report):
    bytes_in = np.arange(256, dtype=np.uint8)
    ours = np.frombuffer(dump.run(["e4m3-values"], bytes_in.tobytes()), "<f4")
    theirs = bytes_in.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    nan = np.isnan(theirs)
    report.compare("E4M3 values: NaN bytes", nan, np.isnan(ours))
    report.compare("E4M3 values", theirs[~nan].view(np.uint32), ours[~nan].view(np.uint32))
    codes = bytes_in[:16]
    ours = np.frombuffer(dump.run(["e2m1-values"], codes.tobytes()), "<u4")
    theirs = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32).view(np.uint32)
    report.compare("E2M1 values", theirs, ours)


def compare_encoders(dump, report):
    ties = around(TIES, 1000)
    special = np.array([0.0, -0.0, 1e-45, -1e-45, np.inf, -np.inf], dtype=np.float32)
    x = np.concatenate([EVERY_BF16, ties, -ties, special])
    ours = np.frombuffer(dump.run(["e2m1"], x.astype("<f4").tobytes()), np.uint8)
    expected = np.where(np.isnan(x), 0x7, e2m1_codes(x))
    report.compare("E2M1 codes: every BF16, ties +-1000 ulp", expected, ours)
    midpoints = (E4M3_VALUES[1:] + E4M3_VALUES[:-1]) / 2
    s = np.concatenate([EVERY_BF16[:32768], around(midpoints, 1000), around(E4M3_VALUES, 4)])
    s = s[~np.isnan(s)]
    ours = np.frombuffer(dump.run(["e4m3"], s.astype("<f4").tobytes()), np.uint8)
    report.compare("E4M3 bytes: every BF16 >= 0, midpoints +-1000 ulp", e4m3_bytes(s), ours)


def compare_every_bf16_under_scales(dump, report, g, scale_bytes):
    """15 values share a vector with an anchor that makes the scale byte the wanted one."""
    expected_all, ours_all, scales_expected, scales_ours = [], [], [], []
    for byte in scale_bytes:
        anchor = np.float32(6 * (E4M3_VALUES[byte] if byte else 2.0**-10) * g)
        x = EVERY_BF16 if byte == SCALE_BYTE_MAX else EVERY_BF16[np.abs(EVERY_BF16) <= anchor]
        x = np.append(x, np.zeros(-x.size % (VECTOR_DIMS - 1), np.float32))
        x = x.reshape(-1, VECTOR_DIMS - 1)
        vectors = np.concatenate([np.full((len(x), 1), anchor), x], axis=1).astype(np.float32)
        codes, scales = quantize(dump, vectors, g)
        expected_all.append(expected_codes(vectors, np.uint8(byte), g).ravel())
        ours_all.append(codes.ravel())
        scales_expected.append(np.full(len(x), byte, np.uint8))
        scales_ours.append(scales)
    name = f"g = 2^{int(np.log2(g))}, {len(scale_bytes)} scale bytes, every BF16"
    report.compare(name + ": scale", np.concatenate(scales_expected), np.concatenate(scales_ours))
    report.compare(name + ": codes", np.concatenate(expected_all), np.concatenate(ours_all))


def expected_scales(vectors, g):
    """E4M3 of the correctly rounded FP32 quotient of the clamped maximum and 6."""
    amax = np.nan_to_num(np.abs(vectors), nan=0.0, posinf=np.inf).max(axis=1)
    z = np.minimum(amax.astype(np.float64) / g, 2688.0).astype(np.float32)
    return e4m3_bytes(z / np.float32(6))


def compare_random_vectors(dump, report, g):
    """Random BF16 patterns of neighbouring exponents: scale byte and codes of the whole recipe."""
    random = np.random.default_rng(SEED)
    count = 40000
    exponent = int(np.log2(g)) + 127 + random.integers(-12, 14, (count, 1))
    bits = (random.integers(0, 2, (count, VECTOR_DIMS)) << 15
            | np.clip(exponent - random.integers(0, 5, (count, VECTOR_DIMS)), 0, 254) << 7
            | random.integers(0, 128, (count, VECTOR_DIMS))).astype(np.uint16)
    # Infinities, NaNs, both zeros and denormals in some places.
    special = np.array([0x7F80, 0xFF80, 0x7FC0, 0xFF81, 0x0000, 0x8000, 0x0001, 0x807F], np.uint16)
    rows = random.integers(0, count, 2000)
    bits[rows, random.integers(0, VECTOR_DIMS, 2000)] = random.choice(special, 2000)
    vectors = bits.view(ml_dtypes.bfloat16).astype(np.float32)
    codes, scales = quantize(dump, vectors, g)
    name = f"g = 2^{int(np.log2(g))}, random vectors (seed {SEED})"
    expected = expected_scales(vectors, g)
    report.compare(name + ": scale", expected, scales)
    report.compare(name + ": codes", expected_codes(vectors, expected[:, None], g), codes)


def compare_ties_under_scales(dump, report):
    """FP32 neighbours of every tie under every scale byte but 0."""
    bytes_in = np.arange(1, 127, dtype=np.uint8)
    steps = E4M3_VALUES[bytes_in][:, None]
    x = around((TIES * steps).ravel(), 2).reshape(126, -1)
    x = np.concatenate([x, -x], axis=1)
    x = np.append(x, np.zeros((126, -x.shape[1] % 15), np.float32), axis=1).reshape(126, -1, 15)
    anchor = np.broadcast_to((6 * steps)[:, :, None], x.shape[:2] + (1,))
    vectors = np.concatenate([anchor, x], axis=2).reshape(-1, VECTOR_DIMS).astype(np.float32)
    codes, scales = quantize(dump, vectors, 1.0)
    expected = np.repeat(bytes_in, x.shape[1])
    report.compare("ties +-2 ulp under every scale byte: scale", expected, scales)
    report.compare("ties +-2 ulp under every scale byte: codes",
                   expected_codes(vectors, expected[:, None], 1.0), codes)


def compare_dequantizer(dump, report):
    for g in (1.0, 2.0**-100, 2.0**100):
        pairs = np.arange(16, dtype=np.uint8)
        codes = (pairs[0::2] | pairs[1::2] << 4).tobytes() * 127
        scales = np.arange(127, dtype=np.uint8)
        ours = np.frombuffer(dump.dequantize(codes, scales.tobytes(), g), np.uint32)
        e2m1 = pairs.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        expected = (E4M3_VALUES.astype(np.float64)[:, None] * e2m1 * g).astype(np.float32)
        report.compare(f"dequantized values, g = 2^{int(np.log2(g))}",
                       expected.view(np.uint32).ravel(), ours)


def main():
    np.seterr(all="ignore")  # NaN and infinity are among the inputs.
    dump = Dump(sys.argv[1])
    report = Report()
    compare_tables(dump, report)
    compare_encoders(dump, report)
    for g in (1.0, 2.0**-6, 2.0**3):
        compare_every_bf16_under_scales(dump, report, g, range(127))
    for g in (2.0**-100, 2.0**100):
        compare_every_bf16_under_scales(dump, report, g, range(0, 127, 9))
    for g in (1.0, 2.0**-9, 2.0**40, 2.0**-80):
        compare_random_vectors(dump, report, g)
    compare_ties_under_scales(dump, report)
    compare_dequantizer(dump, report)
    print(f"ml_dtypes {ml_dtypes.__version__}: {'DIFFERENT' if report.failed else 'identical'}")
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
