// SPDX-License-Identifier: Apache-2.0
#include "tiers/memory/memory_calls.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "tiers/tier_test_util.h"

namespace kvtier {
namespace {

class NodeTest : public testing::Test {
 protected:
  void Put(const std::string& path, const std::string& text) {
    const std::filesystem::path full = folder_.path() + "/devices/system/node/" + path;
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full) << text << "\n";
  }
  // "3,7", every CPU this process may run on, but for the first so many.
  static std::string AllowedCpus(int skipped = 0) {
    cpu_set_t allowed;
    EXPECT_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
    std::string list;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &allowed) || skipped-- > 0) continue;
      list += (list.empty() ? "" : ",") + std::to_string(cpu);
    }
    return list;
  }
  std::optional<uint32_t> Node() { return NodeOfThisProcess(folder_.path()); }
  TempFolder folder_;
};

TEST_F(NodeTest, IsTheOneThatHasAllAllowedCpus) {
  Put("online", "0-1");
  Put("node0/cpulist", "1020-1023");
  Put("node1/cpulist", AllowedCpus());
  EXPECT_EQ(Node(), 1u);
}

TEST_F(NodeTest, IsNoneOfOneAndNoneOfSeveral) {
  EXPECT_EQ(Node(), std::nullopt) << "no such folder";
  Put("online", "0");
  Put("node0/cpulist", AllowedCpus());
  EXPECT_EQ(Node(), std::nullopt) << "one node";
  Put("online", "0,2");
  Put("node0/cpulist", AllowedCpus() + ",1023");
  EXPECT_EQ(Node(), 0u);
  if (AllowedCpus(1).empty()) GTEST_SKIP() << "one CPU is on one node";
  Put("node0/cpulist", AllowedCpus(1));
  EXPECT_EQ(Node(), std::nullopt);
}

TEST(MemoryCallsTest, KernelPrefersANode) {
  const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* page = mmap(nullptr, page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(page, MAP_FAILED);
  const std::span<std::byte> memory(static_cast<std::byte*>(page), page_bytes);
  const int bound = KernelMemoryCalls().PreferNode(memory, 0);
  EXPECT_LT(KernelMemoryCalls().PreferNode(memory, 1'000'000), 0);
  munmap(page, page_bytes);
  if (bound == -ENOSYS || bound == -EPERM) GTEST_SKIP() << "no mbind here";
  EXPECT_EQ(bound, 0);
}

}  // namespace
}  // namespace kvtier
