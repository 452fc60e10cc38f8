// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "tests/bench/tiers/host_slots.h"
#include "tiers/nvme/nvme_tier.h"

namespace kvtier::bench {

struct RigOptions {
  std::string dir;
  uint64_t capacity_bytes = 0;
  uint64_t segment_bytes = 0;
  uint32_t block_bytes = 0;
  std::string io_engine = "auto";
};

// An nvme tier over a host tier, as the daemon has them, and blocks named by numbers. Blocks are
// written from, and read into, slots of the host tier. A block's payload is one of a few prepared
// ones, so that making and checking it costs nothing while the clock runs.
// Thread-compatible: one thread calls.
class NvmeRig {
 public:
  static constexpr int kDepthMax = HostSlots::kCount;

  explicit NvmeRig(const RigOptions& options);
  ~NvmeRig();

  // All durable when it returns; `depth` in flight.
  void Write(std::span<const uint64_t> blocks, int depth);
  // Verified by the tier, `depth` in flight.
  void Read(std::span<const uint64_t> blocks, int depth);
  // One block, in one of the places in flight.
  void ReadOne(uint64_t block);
  // Keeps `depth` reads of the blocks 0 to the number written in flight, drawn from `seed`, until
  // StopReading, which waits for the last. They are read ahead, or as Read reads. Requires:
  // depth < kDepthMax, and that no block is written or freed meanwhile.
  void KeepReading(int depth, bool is_ahead, uint64_t seed);
  void StopReading();
  // Starts one write as soon as fewer than `depth` are in flight.
  void StartWrite(uint64_t block, int depth);
  void AwaitAll();
  // Requires: written, and nothing in flight for it (AwaitAll).
  void Free(uint64_t block);
  // Until the index has forgotten what was freed: none of that work is left to what comes next.
  void AwaitFrees();

  const HostSlots& host() const { return *host_; }
  const NvmeTier& tier() const { return *nvme_; }
  uint64_t FootprintBytes() const { return nvme_->FootprintBytes(options_.block_bytes); }

 private:
  BlockMeta MetaOf(uint64_t block) const;
  // An unused place in flight below `depth`.
  int TakePlace(int depth);
  void GivePlace(int place, const absl::Status& status);
  // The next one of KeepReading, into this place.
  void StartKept(int place);

  const RigOptions options_;
  std::unique_ptr<NvmeTier> nvme_;
  std::unique_ptr<HostSlots> host_;
  // What the store core's index does for the tier: from the key to the replica.
  absl::flat_hash_map<Key, ReplicaId> index_;
  absl::Mutex mutex_;
  std::vector<int> free_places_ ABSL_GUARDED_BY(mutex_);
  // Of KeepReading.
  bool is_kept_ahead_ = false;
  bool is_reading_ ABSL_GUARDED_BY(mutex_) = false;
  std::mt19937_64 random_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtier::bench
