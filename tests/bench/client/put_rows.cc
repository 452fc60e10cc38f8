// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <numeric>
#include <random>

#include "client/include/kvtier/device_kernels.h"
#include "tests/bench/client/rig.h"
#include "tests/bench/client/rows.h"
#include "tests/bench/client/timing.h"

namespace kvtier::bench {
namespace {

// The KV of a model of 8 billion parameters: 2.4 MB a block, of 8.4 MB of BF16.
Layout ModelLayout() {
  Layout layout;
  layout.model = "bench";
  layout.layer_count = 32;
  layout.kv_head_count = 8;
  layout.head_dim = 128;
  layout.block_tokens = 64;
  return layout;
}

// K and V of one prefill chunk, as an engine has them, and what sealing them takes.
class Chunk {
 public:
  Chunk(const Layout& layout, const client::Namespace& ns, uint32_t block_count)
      : layout_(layout),
        kernels_(ValueOf(client::DeviceKernels::Create(layout, ns))),
        side_values_(uint64_t{block_count} * layout.block_tokens * layout.layer_count *
                     layout.kv_head_count * layout.head_dim),
        scales_(uint64_t{layout.layer_count} * layout.kv_head_count, 0.125F) {
    // BF16 values of both signs below 4.
    std::minstd_rand random(1);
    for (std::vector<uint16_t>* side : {&k_, &v_}) {
      side->resize(side_values_);
      for (uint16_t& value : *side) {
        value = static_cast<uint16_t>((random() & 0x8000U) | (0x3F00U + (random() >> 8 & 0x7FU)));
      }
    }
    for (uint32_t i = 0; i < block_count; ++i) first_slots_.push_back(i * layout.block_tokens);
  }

  uint64_t bf16_bytes() const { return 2 * sizeof(uint16_t) * side_values_; }
  void SealInto(std::span<const client::MappedBlock> blocks) {
    const uint64_t head_stride = layout_.head_dim;
    const uint64_t token_stride = head_stride * layout_.kv_head_count;
    const client::KvRows rows{.k = k_.data(),
                              .v = v_.data(),
                              .layer_stride = side_values_ / layout_.layer_count,
                              .head_stride = head_stride,
                              .token_stride = token_stride};
    MustBeOk(kernels_.Seal(blocks, first_slots_, rows,
                           {.g_k = scales_.data(), .g_v = scales_.data()}, &counters_, {}, {}));
  }

 private:
  const Layout layout_;
  const client::DeviceKernels kernels_;
  const uint64_t side_values_;
  const std::vector<float> scales_;
  std::vector<uint16_t> k_;
  std::vector<uint16_t> v_;
  std::vector<uint32_t> first_slots_;
  kernels::cuda::SealCounters counters_;
};

}  // namespace

void MeasurePut(const Settings& settings, std::vector<Row>* rows) {
  const Layout layout = ModelLayout();
  const uint64_t chunk_bytes = uint64_t{settings.put_block_count} * layout.BlockBytes();
  Rig rig({.kvtierd = settings.kvtierd,
           .memory_bytes = 256ULL << 20,
           .segment_bytes = 64ULL << 20,
           .layout = layout});
  Chunk chunk(layout, rig.ns(), settings.put_block_count);
  // The kernel alone writes to memory that nobody else knows of.
  std::vector<std::byte> own_bytes(chunk_bytes);
  std::vector<client::MappedBlock> own_blocks;
  for (uint32_t i = 0; i < settings.put_block_count; ++i) {
    own_blocks.push_back({.status = BlockStatus::kOk,
                          .tier = 1,
                          .bytes = std::span(own_bytes).subspan(i * size_t{layout.BlockBytes()},
                                                                layout.BlockBytes())});
  }
  std::vector<double> ratios;
  std::vector<double> put_rates;
  std::vector<double> seal_rates;
  const auto bytes = static_cast<double>(chunk.bf16_bytes());
  for (int round = 0; round <= 2 * settings.round_count; ++round) {
    const std::vector<Key> keys =
        testing::MakeChain(rig.ns(), static_cast<uint32_t>(round), settings.put_block_count);
    const double seal_seconds = Seconds([&] { chunk.SealInto(own_blocks); });
    const double put_seconds = Seconds([&] {
      const client::Fill fill = ValueOf(rig.client().Reserve(rig.ns(), std::nullopt, keys));
      chunk.SealInto(fill.blocks);
      for (const BlockStatus status : ValueOf(rig.client().Commit(rig.ns(), fill))) {
        if (status != BlockStatus::kOk) Die("a block was not taken");
      }
    });
    // The slots are those of the next round.
    MustBeOk(rig.client().ReportBad(rig.ns(), keys));
    if (round == 0) continue;  // the first one warms up
    ratios.push_back(seal_seconds / put_seconds);
    put_rates.push_back(bytes / put_seconds / 1e9);
    seal_rates.push_back(bytes / seal_seconds / 1e9);
  }
  char note[64];
  std::snprintf(note, sizeof(note), "%.2f and %.2f GB/s of BF16", Median(put_rates),
                Median(seal_rates));
  rows->push_back(
      {.name = "put on the cpu device: reserve, seal, commit over the seal kernel alone",
       .value = Median(ratios),
       .must = 0.85,
       .goal = 0.97,
       .note = note});
}

}  // namespace kvtier::bench
