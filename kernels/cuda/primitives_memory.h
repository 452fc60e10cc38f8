// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_PRIMITIVES_MEMORY_H_
#define KVTIER_KERNELS_CUDA_PRIMITIVES_MEMORY_H_

#include <concepts>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/target.h"

#if !defined(__CUDACC__)
#include "kernels/cuda/emu/hooks.h"
#endif

// Position, loads and stores, asynchronous copies, mbarriers, atomics. Addresses are multiples of
// the access's size. "memory" clobbers keep the compiler from moving accesses over the
// synchronizing ones; plain loads and stores of shared memory are volatile for the same reason.

namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR {

// Types that move in one access: 1, 2, 4, 8 or 16 bytes.
template <typename T>
concept Movable =
    std::is_trivially_copyable_v<T> &&
    (sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16) &&
    alignof(T) == sizeof(T);

#if defined(__CUDACC__)

KVTIER_DEVICE uint32_t ThreadX() { return threadIdx.x; }
KVTIER_DEVICE uint32_t ThreadY() { return threadIdx.y; }
KVTIER_DEVICE uint32_t BlockSizeX() { return blockDim.x; }
KVTIER_DEVICE uint32_t BlockSizeY() { return blockDim.y; }
KVTIER_DEVICE uint32_t BlockX() { return blockIdx.x; }
KVTIER_DEVICE uint32_t BlockY() { return blockIdx.y; }
KVTIER_DEVICE uint32_t BlockZ() { return blockIdx.z; }
KVTIER_DEVICE uint32_t GridX() { return gridDim.x; }
KVTIER_DEVICE uint32_t GridY() { return gridDim.y; }
KVTIER_DEVICE uint32_t GridZ() { return gridDim.z; }

// First byte of the dynamic shared memory, aligned to 128 bytes.
KVTIER_DEVICE SharedAddress SharedBegin() {
  extern __shared__ __align__(128) unsigned char kvtier_shared_memory[];
  return static_cast<SharedAddress>(__cvta_generic_to_shared(kvtier_shared_memory));
}

// Memory that may change while the kernel runs (other blocks, other threads).
template <Movable T>
KVTIER_DEVICE T LoadGlobal(Global<const T> source) {
  T result;
  if constexpr (sizeof(T) == 16) {
    auto* words = reinterpret_cast<uint32_t*>(&result);
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(source.address));
  } else if constexpr (sizeof(T) == 8) {
    auto* words = reinterpret_cast<uint32_t*>(&result);
    asm volatile("ld.global.v2.u32 {%0,%1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "l"(source.address));
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("ld.global.u32 %0, [%1];"
                 : "=r"(reinterpret_cast<uint32_t&>(result))
                 : "l"(source.address));
  } else if constexpr (sizeof(T) == 2) {
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(result) : "l"(source.address));
  } else {
    uint32_t wide;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(wide) : "l"(source.address));
    result = static_cast<T>(wide);
  }
  return result;
}

// Memory that nobody writes while the kernel runs: the non-coherent path, kept in L1.
template <Movable T>
KVTIER_DEVICE T LoadConstant(Global<const T> source) {
  if constexpr (std::is_same_v<T, Words4>) {
    const uint4 words = __ldg(reinterpret_cast<const uint4*>(source.address));
    return {words.x, words.y, words.z, words.w};
  } else if constexpr (std::is_same_v<T, Words2>) {
    const uint2 words = __ldg(reinterpret_cast<const uint2*>(source.address));
    return {words.x, words.y};
  } else {
    return __ldg(source.address);
  }
}

template <Movable T>
KVTIER_DEVICE void StoreGlobal(Global<T> target, T value) {
  // nvcc splits the assignment of a struct into words.
  if constexpr (sizeof(T) == 16) {
    const auto* words = reinterpret_cast<const uint32_t*>(&value);
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(target.address), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3]));
  } else if constexpr (sizeof(T) == 8) {
    const auto* words = reinterpret_cast<const uint32_t*>(&value);
    asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(target.address), "r"(words[0]),
                 "r"(words[1]));
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(target.address),
                 "r"(reinterpret_cast<const uint32_t&>(value)));
  } else if constexpr (sizeof(T) == 2) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(target.address),
                 "h"(reinterpret_cast<const uint16_t&>(value)));
  } else {
    asm volatile("st.global.u8 [%0], %1;" ::"l"(target.address), "r"(static_cast<uint32_t>(value)));
  }
}

