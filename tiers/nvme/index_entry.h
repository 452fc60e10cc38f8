// SPDX-License-Identifier: Apache-2.0
//
// The bytes of the index: what RocksDB holds of each block.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>

#include "tiers/nvme/segment_table.h"
#include "tiers/tier.h"

namespace kvtier::nvme {

// Where the payload of a block lies and what it is.
struct IndexEntry {
  BlockMeta meta;
  Location at;  // nonce is not stored
};

// Value in column family "blocks"; its key is namespace_hash followed by key (64 bytes).
//   offset  size  field
//        0     4  version, 1
//        4     4  segment_idx
//        8     8  offset_bytes
//       16     8  generation
//       24     4  payload_bytes
//       28     4  CRC-32C of the payload
//       32     4  depth
//       36     4  reserved, 0
//       40    32  parent
//       72    32  layout fingerprint
struct RawIndexValue {
  uint32_t version;
  uint32_t segment_idx;
  uint64_t offset_bytes;
  uint64_t generation;
  uint32_t payload_bytes;
  uint32_t payload_crc32c;
  uint32_t depth;
  uint32_t reserved;
  Key parent;
  LayoutFingerprint layout;
};
static_assert(sizeof(RawIndexValue) == 104 && std::is_trivially_copyable_v<RawIndexValue>);

std::string EncodeIndexKey(const NamespaceHash& namespace_hash, const Key& key);
RawIndexValue EncodeIndexValue(const IndexEntry& entry);

// Pure, for bytes that nobody vouches for. Empty: an unknown shape. Whether the place exists, and
// holds the block, is for the caller to find out.
std::optional<RawIndexValue> DecodeIndexValue(std::string_view value);
std::optional<IndexEntry> DecodeIndexEntry(std::string_view key, std::string_view value);

}  // namespace kvtier::nvme
