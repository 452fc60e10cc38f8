// SPDX-License-Identifier: Apache-2.0
//
// Host blocks outlive the daemon: stopped, killed under load, killed while it takes them over.
//   warm_restart_test KVTIERD
#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <set>
#include <thread>

#include "client/src/admin_client.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/fake_systemd.h"

namespace kvtier::testing {
namespace {

using std::chrono::milliseconds;

std::string g_kvtierd;
constexpr size_t kChainBlocks = 8;

// A chain on host. The number of its blocks that the daemon has for sure: acknowledged.
size_t PutOnHost(client::Client* client, const client::Namespace& ns, uint32_t chain) {
  const std::vector<Key> keys = MakeChain(ns, chain, kChainBlocks);
  const auto fill = client->Reserve(ns, std::nullopt, keys, /*tier=*/2);
  if (!fill.ok()) return 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (fill->blocks[i].status == BlockStatus::kOk) FillPattern(keys[i], fill->blocks[i].bytes);
  }
  const auto statuses = client->Commit(ns, *fill);
  if (!statuses.ok()) return 0;
  return static_cast<size_t>(std::ranges::count(*statuses, BlockStatus::kOk));
}

class WarmRestartTest : public ::testing::Test {
 protected:
  void Open(const std::string& host_capacity,
            const std::vector<std::string>& more = {"--host.warm_restart=holder",
                                                    "--host.hold_seconds=60"}) {
    std::vector<std::string> options = {"--nvme.enabled=false", "--hbm.capacity_bytes=1MiB",
                                        "--hbm.segment_bytes=256KiB", "--host.segment_bytes=1MiB",
                                        "--host.capacity_bytes=" + host_capacity};
    options.insert(options.end(), more.begin(), more.end());
    daemon_ = std::make_unique<DaemonProcess>(g_kvtierd, options);
    Start();
  }

  void StartAtOnce() {
    const absl::Status started = daemon_->Start();
    ASSERT_TRUE(started.ok()) << started;
    client_ = Connect(&ns_);
  }

  // Waits until all host memory is ready: then it is kept, too, whatever is killed when.
  void Start() {
    StartAtOnce();
    client::AdminClient admin({.run_dir = daemon_->run_dir()});
    ASSERT_TRUE(Eventually(milliseconds(30'000), [&] {
      const auto tiers = admin.GetTiers();
      if (!tiers.ok()) return false;
      const auto host = std::ranges::find(tiers->tiers(), v1::TIER_HOST, &v1::TierStats::tier);
      return host != tiers->tiers().end() && host->ready_bytes() == host->capacity_bytes();
    })) << daemon_->Log();
  }

  std::unique_ptr<client::Client> Connect(client::Namespace* ns) {
    auto client = daemon_->Connect();
    EXPECT_TRUE(client.ok()) << client.status() << "\n" << daemon_->Log();
    const auto registered = (*client)->RegisterLayout(SmallLayout());
    EXPECT_TRUE(registered.ok()) << registered.status();
    *ns = *registered;
    return std::move(*client);
  }

  // Sum over chains.
  ReadBack Check(client::Client* client, const client::Namespace& ns,
                 const std::set<uint32_t>& chains) {
    ReadBack sum;
    for (const uint32_t chain : chains) {
      const auto read = CheckChain(client, ns, MakeChain(ns, chain, kChainBlocks));
      EXPECT_TRUE(read.ok()) << read.status();
      if (!read.ok()) break;
      sum.right += read->right;
      sum.missing += read->missing;
      sum.wrong += read->wrong;
    }
    return sum;
  }

