// SPDX-License-Identifier: Apache-2.0
//
// hbm on a GPU, end to end, on a machine without one: the daemon drives a fake card, and the client
// library maps what it exports through a fake of its own, as another process would.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "client/include/kvtier/client.h"
#include "daemon/daemon.h"
#include "daemon/health_watch.h"
#include "daemon/monotonic.h"
#include "tiers/cuda/cuda_tier.h"
#include "tiers/cuda/fake_driver.h"
#include "tiers/cuda/owned.h"
#include "tiers/tier_test_util.h"

namespace kvtier {
namespace {

using client::Client;
using client::DeviceStream;
using client::Fill;
using client::Lease;
using client::MappedBlock;
using testing::Each;
using testing::Eq;

// More than one page and no whole number of them.
constexpr uint32_t kBytes = 150'000;
constexpr uint8_t kHbmTier = 1;
constexpr uint8_t kHostTier = 2;

class CudaDeviceTest : public testing::Test {
 protected:
  void SetUp() override {
    config_.server.run_dir = folder_.path() + "/run";
    config_.server.data_dir = folder_.path() + "/data";
    config_.hbm_device.device = "cuda";
    config_.hbm = {.capacity_bytes = 4 << 20,
                   .segment_bytes = 1 << 20,
                   .high_watermark = 1,
                   .low_watermark = 1};
    config_.host = config_.hbm;
    config_.nvme.capacity_bytes = 64 << 20;
    config_.nvme.segment_bytes = 4 << 20;
  }

  void Start() {
    daemon_card_ = std::make_shared<FakeCudaDriver>();
    auto daemon = Daemon::Start(config_, daemon_card_);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = std::move(daemon).value();
    Connect({});
  }

  void Connect(client::ClientOptions options) {
    client_card_ = std::make_shared<FakeCudaDriver>();
    engine_ = client_card_->OpenDevice(0).value();
    stream_ = engine_->CreateStream(CudaDevice::Priority::kHigh).value();
    options.run_dir = config_.server.run_dir;
    options.cuda = client_card_;
    client_ = Client::Connect(options).value();
    Layout layout;
    layout.model = "test";
    layout.layer_count = 1;
    layout.kv_head_count = 1;
    layout.head_dim = 64;
    layout.codec = Codec::kRaw;
    layout.raw_block_bytes = kBytes;
    ns_ = client_->RegisterLayout(layout).value();
  }

  std::vector<Key> Chain(uint32_t seed, uint32_t count) const {
    std::vector<Key> keys;
    std::optional<Key> parent;
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t tokens[] = {seed, i};
      keys.push_back(HashBlock(ns_.hash, parent, tokens));
      parent = keys.back();
    }
    return keys;
  }

  static std::byte ByteAt(const Key& key, size_t at) {
    return static_cast<std::byte>(key.bytes[at % 32] + at / 32);
  }
  static bool Holds(std::span<const std::byte> bytes, const Key& key) {
    if (bytes.size() != kBytes) return false;
    for (size_t at = 0; at < kBytes; ++at) {
      if (bytes[at] != ByteAt(key, at)) return false;
    }
    return true;
  }

  // What a kernel of the engine sees at the device address.
  std::span<std::byte> Slot(const MappedBlock& block) {
    return block.device_address == 0 ? block.bytes
                                     : client_card_->DeviceBytes(block.device_address, kBytes);
  }
  DeviceStream Stream() const { return {.handle = reinterpret_cast<void*>(stream_)}; }

  void Put(std::span<const Key> keys, uint8_t tier = kHbmTier) {
    const auto fill = client_->Reserve(ns_, std::nullopt, keys, tier);
    ASSERT_TRUE(fill.ok()) << fill.status();
    for (size_t i = 0; i < keys.size(); ++i) {
      ASSERT_EQ(fill->blocks[i].status, BlockStatus::kOk);
      const std::span<std::byte> slot = Slot(fill->blocks[i]);
      for (size_t at = 0; at < kBytes; ++at) slot[at] = ByteAt(keys[i], at);
    }
    const auto committed = client_->Commit(ns_, *fill, Stream());
    ASSERT_TRUE(committed.ok()) << committed.status();
    ASSERT_THAT(*committed, Each(BlockStatus::kOk));
  }

