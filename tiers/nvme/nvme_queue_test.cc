// SPDX-License-Identifier: Apache-2.0
//
// What the I/O thread puts into the disk's queue, and when: the disk answers when a test lets it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "tiers/nvme/io_engine.h"
#include "tiers/nvme/nvme_test_util.h"
#include "tiers/nvme/storage.h"

namespace kvtier {
namespace {

using nvme::IoEngine;
using nvme::IoKind;
using nvme::IoOp;

enum class OpClass : uint8_t { kRead, kHeader, kRecord, kSync, kOther };

OpClass ClassOf(const IoOp& op) {
  if (op.kind == IoKind::kRead) return OpClass::kRead;
  if (op.kind == IoKind::kSync) return OpClass::kSync;
  if (op.kind != IoKind::kWrite) return OpClass::kOther;
  if (op.total_bytes > (64 << 10)) return OpClass::kOther;  // zeros for a new segment
  return op.offset_bytes == 0 ? OpClass::kHeader : OpClass::kRecord;
}

// Counts operations by class, and keeps those of some classes back. Thread-safe.
class Gate {
 public:
  void Hold(std::vector<OpClass> classes) {
    absl::MutexLock lock(&mutex_);
    classes_ = std::move(classes);
  }
  // Lets go of all.
  void Release() {
    absl::MutexLock lock(&mutex_);
    classes_.clear();
    for (auto& op : held_) released_.push_back({.op = std::move(op)});
    held_.clear();
    if (engine_ != nullptr) engine_->Wake();
  }
  // Lets go of one class: what is held of it fails with `error`.
  void Fail(OpClass op_class, int error) {
    absl::MutexLock lock(&mutex_);
    std::erase(classes_, op_class);
    for (auto& op : held_) {
      if (ClassOf(*op) == op_class) released_.push_back({.op = std::move(op), .result = -error});
    }
    std::erase(held_, nullptr);
    if (engine_ != nullptr) engine_->Wake();
  }
  int held_count(OpClass op_class) const {
    absl::MutexLock lock(&mutex_);
    return HeldCount(op_class);
  }
  int ended_count(OpClass op_class) const {
    absl::MutexLock lock(&mutex_);
    return ended_[static_cast<size_t>(op_class)];
  }
  void AwaitHeld(OpClass op_class, int count) {
    absl::MutexLock lock(&mutex_);
    const auto are_held = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return HeldCount(op_class) >= count;
    };
    ASSERT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&are_held), absl::Seconds(30)));
  }
  void AwaitEnded(OpClass op_class, int count) {
    absl::MutexLock lock(&mutex_);
    const auto have_ended = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return ended_[static_cast<size_t>(op_class)] >= count;
    };
    ASSERT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&have_ended), absl::Seconds(30)));
  }

  // What the payloads of reads go to, in the order in which they entered the disk's queue.
  std::vector<const void*> reads() const {
    absl::MutexLock lock(&mutex_);
    return reads_;
  }
  void AwaitRead(const void* target) {
    absl::MutexLock lock(&mutex_);
    const auto has_begun = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return std::find(reads_.begin(), reads_.end(), target) != reads_.end();
    };
    ASSERT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&has_begun), absl::Seconds(30)));
  }

  void SetEngine(IoEngine* engine) {
    absl::MutexLock lock(&mutex_);
    engine_ = engine;
  }
  // Empty: it was taken.
  std::unique_ptr<IoOp> Offer(std::unique_ptr<IoOp> op) {
    absl::MutexLock lock(&mutex_);
    if (op->kind == IoKind::kRead && op->buffer_count > 1)
      reads_.push_back(op->buffers[1].iov_base);
    if (!IsHeld(*op)) return op;
    held_.push_back(std::move(op));
    return nullptr;
  }
  std::vector<IoEngine::Completion> TakeReleased() {
    absl::MutexLock lock(&mutex_);
    return std::exchange(released_, {});
  }
  void CountEnded(const IoOp& op) {
    absl::MutexLock lock(&mutex_);
    ++ended_[static_cast<size_t>(ClassOf(op))];
  }

 private:
  bool IsHeld(const IoOp& op) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return std::find(classes_.begin(), classes_.end(), ClassOf(op)) != classes_.end();
  }
  int HeldCount(OpClass op_class) const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return static_cast<int>(std::count_if(
        held_.begin(), held_.end(), [&](const auto& op) { return ClassOf(*op) == op_class; }));
  }

  mutable absl::Mutex mutex_;
  IoEngine* engine_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::vector<OpClass> classes_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<IoOp>> held_ ABSL_GUARDED_BY(mutex_);
  // result < 0: it is not to be tried.
  std::vector<IoEngine::Completion> released_ ABSL_GUARDED_BY(mutex_);
  int ended_[5] ABSL_GUARDED_BY(mutex_) = {};
  std::vector<const void*> reads_ ABSL_GUARDED_BY(mutex_);
};

