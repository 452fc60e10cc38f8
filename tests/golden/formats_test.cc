// SPDX-License-Identifier: Apache-2.0
//
// What a daemon of format 1 left on disk and in memory is read by today's code: every block, byte
// for byte. A newer version of each is refused, with the reason.
//   formats_test ARCHIVE          the test
//   formats_test --make ARCHIVE   makes the archive anew, with today's code: only for a new format,
//                                 in a new file, so that the old one stays tested
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "proto/base/crc32c.h"
#include "proto/base/key.h"
#include "tiers/memory/memory_tier.h"
#include "tiers/nvme/nvme_tier.h"
#include "tiers/tier_test_util.h"

namespace kvtier {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kSegmentBytes = 64 << 10;
constexpr uint64_t kNvmeBytes = 2 << 20;
// A segment for each size of slots and owner.
constexpr uint64_t kHostBytes = 16 * kSegmentBytes;
constexpr size_t kPage = 4096;
const std::string kBoot = "11111111-2222-3333-4444-555555555555";

std::string g_archive;

// --- the blocks, which must stay what they were when the archive was made ---

// One page, a page and a little, and as much as a segment holds.
constexpr uint32_t kNvmePayloadBytes[] = {1, 4096, 5000, 20000, 57344, 12288, 4097, 9216, 33333};
constexpr uint32_t kHostPayloadBytes[] = {4096, 5000, 8192, 100, 16384, 4096, 60000};
// Freed before the end: it must not come back.
constexpr size_t kFreed = 3;

Digest DigestOf(const std::string& kind, size_t number) {
  return FieldHasher().Add("golden-1").Add(kind).Add(std::to_string(number)).Finish();
}

TestBlock GoldenBlock(size_t number, uint32_t payload_bytes) {
  TestBlock block{.meta = {.namespace_hash = DigestOf("namespace", number % 2),
                           .key = DigestOf("key", number),
                           .parent = number == 0 ? Digest() : DigestOf("key", number - 1),
                           .layout = DigestOf("layout", 0),
                           .depth = static_cast<uint32_t>(number),
                           .payload_bytes = payload_bytes},
                  .payload = PageBuffer(payload_bytes)};
  // Compresses well, and no two pages are alike.
  const std::span<std::byte> bytes = block.payload.bytes();
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::byte>(block.meta.key.bytes[i / 128 % 32]) ^
               static_cast<std::byte>(i / kPage + number);
  }
  block.meta.crc32c = Crc32c(bytes.first(payload_bytes));
  return block;
}

Digest Tag(OwnerIdx owner) { return DigestOf("tenant", owner); }
OwnerIdx HostOwner(size_t number) { return number % 2; }

// --- files ---

