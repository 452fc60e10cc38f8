// SPDX-License-Identifier: Apache-2.0
//
// The bytes of a segment file. FORMAT.md is the page for people; the static_asserts here keep both
// true. Everything is little-endian and lies on multiples of 4 KiB.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "absl/status/statusor.h"
#include "tiers/tier.h"

namespace kvtier::nvme {

inline constexpr uint64_t kPageBytes = 4096;
// Raised when an older kvtierd could misread the files.
inline constexpr uint32_t kFormatVersion = 1;

// A generation names one record for ever: the sequence of its segment's activation (never reused
// in one directory) above the page it starts at.
inline constexpr int kGenerationPageBits = 24;
inline constexpr uint64_t kSegmentBytesMax = kPageBytes << kGenerationPageBits;
constexpr uint64_t GenerationOf(uint64_t sequence, uint64_t offset_bytes) {
  return sequence << kGenerationPageBits | offset_bytes / kPageBytes;
}
constexpr uint64_t SequenceOf(uint64_t generation) { return generation >> kGenerationPageBits; }
constexpr uint64_t OffsetOf(uint64_t generation) {
  return (generation & ((1ULL << kGenerationPageBits) - 1)) * kPageBytes;
}

constexpr uint64_t RoundUpToPage(uint64_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}
// A record: one header page, then the payload padded with zeros to whole pages.
constexpr uint64_t RecordBytes(uint32_t payload_bytes) {
  return kPageBytes + RoundUpToPage(payload_bytes);
}

struct SegmentHeader {
  uint32_t segment_idx = 0;
  uint64_t segment_bytes = 0;
  uint64_t sequence = 0;
  // Random, repeated in every record of this activation: payload bytes that happen, or are made,
  // to look like a record are not taken for one when segments are scanned.
  uint64_t nonce = 0;

  friend bool operator==(const SegmentHeader&, const SegmentHeader&) = default;
};

struct RecordHeader {
  BlockMeta meta;
  uint64_t generation = 0;
  uint64_t nonce = 0;

  friend bool operator==(const RecordHeader&, const RecordHeader&) = default;
};

// Each fills one whole page.
void EncodeSegmentHeader(const SegmentHeader& header, std::span<std::byte, kPageBytes> page);
void EncodeRecordHeader(const RecordHeader& header, std::span<std::byte, kPageBytes> page);

// Pure, for bytes that nobody vouches for. Errors: DATA_LOSS (short, magic, checksum, impossible
// field), FAILED_PRECONDITION (intact, but of a newer format).
absl::StatusOr<SegmentHeader> ParseSegmentHeader(std::span<const std::byte> page);
absl::StatusOr<RecordHeader> ParseRecordHeader(std::span<const std::byte> page);

//   offset  size  field
//        0     8  magic "KVTSEGM1"
//        8     4  version
//       12     4  segment_idx
//       16     8  segment_bytes
//       24     8  sequence
//       32     8  nonce
//       40     4  reserved, 0
//       44     4  CRC-32C of the page without this field
//       48        zeros to 4096
struct RawSegmentHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t segment_idx;
  uint64_t segment_bytes;
  uint64_t sequence;
  uint64_t nonce;
  uint32_t reserved;
  uint32_t header_crc32c;
};
static_assert(sizeof(RawSegmentHeader) == 48 && std::is_trivially_copyable_v<RawSegmentHeader>);
static_assert(offsetof(RawSegmentHeader, header_crc32c) == 44);

//   offset  size  field
//        0     8  magic "KVTRECD1"
//        8     4  version
//       12     4  reserved, 0
//       16     8  generation
//       24     8  nonce
//       32    32  namespace_hash
//       64    32  key
//       96    32  parent
//      128    32  layout fingerprint
//      160     4  depth
//      164     4  payload_bytes, 1 or more
//      168     4  CRC-32C of the payload
//      172     4  CRC-32C of the page without this field
//      176        zeros to 4096
struct RawRecordHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t reserved;
  uint64_t generation;
  uint64_t nonce;
  NamespaceHash namespace_hash;
  Key key;
  Key parent;
  LayoutFingerprint layout;
  uint32_t depth;
  uint32_t payload_bytes;
  uint32_t payload_crc32c;
  uint32_t header_crc32c;
};
static_assert(sizeof(RawRecordHeader) == 176 && std::is_trivially_copyable_v<RawRecordHeader>);
static_assert(offsetof(RawRecordHeader, generation) == 16);
static_assert(offsetof(RawRecordHeader, namespace_hash) == 32);
static_assert(offsetof(RawRecordHeader, layout) == 128);
static_assert(offsetof(RawRecordHeader, payload_bytes) == 164);
static_assert(offsetof(RawRecordHeader, header_crc32c) == 172);

}  // namespace kvtier::nvme
