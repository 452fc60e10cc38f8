// SPDX-License-Identifier: Apache-2.0
//
// What fixes the bytes of a block, and its fingerprint.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "proto/base/key.h"

namespace kvtier {

// Numbers equal those of kvtier.v1.Codec.
enum class Codec : uint8_t { kNvfp4 = 1, kFp8 = 2, kBf16 = 3, kRaw = 4 };

// The C++ face of kvtier.v1.Layout, where units and ranges are documented. A plain value.
struct Layout {
  // Raised when the meaning of the bytes of any codec changes; part of the fingerprint.
  static constexpr uint32_t kFormatVersion = 1;

  std::string model;
  std::string weights_revision;
  std::string tokenizer;
  uint32_t layer_count = 0;
  uint32_t kv_head_count = 0;
  uint32_t head_dim = 0;
  uint32_t block_tokens = 64;
  Codec codec = Codec::kNvfp4;
  std::string scale_set;
  std::string rope;
  uint32_t tp_rank = 0;
  uint32_t tp_size = 1;
  uint32_t pp_rank = 0;
  uint32_t pp_size = 1;
  uint32_t raw_block_bytes = 0;

  // INVALID_ARGUMENT naming the field and its range.
  absl::Status Validate() const;
  // Payload bytes of one block. Requires Validate().ok(); never above kBlockBytesMax.
  uint32_t BlockBytes() const;
  LayoutFingerprint Fingerprint() const;
};

// Largest block: one registered buffer and one segment must hold it with ease.
inline constexpr uint64_t kBlockBytesMax = 256ULL << 20;

}  // namespace kvtier
