// SPDX-License-Identifier: Apache-2.0
//
// The failure table of docs/architecture.md, against the real daemon as a process.
//   failure_table_test KVTIERD ENGINE_STUB
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>

#include "client/src/admin_client.h"
#include "proto/base/reasons.h"
#include "tests/integration/daemon_process.h"

namespace kvtier::testing {
namespace {

using std::chrono::milliseconds;

std::string g_kvtierd;
std::string g_engine_stub;

std::vector<std::string> SmallTiers() {
  return {"--hbm.capacity_bytes=1MiB",   "--hbm.segment_bytes=256KiB",
          "--host.capacity_bytes=1MiB",  "--host.segment_bytes=256KiB",
          "--nvme.capacity_bytes=64MiB", "--nvme.segment_bytes=4MiB"};
}

std::unique_ptr<client::AdminClient> Admin(const DaemonProcess& daemon) {
  return std::make_unique<client::AdminClient>(
      client::AdminClient::Options{.run_dir = daemon.run_dir()});
}

v1::GetTiersResponse Tiers(const DaemonProcess& daemon) {
  auto tiers = Admin(daemon)->GetTiers();
  EXPECT_TRUE(tiers.ok()) << tiers.status();
  return *tiers;
}

uint64_t PinnedBytes(const DaemonProcess& daemon) {
  uint64_t bytes = 0;
  const auto response = Tiers(daemon);
  for (const auto& tier : response.tiers()) {
    bytes += tier.pinned_bytes() + tier.quarantined_bytes();
  }
  return bytes;
}

void FlushToNvme(const DaemonProcess& daemon) {
  const auto flushed = Admin(daemon)->Flush();
  ASSERT_TRUE(flushed.ok()) << flushed.status();
}

bool NvmeDegraded(const DaemonProcess& daemon) {
  const auto response = Tiers(daemon);
  for (const auto& tier : response.tiers()) {
    if (tier.tier() == v1::TIER_NVME) return tier.degraded();
  }
  return false;
}

// A file system of a few bytes over a directory, where that may be made.
class SmallDisk {
 public:
  SmallDisk(std::string path, const char* options)
      : path_(std::move(path)), mounted_(mount("tmpfs", path_.c_str(), "tmpfs", 0, options) == 0) {}
  ~SmallDisk() {
    if (mounted_) umount2(path_.c_str(), MNT_DETACH);
  }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;

  bool mounted() const { return mounted_; }
  bool Resize(const char* options) const {
    return mount("tmpfs", path_.c_str(), "tmpfs", MS_REMOUNT, options) == 0;
  }

 private:
  const std::string path_;
  const bool mounted_;
};

class FailureTableTest : public ::testing::Test {
 protected:
  void StartDaemon(std::vector<std::string> more = {}) {
    std::vector<std::string> options = SmallTiers();
    options.insert(options.end(), more.begin(), more.end());
    daemon_ = std::make_unique<DaemonProcess>(g_kvtierd, options);
    const absl::Status started = daemon_->Start();
    ASSERT_TRUE(started.ok()) << started;
    Connect();
  }

  void Connect() {
    auto client = daemon_->Connect();
    ASSERT_TRUE(client.ok()) << client.status() << "\n" << daemon_->Log();
    client_ = std::move(*client);
    const auto ns = client_->RegisterLayout(SmallLayout());
    ASSERT_TRUE(ns.ok()) << ns.status();
    ns_ = *ns;
  }

  // So many blocks, in chains of 8: more than memory holds when count > 200.
  void Put(size_t count) {
    for (uint32_t chain = 0; chain < count / 8; ++chain) {
      const auto taken = PutChain(client_.get(), ns_, MakeChain(ns_, 100 + chain, 8));
      ASSERT_TRUE(taken.ok()) << taken.status();
      ASSERT_EQ(*taken, 8U);
    }
  }