template <Movable T>
KVTIER_DEVICE T LoadShared(SharedAddress source) {
  T result;
  if constexpr (sizeof(T) == 16) {
    auto* words = reinterpret_cast<uint32_t*>(&result);
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(source));
  } else if constexpr (sizeof(T) == 8) {
    auto* words = reinterpret_cast<uint32_t*>(&result);
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(source));
  } else if constexpr (std::is_same_v<T, float>) {
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(result) : "r"(source));
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(result) : "r"(source));
  } else if constexpr (sizeof(T) == 2) {
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(result) : "r"(source));
  } else {
    uint32_t wide;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(wide) : "r"(source));
    result = static_cast<T>(wide);
  }
  return result;
}

template <Movable T>
KVTIER_DEVICE void StoreShared(SharedAddress target, T value) {
  if constexpr (sizeof(T) == 16) {
    const auto* words = reinterpret_cast<const uint32_t*>(&value);
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(target), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  } else if constexpr (sizeof(T) == 8) {
    const auto* words = reinterpret_cast<const uint32_t*>(&value);
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(target), "r"(words[0]), "r"(words[1])
                 : "memory");
  } else if constexpr (std::is_same_v<T, float>) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(target), "f"(value) : "memory");
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(target), "r"(value) : "memory");
  } else if constexpr (sizeof(T) == 2) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(target), "h"(value) : "memory");
  } else {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(target), "r"(static_cast<uint32_t>(value))
                 : "memory");
  }
}

// Copies 16 bytes through L2 only, asynchronously (cp.async.cg). sm_80.
KVTIER_DEVICE void CopyAsync16(SharedAddress target, Global<const Words4> source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source.address)
               : "memory");
}
KVTIER_DEVICE void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kGroupCount of this thread's committed groups are in flight. Other threads
// see the bytes after a barrier.
template <uint32_t kGroupCount>
KVTIER_DEVICE void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroupCount) : "memory");
}

// mbarriers: 8 bytes of shared memory, sm_90 (Arch::kCopiesBulk). A phase ends after arrival_count
// arrivals and all expected bytes. Phases have parity 0, 1, 0, ...
KVTIER_DEVICE void MbarrierInit(SharedAddress barrier, uint32_t arrival_count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrival_count)
               : "memory");
}
KVTIER_DEVICE void MbarrierArrive(SharedAddress barrier) {
  asm volatile(
      "{ .reg .b64 t; mbarrier.arrive.release.cta.shared::cta.b64 t, [%0]; }" ::"r"(barrier)
      : "memory");
}
// Arrives, and makes the phase wait for `bytes` of bulk copies too.
KVTIER_DEVICE void MbarrierArriveExpect(SharedAddress barrier, uint32_t bytes) {
  asm volatile(
      "{ .reg .b64 t; mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 t, [%0], %1; }" ::"r"(
          barrier),
      "r"(bytes)
      : "memory");
}
// True when the phase of that parity has ended. May wait a little, may return false early.
KVTIER_DEVICE bool MbarrierTryWait(SharedAddress barrier, uint32_t parity) {
  uint32_t is_done;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
      "  selp.u32 %0, 1, 0, p; }"
      : "=r"(is_done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return is_done != 0;
}
// Copies `bytes` (a multiple of 16) and reports them to the barrier. One thread issues it.
KVTIER_DEVICE void CopyBulk(SharedAddress target, Global<const std::byte> source, uint32_t bytes,
                            SharedAddress barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(target),
      "l"(source.address), "r"(bytes), "r"(barrier)
      : "memory");
}
// Orders this thread's earlier accesses to shared memory, mbarrier initializations among them,
// before its later bulk copies.
KVTIER_DEVICE void FenceProxyAsync() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Counts; orders nothing.
KVTIER_DEVICE void AddCounter(Global<uint32_t> counter, uint32_t value) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(counter.address), "r"(value)
               : "memory");
}
// Adds and returns the value before; orders this thread's earlier accesses (and, after a
// SyncThreads, its block's) before what follows the next such call on the word.
KVTIER_DEVICE uint32_t AddAcquireRelease(Global<uint32_t> word, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(word.address), "r"(value)
               : "memory");
  return before;
}

#else  // The emulation.

KVTIER_DEVICE uint32_t ThreadX() { return emu::ThreadIndex().x; }
KVTIER_DEVICE uint32_t ThreadY() { return emu::ThreadIndex().y; }
KVTIER_DEVICE uint32_t BlockSizeX() { return emu::BlockSize().x; }
KVTIER_DEVICE uint32_t BlockSizeY() { return emu::BlockSize().y; }
KVTIER_DEVICE uint32_t BlockX() { return emu::BlockIndex().x; }
KVTIER_DEVICE uint32_t BlockY() { return emu::BlockIndex().y; }
KVTIER_DEVICE uint32_t BlockZ() { return emu::BlockIndex().z; }
KVTIER_DEVICE uint32_t GridX() { return emu::GridSize().x; }
KVTIER_DEVICE uint32_t GridY() { return emu::GridSize().y; }
KVTIER_DEVICE uint32_t GridZ() { return emu::GridSize().z; }

