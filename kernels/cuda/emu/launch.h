// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_EMU_LAUNCH_H_
#define KVTIER_KERNELS_CUDA_EMU_LAUNCH_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

// Runs the kernels of kernels/cuda on a CPU: the same sources, compiled as host C++, whose
// primitives (primitives.h) call the machine below. Threads of a block are fibers, blocks run one
// after the other.
//
// Modelled, and a finding when broken:
//   - bounds and alignment of every access to global memory (only what a Memory lists exists) and
//     to shared memory;
//   - reads of bytes that nobody wrote: shared memory at the start of a block, outputs;
//   - data races on shared memory and on writable global memory, per byte, with vector clocks:
//     __syncthreads orders a block, __syncwarp the lanes of its mask, an mbarrier its arrivals and
//     the bytes of bulk copies before its waiters, an acquire-release atomic one block before
//     another (for all threads of the acquiring block). Shuffles, votes and MMAs order nothing. A
//     race is found under every schedule, whatever values it gave, with one gap: of a byte's
//     unordered readers only the last two are remembered;
//   - warp collectives: all lanes of the mask must come to the same instruction; a lane that is
//     missing, has exited or is elsewhere is reported with its place, never waited for forever;
//   - asynchronous copies: the bytes arrive at the wait (cp.async) or at a moment before the
//     mbarrier's phase ends (bulk), and touching them earlier is a finding. An mbarrier needs
//     FenceProxyAsync between its initialization and a bulk copy;
//   - mbarrier phases, arrival counts and transaction bytes;
//   - barriers that not all threads reach, and any other deadlock.
// Counted, for each place in the source, over the accesses of a warp (the n-th execution of a place
// by each lane is taken as one instruction, so lanes that go through it in different numbers are
// grouped wrongly; nothing else depends on the grouping):
//   - shared memory: wavefronts, and the least number for that width: 32 lanes at a time for
//     accesses of 4 bytes and less, 16 for 8 bytes, 8 for 16 bytes; 32 banks of 4 bytes;
//   - global memory: 32-byte sectors touched, and the least number for these bytes.
// Not modelled: time, caches, occupancy, registers; weak memory order beyond the rule above; the
// proxy fence for bytes that ordinary stores wrote and a bulk copy reads or overwrites; races of a
// word's plain accesses with its atomic ones; clusters and distributed shared memory. MMA sums are
// exact products added in FP64 and rounded once, where hardware keeps fewer bits; ex2 and lg2 are
// rounded correctly, where hardware is 2 units off.

namespace kvtier::kernels::cuda::emu {

struct Dim3 {
  uint32_t x = 1;
  uint32_t y = 1;
  uint32_t z = 1;
};

struct LaunchConfig {
  Dim3 grid = {};
  Dim3 block = {};  // At most 1024 threads.
  uint32_t shared_bytes = 0;
  // 0: lanes, warps and blocks in order. Anything else seeds a random schedule: order of blocks, of
  // threads between rendezvous, moments of bulk copies, spurious failures of mbarrier waits.
  uint64_t seed = 0;
};

// The global memory that a kernel may touch. Does not own it. Thread-compatible.
class Memory {
 public:
  struct Range {
    std::byte* begin = nullptr;
    uint64_t bytes = 0;
    bool is_writable = false;
    bool is_initialized = false;
  };

  // Only read. Racing with nothing, so only bounds are checked.
  template <typename T>
  void AddInput(std::span<const T> values) {
    Add({reinterpret_cast<std::byte*>(const_cast<T*>(values.data())), values.size_bytes(), false,
         true});
  }
  // Read and written; holds values already.
  template <typename T>
  void AddInOut(std::span<T> values) {
    Add({reinterpret_cast<std::byte*>(values.data()), values.size_bytes(), true, true});
  }
  // Written; reading a byte that the launch has not written is a finding.
  template <typename T>
  void AddOutput(std::span<T> values) {
    Add({reinterpret_cast<std::byte*>(values.data()), values.size_bytes(), true, false});
  }

  std::span<const Range> ranges() const { return ranges_; }

 private:
  void Add(const Range& range);

  std::vector<Range> ranges_;  // Ordered by address, disjoint.
};

enum class FindingKind : uint8_t {
  kOutOfBounds,
  kMisaligned,
  kUninitialized,
  kRace,
  kDivergence,   // A collective or barrier that its participants do not reach alike.
  kDeadlock,     // Nobody can go on.
  kAsyncMisuse,  // Bytes of a copy in flight touched, or a broken mbarrier protocol.
  kBadLaunch,
};

// The first thing that went wrong; the launch ends there.
struct Finding {
  FindingKind kind = FindingKind::kBadLaunch;
  std::string message;  // One line, with the place in the kernel's source.
};

enum class AccessKind : uint8_t { kGlobalRead, kGlobalWrite, kSharedRead, kSharedWrite };

inline bool IsShared(AccessKind kind) {
  return kind == AccessKind::kSharedRead || kind == AccessKind::kSharedWrite;
}

// What the warps did at one place of the source. Units: requests are warp instructions.
struct SiteCounters {
  AccessKind kind = AccessKind::kGlobalRead;
  std::string place;           // file:line:column of the primitive's call.
  uint32_t access_bytes = 0;   // Of a lane.
  uint64_t request_count = 0;  // Of a warp.
  uint64_t unit_count = 0;     // Sectors (global) or wavefronts (shared).
  uint64_t ideal_unit_count = 0;
};

struct Report {
  std::vector<Finding> findings;  // Empty or one.
  std::vector<SiteCounters> sites;
  uint64_t collective_count = 0;  // Warp collectives executed.
  uint64_t barrier_count = 0;     // Block barriers executed.

  bool ok() const { return findings.empty(); }
  bool Has(FindingKind kind) const { return !ok() && findings.front().kind == kind; }
  // Wavefronts above the least number, over all shared accesses.
  uint64_t BankConflicts() const;
  // Sectors above the least number, over the global accesses of one kind.
  uint64_t ExtraSectors(AccessKind kind) const;
  // A table of the places that are not ideal, for a failing test's message; and the finding.
  std::string ToString() const;
};

// Calls kernel() once for each thread. Blocks until the launch is over. Must not be called from a
// kernel. Thread-safe: each operating-system thread has a machine of its own.
Report LaunchThreads(const LaunchConfig& config, const Memory& memory,
                     const std::function<void()>& kernel);

template <typename Kernel, typename... Arguments>
Report Launch(const LaunchConfig& config, const Memory& memory, Kernel kernel,
              const Arguments&... arguments) {
  return LaunchThreads(config, memory, [&] { kernel(arguments...); });
}

}  // namespace kvtier::kernels::cuda::emu

#endif  // KVTIER_KERNELS_CUDA_EMU_LAUNCH_H_