class GatedEngine final : public IoEngine {
 public:
  GatedEngine(std::unique_ptr<IoEngine> engine, Gate& gate)
      : engine_(std::move(engine)), gate_(gate) {
    gate_.SetEngine(engine_.get());
  }
  ~GatedEngine() override { gate_.SetEngine(nullptr); }

  std::string_view name() const override { return engine_->name(); }
  void Submit(std::unique_ptr<IoOp> op) override {
    if (auto passed = gate_.Offer(std::move(op))) engine_->Submit(std::move(passed));
  }
  std::vector<Completion> Wait(int timeout_ms) override {
    std::vector<Completion> failed;
    for (Completion& released : gate_.TakeReleased()) {
      if (released.result < 0) {
        failed.push_back(std::move(released));
      } else {
        engine_->Submit(std::move(released.op));
      }
    }
    std::vector<Completion> completed = engine_->Wait(failed.empty() ? timeout_ms : 0);
    for (const Completion& completion : completed) gate_.CountEnded(*completion.op);
    for (Completion& completion : failed) completed.push_back(std::move(completion));
    return completed;
  }
  void Wake() override { engine_->Wake(); }

 private:
  const std::unique_ptr<IoEngine> engine_;
  Gate& gate_;
};

class GatedStorage final : public nvme::Storage {
 public:
  explicit GatedStorage(Gate& gate) : gate_(gate) {}
  std::unique_ptr<IoEngine> WrapEngine(std::unique_ptr<IoEngine> engine) override {
    return std::make_unique<GatedEngine>(std::move(engine), gate_);
  }

 private:
  Gate& gate_;
};

class NvmeQueueTest : public NvmeTierTest {
 protected:
  // The I/O thread takes its checksum itself: a call that is accepted is in its queue.
  static constexpr uint32_t kPayloadBytes = 20'000;

  NvmeQueueTest() {
    options_.storage = &storage_;
    options_.queue_depth = 16;
  }
  // Whatever a failed test holds.
  ~NvmeQueueTest() override {
    gate_.Release();
    tier_.reset();
  }

