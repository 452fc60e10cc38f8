// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <list>
#include <random>

#include "tests/bench/tiers/meter.h"
#include "tests/bench/tiers/nvme_rig.h"
#include "tests/bench/tiers/rows.h"

namespace kvtier::bench {
namespace {

constexpr uint64_t kSegmentBytes = 16ULL << 20;
constexpr uint32_t kBlockBytes = 256 << 10;
constexpr double kLiveShare = 0.80;
// Blocks written, or freed, between two waits.
constexpr uint64_t kStepCount = 32;

// Which blocks are written and which go; numbers are given out in the order of writing.
class Workload {
 public:
  virtual ~Workload() = default;
  virtual std::string name() const = 0;
  // Takes in the new block `block`.
  virtual void Grow(uint64_t block) = 0;
  // Takes one block out.
  virtual uint64_t Shrink() = 0;
};

// Any block may go: the worst case, which no placement can help.
class UniformWorkload final : public Workload {
 public:
  std::string name() const override { return "any block goes"; }
  void Grow(uint64_t block) override { live_.push_back(block); }
  uint64_t Shrink() override {
    std::swap(live_[random_() % live_.size()], live_.back());
    const uint64_t block = live_.back();
    live_.pop_back();
    return block;
  }

 private:
  std::vector<uint64_t> live_;
  std::mt19937_64 random_{1};
};

// Contexts that grow by eight blocks a turn, chosen by a Zipf law; each ends after 64 blocks on
// average and another takes its place. What goes is the last block of the context that was used
// least recently: the order in which the store evicts.
class ContextWorkload final : public Workload {
 public:
  ContextWorkload() : open_(kOpenCount) {
    double sum = 0;
    for (size_t rank = 0; rank < kOpenCount; ++rank) {
      sum += 1.0 / static_cast<double>(rank + 1);
      cumulative_.push_back(sum);
      open_[rank] = contexts_.insert(contexts_.end(), Context());
    }
  }
  std::string name() const override { return "contexts go, least recently used first"; }
  void Grow(uint64_t block) override {
    if (turn_left_ == 0) {
      std::uniform_real_distribution<double> pick(0, cumulative_.back());
      rank_ = static_cast<size_t>(
          std::lower_bound(cumulative_.begin(), cumulative_.end(), pick(random_)) -
          cumulative_.begin());
      rank_ = std::min(rank_, kOpenCount - 1);
      if (random_() % kTurnsMean == 0) {
        open_[rank_] = contexts_.insert(contexts_.end(), Context());
      }
      contexts_.splice(contexts_.end(), contexts_, open_[rank_]);
      turn_left_ = kTurnBlocks;
    }
    --turn_left_;
    open_[rank_]->blocks.push_back(block);
  }
  uint64_t Shrink() override {
    for (auto it = contexts_.begin(); it != contexts_.end();) {
      if (!it->blocks.empty()) {
        const uint64_t block = it->blocks.back();
        it->blocks.pop_back();
        return block;
      }
      const bool is_open = std::find(open_.begin(), open_.end(), it) != open_.end();
      it = is_open ? std::next(it) : contexts_.erase(it);
    }
    Die("no block is left");
  }

 private:
  static constexpr size_t kOpenCount = 128;
  static constexpr uint64_t kTurnBlocks = 8;
  static constexpr uint64_t kTurnsMean = 8;
  struct Context {
    std::vector<uint64_t> blocks;
  };
  std::mt19937_64 random_{2};
  // Least recently used first.
  std::list<Context> contexts_;
  std::vector<std::list<Context>::iterator> open_;
  std::vector<double> cumulative_;
  size_t rank_ = 0;
  uint64_t turn_left_ = 0;
};

void MeasureWorkload(const Settings& settings, Workload& workload, bool has_limits,
                     std::vector<Row>* rows) {
  // The tier keeps three parts of 64 of its capacity for its index.
  const uint64_t payload_bytes = settings.churn_segment_count * kSegmentBytes;
  NvmeRig rig({.dir = settings.dir + "/churn-" + std::to_string(rows->size()),
               .capacity_bytes = payload_bytes / 61 * 64 + kSegmentBytes / 4,
               .segment_bytes = kSegmentBytes,
               .block_bytes = kBlockBytes,
               .io_engine = settings.io_engine});
  const auto live_count =
      static_cast<uint64_t>(kLiveShare * static_cast<double>(payload_bytes) / (kBlockBytes + 4096));
  uint64_t next_block = 0;
  const auto write = [&](uint64_t count) {
    for (uint64_t done = 0; done < count; done += kStepCount) {
      for (uint64_t i = 0; i < kStepCount && next_block >= live_count; ++i) {
        rig.Free(workload.Shrink());
      }
      for (uint64_t i = 0; i < kStepCount; ++i) {
        workload.Grow(next_block);
        rig.StartWrite(next_block++, NvmeRig::kDepthMax);
      }
      rig.AwaitAll();
    }
  };
  // Filled, then everything in it replaced once: from there on the state is steady.
  write(live_count);
  write(live_count);
  const uint64_t written_before = WrittenBytes();
  const uint64_t moved_before = rig.tier().Stats().moved_bytes;
  const uint64_t first_block = next_block;
  const double begin = WallSeconds();
  write(2 * live_count);
  const double seconds = WallSeconds() - begin;
  const double bytes = static_cast<double>(next_block - first_block) * kBlockBytes;
  const double moved = static_cast<double>(rig.tier().Stats().moved_bytes - moved_before) / bytes;
  char note[96];
  std::snprintf(note, sizeof(note), "%.2f bytes moved for each written, %.2f GB/s, %llu segments",
                moved, bytes / seconds / 1e9,
                static_cast<unsigned long long>(rig.tier().Stats().segment_count));
  rows->push_back({.name = "write amplification, 80 % live, " + workload.name(),
                   .value = static_cast<double>(WrittenBytes() - written_before) / bytes,
                   .unit = "x",
                   .must = has_limits ? std::optional<double>(1.5) : std::nullopt,
                   .goal = has_limits ? std::optional<double>(1.2) : std::nullopt,
                   .higher_is_better = false,
                   .note = note});
}

}  // namespace

void MeasureChurn(const Settings& settings, std::vector<Row>* rows) {
  ContextWorkload contexts;
  MeasureWorkload(settings, contexts, /*has_limits=*/true, rows);
  UniformWorkload uniform;
  MeasureWorkload(settings, uniform, /*has_limits=*/false, rows);
}

}  // namespace kvtier::bench