  // Puts chains from `first` on until the daemon is gone, from so many threads with clients of
  // their own; kills it after `kill_after` chains. The chains that were acknowledged as a whole.
  std::set<uint32_t> LoadAndKill(uint32_t first, uint32_t kill_after, size_t thread_count) {
    std::atomic<uint32_t> next = first;
    std::atomic<uint32_t> done = 0;
    absl::Mutex mutex;
    std::set<uint32_t> acknowledged;
    {
      std::vector<std::jthread> threads;
      for (size_t i = 0; i < thread_count; ++i) {
        threads.emplace_back([&] {
          auto client =
              client::Client::Connect({.run_dir = daemon_->run_dir(), .reconnect_timeout_ms = 500});
          if (!client.ok()) return;
          const auto ns = (*client)->RegisterLayout(SmallLayout());
          while (ns.ok()) {
            const uint32_t chain = next++;
            if (PutOnHost(client->get(), *ns, chain) < kChainBlocks) return;
            ++done;
            absl::MutexLock lock(&mutex);
            acknowledged.insert(chain);
          }
        });
      }
      EXPECT_TRUE(Eventually(milliseconds(60'000), [&] { return done >= kill_after; }));
      daemon_->Kill9();
    }
    return acknowledged;
  }

  // Of the last start's line "host blocks of the last process".
  uint64_t Logged(const std::string& name) {
    const std::string log = daemon_->Log();
    const size_t line = log.rfind("host blocks of the last process");
    if (line == std::string::npos) return 0;
    const size_t at = log.find(" " + name + "=", line);
    return at == std::string::npos ? 0 : std::strtoull(&log[at + name.size() + 2], nullptr, 10);
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<client::Client> client_;
  client::Namespace ns_;
};

TEST_F(WarmRestartTest, HostBlocksOutliveAStopAndAKill) {
  Open("8MiB");
  std::set<uint32_t> chains;
  for (uint32_t chain = 0; chain < 50; ++chain) {
    ASSERT_EQ(PutOnHost(client_.get(), ns_, chain), kChainBlocks);
    chains.insert(chain);
  }
  for (const bool kill : {false, true, false}) {
    if (kill) {
      daemon_->Kill9();
    } else {
      EXPECT_EQ(*daemon_->Stop(), 0);
    }
    Start();
    EXPECT_EQ(Check(client_.get(), ns_, chains).right, 400U) << daemon_->Log();
    EXPECT_EQ(Logged("kept"), 400U);
    EXPECT_EQ(Logged("refused"), 0U);
  }
  // Another layout of the same model hits nothing.
  Layout other = SmallLayout();
  other.block_tokens = 32;
  const auto other_ns = client_->RegisterLayout(other);
  ASSERT_TRUE(other_ns.ok()) << other_ns.status();
  EXPECT_TRUE(client_->Lookup(*other_ns, MakeChain(*other_ns, 1, 1))->empty());
  EXPECT_TRUE(client_->Lookup(*other_ns, MakeChain(ns_, 1, 1))->empty());
}

TEST_F(WarmRestartTest, KilledUnderLoadItKeepsWhatItAcknowledged) {
  Open("24MiB");
  uint32_t first = 0;
  std::set<uint32_t> chains;
  for (const uint32_t kill_after : {20U, 70U, 60U}) {
    // Those whose mappings of the old memory last.
    client::Namespace old_ns;
    const auto old_client = Connect(&old_ns);
    chains.merge(LoadAndKill(first, kill_after, 3));
    first += 1000;
    Start();
    const ReadBack read = Check(client_.get(), ns_, chains);
    std::cout << "kept " << read.right << " of " << kChainBlocks * chains.size() << " blocks\n";
    EXPECT_EQ(read.wrong, 0U);
    EXPECT_GE(read.right * 100, 99 * kChainBlocks * chains.size()) << daemon_->Log();
    EXPECT_EQ(Logged("corrupt"), 0U);
    EXPECT_EQ(Logged("damaged"), 0U);
  }
}

// Memory that was not ready when it was needed reaches the holder a moment later.
TEST_F(WarmRestartTest, KilledWhileItsMemoryIsMadeItServesNothingWrong) {
  Open("24MiB");
  uint32_t first = 0;
  for (const uint32_t kill_after : {1U, 10U, 40U, 80U}) {
    daemon_->Kill9();
    StartAtOnce();
    const std::set<uint32_t> chains = LoadAndKill(first, kill_after, 3);
    first += 1000;
    Start();
    const ReadBack read = Check(client_.get(), ns_, chains);
    EXPECT_EQ(read.wrong, 0U);
    EXPECT_LE(read.missing, Logged("damaged")) << daemon_->Log();
    EXPECT_EQ(Logged("corrupt"), 0U);
    EXPECT_EQ(Logged("no_room"), 0U);
  }
}

TEST_F(WarmRestartTest, KilledWhileSlotsAreReusedItKeepsWhatWasThere) {
  Open("2MiB");
  uint32_t first = 0;
  for (int round = 0; round < 3; ++round) {
    const std::set<uint32_t> chains = LoadAndKill(first, 150, 2);
    Start();
    const ReadBack read = Check(client_.get(), ns_, chains);
    EXPECT_EQ(read.wrong, 0U);
    // 2 MiB have room for 170 blocks; the kill took what was being replaced.
    EXPECT_GE(Logged("kept"), 120U) << daemon_->Log();
    EXPECT_EQ(Logged("corrupt"), 0U) << "an entry outlived its block\n" << daemon_->Log();
    EXPECT_EQ(Logged("damaged"), 0U);
    first += 10'000;
  }
}

TEST_F(WarmRestartTest, KilledWhileItTakesBlocksOverItLosesNone) {
  Open("24MiB");
  std::set<uint32_t> chains;
  for (uint32_t chain = 0; chain < 200; ++chain) {
    ASSERT_EQ(PutOnHost(client_.get(), ns_, chain), kChainBlocks);
    chains.insert(chain);
  }
  daemon_->Kill9();
  for (int delay_ms = 5; delay_ms < 120; delay_ms += 10) {
    ChildProcess half(daemon_->arguments(), daemon_->log_path());
    poll(nullptr, 0, delay_ms);
    half.Signal(SIGKILL);
    ASSERT_TRUE(half.Wait(milliseconds(10'000)).ok());
  }
  Start();
  const ReadBack read = Check(client_.get(), ns_, chains);
  EXPECT_EQ(read.wrong, 0U);
  EXPECT_EQ(read.right, 1600U) << daemon_->Log();
  EXPECT_EQ(Logged("corrupt"), 0U);
  EXPECT_EQ(Logged("damaged"), 0U);
}

TEST_F(WarmRestartTest, SystemdKeepsHostBlocks) {
  std::string directory = std::filesystem::temp_directory_path() / "kvtier-systemd-XXXXXX";
  ASSERT_NE(mkdtemp(directory.data()), nullptr);
  {
    FakeSystemd systemd(directory);
    const std::string program = g_kvtierd;
    g_kvtierd = systemd.Wrap(program);
    Open("8MiB", {});
    std::set<uint32_t> chains;
    for (uint32_t chain = 0; chain < 50; ++chain) {
      ASSERT_EQ(PutOnHost(client_.get(), ns_, chain), kChainBlocks);
      chains.insert(chain);
    }
    // The index and all eight segments, before anything is in them.
    ASSERT_TRUE(Eventually(milliseconds(10'000), [&] { return systemd.Names().size() == 9; }));
    for (const bool kill : {true, false}) {
      if (kill) {
        daemon_->Kill9();
      } else {
        EXPECT_EQ(*daemon_->Stop(), 0);
      }
      systemd.Wrap(program);
      Start();
      systemd.TakeBack();
      EXPECT_EQ(Check(client_.get(), ns_, chains).right, 400U) << daemon_->Log();
      EXPECT_EQ(Logged("kept"), 400U);
      EXPECT_TRUE(Eventually(milliseconds(10'000), [&] { return systemd.Names().size() == 9; }))
          << systemd.Names().size();
    }
    g_kvtierd = program;
    daemon_.reset();
  }
  std::filesystem::remove_all(directory);
}

TEST_F(WarmRestartTest, OffKeepsNothing) {
  Open("8MiB", {"--host.warm_restart=off"});
  ASSERT_EQ(PutOnHost(client_.get(), ns_, 1), kChainBlocks);
  daemon_->Kill9();
  Start();
  EXPECT_EQ(Check(client_.get(), ns_, {1}).missing, kChainBlocks);
  EXPECT_FALSE(std::filesystem::exists(daemon_->run_dir() + "/holder.sock"));
}

}  // namespace
}  // namespace kvtier::testing

int main(int argc, char** argv) {
  kvtier::testing::FakeSystemd::ClaimDescriptors();
  ::testing::InitGoogleTest(&argc, argv);
  if (argc != 2) {
    std::cerr << "usage: warm_restart_test KVTIERD\n";
    return 2;
  }
  kvtier::testing::g_kvtierd = argv[1];
  return RUN_ALL_TESTS();
}
