// SPDX-License-Identifier: Apache-2.0
#include "proto/base/key.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "proto/base/layout.h"

namespace kvtier {
namespace {

using nlohmann::json;

std::string FromHexText(const std::string& hex) {
  std::string raw;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) {
    raw.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return raw;
}

class GoldenKeys : public testing::Test {
 protected:
  void SetUp() override {
    std::ifstream file(KVTIER_GOLDEN_DIR "/keys.json");
    ASSERT_TRUE(file.is_open()) << KVTIER_GOLDEN_DIR "/keys.json";
    vectors_ = json::parse(file);
  }
  json vectors_;
};

Codec CodecOf(const std::string& name) {
  if (name == "nvfp4") return Codec::kNvfp4;
  if (name == "fp8") return Codec::kFp8;
  if (name == "bf16") return Codec::kBf16;
  EXPECT_EQ(name, "raw");
  return Codec::kRaw;
}

TEST_F(GoldenKeys, LayoutFingerprints) {
  ASSERT_GE(vectors_["layouts"].size(), 3);
  for (const json& vector : vectors_["layouts"]) {
    const json& fields = vector["layout"];
    Layout layout;
    layout.model = fields["model"];
    layout.weights_revision = fields["weights_revision"];
    layout.tokenizer = fields["tokenizer"];
    layout.layer_count = fields["layer_count"];
    layout.kv_head_count = fields["kv_head_count"];
    layout.head_dim = fields["head_dim"];
    layout.block_tokens = fields["block_tokens"];
    layout.codec = CodecOf(fields["codec"]);
    layout.scale_set = fields["scale_set"];
    layout.rope = fields["rope"];
    layout.tp_rank = fields["tp_rank"];
    layout.tp_size = fields["tp_size"];
    layout.pp_rank = fields["pp_rank"];
    layout.pp_size = fields["pp_size"];
    layout.raw_block_bytes = fields["raw_block_bytes"];
    EXPECT_TRUE(layout.Validate().ok()) << layout.Validate();
    EXPECT_EQ(layout.Fingerprint().Hex(), std::string(vector["fingerprint"])) << fields;
  }
}

TEST_F(GoldenKeys, NamespaceHashes) {
  ASSERT_GE(vectors_["namespaces"].size(), 4);
  for (const json& vector : vectors_["namespaces"]) {
    const auto layout = Digest::FromHex(std::string(vector["layout_fingerprint"]));
    ASSERT_TRUE(layout.ok()) << layout.status();
    const NamespaceHash hash =
        HashNamespace(std::string(vector["tenant"]), *layout, std::string(vector["adapter"]),
                      std::string(vector["salt"]));
    EXPECT_EQ(hash.Hex(), std::string(vector["namespace_hash"])) << vector;
  }
}

TEST_F(GoldenKeys, BlockKeys) {
  ASSERT_GE(vectors_["blocks"].size(), 6);
  for (const json& vector : vectors_["blocks"]) {
    const auto ns = Digest::FromHex(std::string(vector["namespace_hash"]));
    ASSERT_TRUE(ns.ok()) << ns.status();
    std::optional<Key> parent;
    if (const std::string hex = vector["parent_key"]; !hex.empty()) {
      parent = *Digest::FromHex(hex);
    }
    const std::vector<uint32_t> token_ids = vector["token_ids"];
    const Key key = HashBlock(*ns, parent, token_ids, FromHexText(vector["extra"]));
    EXPECT_EQ(key.Hex(), std::string(vector["key"])) << vector;
  }
}

TEST_F(GoldenKeys, NamespacesOfEnginesWithHashesOfTheirOwn) {
  ASSERT_GE(vectors_["engine_namespaces"].size(), 3);
  for (const json& vector : vectors_["engine_namespaces"]) {
    const auto layout = Digest::FromHex(std::string(vector["layout_fingerprint"]));
    ASSERT_TRUE(layout.ok()) << layout.status();
    const HashDomain domain = {.name = vector["hash_domain"],
                               .probe = FromHexText(vector["probe"])};
    EXPECT_EQ(ValidateHashDomain(domain), absl::OkStatus());
    const NamespaceHash hash =
        HashNamespace(std::string(vector["tenant"]), *layout, std::string(vector["adapter"]),
                      std::string(vector["salt"]), domain);
    EXPECT_EQ(hash.Hex(), std::string(vector["namespace_hash"])) << vector;
  }
}

TEST_F(GoldenKeys, KeysOfBlocksThatEnginesHashed) {
  ASSERT_GE(vectors_["engine_blocks"].size(), 4);
  for (const json& vector : vectors_["engine_blocks"]) {
    const auto ns = Digest::FromHex(std::string(vector["namespace_hash"]));
    ASSERT_TRUE(ns.ok()) << ns.status();
    const Key key =
        HashEngineBlock(*ns, FromHexText(vector["engine_hash"]), FromHexText(vector["extra"]));
    EXPECT_EQ(key.Hex(), std::string(vector["key"])) << vector;
  }
}

TEST(HashDomainTest, HasANameAndAProbeOrNeither) {
  EXPECT_EQ(ValidateHashDomain({}), absl::OkStatus());
  for (const HashDomain& bad : {HashDomain{.name = "a"}, HashDomain{.probe = "a"},
                                HashDomain{.name = std::string(65, 'a'), .probe = "a"},
                                HashDomain{.name = "a", .probe = std::string(65, 'a')}}) {
    EXPECT_EQ(ValidateHashDomain(bad).code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(Digest, HexAndBytesComeBack) {
  Digest digest;
  for (size_t i = 0; i < Digest::kBytes; ++i) digest.bytes[i] = static_cast<uint8_t>(i * 37);
  EXPECT_EQ(*Digest::FromHex(digest.Hex()), digest);
  EXPECT_EQ(*Digest::FromBytes(digest.AsBytes()), digest);
}

TEST(Digest, RejectsWrongLengthsAndDigits) {
  const std::string good(64, 'a');
  EXPECT_TRUE(Digest::FromHex(good).ok());
  for (const std::string& bad : {std::string(), good.substr(1), good + "a", "A" + good.substr(1),
                                 "g" + good.substr(1), " " + good.substr(1)}) {
    EXPECT_EQ(Digest::FromHex(bad).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
  EXPECT_EQ(Digest::FromBytes(std::string(31, 'x')).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Digest::FromBytes(std::string(33, 'x')).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(FieldHasher, FieldBordersArePartOfTheHash) {
  EXPECT_NE(FieldHasher().Add("ab").Add("c").Finish(), FieldHasher().Add("a").Add("bc").Finish());
  EXPECT_NE(FieldHasher().Add("").Finish(), FieldHasher().Finish());
  EXPECT_NE(FieldHasher().AddU32(1).Finish(), FieldHasher().AddU64(1).Finish());
}

}  // namespace
}  // namespace kvtier
