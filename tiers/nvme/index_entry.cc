// SPDX-License-Identifier: Apache-2.0
#include "tiers/nvme/index_entry.h"

#include <cstring>

namespace kvtier::nvme {
namespace {

constexpr uint32_t kIndexValueVersion = 1;
constexpr size_t kKeyBytes = 2 * Digest::kBytes;

}  // namespace

std::string EncodeIndexKey(const NamespaceHash& namespace_hash, const Key& key) {
  std::string bytes(namespace_hash.AsBytes());
  bytes += key.AsBytes();
  return bytes;
}

RawIndexValue EncodeIndexValue(const IndexEntry& entry) {
  return {.version = kIndexValueVersion,
          .segment_idx = entry.at.segment_idx,
          .offset_bytes = entry.at.offset_bytes,
          .generation = entry.at.generation,
          .payload_bytes = entry.meta.payload_bytes,
          .payload_crc32c = entry.meta.crc32c,
          .depth = entry.meta.depth,
          .reserved = 0,
          .parent = entry.meta.parent,
          .layout = entry.meta.layout};
}

std::optional<RawIndexValue> DecodeIndexValue(std::string_view value) {
  RawIndexValue raw;
  if (value.size() != sizeof(raw)) return std::nullopt;
  std::memcpy(&raw, value.data(), sizeof(raw));
  if (raw.version != kIndexValueVersion) return std::nullopt;
  return raw;
}

std::optional<IndexEntry> DecodeIndexEntry(std::string_view key, std::string_view value) {
  const std::optional<RawIndexValue> raw = DecodeIndexValue(value);
  if (!raw || key.size() != kKeyBytes) return std::nullopt;
  IndexEntry entry{.meta = {.namespace_hash = {},
                            .key = {},
                            .parent = raw->parent,
                            .layout = raw->layout,
                            .depth = raw->depth,
                            .payload_bytes = raw->payload_bytes,
                            .crc32c = raw->payload_crc32c},
                   .at = {.segment_idx = raw->segment_idx,
                          .offset_bytes = raw->offset_bytes,
                          .generation = raw->generation,
                          .nonce = 0}};
  std::memcpy(entry.meta.namespace_hash.bytes.data(), key.data(), Digest::kBytes);
  std::memcpy(entry.meta.key.bytes.data(), key.data() + Digest::kBytes, Digest::kBytes);
  return entry;
}

}  // namespace kvtier::nvme
