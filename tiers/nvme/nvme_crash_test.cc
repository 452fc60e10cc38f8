// SPDX-License-Identifier: Apache-2.0
//
// kill -9 at random moments: what was acknowledged and not freed is there, nothing is ever wrong.
// Usage: nvme_crash_test PATH_OF_NVME_CRASH_CHILD
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "tiers/nvme/nvme_test_util.h"

extern char** environ;

namespace kvtier {
namespace {

std::string child_path;

class NvmeCrashTest : public NvmeTierTest {
 protected:
  NvmeCrashTest() { options_.capacity_bytes = 12 << 20; }

  struct Known {
    uint64_t seed = 0;
    uint32_t payload_bytes = 0;
    bool must_exist = false;
  };

  // posix_spawn: a child forked from a process that has run RocksDB must exec.
  pid_t Spawn(const std::string& first, const std::string& second, FILE*& output) {
    int pipe_fds[2];
    EXPECT_EQ(pipe2(pipe_fds, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, pipe_fds[1], STDOUT_FILENO);
    std::string arguments[] = {child_path, first, second};
    char* argv[] = {arguments[0].data(), arguments[1].data(), arguments[2].data(), nullptr};
    pid_t pid = -1;
    EXPECT_EQ(posix_spawn(&pid, child_path.c_str(), &actions, nullptr, argv, environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(pipe_fds[1]);
    output = fdopen(pipe_fds[0], "r");
    return pid;
  }

  void Learn(const std::string& line) {
    std::istringstream words(line);
    char what;
    std::string key;
    uint64_t seed;
    uint32_t payload_bytes;
    ASSERT_TRUE(words >> what >> key >> seed >> payload_bytes) << line;
    Known& known = known_[key];
    if (what == 'S') known = {.seed = seed, .payload_bytes = payload_bytes};
    if (what == 'W') known.must_exist = true;
    if (what == 'F') known.must_exist = false;
  }

  // A rebuilt index may bring freed blocks back and, for want of room, drop others.
  void Check(bool may_be_rebuilt) {
    auto tier = NvmeTier::Create(options_);
    ASSERT_TRUE(tier.ok()) << tier.status();
    std::map<std::string, std::pair<BlockMeta, ReplicaId>> found;
    ASSERT_TRUE((*tier)
                    ->Recover([&](const BlockMeta& meta, ReplicaId replica) {
                      found[meta.key.Hex()] = {meta, replica};
                    })
                    .ok());
    ASSERT_TRUE(may_be_rebuilt || !(*tier)->Stats().is_rebuilt);
    uint64_t used_bytes = 0;
    for (const auto& [key, at] : found) {
      ASSERT_TRUE(known_.contains(key)) << "a block that nobody wrote";
      const TestBlock block = MakeBlock(known_[key].seed, known_[key].payload_bytes);
      ASSERT_EQ(at.first, block.meta);
      ASSERT_EQ(ReadAndCompare(**tier, at.second, block), absl::OkStatus());
      used_bytes += (*tier)->FootprintBytes(block.meta.payload_bytes);
      known_[key].must_exist = true;
    }
    // What is gone stays known: a rebuild may still find its record.
    for (auto& [key, known] : known_) {
      const bool is_found = found.contains(key);
      ASSERT_TRUE(is_found || may_be_rebuilt || !known.must_exist)
          << "acknowledged block " << known.seed << " is gone";
      known.must_exist = is_found;
    }
    ASSERT_EQ((*tier)->Usage().used_bytes, used_bytes);
    ASSERT_NO_FATAL_FAILURE(CheckFiles(**tier));
  }

  // What is on the disk is what is accounted for, and nothing else is there.
  void CheckFiles(NvmeTier& tier) {
    const NvmeStats stats = tier.Stats();
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(options_.dir)) {
      std::string name = entry.path().filename().string();
      names.insert(name.substr(0, name.find("-")));
    }
    names.erase("index.damaged");
    names.erase("written");  // since the first end that was not a kill
    ASSERT_EQ(names, (std::set<std::string>{"LOCK", "probe", "index", "segments"}));
    ASSERT_EQ(SegmentPaths().size(), stats.segment_count);
    ASSERT_LE(DiskBytes(), options_.capacity_bytes + kTestSegmentBytes);
    // RocksDB removes and makes files of its own by itself: look until it is still.
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    for (uint64_t i = 0; tier.Usage().physical_bytes != DiskBytes(); ++i) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline)
          << tier.Usage().physical_bytes << " accounted, " << DiskBytes() << " on the disk";
      // The account is refreshed while the tier works.
      const TestBlock block = MakeBlock(i, 1000);
      const auto replica = tier.Reserve(1000, 1);
      if (!replica.ok()) break;
      ASSERT_TRUE(WriteAndWait(tier, *replica, block.meta, block.payload.bytes()).ok());
      known_[block.meta.key.Hex()] = {.seed = i, .payload_bytes = 1000, .must_exist = false};
      tier.Free(*replica);
    }
  }

