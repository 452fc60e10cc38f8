// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_TARGET_H_
#define KVTIER_KERNELS_CUDA_TARGET_H_

#include <cstddef>
#include <cstdint>

#if !defined(__CUDACC__)
#include <source_location>
#endif

// What kernel sources are written in, for both compilers that read them: nvcc, for a GPU, and the
// host's, for the machine in emu/.
//
//   KVTIER_DEVICE       before a function that runs on the device
//   KVTIER_HOST_DEVICE  before one that the host calls too
//   KVTIER_KERNEL(n)    before a kernel (void, at most n threads a block)
//   KVTIER_UNROLL       before a loop that must be unrolled; KVTIER_NO_UNROLL that must not
//   KVTIER_SITE         last parameter of a primitive: where it was called; KVTIER_HERE passes it
//   on KVTIER_CUDA_FLAVOUR inline namespace of all device code: `device` or `emulated`, so that
//   both
//                       can be linked into one program. Structs that the host fills are outside it.

#if defined(__CUDACC__)
#define KVTIER_DEVICE __device__ __forceinline__
#define KVTIER_HOST_DEVICE __host__ __device__ __forceinline__
#define KVTIER_KERNEL(thread_count_max) __global__ void __launch_bounds__(thread_count_max)
#define KVTIER_UNROLL _Pragma("unroll")
#define KVTIER_NO_UNROLL _Pragma("unroll 1")
#define KVTIER_SITE
#define KVTIER_SITE_ONLY
#define KVTIER_CUDA_FLAVOUR device
#else
#define KVTIER_DEVICE inline
#define KVTIER_HOST_DEVICE inline
#define KVTIER_KERNEL(thread_count_max) void
#define KVTIER_UNROLL
#define KVTIER_NO_UNROLL
#define KVTIER_SITE , std::source_location site = std::source_location::current()
#define KVTIER_SITE_ONLY std::source_location site = std::source_location::current()
#define KVTIER_CUDA_FLAVOUR emulated
#endif

namespace kvtier::kernels::cuda {

// 8 and 16 bytes that move in one instruction.
struct alignas(8) Words2 {
  uint32_t x = 0;
  uint32_t y = 0;
};
struct alignas(16) Words4 {
  uint32_t x = 0;
  uint32_t y = 0;
  uint32_t z = 0;
  uint32_t w = 0;
};

// An address in global memory. Kernels cannot read or write through it; primitives_memory.h can.
// Plain data: the host fills it from a device pointer.
template <typename T>
struct Global {
  T* address = nullptr;

  KVTIER_HOST_DEVICE Global<T> operator+(int64_t count) const {
#ifdef __CUDA_ARCH__
    return {address + count};
#else
    // Kernels add to addresses before they ask whether these are null, which C++ does not define.
    return At<T>(static_cast<uint64_t>(count) * sizeof(T));
#endif
  }
  KVTIER_HOST_DEVICE bool is_null() const { return address == nullptr; }
  // The same address plus `bytes`, as another type.
  template <typename U>
  KVTIER_HOST_DEVICE Global<U> At(uint64_t bytes) const {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): addresses come from device memory, as integers.
    return {reinterpret_cast<U*>(reinterpret_cast<uintptr_t>(address) + bytes)};
  }
};

// An address in the shared memory of the block: bytes from its window's start.
using SharedAddress = uint32_t;

// What differs between architectures, as kernels see it. Kernels take one of these as a template
// parameter; the device build uses CurrentArch, emulation tests all of them.
struct Sm80 {
  static constexpr bool kConvertsE4m3 = false;  // cvt between E4M3 and F16.
  static constexpr bool kConvertsE2m1 = false;  // cvt between E2M1 and F16 or F32.
  static constexpr bool kCopiesBulk = false;    // cp.async.bulk and transaction mbarriers.
};
struct Sm89 {
  static constexpr bool kConvertsE4m3 = true;
  static constexpr bool kConvertsE2m1 = false;
  static constexpr bool kCopiesBulk = false;
};
struct Sm90 {
  static constexpr bool kConvertsE4m3 = true;
  static constexpr bool kConvertsE2m1 = false;
  static constexpr bool kCopiesBulk = true;
};
struct Sm100 {  // sm_100a, sm_103a, sm_120a.
  static constexpr bool kConvertsE4m3 = true;
  static constexpr bool kConvertsE2m1 = true;
  static constexpr bool kCopiesBulk = true;
};

#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL)
using CurrentArch = Sm100;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
using CurrentArch = Sm90;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
using CurrentArch = Sm89;
#else
using CurrentArch = Sm80;
#endif

}  // namespace kvtier::kernels::cuda

#endif  // KVTIER_KERNELS_CUDA_TARGET_H_
