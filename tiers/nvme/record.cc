// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/record.h"

#include <cstring>

#include "proto/base/crc32c.h"
#include "proto/base/status_util.h"

namespace kvtier::nvme {
namespace {

constexpr uint64_t MagicOf(const char (&text)[9]) {
  uint64_t magic = 0;
  for (int i = 7; i >= 0; --i) magic = magic << 8 | static_cast<uint8_t>(text[i]);
  return magic;
}
constexpr uint64_t kSegmentMagic = MagicOf("KVTSEGM1");
constexpr uint64_t kRecordMagic = MagicOf("KVTRECD1");

// Of the whole page but the four bytes at `crc_offset`.
uint32_t PageCrc(std::span<const std::byte> page, size_t crc_offset) {
  const uint32_t before = Crc32c(page.first(crc_offset));
  return Crc32c(page.subspan(crc_offset + sizeof(uint32_t)), before);
}

template <typename Raw>
void PutRaw(Raw& raw, std::span<std::byte, kPageBytes> page) {
  std::memset(page.data(), 0, page.size());
  std::memcpy(page.data(), &raw, sizeof(raw));
  raw.header_crc32c = PageCrc(page, offsetof(Raw, header_crc32c));
  std::memcpy(page.data(), &raw, sizeof(raw));
}

template <typename Raw>
absl::StatusOr<Raw> GetRaw(std::span<const std::byte> page, uint64_t magic, const char* what) {
  if (page.size() != kPageBytes) return DataLoss("%s header: %d bytes", what, page.size());
  Raw raw;
  std::memcpy(&raw, page.data(), sizeof(raw));
  if (raw.magic != magic) return DataLoss("%s header: bad magic", what);
  if (raw.header_crc32c != PageCrc(page, offsetof(Raw, header_crc32c))) {
    return DataLoss("%s header: checksum mismatch", what);
  }
  if (raw.version > kFormatVersion) {
    return FailedPrecondition("%s header: format version %d, this build reads up to %d", what,
                              raw.version, kFormatVersion);
  }
  if (raw.version == 0 || raw.reserved != 0) return DataLoss("%s header: bad field", what);
  return raw;
}

}  // namespace

void EncodeSegmentHeader(const SegmentHeader& header, std::span<std::byte, kPageBytes> page) {
  RawSegmentHeader raw{.magic = kSegmentMagic,
                       .version = kFormatVersion,
                       .segment_idx = header.segment_idx,
                       .segment_bytes = header.segment_bytes,
                       .sequence = header.sequence,
                       .nonce = header.nonce,
                       .reserved = 0,
                       .header_crc32c = 0};
  PutRaw(raw, page);
}

void EncodeRecordHeader(const RecordHeader& header, std::span<std::byte, kPageBytes> page) {
  RawRecordHeader raw{.magic = kRecordMagic,
                      .version = kFormatVersion,
                      .reserved = 0,
                      .generation = header.generation,
                      .nonce = header.nonce,
                      .namespace_hash = header.meta.namespace_hash,
                      .key = header.meta.key,
                      .parent = header.meta.parent,
                      .layout = header.meta.layout,
                      .depth = header.meta.depth,
                      .payload_bytes = header.meta.payload_bytes,
                      .payload_crc32c = header.meta.crc32c,
                      .header_crc32c = 0};
  PutRaw(raw, page);
}

absl::StatusOr<SegmentHeader> ParseSegmentHeader(std::span<const std::byte> page) {
  KVT_ASSIGN_OR_RETURN(const auto raw, GetRaw<RawSegmentHeader>(page, kSegmentMagic, "segment"));
  if (raw.segment_bytes < 2 * kPageBytes || raw.segment_bytes > kSegmentBytesMax ||
      raw.segment_bytes % kPageBytes != 0 || raw.sequence == 0 ||
      raw.sequence != SequenceOf(GenerationOf(raw.sequence, 0))) {
    return DataLoss("segment header: impossible size or sequence");
  }
  return SegmentHeader{.segment_idx = raw.segment_idx,
                       .segment_bytes = raw.segment_bytes,
                       .sequence = raw.sequence,
                       .nonce = raw.nonce};
}

absl::StatusOr<RecordHeader> ParseRecordHeader(std::span<const std::byte> page) {
  KVT_ASSIGN_OR_RETURN(const auto raw, GetRaw<RawRecordHeader>(page, kRecordMagic, "record"));
  if (raw.payload_bytes == 0 || SequenceOf(raw.generation) == 0) {
    return DataLoss("record header: impossible length or generation");
  }
  return RecordHeader{.meta = {.namespace_hash = raw.namespace_hash,
                               .key = raw.key,
                               .parent = raw.parent,
                               .layout = raw.layout,
                               .depth = raw.depth,
                               .payload_bytes = raw.payload_bytes,
                               .crc32c = raw.payload_crc32c},
                      .generation = raw.generation,
                      .nonce = raw.nonce};
}

}  // namespace kvtier::nvme
