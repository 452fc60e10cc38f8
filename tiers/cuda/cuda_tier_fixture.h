// SPDX-License-Identifier: Apache-2.0
//
// A CudaTier on a fake card, for its tests.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "tiers/cuda/cuda_tier.h"
#include "tiers/cuda/fake_driver.h"
#include "tiers/memory/memory_tier.h"
#include "tiers/tier_test_util.h"

namespace kvtier {

inline constexpr uint64_t kTestSegmentBytes = 1 << 20;
inline constexpr uint32_t kTestBlockBytes = 100'000;

// A status that another thread brings, once.
class Outcome {
 public:
  void Set(absl::Status status) {
    absl::MutexLock lock(&mutex_);
    EXPECT_FALSE(is_set_);
    status_ = std::move(status);
    is_set_ = true;
  }
  Tier::Done Done() {
    return [this](absl::Status status) { Set(std::move(status)); };
  }
  bool is_set() const {
    absl::MutexLock lock(&mutex_);
    return is_set_;
  }
  absl::Status Await() const {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&is_set_));
    return status_;
  }

 private:
  mutable absl::Mutex mutex_;
  bool is_set_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

class CudaTierFixture : public testing::Test {
 protected:
  ~CudaTierFixture() override {
    const bool lost = loss_.is_set();
    host_.reset();
    tier_.reset();
    if (driver_ == nullptr) return;
    const FakeCudaDriver::Counts left = driver_->counts();
    EXPECT_EQ(left.unpinned_copy, 0u);
    // A lost device takes nothing back.
    if (!lost) {
      EXPECT_EQ(left, FakeCudaDriver::Counts());
    }
  }

  static constexpr uint64_t kLateMs = 10'000;
  static constexpr uint64_t kHungMs = 30'000;

  CudaTier::Options Options() {
    return {.capacity_bytes = 4 * kTestSegmentBytes,
            .segment_bytes = kTestSegmentBytes,
            .piece_bytes = 64 << 10,
            .late_ms = kLateMs,
            .hung_ms = kHungMs,
            .now_ms = [this] { return now_ms_.load(std::memory_order_relaxed); },
            .on_lost = [this](const absl::Status& reason) { loss_.Set(reason); }};
  }

  absl::Status Start(const CudaTier::Options& options,
                     const FakeCudaDriver::Options& card = FakeCudaDriver::Options()) {
    driver_ = std::make_unique<FakeCudaDriver>(card);
    auto device = driver_->OpenDevice(0);
    if (!device.ok()) return device.status();
    auto tier = CudaTier::Create(std::move(device).value(), options);
    if (!tier.ok()) return tier.status();
    tier_ = std::move(tier).value();
    return absl::OkStatus();
  }
  void Start() { ASSERT_EQ(Start(Options()), absl::OkStatus()); }

  // A tier whose memory the device reaches, once it is pinned: copies from and to it are direct.
  void StartHost(uint64_t capacity_bytes = 4 * kTestSegmentBytes) {
    host_ = MemoryTier::Create({.id = TierId::kHost,
                                .capacity_bytes = capacity_bytes,
                                .segment_bytes = kTestSegmentBytes,
                                .observers = {tier_->host_observer()}})
                .value();
  }
  void AwaitPinned() {
    while (true) {
      const PinnedSegments::Progress progress = tier_->pin_progress();
      if (progress.pinned_bytes == progress.mapped_bytes) return;
      std::this_thread::yield();
    }
  }
  // A slot of the host tier, and what is in it.
  struct HostSlot {
    ReplicaId replica = kNoReplica;
    std::span<std::byte> bytes;
  };
  HostSlot ReserveHost(uint32_t payload_bytes, OwnerIdx owner = 1) {
    HostSlot slot;
    slot.replica = host_->Reserve(payload_bytes, owner).value();
    slot.bytes = host_->Mapped(slot.replica).first(payload_bytes);
    AwaitPinned();
    return slot;
  }
  HostSlot PutHost(const TestBlock& block, OwnerIdx owner = 1) {
    const HostSlot slot = ReserveHost(block.meta.payload_bytes, owner);
    std::ranges::copy(block.payload.bytes().first(slot.bytes.size()), slot.bytes.begin());
    return slot;
  }

  // Polls for a segment that is being replaced.
  ReplicaId ReserveEventually(uint32_t payload_bytes, OwnerIdx owner) {
    while (true) {
      const auto replica = tier_->Reserve(payload_bytes, owner);
      if (replica.ok()) return *replica;
      if (!absl::IsUnavailable(replica.status())) {
        ADD_FAILURE() << replica.status();
        return kNoReplica;
      }
      std::this_thread::yield();
    }
  }

  // Reserves and writes; the block is then in device memory.
  ReplicaId Put(const TestBlock& block, OwnerIdx owner = 1) {
    const auto replica = tier_->Reserve(block.meta.payload_bytes, owner);
    EXPECT_TRUE(replica.ok()) << replica.status();
    EXPECT_EQ(WriteAndWait(*tier_, *replica, block.meta, block.payload.bytes()), absl::OkStatus());
    return *replica;
  }

  // What a kernel would see of the slot.
  std::span<std::byte> DeviceBytes(ReplicaId replica, uint64_t bytes) {
    return driver_->DeviceBytes(tier_->AddressOf(replica), bytes);
  }

  // The tier's clock: it stands still unless a test moves it.
  std::atomic<uint64_t> now_ms_ = 1;
  Outcome loss_;
  std::unique_ptr<FakeCudaDriver> driver_;
  std::unique_ptr<CudaTier> tier_;
  std::unique_ptr<MemoryTier> host_;
};

}  // namespace kvtier
