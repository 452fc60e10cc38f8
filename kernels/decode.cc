// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <utility>

#include "kernels/cpu/kernel_table.h"
#include "kernels/nvfp4.h"
#include "kernels/rows.h"

namespace kvtier::kernels {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
constexpr uint32_t kQueryLenMax = 8;
constexpr uint64_t kTokensMax = uint64_t{1} << 48;  // Keeps sums of positions in 64 bits.

// A split is long enough that merging costs nothing, and its tiles stay in a core's L2 cache while
// several passes of query rows read them.
constexpr uint64_t kSplitTokensMin = 2048;
constexpr uint64_t kSplitCountMax = 256;

uint64_t SplitTokens(uint64_t sealed_token_count) {
  uint64_t tokens = kSplitTokensMin;
  while ((sealed_token_count + tokens - 1) / tokens > kSplitCountMax) tokens *= 2;
  return tokens;
}

bool AllFinite(const float* values, uint64_t count) {
  return std::all_of(values, values + count, [](float x) { return std::isfinite(x); });
}

Status ValidateQuery(const DecodeArgs& args) {
  const BlockShape& shape = args.block_shape;
  if (args.query_head_count == 0 || args.query_head_count % shape.kv_head_count != 0) {
    return Status::InvalidArgument("query_head_count is not a multiple of kv_head_count");
  }
  if (args.query_len == 0 || args.query_len > kQueryLenMax) {
    return Status::InvalidArgument("query_len must be in [1, 8]");
  }
  if (args.query_type != ElementType::kBf16 && args.query_type != ElementType::kFp32) {
    return Status::InvalidArgument("query must be BF16 or FP32");
  }
  if (args.query == nullptr) return Status::InvalidArgument("query is missing");
  if (!std::isfinite(args.softmax_scale)) {
    return Status::InvalidArgument("softmax_scale is not finite");
  }
  if (!std::isfinite(args.soft_cap) || args.soft_cap < 0.0F) {
    return Status::InvalidArgument("soft_cap is negative or not finite");
  }
  const uint64_t row_count = uint64_t{args.query_len} * args.query_head_count;
  if (args.out.size() != row_count * shape.head_dim || args.lse.size() != row_count) {
    return Status::InvalidArgument("out or lse does not have the exact size");
  }
  const ConstRows query{
      .type = args.query_type, .data = args.query, .token_stride = shape.head_dim};
  for (uint64_t row_idx = 0; row_idx < row_count; ++row_idx) {
    float row[kHeadDimMax];
    LoadRow(query, row_idx, shape.head_dim, row);
    if (!AllFinite(row, shape.head_dim)) {
      return Status::InvalidArgument("query has a value that is not finite");
    }
  }
  return Status();
}

LayerFormat FormatOf(const DecodeArgs& args) {
  return args.layer_formats.empty() ? LayerFormat{} : args.layer_formats[args.layer_idx];
}

Status ValidateScales(SideFormat format, std::span<const float> scales) {
  for (const float scale : scales) {
    if (format == SideFormat::kNvfp4 && !IsValidGlobalScale(scale)) {
      return Status::InvalidArgument("a global scale is not a power of two in [2^-100, 2^100]");
    }
    if (format == SideFormat::kFp8 && (!std::isfinite(scale) || scale <= 0.0F)) {
      return Status::InvalidArgument("a scale of an FP8 side is not finite and above 0");
    }
  }
  return Status();
}

Status ValidateVectors(const DecodeArgs& args) {
  const BlockShape& shape = args.block_shape;
  if (args.g_k.size() != shape.kv_head_count || args.g_v.size() != shape.kv_head_count) {
    return Status::InvalidArgument("g_k and g_v need one global scale per kv head");
  }
  if (!args.layer_formats.empty() && args.layer_formats.size() != shape.layer_count) {
    return Status::InvalidArgument("layer_formats needs one entry per layer");
  }
  for (const LayerFormat& format : args.layer_formats) {
    if (const Status status = Validate(format); !status.ok()) return status;
  }
  const LayerFormat format = FormatOf(args);
  for (const auto& [side, scales] : {std::pair(format.k, args.g_k), {format.v, args.g_v}}) {
    if (const Status status = ValidateScales(side, scales); !status.ok()) return status;
  }
  const uint64_t channel_count = uint64_t{shape.kv_head_count} * shape.head_dim;
  for (const auto& vector : {args.k_smooth, args.k_mean}) {
    if (vector.empty()) continue;
    if (vector.size() != channel_count || !AllFinite(vector.data(), vector.size())) {
      return Status::InvalidArgument("k_smooth and k_mean need a finite value per channel");
    }
  }
  if (!args.sinks.empty() && (args.sinks.size() != args.query_head_count ||
                              !AllFinite(args.sinks.data(), args.sinks.size()))) {
    return Status::InvalidArgument("sinks need a finite value per query head");
  }
  return Status();
}

Status ValidateTail(const DecodeTail& tail, const BlockShape& shape) {
  if (tail.token_count == 0) return Status();
  if (tail.k == nullptr || tail.v == nullptr) return Status::InvalidArgument("tail has no data");
  if (tail.type != ElementType::kBf16 && tail.type != ElementType::kFp8E4m3) {
    return Status::InvalidArgument("tail must be BF16 or FP8");
  }
  if (tail.token_stride < shape.head_dim ||
      (shape.kv_head_count > 1 && tail.head_stride < shape.head_dim)) {
    return Status::InvalidArgument("a stride of the tail is less than head_dim");
  }
  for (const float scale : {tail.k_scale, tail.v_scale}) {
    if (!std::isfinite(scale) || scale <= 0.0F) {
      return Status::InvalidArgument("a scale of the tail is not finite and above 0");
    }
  }
  return Status();
}

Status ValidateSequence(const DecodeArgs& args) {
  const BlockShape& shape = args.block_shape;
  if (args.sealed_token_count % shape.block_tokens != 0) {
    return Status::InvalidArgument("sealed_token_count is not a multiple of block_tokens");
  }
  const uint64_t block_count = args.sealed_token_count / shape.block_tokens;
  if (block_count > args.block_table.size()) {
    return Status::InvalidArgument("block_table is shorter than sealed_token_count");
  }
  const auto blocks = args.block_table.first(block_count);
  if (std::find(blocks.begin(), blocks.end(), nullptr) != blocks.end()) {
    return Status::InvalidArgument("block_table has a null entry");
  }
  if (const Status status = ValidateTail(args.tail, shape); !status.ok()) return status;
  const uint64_t token_count = args.sealed_token_count + args.tail.token_count;
  if (args.first_token > kTokensMax || args.context_token_count > kTokensMax) {
    return Status::InvalidArgument("a position is above 2^48");
  }
  const uint64_t end = args.first_token + token_count;
  if (args.context_token_count != 0 && args.context_token_count < end) {
    return Status::InvalidArgument("the part ends behind the context");
  }
  const uint64_t context = args.context_token_count == 0 ? end : args.context_token_count;
  if (args.query_len > 1 && context < args.query_len) {
    return Status::InvalidArgument("query_len is above the tokens of the context");
  }
  return Status();
}

Status ValidateArgs(const DecodeArgs& args) {
  if (const Status status = Validate(args.block_shape); !status.ok()) return status;
  if (args.layer_idx >= args.block_shape.layer_count) {
    return Status::InvalidArgument("layer_idx is not below layer_count");
  }
  if (!IsaIsAvailable(args.isa)) {
    return Status::InvalidArgument("the instruction set is not available");
  }
  if (const Status status = ValidateQuery(args); !status.ok()) return status;
  if (const Status status = ValidateVectors(args); !status.ok()) return status;
  return ValidateSequence(args);
}

// The splits of a call: sealed tokens in runs of split_tokens, then the tail.
class Plan {
 public:
  explicit Plan(const DecodeArgs& args)
      : split_tokens_(SplitTokens(args.sealed_token_count)),
        sealed_splits_(
            static_cast<uint32_t>((args.sealed_token_count + split_tokens_ - 1) / split_tokens_)),
        split_count_(sealed_splits_ + (args.tail.token_count > 0 ? 1 : 0)),
        group_heads_(args.query_head_count / args.block_shape.kv_head_count),
        rows_(args.query_len * group_heads_) {}

