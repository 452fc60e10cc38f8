// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
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

  const RigOptions options_;
  std::unique_ptr<NvmeTier> nvme_;
  std::unique_ptr<HostSlots> host_;
  // What the store core's index does for the tier: from the key to the replica.
  absl::flat_hash_map<Key, ReplicaId> index_;
  absl::Mutex mutex_;
  std::vector<int> free_places_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtier::bench
