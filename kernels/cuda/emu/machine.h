// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_EMU_MACHINE_H_
#define KVTIER_KERNELS_CUDA_EMU_MACHINE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "kernels/cuda/emu/access_log.h"
#include "kernels/cuda/emu/fiber.h"
#include "kernels/cuda/emu/hooks.h"
#include "kernels/cuda/emu/launch.h"
#include "kernels/cuda/emu/shadow.h"

namespace kvtier::kernels::cuda::emu {

inline constexpr uint32_t kBlockThreadsMax = 1024;

enum class ThreadState : uint8_t { kReady, kAtBarrier, kInCollective, kAtMbarrier, kDone };

// One launch: its threads, their rendezvous and memory. Single-thread; hooks.h finds it through
// Machine::Current().
class Machine {
 public:
  Machine(const LaunchConfig& config, const Memory& memory, const std::function<void()>& kernel);

  static Machine& Current();

  void Run();
  Report TakeReport();

  // The hooks of the thread that runs now; see hooks.h.
  const LaunchConfig& config() const { return config_; }
  Dim3 thread_index() const;
  Dim3 block_index() const { return block_; }
  uint32_t lane_idx() const { return current_ % kWarpLanes; }
  void ReadGlobal(const void* source, void* out, uint32_t bytes, const Site& site);
  void WriteGlobal(void* target, const void* in, uint32_t bytes, const Site& site);
  void ReadShared(uint32_t source, void* out, uint32_t bytes, const Site& site);
  void WriteShared(uint32_t target, const void* in, uint32_t bytes, const Site& site);
  uint32_t AtomicAdd(uint32_t* target, uint32_t value, bool synchronizes, const Site& site);
  void SyncThreads(const Site& site);
  void SyncWarp(uint32_t mask, const Site& site);
  void Collective(WarpFunction function, uint32_t mask, std::span<const uint32_t> in,
                  std::span<uint32_t> out, const Site& site);
  void CopyAsync(uint32_t target, const void* source, const Site& site);
  void CommitCopies();
  void WaitCopies(uint32_t group_count);
  void MbarrierInit(uint32_t address, uint32_t arrival_count, const Site& site);
  void MbarrierArrive(uint32_t address, uint32_t expected_bytes, const Site& site);
  bool MbarrierTryWait(uint32_t address, uint32_t parity, const Site& site);
  void CopyBulk(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier,
                const Site& site);
  void FenceProxyAsync();

 private:
  struct Copy {  // In flight, from global to shared memory.
    uint32_t target;
    const std::byte* source;
    uint32_t bytes;
    uint32_t barrier;  // Bulk copies.
    Site site;
  };
  struct Thread {
    ThreadState state = ThreadState::kReady;
    Site site;
    std::array<uint32_t, kExchangeOutWords> out = {};
    std::vector<Copy> open_copies;
    std::deque<std::vector<Copy>> copy_groups;
    uint32_t wait_address = 0;
  };
  struct Rendezvous {
    WarpFunction function = nullptr;
    uint32_t arrived = 0;
    Site site;
    WarpExchange exchange;
  };
  struct Warp {
    uint32_t lanes = 0;   // That exist.
    uint32_t exited = 0;  // That are done.
    std::vector<Rendezvous> open;
  };
  struct Mbarrier {
    uint32_t arrival_count = 0;
    uint32_t pending_arrivals = 0;
    int64_t pending_bytes = 0;
    uint32_t phase = 0;  // Completed phases.
    uint32_t initializer = 0;
    uint32_t init_clock = 0;
    bool is_fenced = false;
    Clock arrivals;  // Of the running phase.
    Clock done;      // Of completed ones.
  };
  struct GlobalRange {
    Memory::Range range;
    std::unique_ptr<Shadow> shadow;  // Of writable ranges.
  };

  // Records the finding with the place and the thread, ends the launch; does not return.
  [[noreturn]] void Fail(FindingKind kind, const Site& site, const char* format, ...)
      __attribute__((format(printf, 4, 5)));
  void Record(FindingKind kind, const Site& site, const char* text);

  // Schedule.
  void RunBlock();
  bool PickThread(uint32_t* thread_idx);
  uint32_t Random(uint32_t bound) { return static_cast<uint32_t>(random_() % bound); }
  void Suspend(ThreadState state, const Site& site);
  void Wake(uint32_t thread_idx);
  static void ThreadMain(void* machine);
  void FinishThread();
  void ReportDeadlock();
  void ReleaseBarrierIfFull();
  void CheckBarrierSites();
  void Complete(Warp* warp, uint32_t warp_idx, size_t rendezvous_idx);

  // Memory.
  GlobalRange& FindGlobal(const void* address, uint32_t bytes, const char* what, const Site& site);
  void CheckShared(uint32_t address, uint32_t bytes, uint32_t alignment, const char* what,
                   const Site& site);
  void CheckAlignment(uint64_t address, uint32_t alignment, const char* what, const Site& site);
  void FailConflict(Conflict conflict, uint32_t other, const char* what, const Site& site);
  void LogAccess(AccessKind kind, uint64_t address, uint32_t bytes, const Site& site);
  void ReadGlobalRun(const void* source, uint32_t bytes, const Site& site);
  void Land(const Copy& copy, uint32_t agent);
  Mbarrier& FindMbarrier(uint32_t address, const Site& site);
  void EndPhaseIfComplete(uint32_t address, Mbarrier* barrier);
  void LandBulkCopy(size_t copy_idx);
  uint32_t bulk_agent() const { return thread_count_; }

  const LaunchConfig config_;
  const std::function<void()>& kernel_;
  const uint32_t thread_count_;  // Of a block.
  std::vector<GlobalRange> globals_;
  size_t last_global_ = 0;
  Report report_;
  AccessLog log_;
  std::mt19937_64 random_;

  // The running block.
  Dim3 block_;
  uint32_t current_ = 0;
  uint32_t done_count_ = 0;
  uint32_t barrier_waiter_count_ = 0;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::deque<uint32_t> ready_;
  Clocks clocks_;
  std::vector<std::byte> shared_;
  std::unique_ptr<Shadow> shared_shadow_;
  std::map<uint32_t, Mbarrier> mbarriers_;
  std::vector<Copy> bulk_copies_;
};

}  // namespace kvtier::kernels::cuda::emu

#endif  // KVTIER_KERNELS_CUDA_EMU_MACHINE_H_