  ReadBack Check(size_t count) {
    ReadBack sum;
    for (uint32_t chain = 0; chain < count / 8; ++chain) {
      const auto read = CheckChain(client_.get(), ns_, MakeChain(ns_, 100 + chain, 8));
      EXPECT_TRUE(read.ok()) << read.status();
      if (!read.ok()) break;
      sum.right += read->right;
      sum.missing += read->missing;
      sum.wrong += read->wrong;
    }
    return sum;
  }

  std::vector<std::filesystem::path> FilesBelow(const std::string& directory,
                                                const std::string& ending) const {
    std::vector<std::filesystem::path> files;
    for (const auto& file : std::filesystem::recursive_directory_iterator(directory)) {
      if (file.is_regular_file() && file.path().string().ends_with(ending)) {
        files.push_back(file.path());
      }
    }
    std::sort(files.begin(), files.end());
    return files;
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<client::Client> client_;
  client::Namespace ns_;
};

TEST_F(FailureTableTest, EngineKilledInTheMiddleOfAFillLeavesNothing) {
  StartDaemon();
  ASSERT_TRUE(PutChain(client_.get(), ns_, MakeChain(ns_, 2, 4)).ok());
  EXPECT_EQ(PinnedBytes(*daemon_), 0U);
  const std::string ready = daemon_->data_dir() + "/stub-ready";
  ChildProcess engine({g_engine_stub, daemon_->run_dir(), SmallLayout().model, ready},
                      daemon_->log_path());
  ASSERT_TRUE(Eventually(milliseconds(20'000), [&] {
    std::ifstream file(ready);
    size_t leased = 0;
    return static_cast<bool>(file >> leased) && leased == 4;
  })) << daemon_->Log();
  EXPECT_GT(PinnedBytes(*daemon_), 0U);
  const auto fills = MakeChain(ns_, 1, 8);
  const auto pending = client_->Reserve(ns_, std::nullopt, fills);
  ASSERT_TRUE(pending.ok()) << pending.status();
  EXPECT_EQ(pending->blocks[0].status, BlockStatus::kPending);

  engine.Signal(SIGKILL);
  ASSERT_TRUE(engine.Wait(milliseconds(5000)).ok());
  EXPECT_TRUE(Eventually(milliseconds(5000), [&] { return PinnedBytes(*daemon_) == 0; }));
  EXPECT_TRUE(client_->Lookup(ns_, fills)->empty()) << "an unfinished fill is visible";
  EXPECT_EQ(*PutChain(client_.get(), ns_, fills), 8U);
  EXPECT_EQ(CheckChain(client_.get(), ns_, fills)->right, 8U);
  EXPECT_EQ(CheckChain(client_.get(), ns_, MakeChain(ns_, 2, 4))->right, 4U);
}

TEST_F(FailureTableTest, DaemonKilledNvmeHitsAgainAndTheClientResumesByItself) {
  StartDaemon();
  Put(400);
  FlushToNvme(*daemon_);
  const uint64_t epoch = client_->epoch();
  daemon_->Kill9();
  ASSERT_TRUE(daemon_->Start().ok());
  const ReadBack read = Check(400);
  EXPECT_EQ(read.wrong, 0U);
  EXPECT_EQ(read.right, 400U) << "what was flushed is lost";
  EXPECT_NE(client_->epoch(), epoch);
  EXPECT_GE(client_->stats().reopen_count, 1U);
}

TEST_F(FailureTableTest, ATicketTellsWithoutACallUntilTheDaemonDies) {
  StartDaemon();
  Put(400);
  FlushToNvme(*daemon_);
  const auto cold = MakeChain(ns_, 100, 8);
  ASSERT_EQ(client_->Lookup(ns_, cold)->front() & 3, 0) << "it is in memory";
  const auto ticket = client_->Prefetch(ns_, cold);
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  EXPECT_EQ(ticket->covered_block_count, 8U);
  uint32_t moved_block_count = 0;
  EXPECT_TRUE(Eventually(milliseconds(10'000), [&] {
    return ticket->Poll(&moved_block_count) == client::TicketPoll::kDone;
  }));
  EXPECT_TRUE(client_->GetTicket(ticket->ticket_id)->done);
  EXPECT_GT(moved_block_count, 0U);
  daemon_->Kill9();
  EXPECT_TRUE(Eventually(milliseconds(10'000), [&] {
    return ticket->Poll() == client::TicketPoll::kAsk;
  })) << "nobody writes there any more";
}

TEST_F(FailureTableTest, DaemonKilledCallsFailAtOnceWhileItIsDown) {
  StartDaemon();
  Put(8);
  auto impatient = client::Client::Connect(
      {.run_dir = daemon_->run_dir(), .client_name = "test", .reconnect_timeout_ms = 200});
  ASSERT_TRUE(impatient.ok());
  const auto ns = (*impatient)->RegisterLayout(SmallLayout());
  daemon_->Kill9();
  const auto start = std::chrono::steady_clock::now();
  const auto lookup = (*impatient)->Lookup(*ns, MakeChain(*ns, 100, 8));
  EXPECT_EQ(lookup.status().code(), absl::StatusCode::kUnavailable) << lookup.status();
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(5000));
}

TEST_F(FailureTableTest, FlippedBytesOnDiskAreMissesAndCounted) {
  StartDaemon();
  Put(400);
  FlushToNvme(*daemon_);
  daemon_->Kill9();
  size_t flipped = 0;
  for (const auto& path : FilesBelow(daemon_->data_dir(), ".seg")) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    // Somewhere in the payload of every fifth record or so; records are 4 KiB pages.
    const auto size = static_cast<std::streamoff>(std::filesystem::file_size(path));
    for (std::streamoff at = 12'288 + 777; at < size; at += 61'440) {
      char byte = 0;
      file.seekg(at);
      file.read(&byte, 1);
      byte = static_cast<char>(byte ^ 0x10);
      file.seekp(at);
      file.write(&byte, 1);
      ++flipped;
    }
  }
  ASSERT_GT(flipped, 10U);
  ASSERT_TRUE(daemon_->Start().ok());
  const ReadBack read = Check(400);
  EXPECT_EQ(read.wrong, 0U);
  EXPECT_GT(read.missing, 0U);
  EXPECT_GT(read.right, 200U);
  uint64_t corrupt = 0;
  const auto tiers = Tiers(*daemon_);
  for (const auto& tier : tiers.tiers()) corrupt += tier.corrupt_block_count();
  EXPECT_GT(corrupt, 0U);
  // The bad entries are gone: they can be put again.
  Put(400);
  EXPECT_EQ(Check(400).right, 400U);
}

TEST_F(FailureTableTest, DiskFullDegradesOnlyNvmeAndHealsAlone) {
  StartDaemon();
  daemon_->Kill9();
  const SmallDisk disk(daemon_->data_dir(), "size=12m");
  if (!disk.mounted()) GTEST_SKIP() << "mounting a small tmpfs needs root";
  ASSERT_TRUE(daemon_->Start().ok()) << daemon_->Log();
  Connect();
  Put(2400);
  const auto nvme_degraded = [&] { return NvmeDegraded(*daemon_); };
  EXPECT_TRUE(Eventually(milliseconds(10'000), nvme_degraded)) << daemon_->Log();
  EXPECT_EQ(Check(2400).wrong, 0U);
  const auto fresh = MakeChain(ns_, 7, 8);
  EXPECT_EQ(*PutChain(client_.get(), ns_, fresh), 8U) << "memory tiers must serve";
  EXPECT_EQ(CheckChain(client_.get(), ns_, fresh)->right, 8U);

  ASSERT_TRUE(disk.Resize("size=256m"));
  EXPECT_TRUE(Eventually(milliseconds(60'000), [&] {
    (void)PutChain(client_.get(), ns_, fresh);
    return !nvme_degraded();
  })) << daemon_->Log();
  FlushToNvme(*daemon_);
  daemon_->Kill9();
  ASSERT_TRUE(daemon_->Start().ok());
  EXPECT_EQ(CheckChain(client_.get(), ns_, fresh)->right, 8U);
  daemon_->Kill9();
}

TEST_F(FailureTableTest, ADiskThatIsFullAtTheStartJoinsOnceItHasRoom) {
  daemon_ = std::make_unique<DaemonProcess>(g_kvtierd, SmallTiers());
  std::filesystem::create_directories(daemon_->data_dir());
  const SmallDisk disk(daemon_->data_dir(), "size=64k");
  if (!disk.mounted()) GTEST_SKIP() << "mounting a small tmpfs needs root";
  std::ofstream(daemon_->data_dir() + "/somebody's") << std::string(128 << 10, 'x');
  ASSERT_TRUE(daemon_->Start().ok()) << daemon_->Log();
  Connect();
  EXPECT_TRUE(NvmeDegraded(*daemon_));
  const auto chain = MakeChain(ns_, 7, 8);
  EXPECT_EQ(*PutChain(client_.get(), ns_, chain), 8U) << "memory tiers must serve";
  EXPECT_EQ(CheckChain(client_.get(), ns_, chain)->right, 8U);

  ASSERT_TRUE(disk.Resize("size=256m"));
  EXPECT_TRUE(Eventually(milliseconds(60'000), [&] { return !NvmeDegraded(*daemon_); }))
      << daemon_->Log();
  FlushToNvme(*daemon_);
  daemon_->Kill9();
  ASSERT_TRUE(daemon_->Start().ok());
  EXPECT_EQ(CheckChain(client_.get(), ns_, chain)->right, 8U);
  daemon_->Kill9();
}

TEST_F(FailureTableTest, NamedDirectoriesOnTheRootFileSystemAreWarnedOf) {
  std::string parent = ::testing::TempDir() + "/kvtier-dirs-XXXXXX";
  ASSERT_NE(mkdtemp(parent.data()), nullptr);
  struct stat status{};
  struct stat root_status{};
  ASSERT_TRUE(stat(parent.c_str(), &status) == 0 && stat("/", &root_status) == 0);
  StartDaemon({"--nvme.dirs=" + parent + "/nvme"});
  const std::string log = daemon_->Log();
  const size_t at = log.find("is on the root file system: is its drive mounted?");
  EXPECT_EQ(at != std::string::npos, status.st_dev == root_status.st_dev) << log;
  EXPECT_EQ(log.find("is on the root file system", at + 1), std::string::npos) << "once";
  daemon_->Kill9();
  std::filesystem::remove_all(parent);
}

TEST_F(FailureTableTest, DeletedSegmentsAreMissesWhileTheDaemonRuns) {
  StartDaemon();
  Put(400);
  FlushToNvme(*daemon_);
  for (const auto& path : FilesBelow(daemon_->data_dir(), ".seg")) std::filesystem::remove(path);
  EXPECT_TRUE(Eventually(milliseconds(20'000), [&] {
    return daemon_->Log().find("segment files were deleted by somebody") != std::string::npos;
  }));
  const ReadBack read = Check(400);
  EXPECT_EQ(read.wrong, 0U);
  EXPECT_GT(read.missing, 200U) << "only memory has some of them";
  Put(400);
  FlushToNvme(*daemon_);
  daemon_->Kill9();
  ASSERT_TRUE(daemon_->Start().ok());
  EXPECT_EQ(Check(400).right, 400U);
}

TEST_F(FailureTableTest, IndexDamagedIsSetAsideAndRebuiltFromRecords) {
  StartDaemon();
  Put(400);
  FlushToNvme(*daemon_);
  daemon_->Kill9();
  const auto current = FilesBelow(daemon_->data_dir(), "CURRENT");
  ASSERT_EQ(current.size(), 1U);
  std::filesystem::resize_file(current[0], 0);
  ASSERT_TRUE(daemon_->Start().ok()) << daemon_->Log();
  const ReadBack read = Check(400);
  EXPECT_EQ(read.wrong, 0U);
  EXPECT_EQ(read.right, 400U);
}

TEST_F(FailureTableTest, MemoryFullOfFillsIsExhaustedNotAHang) {
  StartDaemon();
  auto impatient = client::Client::Connect(
      {.run_dir = daemon_->run_dir(), .client_name = "test", .transfer_timeout_ms = 500});
  ASSERT_TRUE(impatient.ok());
  const auto ns = (*impatient)->RegisterLayout(SmallLayout());
  std::vector<client::Fill> fills;
  bool exhausted = false;
  for (uint32_t chain = 0; chain < 100 && !exhausted; ++chain) {
    auto fill = (*impatient)->Reserve(*ns, std::nullopt, MakeChain(*ns, 1000 + chain, 8));
    ASSERT_TRUE(fill.ok()) << fill.status();
    exhausted = fill->blocks.back().status == BlockStatus::kExhausted;
    fills.push_back(std::move(*fill));
  }
  ASSERT_TRUE(exhausted);
  EXPECT_TRUE((*impatient)->Lookup(*ns, MakeChain(*ns, 1000, 8)).ok()) << "others are served";
  for (const client::Fill& fill : fills) ASSERT_TRUE((*impatient)->Abort(*ns, fill).ok());
  EXPECT_EQ(PinnedBytes(*daemon_), 0U);
  EXPECT_EQ(*PutChain(client_.get(), ns_, MakeChain(ns_, 3, 8)), 8U);
}

TEST_F(FailureTableTest, SecondDaemonOnTheSameDirectoryRefusesAndTheFirstServes) {
  StartDaemon();
  Put(8);
  ChildProcess second(daemon_->arguments(), daemon_->log_path());
  const auto code = second.Wait(milliseconds(20'000));
  ASSERT_TRUE(code.ok()) << code.status();
  EXPECT_NE(*code, 0);
  EXPECT_EQ(Check(8).right, 8U);
}

TEST_F(FailureTableTest, OtherLayoutNeverHits) {
  StartDaemon();
  Put(8);
  Layout other = SmallLayout();
  other.weights_revision = "2";
  const auto ns = client_->RegisterLayout(other);
  ASSERT_TRUE(ns.ok()) << ns.status();
  EXPECT_NE(ns->hash, ns_.hash);
  EXPECT_TRUE(client_->Lookup(*ns, MakeChain(*ns, 100, 8))->empty());
  EXPECT_TRUE(client_->Lookup(*ns, MakeChain(ns_, 100, 8))->empty()) << "foreign keys hit";
  EXPECT_EQ(client_->Lookup(ns_, MakeChain(ns_, 100, 8))->size(), 8U);
}

TEST_F(FailureTableTest, SigtermExitsInTimeAndWhatWasInMemoryHitsAgain) {
  StartDaemon();
  Put(64);
  const auto code = daemon_->Stop();
  ASSERT_TRUE(code.ok()) << code.status();
  EXPECT_EQ(*code, 0) << daemon_->Log();
  ASSERT_TRUE(daemon_->Start().ok());
  EXPECT_EQ(Check(64).right, 64U);
}

TEST_F(FailureTableTest, AcquireOfMemoryBlocksCopiesNothing) {
  StartDaemon();
  Put(32);
  const auto moved = [&] {
    uint64_t bytes = 0;
    const auto response = Tiers(*daemon_);
    for (const auto& link : response.links()) bytes += link.moved_bytes();
    return bytes;
  };
  const uint64_t before = moved();
  EXPECT_EQ(Check(32).right, 32U);
  EXPECT_EQ(moved(), before) << "bytes moved for blocks that were in memory";
  EXPECT_EQ(client_->stats().copied_bytes, 0U);
  EXPECT_EQ(Tiers(*daemon_).store().acquired_in_place_block_count(), 32U);
}

}  // namespace
}  // namespace kvtier::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (argc != 3) {
    std::cerr << "usage: failure_table_test KVTIERD ENGINE_STUB\n";
    return 2;
  }
  kvtier::testing::g_kvtierd = argv[1];
  kvtier::testing::g_engine_stub = argv[2];
  return RUN_ALL_TESTS();
}
