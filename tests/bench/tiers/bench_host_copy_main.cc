// SPDX-License-Identifier: Apache-2.0
//
// What moving blocks between host and hbm on the cpu device reaches of memcpy, and what a block
// costs in the daemon's memory.
//   bench_host_copy [ROUNDS]
// Each round moves every block with the daemon's movers (checksums included), then copies the same
// slots with memcpy in as many threads as the movers have, and in one. Ratios are those of a round:
// other work on the machine hits both sides alike. The median of the rounds is printed.
#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "absl/synchronization/blocking_counter.h"
#include "daemon/core/store_core.h"
#include "daemon/movers.h"
#include "policy/policy.h"
#include "proto/base/check.h"
#include "proto/base/crc32c.h"
#include "tiers/memory/memory_tier.h"

namespace kvtier {
namespace {

constexpr uint64_t kTierBytes = 512ULL << 20;
constexpr uint64_t kSegmentBytes = 64ULL << 20;
// 64 tokens of NVFP4 with 8 kv heads, head dim 128 and 32 layers take 8 times this.
constexpr uint32_t kBlockBytes = 576 << 10;
constexpr uint32_t kWorkerCount = 2;
constexpr uint32_t kIndexBlocks = 200'000;

struct Pair {
  BlockMeta meta;
  ReplicaId host;
  ReplicaId hbm;
};

std::unique_ptr<MemoryTier> MakeTier(TierId id) {
  auto tier =
      MemoryTier::Create({.id = id, .capacity_bytes = kTierBytes, .segment_bytes = kSegmentBytes});
  KVT_CHECK(tier.ok());
  return std::move(tier).value();
}

// Blocks in slots of both tiers, with the same bytes, so that either side can be the source.
std::vector<Pair> Fill(MemoryTier& host, MemoryTier& hbm) {
  std::vector<Pair> pairs;
  while (true) {
    const auto in_host = host.Reserve(kBlockBytes, 0);
    const auto in_hbm = hbm.Reserve(kBlockBytes, 0);
    if (!in_host.ok() || !in_hbm.ok()) return pairs;
    const std::span<std::byte> bytes = host.Mapped(*in_host).first(kBlockBytes);
    for (size_t i = 0; i < bytes.size(); i += sizeof(uint64_t)) {
      const uint64_t word = (pairs.size() + i) * 0x9E3779B97F4A7C15ULL;
      std::memcpy(&bytes[i], &word, sizeof(word));
    }
    std::ranges::copy(bytes, hbm.Mapped(*in_hbm).begin());
    Pair pair{.meta = {}, .host = *in_host, .hbm = *in_hbm};
    pair.meta.payload_bytes = kBlockBytes;
    pair.meta.crc32c = Crc32c(bytes);
    pairs.push_back(pair);
  }
}

double Seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double MoveSeconds(MemoryTier& host, MemoryTier& hbm, const std::vector<Pair>& pairs, bool up) {
  return Seconds([&] {
    absl::BlockingCounter left(static_cast<int>(pairs.size()));
    Movers movers({.hbm = &hbm, .host = &host}, {.worker_count = kWorkerCount},
                  [&left](core::JobId, const absl::Status& status) {
                    KVT_CHECK(status.ok());
                    left.DecrementCount();
                  });
    core::JobId job = 0;
    for (const Pair& pair : pairs) {
      movers.Start({.job = ++job,
                    .meta = pair.meta,
                    .source_tier = up ? TierId::kHost : TierId::kHbm,
                    .source = up ? pair.host : pair.hbm,
                    .target_tier = up ? TierId::kHbm : TierId::kHost,
                    .target = up ? pair.hbm : pair.host});
    }
    left.Wait();
  });
}

double MemcpySeconds(MemoryTier& host, MemoryTier& hbm, const std::vector<Pair>& pairs, bool up,
                     size_t thread_count) {
  return Seconds([&] {
    std::vector<std::jthread> threads;
    for (size_t first = 0; first < thread_count; ++first) {
      threads.emplace_back([&, first] {
        for (size_t i = first; i < pairs.size(); i += thread_count) {
          const std::span<std::byte> in_host = host.Mapped(pairs[i].host);
          const std::span<std::byte> in_hbm = hbm.Mapped(pairs[i].hbm);
          std::memcpy(up ? in_hbm.data() : in_host.data(), up ? in_host.data() : in_hbm.data(),
                      kBlockBytes);
        }
      });
    }
  });
}

double Median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

void MeasureCopies(int rounds) {
  const auto host = MakeTier(TierId::kHost);
  const auto hbm = MakeTier(TierId::kHbm);
  const std::vector<Pair> pairs = Fill(*host, *hbm);
  const double gigabytes = static_cast<double>(pairs.size()) * kBlockBytes / 1e9;
  for (const bool up : {true, false}) {
    std::vector<double> speeds;
    std::vector<double> over_same_threads;
    std::vector<double> over_one_thread;
    for (int round = 0; round < rounds; ++round) {
      const double move = MoveSeconds(*host, *hbm, pairs, up);
      speeds.push_back(gigabytes / move);
      over_same_threads.push_back(MemcpySeconds(*host, *hbm, pairs, up, kWorkerCount) / move);
      over_one_thread.push_back(MemcpySeconds(*host, *hbm, pairs, up, 1) / move);
    }
    std::printf("%s  %6.1f GB/s  %.2f of memcpy in %u threads  %.2f of memcpy in one\n",
                up ? "host -> hbm" : "hbm -> host", Median(speeds), Median(over_same_threads),
                kWorkerCount, Median(over_one_thread));
  }
}

// Slots without memory.
class NoSlots final : public SlotSource {
 public:
  absl::StatusOr<ReplicaId> Reserve(uint32_t, OwnerIdx) override { return ++last_; }
  void Free(ReplicaId) override {}
  uint64_t FootprintBytes(uint32_t payload_bytes) const override { return payload_bytes; }
  TierUsage Usage() const override { return {.capacity_bytes = UINT64_MAX / 2}; }

