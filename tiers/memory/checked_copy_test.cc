// SPDX-License-Identifier: Apache-2.0
#include "tiers/memory/checked_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "proto/base/crc32c.h"
#include "tiers/tier_test_util.h"

namespace kvtier {
namespace {

TEST(CheckedCopyTest, CopiesAndSumsEveryLengthAndAlignment) {
  std::mt19937_64 random(TestSeed());
  std::vector<std::byte> source(70'000);
  for (std::byte& byte : source) byte = static_cast<std::byte>(random());
  PageBuffer target(77'824);
  for (int round = 0; round < 3000; ++round) {
    // Short ones, all of them, and long ones.
    const size_t bytes = round < 1100 ? static_cast<size_t>(round) : random() % 65'000;
    const size_t from = random() % 200;
    // As slots are, and as they are not.
    const size_t to = random() % 2 == 0 ? 0 : random() % 200;
    const std::span<const std::byte> piece = std::span(source).subspan(from, bytes);
    for (const auto& [name, copy] : CheckedCopies()) {
      SCOPED_TRACE(name);
      std::ranges::fill(target.bytes(), std::byte{0xEE});
      ASSERT_EQ(copy(target.bytes().subspan(to), piece), Crc32c(piece)) << bytes;
      ASSERT_TRUE(std::ranges::equal(target.bytes().subspan(to, bytes), piece)) << bytes;
      ASSERT_EQ(target.bytes()[to + bytes], std::byte{0xEE}) << bytes << ": wrote too much";
    }
  }
}

TEST(CheckedCopyTest, SumsTheStandardTestBytes) {
  std::vector<std::byte> text;
  for (const char c : {'1', '2', '3', '4', '5', '6', '7', '8', '9'}) {
    text.push_back(static_cast<std::byte>(c));
  }
  std::vector<std::byte> target(text.size());
  EXPECT_EQ(CopyWithCrc32c(target, text), 0xE3069283u);
  for (const auto& [name, copy] : CheckedCopies()) {
    EXPECT_EQ(copy(target, text), 0xE3069283u) << name;
  }
}

}  // namespace
}  // namespace kvtier