  void StartRead(uint64_t seed) {
    const Held& held = held_.at(seed);
    tier_->Read(held.replica, held.block.meta, NewTarget(seed),
                [this](const absl::Status& status) { End(status); });
  }
  void StartReadAhead(uint64_t seed) {
    const Held& held = held_.at(seed);
    tier_->ReadAhead(held.replica, held.block.meta, NewTarget(seed),
                     [this](const absl::Status& status) { End(status); });
  }
  std::span<std::byte> NewTarget(uint64_t seed) {
    targets_.push_back(std::make_unique<PageBuffer>(held_.at(seed).block.meta.payload_bytes));
    seed_of_target_[targets_.back()->bytes().data()] = seed;
    return targets_.back()->bytes();
  }
  // Of the blocks that were read, in the order in which their reads entered the disk's queue.
  std::vector<uint64_t> ReadSeeds() const {
    std::vector<uint64_t> seeds;
    for (const void* target : gate_.reads()) seeds.push_back(seed_of_target_.at(target));
    return seeds;
  }
  void ExpectAllWell(size_t count) {
    AwaitDone(count);
    for (const absl::Status& status : results()) EXPECT_EQ(status, absl::OkStatus());
  }
  void StartWrite() {
    const uint64_t seed = next_seed_++;
    const auto replica = tier_->Reserve(kPayloadBytes, 1);
    ASSERT_TRUE(replica.ok()) << replica.status();
    const auto at =
        writing_.emplace(seed, Held{.block = MakeBlock(seed, kPayloadBytes), .replica = *replica})
            .first;
    tier_->Write(*replica, at->second.block.meta, at->second.block.payload.bytes(),
                 [this](const absl::Status& status) { End(status); });
  }
  void AwaitDone(size_t count) {
    absl::MutexLock lock(&mutex_);
    const auto are_done = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return results_.size() >= count;
    };
    ASSERT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&are_done), absl::Seconds(30)));
  }
  std::vector<absl::Status> results() const {
    absl::MutexLock lock(&mutex_);
    return results_;
  }
  void End(const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    results_.push_back(status);
  }

  Gate gate_;
  GatedStorage storage_{gate_};
  std::map<uint64_t, Held> writing_;
  std::vector<std::unique_ptr<PageBuffer>> targets_;
  std::map<const void*, uint64_t> seed_of_target_;
  mutable absl::Mutex mutex_;
  std::vector<absl::Status> results_ ABSL_GUARDED_BY(mutex_);
};

TEST_F(NvmeQueueTest, LeavesMostOfTheQueueToReadsWhileThereAreSome) {
  Open();
  PutMany(3, kPayloadBytes);
  gate_.Hold({OpClass::kRead, OpClass::kRecord});
  StartRead(1);
  gate_.AwaitHeld(OpClass::kRead, 1);
  for (int i = 0; i < 12; ++i) StartWrite();
  StartRead(2);
  gate_.AwaitHeld(OpClass::kRead, 2);
  // It enters the queue a round after the second: the writes had their turn in between.
  StartRead(3);
  gate_.AwaitHeld(OpClass::kRead, 3);
  EXPECT_EQ(gate_.held_count(OpClass::kRecord), options_.queue_depth / 4);
  gate_.Release();
  AwaitDone(15);
  for (const absl::Status& status : results()) EXPECT_EQ(status, absl::OkStatus());
}

TEST_F(NvmeQueueTest, ReadsFirstWhatSomebodyWaitsFor) {
  options_.queue_depth = 4;
  Open();
  PutMany(8, kPayloadBytes);
  gate_.Hold({OpClass::kRead});
  for (uint64_t seed = 1; seed <= 6; ++seed) StartReadAhead(seed);
  gate_.AwaitHeld(OpClass::kRead, 4);
  StartRead(7);
  StartRead(8);
  gate_.Release();
  ExpectAllWell(8);
  EXPECT_EQ(ReadSeeds(), (std::vector<uint64_t>{1, 2, 3, 4, 7, 8, 5, 6}));
}

TEST_F(NvmeQueueTest, MovesUpAReadAheadThatSomebodyWaitsForNow) {
  options_.queue_depth = 4;
  Open();
  PutMany(8, kPayloadBytes);
  gate_.Hold({OpClass::kRead});
  for (uint64_t seed = 1; seed <= 8; ++seed) StartReadAhead(seed);
  gate_.AwaitHeld(OpClass::kRead, 4);
  tier_->Expedite(held_.at(8).replica);
  // One that is under way stays where it is.
  tier_->Expedite(held_.at(2).replica);
  gate_.Release();
  ExpectAllWell(8);
  EXPECT_EQ(ReadSeeds(), (std::vector<uint64_t>{1, 2, 3, 4, 8, 5, 6, 7}));
}

TEST_F(NvmeQueueTest, ReadsAheadBesideThoseThatSomebodyWaitsFor) {
  options_.queue_depth = 4;
  Open();
  PutMany(9, kPayloadBytes);
  gate_.Hold({OpClass::kRead});
  for (uint64_t seed = 1; seed <= 8; ++seed) StartRead(seed);
  gate_.AwaitHeld(OpClass::kRead, 4);
  StartReadAhead(9);
  gate_.Release();
  ExpectAllWell(9);
  const std::vector<uint64_t> seeds = ReadSeeds();
  const auto at = [&](uint64_t seed) { return std::find(seeds.begin(), seeds.end(), seed); };
  EXPECT_LT(at(9), at(8)) << "it had to wait for all others";
}

