#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A second implementation of layout fingerprints, namespace hashes and block keys, from the words
of proto/base/{key,layout}.h and hashlib alone, against proto/golden/keys.json."""

import hashlib
import json
import pathlib
import struct
import unittest

VECTORS = pathlib.Path(__file__).resolve().parents[2] / "proto/golden/keys.json"
LAYOUT_FORMAT_VERSION = 1
CODECS = {"nvfp4": 1, "fp8": 2, "bf16": 3, "raw": 4}


def u32(value):
    return struct.pack("<I", value)


def hash_fields(*fields):
    """SHA-256 over the fields, each after its length as 8 little-endian bytes."""
    digest = hashlib.sha256()
    for field in fields:
        digest.update(struct.pack("<Q", len(field)))
        digest.update(field)
    return digest.digest()


def layout_fingerprint(layout):
    return hash_fields(
        b"kvtier-layout", u32(LAYOUT_FORMAT_VERSION),
        layout["model"].encode(), layout["weights_revision"].encode(), layout["tokenizer"].encode(),
        u32(layout["layer_count"]), u32(layout["kv_head_count"]), u32(layout["head_dim"]),
        u32(layout["block_tokens"]), u32(CODECS[layout["codec"]]),
        layout["scale_set"].encode(), layout["rope"].encode(),
        u32(layout["tp_rank"]), u32(layout["tp_size"]),
        u32(layout["pp_rank"]), u32(layout["pp_size"]), u32(layout["raw_block_bytes"]))


def namespace_hash(tenant, fingerprint, adapter, salt, domain="", probe=b""):
    fields = [tenant.encode(), fingerprint, adapter.encode(), salt.encode()]
    if not domain:
        return hash_fields(b"kvtier-namespace-1", *fields)
    return hash_fields(b"kvtier-namespace-2", *fields, domain.encode(), probe)


def block_key(namespace, parent, token_ids, extra):
    return hash_fields(b"kvtier-block-1", namespace, parent, b"".join(map(u32, token_ids)), extra)


def engine_block_key(namespace, engine_hash, extra):
    return hash_fields(b"kvtier-engine-block-1", namespace, engine_hash, extra)


class KeysTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.vectors = json.loads(VECTORS.read_text(encoding="ascii"))

    def test_layout_fingerprints(self):
        self.assertGreaterEqual(len(self.vectors["layouts"]), 3)
        for vector in self.vectors["layouts"]:
            self.assertEqual(layout_fingerprint(vector["layout"]).hex(), vector["fingerprint"])

    def test_namespace_hashes(self):
        self.assertGreaterEqual(len(self.vectors["namespaces"]), 4)
        for vector in self.vectors["namespaces"]:
            actual = namespace_hash(vector["tenant"], bytes.fromhex(vector["layout_fingerprint"]),
                                    vector["adapter"], vector["salt"])
            self.assertEqual(actual.hex(), vector["namespace_hash"])

    def test_block_keys(self):
        self.assertGreaterEqual(len(self.vectors["blocks"]), 6)
        for vector in self.vectors["blocks"]:
            actual = block_key(bytes.fromhex(vector["namespace_hash"]),
                               bytes.fromhex(vector["parent_key"]), vector["token_ids"],
                               bytes.fromhex(vector["extra"]))
            self.assertEqual(actual.hex(), vector["key"])

    def test_namespaces_of_engines_with_hashes_of_their_own(self):
        self.assertGreaterEqual(len(self.vectors["engine_namespaces"]), 3)
        for vector in self.vectors["engine_namespaces"]:
            actual = namespace_hash(vector["tenant"], bytes.fromhex(vector["layout_fingerprint"]),
                                    vector["adapter"], vector["salt"], vector["hash_domain"],
                                    bytes.fromhex(vector["probe"]))
            self.assertEqual(actual.hex(), vector["namespace_hash"])

    def test_keys_of_blocks_that_engines_hashed(self):
        self.assertGreaterEqual(len(self.vectors["engine_blocks"]), 4)
        for vector in self.vectors["engine_blocks"]:
            actual = engine_block_key(bytes.fromhex(vector["namespace_hash"]),
                                      bytes.fromhex(vector["engine_hash"]),
                                      bytes.fromhex(vector["extra"]))
            self.assertEqual(actual.hex(), vector["key"])

    def test_all_vectors_differ(self):
        hashes = ([v["fingerprint"] for v in self.vectors["layouts"]]
                  + [v["namespace_hash"] for v in self.vectors["namespaces"]]
                  + [v["namespace_hash"] for v in self.vectors["engine_namespaces"]]
                  + [v["key"] for v in self.vectors["blocks"]]
                  + [v["key"] for v in self.vectors["engine_blocks"]])
        self.assertEqual(len(hashes), len(set(hashes)))


if __name__ == "__main__":
    unittest.main()
