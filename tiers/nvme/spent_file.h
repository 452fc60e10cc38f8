// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "absl/status/statusor.h"
#include "tiers/nvme/write_budget.h"

namespace kvtier::nvme {

// The bytes of the file `written`: what the write budget has spent, so that it is known without an
// index, too. Little-endian.
//   offset  size  field
//        0     8  magic "KVTWRIT1"
//        8     4  version
//       12     4  reserved, 0
//       16     8  day, since 1970, UTC
//       24     8  bytes written on that day
//       32     4  reserved, 0
//       36     4  CRC-32C of the 36 bytes before
struct RawSpentFile {
  uint64_t magic;
  uint32_t version;
  uint32_t reserved;
  uint64_t day;
  uint64_t bytes;
  uint32_t reserved_too;
  uint32_t crc32c;
};
static_assert(sizeof(RawSpentFile) == 40 && std::is_trivially_copyable_v<RawSpentFile>);
static_assert(offsetof(RawSpentFile, day) == 16 && offsetof(RawSpentFile, bytes) == 24);
static_assert(offsetof(RawSpentFile, crc32c) == 36);

inline constexpr uint32_t kSpentFileVersion = 1;

std::array<std::byte, sizeof(RawSpentFile)> EncodeSpentFile(const WriteBudget::Spent& spent);
// Pure, for bytes that nobody vouches for. DATA_LOSS: not the whole file, damaged, or of a version
// that this build does not know.
absl::StatusOr<WriteBudget::Spent> ParseSpentFile(std::span<const std::byte> bytes);

}  // namespace kvtier::nvme