KVTIER_DEVICE SharedAddress SharedBegin() { return 0; }

template <Movable T>
KVTIER_DEVICE T LoadGlobal(Global<const T> source KVTIER_SITE) {
  T result;
  emu::ReadGlobal(source.address, &result, sizeof(T), site);
  return result;
}
template <Movable T>
KVTIER_DEVICE T LoadConstant(Global<const T> source KVTIER_SITE) {
  T result;
  emu::ReadGlobal(source.address, &result, sizeof(T), site);
  return result;
}
template <Movable T>
KVTIER_DEVICE void StoreGlobal(Global<T> target, T value KVTIER_SITE) {
  emu::WriteGlobal(target.address, &value, sizeof(T), site);
}
template <Movable T>
KVTIER_DEVICE T LoadShared(SharedAddress source KVTIER_SITE) {
  T result;
  emu::ReadShared(source, &result, sizeof(T), site);
  return result;
}
template <Movable T>
KVTIER_DEVICE void StoreShared(SharedAddress target, T value KVTIER_SITE) {
  emu::WriteShared(target, &value, sizeof(T), site);
}

KVTIER_DEVICE void CopyAsync16(SharedAddress target, Global<const Words4> source KVTIER_SITE) {
  emu::CopyAsync(target, source.address, site);
}
KVTIER_DEVICE void CommitCopies() { emu::CommitCopies(); }
template <uint32_t kGroupCount>
KVTIER_DEVICE void WaitCopies() {
  emu::WaitCopies(kGroupCount);
}

KVTIER_DEVICE void MbarrierInit(SharedAddress barrier, uint32_t arrival_count KVTIER_SITE) {
  emu::MbarrierInit(barrier, arrival_count, site);
}
KVTIER_DEVICE void MbarrierArrive(SharedAddress barrier KVTIER_SITE) {
  emu::MbarrierArrive(barrier, 0, site);
}
KVTIER_DEVICE void MbarrierArriveExpect(SharedAddress barrier, uint32_t bytes KVTIER_SITE) {
  emu::MbarrierArrive(barrier, bytes, site);
}
KVTIER_DEVICE bool MbarrierTryWait(SharedAddress barrier, uint32_t parity KVTIER_SITE) {
  return emu::MbarrierTryWait(barrier, parity, site);
}
KVTIER_DEVICE void CopyBulk(SharedAddress target, Global<const std::byte> source, uint32_t bytes,
                            SharedAddress barrier KVTIER_SITE) {
  emu::CopyBulk(target, source.address, bytes, barrier, site);
}
KVTIER_DEVICE void FenceProxyAsync() { emu::FenceProxyAsync(); }

KVTIER_DEVICE void AddCounter(Global<uint32_t> counter, uint32_t value KVTIER_SITE) {
  emu::AtomicAdd(counter.address, value, false, site);
}
KVTIER_DEVICE uint32_t AddAcquireRelease(Global<uint32_t> word, uint32_t value KVTIER_SITE) {
  return emu::AtomicAdd(word.address, value, true, site);
}

#endif

// Words of memory that nobody writes, in accesses as wide as their count allows: 1, 2 or a multiple
// of 4.
template <typename Byte, uint32_t kCount>
KVTIER_DEVICE void LoadWords(Global<Byte> source, uint32_t (&words)[kCount]) {
  if constexpr (kCount == 1) {
    words[0] = LoadConstant<uint32_t>(source.template At<const uint32_t>(0));
  } else if constexpr (kCount == 2) {
    const auto both = LoadConstant<Words2>(source.template At<const Words2>(0));
    words[0] = both.x;
    words[1] = both.y;
  } else {
    KVTIER_UNROLL
    for (uint32_t i = 0; i < kCount; i += 4) {
      const auto four = LoadConstant<Words4>(source.template At<const Words4>(4 * i));
      words[i] = four.x;
      words[i + 1] = four.y;
      words[i + 2] = four.z;
      words[i + 3] = four.w;
    }
  }
}

KVTIER_DEVICE void MbarrierWait(SharedAddress barrier, uint32_t parity) {
  while (!MbarrierTryWait(barrier, parity)) {
  }
}

}  // namespace kvtier::kernels::cuda::inline KVTIER_CUDA_FLAVOUR

#endif  // KVTIER_KERNELS_CUDA_PRIMITIVES_MEMORY_H_
