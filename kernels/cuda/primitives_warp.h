// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_PRIMITIVES_WARP_H_
#define KVTIER_KERNELS_CUDA_PRIMITIVES_WARP_H_

#include <bit>
#include <cstdint>

#include "kernels/cuda/primitives_memory.h"
#include "kernels/cuda/target.h"

#if !defined(__CUDACC__)
#include "kernels/cuda/emu/hooks.h"
#include "kernels/cuda/emu/warp_functions.h"
#endif

// Barriers, shuffles and votes. Lanes are numbered as the hardware does: threads of a block in the
// order x, y, z, 32 to a warp. All lanes of `mask` must call the same line.

namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR {

inline constexpr uint32_t kAllLanes = 0xFFFFFFFFU;

#if defined(__CUDACC__)

KVTIER_DEVICE uint32_t LaneId() {
  uint32_t lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

KVTIER_DEVICE void SyncThreads() { __syncthreads(); }
KVTIER_DEVICE void SyncWarp(uint32_t mask = kAllLanes) { __syncwarp(mask); }

// The value of lane (lane ^ bits), of `lane`, or of (lane + count) if that is in the warp.
KVTIER_DEVICE uint32_t ShuffleXor(uint32_t value, uint32_t bits, uint32_t mask = kAllLanes) {
  return __shfl_xor_sync(mask, value, static_cast<int>(bits));
}
KVTIER_DEVICE uint32_t ShuffleFrom(uint32_t value, uint32_t lane, uint32_t mask = kAllLanes) {
  return __shfl_sync(mask, value, static_cast<int>(lane));
}
KVTIER_DEVICE uint32_t ShuffleDown(uint32_t value, uint32_t count, uint32_t mask = kAllLanes) {
  return __shfl_down_sync(mask, value, count);
}

KVTIER_DEVICE bool AnyLane(bool predicate, uint32_t mask = kAllLanes) {
  return __any_sync(mask, predicate) != 0;
}
KVTIER_DEVICE bool AllLanes(bool predicate, uint32_t mask = kAllLanes) {
  return __all_sync(mask, predicate) != 0;
}
KVTIER_DEVICE uint32_t Ballot(bool predicate, uint32_t mask = kAllLanes) {
  return __ballot_sync(mask, predicate);
}

KVTIER_DEVICE uint32_t BitsOf(float value) { return __float_as_uint(value); }
KVTIER_DEVICE float FloatOf(uint32_t bits) { return __uint_as_float(bits); }

#else  // The emulation.

KVTIER_DEVICE uint32_t LaneId() { return emu::LaneIndex(); }

KVTIER_DEVICE void SyncThreads(KVTIER_SITE_ONLY) { emu::SyncThreads(site); }
KVTIER_DEVICE void SyncWarp(uint32_t mask = kAllLanes KVTIER_SITE) { emu::SyncWarp(mask, site); }

KVTIER_DEVICE uint32_t ShuffleXor(uint32_t value, uint32_t bits,
                                  uint32_t mask = kAllLanes KVTIER_SITE) {
  return emu::Exchange(&emu::ShuffleXor, mask, value, bits, site);
}
KVTIER_DEVICE uint32_t ShuffleFrom(uint32_t value, uint32_t lane,
                                   uint32_t mask = kAllLanes KVTIER_SITE) {
  return emu::Exchange(&emu::ShuffleFrom, mask, value, lane, site);
}
KVTIER_DEVICE uint32_t ShuffleDown(uint32_t value, uint32_t count,
                                   uint32_t mask = kAllLanes KVTIER_SITE) {
  return emu::Exchange(&emu::ShuffleDown, mask, value, count, site);
}

KVTIER_DEVICE uint32_t Ballot(bool predicate, uint32_t mask = kAllLanes KVTIER_SITE) {
  return emu::Exchange(&emu::Ballot, mask, predicate ? 1 : 0, 0, site);
}
KVTIER_DEVICE bool AnyLane(bool predicate, uint32_t mask = kAllLanes KVTIER_SITE) {
  return emu::Exchange(&emu::Ballot, mask, predicate ? 1 : 0, 0, site) != 0;
}
KVTIER_DEVICE bool AllLanes(bool predicate, uint32_t mask = kAllLanes KVTIER_SITE) {
  return emu::Exchange(&emu::Ballot, mask, predicate ? 1 : 0, 0, site) == mask;
}

KVTIER_DEVICE uint32_t BitsOf(float value) { return std::bit_cast<uint32_t>(value); }
KVTIER_DEVICE float FloatOf(uint32_t bits) { return std::bit_cast<float>(bits); }

#endif

}  // namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR

#endif  // KVTIER_KERNELS_CUDA_PRIMITIVES_WARP_H_
