// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_EMU_HOOKS_H_
#define KVTIER_KERNELS_CUDA_EMU_HOOKS_H_

#include <array>
#include <cstdint>
#include <source_location>
#include <span>

#include "kernels/cuda/emu/launch.h"

// What the emulated bodies of the primitives call: the machine as one of its threads sees it. Only
// valid inside a kernel that LaunchThreads runs. Whatever is a finding does not return.

namespace kvtier::kernels::cuda::emu {

using Site = std::source_location;

// Position of the calling thread.
Dim3 ThreadIndex();
Dim3 BlockIndex();
Dim3 BlockSize();
Dim3 GridSize();
uint32_t LaneIndex();

// Memory. `bytes` is 1, 2, 4, 8 or 16; addresses must be multiples of it. Shared addresses are
// offsets into the block's shared memory.
void ReadGlobal(const void* source, void* out, uint32_t bytes, const Site& site);
void WriteGlobal(void* target, const void* in, uint32_t bytes, const Site& site);
void ReadShared(uint32_t source, void* out, uint32_t bytes, const Site& site);
void WriteShared(uint32_t target, const void* in, uint32_t bytes, const Site& site);

// Adds and returns the value before. With `synchronizes`, everything the calling thread saw happens
// before what the block of a later such atomic on the word does.
uint32_t AtomicAdd(uint32_t* target, uint32_t value, bool synchronizes, const Site& site);

void SyncThreads(const Site& site);
void SyncWarp(uint32_t mask, const Site& site);

// Words that the lanes of a collective bring and take.
inline constexpr uint32_t kWarpLanes = 32;
inline constexpr uint32_t kExchangeInWords = 10;
inline constexpr uint32_t kExchangeOutWords = 4;
struct WarpExchange {
  uint32_t mask = 0;
  std::array<std::array<uint32_t, kExchangeInWords>, kWarpLanes> in = {};
  std::array<std::array<uint32_t, kExchangeOutWords>, kWarpLanes> out = {};
};
using WarpFunction = void (*)(WarpExchange& exchange);

// Waits for all lanes of `mask`, runs `function` once, gives each lane its `out`.
void Collective(WarpFunction function, uint32_t mask, std::span<const uint32_t> in,
                std::span<uint32_t> out, const Site& site);

// cp.async of 16 bytes, its groups, and waiting until at most `group_count` groups are in flight.
void CopyAsync(uint32_t target, const void* source, const Site& site);
void CommitCopies();
void WaitCopies(uint32_t group_count);

// mbarriers: 8 bytes of shared memory.
void MbarrierInit(uint32_t barrier, uint32_t arrival_count, const Site& site);
void MbarrierArrive(uint32_t barrier, uint32_t expected_bytes, const Site& site);
bool MbarrierTryWait(uint32_t barrier, uint32_t parity, const Site& site);
void CopyBulk(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier,
              const Site& site);
void FenceProxyAsync();

}  // namespace kvtier::kernels::cuda::emu

#endif  // KVTIER_KERNELS_CUDA_EMU_HOOKS_H_
