// SPDX-License-Identifier: Apache-2.0
#include "proto/base/packed.h"

#include <gtest/gtest.h>

#include <cstddef>

#include "proto/base/handle_wire.h"

namespace kvtier {
namespace {

TEST(Packed, BlockResultHasTheDocumentedBytes) {
  const BlockResult result = {.status = BlockStatus::kExhausted,
                              .tier = 2,
                              .segment_idx = 0x04030201,
                              .offset_bytes = 0x0807060504030201};
  const std::string packed = PackRecords(std::span(&result, 1));
  EXPECT_EQ(packed,
            std::string("\x05\x02\x00\x00\x01\x02\x03\x04\x01\x02\x03\x04\x05\x06\x07\x08", 16));
}

TEST(Packed, HandleMessagesHaveTheDocumentedOffsets) {
  EXPECT_EQ(offsetof(HandleRequest, kind), 4);
  EXPECT_EQ(offsetof(HandleRequest, tier), 8);
  EXPECT_EQ(offsetof(HandleRequest, segment_idx), 12);
  EXPECT_EQ(offsetof(HandleRequest, writable), 16);
  EXPECT_EQ(offsetof(HandleRequest, reserved), 20);
  EXPECT_EQ(offsetof(HandleReply, status), 4);
  EXPECT_EQ(offsetof(HandleReply, epoch), 8);
  EXPECT_EQ(offsetof(HandleReply, segment_bytes), 16);
  EXPECT_EQ(offsetof(HandleReply, token), 24);
}

TEST(Packed, RecordsComeBack) {
  const std::vector<uint32_t> values = {1, 0xffffffff, 7};
  const auto back = UnpackRecords<uint32_t>(PackRecords(std::span(values)), "crc32cs");
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(*back, values);
  EXPECT_TRUE(UnpackRecords<Key>("", "keys")->empty());
}

TEST(Packed, RejectsCutRecordsNamingTheField) {
  const auto keys = UnpackRecords<Key>(std::string(33, 'x'), "keys");
  EXPECT_EQ(keys.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(keys.status().ToString().find("keys has 33 bytes"), std::string::npos);
}

TEST(Packed, NamesEveryBlockStatus) {
  EXPECT_EQ(BlockStatusName(BlockStatus::kOk), "ok");
  EXPECT_EQ(BlockStatusName(BlockStatus::kUnavailable), "unavailable");
  EXPECT_EQ(BlockStatusName(static_cast<BlockStatus>(0)), "unknown");
}

}  // namespace
}  // namespace kvtier
