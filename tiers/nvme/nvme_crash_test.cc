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

#include <cstdio>
#include <map>
#include <random>
#include <sstream>
#include <string>

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

  void Check() {
    auto tier = NvmeTier::Create(options_);
    ASSERT_TRUE(tier.ok()) << tier.status();
    std::map<std::string, std::pair<BlockMeta, ReplicaId>> found;
    ASSERT_TRUE((*tier)
                    ->Recover([&](const BlockMeta& meta, ReplicaId replica) {
                      found[meta.key.Hex()] = {meta, replica};
                    })
                    .ok());
    EXPECT_FALSE((*tier)->Stats().is_rebuilt);
    for (const auto& [key, at] : found) {
      ASSERT_TRUE(known_.contains(key)) << "a block that nobody wrote";
      const TestBlock block = MakeBlock(known_[key].seed, known_[key].payload_bytes);
      ASSERT_EQ(at.first, block.meta);
      ASSERT_EQ(ReadAndCompare(**tier, at.second, block), absl::OkStatus());
      known_[key].must_exist = true;
    }
    for (auto it = known_.begin(); it != known_.end();) {
      ASSERT_TRUE(!it->second.must_exist || found.contains(it->first))
          << "acknowledged block " << it->second.seed << " is gone";
      it = found.contains(it->first) ? std::next(it) : known_.erase(it);
    }
    ASSERT_LE(DiskBytes(), options_.capacity_bytes + kTestSegmentBytes);
  }

  std::map<std::string, Known> known_;
};

TEST_F(NvmeCrashTest, KillNineLosesNothingAcknowledged) {
  std::mt19937_64 random(TestSeed());
  for (uint64_t round = 1; round <= 12; ++round) {
    FILE* output = nullptr;
    const pid_t pid = Spawn(options_.dir, std::to_string(round * 1'000'000), output);
    ASSERT_GT(pid, 0);
    const uint64_t line_count = random() % 400;
    char* line = nullptr;
    size_t line_bytes = 0;
    uint64_t seen_count = 0;
    while (getline(&line, &line_bytes, output) > 0) {
      Learn(line);
      if (++seen_count == line_count + 1) kill(pid, SIGKILL);
    }
    free(line);
    fclose(output);
    int status = 0;
    ASSERT_EQ(waitpid(pid, &status, 0), pid);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
        << "the child ended by itself: " << status;
    ASSERT_NO_FATAL_FAILURE(Check()) << "round " << round;
  }
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
  EXPECT_TRUE(all.ends_with("\npread\n")) << all;
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
