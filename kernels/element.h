// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_ELEMENT_H_
#define KVTIER_KERNELS_ELEMENT_H_

#include <cstdint>

namespace kvtier::kernels {

// The element types of K, V and queries outside of tiles, native byte order.
enum class ElementType : uint8_t {
  kBf16 = 0,
  kFp16 = 1,
  kFp32 = 2,
  kFp8E4m3 = 3,  // Signed E4M3 (0x7F and 0xFF are NaN, no infinity) with a scale beside it.
};

// Bytes of one element; 0 for a value outside the enum.
constexpr uint32_t ElementBytes(ElementType type) {
  switch (type) {
    case ElementType::kBf16:
    case ElementType::kFp16:
      return 2;
    case ElementType::kFp32:
      return 4;
    case ElementType::kFp8E4m3:
      return 1;
  }
  return 0;
}

// Where rows lie when they are not one run: pages of an engine's cache (vLLM and FlashInfer, NHD or
// HND). Token t of the rows is slot (first_slot + t) % page_tokens of page
// page_table[(first_slot + t) / page_tokens]. Does not own page_table.
struct Paging {
  const uint32_t* page_table = nullptr;
  uint32_t page_table_count = 0;
  uint32_t page_tokens = 0;  // 0: not paged, the rest is not read.
  uint64_t page_stride = 0;  // Elements from one page to the next.
  uint64_t first_slot = 0;
};

// Rows of one head to read: row t (token t) is head_dim contiguous elements that begin
// t * token_stride elements after `data`, or with paging page * page_stride + slot * token_stride.
// Does not own `data`, which needs no alignment. Set token_stride to head_dim for dense rows and
// HND pages, or kv_heads * head_dim for [token][kv head][dim] and NHD pages; `data` is that of the
// head (and of K or V) in the first page.
struct ConstRows {
  ElementType type = ElementType::kBf16;
  const void* data = nullptr;
  uint64_t token_stride = 0;  // In elements, >= head_dim.
  float scale = 1.0F;         // FP8 only: multiplies the stored values. Finite, above 0.
  Paging paging = {};
};

// The same, to write.
struct MutableRows {
  ElementType type = ElementType::kBf16;
  void* data = nullptr;
  uint64_t token_stride = 0;  // In elements, >= head_dim.
  float scale = 1.0F;         // As above, with a finite reciprocal.
  Paging paging = {};
};

}  // namespace kvtier::kernels

#endif  // KVTIER_KERNELS_ELEMENT_H_
