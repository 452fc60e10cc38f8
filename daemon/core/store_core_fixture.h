// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "daemon/core/fake_tier.h"
#include "daemon/core/store_core.h"

namespace kvtier::core {

inline constexpr TimeMs kNever = 1'000'000;

// Drives a core by hand: transfers wait in `transfers` until CompleteAll or Complete.
class StoreCoreTest : public ::testing::Test {
 protected:
  void Start(uint64_t hbm_slots, uint64_t host_slots, uint64_t nvme_slots,
             policy::EvictionKind eviction = policy::EvictionKind::kLru) {
    hbm_ = std::make_unique<FakeSlots>(hbm_slots);
    host_ = std::make_unique<FakeSlots>(host_slots);
    nvme_ = std::make_unique<FakeSlots>(nvme_slots);
    CoreOptions options;
    options.watermarks.fill({.high = 1.0, .low = 1.0});
    options.nvme_admission = admission_;
    options.tenants = tenants_;
    core_ = std::make_unique<StoreCore>(options, hbm_.get(), host_.get(), nvme_.get(),
                                        policy::NewEvictionPolicy(eviction));
    session_ = *core_->OpenSession(7, now_);
    ns_ = *core_->OpenNamespace(session_, Spec());
  }

  static NamespaceSpec Spec() {
    return {.hash = HashNamespace("t", LayoutFingerprint{}, "", ""),
            .layout = LayoutFingerprint{},
            .block_bytes = FakeSlots::kBlockBytes};
  }

  static std::vector<Key> Chain(uint32_t seed, size_t count) {
    std::vector<Key> keys;
    std::optional<Key> parent;
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t tokens[] = {seed, i};
      parent = HashBlock(Spec().hash, parent, tokens);
      keys.push_back(*parent);
    }
    return keys;
  }

  void Settle() {
    for (const auto& transfer : effects_.transfers) transfers_.push_back(transfer);
    effects_.transfers.clear();
    for (const ReplicaId replica : effects_.expedited) expedited_.push_back(replica);
    effects_.expedited.clear();
    auto replies = std::move(effects_.replies);
    effects_.replies.clear();
    for (auto& reply : replies) reply();
    core_->CheckInvariants();
  }

  void Complete(absl::Status status = absl::OkStatus()) {
    ASSERT_FALSE(transfers_.empty());
    const Transfer transfer = transfers_.front();
    transfers_.pop_front();
    core_->OnTransferDone(transfer.job, status, now_, &effects_);
    Settle();
  }

  void CompleteAll() {
    while (!transfers_.empty()) Complete();
  }

  // The answer, or nothing while it waits.
  std::vector<BlockStatus> Reserve(std::span<const Key> keys, std::optional<Key> parent = {},
                                   TimeMs deadline = kNever) {
    reserved_.clear();
    core_->Reserve(
        session_, ns_, parent, keys, TierId::kHbm, deadline, now_,
        [this](absl::StatusOr<std::vector<PlacedBlock>> blocks) {
          ASSERT_TRUE(blocks.ok()) << blocks.status();
          for (const auto& block : *blocks) reserved_.push_back(block.status);
        },
        &effects_);
    Settle();
    CompleteAll();
    return reserved_;
  }

  std::vector<BlockStatus> Commit(std::span<const Key> keys) {
    const std::vector<uint32_t> crcs(keys.size(), 1);
    auto statuses = core_->Commit(session_, ns_, keys, crcs, now_, &effects_);
    Settle();
    return *statuses;
  }

  void Put(std::span<const Key> keys, std::optional<Key> parent = {}) {
    for (const BlockStatus status : Reserve(keys, parent)) ASSERT_EQ(status, BlockStatus::kOk);
    for (const BlockStatus status : Commit(keys)) ASSERT_EQ(status, BlockStatus::kOk);
    CompleteAll();
  }

  // The answer, or nothing while it waits.
  std::optional<AcquireResult> Acquire(std::span<const Key> keys, TimeMs deadline = kNever) {
    acquired_.reset();
    core_->Acquire(
        session_, ns_, keys, deadline, now_,
        [&](absl::StatusOr<AcquireResult> result) {
          if (result.ok()) acquired_ = *result;
        },
        &effects_);
    Settle();
    return acquired_;
  }

  void Release(LeaseId lease) {
    ASSERT_TRUE(core_->Release(session_, std::array{lease}, now_, &effects_).ok());
    Settle();
  }

  std::vector<uint8_t> Lookup(std::span<const Key> keys) {
    return core_->Lookup(session_, ns_, keys)->residency;
  }

  std::optional<PauseResult> Pause(std::string_view name, TimeMs deadline = kNever,
                                   const Expectation& expectation = {}) {
    paused_.reset();
    core_->PauseContext(
        session_, ns_, name, expectation, deadline, now_,
        [&](absl::StatusOr<PauseResult> result) {
          if (result.ok()) paused_ = *result;
        },
        &effects_);
    Settle();
    return paused_;
  }

  std::vector<TenantLimits> tenants_;
  policy::Admission admission_ = policy::Admission::kAll;
  std::unique_ptr<FakeSlots> hbm_, host_, nvme_;
  std::unique_ptr<StoreCore> core_;
  SessionId session_ = 0;
  NamespaceIdx ns_ = 0;
  TimeMs now_ = 100;
  Effects effects_;
  std::deque<Transfer> transfers_;
  std::vector<ReplicaId> expedited_;
  std::vector<BlockStatus> reserved_;
  std::optional<AcquireResult> acquired_;
  std::optional<PauseResult> paused_;
};

}  // namespace kvtier::core
