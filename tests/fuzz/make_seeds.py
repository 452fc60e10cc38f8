# SPDX-License-Identifier: Apache-2.0
"""Writes the first inputs of the fuzz targets: ones that a right program would send or store.

usage: make_seeds.py FOLDER

FOLDER gets a folder for each target. What is committed in tests/fuzz/corpus grew from these: start
from them again after the shape of a target's inputs has changed (tests/fuzz/README.md).
"""

import json
import lzma
import pathlib
import re
import struct
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def piece(data):
    """As FuzzInput::Piece reads it."""
    if isinstance(data, str):
        data = data.encode()
    return struct.pack(">H", len(data)) + data


def varint(value):
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def field(number, value):
    """One protobuf field."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, str):
        value = value.encode()
    return varint(number << 3 | 2) + varint(len(value)) + value


# The numbers of service_fuzz.cc.
METHODS = ["RegisterLayout", "Lookup", "Reserve", "Commit", "Abort", "Acquire", "Release",
           "Prefetch", "GetTicket", "CancelPrefetch", "ReportBad", "CreateContext",
           "AppendContext", "PauseContext", "ResumeContext", "ForkContext", "CloseContext",
           "Write", "Read", "OpenSession", "GetStatus", "GetTiers", "ListContexts", "Where",
           "WhyMiss", "Flush", "Reopen", "Watch", "ListTenants", "ApplyHints"]


def call(method, message=b"", chain=0, count=3, flags=0):
    number = bytes([METHODS.index(method)])
    if method == "Read":
        return number + bytes([flags, chain, count, 255]) + piece(message)
    if method == "Reopen":
        return number
    return number + bytes([flags, chain, count]) + piece(message)


HEADER = field(1, b"")


def write(messages, chain=0, count=1):
    out = bytes([METHODS.index("Write"), len(messages)])
    for message in messages:
        out += bytes([0 if message == HEADER else 4 * 3, chain, count, 255]) + piece(message)
    return out


def service_seeds():
    put = call("Reserve") + call("Commit")
    layout = field(1, "model") + field(4, 2) + field(5, 1) + field(6, 64) + field(7, 16)
    yield put + call("Lookup") + call("Acquire") + call("Release", field(2, 2) + field(2, 3))
    yield put + call("Acquire") + call("Reopen") + put + call("Acquire") + call("ReportBad")
    yield call("Reserve") + call("Abort") + call("Reserve", count=8) + call("Reserve", chain=1,
                                                                            count=8) + put
    yield call("RegisterLayout", field(2, layout) + field(3, "adapter") + field(4, "salt"))
    yield (put + call("CreateContext") + call("AppendContext", field(4, 0)) +
           call("PauseContext", field(4, 1000) + field(5, 1)) +
           call("ResumeContext", field(4, 10)) +
           call("ForkContext", field(3, "c0") + field(5, 2), chain=1) +
           call("ListContexts") + call("CloseContext", field(4, 1)) +
           call("CloseContext", chain=1))
    yield (put + call("Flush") + call("Prefetch", field(4, 5) + field(5, 1000)) +
           call("GetTicket", field(2, 2)) + call("CancelPrefetch", field(2, 2)) + call("Read"))
    yield (write([HEADER, field(2, b"\0")]) + write([HEADER, field(2, b"x" * 4097)], chain=2) +
           write([HEADER, field(2, b"\1"), field(2, b"\0")], count=3) + call("Read") +
           call("Lookup"))
    yield b"".join(call("Reserve", chain=c, count=8) + call("Commit", chain=c, count=8)
                   for c in range(4)) + call("Acquire", count=8) + call("Read", chain=1, count=8)
    key = bytes([1]) * 32
    yield (put + call("GetStatus") + call("GetTiers") + call("Where", field(2, key)) +
           call("Where", field(1, "c0")) + call("WhyMiss", field(1, key)) +
           call("WhyMiss", field(1, bytes(32))))
    yield call("OpenSession", field(1, b"t" * 16) + field(2, "engine")) + call("Lookup", flags=255)
    payload = field(1, field(1, "context") + field(2, field(3, "c0")))
    actions = b"".join(
        field(3, field(1, "a") + field(2, f"kv.{verb}") + field(3, "1.0") + field(4, payload))
        for verb in ("fetch", "retain", "pause", "resume", "truncate", "finish"))
    yield (call("Watch") + put + call("CreateContext") + call("AppendContext", field(4, 0)) +
           call("ApplyHints", field(3, field(1, "0.1") + actions)) + call("ListTenants"))


def handle_server_seeds():
    hello = bytes([2, 1, 0, 0, 0, 0, 0])
    session = bytes([1])

    def segment(tier, idx, writable):
        return bytes([2, 2, tier, idx, writable, 0, 0])

    yield hello + session + segment(2, 0, 1) + segment(1, 0, 0) + segment(2, 1, 0)
    yield hello + hello + session + hello + segment(2, 2, 0) + segment(2, 3, 0) + segment(3, 0, 2)
    yield segment(2, 0, 0) + bytes([0, 24]) + struct.pack("<6I", 2, 1, 0, 0, 0, 0) + session
    yield bytes([0, 3]) + b"abc"
    yield bytes([0, 24]) + struct.pack("<6I", 1, 1, 0, 0, 0, 0)


def handle_connection_seeds():
    good = bytes([0, 0, 0])
    yield good * 5
    yield good + bytes([12, 0, 0, 0x20, 0, 0, 0]) + good
    yield good + bytes([3, 3, 0, 0]) + good
    yield good + bytes([0, 4, 1, 3]) + bytes([0, 4, 1, 6])
    yield bytes([0, 4, 1, 2])
    yield bytes([48, 10]) + b"0123456789" + good
    yield bytes([0, 0, 1, 3]) + good


def config_seeds():
    file = """
