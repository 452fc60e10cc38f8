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

// Rows of one head to read: row t (token t) is head_dim contiguous elements that begin
// t * token_stride elements after `data`. Does not own `data`, which needs no alignment. Set
// token_stride to head_dim for dense rows, or kv_heads * head_dim for [token][kv head][dim].
struct ConstRows {
  ElementType type = ElementType::kBf16;
  const void* data = nullptr;
  uint64_t token_stride = 0;  // In elements, >= head_dim.
};

// The same, to write.
struct MutableRows {
  ElementType type = ElementType::kBf16;
  void* data = nullptr;
  uint64_t token_stride = 0;  // In elements, >= head_dim.
};

}  // namespace kvtier::kernels

#endif  // KVTIER_KERNELS_ELEMENT_H_
