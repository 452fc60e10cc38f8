// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/spent_file.h"

#include <cstring>

#include "proto/base/crc32c.h"
#include "proto/base/status_util.h"

namespace kvtier::nvme {
namespace {

constexpr char kMagic[] = "KVTWRIT1";

uint32_t CrcOf(const RawSpentFile& raw) {
  return Crc32c(std::as_bytes(std::span(&raw, 1)).first(offsetof(RawSpentFile, crc32c)));
}

}  // namespace

std::array<std::byte, sizeof(RawSpentFile)> EncodeSpentFile(const WriteBudget::Spent& spent) {
  RawSpentFile raw{.magic = 0,
                   .version = kSpentFileVersion,
                   .reserved = 0,
                   .day = spent.day,
                   .bytes = spent.bytes,
                   .reserved_too = 0,
                   .crc32c = 0};
  std::memcpy(&raw.magic, kMagic, sizeof(raw.magic));
  raw.crc32c = CrcOf(raw);
  std::array<std::byte, sizeof(raw)> bytes;
  std::memcpy(bytes.data(), &raw, sizeof(raw));
  return bytes;
}

absl::StatusOr<WriteBudget::Spent> ParseSpentFile(std::span<const std::byte> bytes) {
  RawSpentFile raw;
  if (bytes.size() != sizeof(raw)) return DataLoss("it has %d bytes", bytes.size());
  std::memcpy(&raw, bytes.data(), sizeof(raw));
  if (std::memcmp(&raw.magic, kMagic, sizeof(raw.magic)) != 0) return DataLoss("bad magic");
  if (raw.crc32c != CrcOf(raw)) return DataLoss("checksum mismatch");
  if (raw.version != kSpentFileVersion) {
    return DataLoss("version %d, this build reads %d", raw.version, kSpentFileVersion);
  }
  return WriteBudget::Spent{.day = raw.day, .bytes = raw.bytes};
}

}  // namespace kvtier::nvme