[server]
run_dir = "/run/x"
socket_mode = 0o660
sessions_max = 12
[hbm]
device = "cpu"
capacity_bytes = "64 MiB"
high_watermark = 0.9
low_watermark = 0.5
[nvme]
enabled = false
dirs = "/a:/b"
[metrics]
listen = "[::1]:9464"
[log]
format = "json"
[[tenant]]
name = "a"
uids = [1, 2]
[[tenant]]
name = "b-c.d_e"
uids = [3]
"""
    yield piece(file)
    yield piece("") + piece("host.capacity_bytes=1GiB") + piece("$KVTIER_NVME_IO_ENGINE=pread")
    yield piece("[hbm]\nlow_watermark = 1") + piece("$KVTIER_LOG_LEVEL=debug") + piece("x")
    yield piece("") + piece("server.data_dir=/a\\\"\x01b") + piece("hbm.low_watermark=1e-3")
    yield piece('tenant = [{name="a", uids=[4294967294]}]\n[log]\nlevel = 1979-05-27T07:32:00Z')


def crc_log(fragments):
    return b"".join(bytes([kind]) + piece(data) for kind, data in fragments)


def nvme_seeds():
    write_of = struct.pack("<QI", 5, 2) + b"change"
    for target in (0, 1):
        yield bytes([target, 1, 16]) + struct.pack("<QQ", 1 << 20, 3)
        yield bytes([target, 0, 0])
        yield bytes([target, 1, 8]) + struct.pack("<I", 2)
    value = struct.pack("<IIQQIIII", 1, 3, 4096, 1 << 24 | 1, 5000, 7, 2, 0) + bytes(64)
    yield bytes([2, 64]) + bytes(range(64)) + value
    yield bytes([3]) + crc_log([(1, write_of), (2, write_of), (3, b"middle"), (4, b"end")])
    yield bytes([3]) + crc_log([(1, write_of), (7, b"damage"), (1, write_of)])
    yield bytes([3]) + crc_log([(6, write_of), (6, b"x"), (1, write_of), (2, write_of)])

    def record(page, payload_bytes, at=0, changes=b"", seal=1):
        return bytes([page]) + struct.pack(">I", payload_bytes) + bytes([at]) + piece(changes) + \
            bytes([seal])

    yield bytes([4, 1]) + record(8, 5000) + record(4, 4096) + record(1, 1)
    yield bytes([4, 0]) + record(3, 8192) + record(1, 100)
    yield bytes([4, 3]) + struct.pack(">I", 5000) + record(12, 9000) + record(2, 60)
    yield (bytes([4, 5]) + record(14, 3000) + record(2, 60, 24, b"\1", 1) +
           record(5, 7, 40, b"\1", 0))


def trace_seeds():
    lines = [{"timestamp": 0, "hash_ids": [1, 2], "session": 1, "api": 5, "stop": "tool",
              "input_length": 1000},
             {"timestamp": 9000, "hash_ids": [1, 2, 3], "session": 1, "input_length": 1500},
             {"timestamp": 3, "hash_ids": [1, 4], "session": "b", "stop": "user"},
             {"timestamp": 3.5, "hash_ids": []}]
    text = "\n".join(map(json.dumps, lines)).encode()
    yield b"\0" + text
    yield b"\0\n \n" + json.dumps(lines[0]).encode() + b"\r\n"
    yield b"\7" + lzma.compress(text)


def safetensors(tensors, data):
    return bytes([0]) + piece(json.dumps(tensors)) + data


def ctl_files_seeds():
    def npy(descr, shape):
        header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
        return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header

    yield bytes([0, 0]) + npy("<f4", "(2, 3)") + bytes(24)
    yield bytes([0, 1]) + npy("<u2", "(4,)") + bytes(8)
    yield bytes([0, 2]) + npy("|u1", "()") + bytes(1)
    yield bytes([0, 0]) + npy("<f8", "(1,)") + struct.pack("<d", 1e300)
    one = {"a": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]},
           "b": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]},
           "__metadata__": {"format": "pt"}}
    yield bytes([1]) + safetensors(one, bytes(12))
    page = (ROOT / "docs/scale-sets.md").read_text(encoding="utf-8")
    yield bytes([2]) + re.search(r"```json\n(.*?)```", page, re.DOTALL).group(1).encode()
    names = {f"model.layers.{i}.self_attn.{s}_proj.{s}_scale":
             {"dtype": "F32", "shape": [1], "data_offsets": [8 * i + 4 * j, 8 * i + 4 * j + 4]}
             for i in range(2) for j, s in enumerate("kv")}
    data = struct.pack("<4f", 0.01, 0.02, 0.03, 0.04)
    yield bytes([3, 1]) + safetensors(names, data)
    config = {"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16,
              "_name_or_path": "m", "quantization_config": {
                  "quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8}}}
    quant = {"producer": {"name": "modelopt", "version": "0.43.0"},
             "quantization": {"kv_cache_quant_algo": "NVFP4"}}
    index = {"weight_map": {name: "model.safetensors" for name in names}}
    yield bytes([4]) + piece(json.dumps(config)) + piece("") + piece(json.dumps(index)) + \
        safetensors(names, data)
    yield bytes([4]) + piece(json.dumps(config)) + piece(json.dumps(quant)) + piece("") + \
        safetensors(names, data)


def chunk_message_seeds():
    header = field(1, 7) + field(2, 3) + field(4, b"k" * 32) + field(5, b"crc4")
    yield bytes([3, 9]) + field(1, header) + field(2, b"chunk of bytes")
    yield bytes([40, 3]) + field(2, b"first") + field(1, header) + field(2, b"last")
    yield (bytes([2, 2]) + field(1, field(1, 1)) + field(9, 5) + field(1, field(2, 1)) +
           field(2, b""))


def store_core_seeds():
    for seed in range(4):
        # Nothing is right or wrong here; bytes that differ.
        yield bytes((i * (2 * seed + 3) ** 3 >> 2) & 0xFF for i in range(600))


SEEDS = {"chunk_message_fuzz": chunk_message_seeds, "config_fuzz": config_seeds,
         "ctl_files_fuzz": ctl_files_seeds,
         "handle_connection_fuzz": handle_connection_seeds,
         "handle_server_fuzz": handle_server_seeds, "nvme_formats_fuzz": nvme_seeds,
         "service_fuzz": service_seeds, "store_core_fuzz": store_core_seeds,
         "trace_file_fuzz": trace_seeds}


def main(folder):
    for name, seeds in SEEDS.items():
        target = pathlib.Path(folder, name)
        target.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(seeds()):
            (target / f"seed-{number:02}").write_bytes(seed)


if __name__ == "__main__":
    main(*sys.argv[1:])
