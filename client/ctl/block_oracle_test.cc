// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/block_oracle.h"

#include <gtest/gtest.h>

#include <vector>

namespace kvtier::ctl {
namespace {

Key KeyOf(uint32_t number) {
  return HashBlock(NamespaceHash{}, std::nullopt, std::span(&number, 1));
}

class BlockOracleTest : public testing::Test {
 protected:
  std::vector<std::byte> Sealed(uint32_t number) const {
    std::vector<std::byte> block(generator_.block_bytes());
    generator_.SealBlock(KeyOf(number), block);
    return block;
  }

  const KvGenerator generator_{LayoutPresets()[0].shape};
};

TEST_F(BlockOracleTest, FindsTheFirstWrongByte) {
  BlockOracle oracle(&generator_, 1, 1 << 20);
  std::vector<std::byte> block = Sealed(0);
  EXPECT_EQ(oracle.FirstWrongByte(0, KeyOf(0), block), std::nullopt);
  block[100] ^= std::byte{1};
  block[2000] ^= std::byte{1};
  EXPECT_EQ(oracle.FirstWrongByte(0, KeyOf(0), block), 100U);
}

TEST_F(BlockOracleTest, AnotherBlocksBytesAreWrong) {
  BlockOracle oracle(&generator_, 2, 1 << 20);
  EXPECT_TRUE(oracle.FirstWrongByte(0, KeyOf(0), Sealed(1)).has_value());
}

TEST_F(BlockOracleTest, RecomputesWhatItsBoundedCacheForgot) {
  BlockOracle oracle(&generator_, 5, 2 * generator_.block_bytes());
  for (int round = 0; round < 3; ++round) {
    for (uint32_t block = 0; block < 5; ++block) {
      EXPECT_EQ(oracle.FirstWrongByte(block, KeyOf(block), Sealed(block)), std::nullopt);
    }
  }
}

TEST_F(BlockOracleTest, DecodeOverSealedBlocksAgreesWithFp64) {
  std::vector<Key> keys;
  std::vector<std::vector<std::byte>> blocks;
  std::vector<const std::byte*> table;
  for (uint32_t block = 0; block < 20; ++block) {
    keys.push_back(KeyOf(block));
    blocks.push_back(Sealed(block));
    table.push_back(blocks.back().data());
  }
  for (uint64_t seed = 0; seed < 10; ++seed) {
    const auto error = DecodeError(
        generator_,
        {.layer_idx = static_cast<uint32_t>(seed % 2), .seed = seed, .keys = keys, .table = table});
    ASSERT_TRUE(error.ok()) << error.status();
    EXPECT_LT(*error, kDecodeTolerance) << "seed " << seed;
  }
}

TEST_F(BlockOracleTest, DecodeNoticesASwappedBlock) {
  const std::vector<Key> keys = {KeyOf(0), KeyOf(1)};
  const std::vector<std::byte> first = Sealed(0);
  const std::vector<const std::byte*> table = {first.data(), first.data()};
  const auto error = DecodeError(generator_, {.seed = 16, .keys = keys, .table = table});
  ASSERT_TRUE(error.ok()) << error.status();
  EXPECT_GT(*error, kDecodeTolerance);
}

TEST_F(BlockOracleTest, DecodeOfATailAloneIsExact) {
  const auto error = DecodeError(generator_, {.seed = 3, .keys = {}, .table = {}});
  ASSERT_TRUE(error.ok()) << error.status();
  EXPECT_LT(*error, kDecodeTolerance);
}

}  // namespace
}  // namespace kvtier::ctl
