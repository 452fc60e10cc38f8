// SPDX-License-Identifier: Apache-2.0
#include "policy/hazard_model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "proto/base/check.h"
#include "proto/base/crc32c.h"
#include "proto/base/status_util.h"

namespace kvtier::policy {
namespace {

constexpr Tick kYoungTicks = 16;
constexpr int kYoungLog2 = 4;

// Lower borders of the buckets, and the upper one of the last.
std::array<Tick, kAgeBucketCount + 1> MakeBorders() {
  std::array<Tick, kAgeBucketCount + 1> borders{};
  for (uint32_t bucket = 1; bucket <= kAgeBucketCount; ++bucket) {
    borders[bucket] = static_cast<Tick>(std::lround(kYoungTicks * std::exp2(0.5 * (bucket - 1.0))));
  }
  return borders;
}
const std::array<Tick, kAgeBucketCount + 1> kBorders = MakeBorders();

// Hazard of a bucket when nothing is known. Constant over half octaves is 1/age. Bucket 0 is as
// wide as the two after it together: with this its rate is not below theirs.
constexpr float kPriorHazard = 0.1F;
constexpr float kYoungPriorHazard = 0.25F;
// What is known of coarser classes counts as this many blocks at risk.
constexpr float kShrinkWeight = 20;
// What is assumed of a class' reuses relative to the coarser one counts as this many.
constexpr float kRelativeWeight = 10;
// A client that says it is finished is believed before anything is learned.
constexpr float kFinishedRelative = 0.05F;
constexpr float kHazardMax = 0.98F;
// Half of those in a bucket are counted as at risk when they enter it, half when they leave it or
// are used: counting them early or late alone would bias hazards while a bucket fills.
constexpr float kHalf = 0.5F;

// Recomputing takes about a millisecond: after 1/32 more was learned, within these bounds.
constexpr uint64_t kRefreshChangeCountMin = 1024;
constexpr uint64_t kRefreshChangeCountMax = 1U << 18;
constexpr uint64_t kRefreshShare = 32;

constexpr uint32_t kSaveVersion = 1;

}  // namespace

uint32_t AgeBucket(Tick age) {
  if (age < kYoungTicks) return 0;
  const int octave = static_cast<int>(std::bit_width(age)) - 1 - kYoungLog2;
  const uint32_t bucket = 1 + 2 * static_cast<uint32_t>(octave);
  if (bucket >= kAgeBucketCount) return kAgeBucketCount - 1;
  return std::min(kAgeBucketCount - 1, age >= kBorders[bucket + 1] ? bucket + 1 : bucket);
}

uint8_t GapClass(Tick gap) {
  if (gap < kYoungTicks) return 1;
  const int octave = static_cast<int>(std::bit_width(gap)) - kYoungLog2;
  return static_cast<uint8_t>(
      std::min<uint32_t>(kGapClassCount - 1, 1U + static_cast<uint32_t>(octave)));
}

ClassIdx ClassOf(NextStep next, uint32_t use_count, uint8_t gap_class) {
  const uint32_t use_class = use_count <= 1 ? 0 : use_count == 2 ? 1 : use_count < 8 ? 2 : 3;
  const uint32_t step = static_cast<uint32_t>(next);
  KVT_CHECK(step < kNextStepCount && gap_class < kGapClassCount);
  return static_cast<ClassIdx>((step * kUseClassCount + use_class) * kGapClassCount + gap_class);
}

HazardModel::HazardModel(const Options& options)
    : options_(options), lives_(kClassCount), worth_(kClassCount) {
  KVT_CHECK(options.cohort_count_max >= 2 && options.cohort_count_max < kNone);
  open_.fill(kNone);
  Recompute();
}

HazardModel::Cohort* HazardModel::Find(ClassIdx class_idx, CohortIdx cohort, Tick entered) {
  if (cohort >= cohorts_.size()) return nullptr;
  Cohort& found = cohorts_[cohort];
  const bool same = found.class_idx == class_idx && found.entered == entered;
  return same && found.alive_count > 0 ? &found : nullptr;
}

void HazardModel::PushBack(uint32_t bucket, CohortIdx cohort) {
  Queue& queue = queues_[bucket];
  cohorts_[cohort].next = kNone;
  if (queue.front == kNone) {
    queue.front = cohort;
  } else {
    cohorts_[queue.back].next = cohort;
  }
  queue.back = cohort;
}

CohortIdx HazardModel::PopFront(uint32_t bucket) {
  Queue& queue = queues_[bucket];
  const CohortIdx cohort = queue.front;
  queue.front = cohorts_[cohort].next;
  return cohort;
}

void HazardModel::Advance(Tick now) {
  if (now == now_) return;
  KVT_CHECK(now > now_);
  now_ = now;
  open_.fill(kNone);
  for (uint32_t bucket = 0; bucket < kAgeBucketCount; ++bucket) {
    Queue& queue = queues_[bucket];
    while (queue.front != kNone) {
      Cohort& cohort = cohorts_[queue.front];
      const bool extinct = cohort.alive_count == 0;
      if (!extinct && now - cohort.entered < kBorders[bucket + 1]) break;
      const CohortIdx idx = PopFront(bucket);
      if (!extinct) {
        Life& life = lives_[cohort.class_idx];
        const float alive = kHalf * static_cast<float>(cohort.alive_count);
        life.risk[bucket] += alive;
        change_count_ += cohort.alive_count;
        if (bucket + 1 < kAgeBucketCount) {
          life.risk[bucket + 1] += alive;
          PushBack(bucket + 1, idx);
          continue;
        }
      }
      cohort.alive_count = 0;
      cohort.next = unused_;
      unused_ = idx;
    }
  }
}

CohortIdx HazardModel::TakeCohort() {
  if (unused_ != kNone) {
    const CohortIdx cohort = unused_;
    unused_ = cohorts_[cohort].next;
    return cohort;
  }
  if (cohorts_.size() < options_.cohort_count_max) {
    cohorts_.emplace_back();
    return static_cast<CohortIdx>(cohorts_.size() - 1);
  }
  for (uint32_t bucket = kAgeBucketCount; bucket-- > 0;) {
    if (queues_[bucket].front == kNone) continue;
    const CohortIdx cohort = PopFront(bucket);
    // The class may be filling it in this very tick.
    CohortIdx& open = open_[cohorts_[cohort].class_idx];
    if (open == cohort) open = kNone;
    return cohort;
  }
  KVT_CHECK(false);
  return kNone;
}

CohortIdx HazardModel::Enter(ClassIdx class_idx, Tick now) {
  Advance(now);
  CohortIdx& open = open_[class_idx];
  if (open == kNone) {
    const CohortIdx cohort = TakeCohort();
    cohorts_[cohort] = {.entered = now, .alive_count = 0, .next = kNone, .class_idx = class_idx};
    PushBack(0, cohort);
    open = cohort;
  }
  ++cohorts_[open].alive_count;
  lives_[class_idx].risk[0] += kHalf;
  return open;
}

void HazardModel::Reuse(ClassIdx class_idx, CohortIdx cohort, Tick entered, Tick now) {
  Advance(now);
  Cohort* found = Find(class_idx, cohort, entered);
  if (found == nullptr) return;
  --found->alive_count;
  Life& life = lives_[class_idx];
  const uint32_t bucket = AgeBucket(now - entered);
  life.reuse[bucket] += 1;
  life.risk[bucket] += kHalf;
  ++change_count_;
  if (++reuse_count_ >= options_.halving_reuse_count) Halve();
}

void HazardModel::Censor(ClassIdx class_idx, CohortIdx cohort, Tick entered) {
  Cohort* found = Find(class_idx, cohort, entered);
  if (found != nullptr) --found->alive_count;
}

void HazardModel::Halve() {
  reuse_count_ = 0;
  for (Life& life : lives_) {
    for (float& risk : life.risk) risk *= kHalf;
    for (float& reuse : life.reuse) reuse *= kHalf;
  }
}

void HazardModel::Refresh() {
  if (change_count_ < refresh_at_) return;
  Recompute();
}

HazardModel::Row HazardModel::HazardsOf(const Life& life, const Row* coarser,
                                        float relative_prior) {
  Row hazards;
  float expected = 0;
  float seen = 0;
  float prior = kYoungPriorHazard;
  for (uint32_t bucket = 0; bucket < kAgeBucketCount; ++bucket) {
    const float risk = std::max(life.risk[bucket], life.reuse[bucket]);
    if (coarser != nullptr) {
      const float relative =
          (seen + kRelativeWeight * relative_prior) / (expected + kRelativeWeight);
      prior = std::min(0.9F, (*coarser)[bucket] * relative);
      expected += risk * (*coarser)[bucket];
      seen += life.reuse[bucket];
    }
    const float hazard = (life.reuse[bucket] + kShrinkWeight * prior) / (risk + kShrinkWeight);
    hazards[bucket] = std::min(kHazardMax, hazard);
    // Where nothing was seen yet, hazard goes on as 1/age.
    if (coarser != nullptr) continue;
    prior = hazards[bucket] * (bucket == 0 ? kPriorHazard / kYoungPriorHazard : 1.0F);
  }
  return hazards;
}

void HazardModel::ComputeWorth(const Row& hazards, std::array<float, kAgeBucketCount + 1>* worth) {
  // Within a bucket the rate is constant: the time held in it is reuses / rate.
  Row rate;
  Row width;
  for (uint32_t bucket = 0; bucket < kAgeBucketCount; ++bucket) {
    width[bucket] = static_cast<float>(kBorders[bucket + 1] - kBorders[bucket]);
    rate[bucket] = -std::log1p(-hazards[bucket]) / width[bucket];
  }
  for (uint32_t first = 0; first < kAgeBucketCount; ++first) {
    float alive = 1;
    float held = 0;
    float best = 0;
    for (uint32_t bucket = first; bucket < kAgeBucketCount && alive > 1e-6F; ++bucket) {
      const float reused = alive * hazards[bucket];
      held += rate[bucket] > 0 ? reused / rate[bucket] : alive * width[bucket];
      alive -= reused;
      best = std::max(best, (1 - alive) / held);
    }
    (*worth)[first] = best;
  }
  (*worth)[kAgeBucketCount] = (*worth)[kAgeBucketCount - 1] * std::sqrt(kHalf);
}

void HazardModel::Recompute() {
  const auto add = [](Life* sum, const Life& life) {
    for (uint32_t bucket = 0; bucket < kAgeBucketCount; ++bucket) {
      sum->risk[bucket] += life.risk[bucket];
      sum->reuse[bucket] += life.reuse[bucket];
    }
  };
  std::array<Life, kNextStepCount * kUseClassCount> by_uses{};
  std::array<Life, kNextStepCount> by_step{};
  Life all;
  for (uint32_t i = 0; i < kClassCount; ++i) add(&by_uses[i / kGapClassCount], lives_[i]);
  for (uint32_t i = 0; i < by_uses.size(); ++i) add(&by_step[i / kUseClassCount], by_uses[i]);
  for (const Life& life : by_step) add(&all, life);

  const Row all_hazards = HazardsOf(all, nullptr, 1);
  for (uint32_t step = 0; step < kNextStepCount; ++step) {
    const bool finished = step == static_cast<uint32_t>(NextStep::kFinished);
    const Row step_hazards =
        HazardsOf(by_step[step], &all_hazards, finished ? kFinishedRelative : 1.0F);
    for (uint32_t uses = step * kUseClassCount; uses < (step + 1) * kUseClassCount; ++uses) {
      const Row uses_hazards = HazardsOf(by_uses[uses], &step_hazards, 1);
      for (uint32_t i = uses * kGapClassCount; i < (uses + 1) * kGapClassCount; ++i) {
        ComputeWorth(HazardsOf(lives_[i], &uses_hazards, 1), &worth_[i]);
      }
    }
  }
  refresh_at_ = change_count_ + std::clamp(change_count_ / kRefreshShare, kRefreshChangeCountMin,
                                           kRefreshChangeCountMax);
}

float HazardModel::Worth(ClassIdx class_idx, Tick age) const {
  const uint32_t bucket = AgeBucket(age);
  const auto& worth = worth_[class_idx];
  const auto from = static_cast<float>(kBorders[bucket]);
  const auto width = static_cast<float>(kBorders[bucket + 1]) - from;
  const float into = std::min(1.0F, (static_cast<float>(age) - from) / width);
  return worth[bucket] + into * (worth[bucket + 1] - worth[bucket]);
}

uint64_t HazardModel::memory_bytes() const {
  return cohorts_.capacity() * sizeof(Cohort) + kClassCount * (sizeof(Life) + sizeof(worth_[0])) +
         sizeof(*this);
}

// Little-endian:
//   offset  size  field
//        0     4  CRC-32C of all that follows
//        4     4  version, 1
//        8     4  classes
//       12     4  age buckets
//       16   320  of each class that is not empty: its number (4), reserved (4),
//                 risk (4 x buckets), reuse (4 x buckets)
std::string HazardModel::Save() const {
  std::string saved(4, '\0');
  const auto put = [&saved](const void* data, size_t bytes) {
    saved.append(static_cast<const char*>(data), bytes);
  };
  const std::array<uint32_t, 3> header = {kSaveVersion, kClassCount, kAgeBucketCount};
  put(header.data(), sizeof(header));
  for (uint32_t i = 0; i < kClassCount; ++i) {
    const Life& life = lives_[i];
    const bool empty = std::ranges::all_of(life.risk, [](float risk) { return risk == 0; });
    if (empty) continue;
    const std::array<uint32_t, 2> record = {i, 0};
    put(record.data(), sizeof(record));
    put(life.risk.data(), sizeof(Row));
    put(life.reuse.data(), sizeof(Row));
  }
  const uint32_t crc = Crc32c(std::as_bytes(std::span(saved)).subspan(4));
  std::memcpy(saved.data(), &crc, sizeof(crc));
  return saved;
}

absl::Status HazardModel::Restore(std::string_view saved) {
  constexpr size_t kHeaderBytes = 16;
  constexpr size_t kRecordBytes = 8 + 2 * sizeof(Row);
  if (saved.size() < kHeaderBytes || (saved.size() - kHeaderBytes) % kRecordBytes != 0) {
    return DataLoss("learned policy state of %d bytes is cut short", saved.size());
  }
  std::array<uint32_t, 4> header{};
  std::memcpy(header.data(), saved.data(), sizeof(header));
  if (header[0] != Crc32c(std::as_bytes(std::span(saved)).subspan(4))) {
    return DataLoss("learned policy state has a wrong checksum");
  }
  if (header[1] != kSaveVersion || header[2] != kClassCount || header[3] != kAgeBucketCount) {
    return DataLoss("learned policy state has version %d with %d classes of %d ages", header[1],
                    header[2], header[3]);
  }
  std::vector<Life> lives(kClassCount);
  for (size_t at = kHeaderBytes; at < saved.size(); at += kRecordBytes) {
    uint32_t class_idx = 0;
    std::memcpy(&class_idx, saved.data() + at, sizeof(class_idx));
    if (class_idx >= kClassCount) return DataLoss("learned policy state has class %d", class_idx);
    Life& life = lives[class_idx];
    std::memcpy(life.risk.data(), saved.data() + at + 8, sizeof(Row));
    std::memcpy(life.reuse.data(), saved.data() + at + 8 + sizeof(Row), sizeof(Row));
    const auto bad = [](float count) { return !(count >= 0 && count < 1e12F); };
    if (std::ranges::any_of(life.risk, bad) || std::ranges::any_of(life.reuse, bad)) {
      return DataLoss("learned policy state has a count that is none in class %d", class_idx);
    }
  }
  lives_ = std::move(lives);
  Recompute();
  return absl::OkStatus();
}

}  // namespace kvtier::policy