  uint64_t split_tokens() const { return split_tokens_; }
  bool IsTail(uint32_t split_idx) const { return split_idx == sealed_splits_; }
  uint32_t split_count() const { return split_count_; }
  uint32_t group_heads() const { return group_heads_; }
  uint32_t rows() const { return rows_; }  // Query rows of a kv head: [query_len][group heads].

 private:
  uint64_t split_tokens_;
  uint32_t sealed_splits_;
  uint32_t split_count_;
  uint32_t group_heads_;
  uint32_t rows_;
};

// Row `row` of a kv head among all rows of the call.
uint64_t CallRow(const DecodeArgs& args, const Plan& plan, uint32_t kv_head_idx, uint32_t row) {
  return uint64_t{row / plan.group_heads()} * args.query_head_count +
         uint64_t{kv_head_idx} * plan.group_heads() + row % plan.group_heads();
}

cpu::AttendFormat AttendFormatOf(SideFormat format) {
  switch (format) {
    case SideFormat::kNvfp4:
      return cpu::AttendFormat::kNvfp4;
    case SideFormat::kFp8:
      return cpu::AttendFormat::kFp8;
    case SideFormat::kBf16:
      return cpu::AttendFormat::kBf16;
  }
  return cpu::AttendFormat::kNvfp4;
}

// One split for up to kAttendRowsMax query rows of a kv head.
class SplitPass {
 public:
  SplitPass(const DecodeArgs& args, const Plan& plan, uint32_t kv_head_idx, uint32_t split_idx,
            uint32_t first_row)
      : args_(args),
        kv_head_idx_(kv_head_idx),
        is_tail_(plan.IsTail(split_idx)),
        first_token_(split_idx * plan.split_tokens()),
        row_count_(std::min(cpu::kAttendRowsMax, plan.rows() - first_row)) {
    token_count_ = std::min(plan.split_tokens(), args.sealed_token_count - first_token_);
    if (is_tail_) {
      first_token_ = args.sealed_token_count;
      token_count_ = args.tail.token_count;
    }
    for (uint32_t i = 0; i < row_count_; ++i) {
      LoadQuery(CallRow(args, plan, kv_head_idx, first_row + i), i);
      SetVisible((first_row + i) / plan.group_heads(), i);
    }
  }