std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void WriteAll(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

bool RunShell(const std::string& command) { return std::system(command.c_str()) == 0; }

uint32_t Crc(const std::string& bytes, size_t first, size_t count, uint32_t seed = 0) {
  return Crc32c(std::as_bytes(std::span(bytes).subspan(first, count)), seed);
}

template <typename Number>
Number Load(const std::string& bytes, size_t at) {
  Number number;
  std::memcpy(&number, &bytes[at], sizeof(number));
  return number;
}

template <typename Number>
void Store(std::string* bytes, size_t at, Number number) {
  std::memcpy(&(*bytes)[at], &number, sizeof(number));
}

// Descriptors by name; what is forgotten stays.
class HeldFds final : public SegmentKeeper {
 public:
  ~HeldFds() override {
    for (const auto& [name, fd] : fds_) close(fd);
  }
  absl::Status Keep(const std::string& name, int fd) override {
    absl::MutexLock lock(&mutex_);
    fds_.emplace(name, fcntl(fd, F_DUPFD_CLOEXEC, 0));
    return absl::OkStatus();
  }
  absl::Status Forget(const std::string&) override { return absl::OkStatus(); }
  absl::StatusOr<std::vector<KeptFd>> TakeKept() override {
    absl::MutexLock lock(&mutex_);
    std::vector<KeptFd> kept;
    for (const auto& [name, fd] : fds_) kept.push_back({name, fcntl(fd, F_DUPFD_CLOEXEC, 0)});
    return kept;
  }
  std::map<std::string, int> fds() {
    absl::MutexLock lock(&mutex_);
    return fds_;
  }

 private:
  absl::Mutex mutex_;
  std::map<std::string, int> fds_ ABSL_GUARDED_BY(mutex_);
};

NvmeOptions NvmeOptionsIn(const std::string& folder) {
  return {.dir = folder + "/nvme", .capacity_bytes = kNvmeBytes, .segment_bytes = kSegmentBytes};
}

MemoryTier::Options HostOptions(SegmentKeeper* keeper) {
  MemoryTier::Options options;
  options.capacity_bytes = kHostBytes;
  options.segment_bytes = kSegmentBytes;
  options.prepare_thread_count = 1;
  options.keeper = keeper;
  options.owner_tags = {Tag(0), Tag(1)};
  options.boot_id = kBoot;
  return options;
}

// --- making ---

void MakeNvme(const std::string& folder) {
  auto tier = NvmeTier::Create(NvmeOptionsIn(folder));
  ASSERT_TRUE(tier.ok()) << tier.status();
  ASSERT_TRUE((*tier)->Recover([](const BlockMeta&, ReplicaId) {}).ok());
  ReplicaId freed = kNoReplica;
  for (size_t i = 0; i < std::size(kNvmePayloadBytes); ++i) {
    const TestBlock block = GoldenBlock(i, kNvmePayloadBytes[i]);
    const auto replica = (*tier)->Reserve(block.meta.payload_bytes, 0);
    ASSERT_TRUE(replica.ok()) << replica.status();
    ASSERT_TRUE(WriteAndWait(**tier, *replica, block.meta, block.payload.bytes()).ok());
    if (i == kFreed) freed = *replica;
  }
  (*tier)->Free(freed);
  (*tier)->Close();
  // They say where and by whom it was made, and are made again.
  ASSERT_TRUE(
      RunShell("cd '" + folder + "/nvme' && rm -f LOCK index/LOG* index/LOCK index/OPTIONS*"));
}

void MakeHost(const std::string& folder) {
  HeldFds held;
  auto tier = MemoryTier::Create(HostOptions(&held));
  ASSERT_TRUE(tier.ok()) << tier.status();
  ASSERT_TRUE((*tier)->Recover([](const BlockMeta&, ReplicaId) {}).ok());
  while ((*tier)->Usage().ready_bytes < kHostBytes) sched_yield();
  for (size_t i = 0; i < std::size(kHostPayloadBytes); ++i) {
    const TestBlock block = GoldenBlock(i, kHostPayloadBytes[i]);
    const auto replica = (*tier)->Reserve(block.meta.payload_bytes, HostOwner(i));
    ASSERT_TRUE(replica.ok()) << replica.status();
    std::memcpy((*tier)->Mapped(*replica).data(), block.payload.bytes().data(),
                block.meta.payload_bytes);
    (*tier)->OnCommitted(*replica, block.meta);
    if (i == kFreed) (*tier)->Free(*replica);
  }
  ASSERT_TRUE(fs::create_directory(folder + "/host"));
  for (const auto& [name, fd] : held.fds()) {
    struct stat status{};
    ASSERT_EQ(fstat(fd, &status), 0);
    std::string bytes(static_cast<size_t>(status.st_size), '\0');
    ASSERT_EQ(pread(fd, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    WriteAll(folder + "/host/" + name, bytes);
  }
}

TEST(GoldenFormats, DISABLED_Make) {
  const TempFolder folder;
  ASSERT_NO_FATAL_FAILURE(MakeNvme(folder.path()));
  ASSERT_NO_FATAL_FAILURE(MakeHost(folder.path()));
  ASSERT_TRUE(RunShell("tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 -C '" +
                       folder.path() + "' -c nvme host | gzip -9n >'" + g_archive + "'"));
}

// --- reading ---

class GoldenFormatsTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(
        RunShell("tar -C '" + folder_.path() + "' --no-same-owner -xzf '" + g_archive + "'"));
  }

  void ExpectAllOnNvme(bool is_rebuilt) {
    auto tier = NvmeTier::Create(NvmeOptionsIn(folder_.path()));
    ASSERT_TRUE(tier.ok()) << tier.status();
    std::map<Key, ReplicaId> found;
    ASSERT_TRUE((*tier)
                    ->Recover([&](const BlockMeta& meta, ReplicaId replica) {
                      EXPECT_TRUE(found.emplace(meta.key, replica).second);
                    })
                    .ok());
    const NvmeStats stats = (*tier)->Stats();
    EXPECT_EQ(stats.is_rebuilt, is_rebuilt);
    EXPECT_EQ(stats.dropped_count, 0U);
    EXPECT_EQ(stats.segment_bytes, kSegmentBytes);
    for (size_t i = 0; i < std::size(kNvmePayloadBytes); ++i) {
      SCOPED_TRACE(i);
      const TestBlock block = GoldenBlock(i, kNvmePayloadBytes[i]);
      const auto at = found.find(block.meta.key);
      // A rebuild may bring it back.
      if (i == kFreed && at == found.end()) continue;
      ASSERT_NE(at, found.end());
      EXPECT_TRUE(i != kFreed || is_rebuilt);
      EXPECT_EQ(ReadAndCompare(**tier, at->second, block), absl::OkStatus());
      found.erase(at);
    }
    EXPECT_TRUE(found.empty());
  }

  // Makes memfds of the files, as they were when a keeper had them. Their inodes are others now,
  // and the index has them: FORMAT.md of tiers/memory says where.
  void LoadHost(HeldFds* held, uint32_t version = 1) {
    std::map<std::pair<uint64_t, uint64_t>, std::pair<uint64_t, uint64_t>> ids;
    std::string index;
    for (const auto& entry : fs::directory_iterator(folder_.path() + "/host")) {
      const std::string name = entry.path().filename();
      const std::string bytes = ReadAll(entry.path());
      uint64_t device = 0;
      uint64_t inode = 0;
      if (std::sscanf(name.c_str(), "kvtier-host-segment-%lx-%lx", &device, &inode) != 2) {
        index = bytes;
        continue;
      }
      ids[{device, inode}] = Hold(held, "segment", bytes);
    }
    ASSERT_NO_FATAL_FAILURE(RenameFiles(ids, &index));
    Store(&index, 8, version);
    Store(&index, 68, Crc(index, 0, 68));
    Hold(held, "index", index);
  }

  static std::pair<uint64_t, uint64_t> Hold(HeldFds* held, const std::string& kind,
                                            const std::string& bytes) {
    const int fd = memfd_create(kind.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
    struct stat status{};
    EXPECT_EQ(ftruncate(fd, static_cast<off_t>(bytes.size())), 0);
    EXPECT_EQ(pwrite(fd, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    EXPECT_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
    EXPECT_EQ(fchmod(fd, S_IRUSR), 0);
    EXPECT_EQ(fstat(fd, &status), 0);
    held->Keep(absl::StrFormat("kvtier-host-%s-%x-%x", kind, status.st_dev, status.st_ino), fd)
        .IgnoreError();
    close(fd);
    return {status.st_dev, status.st_ino};
  }

  static void RenameFiles(
      const std::map<std::pair<uint64_t, uint64_t>, std::pair<uint64_t, uint64_t>>& ids,
      std::string* index) {
    ASSERT_EQ(index->substr(0, 8), "KVTHIDX1");
    ASSERT_EQ(Load<uint32_t>(*index, 8), 1U);
    ASSERT_EQ(Load<uint64_t>(*index, 16), kSegmentBytes);
    const size_t stride = (64 + 160 * (kSegmentBytes / kPage) + kPage - 1) / kPage * kPage;
    const auto frame_count = Load<uint32_t>(*index, 24);
    size_t entry_count = 0;
    for (uint32_t i = 0; i < frame_count; ++i) {
      const size_t frame = kPage + i * stride;
      if (Load<uint64_t>(*index, frame + 16) == 0) continue;
      ASSERT_EQ(Load<uint32_t>(*index, frame + 60), Crc(*index, frame, 60));
      const auto id = ids.at({Load<uint64_t>(*index, frame), Load<uint64_t>(*index, frame + 8)});
      Store(index, frame, id.first);
      Store(index, frame + 8, id.second);
      Store(index, frame + 60, Crc(*index, frame, 60));
      const uint64_t slot_count = kSegmentBytes / Load<uint64_t>(*index, frame + 16);
      for (uint64_t slot = 0; slot < slot_count; ++slot) {
        const size_t entry = frame + 64 + slot * 160;
        if (index->substr(entry, 4) != "LIVE") continue;
        const uint64_t place[] = {id.first, id.second, slot};
        const uint32_t place_crc = Crc32c(std::as_bytes(std::span(place)));
        Store(index, entry + 4, Crc(*index, entry + 8, 152, place_crc));
        ++entry_count;
      }
    }
    ASSERT_EQ(entry_count, std::size(kHostPayloadBytes) - 1);
  }

  TempFolder folder_;
};

TEST_F(GoldenFormatsTest, NvmeOfFormat1IsRead) { ExpectAllOnNvme(/*is_rebuilt=*/false); }

TEST_F(GoldenFormatsTest, NvmeOfFormat1IsReadFromItsRecordsAlone) {
  fs::remove_all(folder_.path() + "/nvme/index");
  ExpectAllOnNvme(/*is_rebuilt=*/true);
}

TEST_F(GoldenFormatsTest, NewerNvmeIsRefused) {
  const std::string path = folder_.path() + "/nvme/segments/000000.seg";
  std::string bytes = ReadAll(path);
  ASSERT_EQ(Load<uint32_t>(bytes, 8), 1U);
  Store(&bytes, 8, uint32_t{2});
  Store(&bytes, 44, Crc(bytes, 48, kPage - 48, Crc(bytes, 0, 44)));
  WriteAll(path, bytes);
  const absl::Status refused = NvmeTier::Create(NvmeOptionsIn(folder_.path())).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(refused.message(),
            path + ": segment header: format version 2, this build reads up to 1");
}

TEST_F(GoldenFormatsTest, HostMemoryOfFormat1IsTakenOver) {
  HeldFds held;
  ASSERT_NO_FATAL_FAILURE(LoadHost(&held));
  auto tier = MemoryTier::Create(HostOptions(&held));
  ASSERT_TRUE(tier.ok()) << tier.status();
  std::map<Key, std::pair<BlockMeta, ReplicaId>> found;
  ASSERT_TRUE((*tier)
                  ->Recover([&](const BlockMeta& meta, ReplicaId replica) {
                    EXPECT_TRUE(found.emplace(meta.key, std::pair(meta, replica)).second);
                  })
                  .ok());
  EXPECT_EQ((*tier)->adoption().refusal, "");
  EXPECT_EQ((*tier)->adoption().kept_count, std::size(kHostPayloadBytes) - 1);
  for (size_t i = 0; i < std::size(kHostPayloadBytes); ++i) {
    SCOPED_TRACE(i);
    const TestBlock block = GoldenBlock(i, kHostPayloadBytes[i]);
    const auto at = found.find(block.meta.key);
    ASSERT_EQ(at == found.end(), i == kFreed);
    if (at == found.end()) continue;
    const auto& [meta, replica] = at->second;
    EXPECT_EQ(meta, block.meta);
    EXPECT_EQ(ReadAndCompare(**tier, replica, block), absl::OkStatus());
  }
}

TEST_F(GoldenFormatsTest, NewerHostMemoryIsRefused) {
  HeldFds held;
  ASSERT_NO_FATAL_FAILURE(LoadHost(&held, /*version=*/2));
  auto tier = MemoryTier::Create(HostOptions(&held));
  ASSERT_TRUE(tier.ok()) << tier.status();
  ASSERT_TRUE((*tier)
                  ->Recover([](const BlockMeta& meta, ReplicaId) {
                    ADD_FAILURE() << "found " << meta.key.Hex();
                  })
                  .ok());
  EXPECT_NE((*tier)->adoption().refusal.find("an index of version 2, this daemon has version 1"),
            std::string::npos)
      << (*tier)->adoption().refusal;
}

}  // namespace
}  // namespace kvtier

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const bool makes = argc == 3 && std::string(argv[1]) == "--make";
  if (argc != (makes ? 3 : 2)) {
    std::cerr << "usage: formats_test [--make] ARCHIVE\n";
    return 2;
  }
  kvtier::g_archive = argv[argc - 1];
  if (makes) {
    GTEST_FLAG_SET(also_run_disabled_tests, true);
    GTEST_FLAG_SET(filter, "GoldenFormats.DISABLED_Make");
  }
  return RUN_ALL_TESTS();
}
