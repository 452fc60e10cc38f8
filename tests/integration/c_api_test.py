#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""libkvtier.so from another language, against a real kvtierd.

    c_api_test.py KVTIERD LIBKVTIER
"""

import ctypes
import os
import subprocess
import sys
import tempfile
import time
import unittest

KVTIERD, LIBRARY = sys.argv[1:3]

OK, INVALID_ARGUMENT, DEADLINE_EXCEEDED, UNAVAILABLE = 0, 3, 4, 14
BLOCK_OK, BLOCK_MISS = 1, 2
ON_HBM = 1
BLOCK_BYTES = 65536


class Error(ctypes.Structure):
    _fields_ = [("reason", ctypes.c_char * 64), ("message", ctypes.c_char * 448)]


class Key(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint8 * 32)]


class Options(ctypes.Structure):
    _fields_ = [("struct_bytes", ctypes.c_size_t), ("run_dir", ctypes.c_char_p),
                ("client_name", ctypes.c_char_p), ("control_timeout_ms", ctypes.c_uint32),
                ("transfer_timeout_ms", ctypes.c_uint32), ("reconnect_timeout_ms", ctypes.c_uint32)]


class Layout(ctypes.Structure):
    _fields_ = [("struct_bytes", ctypes.c_size_t)] + [
        (name, ctypes.c_char_p)
        for name in ("model", "weights_revision", "tokenizer", "scale_set", "rope")] + [
            (name, ctypes.c_uint32)
            for name in ("layer_count", "kv_head_count", "head_dim", "block_tokens", "codec",
                         "tp_rank", "tp_size", "pp_rank", "pp_size", "raw_block_bytes")]


class Namespace(ctypes.Structure):
    _fields_ = [("hash", ctypes.c_uint8 * 32), ("layout", ctypes.c_uint8 * 32),
                ("client_idx", ctypes.c_uint32), ("block_bytes", ctypes.c_uint32)]


class Block(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_void_p), ("device_address", ctypes.c_uint64),
                ("device_ordinal", ctypes.c_int32), ("crc32c", ctypes.c_uint32),
                ("status", ctypes.c_uint8), ("tier", ctypes.c_uint8),
                ("reserved", ctypes.c_uint8 * 6)]


class Ticket(ctypes.Structure):
    _fields_ = [("ticket_id", ctypes.c_uint64), ("pending_bytes", ctypes.c_uint64),
                ("block_count", ctypes.c_uint32), ("covered_block_count", ctypes.c_uint32),
                ("ready_block_count", ctypes.c_uint32), ("eta_ms", ctypes.c_uint32),
                ("eta_known", ctypes.c_uint8), ("done", ctypes.c_uint8),
                ("reserved", ctypes.c_uint8 * 6)]


lib = ctypes.CDLL(LIBRARY)
lib.kvtier_version.restype = ctypes.c_char_p
lib.kvtier_lease_ok_prefix.restype = ctypes.c_size_t
for _name in ("kvtier_close", "kvtier_fill_free", "kvtier_lease_release", "kvtier_lease_ok_prefix"):
    getattr(lib, _name).argtypes = [ctypes.c_void_p]


class CApiTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="kvtier-test-")
        cls.run_dir = os.path.join(cls.folder.name, "run").encode()
        cls.daemon = subprocess.Popen([
            KVTIERD, f"--server.run_dir={cls.run_dir.decode()}",
            f"--server.data_dir={cls.folder.name}/data", "--hbm.capacity_bytes=4MiB",
            "--hbm.segment_bytes=1MiB", "--host.capacity_bytes=4MiB", "--host.segment_bytes=1MiB",
            "--nvme.capacity_bytes=64MiB", "--nvme.segment_bytes=4MiB"
        ])

    @classmethod
    def tearDownClass(cls):
        cls.daemon.kill()
        cls.daemon.wait()
        cls.folder.cleanup()

    def setUp(self):
        self.error = Error()
        self.client = self.connect(self.run_dir)

    def tearDown(self):
        lib.kvtier_close(self.client)

    def check(self, code):
        self.assertEqual(code, OK, self.error.message.decode())

    def connect(self, run_dir, timeout_ms=20000):
        client = ctypes.c_void_p()
        options = Options(ctypes.sizeof(Options), run_dir, b"python", 0, 0, timeout_ms)
        self.code = lib.kvtier_connect(ctypes.byref(options), ctypes.byref(client),
                                       ctypes.byref(self.error))
        return client

    def register(self, model):
        layout = Layout(struct_bytes=ctypes.sizeof(Layout), model=model, layer_count=1,
                        kv_head_count=1, head_dim=64, codec=4, raw_block_bytes=BLOCK_BYTES)
        ns = Namespace()
        self.check(lib.kvtier_register_layout(self.client, ctypes.byref(layout), None, None,
                                              ctypes.byref(ns), ctypes.byref(self.error)))
        return ns

    def chain(self, ns, count):
        keys = (Key * count)()
        for i in range(count):
            token = ctypes.c_uint32(i)
            parent = ctypes.byref(keys[i - 1]) if i > 0 else None
            self.check(lib.kvtier_hash_block(ctypes.byref(ns), parent, ctypes.byref(token),
                                             ctypes.c_size_t(1), None, ctypes.c_size_t(0),
                                             ctypes.byref(keys[i])))
        return keys

    def test_puts_and_gets_in_place(self):
        ns = self.register(b"in place")
        keys = self.chain(ns, 3)
        fill = ctypes.c_void_p()
        self.check(lib.kvtier_reserve(self.client, ctypes.byref(ns), None, keys,
                                      ctypes.c_size_t(2), 1, ctypes.byref(fill),
                                      ctypes.byref(self.error)))
        block = Block()
        for i in range(2):
            self.check(lib.kvtier_fill_block(fill, ctypes.c_size_t(i), ctypes.byref(block)))
            self.assertEqual(block.status, BLOCK_OK)
            ctypes.memset(block.bytes, 65 + i, BLOCK_BYTES)
        statuses = (ctypes.c_uint8 * 2)()
        self.check(lib.kvtier_commit(self.client, ctypes.byref(ns), fill, statuses,
                                     ctypes.byref(self.error)))
        self.assertEqual(list(statuses), [BLOCK_OK, BLOCK_OK])
        lib.kvtier_fill_free(fill)

        residency = (ctypes.c_uint8 * 3)()
        found = ctypes.c_size_t()
        self.check(lib.kvtier_lookup(self.client, ctypes.byref(ns), keys, ctypes.c_size_t(3),
                                     residency, ctypes.byref(found), ctypes.byref(self.error)))
        self.assertEqual(found.value, 2)
        self.assertTrue(residency[0] & ON_HBM)

        lease = ctypes.c_void_p()
        self.check(lib.kvtier_acquire(self.client, ctypes.byref(ns), keys, ctypes.c_size_t(3),
                                      ctypes.byref(lease), ctypes.byref(self.error)))
        self.assertEqual(lib.kvtier_lease_ok_prefix(lease), 2)
        self.check(lib.kvtier_lease_block(lease, ctypes.c_size_t(1), ctypes.byref(block)))
        self.assertEqual(ctypes.string_at(block.bytes, BLOCK_BYTES), b"B" * BLOCK_BYTES)
        self.check(lib.kvtier_lease_verify(self.client, ctypes.byref(ns), lease,
                                           ctypes.c_size_t(1), ctypes.byref(self.error)))
        self.check(lib.kvtier_lease_block(lease, ctypes.c_size_t(2), ctypes.byref(block)))
        self.assertEqual(block.status, BLOCK_MISS)
        lib.kvtier_lease_release(lease)

    def test_writes_and_reads_by_value(self):
        ns = self.register(b"by value")
        keys = self.chain(ns, 2)
        payloads = os.urandom(2 * BLOCK_BYTES)
        statuses = (ctypes.c_uint8 * 2)()
        self.check(lib.kvtier_write(self.client, ctypes.byref(ns), None, keys, ctypes.c_size_t(2),
                                    payloads, ctypes.c_size_t(len(payloads)), statuses,
                                    ctypes.byref(self.error)))
        memory = ctypes.create_string_buffer(len(payloads))
        count = ctypes.c_size_t()
        self.check(lib.kvtier_read_into(self.client, ctypes.byref(ns), keys, ctypes.c_size_t(2),
                                        memory, ctypes.c_size_t(len(payloads)),
                                        ctypes.byref(count), ctypes.byref(self.error)))
        self.assertEqual(count.value, 2)
        self.assertEqual(memory.raw, payloads)

    def test_prefetches_and_cancels(self):
        ns = self.register(b"prefetched")
        keys = self.chain(ns, 2)
        ticket = Ticket()
        self.check(lib.kvtier_prefetch(self.client, ctypes.byref(ns), keys, ctypes.c_size_t(2),
                                       ctypes.byref(ticket), ctypes.byref(self.error)))
        self.assertEqual((ticket.block_count, ticket.covered_block_count), (2, 0))
        self.check(lib.kvtier_cancel_prefetch(self.client, ctypes.c_uint64(ticket.ticket_id),
                                              ctypes.byref(self.error)))

    def test_says_why_not(self):
        begin = time.monotonic()
        client = self.connect(b"/nonexistent", timeout_ms=200)
        self.assertIn(self.code, (UNAVAILABLE, DEADLINE_EXCEEDED))
        self.assertIsNone(client.value)
        self.assertIn(b"/nonexistent", self.error.message)
        self.assertLess(time.monotonic() - begin, 10)
        self.assertEqual(lib.kvtier_acquire(self.client, None, None, ctypes.c_size_t(0), None,
                                            ctypes.byref(self.error)), INVALID_ARGUMENT)

    def test_exports_what_the_header_declares_and_nothing_else(self):
        listed = subprocess.run(["nm", "-D", "--defined-only", LIBRARY], check=True,
                                capture_output=True, text=True).stdout
        symbols = {line.split()[-1].split("@")[0] for line in listed.splitlines()}
        self.assertEqual({s for s in symbols if not s.startswith("kvtier_")}, {"KVTIER_0"})
        self.assertEqual(lib.kvtier_abi_major(), 0)
        self.assertRegex(lib.kvtier_version(), rb"^\d+\.\d+\.\d+$")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