TEST_F(NvmeQueueTest, FillsTheDiskWithReadsAheadUpToSomeBytes) {
  // Ten of them are more than 8 MiB.
  constexpr uint32_t kLargeBytes = 900'000;
  options_.capacity_bytes = 32 * kTestSegmentBytes;
  Open();
  PutMany(13, kLargeBytes);
  gate_.Hold({OpClass::kRead});
  for (uint64_t seed = 1; seed <= 12; ++seed) StartReadAhead(seed);
  StartRead(13);
  gate_.AwaitRead(targets_.back()->bytes().data());
  const std::vector<uint64_t> seeds = ReadSeeds();
  EXPECT_LE(seeds.size(), 11U);
  gate_.Release();
  ExpectAllWell(13);
}

TEST_F(NvmeQueueTest, LeavesRoomInItsQueueForReadsThatSomebodyWaitsFor) {
  options_.queue_limit = 4;
  Open();
  PutMany(5, kPayloadBytes);
  gate_.Hold({OpClass::kRead});
  for (uint64_t seed = 1; seed <= 3; ++seed) StartReadAhead(seed);
  AwaitDone(1);
  ASSERT_EQ(results().size(), 1U);
  EXPECT_EQ(results()[0].code(), absl::StatusCode::kResourceExhausted);
  StartRead(4);
  StartRead(5);
  gate_.Release();
  AwaitDone(5);
  EXPECT_EQ(std::ranges::count(results(), absl::OkStatus()), 4);
}

TEST_F(NvmeQueueTest, GivesWritesTheWholeQueueWhileNobodyReads) {
  Open();
  PutMany(1, kPayloadBytes);
  gate_.Hold({OpClass::kRecord});
  for (int i = 0; i < 20; ++i) StartWrite();
  gate_.AwaitHeld(OpClass::kRecord, options_.queue_depth);
  gate_.Release();
  AwaitDone(20);
}

TEST_F(NvmeQueueTest, WritesRecordsBesideTheHeaderOfTheirSegmentAndSyncsThemAfterIt) {
  Open();
  gate_.Hold({OpClass::kHeader});
  StartWrite();
  gate_.AwaitHeld(OpClass::kHeader, 1);
  // Each is written a round after the one before: by then that one could have been synced.
  for (int i = 1; i <= 4; ++i) {
    gate_.AwaitEnded(OpClass::kRecord, i);
    StartWrite();
  }
  EXPECT_EQ(gate_.ended_count(OpClass::kSync), 0);
  EXPECT_TRUE(results().empty());
  gate_.Release();
  AwaitDone(5);
  for (const absl::Status& status : results()) EXPECT_EQ(status, absl::OkStatus());
  EXPECT_GE(gate_.ended_count(OpClass::kSync), 1);
  held_ = std::move(writing_);
  Open();
  ExpectAllReadable();
}

TEST_F(NvmeQueueTest, RefusesWhatLiesInASegmentWhoseHeaderCouldNotBeWritten) {
  Open();
  gate_.Hold({OpClass::kHeader});
  StartWrite();
  StartWrite();
  gate_.AwaitEnded(OpClass::kRecord, 2);
  // One that ends after the header has failed.
  gate_.Hold({OpClass::kHeader, OpClass::kRecord});
  StartWrite();
  gate_.AwaitHeld(OpClass::kRecord, 1);
  gate_.Fail(OpClass::kHeader, EIO);
  AwaitDone(2);
  gate_.Release();
  AwaitDone(3);
  for (const absl::Status& status : results()) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  }
  for (const auto& [seed, held] : writing_) tier_->Free(held.replica);
  AwaitDegraded(false);
  PutMany(3, kPayloadBytes);
  ExpectAllReadable();
  Open();
  ExpectAllReadable();
}

}  // namespace
}  // namespace kvtier
