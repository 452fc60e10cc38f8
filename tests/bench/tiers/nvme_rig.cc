// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/tiers/nvme_rig.h"

#include <cstring>
#include <utility>

#include "absl/synchronization/notification.h"
#include "tests/bench/tiers/meter.h"

namespace kvtier::bench {
namespace {

NvmeIoEngine EngineOf(const std::string& name) {
  if (name == "io_uring") return NvmeIoEngine::kIoUring;
  return name == "pread" ? NvmeIoEngine::kPread : NvmeIoEngine::kAuto;
}

// SplitMix64: as evenly spread as the digests that it stands for.
Key KeyOf(uint64_t block) {
  Key key;
  uint64_t state = block;
  for (size_t i = 0; i < Digest::kBytes; i += sizeof(uint64_t)) {
    state += 0x9E3779B97F4A7C15ULL;
    uint64_t word = state;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ULL;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBULL;
    word ^= word >> 31;
    std::memcpy(key.bytes.data() + i, &word, sizeof(word));
  }
  return key;
}

}  // namespace

NvmeRig::NvmeRig(const RigOptions& options) : options_(options) {
  NvmeOptions nvme_options;
  nvme_options.dir = options.dir;
  nvme_options.capacity_bytes = options.capacity_bytes;
  nvme_options.segment_bytes = options.segment_bytes;
  nvme_options.io_engine = EngineOf(options.io_engine);
  auto nvme = NvmeTier::Create(nvme_options);
  MustBeOk(nvme.status());
  nvme_ = std::move(nvme).value();
  MustBeOk(nvme_->Recover([](const BlockMeta&, ReplicaId) {}));
  host_ = std::make_unique<HostSlots>(options.block_bytes, &nvme_->memory_observer());
  absl::MutexLock lock(&mutex_);
  for (int i = kDepthMax - 1; i >= 0; --i) free_places_.push_back(i);
}

NvmeRig::~NvmeRig() {
  AwaitAll();
  host_.reset();  // its observer outlives it
}

BlockMeta NvmeRig::MetaOf(uint64_t block) const {
  BlockMeta meta;
  meta.key = KeyOf(block);
  meta.payload_bytes = options_.block_bytes;
  meta.crc32c = host_->sources[block % HostSlots::kCount].crc32c;
  return meta;
}

int NvmeRig::TakePlace(int depth) {
  absl::MutexLock lock(&mutex_);
  const auto has_place = [this, depth]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return kDepthMax - static_cast<int>(free_places_.size()) < depth;
  };
  mutex_.Await(absl::Condition(&has_place));
  const int place = free_places_.back();
  free_places_.pop_back();
  return place;
}

void NvmeRig::GivePlace(int place, const absl::Status& status) {
  MustBeOk(status);
  absl::MutexLock lock(&mutex_);
  free_places_.push_back(place);
}

void NvmeRig::AwaitAll() {
  absl::MutexLock lock(&mutex_);
  const auto is_idle = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return free_places_.size() == static_cast<size_t>(kDepthMax);
  };
  mutex_.Await(absl::Condition(&is_idle));
}

void NvmeRig::StartWrite(uint64_t block, int depth) {
  const BlockMeta meta = MetaOf(block);
  const auto replica = nvme_->Reserve(options_.block_bytes, 0);
  MustBeOk(replica.status());
  index_[meta.key] = *replica;
  const int place = TakePlace(depth);
  nvme_->Write(*replica, meta, host_->sources[block % HostSlots::kCount].bytes,
               [this, place](const absl::Status& status) { GivePlace(place, status); });
}

void NvmeRig::Write(std::span<const uint64_t> blocks, int depth) {
  for (const uint64_t block : blocks) StartWrite(block, depth);
  AwaitAll();
}

void NvmeRig::Read(std::span<const uint64_t> blocks, int depth) {
  for (const uint64_t block : blocks) {
    const BlockMeta meta = MetaOf(block);
    const ReplicaId replica = index_.at(meta.key);
    const int place = TakePlace(depth);
    nvme_->Read(replica, meta, host_->targets[static_cast<size_t>(place)].bytes,
                [this, place](const absl::Status& status) { GivePlace(place, status); });
  }
  AwaitAll();
}

void NvmeRig::ReadOne(uint64_t block) {
  const BlockMeta meta = MetaOf(block);
  const int place = TakePlace(kDepthMax);
  absl::Notification done;
  nvme_->Read(index_.at(meta.key), meta, host_->targets[static_cast<size_t>(place)].bytes,
              [&](const absl::Status& status) {
                MustBeOk(status);
                done.Notify();
              });
  done.WaitForNotification();
  GivePlace(place, absl::OkStatus());
}

void NvmeRig::KeepReading(int depth, bool is_ahead, uint64_t seed) {
  is_kept_ahead_ = is_ahead;
  {
    absl::MutexLock lock(&mutex_);
    is_reading_ = true;
    random_.seed(seed);
  }
  for (int i = 0; i < depth; ++i) StartKept(TakePlace(kDepthMax));
}

void NvmeRig::StopReading() {
  {
    absl::MutexLock lock(&mutex_);
    is_reading_ = false;
  }
  AwaitAll();
}

void NvmeRig::StartKept(int place) {
  uint64_t block = 0;
  {
    absl::MutexLock lock(&mutex_);
    if (is_reading_) {
      block = random_() % index_.size();
    } else {
      free_places_.push_back(place);
      return;
    }
  }
  const BlockMeta meta = MetaOf(block);
  const ReplicaId replica = index_.at(meta.key);
  const std::span<std::byte> target = host_->targets[static_cast<size_t>(place)].bytes;
  const auto next = [this, place](const absl::Status& status) {
    MustBeOk(status);
    StartKept(place);
  };
  if (is_kept_ahead_) {
    nvme_->ReadAhead(replica, meta, target, next);
  } else {
    nvme_->Read(replica, meta, target, next);
  }
}

void NvmeRig::AwaitFrees() {
  // A write joins the index's batch of all that was freed before it.
  constexpr uint64_t kBlock = UINT64_MAX;
  StartWrite(kBlock, kDepthMax);
  AwaitAll();
  Free(kBlock);
}

void NvmeRig::Free(uint64_t block) {
  const auto it = index_.find(KeyOf(block));
  nvme_->Free(it->second);
  index_.erase(it);
}

}  // namespace kvtier::bench