  // Runs the child and kills it after some lines, or after some time.
  void RunAndKill(uint64_t seed, uint64_t line_count,
                  std::optional<std::chrono::milliseconds> time) {
    FILE* output = nullptr;
    const pid_t pid = Spawn(options_.dir, std::to_string(seed), output);
    ASSERT_GT(pid, 0);
    absl::Notification has_ended;
    std::jthread killer;
    if (time) {
      killer = std::jthread([pid, time, &has_ended] {
        has_ended.WaitForNotificationWithTimeout(absl::FromChrono(*time));
        kill(pid, SIGKILL);
      });
    }
    char* line = nullptr;
    size_t line_bytes = 0;
    uint64_t seen_count = 0;
    while (getline(&line, &line_bytes, output) > 0) {
      Learn(line);
      if (++seen_count == line_count + 1 && !time) kill(pid, SIGKILL);
    }
    free(line);
    fclose(output);
    has_ended.Notify();
    int status = 0;
    if (killer.joinable()) killer.join();
    ASSERT_EQ(waitpid(pid, &status, 0), pid);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
        << "the child ended by itself: " << status;
  }

  std::map<std::string, Known> known_;
};

// $KVTIER_CRASH_CYCLES times; 200 and more before a release, fewer in CI.
TEST_F(NvmeCrashTest, KillNineLosesNothingAcknowledged) {
  const char* const count_text = std::getenv("KVTIER_CRASH_CYCLES");
  const uint64_t cycle_count = count_text != nullptr ? std::strtoull(count_text, nullptr, 10) : 24;
  std::mt19937_64 random(TestSeed());
  uint64_t rebuild_count = 0;
  for (uint64_t cycle = 1; cycle <= cycle_count; ++cycle) {
    SCOPED_TRACE("cycle " + std::to_string(cycle));
    // Some start without an index and are killed while they make it anew.
    const bool is_rebuilding = cycle % 4 == 0;
    std::optional<std::chrono::milliseconds> time;
    if (is_rebuilding) {
      std::filesystem::remove_all(options_.dir + "/index");
      time = std::chrono::milliseconds(random() % 60);
      ++rebuild_count;
    }
    ASSERT_NO_FATAL_FAILURE(RunAndKill(cycle * 1'000'000, random() % 400, time));
    ASSERT_NO_FATAL_FAILURE(Check(is_rebuilding));
  }
  std::printf("%llu kills, %llu of them around a rebuild; %zu blocks known\n",
              static_cast<unsigned long long>(cycle_count),
              static_cast<unsigned long long>(rebuild_count), known_.size());
  EXPECT_GT(known_.size(), 10u);
}

TEST_F(NvmeCrashTest, FallsBackToPreadWhereIoUringIsForbidden) {
  FILE* output = nullptr;
  const pid_t pid = Spawn("--no-io-uring", options_.dir, output);
  ASSERT_GT(pid, 0);
  // The log has one line about it; the engine's name comes last.
  std::string all;
  for (char text[256]; fgets(text, sizeof(text), output) != nullptr;) all += text;
  EXPECT_NE(all.find("no io_uring, using a pool of pread threads"), std::string::npos) << all;
  EXPECT_NE(all.find("\npread, without io_uring: "), std::string::npos) << all;
  fclose(output);
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

}  // namespace
}  // namespace kvtier

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (argc != 2) {
    std::fprintf(stderr, "usage: nvme_crash_test PATH_OF_NVME_CRASH_CHILD\n");
    return 2;
  }
  kvtier::child_path = argv[1];
  return RUN_ALL_TESTS();
}
