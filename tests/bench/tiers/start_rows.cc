// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>

#include "daemon/core/store_core.h"
#include "policy/policy.h"
#include "tests/bench/tiers/meter.h"
#include "tests/bench/tiers/numbered_blocks.h"
#include "tests/bench/tiers/rows.h"
#include "tiers/memory/memory_tier.h"
#include "tiers/nvme/block_index.h"
#include "tiers/nvme/data_dir.h"
#include "tiers/nvme/nvme_tier.h"
#include "tiers/nvme/record.h"

namespace kvtier::bench {
namespace {

constexpr uint64_t kSegmentBytes = 256ULL << 20;
constexpr uint32_t kPayloadBytes = 4096;
constexpr uint64_t kChainBlocks = 64;
constexpr uint64_t kBatchCount = 10'000;

void MakeSegment(const std::string& dir, uint32_t segment_idx, uint64_t sequence) {
  char name[32];
  std::snprintf(name, sizeof(name), "/%06u.seg", segment_idx);
  const nvme::PageMemory page(nvme::kPageBytes);
  nvme::EncodeSegmentHeader({.segment_idx = segment_idx,
                             .segment_bytes = kSegmentBytes,
                             .sequence = sequence,
                             .nonce = sequence},
                            page.first_page());
  const int fd = open((dir + name).c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(kSegmentBytes)) != 0 ||
      pwrite(fd, page.data(), nvme::kPageBytes, 0) != nvme::kPageBytes || close(fd) != 0) {
    Die("write a segment header: " + std::string(std::strerror(errno)));
  }
}

// A directory as a tier leaves it behind, without the payloads, which a start does not read: the
// segment files have a header and a hole.
void MakeDirectory(const std::string& path, uint64_t block_count) {
  const uint64_t record_bytes = nvme::RecordBytes(kPayloadBytes);
  const uint64_t per_segment = (kSegmentBytes - nvme::kPageBytes) / record_bytes;
  std::filesystem::create_directories(path + "/segments");
  nvme::BlockIndex::Options options;
  options.path = path + "/index";
  auto index = nvme::BlockIndex::Open(options);
  MustBeOk(index.status());
  const NumberedBlocks blocks(kChainBlocks, kPayloadBytes);
  std::vector<nvme::IndexEntry> batch;
  for (uint64_t i = 0; i < block_count; ++i) {
    const auto segment_idx = static_cast<uint32_t>(i / per_segment);
    const uint64_t sequence = segment_idx + 1;
    if (i % per_segment == 0) MakeSegment(path + "/segments", segment_idx, sequence);
    const uint64_t offset_bytes = nvme::kPageBytes + i % per_segment * record_bytes;
    nvme::IndexEntry entry;
    entry.meta = blocks.MetaOf(i);
    entry.at = {.segment_idx = segment_idx,
                .offset_bytes = offset_bytes,
                .generation = nvme::GenerationOf(sequence, offset_bytes),
                .nonce = sequence};
    batch.push_back(entry);
    if (batch.size() < kBatchCount && i + 1 < block_count) continue;
    MustBeOk((*index)->Apply(batch, {}));
    batch.clear();
  }
  MustBeOk((*index)->MarkComplete(kSegmentBytes, nvme::kFormatVersion));
}

struct Started {
  double seconds = 0;
  double cpu_seconds = 0;
  // Without what the core and its policy have before there is a block: that is bounded, and there
  // once.
  uint64_t memory_bytes = 0;
  uint64_t core_fixed_bytes = 0;
};

// With the core, as the daemon does it; or the tier alone.
Started Start(const std::string& path, uint64_t block_count, bool with_core) {
  const uint64_t memory_before = HeapBytes();
  const double begin = WallSeconds();
  const double cpu_begin = CpuSeconds();
  auto nvme =
      NvmeTier::Create({.dir = path, .capacity_bytes = 4 * block_count * 8192 + (4ULL << 30)});
  MustBeOk(nvme.status());
  auto hbm = MemoryTier::Create({.id = TierId::kHbm, .capacity_bytes = 64ULL << 20});
  auto host = MemoryTier::Create({.id = TierId::kHost, .capacity_bytes = 64ULL << 20});
  MustBeOk(hbm.status());
  MustBeOk(host.status());
  std::unique_ptr<core::StoreCore> core;
  const uint64_t memory_before_core = HeapBytes();
  if (with_core) {
    core::CoreOptions options;
    options.watermarks.fill({.high = 0.95, .low = 0.90});
    core =
        std::make_unique<core::StoreCore>(options, hbm->get(), host->get(), nvme->get(),
                                          policy::NewEvictionPolicy(policy::EvictionKind::kHazard));
  }
  const uint64_t core_fixed_bytes = HeapBytes() - memory_before_core;
  uint64_t found_count = 0;
  MustBeOk((*nvme)->Recover([&](const BlockMeta& meta, ReplicaId replica) {
    ++found_count;
    if (core != nullptr && !core->Adopt(meta, replica)) Die("a block was refused");
  }));
  const double seconds = WallSeconds() - begin;
  const double cpu_seconds = CpuSeconds() - cpu_begin;
  if (found_count != block_count) Die("blocks are missing after a start");
  return {.seconds = seconds,
          .cpu_seconds = cpu_seconds,
          .memory_bytes = HeapBytes() - memory_before - core_fixed_bytes,
          .core_fixed_bytes = core_fixed_bytes};
}

}  // namespace

void MeasureStart(const Settings& settings, std::vector<Row>* rows) {
  const uint64_t count = settings.indexed_block_count;
  const std::string path = settings.dir + "/start";
  MakeDirectory(path, count);
  const Started tier = Start(path, count, /*with_core=*/false);
  std::vector<double> seconds;
  Started all;
  for (int round = 0; round < 3; ++round) {
    all = Start(path, count, /*with_core=*/true);
    seconds.push_back(all.seconds);
  }
  // The limits are those of a million blocks; time grows with their number.
  const double millions = static_cast<double>(count) / 1e6;
  char note[128];
  std::snprintf(note, sizeof(note),
                "%.2f million blocks, %.2f s of CPU; the tier alone %.2f s, %.2f s", millions,
                all.cpu_seconds, tier.seconds, tier.cpu_seconds);
  rows->push_back({.name = "start with indexed blocks: time to serving, for a million",
                   .value = Median(seconds) / millions,
                   .unit = "s",
                   .must = 5,
                   .goal = 1,
                   .higher_is_better = false,
                   .is_ratio = false,
                   .note = note});
  const double blocks = static_cast<double>(count);
  std::snprintf(
      note, sizeof(note),
      "nvme %.0f B, of which RocksDB has a share; store core and policy %.0f B and %.0f MB",
      static_cast<double>(tier.memory_bytes) / blocks,
      static_cast<double>(all.memory_bytes - tier.memory_bytes) / blocks,
      static_cast<double>(all.core_fixed_bytes) / 1e6);
  rows->push_back({.name = "memory of all indexes, a block",
                   .value = static_cast<double>(all.memory_bytes) / blocks,
                   .unit = "B",
                   .must = 256,
                   .goal = 128,
                   .higher_is_better = false,
                   .note = note});
}

}  // namespace kvtier::bench
