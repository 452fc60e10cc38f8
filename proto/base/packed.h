// SPDX-License-Identifier: Apache-2.0
//
// The packed bytes fields of kvtier.v1: arrays of fixed-size little-endian records.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/base/key.h"

namespace kvtier {

static_assert(std::endian::native == std::endian::little,
              "packed records are written in memory order, which must be little-endian");

// Numbers equal those of kvtier.v1.BlockStatus, where each is explained.
enum class BlockStatus : uint8_t {
  kOk = 1,
  kMiss = 2,
  kExists = 3,
  kPending = 4,
  kExhausted = 5,
  kPrecondition = 6,
  kCorrupt = 7,
  kUnavailable = 8,
};
std::string_view BlockStatusName(BlockStatus status);

// Where a slot lies: byte `offset_bytes` of segment `segment_idx` of the tier. Segment numbers are
// never reused within one epoch.
//   offset  size  field
//        0     1  status (BlockStatus)
//        1     1  tier (kvtier.v1.Tier: 1 hbm, 2 host)
//        2     2  reserved, 0
//        4     4  segment_idx
//        8     8  offset_bytes
struct BlockResult {
  BlockStatus status = BlockStatus::kMiss;
  uint8_t tier = 0;
  uint16_t reserved = 0;
  uint32_t segment_idx = 0;
  uint64_t offset_bytes = 0;
};
static_assert(sizeof(BlockResult) == 16 && std::is_trivially_copyable_v<BlockResult>);

// Bits of LookupResponse.residency.
inline constexpr uint8_t kResidentHbm = 1;
inline constexpr uint8_t kResidentHost = 2;
inline constexpr uint8_t kResidentNvme = 4;

template <typename Record>
std::string PackRecords(std::span<const Record> records) {
  static_assert(std::is_trivially_copyable_v<Record>);
  return std::string(reinterpret_cast<const char*>(records.data()), records.size_bytes());
}

// INVALID_ARGUMENT when the length is not a multiple of the record size.
absl::Status CheckPacked(std::string_view packed, size_t record_bytes, std::string_view field);

template <typename Record>
absl::StatusOr<std::vector<Record>> UnpackRecords(std::string_view packed, std::string_view field) {
  static_assert(std::is_trivially_copyable_v<Record>);
  if (absl::Status status = CheckPacked(packed, sizeof(Record), field); !status.ok()) return status;
  std::vector<Record> records(packed.size() / sizeof(Record));
  if (!packed.empty()) std::memcpy(records.data(), packed.data(), packed.size());
  return records;
}

}  // namespace kvtier
