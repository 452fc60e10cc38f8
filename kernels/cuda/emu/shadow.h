// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_EMU_SHADOW_H_
#define KVTIER_KERNELS_CUDA_EMU_SHADOW_H_

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <unordered_map>
#include <vector>

// Who touched which byte, and what happened before what (vector clocks).

namespace kvtier::kernels::cuda::emu {

using Clock = std::vector<uint32_t>;  // [agents of a block]

// Takes the later of each entry.
void Join(const Clock& other, Clock* clock);

// The clocks of the running block's agents: its threads and, last, its bulk copies. Clocks of
// earlier blocks survive in what was released through atomics. Single-thread.
class Clocks {
 public:
  void BeginBlock(uint32_t block_idx, uint32_t agent_count);

  uint32_t block_idx() const { return block_idx_; }
  Clock& of(uint32_t agent) { return clocks_[agent]; }
  uint32_t Now(uint32_t agent) const { return clocks_[agent][agent]; }

  // A barrier of all threads.
  void SyncAll();
  // A barrier of the threads of `mask` of the 32 that begin at first_agent.
  void SyncLanes(uint32_t first_agent, uint32_t mask);
  // What `agent` saw up to now goes into *to; what it does next does not.
  void Release(uint32_t agent, Clock* to);
  void Acquire(const Clock& from, uint32_t agent) { Join(from, &clocks_[agent]); }
  // Both, through a word of global memory and with other blocks.
  void SynchronizeBlocks(const void* word, uint32_t agent);

  // Whether what `other_agent` of block `other_block` did at `clock` happens before `agent`'s next
  // step.
  bool IsBefore(uint32_t other_block, uint32_t other_agent, uint32_t clock, uint32_t agent) const;

 private:
  using BlockClocks = std::unordered_map<uint32_t, Clock>;

  uint32_t block_idx_ = 0;
  std::vector<Clock> clocks_;
  BlockClocks acquired_;  // Of other blocks, by this one.
  std::unordered_map<const void*, BlockClocks> words_;
};

enum class Conflict : uint8_t { kNone, kUninitialized, kInFlight, kWithWrite, kWithRead };

// State of a run of bytes. Single-thread.
class Shadow {
 public:
  Shadow(uint64_t bytes, bool is_initialized);

  // Bytes [offset, offset + bytes) are read or written by `agent` of the current block. After a
  // conflict, *other is the agent it is with.
  Conflict Read(uint64_t offset, uint32_t bytes, uint32_t agent, const Clocks& clocks,
                uint32_t* other);
  Conflict Write(uint64_t offset, uint32_t bytes, uint32_t agent, const Clocks& clocks,
                 uint32_t* other);
  // A copy into the bytes begins, and ends as a write by `agent`.
  void SetInFlight(uint64_t offset, uint32_t bytes);
  void Overwrite(uint64_t offset, uint32_t bytes, uint32_t agent, const Clocks& clocks);

 private:
  struct Access {
    uint32_t block;
    uint32_t clock;
    uint32_t agent_plus_one;  // 0: nobody.
  };
  struct Byte {
    Access write;
    Access reads[2];
    bool is_initialized;
    bool is_in_flight;
  };
  struct Free {
    void operator()(Byte* bytes) const { std::free(bytes); }
  };

  static bool IsBefore(const Access& access, uint32_t agent, const Clocks& clocks);

  bool starts_initialized_;
  std::unique_ptr<Byte[], Free> bytes_;  // Zeroed, so that untouched pages cost nothing.
};

}  // namespace kvtier::kernels::cuda::emu

#endif  // KVTIER_KERNELS_CUDA_EMU_SHADOW_H_