  // Writes out [row_count()][head_dim] and lse [row_count()]. False: damaged tile.
  bool Run(float* out, float* lse) const {
    const cpu::KernelTable* kernels = cpu::KernelsOf(args_.isa);
    const uint32_t head_dim = args_.block_shape.head_dim;
    const cpu::AttendQuery query{.query = query_,
                                 .is_bf16 = is_bf16_,
                                 .row_count = row_count_,
                                 .head_dim = head_dim,
                                 .scale = args_.softmax_scale,
                                 .soft_cap = args_.soft_cap,
                                 .bias = bias_,
                                 .begin = begin_,
                                 .end = end_,
                                 .out = out,
                                 .lse = lse};
    if (!is_tail_) return kernels->attend_tiles(query, Tiles());
    const DecodeTail& tail = args_.tail;
    const auto side = [&](const void* data, float scale) {
      const uint64_t bytes = ElementBytes(tail.type);
      const bool fp8 = tail.type == ElementType::kFp8E4m3;
      return cpu::AttendSide{
          .format = fp8 ? cpu::AttendFormat::kFp8 : cpu::AttendFormat::kBf16,
          .data = static_cast<const std::byte*>(data) + kv_head_idx_ * tail.head_stride * bytes,
          .stride_bytes = tail.token_stride * bytes,
          .multiplier = fp8 ? scale : 1.0F};
    };
    kernels->attend_rows(query, {.token_count = token_count_,
                                 .k = side(tail.k, tail.k_scale),
                                 .v = side(tail.v, tail.v_scale)});
    return true;
  }

  uint32_t row_count() const { return row_count_; }

 private:
  cpu::AttendTiles Tiles() const {
    const BlockShape& shape = args_.block_shape;
    const TileShape tile = TileOf(shape);
    const LayerFormat format = FormatOf(args_);
    const auto side = [&](SideFormat side_format, uint64_t offset, float scale) {
      return cpu::TileSide{.format = AttendFormatOf(side_format),
                           .data_offset = offset,
                           .scale_offset = offset + DataBytes(tile),
                           .multiplier = side_format == SideFormat::kBf16 ? 1.0F : scale};
    };
    return {.blocks = args_.block_table.data() + first_token_ / shape.block_tokens,
            .block_count = token_count_ / shape.block_tokens,
            .tile_offset = LayerOffset(shape, args_.layer_formats, args_.layer_idx) +
                           kv_head_idx_ * TileBytes(tile, format),
            .block_tokens = shape.block_tokens,
            .k = side(format.k, 0, args_.g_k[kv_head_idx_]),
            .v = side(format.v, SideBytes(tile, format.k), args_.g_v[kv_head_idx_])};
  }

