// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode_splits.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "kernels/cpu/attend.h"
#include "kernels/rows.h"

namespace kvtier::kernels {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
constexpr uint64_t kTokensMax = uint64_t{1} << 48;  // Keeps sums of positions in 64 bits.

// Merges a later part of the same row into (out, lse).
void Fold(const float* part_out, float part_lse, uint32_t value_dim, float* out, float* lse) {
  if (part_lse == kNegativeInfinity) return;
  if (*lse == kNegativeInfinity) {
    std::copy_n(part_out, value_dim, out);
    *lse = part_lse;
    return;
  }
  const float top = std::fmax(*lse, part_lse);
  const float weight = std::exp(*lse - top);
  const float part_weight = std::exp(part_lse - top);
  const float sum = weight + part_weight;
  for (uint32_t i = 0; i < value_dim; ++i) {
    out[i] = (out[i] * weight + part_out[i] * part_weight) / sum;
  }
  *lse = top + std::log(sum);
}

uint32_t PassCount(const SplitWork& work) {
  return (work.row_count + cpu::kAttendRowsMax - 1) / cpu::kAttendRowsMax;
}

uint64_t TaskCount(const SplitWork& work) {
  return uint64_t{work.group_count} * work.split_count * PassCount(work);
}

// All splits, with their results folded into the outputs in the order of the splits.
class Run {
 public:
  Run(const SplitWork& work, std::span<float> out, std::span<float> lse)
      : work_(work), out_(out), lse_(lse) {}

  bool InOrder() const {
    float part_out[cpu::kAttendRowsMax * cpu::kMlaValueDims];
    float part_lse[cpu::kAttendRowsMax];
    for (uint32_t group = 0; group < work_.group_count; ++group) {
      for (uint32_t split = 0; split < work_.split_count; ++split) {
        // Passes inside: they find the tiles of the split in a cache.
        for (uint32_t first = 0; first < work_.row_count; first += cpu::kAttendRowsMax) {
          if (!work_.run(work_.self, group, split, first, part_out, part_lse)) return false;
          FoldRows(group, first, part_out, part_lse);
        }
      }
    }
    return true;
  }

  // Results of tasks lie in the workspace until all are done.
  bool Parallel(const Executor& executor, std::span<std::byte> workspace) {
    parts_out_ = reinterpret_cast<float*>(workspace.data());
    parts_lse_ = parts_out_ + uint64_t{work_.group_count} * work_.split_count * work_.row_count *
                                  work_.value_dim;
    executor.run(
        executor.self, static_cast<uint32_t>(TaskCount(work_)),
        [](void* self, uint32_t task_idx) { static_cast<Run*>(self)->RunTask(task_idx); }, this);
    // The executor's return orders the tasks' stores before this load.
    if (damaged_.load(std::memory_order_relaxed)) return false;
    for (uint32_t part = 0; part < work_.group_count * work_.split_count; ++part) {
      for (uint32_t first = 0; first < work_.row_count; first += cpu::kAttendRowsMax) {
        const uint64_t at = uint64_t{part} * work_.row_count + first;
        FoldRows(part / work_.split_count, first, parts_out_ + at * work_.value_dim,
                 parts_lse_ + at);
      }
    }
    return true;
  }

 private:
  void RunTask(uint32_t task_idx) {
    const uint32_t part = task_idx / PassCount(work_);
    const uint32_t first = task_idx % PassCount(work_) * cpu::kAttendRowsMax;
    const uint64_t at = uint64_t{part} * work_.row_count + first;
    if (!work_.run(work_.self, part / work_.split_count, part % work_.split_count, first,
                   parts_out_ + at * work_.value_dim, parts_lse_ + at)) {
      damaged_.store(true, std::memory_order_relaxed);
    }
  }

  void FoldRows(uint32_t group, uint32_t first, const float* part_out,
                const float* part_lse) const {
    const uint32_t count = std::min(cpu::kAttendRowsMax, work_.row_count - first);
    for (uint32_t i = 0; i < count; ++i) {
      const uint64_t row = work_.result_row(work_.self, group, first + i);
      Fold(part_out + uint64_t{i} * work_.value_dim, part_lse[i], work_.value_dim,
           out_.data() + row * work_.value_dim, &lse_[row]);
    }
  }

  const SplitWork& work_;
  std::span<float> out_;
  std::span<float> lse_;
  float* parts_out_ = nullptr;  // [group][split][row][value_dim]
  float* parts_lse_ = nullptr;  // [group][split][row]
  std::atomic<bool> damaged_{false};
};

}  // namespace

bool AllFinite(const float* values, uint64_t count) {
  return std::all_of(values, values + count, [](float x) { return std::isfinite(x); });
}

Status ValidateQueryRows(ElementType type, const void* data, uint64_t row_count,
                         uint32_t dim_count) {
  if (type != ElementType::kBf16 && type != ElementType::kFp32) {
    return Status::InvalidArgument("query must be BF16 or FP32");
  }
  if (data == nullptr) return Status::InvalidArgument("query is missing");
  const ConstRows query{.type = type, .data = data, .token_stride = dim_count};
  for (uint64_t row_idx = 0; row_idx < row_count; ++row_idx) {
    float row[cpu::kAttendDimMax];
    LoadRow(query, row_idx, dim_count, row);
    if (!AllFinite(row, dim_count)) {
      return Status::InvalidArgument("query has a value that is not finite");
    }
  }
  return Status();
}

