// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "client/src/device_kernels_impl.h"
#include "kernels/decode.h"
#include "kernels/gather.h"
#include "kernels/seal.h"
#include "proto/base/status_util.h"

namespace kvtier::client {
namespace {

using kernels::BlockShape;

// The rows of one block, layer and head.
template <typename Rows>
Rows RowsOf(const TransferCall& call, void* data, const float* scales, uint32_t layer_idx,
            uint32_t head_idx, uint32_t first_slot) {
  const KvRows& kv = *call.rows;
  uint64_t elements = layer_idx * kv.layer_stride + head_idx * kv.head_stride;
  Rows rows{.type = kv.type, .token_stride = kv.token_stride};
  if (kv.page_tokens == 0) {
    elements += first_slot * kv.token_stride;
  } else {
    rows.paging = {.page_table = kv.page_table,
                   .page_table_count = kv.page_table_count,
                   .page_tokens = kv.page_tokens,
                   .page_stride = kv.page_stride,
                   .first_slot = first_slot};
  }
  rows.data = static_cast<std::byte*>(data) + elements * kernels::ElementBytes(kv.type);
  if (scales != nullptr && kv.type == kernels::ElementType::kFp8E4m3) {
    rows.scale = scales[layer_idx * call.shape.kv_head_count + head_idx];
  }
  return rows;
}

// Calls work(bytes of the tile, rows of K, rows of V, g_k, g_v) for every tile, up to an error.
template <typename Rows, typename Work>
absl::Status ForEachTile(const TransferCall& call, const Work& work) {
  const BlockShape& shape = call.shape;
  const uint64_t tile_bytes = kernels::TileBytes(kernels::TileOf(shape));
  for (size_t i = 0; i < call.blocks.size(); ++i) {
    if (call.blocks[i].status != BlockStatus::kOk) continue;
    for (uint32_t layer_idx = 0; layer_idx < shape.layer_count; ++layer_idx) {
      for (uint32_t head_idx = 0; head_idx < shape.kv_head_count; ++head_idx) {
        const uint32_t at = layer_idx * shape.kv_head_count + head_idx;
        KVT_RETURN_IF_ERROR(
            FromKernels(work(call.blocks[i].bytes.subspan(
                                 kernels::TileOffset(shape, layer_idx, head_idx), tile_bytes),
                             RowsOf<Rows>(call, call.rows->k, call.rows->k_scales, layer_idx,
                                          head_idx, call.first_slots[i]),
                             RowsOf<Rows>(call, call.rows->v, call.rows->v_scales, layer_idx,
                                          head_idx, call.first_slots[i]),
                             call.scales->g_k[at], call.scales->g_v[at])));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status SealOnCpu(const TransferCall& call, kernels::cuda::SealCounters* counters) {
  kernels::SealStats stats;
  const absl::Status status = ForEachTile<kernels::ConstRows>(
      call, [&](std::span<std::byte> tile, const kernels::ConstRows& k, const kernels::ConstRows& v,
                float g_k, float g_v) {
        return kernels::SealTile(kernels::TileOf(call.shape), k, v, {.g_k = g_k, .g_v = g_v}, tile,
                                 &stats);
      });
  counters->nonfinite_count += static_cast<uint32_t>(stats.nonfinite_count);
  counters->saturated_count += static_cast<uint32_t>(stats.saturated_count);
  return status;
}

absl::Status GatherOnCpu(const TransferCall& call, kernels::cuda::GatherCounters* counters) {
  return ForEachTile<kernels::MutableRows>(
      call, [&](std::span<const std::byte> tile, const kernels::MutableRows& k,
                const kernels::MutableRows& v, float g_k, float g_v) {
        const kernels::Status status =
            kernels::GatherTile(kernels::TileOf(call.shape), tile,
                                kernels::GatherOptions{.g_k = g_k, .g_v = g_v}, k, v);
        if (status.code() == kernels::StatusCode::kDataLoss) ++counters->invalid_count;
        return status;
      });
}

absl::Status DecodeOnCpu(const BlockShape& shape, const DecodeStep& step,
                         std::span<std::byte> table) {
  const uint64_t rows = uint64_t{step.query_len} * step.query_head_count;
  const uint64_t values = rows * shape.head_dim;
  const size_t scales_at = size_t{step.layer_idx} * shape.kv_head_count;
  auto* const addresses = reinterpret_cast<const std::byte**>(table.data());
  for (size_t i = 0; i < step.sequences.size(); ++i) {
    const DecodeSequence& sequence = step.sequences[i];
    std::ranges::transform(sequence.blocks, addresses,
                           [](const MappedBlock& block) { return block.bytes.data(); });
    const kernels::DecodeArgs args{
        .block_shape = shape,
        .layer_idx = step.layer_idx,
        .query_type = step.query_type,
        .query = static_cast<const std::byte*>(step.query) +
                 i * values * kernels::ElementBytes(step.query_type),
        .query_head_count = step.query_head_count,
        .block_table = {addresses, sequence.blocks.size()},
        .sealed_token_count = uint64_t{shape.block_tokens} * sequence.blocks.size(),
        .tail = {.k = sequence.tail_k,
                 .v = sequence.tail_v,
                 .token_count = sequence.tail_token_count,
                 .token_stride = step.tail_token_stride,
                 .head_stride = step.tail_head_stride,
                 .type = step.tail_type,
                 .k_scale = step.tail_k_scale,
                 .v_scale = step.tail_v_scale},
        .softmax_scale = step.softmax_scale,
        .g_k = {step.scales.g_k + scales_at, shape.kv_head_count},
        .g_v = {step.scales.g_v + scales_at, shape.kv_head_count},
        .out = {step.out + i * values, values},
        .lse = {step.lse + i * rows, rows},
        .query_len = step.query_len,
        .window = step.window,
        .soft_cap = step.soft_cap,
        .sinks = step.sinks == nullptr ? std::span<const float>()
                                       : std::span<const float>(step.sinks, step.query_head_count)};
    KVT_RETURN_IF_ERROR(FromKernels(kernels::Decode(args)));
  }
  return absl::OkStatus();
}

}  // namespace kvtier::client
