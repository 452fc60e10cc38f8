// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_ROWS_H_
#define KVTIER_KERNELS_ROWS_H_

#include <cstdint>
#include <cstring>

#include "kernels/element.h"
#include "kernels/nvfp4.h"
#include "kernels/tile_layout.h"

// Internal to kernels/: typed access to ConstRows and MutableRows. Loads and stores go through
// memcpy because rows need no alignment. Pure, thread-safe.

namespace kvtier::kernels {

// KCodeOffset and its three siblings: K and V differ only in where their bytes are.
using OffsetFunction = uint64_t (*)(const TileShape&, uint32_t token_idx, uint32_t vector_idx);

// Converts row `token_idx` of `rows` to FP32 values as the element type holds them.
inline void LoadRow(const ConstRows& rows, uint64_t token_idx, uint32_t dim_count, float* out) {
  const auto* row = static_cast<const unsigned char*>(rows.data) +
                    token_idx * rows.token_stride * ElementBytes(rows.type);
  if (rows.type == ElementType::kFp32) {
    std::memcpy(out, row, dim_count * sizeof(float));
    return;
  }
  if (rows.type == ElementType::kFp8E4m3) {
    for (uint32_t i = 0; i < dim_count; ++i) out[i] = DecodeE4m3Scale(row[i]);
    return;
  }
  for (uint32_t i = 0; i < dim_count; ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, row + i * sizeof(bits), sizeof(bits));
    out[i] = rows.type == ElementType::kBf16 ? Bf16ToFloat(bits) : Fp16ToFloat(bits);
  }
}

// Writes dim_count FP32 values into row `token_idx` of BF16 or FP32 `rows`, from dim `first_dim`.
inline void StoreDims(const MutableRows& rows, uint64_t token_idx, uint32_t first_dim,
                      uint32_t dim_count, const float* values) {
  auto* target = static_cast<unsigned char*>(rows.data) +
                 (token_idx * rows.token_stride + first_dim) * ElementBytes(rows.type);
  if (rows.type == ElementType::kFp32) {
    std::memcpy(target, values, dim_count * sizeof(float));
    return;
  }
  for (uint32_t i = 0; i < dim_count; ++i) {
    const uint16_t bits = FloatToBf16(values[i]);
    std::memcpy(target + i * sizeof(bits), &bits, sizeof(bits));
  }
}

}  // namespace kvtier::kernels

#endif  // KVTIER_KERNELS_ROWS_H_
