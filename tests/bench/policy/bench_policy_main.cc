// SPDX-License-Identifier: Apache-2.0
//
// What the learned policy costs with many blocks: time of one block operation, memory per block.
// Every block is a candidate, the worst case: in a store only the ends of chains are.
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "policy/hazard_policy.h"

namespace kvtier::bench {
namespace {

using policy::BlockRef;
using policy::HazardPolicy;

constexpr policy::TierIdx kHost = 1;
constexpr double kNanosMax = 2000;
constexpr double kResidentBytesMax = 48;
constexpr double kGhostBytesMax = 24;

struct Row {
  std::string name;
  double value = 0;
  double max = 0;
};

uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

double CpuNanos() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return 1e9 * static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec);
}

// Nanoseconds of processor time of one `step(i)`, the median over 20 parts of `count` steps.
template <typename Step>
double NanosOf(uint64_t count, Step step) {
  constexpr uint64_t kParts = 20;
  std::vector<double> nanos;
  for (uint64_t part = 0; part < kParts; ++part) {
    const double start = CpuNanos();
    for (uint64_t i = part * count / kParts; i < (part + 1) * count / kParts; ++i) step(i);
    nanos.push_back((CpuNanos() - start) * kParts / static_cast<double>(count));
  }
  std::nth_element(nanos.begin(), nanos.begin() + kParts / 2, nanos.end());
  return nanos[kParts / 2];
}

// A store of `block_count` blocks, chains of which are used in turn, 64 blocks a millisecond.
class Workload {
 public:
  explicit Workload(uint32_t block_count)
      : block_count_(block_count), policy_({.ghost_count_max = 1U << 20}) {}

  std::vector<Row> Run() {
    std::vector<Row> rows;
    rows.push_back(
        {"fill and list, ns", NanosOf(block_count_, [this](uint64_t i) { Fill(i); }), kNanosMax});
    const uint64_t before = HazardPolicy({.ghost_count_max = 1U << 20}).memory_bytes();
    const uint64_t ops = std::min<uint64_t>(block_count_, 2'000'000);
    rows.push_back(
        {"use a listed block, ns", NanosOf(ops, [this](uint64_t i) { UseAgain(i); }), kNanosMax});
    rows.push_back({"evict one and fill another, ns",
                    NanosOf(ops, [this](uint64_t /*i*/) { Replace(); }), kNanosMax});
    rows.push_back({"bytes per listed block",
                    static_cast<double>(policy_.memory_bytes() - before) / block_count_,
                    kResidentBytesMax});
    rows.push_back({"bytes per ghost", sizeof(policy::Ghost), kGhostBytesMax});
    return rows;
  }

 private:
  uint64_t NowMs() const { return clock_ / 64; }

  void Use(BlockRef block, uint64_t key) {
    ++clock_;
    policy_.Use({.block = block,
                 .parent = policy::kNoParent,
                 .key = key,
                 .now_ms = NowMs(),
                 .next = static_cast<policy::NextStep>(Mix(key) % 3)});
  }

  void Fill(uint64_t i) {
    const auto block = static_cast<BlockRef>(i);
    Use(block, Mix(i + 1));
    policy_.Upsert(kHost, block, {});
  }

  void UseAgain(uint64_t i) {
    // Chains of 128 blocks in a mixed order, some far more often than others.
    const uint64_t chain = Mix(i / 128) % (i % 256 < 128 ? block_count_ / 128 : 64);
    const auto block =
        static_cast<BlockRef>(std::min<uint64_t>(block_count_ - 1, chain * 128 + i % 128));
    policy_.Erase(kHost, block);
    Use(block, Mix(block + 1));
    policy_.Upsert(kHost, block, {});
  }

  void Replace() {
    const std::optional<BlockRef> victim = policy_.Victim(kHost, 0);
    if (!victim) std::abort();
    policy_.Erase(kHost, *victim);
    policy_.Forget(*victim, Mix(*victim + 1));
    Use(*victim, Mix(clock_ + (uint64_t{1} << 40)));
    policy_.Upsert(kHost, *victim, {});
  }

  const uint32_t block_count_;
  HazardPolicy policy_;
  uint64_t clock_ = 64;
};

int Main(int argc, char** argv) {
  bool json = false;
  uint32_t block_count = 10'000'000;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--json") {
      json = true;
    } else if (flag == "--blocks" && i + 1 < argc) {
      block_count = std::max(1000U, static_cast<uint32_t>(std::strtoul(argv[++i], nullptr, 10)));
    } else {
      std::fprintf(stderr, "usage: bench_policy [--json] [--blocks N]\n");
      return 2;
    }
  }
  const std::vector<Row> rows = Workload(block_count).Run();
  bool missed = false;
  nlohmann::json document = {{"block_count", block_count}, {"rows", nlohmann::json::array()}};
  if (!json) std::printf("| %u blocks | at most | measured |\n|---|---|---|\n", block_count);
  for (const Row& row : rows) {
    missed |= row.value > row.max;
    document["rows"].push_back({{"name", row.name}, {"max", row.max}, {"value", row.value}});
    if (!json) std::printf("| %s | %.0f | %.1f |\n", row.name.c_str(), row.max, row.value);
  }
  if (json) std::printf("%s\n", document.dump(2).c_str());
  return missed ? 1 : 0;
}

}  // namespace
}  // namespace kvtier::bench

int main(int argc, char** argv) { return kvtier::bench::Main(argc, argv); }
