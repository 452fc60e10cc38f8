// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/watch_lines.h"

#include <gtest/gtest.h>

#include <array>

namespace kvtier::ctl {
namespace {

Key KeyOf(uint8_t first) {
  Key key;
  key.bytes[0] = first;
  return key;
}

client::WatchUpdate Update() {
  client::WatchUpdate update{.epoch = 0xab, .sequence = 7};
  client::WatchedBlocks stored{.stored = true, .tier = client::Residency::kHost};
  stored.block_tokens = 64;
  stored.keys = {KeyOf(1), KeyOf(2), KeyOf(9)};
  stored.parents = {std::nullopt, KeyOf(1), KeyOf(8)};
  update.blocks.push_back(stored);
  client::WatchedBlocks removed{.stored = false, .tier = client::Residency::kNvme};
  removed.keys = {KeyOf(5), KeyOf(6)};
  update.blocks.push_back(removed);
  return update;
}

const std::string kZeros(62, '0');
const std::string kNamespace(64, '0');

TEST(WatchLinesTest, JsonHasTheNamesOfEngines) {
  EXPECT_EQ(
      WatchLines(Update(), true),
      R"({"event":"BlockStored","epoch":"00000000000000ab","sequence":7,"block_hashes":["01)" +
          kZeros + R"(","02)" + kZeros + R"("],"medium":"CPU","namespace":")" + kNamespace +
          R"(","parent_block_hash":null,"block_size":64})" + "\n" +
          R"({"event":"BlockStored","epoch":"00000000000000ab","sequence":7,"block_hashes":["09)" +
          kZeros + R"("],"medium":"CPU","namespace":")" + kNamespace +
          R"(","parent_block_hash":"08)" + kZeros + R"(","block_size":64})" + "\n" +
          R"({"event":"BlockRemoved","epoch":"00000000000000ab","sequence":7,"block_hashes":["05)" +
          kZeros + R"(","06)" + kZeros + R"("],"medium":"STORAGE","namespace":")" + kNamespace +
          "\"}\n");
}

TEST(WatchLinesTest, TextIsALineForEachChain) {
  EXPECT_EQ(WatchLines(Update(), false),
            "stored  CPU         2  01" + kZeros + "\nstored  CPU         1  09" + kZeros +
                " after 08" + kZeros + "\nremoved STORAGE     2  05" + kZeros + "\n");
}

TEST(WatchLinesTest, SaysWhenToBeginAnew) {
  client::WatchUpdate update{.epoch = 1, .sequence = 2};
  update.lost = true;
  EXPECT_EQ(WatchLines(update, false), "lost events\n");
  EXPECT_EQ(WatchLines(update, true),
            "{\"event\":\"Lost\",\"epoch\":\"0000000000000001\",\"sequence\":2}\n");
  update.lost = false;
  update.reset = true;
  EXPECT_EQ(WatchLines(update, true),
            "{\"event\":\"AllBlocksCleared\",\"epoch\":\"0000000000000001\",\"sequence\":2}\n");
}

}  // namespace
}  // namespace kvtier::ctl