  // Every block is leased on that tier, byte for byte, with the checksum of its commit.
  void ExpectLeased(std::span<const Key> keys, uint8_t tier) {
    const auto lease = client_->Acquire(ns_, keys);
    ASSERT_TRUE(lease.ok()) << lease.status();
    ASSERT_EQ(lease->ok_prefix_count(), keys.size());
    for (size_t i = 0; i < keys.size(); ++i) {
      const MappedBlock& block = lease->blocks()[i];
      EXPECT_EQ(block.tier, tier);
      EXPECT_EQ(block.device_address != 0, tier == kHbmTier);
      EXPECT_EQ(block.bytes.empty(), tier == kHbmTier);
      EXPECT_TRUE(Holds(Slot(block), keys[i])) << i;
      EXPECT_EQ(client_->Verify(ns_, keys[i], block), absl::OkStatus());
    }
  }

  std::vector<uint8_t> Lookup(std::span<const Key> keys) {
    return client_->Lookup(ns_, keys).value();
  }

  void Create(const char* context, std::span<const Key> keys) {
    ASSERT_TRUE(client_->CreateContext(ns_, context).ok());
    ASSERT_TRUE(client_->AppendContext(ns_, context, 0, keys).ok());
  }

  void Flush() {
    absl::Notification done;
    daemon_->store().Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
      core.Flush(
          now_ms + 10'000, now_ms,
          [&](absl::StatusOr<uint64_t> flushed) {
            EXPECT_TRUE(flushed.ok()) << flushed.status();
            done.Notify();
          },
          effects);
    });
    done.WaitForNotification();
  }

  // False after ten seconds.
  static bool Eventually(const std::function<bool()>& holds) {
    const uint64_t deadline_ms = MonotonicMs() + 10'000;
    while (MonotonicMs() < deadline_ms) {
      if (holds()) return true;
      std::this_thread::yield();
    }
    return false;
  }

  TempFolder folder_;
  Config config_;
  std::shared_ptr<FakeCudaDriver> daemon_card_;
  std::unique_ptr<Daemon> daemon_;
  // The engine's process: its view of the card, its context and its stream.
  std::shared_ptr<FakeCudaDriver> client_card_;
  std::unique_ptr<CudaDevice> engine_;
  CudaStream stream_{};
  std::unique_ptr<Client> client_;
  client::Namespace ns_;
};

TEST_F(CudaDeviceTest, ABlockGoesDownAndUpByteForByte) {
  Start();
  const auto keys = Chain(1, 4);
  Put(keys);
  EXPECT_THAT(Lookup(keys), Each(Eq(kResidentHbm)));
  ExpectLeased(keys, kHbmTier);

  Create("agent", keys);
  const auto paused = client_->PauseContext(ns_, "agent");
  ASSERT_TRUE(paused.ok()) << paused.status();
  EXPECT_EQ(paused->freed_bytes, 4U * kBytes);
  EXPECT_THAT(Lookup(keys), Each(Eq(kResidentHost)));
  ExpectLeased(keys, kHostTier);

  ASSERT_TRUE(client_->ResumeContext(ns_, "agent").ok());
  EXPECT_TRUE(Eventually([&] { return Lookup(keys) == std::vector<uint8_t>(4, kResidentHbm); }));
  ExpectLeased(keys, kHbmTier);

  // From the GPU to nvme, and in a new life of the daemon from there to the GPU.
  Flush();
  EXPECT_THAT(Lookup(keys), Each(Eq(kResidentHbm | kResidentNvme)));
  client_.reset();
  daemon_.reset();
  EXPECT_EQ(daemon_card_->counts(), FakeCudaDriver::Counts());
  Start();
  EXPECT_THAT(Lookup(keys), Each(Eq(kResidentNvme)));
  ExpectLeased(keys, kHbmTier);
}

TEST_F(CudaDeviceTest, HostIsPinnedAndCopiedWithoutABuffer) {
  Start();
  auto* const hbm = dynamic_cast<CudaTier*>(daemon_->store().tiers().hbm);
  ASSERT_NE(hbm, nullptr);
  // Maps a segment of host.
  Put(Chain(1, 1), kHostTier);
  EXPECT_TRUE(Eventually([&] {
    const PinnedSegments::Progress progress = hbm->pin_progress();
    return progress.mapped_bytes > 0 && progress.pinned_bytes == progress.mapped_bytes;
  }));
  const auto keys = Chain(2, 3);
  Put(keys);
  Create("agent", keys);
  ASSERT_TRUE(client_->PauseContext(ns_, "agent").ok());
  ExpectLeased(keys, kHostTier);
  EXPECT_EQ(hbm->demoted().direct_bytes, 3U * kBytes);
  ASSERT_TRUE(client_->ResumeContext(ns_, "agent").ok());
  EXPECT_TRUE(Eventually([&] { return Lookup(keys) == std::vector<uint8_t>(3, kResidentHbm); }));
  ExpectLeased(keys, kHbmTier);
  EXPECT_EQ(hbm->promoted().direct_bytes, 3U * kBytes);
}

