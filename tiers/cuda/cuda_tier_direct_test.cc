// SPDX-License-Identifier: Apache-2.0
//
// Copies between pinned host memory and the device, without buffers in between; and the limit of
// their rate.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <vector>

#include "absl/synchronization/notification.h"
#include "tiers/cuda/cuda_tier.h"
#include "tiers/cuda/cuda_tier_fixture.h"
#include "tiers/cuda/pinned_segments.h"
#include "tiers/token_bucket.h"

namespace kvtier {
namespace {

using Call = FakeCudaDriver::Call;

// Goes in one piece.
constexpr uint32_t kPieceBytes = 60'000;

class CudaTierDirectTest : public CudaTierFixture {
 protected:
  void StartBoth(const CudaTier::Options& options) {
    ASSERT_EQ(Start(options), absl::OkStatus());
    StartHost();
  }
  void StartBoth() { StartBoth(Options()); }

  ReplicaId ReserveDevice(uint32_t payload_bytes = kTestBlockBytes) {
    return tier_->Reserve(payload_bytes, 1).value();
  }
  bool DeviceHolds(ReplicaId replica, const TestBlock& block) {
    const uint32_t bytes = block.meta.payload_bytes;
    return std::ranges::equal(DeviceBytes(replica, bytes), block.payload.bytes().first(bytes));
  }
  static bool Holds(const HostSlot& slot, const TestBlock& block) {
    return std::ranges::equal(slot.bytes, block.payload.bytes().first(slot.bytes.size()));
  }
};

TEST_F(CudaTierDirectTest, BlocksGoDownAndUpWithoutABuffer) {
  StartBoth();
  const TestBlock block = MakeBlock(1, kTestBlockBytes);
  const HostSlot from = PutHost(block);
  const ReplicaId replica = ReserveDevice();
  ASSERT_EQ(WriteAndWait(*tier_, replica, block.meta, from.bytes), absl::OkStatus());
  EXPECT_TRUE(DeviceHolds(replica, block));
  const HostSlot to = ReserveHost(kTestBlockBytes);
  ASSERT_EQ(ReadAndWait(*tier_, replica, block.meta, to.bytes), absl::OkStatus());
  EXPECT_TRUE(Holds(to, block));
  EXPECT_EQ(tier_->promoted().direct_bytes, kTestBlockBytes);
  EXPECT_EQ(tier_->demoted().direct_bytes, kTestBlockBytes);
  EXPECT_EQ(tier_->promoted().staged_bytes + tier_->demoted().staged_bytes, 0u);
}

TEST_F(CudaTierDirectTest, ManySmallBlocksGoInOneCall) {
  StartBoth();
  constexpr uint32_t kSmallBytes = 5000;
  std::vector<TestBlock> blocks;
  std::vector<HostSlot> slots;
  std::vector<ReplicaId> replicas;
  for (uint64_t i = 0; i < 30; ++i) {
    blocks.push_back(MakeBlock(i, kSmallBytes));
    slots.push_back(PutHost(blocks[i]));
    replicas.push_back(ReserveDevice(kSmallBytes));
  }
  // The lane has no event to spare until the first eight are done: the others wait, and go
  // together.
  driver_->HoldWork();
  std::array<Outcome, 30> writes;
  for (size_t i = 0; i < blocks.size(); ++i) {
    tier_->Write(replicas[i], blocks[i].meta, slots[i].bytes, writes[i].Done());
    // One by one, so that each of the first is a flight of its own.
    while (i < 8 && tier_->promoted().direct_bytes < (i + 1) * kSmallBytes) {
      std::this_thread::yield();
    }
  }
  driver_->ReleaseWork();
  for (size_t i = 0; i < blocks.size(); ++i) {
    EXPECT_EQ(writes[i].Await(), absl::OkStatus());
    EXPECT_TRUE(DeviceHolds(replicas[i], blocks[i])) << i;
  }
  // 22 blocks; the lane may not have seen the last of them yet when the first events came back.
  EXPECT_GE(driver_->batch_count(), 1u);
  EXPECT_LE(driver_->batch_count(), 3u);
}

TEST_F(CudaTierDirectTest, NoCopyLeavesItsRegistration) {
  CudaTier::Options options = Options();
  options.pin_chunk_bytes = 64 << 10;
  StartBoth(options);
  // From the second chunk into the fifth. The fixture counts what is not registered as a whole.
  PutHost(MakeBlock(2, kTestBlockBytes));
  const TestBlock block = MakeBlock(1, 2 * kTestBlockBytes);
  const HostSlot from = PutHost(block);
  const HostSlot to = ReserveHost(2 * kTestBlockBytes);
  const ReplicaId replica = ReserveDevice(2 * kTestBlockBytes);
  ASSERT_EQ(WriteAndWait(*tier_, replica, block.meta, from.bytes), absl::OkStatus());
  ASSERT_EQ(ReadAndWait(*tier_, replica, block.meta, to.bytes), absl::OkStatus());
  EXPECT_TRUE(Holds(to, block));
  EXPECT_EQ(tier_->demoted().direct_bytes, 2 * kTestBlockBytes);
}

TEST_F(CudaTierDirectTest, WrongBytesAreNeverPublished) {
  StartBoth();
  const TestBlock block = MakeBlock(1, kTestBlockBytes);
  const HostSlot slot = PutHost(block);
  const ReplicaId replica = ReserveDevice();
  slot.bytes[kTestBlockBytes / 2] ^= std::byte{1};
  EXPECT_EQ(WriteAndWait(*tier_, replica, block.meta, slot.bytes).code(),
            absl::StatusCode::kDataLoss);
  slot.bytes[kTestBlockBytes / 2] ^= std::byte{1};
  ASSERT_EQ(WriteAndWait(*tier_, replica, block.meta, slot.bytes), absl::OkStatus());
  driver_->CorruptCopies(1);
  EXPECT_EQ(ReadAndWait(*tier_, replica, block.meta, slot.bytes).code(),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(ReadAndWait(*tier_, replica, block.meta, slot.bytes), absl::OkStatus());
}

TEST_F(CudaTierDirectTest, ARefusedCallFailsItsBlocksAlone) {
  StartBoth();
  const TestBlock block = MakeBlock(1, kTestBlockBytes);
  const HostSlot slot = PutHost(block);
  const ReplicaId replica = ReserveDevice();
  driver_->Fail(Call::kCopy, 0, 1, CudaResult::kInvalidValue);
  EXPECT_EQ(WriteAndWait(*tier_, replica, block.meta, slot.bytes).code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(WriteAndWait(*tier_, replica, block.meta, slot.bytes), absl::OkStatus());
  EXPECT_FALSE(tier_->Health().degraded);
}

TEST_F(CudaTierDirectTest, ALateCopyIsNotAnsweredWhileItsHostMemoryIsInUse) {
  StartBoth();
  const TestBlock block = MakeBlock(1, kTestBlockBytes);
  const HostSlot slot = ReserveHost(kTestBlockBytes);
  const ReplicaId replica = Put(block);
  driver_->HoldWork();
  Outcome read;
  tier_->Read(replica, block.meta, slot.bytes, read.Done());
  driver_->AwaitBusyStreams(1);
  now_ms_ += kLateMs;
  // A staged one behind it is answered by the same look at the clock.
  Outcome other;
  PageBuffer target(kTestBlockBytes);
  tier_->Read(replica, block.meta, target.bytes(), other.Done());
  driver_->AwaitBusyStreams(2);
  now_ms_ += kLateMs;
  EXPECT_EQ(other.Await().code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(read.is_set());
  driver_->ReleaseWork();
  EXPECT_EQ(read.Await(), absl::OkStatus());
  EXPECT_TRUE(Holds(slot, block));
}

TEST_F(CudaTierDirectTest, MemoryThatAHangingDeviceMayStillWriteIsKeptForAWhile) {
  CudaTier::Options options = Options();
  options.abandon_ms = 5000;
  StartBoth(options);
  const TestBlock block = MakeBlock(1, kTestBlockBytes);
  const HostSlot from = PutHost(block);
  const HostSlot to = ReserveHost(kTestBlockBytes);
  const ReplicaId resident = Put(block);
  const ReplicaId incoming = ReserveDevice();
  driver_->HoldWork();
  Outcome read;
  Outcome write;
  tier_->Read(resident, block.meta, to.bytes, read.Done());
  tier_->Write(incoming, block.meta, from.bytes, write.Done());
  driver_->AwaitBusyStreams(2);
  now_ms_ += kHungMs;
  EXPECT_NE(loss_.Await().ToString().find("hangs"), std::string::npos);
  // The device only reads from there.
  EXPECT_EQ(write.Await().code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(read.is_set());
  // From when its lane has heard of it.
  for (; !read.is_set(); std::this_thread::yield()) now_ms_ += 5000;
  EXPECT_EQ(read.Await().code(), absl::StatusCode::kUnavailable);
}

TEST_F(CudaTierDirectTest, ALostDeviceHoldsNobodyUp) {
  StartBoth();
  const TestBlock block = MakeBlock(1, kTestBlockBytes);
  const HostSlot from = PutHost(block);
  const HostSlot to = ReserveHost(kTestBlockBytes);
  const ReplicaId resident = Put(block);
  const ReplicaId incoming = ReserveDevice();
  driver_->HoldWork();
  Outcome read;
  Outcome write;
  tier_->Read(resident, block.meta, to.bytes, read.Done());
  tier_->Write(incoming, block.meta, from.bytes, write.Done());
  driver_->AwaitBusyStreams(2);
  driver_->LoseDevice();
  EXPECT_EQ(read.Await().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(write.Await().code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(loss_.Await().ok());
  // Host memory can be unmapped, and the tier serves on.
  host_->Free(from.replica);
  host_->Free(to.replica);
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(host_->Reserve(kTestSegmentBytes, 2).ok());
}

TEST_F(CudaTierDirectTest, TheEndOfATierOnAHangingDeviceAnswersAtOnce) {
  StartBoth();
  const TestBlock block = MakeBlock(1, kTestBlockBytes);
  const HostSlot to = ReserveHost(kTestBlockBytes);
  const ReplicaId resident = Put(block);
  driver_->HoldWork();
  Outcome read;
  tier_->Read(resident, block.meta, to.bytes, read.Done());
  driver_->AwaitBusyStreams(1);
  now_ms_ += kHungMs;
  EXPECT_FALSE(loss_.Await().ok());
  host_.reset();
  tier_.reset();
  EXPECT_EQ(read.Await().code(), absl::StatusCode::kUnavailable);
}

TEST_F(CudaTierDirectTest, WhatCannotBePinnedIsCopiedThroughBuffers) {
  std::atomic<int> failure_count = 0;
  CudaTier::Options options = Options();
  options.pin_chunk_bytes = 256 << 10;
  absl::Notification failed;
  options.on_pin_failure = [&](const absl::Status& status) {
    EXPECT_NE(status.ToString().find("pin 262144 bytes"), std::string::npos) << status;
    ++failure_count;
    failed.Notify();
  };
  ASSERT_EQ(Start(options), absl::OkStatus());
  // The first chunk of four can be pinned.
  driver_->Fail(Call::kRegisterHost, 1, 1000, CudaResult::kOutOfMemory);
  StartHost();
  const TestBlock block = MakeBlock(1, kTestBlockBytes);
  std::vector<HostSlot> slots;
  for (int i = 0; i < 10; ++i) {
    HostSlot& slot = slots.emplace_back();
    slot.replica = host_->Reserve(kTestBlockBytes, 1).value();
    slot.bytes = host_->Mapped(slot.replica).first(kTestBlockBytes);
    std::ranges::copy(block.payload.bytes().first(kTestBlockBytes), slot.bytes.begin());
  }
  failed.WaitForNotification();
  EXPECT_EQ(tier_->pin_progress().pinned_bytes, 256u << 10);
  for (const HostSlot& slot : slots) {
    const ReplicaId replica = ReserveDevice();
    EXPECT_EQ(WriteAndWait(*tier_, replica, block.meta, slot.bytes), absl::OkStatus());
    EXPECT_TRUE(DeviceHolds(replica, block));
  }
  EXPECT_EQ(tier_->promoted().direct_bytes, 2 * kTestBlockBytes);
  EXPECT_EQ(tier_->promoted().staged_bytes, 8 * kTestBlockBytes);
  // A segment for another owner cannot be pinned either; that was said once.
  EXPECT_TRUE(host_->Reserve(kTestBlockBytes, 2).ok());
  EXPECT_EQ(failure_count, 1);
}

TEST_F(CudaTierDirectTest, ALimitHoldsBackWhatLeavesAndNothingElse) {
  CudaTier::Options options = Options();
  options.demote_bytes_per_second = 1'000'000;
  StartBoth(options);
  const TestBlock block = MakeBlock(1, kPieceBytes);
  const HostSlot from = PutHost(block);
  const HostSlot to = ReserveHost(kPieceBytes);
  const ReplicaId resident = Put(block);
  PageBuffer staged_target(kPieceBytes);
  // The first takes its 10 ms, and 50 ms on credit.
  ASSERT_EQ(ReadAndWait(*tier_, resident, block.meta, to.bytes), absl::OkStatus());
  Outcome direct;
  Outcome staged;
  tier_->Read(resident, block.meta, to.bytes, direct.Done());
  tier_->Read(resident, block.meta, staged_target.bytes(), staged.Done());
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(WriteAndWait(*tier_, resident, block.meta, from.bytes), absl::OkStatus());
  }
  now_ms_ += 50;
  EXPECT_FALSE(direct.is_set());
  EXPECT_EQ(tier_->demoted().direct_bytes, kPieceBytes);
  now_ms_ += 1;
  EXPECT_EQ(direct.Await(), absl::OkStatus());
  EXPECT_FALSE(staged.is_set());
  EXPECT_EQ(tier_->demoted().staged_bytes, 0u);
  now_ms_ += 60;
  EXPECT_EQ(staged.Await(), absl::OkStatus());
  EXPECT_EQ(tier_->demoted().staged_bytes, kPieceBytes);
}

TEST_F(CudaTierDirectTest, WhatALimitHoldsBackIsNotLate) {
  CudaTier::Options options = Options();
  // A minute a block.
  options.demote_bytes_per_second = 1000;
  StartBoth(options);
  const TestBlock block = MakeBlock(1, kPieceBytes);
  const HostSlot to = ReserveHost(kPieceBytes);
  const ReplicaId resident = Put(block);
  ASSERT_EQ(ReadAndWait(*tier_, resident, block.meta, to.bytes), absl::OkStatus());
  Outcome read;
  tier_->Read(resident, block.meta, to.bytes, read.Done());
  for (uint64_t ms = 0; ms < 200'000 && !read.is_set(); ms += kLateMs / 2) {
    now_ms_ += kLateMs / 2;
    std::this_thread::yield();
  }
  EXPECT_EQ(read.Await(), absl::OkStatus());
}

TEST_F(CudaTierDirectTest, WhatALimitHoldsBackInTheMiddleIsNotLateEither) {
  CudaTier::Options options = Options();
  options.demote_bytes_per_second = 1000;
  // Goes on with every look at it: many looks between two pieces, a minute apart.
  options.now_ms = [this] { return now_ms_ += kLateMs / 4; };
  StartBoth(options);
  constexpr uint32_t kThreePieces = 150'000;
  const TestBlock block = MakeBlock(1, kThreePieces);
  const ReplicaId resident = Put(block);
  const HostSlot slot = ReserveHost(kThreePieces);
  PageBuffer staged(kThreePieces);
  EXPECT_EQ(ReadAndWait(*tier_, resident, block.meta, slot.bytes), absl::OkStatus());
  EXPECT_EQ(ReadAndWait(*tier_, resident, block.meta, staged.bytes()), absl::OkStatus());
  EXPECT_TRUE(Holds(slot, block));
}

TEST(PinnedSegmentsTest, MemoryIsUnpinnedAfterItsLastHold) {
  constexpr uint64_t kPage = 4096;
  FakeCudaDriver driver;
  const auto device = driver.OpenDevice(0).value();
  PinnedSegments pinned(device.get(), {.chunk_bytes = 2 * kPage});
  PageBuffer memory(5 * kPage);
  pinned.OnMapped(memory.bytes());
  while (pinned.progress().pinned_bytes < 5 * kPage) std::this_thread::yield();
  EXPECT_EQ(driver.counts().registered, 3u);
  auto hold = pinned.Acquire(memory.bytes().subspan(kPage, 2 * kPage));
  ASSERT_TRUE(hold.has_value());
  EXPECT_EQ(hold->BytesInOneCopy(memory.bytes().data() + kPage + 100), kPage - 100);
  EXPECT_FALSE(pinned.Acquire(memory.bytes().subspan(kPage, 5 * kPage)).has_value());

  absl::Notification unmapped;
  std::jthread unmapper([&] {
    pinned.OnUnmapping(memory.bytes());
    unmapped.Notify();
  });
  // A hold is needed for as long as this: were it not waited for, some run would show it.
  EXPECT_FALSE(unmapped.WaitForNotificationWithTimeout(absl::Milliseconds(20)));
  EXPECT_EQ(driver.counts().registered, 3u);
  hold.reset();
  unmapped.WaitForNotification();
  EXPECT_EQ(driver.counts().registered, 0u);
  EXPECT_EQ(pinned.progress().mapped_bytes, 0u);
}

TEST(TokenBucketTest, KeepsTheRateWhateverTheSizes) {
  TokenBucket bucket(1'000'000);
  uint64_t now_ms = 5;
  uint64_t sent_bytes = 0;
  for (uint64_t bytes = 100; now_ms < 1005; bytes = bytes * 7 % 30'011 + 1) {
    while (!bucket.MayGo(now_ms)) ++now_ms;
    bucket.Take(bytes);
    sent_bytes += bytes;
  }
  // One second, what idle time was worth, and the last one.
  EXPECT_GE(sent_bytes, 1'000'000u);
  EXPECT_LE(sent_bytes, 1'000'000u + 10'000u + 30'011u);
  // Idle time is no credit.
  ASSERT_TRUE(bucket.MayGo(now_ms + 1'000'000));
  bucket.Take(10'000);
  EXPECT_FALSE(bucket.MayGo(now_ms + 1'000'000));
}

TEST(TokenBucketTest, NoLimitIsNone) {
  TokenBucket bucket(0);
  for (int i = 0; i < 100; ++i) {
    EXPECT_TRUE(bucket.MayGo(7));
    bucket.Take(1ULL << 40);
  }
}

}  // namespace
}  // namespace kvtier