 private:
  ReplicaId last_ = 0;
};

void MeasureIndex(policy::EvictionKind kind, const char* name) {
  NoSlots slots;
  core::StoreCore core({}, &slots, &slots, nullptr, policy::NewEvictionPolicy(kind));
  const core::SessionId session = core.OpenSession(0, 0).value();
  const auto ns =
      core.OpenNamespace(session, {.hash = {}, .layout = {}, .block_bytes = kBlockBytes}).value();
  const size_t before = mallinfo2().uordblks;
  std::optional<Key> parent;
  for (uint32_t i = 0; i < kIndexBlocks; ++i) {
    const uint32_t tokens[] = {i};
    // Chains of 128 blocks.
    if (i % 128 == 0) parent.reset();
    const Key key = HashBlock({}, parent, tokens);
    core::Effects effects;
    core.Reserve(
        session, ns, parent, std::span(&key, 1), TierId::kHost, 1, 0, [](auto) {}, &effects);
    const uint32_t crc32c = i;
    KVT_CHECK(core.Commit(session, ns, std::span(&key, 1), std::span(&crc32c, 1), 0, &effects)
                  .value()[0] == BlockStatus::kOk);
    parent = key;
  }
  std::printf("index        %6.0f bytes a block (policy %s, %u blocks)\n",
              static_cast<double>(mallinfo2().uordblks - before) / kIndexBlocks, name,
              kIndexBlocks);
}

}  // namespace
}  // namespace kvtier

int main(int argc, char** argv) {
  kvtier::MeasureCopies(argc > 1 ? std::max(std::atoi(argv[1]), 1) : 15);
  kvtier::MeasureIndex(kvtier::policy::EvictionKind::kLru, "lru");
  kvtier::MeasureIndex(kvtier::policy::EvictionKind::kHazard, "hazard");
  return 0;
}
