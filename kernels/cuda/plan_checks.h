// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_PLAN_CHECKS_H_
#define KVTIER_KERNELS_CUDA_PLAN_CHECKS_H_

#include <cstdint>

// Internal: what the plans of all launches check of device addresses and strides. The host cannot
// read the device: page numbers, slots, lengths and scales there are checked by the kernels or
// stated as requirements. Pure, thread-safe.

namespace kvtier::kernels::cuda {

// Null is aligned.
template <typename T>
bool IsAligned(const T* pointer, uint64_t alignment = 16) {
  return reinterpret_cast<uintptr_t>(pointer) % alignment == 0;
}

// Longest way from the first byte of a view to another one along one of its strides. A row is found
// with at most four strides, so no address overflows.
inline constexpr uint64_t kReachBytesMax = uint64_t{1} << 61;

// Whether `count` things that begin `stride` elements of `element_bytes` apart lie within it.
constexpr bool FitsReach(uint64_t count, uint64_t stride, uint64_t element_bytes) {
  return count <= 1 || stride <= kReachBytesMax / (count - 1) / element_bytes;
}

}  // namespace kvtier::kernels::cuda

#endif  // KVTIER_KERNELS_CUDA_PLAN_CHECKS_H_
