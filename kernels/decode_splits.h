// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_DECODE_SPLITS_H_
#define KVTIER_KERNELS_DECODE_SPLITS_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/element.h"
#include "kernels/executor.h"
#include "kernels/status.h"

// Internal to kernels/: what Decode and DecodeMla share around the attention of one split: checks,
// positions, the plan of splits, running them and merging in order.

namespace kvtier::kernels {

inline constexpr uint32_t kQueryLenMax = 8;

bool AllFinite(const float* values, uint64_t count);

// Errors: kInvalidArgument if the type is not BF16 or FP32, data is null or a value of the
// [row_count][dim_count] is not finite. dim_count is at most 576.
Status ValidateQueryRows(ElementType type, const void* data, uint64_t row_count,
                         uint32_t dim_count);

// Errors: kInvalidArgument if sealed_token_count is not whole blocks, or an entry is missing.
Status ValidateBlocks(std::span<const std::byte* const> block_table, uint64_t sealed_token_count,
                      uint32_t block_tokens);

// Where the tokens of a call are in their context, see DecodeArgs.
struct Positions {
  uint64_t first_token;
  uint64_t token_count;          // Of the call, tail included.
  uint64_t context_token_count;  // 0: the context ends with the call.
  uint32_t query_len;
  uint64_t window;
};

Status ValidatePositions(const Positions& positions);

// The tokens [begin, end) of [first, first + count) (relative to the call) that a query sees,
// relative to `first`.
struct Visible {
  uint64_t begin;
  uint64_t end;
};
Visible VisibleTokens(const Positions& positions, uint32_t query_idx, uint64_t first,
                      uint64_t count);

// Sealed tokens in runs of split_tokens, then the tail. It depends on the counts only.
class SplitPlan {
 public:
  // split_tokens is split_tokens_min, or the least double of it that makes split_count_max splits.
  SplitPlan(uint64_t sealed_token_count, uint64_t tail_token_count, uint64_t split_tokens_min,
            uint64_t split_count_max);

  uint32_t split_count() const { return split_count_; }
  bool IsTail(uint32_t split_idx) const { return split_idx == sealed_splits_; }
  uint64_t first_token(uint32_t split_idx) const;  // Relative to the call.
  uint64_t token_count(uint32_t split_idx) const;

 private:
  uint64_t sealed_token_count_;
  uint64_t tail_token_count_;
  uint64_t split_tokens_;
  uint32_t sealed_splits_ = 0;
  uint32_t split_count_ = 0;
};

// Attention of query rows over splits, for RunSplits. A group is what shares K and V (a kv head).
struct SplitWork {
  uint32_t group_count;
  uint32_t split_count;
  uint32_t row_count;  // Query rows of a group.
  uint32_t value_dim;  // At most 512.

  // Attends with rows [first_row, first_row + at most kAttendRowsMax) of a group over a split:
  // writes out [rows][value_dim] and lse [rows]. False: damaged tile. Called from many threads.
  bool (*run)(const void* self, uint32_t group_idx, uint32_t split_idx, uint32_t first_row,
              float* out, float* lse);
  // The row of the results that a row of a group is.
  uint64_t (*result_row)(const void* self, uint32_t group_idx, uint32_t row);
  const void* self;
};

uint64_t SplitWorkspaceBytes(const SplitWork& work);

// Errors: kInvalidArgument as DecodeArgs says of executor and workspace.
Status ValidateExecutor(const SplitWork& work, const Executor& executor,
                        std::span<const std::byte> workspace);

// Runs all splits and writes out [rows][value_dim] and lse [rows]: zeros and -inf where there is no
// token. `executor` is null or validated. `sinks` is empty or [head count]: scores without value,
// of row % head count. The bits do not depend on the executor. Uses 40 KiB of stack beside that of
// `run`. Errors: kDataLoss if a run met a damaged tile; the results are unspecified then.
Status RunSplits(const SplitWork& work, const Executor* executor, std::span<std::byte> workspace,
                 std::span<const float> sinks, std::span<float> out, std::span<float> lse);

}  // namespace kvtier::kernels

#endif  // KVTIER_KERNELS_DECODE_SPLITS_H_