  void LoadQuery(uint64_t call_row, uint32_t i) {
    const uint32_t head_dim = args_.block_shape.head_dim;
    float* row = query_ + uint64_t{i} * head_dim;
    LoadRow({.type = args_.query_type, .data = args_.query, .token_stride = head_dim}, call_row,
            head_dim, row);
    bias_[i] = 0.0F;
    const uint64_t channels = uint64_t{kv_head_idx_} * head_dim;
    if (!is_tail_ && !args_.k_mean.empty()) {
      double dot = 0;
      for (uint32_t d = 0; d < head_dim; ++d) {
        dot += static_cast<double>(row[d]) * static_cast<double>(args_.k_mean[channels + d]);
      }
      bias_[i] = static_cast<float>(dot * static_cast<double>(args_.softmax_scale));
    }
    if (!is_tail_ && !args_.k_smooth.empty()) {
      for (uint32_t d = 0; d < head_dim; ++d) row[d] *= args_.k_smooth[channels + d];
    }
    is_bf16_ = is_bf16_ && std::all_of(row, row + head_dim,
                                       [](float x) { return Bf16ToFloat(FloatToBf16(x)) == x; });
  }

  void SetVisible(uint32_t query_idx, uint32_t i) {
    const uint64_t part_end = args_.first_token + args_.sealed_token_count + args_.tail.token_count;
    const uint64_t context = args_.context_token_count == 0 ? part_end : args_.context_token_count;
    const uint64_t end = context - (args_.query_len - 1 - query_idx);
    const uint64_t begin = args_.window == 0 || args_.window > end ? 0 : end - args_.window;
    const uint64_t first = args_.first_token + first_token_;
    begin_[i] = begin < first ? 0 : std::min(begin - first, token_count_);
    end_[i] = end < first ? 0 : std::min(end - first, token_count_);
  }

  const DecodeArgs& args_;
  uint32_t kv_head_idx_;
  bool is_tail_;
  uint64_t first_token_;  // Of the split, relative to the call.
  uint64_t token_count_ = 0;
  uint32_t row_count_;
  bool is_bf16_ = true;
  float query_[cpu::kAttendRowsMax * kHeadDimMax];
  float bias_[cpu::kAttendRowsMax];
  uint64_t begin_[cpu::kAttendRowsMax];
  uint64_t end_[cpu::kAttendRowsMax];
};

// Merges a later part of the same row into (out, lse).
void Fold(const float* part_out, float part_lse, uint32_t head_dim, float* out, float* lse) {
  if (part_lse == kNegativeInfinity) return;
  if (*lse == kNegativeInfinity) {
    std::copy_n(part_out, head_dim, out);
    *lse = part_lse;
    return;
  }
  const float top = std::fmax(*lse, part_lse);
  const float weight = std::exp(*lse - top);
  const float part_weight = std::exp(part_lse - top);
  const float sum = weight + part_weight;
  for (uint32_t i = 0; i < head_dim; ++i) {
    out[i] = (out[i] * weight + part_out[i] * part_weight) / sum;
  }
  *lse = top + std::log(sum);
}

// A sink is a part without value.
void AddSinks(const DecodeArgs& args) {
  if (args.sinks.empty()) return;
  const uint32_t head_dim = args.block_shape.head_dim;
  const float zeros[kHeadDimMax] = {};
  for (uint64_t row = 0; row < args.lse.size(); ++row) {
    Fold(zeros, args.sinks[row % args.query_head_count], head_dim, args.out.data() + row * head_dim,
         &args.lse[row]);
  }
}

// Runs the splits of a kv head in order and folds each into the results at once.
bool RunInOrder(const DecodeArgs& args, const Plan& plan, uint32_t kv_head_idx) {
  const uint32_t head_dim = args.block_shape.head_dim;
  float out[cpu::kAttendRowsMax * kHeadDimMax];
  float lse[cpu::kAttendRowsMax];
  for (uint32_t split_idx = 0; split_idx < plan.split_count(); ++split_idx) {
    for (uint32_t first = 0; first < plan.rows(); first += cpu::kAttendRowsMax) {
      const SplitPass pass(args, plan, kv_head_idx, split_idx, first);
      if (!pass.Run(out, lse)) return false;
      for (uint32_t i = 0; i < pass.row_count(); ++i) {
        const uint64_t row = CallRow(args, plan, kv_head_idx, first + i);
        Fold(out + uint64_t{i} * head_dim, lse[i], head_dim, args.out.data() + row * head_dim,
             &args.lse[row]);
      }
    }
  }
  return true;
}

// All (kv head, split) pairs as tasks; the results lie in the workspace until all are done.
class ParallelRun {
 public:
  ParallelRun(const DecodeArgs& args, const Plan& plan)
      : args_(args),
        plan_(plan),
        head_dim_(args.block_shape.head_dim),
        task_count_(args.block_shape.kv_head_count * plan.split_count()),
        out_(reinterpret_cast<float*>(args.workspace.data())),
        lse_(out_ + uint64_t{task_count_} * plan.rows() * head_dim_) {}

