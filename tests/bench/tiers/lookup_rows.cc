// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "daemon/core/store_core.h"
#include "policy/policy.h"
#include "tests/bench/tiers/meter.h"
#include "tests/bench/tiers/numbered_blocks.h"
#include "tests/bench/tiers/rows.h"
#include "tiers/memory/memory_tier.h"

namespace kvtier::bench {
namespace {

constexpr uint64_t kChainBlocks = 256;
constexpr uint32_t kPayloadBytes = 4096;
constexpr uint64_t kChainsPerBatch = 200;
constexpr double kBlocksPerBatch = static_cast<double>(kChainsPerBatch * kChainBlocks);
constexpr int kBatchesPerRound = 10;

// An nvme tier that nobody writes to: blocks are said to be there.
class FullSlots final : public SlotSource {
 public:
  absl::StatusOr<ReplicaId> Reserve(uint32_t, OwnerIdx) override {
    return absl::UnavailableError("full");
  }
  void Free(ReplicaId) override {}
  uint64_t FootprintBytes(uint32_t payload_bytes) const override { return payload_bytes; }
  TierUsage Usage() const override { return {.capacity_bytes = uint64_t{1} << 40}; }
};

Row LookupRow(uint64_t block_count, int round_count) {
  auto hbm = MemoryTier::Create({.id = TierId::kHbm, .capacity_bytes = 64ULL << 20});
  auto host = MemoryTier::Create({.id = TierId::kHost, .capacity_bytes = 64ULL << 20});
  MustBeOk(hbm.status());
  MustBeOk(host.status());
  FullSlots nvme;
  core::CoreOptions options;
  options.watermarks.fill({.high = 0.95, .low = 0.90});
  core::StoreCore core(options, hbm->get(), host->get(), &nvme, policy::NewLruPolicy());
  const NumberedBlocks blocks(kChainBlocks, kPayloadBytes);
  const uint64_t chain_count = std::max<uint64_t>(1, block_count / kChainBlocks);
  for (uint64_t i = 0; i < chain_count * kChainBlocks; ++i) {
    if (!core.Adopt(blocks.MetaOf(i), i + 1)) Die("a block was refused");
  }
  const auto session = core.OpenSession(0, 0);
  MustBeOk(session.status());
  core::NamespaceSpec spec;
  spec.block_bytes = kPayloadBytes;
  const auto ns = core.OpenNamespace(*session, spec);
  MustBeOk(ns.status());

  std::mt19937_64 random(1);
  std::vector<std::vector<Key>> chains(kChainsPerBatch, std::vector<Key>(kChainBlocks));
  std::vector<double> nanos;
  for (int batch = 0; batch < kBatchesPerRound * round_count; ++batch) {
    for (std::vector<Key>& keys : chains) {
      const uint64_t first = random() % chain_count * kChainBlocks;
      for (uint64_t i = 0; i < kChainBlocks; ++i) keys[i] = NumberedBlocks::KeyOf(first + i);
    }
    const double begin = CpuSeconds();
    for (const std::vector<Key>& keys : chains) {
      const auto found = core.Lookup(*session, *ns, keys);
      if (!found.ok() || found->residency.size() != kChainBlocks) Die("a lookup missed");
    }
    nanos.push_back((CpuSeconds() - begin) * 1e9 / kBlocksPerBatch);
  }
  char note[128];
  std::snprintf(note, sizeof(note), "CPU time; %.2f million blocks, chains of %d, drawn at random",
                static_cast<double>(block_count) / 1e6, static_cast<int>(kChainBlocks));
  return {.name = "lookup in the store core, for each block of a chain",
          .value = Median(nanos),
          .unit = "ns",
          .must = 300,
          .goal = 100,
          .higher_is_better = false,
          .is_ratio = false,
          .note = note};
}

}  // namespace

void MeasureLookup(const Settings& settings, std::vector<Row>* rows) {
  rows->push_back(LookupRow(settings.indexed_block_count, settings.round_count));
  rows->push_back(LookupRow(10 * settings.indexed_block_count, settings.round_count));
  rows->back().name += ", ten times as many blocks";
}

}  // namespace kvtier::bench
