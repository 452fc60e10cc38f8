// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>

#include "proto/base/crc32c.h"
#include "tests/bench/tiers/blob_store.h"
#include "tests/bench/tiers/meter.h"
#include "tests/bench/tiers/nvme_rig.h"
#include "tests/bench/tiers/raw_disk.h"
#include "tests/bench/tiers/rows.h"

namespace kvtier::bench {
namespace {

constexpr uint64_t kSegmentBytes = 64ULL << 20;
constexpr int kReadDepths[] = {8, 32};
constexpr int kWriteDepth = 64;

// What one kind of pass did in all rounds.
struct Passes {
  std::vector<double> ratios;
  std::vector<double> raw_rates;
  std::vector<double> rates;
  std::vector<double> cpu_per_gb;
  // Of the raw loop and of the same bytes' checksums alone: less is not possible.
  std::vector<double> least_cpu_per_gb;

  void Add(double bytes, double raw_seconds, double seconds, double cpu_seconds) {
    raw_rates.push_back(bytes / raw_seconds / 1e9);
    rates.push_back(bytes / seconds / 1e9);
    ratios.push_back(raw_seconds / seconds);
    cpu_per_gb.push_back(cpu_seconds / bytes * 1e9);
  }
  std::string Note() const {
    char text[64];
    std::snprintf(text, sizeof(text), "%.2f and %.2f GB/s", Median(rates), Median(raw_rates));
    return text;
  }
  std::string LeastCpuNote() const {
    char text[96];
    std::snprintf(text, sizeof(text), "the raw loop and checksums alone: %.3f s/GB",
                  Median(least_cpu_per_gb));
    return text;
  }
};

struct Timed {
  double wall_seconds = 0;
  double cpu_seconds = 0;
};

template <typename Function>
Timed Time(Function&& function) {
  const double cpu_begin = CpuSeconds();
  const double begin = WallSeconds();
  function();
  return {.wall_seconds = WallSeconds() - begin, .cpu_seconds = CpuSeconds() - cpu_begin};
}

std::string SizeText(uint32_t block_bytes) {
  return block_bytes >= (1 << 20) ? std::to_string(block_bytes >> 20) + " MiB"
                                  : std::to_string(block_bytes >> 10) + " KiB";
}

std::vector<uint64_t> RandomBlocks(uint64_t count, uint64_t below, std::mt19937_64& random) {
  std::vector<uint64_t> blocks(count);
  for (uint64_t& block : blocks) block = random() % below;
  return blocks;
}

// The blocks that a rig of `settings` and this size holds while it is measured.
std::vector<uint64_t> Numbers(uint64_t first, uint64_t count) {
  std::vector<uint64_t> blocks(count);
  std::iota(blocks.begin(), blocks.end(), first);
  return blocks;
}

// Durable writes, over what the raw loop takes for them.
struct Writes {
  Passes synced;
  Passes unsynced;
  // Into segments that were never written before.
  Passes first;
};

void AddRows(uint32_t block_bytes, bool has_limits, const Passes (&reads)[2], const Writes& writes,
             std::vector<Row>* rows) {
  const std::string size = SizeText(block_bytes);
  const auto limit = [&](double value) {
    return has_limits ? std::optional<double>(value) : std::nullopt;
  };
  for (int i = 0; i < 2; ++i) {
    rows->push_back({.name = "read " + size + ", depth " + std::to_string(kReadDepths[i]) +
                             ": over raw io_uring",
                     .value = Median(reads[i].ratios),
                     .must = limit(0.80),
                     .goal = limit(0.95),
                     .note = reads[i].Note()});
  }
  rows->push_back({.name = "durable write " + size + ": over raw sequential write and one sync",
                   .value = Median(writes.synced.ratios),
                   .must = limit(0.75),
                   .goal = limit(0.90),
                   .note = writes.synced.Note()});
  rows->push_back({.name = "durable write " + size + ": over raw sequential write, not synced",
                   .value = Median(writes.unsynced.ratios),
                   .note = writes.unsynced.Note()});
  rows->push_back({.name = "durable write " + size + " into new segments: over raw and one sync",
                   .value = Median(writes.first.ratios),
                   .note = writes.first.Note()});
  rows->push_back({.name = "read " + size + ": CPU",
                   .value = Median(reads[1].cpu_per_gb),
                   .unit = "s/GB",
                   .must = limit(0.06),
                   .goal = limit(0.03),
                   .higher_is_better = false,
                   .is_ratio = false,
                   .note = reads[1].LeastCpuNote()});
  rows->push_back({.name = "durable write " + size + ": CPU",
                   .value = Median(writes.synced.cpu_per_gb),
                   .unit = "s/GB",
                   .must = limit(0.09),
                   .goal = limit(0.05),
                   .higher_is_better = false,
                   .is_ratio = false,
                   .note = writes.synced.LeastCpuNote()});
}

// CPU seconds of the checksums of `bytes`, none of them in the caches.
double ChecksumSeconds(const std::vector<HostSlots::Slot>& slots, double bytes) {
  uint32_t all = 0;
  double pass_bytes = 0;
  const Timed timed = Time([&] {
    for (const HostSlots::Slot& slot : slots) {
      all ^= Crc32c(slot.bytes);
      pass_bytes += static_cast<double>(slot.bytes.size());
    }
  });
  // Used, so that it is computed.
  if (all == 0) std::fprintf(stderr, "checksums cancel out\n");
  return timed.cpu_seconds * bytes / pass_bytes;
}

}  // namespace

void MeasureSpeed(const Settings& settings, uint32_t block_bytes, bool has_limits,
                  std::vector<Row>* rows) {
  const uint64_t data_count = settings.data_bytes / block_bytes;
  const uint64_t pass_count = settings.pass_bytes / block_bytes;
  const double bytes = static_cast<double>(pass_count * block_bytes);
  // Room for the data and two passes of writes, and what the tier keeps for itself.
  NvmeRig rig(
      {.dir = settings.dir + "/nvme-" + std::to_string(block_bytes),
       .capacity_bytes = 2 * (settings.data_bytes + 2 * settings.pass_bytes) + 10 * kSegmentBytes,
       .segment_bytes = kSegmentBytes,
       .block_bytes = block_bytes,
       .io_engine = settings.io_engine});
  RawDisk raw(settings.dir + "/raw", settings.data_bytes, block_bytes, rig.host());
  std::fprintf(stderr, "nvme, %s blocks: %s\n", SizeText(block_bytes).c_str(),
               rig.tier().Stats().io_engine.c_str());
  rig.Write(Numbers(0, data_count), kWriteDepth);
  Passes reads[2];
  Writes writes;
  std::mt19937_64 random(block_bytes);
  uint64_t next_block = data_count;
  // Writes into a new file cost the file system more: the first rounds, until every file is there,
  // are counted apart.
  const uint64_t all_segments =
      (2 * (settings.data_bytes + 2 * settings.pass_bytes)) / kSegmentBytes;
  const auto write_round = [&](bool is_first) {
    const std::vector<uint64_t> blocks = Numbers(next_block, pass_count);
    next_block += pass_count;
    double raw_seconds = 0;
    const Timed raw_write = Time(
        [&] { raw_seconds = raw.WriteSequential(block_bytes, pass_count, RawDisk::kDepthMax); });
    // What the disk still has in its cache would be written in the tier's time otherwise.
    const double raw_sync_seconds = raw.Sync();
    const Timed timed = Time([&] { rig.Write(blocks, kWriteDepth); });
    if (is_first) {
      writes.first.Add(bytes, raw_seconds + raw_sync_seconds, timed.wall_seconds,
                       timed.cpu_seconds);
    } else {
      writes.synced.Add(bytes, raw_seconds + raw_sync_seconds, timed.wall_seconds,
                        timed.cpu_seconds);
      writes.unsynced.Add(bytes, raw_seconds, timed.wall_seconds, timed.cpu_seconds);
      const double checksum_seconds = ChecksumSeconds(rig.host().sources, bytes);
      writes.synced.least_cpu_per_gb.push_back((raw_write.cpu_seconds + checksum_seconds) / bytes *
                                               1e9);
    }
    for (const uint64_t block : blocks) rig.Free(block);
    rig.AwaitFrees();
  };
  for (int i = 0; i < 40 && rig.tier().Stats().segment_count < all_segments; ++i) {
    write_round(/*is_first=*/true);
  }
  for (int round = 0; round < settings.round_count; ++round) {
    for (int i = 0; i < 2; ++i) {
      const std::vector<uint64_t> blocks = RandomBlocks(pass_count, data_count, random);
      double raw_seconds = 0;
      const Timed raw_read =
          Time([&] { raw_seconds = raw.ReadRandom(block_bytes, pass_count, kReadDepths[i]); });
      const Timed timed = Time([&] { rig.Read(blocks, kReadDepths[i]); });
      reads[i].Add(bytes, raw_seconds, timed.wall_seconds, timed.cpu_seconds);
      const double checksum_seconds = ChecksumSeconds(rig.host().targets, bytes);
      reads[i].least_cpu_per_gb.push_back((raw_read.cpu_seconds + checksum_seconds) / bytes * 1e9);
    }
    write_round(/*is_first=*/false);
  }
  AddRows(block_bytes, has_limits, reads, writes, rows);
}

void MeasureBlobStore(const Settings& settings, uint32_t block_bytes, std::vector<Row>* rows) {
  const HostSlots slots(block_bytes, /*observer=*/nullptr);
  RawDisk raw(settings.dir + "/raw", settings.data_bytes, block_bytes, slots);
  const uint64_t data_count = settings.data_bytes / block_bytes;
  const uint64_t pass_count = settings.pass_bytes / block_bytes;
  const double bytes = static_cast<double>(pass_count * block_bytes);
  BlobStore store(settings.dir + "/blobs", block_bytes);
  store.Write(Numbers(0, data_count));
  Passes reads;
  Passes writes;
  std::mt19937_64 random(block_bytes);
  uint64_t next_block = data_count;
  for (int round = 0; round < settings.round_count; ++round) {
    const std::vector<uint64_t> blocks = RandomBlocks(pass_count, data_count, random);
    const double raw_read_seconds = raw.ReadRandom(block_bytes, pass_count, 32);
    const Timed read = Time([&] { store.Read(blocks, 32); });
    reads.Add(bytes, raw_read_seconds, read.wall_seconds, read.cpu_seconds);
    const double raw_write_seconds =
        raw.WriteSequential(block_bytes, pass_count, RawDisk::kDepthMax);
    const Timed write = Time([&] { store.Write(Numbers(next_block, pass_count)); });
    next_block += pass_count;
    writes.Add(bytes, raw_write_seconds, write.wall_seconds, write.cpu_seconds);
  }
  const std::string name = "RocksDB blob files, " + SizeText(block_bytes);
  rows->push_back({.name = name + ": read, 32 threads, over raw io_uring",
                   .value = Median(reads.ratios),
                   .note = reads.Note()});
  rows->push_back({.name = name + ": durable write over raw sequential write",
                   .value = Median(writes.ratios),
                   .note = writes.Note()});
  rows->push_back({.name = name + ": CPU of reads",
                   .value = Median(reads.cpu_per_gb),
                   .unit = "s/GB",
                   .is_ratio = false});
  rows->push_back({.name = name + ": CPU of durable writes",
                   .value = Median(writes.cpu_per_gb),
                   .unit = "s/GB",
                   .is_ratio = false});
}

void MeasureMemory(const Settings& settings, uint32_t block_bytes, std::vector<Row>* rows) {
  constexpr uint64_t kTierBytes = 64ULL << 20;
  const uint64_t count = kTierBytes / 2 / block_bytes;
  const double bytes = static_cast<double>(count * block_bytes);
  std::unique_ptr<MemoryTier> tiers[2];
  std::vector<ReplicaId> replicas[2];
  std::vector<BlockMeta> metas(count);
  for (int t = 0; t < 2; ++t) {
    auto tier = MemoryTier::Create({.id = t == 0 ? TierId::kHbm : TierId::kHost,
                                    .capacity_bytes = kTierBytes,
                                    .segment_bytes = kTierBytes});
    MustBeOk(tier.status());
    tiers[t] = std::move(tier).value();
    for (uint64_t i = 0; i < count; ++i) {
      const auto replica = tiers[t]->Reserve(block_bytes, 0);
      MustBeOk(replica.status());
      replicas[t].push_back(*replica);
      const std::span<std::byte> slot = tiers[t]->Mapped(*replica);
      std::memset(slot.data(), static_cast<int>(i), slot.size());
      metas[i].payload_bytes = block_bytes;
      metas[i].crc32c = Crc32c(slot.first(block_bytes));
    }
  }
  // Both directions; what the daemon's movers call for each block.
  const auto copy = [&](int source, int target, bool is_raw) {
    for (uint64_t i = 0; i < count; ++i) {
      const std::span<std::byte> bytes_from = tiers[source]->Mapped(replicas[source][i]);
      if (is_raw) {
        std::memcpy(tiers[target]->Mapped(replicas[target][i]).data(), bytes_from.data(),
                    block_bytes);
      } else {
        tiers[target]->Write(replicas[target][i], metas[i], bytes_from,
                             [](const absl::Status& status) { MustBeOk(status); });
      }
    }
  };
  Passes passes;
  for (int round = 0; round < 4 * settings.round_count; ++round) {
    const int source = round % 2;
    const Timed raw = Time([&] { copy(source, 1 - source, /*is_raw=*/true); });
    const Timed timed = Time([&] { copy(source, 1 - source, /*is_raw=*/false); });
    passes.Add(bytes, raw.wall_seconds, timed.wall_seconds, timed.cpu_seconds);
  }
  rows->push_back({.name = "copy " + SizeText(block_bytes) +
                           " between host and hbm on the cpu device: over memcpy",
                   .value = Median(passes.ratios),
                   .must = 0.90,
                   .goal = 0.97,
                   .note = passes.Note()});
}

}  // namespace kvtier::bench
