// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/record.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <random>

#include "proto/base/crc32c.h"
#include "tiers/tier_test_util.h"

namespace kvtier::nvme {
namespace {

using Page = std::array<std::byte, kPageBytes>;

RecordHeader SomeRecord() {
  return {.meta = MakeBlock(17, 5000).meta,
          .generation = GenerationOf(9, 3 * kPageBytes),
          .nonce = 0x1122334455667788};
}

SegmentHeader SomeSegment() {
  return {.segment_idx = 5, .segment_bytes = 1 << 20, .sequence = 77, .nonce = 42};
}

// Puts the right checksum over a changed page, as a writer with other ideas would.
void Reseal(Page& page, size_t crc_offset) {
  const std::span<const std::byte> all(page);
  const uint32_t crc = Crc32c(all.subspan(crc_offset + 4), Crc32c(all.first(crc_offset)));
  std::memcpy(&page[crc_offset], &crc, sizeof(crc));
}

TEST(RecordTest, RoundTrips) {
  Page page;
  EncodeRecordHeader(SomeRecord(), page);
  const auto record = ParseRecordHeader(page);
  ASSERT_TRUE(record.ok()) << record.status();
  EXPECT_EQ(*record, SomeRecord());
  EncodeSegmentHeader(SomeSegment(), page);
  const auto segment = ParseSegmentHeader(page);
  ASSERT_TRUE(segment.ok()) << segment.status();
  EXPECT_EQ(*segment, SomeSegment());
}

TEST(RecordTest, BytesAreThoseOfTheFormatPage) {
  Page page;
  EncodeRecordHeader(SomeRecord(), page);
  EXPECT_EQ(std::memcmp(page.data(), "KVTRECD1\x01\0\0\0\0\0\0\0", 16), 0);
  EXPECT_EQ(std::memcmp(&page[24], "\x88\x77\x66\x55\x44\x33\x22\x11", 8), 0);
  EXPECT_EQ(std::memcmp(&page[64], SomeRecord().meta.key.bytes.data(), 32), 0);
  EncodeSegmentHeader(SomeSegment(), page);
  EXPECT_EQ(std::memcmp(page.data(), "KVTSEGM1\x01\0\0\0\x05\0\0\0", 16), 0);
}

TEST(RecordTest, FindsEveryFlippedBit) {
  Page good;
  EncodeRecordHeader(SomeRecord(), good);
  for (size_t bit = 0; bit < kPageBytes * 8; ++bit) {
    Page page = good;
    page[bit / 8] ^= std::byte{1} << (bit % 8);
    ASSERT_EQ(ParseRecordHeader(page).status().code(), absl::StatusCode::kDataLoss) << bit;
  }
}

TEST(RecordTest, RefusesShortPagesAndOtherHeaders) {
  Page page;
  EncodeRecordHeader(SomeRecord(), page);
  for (const size_t size_bytes : {0u, 1u, 175u, 176u, 4095u}) {
    EXPECT_FALSE(ParseRecordHeader(std::span(page).first(size_bytes)).ok());
    EXPECT_FALSE(ParseSegmentHeader(std::span(page).first(size_bytes)).ok());
  }
  EXPECT_FALSE(ParseSegmentHeader(page).ok());
  EncodeSegmentHeader(SomeSegment(), page);
  EXPECT_FALSE(ParseRecordHeader(page).ok());
}

TEST(RecordTest, TellsANewerFormatFromDamage) {
  Page page;
  const uint32_t version = kFormatVersion + 1;
  EncodeRecordHeader(SomeRecord(), page);
  std::memcpy(&page[8], &version, sizeof(version));
  EXPECT_EQ(ParseRecordHeader(page).status().code(), absl::StatusCode::kDataLoss);
  Reseal(page, 172);
  EXPECT_EQ(ParseRecordHeader(page).status().code(), absl::StatusCode::kFailedPrecondition);
  EncodeSegmentHeader(SomeSegment(), page);
  std::memcpy(&page[8], &version, sizeof(version));
  Reseal(page, 44);
  EXPECT_EQ(ParseSegmentHeader(page).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(RecordTest, RefusesImpossibleFieldsUnderAGoodChecksum) {
  const auto status_with = [](size_t offset, uint64_t value, size_t value_bytes) {
    Page page;
    EncodeSegmentHeader(SomeSegment(), page);
    std::memcpy(&page[offset], &value, value_bytes);
    Reseal(page, 44);
    return ParseSegmentHeader(page).status().code();
  };
  EXPECT_EQ(status_with(16, 4096, 8), absl::StatusCode::kDataLoss);
  EXPECT_EQ(status_with(16, UINT64_MAX, 8), absl::StatusCode::kDataLoss);
  EXPECT_EQ(status_with(24, 0, 8), absl::StatusCode::kDataLoss);
  EXPECT_EQ(status_with(24, UINT64_MAX, 8), absl::StatusCode::kDataLoss);
  Page page;
  RecordHeader empty = SomeRecord();
  empty.meta.payload_bytes = 0;
  EncodeRecordHeader(empty, page);
  EXPECT_EQ(ParseRecordHeader(page).status().code(), absl::StatusCode::kDataLoss);
}

TEST(RecordTest, SurvivesRandomPages) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 300; ++round) {
    Page page;
    EncodeRecordHeader(SomeRecord(), page);
    for (int i = 0; i < 8; ++i) page[random() % 180] = std::byte(random() & 0xFF);
    if (random() % 2 == 0) Reseal(page, 172);
    const auto record = ParseRecordHeader(page);
    EXPECT_TRUE(!record.ok() || record->meta.payload_bytes > 0);
  }
}

TEST(RecordTest, GenerationTellsItsPlace) {
  const uint64_t generation = GenerationOf(123456, 4096ULL * 777);
  EXPECT_EQ(SequenceOf(generation), 123456u);
  EXPECT_EQ(OffsetOf(generation), 4096u * 777);
  EXPECT_EQ(RecordBytes(1), 8192u);
  EXPECT_EQ(RecordBytes(4096), 8192u);
  EXPECT_EQ(RecordBytes(4097), 12288u);
}

}  // namespace
}  // namespace kvtier::nvme
