// SPDX-License-Identifier: Apache-2.0
#include "proto/base/crc32c.h"

#include <isa-l/crc.h>

#include <algorithm>

namespace kvtier {

uint32_t Crc32c(std::span<const std::byte> data, uint32_t seed) {
  // ISA-L takes an int length and a non-const pointer it does not write through.
  constexpr size_t kPieceBytes = size_t{1} << 30;
  uint32_t state = ~seed;
  while (!data.empty()) {
    const size_t piece_bytes = std::min(data.size(), kPieceBytes);
    auto* piece = const_cast<unsigned char*>(reinterpret_cast<const unsigned char*>(data.data()));
    state = crc32_iscsi(piece, static_cast<int>(piece_bytes), state);
    data = data.subspan(piece_bytes);
  }
  return ~state;
}

}  // namespace kvtier