Status ValidateBlocks(std::span<const std::byte* const> block_table, uint64_t sealed_token_count,
                      uint32_t block_tokens) {
  if (sealed_token_count % block_tokens != 0) {
    return Status::InvalidArgument("sealed_token_count is not a multiple of block_tokens");
  }
  const uint64_t block_count = sealed_token_count / block_tokens;
  if (block_count > block_table.size()) {
    return Status::InvalidArgument("block_table is shorter than sealed_token_count");
  }
  const auto blocks = block_table.first(block_count);
  if (std::find(blocks.begin(), blocks.end(), nullptr) != blocks.end()) {
    return Status::InvalidArgument("block_table has a null entry");
  }
  return Status();
}

Status ValidatePositions(const Positions& positions) {
  if (positions.query_len == 0 || positions.query_len > kQueryLenMax) {
    return Status::InvalidArgument("query_len must be in [1, 8]");
  }
  if (positions.first_token > kTokensMax || positions.context_token_count > kTokensMax) {
    return Status::InvalidArgument("a position is above 2^48");
  }
  const uint64_t end = positions.first_token + positions.token_count;
  if (positions.context_token_count != 0 && positions.context_token_count < end) {
    return Status::InvalidArgument("the part ends behind the context");
  }
  const uint64_t context = positions.context_token_count == 0 ? end : positions.context_token_count;
  if (positions.query_len > 1 && context < positions.query_len) {
    return Status::InvalidArgument("query_len is above the tokens of the context");
  }
  return Status();
}

Visible VisibleTokens(const Positions& positions, uint32_t query_idx, uint64_t first,
                      uint64_t count) {
  const uint64_t part_end = positions.first_token + positions.token_count;
  const uint64_t context =
      positions.context_token_count == 0 ? part_end : positions.context_token_count;
  const uint64_t end = context - (positions.query_len - 1 - query_idx);
  const uint64_t begin =
      positions.window == 0 || positions.window > end ? 0 : end - positions.window;
  const uint64_t at = positions.first_token + first;
  return {.begin = begin < at ? 0 : std::min(begin - at, count),
          .end = end < at ? 0 : std::min(end - at, count)};
}

SplitPlan::SplitPlan(uint64_t sealed_token_count, uint64_t tail_token_count,
                     uint64_t split_tokens_min, uint64_t split_count_max)
    : sealed_token_count_(sealed_token_count),
      tail_token_count_(tail_token_count),
      split_tokens_(split_tokens_min) {
  const auto splits = [&] { return (sealed_token_count + split_tokens_ - 1) / split_tokens_; };
  while (splits() > split_count_max) split_tokens_ *= 2;
  sealed_splits_ = static_cast<uint32_t>(splits());
  split_count_ = sealed_splits_ + (tail_token_count > 0 ? 1 : 0);
}

uint64_t SplitPlan::first_token(uint32_t split_idx) const {
  return IsTail(split_idx) ? sealed_token_count_ : split_idx * split_tokens_;
}

uint64_t SplitPlan::token_count(uint32_t split_idx) const {
  if (IsTail(split_idx)) return tail_token_count_;
  return std::min(split_tokens_, sealed_token_count_ - first_token(split_idx));
}

uint64_t SplitWorkspaceBytes(const SplitWork& work) {
  return uint64_t{work.group_count} * work.split_count * work.row_count * (work.value_dim + 1) *
         sizeof(float);
}

Status ValidateExecutor(const SplitWork& work, const Executor& executor,
                        std::span<const std::byte> workspace) {
  if (executor.run == nullptr) return Status::InvalidArgument("executor has no run");
  if (workspace.size() < SplitWorkspaceBytes(work)) {
    return Status::InvalidArgument("workspace is smaller than its size function says");
  }
  if (AnyIsNull(workspace)) return NullSpan();
  if (reinterpret_cast<uintptr_t>(workspace.data()) % alignof(float) != 0) {
    return Status::InvalidArgument("workspace is not aligned");
  }
  if (TaskCount(work) > UINT32_MAX) return Status::InvalidArgument("too many tasks");
  return Status();
}

Status RunSplits(const SplitWork& work, const Executor* executor, std::span<std::byte> workspace,
                 std::span<const float> sinks, std::span<float> out, std::span<float> lse) {
  std::fill(out.begin(), out.end(), 0.0F);
  std::fill(lse.begin(), lse.end(), kNegativeInfinity);
  Run run(work, out, lse);
  const bool ok = executor == nullptr ? run.InOrder() : run.Parallel(*executor, workspace);
  if (!ok) return Status::DataLoss("a tile holds a byte that is never written");
  // A sink is a part without value.
  const float zeros[cpu::kMlaValueDims] = {};
  for (uint64_t row = 0; !sinks.empty() && row < lse.size(); ++row) {
    Fold(zeros, sinks[row % sinks.size()], work.value_dim, out.data() + row * work.value_dim,
         &lse[row]);
  }
  return Status();
}

}  // namespace kvtier::kernels
