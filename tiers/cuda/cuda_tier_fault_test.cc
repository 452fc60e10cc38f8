// SPDX-License-Identifier: Apache-2.0
//
// What the cuda device does when the card, its driver or time is against it.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <vector>

#include "tiers/cuda/cuda_tier.h"
#include "tiers/cuda/cuda_tier_fixture.h"
#include "tiers/cuda/result.h"

namespace kvtier {
namespace {

using Call = FakeCudaDriver::Call;

class CudaTierFaultTest : public CudaTierFixture {
 protected:
  // Waits until the tier is no longer degraded.
  void AwaitHealthy() {
    while (tier_->Health().degraded) std::this_thread::yield();
  }
  void AwaitDegraded() {
    while (!tier_->Health().degraded) std::this_thread::yield();
  }
};

TEST_F(CudaTierFaultTest, StartSaysHowMuchOfTheMemoryItGot) {
  FakeCudaDriver::Options card;
  card.total_bytes = 4 * kTestSegmentBytes;
  driver_ = std::make_unique<FakeCudaDriver>(card);
  driver_->SetForeignBytes(2 * kTestSegmentBytes);
  const auto tier = CudaTier::Create(driver_->OpenDevice(0).value(), Options());
  EXPECT_EQ(tier.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(tier.status().ToString().find("only 2 of 4 segments"), std::string::npos)
      << tier.status();
}

TEST_F(CudaTierFaultTest, EveryFailureOfTheStartIsAnErrorThatLeavesNothing) {
  for (const Call call :
       {Call::kAllocate, Call::kReserveAddresses, Call::kMap, Call::kRegisterHost,
        Call::kCreateStream, Call::kCreateEvent, Call::kZero, Call::kRecordEvent, Call::kIsDone}) {
    for (const int skip_count : {0, 1}) {
      // Both are made once.
      if (skip_count == 1 && (call == Call::kRecordEvent || call == Call::kIsDone)) continue;
      driver_ = std::make_unique<FakeCudaDriver>();
      driver_->Fail(call, skip_count, 1, CudaResult::kInvalidValue);
      const auto tier = CudaTier::Create(driver_->OpenDevice(0).value(), Options());
      EXPECT_EQ(tier.status().code(), absl::StatusCode::kInvalidArgument)
          << static_cast<int>(call) << ": " << tier.status();
      EXPECT_EQ(driver_->counts(), FakeCudaDriver::Counts()) << static_cast<int>(call);
    }
  }
}

TEST_F(CudaTierFaultTest, AFailedReplacementIsTriedAgainUntilItSucceeds) {
  CudaTier::Options options = Options();
  options.capacity_bytes = kTestSegmentBytes;
  ASSERT_EQ(Start(options), absl::OkStatus());
  const auto first = tier_->Reserve(4096, 1);
  ASSERT_TRUE(first.ok());
  tier_->Free(*first);
  driver_->Fail(Call::kAllocate, 0, 2, CudaResult::kOutOfMemory);
  EXPECT_EQ(tier_->Reserve(4096, 2).status().code(), absl::StatusCode::kUnavailable);
  AwaitDegraded();
  EXPECT_NE(tier_->Health().reason.find("1 segments cannot be replaced"), std::string::npos)
      << tier_->Health().reason;
  const ReplicaId second = ReserveEventually(4096, 2);
  EXPECT_FALSE(tier_->Health().degraded);
  EXPECT_FALSE(loss_.is_set());
  tier_->Free(second);
}

TEST_F(CudaTierFaultTest, AFailedExportIsTheCallersErrorOnly) {
  Start();
  const auto replica = tier_->Reserve(4096, 1);
  ASSERT_TRUE(replica.ok());
  const uint32_t segment_idx = tier_->Place(*replica).segment_idx;
  driver_->Fail(Call::kExport, 0, 1, CudaResult::kNotSupported);
  EXPECT_EQ(tier_->ExportSegment(segment_idx, true).status().code(),
            absl::StatusCode::kUnimplemented);
  const auto handle = tier_->ExportSegment(segment_idx, true);
  ASSERT_TRUE(handle.ok());
  close(handle->fd);
  EXPECT_FALSE(tier_->Health().degraded);
}

TEST_F(CudaTierFaultTest, AFailedCopyFailsItsBlockAlone) {
  Start();
  const TestBlock block = MakeBlock(1, kTestBlockBytes);
  const auto replica = tier_->Reserve(kTestBlockBytes, 1);
  ASSERT_TRUE(replica.ok());
  // The second piece of two.
  driver_->Fail(Call::kCopy, 1, 1, CudaResult::kInvalidValue);
  EXPECT_EQ(WriteAndWait(*tier_, *replica, block.meta, block.payload.bytes()).code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(WriteAndWait(*tier_, *replica, block.meta, block.payload.bytes()), absl::OkStatus());
  driver_->Fail(Call::kCopy, 0, 1, CudaResult::kInvalidValue);
  EXPECT_EQ(ReadAndCompare(*tier_, *replica, block).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReadAndCompare(*tier_, *replica, block), absl::OkStatus());
  EXPECT_FALSE(tier_->Health().degraded);
}

TEST_F(CudaTierFaultTest, ACopyThatLiesIsFoundByTheChecksum) {
  Start();
  const TestBlock block = MakeBlock(1, kTestBlockBytes);
  const ReplicaId replica = Put(block);
  driver_->CorruptCopies(1);
  EXPECT_EQ(ReadAndCompare(*tier_, replica, block).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(ReadAndCompare(*tier_, replica, block), absl::OkStatus());
  driver_->CorruptCopies(1);
  // The way in is not read back; the next read tells.
  ASSERT_EQ(WriteAndWait(*tier_, replica, block.meta, block.payload.bytes()), absl::OkStatus());
  EXPECT_EQ(ReadAndCompare(*tier_, replica, block).code(), absl::StatusCode::kDataLoss);
}

TEST_F(CudaTierFaultTest, EventsThatAreDoneOutOfOrderEndTheRightCopies) {
  Start();
  // Four blocks of one piece each, on two streams in turn, and one on its way down.
  constexpr uint32_t kSmallBytes = 30'000;
  const TestBlock resident = MakeBlock(9, kSmallBytes);
  const ReplicaId resident_replica = Put(resident);
  driver_->HoldWork();
  std::vector<TestBlock> blocks;
  std::vector<ReplicaId> replicas;
  std::array<Outcome, 4> writes;
  for (size_t i = 0; i < writes.size(); ++i) {
    blocks.push_back(MakeBlock(i, kSmallBytes));
    replicas.push_back(tier_->Reserve(kSmallBytes, 1).value());
    tier_->Write(replicas[i], blocks[i].meta, blocks[i].payload.bytes(), writes[i].Done());
  }
  Outcome read;
  PageBuffer target(kSmallBytes);
  driver_->AwaitBusyStreams(2);
  const std::vector<CudaStream> writing = driver_->BusyStreams();
  ASSERT_EQ(writing.size(), 2u);
  tier_->Read(resident_replica, resident.meta, target.bytes(), read.Done());
  driver_->AwaitBusyStreams(3);
  std::vector<CudaStream> busy = driver_->BusyStreams();
  std::erase_if(busy, [&](CudaStream stream) { return std::ranges::count(writing, stream) > 0; });

  // The last thing that was begun ends first.
  driver_->ReleaseStream(busy.at(0));
  EXPECT_EQ(read.Await(), absl::OkStatus());
  EXPECT_TRUE(std::ranges::equal(target.bytes().first(kSmallBytes),
                                 resident.payload.bytes().first(kSmallBytes)));
  for (const Outcome& write : writes) EXPECT_FALSE(write.is_set());

  // One stream is done, the other has not begun: half of the copies end, and only they.
  driver_->ReleaseStream(writing[1]);
  while (std::ranges::count_if(writes, &Outcome::is_set) < 2) std::this_thread::yield();
  EXPECT_EQ(std::ranges::count_if(writes, &Outcome::is_set), 2);
  for (size_t i = 0; i < writes.size(); ++i) {
    if (!writes[i].is_set()) continue;
    EXPECT_EQ(writes[i].Await(), absl::OkStatus());
    EXPECT_TRUE(std::ranges::equal(DeviceBytes(replicas[i], kSmallBytes),
                                   blocks[i].payload.bytes().first(kSmallBytes)));
  }
  driver_->ReleaseWork();
  for (size_t i = 0; i < writes.size(); ++i) {
    EXPECT_EQ(writes[i].Await(), absl::OkStatus());
    EXPECT_EQ(ReadAndCompare(*tier_, replicas[i], blocks[i]), absl::OkStatus());
  }
}

TEST_F(CudaTierFaultTest, PiecesOfOneBlockMayEndInAnyOrder) {
  Start();
  const TestBlock block = MakeBlock(1, kTestBlockBytes);
  const ReplicaId replica = Put(block);
  driver_->HoldWork();
  Outcome read;
  PageBuffer target(kTestBlockBytes);
  tier_->Read(replica, block.meta, target.bytes(), read.Done());
  driver_->AwaitBusyStreams(2);
  const std::vector<CudaStream> busy = driver_->BusyStreams();
  driver_->ReleaseStream(busy[1]);
  EXPECT_FALSE(read.is_set());
  driver_->ReleaseStream(busy[0]);
  EXPECT_EQ(read.Await(), absl::OkStatus());
  EXPECT_TRUE(std::ranges::equal(target.bytes().first(kTestBlockBytes),
                                 block.payload.bytes().first(kTestBlockBytes)));
  driver_->ReleaseWork();
}

TEST_F(CudaTierFaultTest, ALateCopyIsAnsweredAndItsSlotIsKeptUntilItEnds) {
  CudaTier::Options options = Options();
  options.capacity_bytes = kTestSegmentBytes;
  ASSERT_EQ(Start(options), absl::OkStatus());
  const TestBlock block = MakeBlock(1, kTestSegmentBytes);
  const auto replica = tier_->Reserve(kTestSegmentBytes, 1);
  ASSERT_TRUE(replica.ok());
  driver_->HoldWork();
  Outcome write;
  tier_->Write(*replica, block.meta, block.payload.bytes(), write.Done());
  driver_->AwaitBusyStreams(2);
  now_ms_ += kLateMs;
  EXPECT_EQ(write.Await().code(), absl::StatusCode::kUnavailable);
  // The core gives the room back; the card still writes there.
  tier_->Free(*replica);
  EXPECT_EQ(tier_->Reserve(kTestSegmentBytes, 1).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(tier_->Usage().used_bytes, kTestSegmentBytes);
  EXPECT_FALSE(tier_->Health().degraded);
  driver_->ReleaseWork();
  while (tier_->Usage().used_bytes > 0) std::this_thread::yield();
  // The buffers are back as well: a whole block goes in and out.
  const TestBlock next = MakeBlock(2, kTestSegmentBytes);
  const ReplicaId again = Put(next);
  EXPECT_EQ(ReadAndCompare(*tier_, again, next), absl::OkStatus());
}

TEST_F(CudaTierFaultTest, CopiesBehindALateOneAreAnsweredInTimeToo) {
  Start();
  const TestBlock block = MakeBlock(1, kTestSegmentBytes);
  const ReplicaId replica = Put(block);
  driver_->HoldWork();
  std::array<Outcome, 3> reads;
  std::vector<PageBuffer> targets;
  for (size_t i = 0; i < reads.size(); ++i) targets.emplace_back(kTestSegmentBytes);
  for (size_t i = 0; i < reads.size(); ++i) {
    tier_->Read(replica, block.meta, targets[i].bytes(), reads[i].Done());
  }
  driver_->AwaitBusyStreams(2);
  now_ms_ += kLateMs;
  for (Outcome& read : reads) EXPECT_TRUE(absl::IsUnavailable(read.Await()));
  // What ends after its answer writes nowhere.
  for (PageBuffer& target : targets) std::ranges::fill(target.bytes(), std::byte{0x77});
  driver_->ReleaseWork();
  EXPECT_EQ(ReadAndCompare(*tier_, replica, block), absl::OkStatus());
  for (PageBuffer& target : targets) {
    EXPECT_TRUE(std::ranges::all_of(target.bytes(),
                                    [](std::byte byte) { return byte == std::byte{0x77}; }));
  }
}

TEST_F(CudaTierFaultTest, ADeviceThatHangsIsLost) {
  Start();
  const TestBlock block = MakeBlock(1, kTestBlockBytes);
  const auto replica = tier_->Reserve(kTestBlockBytes, 1);
  ASSERT_TRUE(replica.ok());
  driver_->HoldWork();
  Outcome write;
  tier_->Write(*replica, block.meta, block.payload.bytes(), write.Done());
  driver_->AwaitBusyStreams(2);
  now_ms_ += kLateMs;
  EXPECT_EQ(write.Await().code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(tier_->Health().degraded);
  now_ms_ += kHungMs - kLateMs;
  const absl::Status reason = loss_.Await();
  EXPECT_NE(reason.ToString().find("hangs"), std::string::npos) << reason;
  EXPECT_TRUE(tier_->Health().degraded);
}

TEST_F(CudaTierFaultTest, AStickyErrorLosesTheTierAndAnswersEverything) {
  Start();
  const TestBlock block = MakeBlock(1, kTestBlockBytes);
  const ReplicaId resident = Put(block);
  const uint32_t segment_idx = tier_->Place(resident).segment_idx;
  const auto incoming = tier_->Reserve(kTestBlockBytes, 1);
  ASSERT_TRUE(incoming.ok());
  driver_->HoldWork();
  Outcome read;
  Outcome write;
  PageBuffer target(kTestBlockBytes);
  tier_->Read(resident, block.meta, target.bytes(), read.Done());
  tier_->Write(*incoming, block.meta, block.payload.bytes(), write.Done());
  driver_->AwaitBusyStreams(4);
  driver_->LoseDevice(CudaResult::kIllegalAddress);
  EXPECT_EQ(read.Await().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(write.Await().code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(loss_.Await().ok());

  // From here on every call fails at once.
  EXPECT_EQ(tier_->Reserve(kTestBlockBytes, 1).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(tier_->ExportSegment(segment_idx, false).status().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReadAndCompare(*tier_, resident, block).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(WriteAndWait(*tier_, resident, block.meta, block.payload.bytes()).code(),
            absl::StatusCode::kUnavailable);
  const TierHealth health = tier_->Health();
  EXPECT_TRUE(health.degraded);
  EXPECT_NE(health.reason.find("CUDA device 0 is lost"), std::string::npos) << health.reason;
  // Room can still be given back.
  tier_->Free(resident);
  tier_->Free(*incoming);
  EXPECT_EQ(tier_->Usage().used_bytes, 0u);
}

TEST_F(CudaTierFaultTest, EveryPlaceWhereAStickyErrorShowsLosesTheTier) {
  for (const Call call : {Call::kCopy, Call::kRecordEvent, Call::kIsDone}) {
    FakeCudaDriver driver;
    Outcome loss;
    CudaTier::Options options = Options();
    options.on_lost = [&](const absl::Status& reason) { loss.Set(reason); };
    const auto tier = CudaTier::Create(driver.OpenDevice(0).value(), options).value();
    const TestBlock block = MakeBlock(1, kTestBlockBytes);
    const ReplicaId replica = tier->Reserve(kTestBlockBytes, 1).value();
    driver.Fail(call, 0, 1, CudaResult::kEccUncorrectable);
    EXPECT_EQ(WriteAndWait(*tier, replica, block.meta, block.payload.bytes()).code(),
              absl::StatusCode::kUnavailable);
    EXPECT_FALSE(loss.Await().ok());
    EXPECT_TRUE(tier->Health().degraded);
  }
}

TEST_F(CudaTierFaultTest, AStickyErrorWhileASegmentIsReplacedLosesTheTier) {
  CudaTier::Options options = Options();
  options.capacity_bytes = kTestSegmentBytes;
  ASSERT_EQ(Start(options), absl::OkStatus());
  const auto first = tier_->Reserve(4096, 1);
  ASSERT_TRUE(first.ok());
  tier_->Free(*first);
  driver_->LoseDevice(CudaResult::kLaunchFailed);
  EXPECT_EQ(tier_->Reserve(4096, 2).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(loss_.Await().ok());
  EXPECT_TRUE(tier_->Health().degraded);
}

TEST_F(CudaTierFaultTest, ADeviceThatIsLostWhileIdleIsFound) {
  CudaTier::Options options = Options();
  options.probe_ms = 5;
  ASSERT_EQ(Start(options), absl::OkStatus());
  driver_->LoseDevice();
  EXPECT_FALSE(loss_.Await().ok());
  EXPECT_TRUE(tier_->Health().degraded);
}

TEST_F(CudaTierFaultTest, TheEndWaitsForCopiesInFlight) {
  Start();
  const TestBlock block = MakeBlock(1, kTestBlockBytes);
  const auto replica = tier_->Reserve(kTestBlockBytes, 1);
  ASSERT_TRUE(replica.ok());
  driver_->HoldWork();
  Outcome write;
  tier_->Write(*replica, block.meta, block.payload.bytes(), write.Done());
  driver_->AwaitBusyStreams(2);
  std::jthread releaser([this] { driver_->ReleaseWork(); });
  tier_.reset();
  EXPECT_EQ(write.Await(), absl::OkStatus());
}

TEST_F(CudaTierFaultTest, TheEndOfATierOnALostDeviceDoesNotWait) {
  Start();
  const TestBlock block = MakeBlock(1, kTestBlockBytes);
  const auto replica = tier_->Reserve(kTestBlockBytes, 1);
  ASSERT_TRUE(replica.ok());
  driver_->HoldWork();
  Outcome write;
  tier_->Write(*replica, block.meta, block.payload.bytes(), write.Done());
  driver_->AwaitBusyStreams(2);
  driver_->LoseDevice();
  tier_.reset();
  EXPECT_EQ(write.Await().code(), absl::StatusCode::kUnavailable);
  driver_.reset();
}

}  // namespace
}  // namespace kvtier
