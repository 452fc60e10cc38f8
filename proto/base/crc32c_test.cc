// SPDX-License-Identifier: Apache-2.0
#include "proto/base/crc32c.h"

#include <gtest/gtest.h>

#include <string_view>
#include <vector>

namespace kvtier {
namespace {

uint32_t CrcOf(std::string_view text, uint32_t seed = 0) {
  return Crc32c(std::as_bytes(std::span(text)), seed);
}

TEST(Crc32c, MatchesTheVectorsOfRfc3720) {
  EXPECT_EQ(CrcOf("123456789"), 0xE3069283);
  EXPECT_EQ(CrcOf(""), 0);
  EXPECT_EQ(Crc32c(std::vector<std::byte>(32, std::byte{0})), 0x8A9136AA);
  EXPECT_EQ(Crc32c(std::vector<std::byte>(32, std::byte{0xff})), 0x62A8AB43);
}

TEST(Crc32c, ContinuesFromTheBytesBefore) {
  const std::string_view text = "the quick brown fox jumps over the lazy dog";
  for (size_t cut = 0; cut <= text.size(); ++cut) {
    EXPECT_EQ(CrcOf(text.substr(cut), CrcOf(text.substr(0, cut))), CrcOf(text)) << cut;
  }
}

}  // namespace
}  // namespace kvtier
