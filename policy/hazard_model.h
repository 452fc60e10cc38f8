// SPDX-License-Identifier: Apache-2.0
//
// How likely a block is used again, by its age: one life table per class of blocks, learned while
// blocks are used, and what follows from it for keeping them.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "policy/policy.h"

namespace kvtier::policy {

// Time inside the learned policy, of 16 ms: 32 bits last two years.
using Tick = uint32_t;
inline constexpr uint64_t kTickMs = 16;

// Ages fall into half octaves: bucket 0 below 256 ms, bucket k from 256 ms x 2^((k-1)/2).
inline constexpr uint32_t kAgeBucketCount = 40;
uint32_t AgeBucket(Tick age);

// What a class is made of: next step x uses (1, 2, 3-7, more) x octave of the gap before the last
// use (0: none yet).
inline constexpr uint32_t kUseClassCount = 4;
inline constexpr uint32_t kGapClassCount = 24;
inline constexpr uint32_t kClassCount = kNextStepCount * kUseClassCount * kGapClassCount;
using ClassIdx = uint16_t;
uint8_t GapClass(Tick gap);
ClassIdx ClassOf(NextStep next, uint32_t use_count, uint8_t gap_class);

// Blocks of one class that were used in one tick; they age together.
using CohortIdx = uint32_t;
inline constexpr CohortIdx kNoCohort = UINT32_MAX;

// Per class and age bucket it counts the blocks that lived through the bucket unused (risk) and
// those that were used in it (reuse). The hazard is their ratio, shrunk towards that of coarser
// classes (times how this class differed at younger ages), and at last towards 1/age, which ranks
// blocks as LRU does. Counts are halved now and then, so that old times are forgotten.
//
// Single-thread. Memory is bounded: `cohort_count_max` cohorts, the oldest of which are forgotten
// first (then nothing is learned from their blocks).
class HazardModel {
 public:
  struct Options {
    uint32_t cohort_count_max = 1U << 17;
    // Counts are halved when this many reuses were seen since they were last.
    uint64_t halving_reuse_count = 1U << 20;
  };
  explicit HazardModel(const Options& options);

  // Lets everything age up to `now`, which does not go back.
  void Advance(Tick now);
  // A block of the class begins to age, now.
  CohortIdx Enter(ClassIdx class_idx, Tick now);
  // It is used now, having entered at `entered`. What to pass is what Enter took and gave, at any
  // later time: a cohort that was forgotten meanwhile is recognised.
  void Reuse(ClassIdx class_idx, CohortIdx cohort, Tick entered, Tick now);
  // It will not be heard of again (its content is lost): nothing is learned from it any more.
  void Censor(ClassIdx class_idx, CohortIdx cohort, Tick entered);

  // Recomputes what Worth returns, if enough was learned since.
  void Refresh();
  // The Gittins index of an unused block of this age: the most that reuse probability over expected
  // time held can be, over all horizons. Per tick. Falls with age as long as nothing is learned.
  float Worth(ClassIdx class_idx, Tick age) const;

  uint64_t memory_bytes() const;

  // What was learned, as bytes: 16 and 328 for each class that was seen, 126 KB at most.
  std::string Save() const;
  // Errors: DATA_LOSS for bytes that Save did not write; the model then stays as it was.
  absl::Status Restore(std::string_view saved);

 private:
  static constexpr CohortIdx kNone = kNoCohort;

  struct Cohort {
    Tick entered = 0;
    uint32_t alive_count = 0;
    // The next younger one in the same bucket.
    CohortIdx next = kNone;
    ClassIdx class_idx = 0;
  };
  static_assert(sizeof(Cohort) == 16);
  // Cohorts of one age bucket, the oldest first.
  struct Queue {
    CohortIdx front = kNone;
    CohortIdx back = kNone;
  };
  // [kAgeBucketCount]
  using Row = std::array<float, kAgeBucketCount>;
  struct Life {
    Row risk{};
    Row reuse{};
  };

  Cohort* Find(ClassIdx class_idx, CohortIdx cohort, Tick entered);
  CohortIdx TakeCohort();
  void PushBack(uint32_t bucket, CohortIdx cohort);
  CohortIdx PopFront(uint32_t bucket);
  void Halve();
  void Recompute();
  static Row HazardsOf(const Life& life, const Row* coarser, float relative_prior);
  static void ComputeWorth(const Row& hazards, std::array<float, kAgeBucketCount + 1>* worth);

  const Options options_;
  std::vector<Cohort> cohorts_;
  CohortIdx unused_ = kNone;  // linked by `next`
  std::array<Queue, kAgeBucketCount> queues_;
  // The cohort that a class fills in the current tick.
  std::array<CohortIdx, kClassCount> open_;
  Tick now_ = 0;

  std::vector<Life> lives_;  // [kClassCount]
  // At the borders of the buckets; between them worth is linear in age.
  std::vector<std::array<float, kAgeBucketCount + 1>> worth_;  // [kClassCount]
  uint64_t change_count_ = 0;
  uint64_t refresh_at_ = 0;
  uint64_t reuse_count_ = 0;
};

}  // namespace kvtier::policy
