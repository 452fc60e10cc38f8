// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_ROWS_H_
#define KVTIER_KERNELS_ROWS_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "kernels/element.h"
#include "kernels/nvfp4.h"
#include "kernels/status.h"
#include "kernels/tile_layout.h"

// Internal to kernels/: typed access to ConstRows and MutableRows. Loads and stores go through
// memcpy because rows need no alignment. Pure, thread-safe.

namespace kvtier::kernels {

// Bytes from the data of ConstRows or MutableRows to row `token_idx`.
template <typename Rows>
uint64_t RowOffset(const Rows& rows, uint64_t token_idx) {
  uint64_t elements = token_idx * rows.token_stride;
  if (rows.paging.page_tokens != 0) {
    const uint64_t slot = rows.paging.first_slot + token_idx;
    elements = rows.paging.page_table[slot / rows.paging.page_tokens] * rows.paging.page_stride +
               slot % rows.paging.page_tokens * rows.token_stride;
  }
  return elements * ElementBytes(rows.type);
}

// Row `token_idx`.
inline const std::byte* RowData(const ConstRows& rows, uint64_t token_idx) {
  return static_cast<const std::byte*>(rows.data) + RowOffset(rows, token_idx);
}
inline std::byte* RowData(const MutableRows& rows, uint64_t token_idx) {
  return static_cast<std::byte*>(rows.data) + RowOffset(rows, token_idx);
}

// Longest way from the first element of a view to another one, in elements: no address that is
// computed from it overflows, however many bytes an element has.
inline constexpr uint64_t kReachMax = uint64_t{1} << 58;

// Whether `count` things that begin `stride` elements apart lie within kReachMax.
constexpr bool IsWithinReach(uint64_t count, uint64_t stride) {
  return count <= 1 || stride <= kReachMax / (count - 1);
}

// Whether one of the spans has elements but no data.
template <typename... Spans>
constexpr bool AnyIsNull(const Spans&... spans) {
  return (... || (spans.data() == nullptr && !spans.empty()));
}
inline Status NullSpan() { return Status::InvalidArgument("a span has elements but no data"); }

// Whether no address of the pages that hold token_count >= 1 tokens overflows. The table is long
// enough.
inline bool PagesAreWithinReach(const Paging& paging, uint64_t token_stride, uint32_t token_count) {
  if (!IsWithinReach(paging.page_tokens, token_stride)) return false;
  // With the usual strides, no index is too large.
  if (IsWithinReach(uint64_t{1} << 32, paging.page_stride)) return true;
  const uint64_t first = paging.first_slot / paging.page_tokens;
  const uint64_t last = (paging.first_slot + token_count - 1) / paging.page_tokens;
  return std::all_of(paging.page_table + first, paging.page_table + last + 1,
                     [&paging](uint32_t page_idx) {
                       return IsWithinReach(uint64_t{page_idx} + 1, paging.page_stride);
                     });
}

// What ConstRows and MutableRows of token_count tokens have in common to check.
template <typename Rows>
Status ValidateRows(const Rows& rows, uint32_t token_count, uint32_t head_dim) {
  if (rows.data == nullptr) return Status::InvalidArgument("rows have no data");
  if (ElementBytes(rows.type) == 0) return Status::InvalidArgument("unknown element type");
  if (rows.token_stride < head_dim) {
    return Status::InvalidArgument("a token_stride is less than head_dim");
  }
  if (!std::isfinite(rows.scale) || rows.scale <= 0.0F) {
    return Status::InvalidArgument("a scale is not finite and above 0");
  }
  // Values to store are multiplied with the reciprocal: 0 times infinity would be NaN.
  if (std::is_same_v<Rows, MutableRows> && !std::isfinite(1.0F / rows.scale)) {
    return Status::InvalidArgument("a scale to store with has no finite reciprocal");
  }
  const Paging& paging = rows.paging;
  if (paging.page_tokens == 0) {
    return IsWithinReach(token_count, rows.token_stride)
               ? Status()
               : Status::InvalidArgument("a token_stride is too large");
  }
  if (paging.page_table == nullptr) return Status::InvalidArgument("no page table");
  const uint64_t capacity = uint64_t{paging.page_table_count} * paging.page_tokens;
  if (paging.first_slot > capacity || capacity - paging.first_slot < token_count) {
    return Status::InvalidArgument("the page table is too short");
  }
  if (token_count > 0 && !PagesAreWithinReach(paging, rows.token_stride, token_count)) {
    return Status::InvalidArgument("a page_stride or token_stride is too large");
  }
  return Status();
}

// Vectors of a channel transform, [head_dim] each or empty, as SealOptions requires them.
inline Status ValidateTransform(std::span<const float> mean, std::span<const float> smooth,
                                uint32_t head_dim) {
  if (AnyIsNull(mean, smooth)) return NullSpan();
  for (const auto& vector : {mean, smooth}) {
    if (vector.empty()) continue;
    if (vector.size() != head_dim ||
        !std::all_of(vector.begin(), vector.end(), [](float x) { return std::isfinite(x); })) {
      return Status::InvalidArgument("k_mean and k_smooth need a finite value per channel");
    }
  }
  if (!std::all_of(smooth.begin(), smooth.end(),
                   [](float x) { return x > 0.0F && std::isfinite(1.0F / x); })) {
    return Status::InvalidArgument("k_smooth must be above 0 and have a finite reciprocal");
  }
  return Status();
}

// What multiplies a side of a tile, as SealOptions says.
inline Status ValidateSideScale(SideFormat format, float scale) {
  if (format == SideFormat::kNvfp4 && !IsValidGlobalScale(scale)) {
    return Status::InvalidArgument("a global scale is not a power of two in [2^-100, 2^100]");
  }
  if (format == SideFormat::kFp8 &&
      (!std::isfinite(scale) || scale <= 0.0F || !std::isfinite(1.0F / scale))) {
    return Status::InvalidArgument(
        "a scale of an FP8 side is not above 0 with a finite reciprocal");
  }
  return Status();
}

// Converts row `token_idx` of `rows` to FP32 values as the element type holds them (FP8 without
// its scale).
inline void LoadRow(const ConstRows& rows, uint64_t token_idx, uint32_t dim_count, float* out) {
  const auto* row = static_cast<const unsigned char*>(rows.data) + RowOffset(rows, token_idx);
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

}  // namespace kvtier::kernels

#endif  // KVTIER_KERNELS_ROWS_H_