TEST_F(CudaDeviceTest, ALimitHoldsBackDemotionAlone) {
  // What goes at once is 1 MiB; the rest would take minutes.
  config_.hbm_device.demote_bytes_per_second = 1000;
  Start();
  Connect({.transfer_timeout_ms = 300});
  const auto keys = Chain(1, 9);
  Put(keys);
  Create("agent", keys);
  const auto paused = client_->PauseContext(ns_, "agent");
  ASSERT_TRUE(paused.ok()) << paused.status();
  EXPECT_GT(paused->resident_bytes, 0U);
  // The end is not held back: all is written to nvme in time.
  client_.reset();
  daemon_.reset();
  config_.hbm_device.demote_bytes_per_second = 0;
  Start();
  EXPECT_THAT(Lookup(keys), Each(Eq(kResidentNvme)));
}

TEST_F(CudaDeviceTest, BlocksOnTheGpuAreReadByValueToo) {
  Start();
  const auto keys = Chain(1, 9);
  Put(keys);
  ASSERT_THAT(Lookup(keys), Each(Eq(kResidentHbm)));
  const auto payloads = client_->Read(ns_, keys);
  ASSERT_TRUE(payloads.ok()) << payloads.status();
  ASSERT_EQ(payloads->size(), 9U * kBytes);
  for (size_t i = 0; i < keys.size(); ++i) {
    EXPECT_TRUE(Holds(std::span(*payloads).subspan(i * kBytes, kBytes), keys[i])) << i;
  }
  // What the card gives back wrong is no answer, and is not asked for again.
  daemon_card_->CorruptCopies(1);
  EXPECT_EQ(client_->Read(ns_, keys).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(Lookup(keys).empty());
}

TEST_F(CudaDeviceTest, ACommitTakesTheBytesThatTheStreamWillHaveWritten) {
  Start();
  const auto keys = Chain(1, 1);
  const auto fill = client_->Reserve(ns_, std::nullopt, keys);
  ASSERT_TRUE(fill.ok()) << fill.status();
  EXPECT_EQ(client_->Commit(ns_, *fill).status().code(), absl::StatusCode::kFailedPrecondition);
  // The kernel: a copy that waits on the engine's stream.
  const auto pages = PinnedPages::Create(engine_.get(), 40 * 4096).value();
  for (size_t at = 0; at < kBytes; ++at) pages.bytes()[at] = ByteAt(keys[0], at);
  client_card_->HoldWork();
  ASSERT_TRUE(
      engine_->CopyToDevice(fill->blocks[0].device_address, pages.bytes().first(kBytes), stream_)
          .ok());
  {
    std::jthread committer([&] {
      const auto committed = client_->Commit(ns_, *fill, Stream());
      ASSERT_TRUE(committed.ok()) << committed.status();
      EXPECT_THAT(*committed, Each(BlockStatus::kOk));
    });
    // The kernel's stream, and that of the checksum behind it.
    client_card_->AwaitBusyStreams(2);
    EXPECT_TRUE(Lookup(keys).empty());
    client_card_->ReleaseWork();
  }
  ExpectLeased(keys, kHbmTier);
}

TEST_F(CudaDeviceTest, AKernelThatTakesTooLongPublishesNothing) {
  Start();
  Connect({.transfer_timeout_ms = 200});
  const auto keys = Chain(1, 1);
  const auto fill = client_->Reserve(ns_, std::nullopt, keys);
  ASSERT_TRUE(fill.ok()) << fill.status();
  for (size_t at = 0; at < kBytes; ++at) Slot(fill->blocks[0])[at] = ByteAt(keys[0], at);
  client_card_->HoldWork();
  EXPECT_EQ(client_->Commit(ns_, *fill, Stream()).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(Lookup(keys).empty());
  client_card_->ReleaseWork();
  const auto committed = client_->Commit(ns_, *fill, Stream());
  ASSERT_TRUE(committed.ok()) << committed.status();
  ExpectLeased(keys, kHbmTier);
}

TEST_F(CudaDeviceTest, ASlowCopyHoldsUpItsPauseAlone) {
  Start();
  Connect({.transfer_timeout_ms = 300});
  const auto keys = Chain(1, 2);
  Put(keys);
  Create("agent", keys);
  daemon_card_->HoldWork();
  const auto paused = client_->PauseContext(ns_, "agent");
  ASSERT_TRUE(paused.ok()) << paused.status();
  EXPECT_EQ(paused->freed_bytes, 0U);
  EXPECT_EQ(paused->resident_bytes, 2U * kBytes);
  Put(Chain(2, 1), kHostTier);
  ExpectLeased(Chain(2, 1), kHostTier);
  daemon_card_->ReleaseWork();
  EXPECT_TRUE(Eventually([&] { return Lookup(keys) == std::vector<uint8_t>(2, kResidentHost); }));
  ExpectLeased(keys, kHostTier);
}

TEST_F(CudaDeviceTest, ALostGpuTakesItsBlocksAndNothingElse) {
  Start();
  const auto on_host = Chain(1, 2);
  Put(on_host, kHostTier);
  const auto on_nvme = Chain(2, 2);
  Put(on_nvme);
  Flush();
  const auto on_hbm = Chain(3, 2);
  Put(on_hbm);
  HealthWatch readiness(config_.server.run_dir + "/kvtierd.sock", "readiness");
  EXPECT_EQ(readiness.NextStatus(), 1);
  EXPECT_EQ(daemon_->failure(), absl::OkStatus());

  daemon_card_->LoseDevice(CudaResult::kEccUncorrectable);
  EXPECT_EQ(readiness.NextStatus(), 2);
  EXPECT_TRUE(Eventually([&] { return Lookup(on_hbm).empty(); }));
  EXPECT_NE(daemon_->failure().ToString().find("CUDA device 0 is lost"), std::string::npos)
      << daemon_->failure();
  EXPECT_TRUE(daemon_->store().tiers().hbm->Health().degraded);
  EXPECT_FALSE(daemon_->store().tiers().host->Health().degraded);
  ExpectLeased(on_host, kHostTier);
  // What went to nvme is read into host now, and so is what is put.
  EXPECT_THAT(Lookup(on_nvme), Each(Eq(kResidentNvme)));
  ExpectLeased(on_nvme, kHostTier);
  Put(on_hbm);
  ExpectLeased(on_hbm, kHostTier);
  // The end takes no longer than one without a GPU, and writes host to nvme.
  client_.reset();
  daemon_->Stop();
  daemon_.reset();
  Start();
  EXPECT_THAT(Lookup(on_hbm), Each(Eq(kResidentNvme)));
  ExpectLeased(on_hbm, kHbmTier);
}

TEST_F(CudaDeviceTest, AGpuThatIsLostInTheMiddleOfACopyHangsNobody) {
  Start();
  const auto keys = Chain(1, 3);
  Put(keys);
  Create("agent", keys);
  daemon_card_->HoldWork();
  std::jthread pauser([&] {
    const auto paused = client_->PauseContext(ns_, "agent");
    EXPECT_TRUE(paused.ok()) << paused.status();
  });
  daemon_card_->AwaitBusyStreams(1);
  daemon_card_->LoseDevice();
  pauser.join();
  EXPECT_TRUE(Eventually([&] { return Lookup(keys).empty(); }));
  Put(keys);
  ExpectLeased(keys, kHostTier);
}

TEST_F(CudaDeviceTest, AClientThatDoesNotSeeTheGpuIsToldWhich) {
  Start();
  const auto keys = Chain(1, 1);
  client::ClientOptions options{.run_dir = config_.server.run_dir};
  FakeCudaDriver::Options other_card;
  other_card.uuid_seed = 0xB0;
  options.cuda = std::make_shared<FakeCudaDriver>(other_card);
  const auto stranger = Client::Connect(options).value();
  Layout layout;
  layout.model = "test";
  layout.layer_count = 1;
  layout.kv_head_count = 1;
  layout.head_dim = 64;
  layout.codec = Codec::kRaw;
  layout.raw_block_bytes = kBytes;
  const auto ns = stranger->RegisterLayout(layout).value();
  const absl::Status status = stranger->Reserve(ns, std::nullopt, keys).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(status.ToString().find("GPU-a0000000-"), std::string::npos) << status;
  // Its reservation is given back, and host is open to it.
  Put(keys);
  EXPECT_TRUE(stranger->Reserve(ns, std::nullopt, Chain(2, 1), kHostTier).ok());
}

TEST_F(CudaDeviceTest, WithoutADriverTheDaemonSaysWhatToDo) {
  if (void* const library = dlopen("libcuda.so.1", RTLD_NOW); library != nullptr) {
    GTEST_SKIP() << "SKIPPED: this machine has a CUDA driver";
  }
  const absl::Status status = Daemon::Start(config_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(status.ToString().find("hbm.device = cuda: libcuda.so.1: cannot open"),
            std::string::npos)
      << status;
}

TEST_F(CudaDeviceTest, ADeviceThatIsNotThereIsAConfigurationError) {
  config_.hbm_device.cuda_device_idx = 3;
  const absl::Status status = Daemon::Start(config_, std::make_shared<FakeCudaDriver>()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.ToString().find("hbm.cuda_device_idx"), std::string::npos) << status;
}

}  // namespace
}  // namespace kvtier