  bool Run() {
    args_.executor->run(
        args_.executor->self, task_count_,
        [](void* self, uint32_t task_idx) { static_cast<ParallelRun*>(self)->RunTask(task_idx); },
        this);
    // The executor's return orders the tasks' stores before this load.
    if (damaged_.load(std::memory_order_relaxed)) return false;
    for (uint32_t task_idx = 0; task_idx < task_count_; ++task_idx) {
      for (uint32_t i = 0; i < plan_.rows(); ++i) {
        const uint64_t at = uint64_t{task_idx} * plan_.rows() + i;
        const uint64_t row = CallRow(args_, plan_, task_idx / plan_.split_count(), i);
        Fold(out_ + at * head_dim_, lse_[at], head_dim_, args_.out.data() + row * head_dim_,
             &args_.lse[row]);
      }
    }
    return true;
  }

 private:
  void RunTask(uint32_t task_idx) {
    for (uint32_t first = 0; first < plan_.rows(); first += cpu::kAttendRowsMax) {
      const uint64_t at = uint64_t{task_idx} * plan_.rows() + first;
      const SplitPass pass(args_, plan_, task_idx / plan_.split_count(),
                           task_idx % plan_.split_count(), first);
      if (!pass.Run(out_ + at * head_dim_, lse_ + at)) {
        damaged_.store(true, std::memory_order_relaxed);
      }
    }
  }

  const DecodeArgs& args_;
  const Plan& plan_;
  uint32_t head_dim_;
  uint32_t task_count_;
  float* out_;  // [task][row][head_dim]
  float* lse_;  // [task][row]
  std::atomic<bool> damaged_{false};
};

uint64_t WorkspaceBytes(const DecodeArgs& args, const Plan& plan) {
  return uint64_t{args.block_shape.kv_head_count} * plan.split_count() * plan.rows() *
         (args.block_shape.head_dim + 1) * sizeof(float);
}

Status ValidateExecutor(const DecodeArgs& args, const Plan& plan) {
  if (args.executor->run == nullptr) return Status::InvalidArgument("executor has no run");
  if (args.workspace.size() < WorkspaceBytes(args, plan)) {
    return Status::InvalidArgument("workspace is smaller than DecodeWorkspaceBytes");
  }
  if (reinterpret_cast<uintptr_t>(args.workspace.data()) % alignof(float) != 0) {
    return Status::InvalidArgument("workspace is not aligned");
  }
  if (uint64_t{args.block_shape.kv_head_count} * plan.split_count() > UINT32_MAX) {
    return Status::InvalidArgument("too many tasks");
  }
  return Status();
}

}  // namespace

Status Decode(const DecodeArgs& args) {
  if (const Status status = ValidateArgs(args); !status.ok()) return status;
  const Plan plan(args);
  if (args.executor != nullptr) {
    if (const Status status = ValidateExecutor(args, plan); !status.ok()) return status;
  }
  std::fill(args.out.begin(), args.out.end(), 0.0F);
  std::fill(args.lse.begin(), args.lse.end(), kNegativeInfinity);
  bool ok = true;
  if (args.executor != nullptr) {
    ok = ParallelRun(args, plan).Run();
  } else {
    for (uint32_t head = 0; ok && head < args.block_shape.kv_head_count; ++head) {
      ok = RunInOrder(args, plan, head);
    }
  }
  if (!ok) return Status::DataLoss("a scale byte is above 0x7E");
  AddSinks(args);
  return Status();
}

uint64_t DecodeWorkspaceBytes(const DecodeArgs& args) {
  if (!ValidateArgs(args).ok()) return 0;
  return WorkspaceBytes(args, Plan(args));
}

}  // namespace kvtier::kernels
