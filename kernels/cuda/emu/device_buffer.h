// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_EMU_DEVICE_BUFFER_H_
#define KVTIER_KERNELS_CUDA_EMU_DEVICE_BUFFER_H_

#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <vector>

#include "kernels/cuda/target.h"

namespace kvtier::kernels::cuda::emu {

// Memory as the device's allocator gives it: aligned to 256 bytes. A vector otherwise.
template <typename T>
struct DeviceAllocator {
  using value_type = T;
  static constexpr std::align_val_t kAlignment{256};

  DeviceAllocator() = default;
  template <typename U>
  explicit DeviceAllocator(const DeviceAllocator<U>&) {}

  T* allocate(size_t count) {
    return static_cast<T*>(::operator new(count * sizeof(T), kAlignment));
  }
  void deallocate(T* pointer, size_t count) {
    ::operator delete(static_cast<void*>(pointer), count * sizeof(T), kAlignment);
  }
  friend bool operator==(const DeviceAllocator&, const DeviceAllocator&) { return true; }
};

template <typename T>
using DeviceBuffer = std::vector<T, DeviceAllocator<T>>;

}  // namespace kvtier::kernels::cuda::emu

#endif  // KVTIER_KERNELS_CUDA_EMU_DEVICE_BUFFER_H_
