// SPDX-License-Identifier: Apache-2.0
#include "policy/prefetch.h"

#include <algorithm>
#include <cmath>

namespace kvtier::policy {
namespace {

uint64_t DurationMs(uint64_t bytes, double bytes_per_ms) {
  return static_cast<uint64_t>(std::ceil(static_cast<double>(bytes) / bytes_per_ms));
}

}  // namespace

std::vector<PrefetchSlot> PlanPrefetch(std::span<const PrefetchTask> tasks,
                                       const ReadSpeeds& speeds, uint64_t now_ms) {
  std::vector<PrefetchTask> order(tasks.begin(), tasks.end());
  std::sort(order.begin(), order.end(), [](const PrefetchTask& a, const PrefetchTask& b) {
    return a.deadline_ms != b.deadline_ms ? a.deadline_ms < b.deadline_ms : a.id < b.id;
  });
  std::vector<PrefetchSlot> slots(order.size());
  // Backwards: each must be done before the next one has to begin.
  std::array<uint64_t, kTierCount> begins_ms;
  begins_ms.fill(UINT64_MAX);
  for (size_t i = order.size(); i-- > 0;) {
    const PrefetchTask& task = order[i];
    slots[i] = {.id = task.id, .start_ms = now_ms, .ready_ms = now_ms};
    uint64_t latest_ms = task.deadline_ms - std::min(task.deadline_ms, task.early_ms);
    for (size_t tier = 0; tier < kTierCount; ++tier) {
      const uint64_t bytes = task.pending_bytes[tier];
      if (bytes == 0) continue;
      const uint64_t takes_ms = speeds[tier] > 0 ? DurationMs(bytes, speeds[tier]) : 0;
      const uint64_t ends_ms =
          std::min(task.deadline_ms - std::min(task.deadline_ms, task.early_ms), begins_ms[tier]);
      begins_ms[tier] = ends_ms - std::min(ends_ms, takes_ms);
      latest_ms = std::min(latest_ms, begins_ms[tier] - std::min(begins_ms[tier], takes_ms));
    }
    if (task.is_guess) slots[i].start_ms = latest_ms;
  }
  // Forwards: each link reads one after the other.
  std::array<uint64_t, kTierCount> free_ms;
  free_ms.fill(now_ms);
  bool known = true;
  for (size_t i = 0; i < order.size(); ++i) {
    for (size_t tier = 0; tier < kTierCount; ++tier) {
      const uint64_t bytes = order[i].pending_bytes[tier];
      if (bytes == 0) continue;
      known = known && speeds[tier] > 0;
      if (!known) break;
      const uint64_t from_ms = std::max(free_ms[tier], slots[i].start_ms);
      free_ms[tier] = from_ms + DurationMs(bytes, speeds[tier]);
      slots[i].ready_ms = std::max(slots[i].ready_ms, free_ms[tier]);
    }
    slots[i].eta_known = known;
  }
  return slots;
}

bool ReadingIsFaster(const LoadOrRecompute& blocks, double bytes_per_ms,
                     double prefill_tokens_per_second) {
  const auto tokens = static_cast<double>(blocks.block_count * blocks.block_tokens);
  if (bytes_per_ms <= 0 || prefill_tokens_per_second <= 0 || tokens <= 0) return true;
  const double read_ms =
      static_cast<double>(blocks.block_count * blocks.block_bytes) / bytes_per_ms;
  // The mean token stands in the middle, since the cost of one is linear in its position.
  const double middle = static_cast<double>(blocks.first_position_tokens) + tokens / 2;
  const double recompute_ms =
      1000 * tokens / prefill_tokens_per_second * (1 + middle / kAttentionTokens);
  return read_ms <= recompute_ms;
}

uint64_t HeldUntilMs(uint64_t deadline_ms, uint64_t said_ms) {
  constexpr uint64_t kLateMsMin = 10'000;
  const uint64_t away_ms = deadline_ms - std::min(deadline_ms, said_ms);
  return deadline_ms + std::max(kLateMsMin, away_ms / 2);
}

uint32_t BackgroundTransfersMax(double bytes_per_ms, uint64_t block_bytes,
                                uint32_t transfers_per_link_max) {
  const uint32_t half = std::max(transfers_per_link_max / 2, 1U);
  if (bytes_per_ms <= 0 || block_bytes == 0) return half;
  const double blocks = kBehindMs * bytes_per_ms / static_cast<double>(block_bytes);
  if (blocks >= static_cast<double>(half)) return half;
  return std::min(half, std::max(2U, static_cast<uint32_t>(blocks)));
}

}  // namespace kvtier::policy
