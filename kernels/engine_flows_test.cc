// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/decode.h"
#include "kernels/gather.h"
#include "kernels/nvfp4.h"
#include "kernels/seal.h"
#include "kernels/workspace.h"

// The three flows of an engine, in code that docs/engine-flows.md quotes by the names of its
// functions: InitialPrefill, Extend, DecodeStep.

namespace kvtier::kernels {
namespace {

constexpr BlockShape kShape{
    .layer_count = 2, .kv_head_count = 2, .block_tokens = 16, .head_dim = 64};
constexpr uint32_t kGroupHeads = 3;
constexpr uint32_t kQueryHeads = kShape.kv_head_count * kGroupHeads;
constexpr uint64_t kTokenStride = uint64_t{kShape.kv_head_count} * kShape.head_dim;
constexpr float kSoftmaxScale = 0.125F;
constexpr float kFp8Scale = 0.02F;
constexpr uint64_t kContextMax = 256;

// What an engine keeps of one sequence beside its blocks: K and V of a layer, BF16
// [token][kv head][dim]. A real one has pages (element.h) and drops what is sealed.
struct LayerCache {
  std::vector<uint16_t> k, v;
};

struct Engine {
  LayerCache layers[kShape.layer_count];
  uint64_t token_count = 0;
  std::vector<std::vector<std::byte>> blocks;  // kvtier's: a lease or a buffer for Put.
  std::vector<const std::byte*> block_table;
  std::vector<float> g_k = std::vector<float>(kShape.kv_head_count, 0x1p-7F);
  std::vector<float> g_v = std::vector<float>(kShape.kv_head_count, 0x1p-7F);

  uint64_t sealed_token_count() const { return blocks.size() * kShape.block_tokens; }
};

// Stands for the model's projections: appends K and V of new tokens to all layers.
void Project(Engine* engine, uint32_t token_count, std::mt19937* random) {
  std::normal_distribution<float> normal;
  for (LayerCache& layer : engine->layers) {
    for (auto* side : {&layer.k, &layer.v}) {
      for (uint64_t i = 0; i < token_count * kTokenStride; ++i) {
        side->push_back(FloatToBf16(normal(*random)));
      }
    }
  }
  engine->token_count += token_count;
}

// Stands for the engine's attention kernel: one query token [query head][dim] over rows that it can
// read, here of any type.
std::vector<double> EngineAttention(std::span<const float> query, const WorkspaceRows& rows,
                                    uint64_t token_count) {
  const auto load = [&](bool is_v, uint64_t token, uint32_t head, uint32_t dim) {
    const uint64_t at = token * rows.token_stride + head * rows.head_stride + dim;
    const void* data = is_v ? rows.v : rows.k;
    if (rows.type == ElementType::kFp8E4m3) {
      const float scale = is_v ? rows.v_scale : rows.k_scale;
      return static_cast<double>(DecodeE4m3Scale(static_cast<const uint8_t*>(data)[at]) * scale);
    }
    return static_cast<double>(Bf16ToFloat(static_cast<const uint16_t*>(data)[at]));
  };
  std::vector<double> out(query.size());
  for (uint32_t head = 0; head < kQueryHeads; ++head) {
    double sum = 0;
    double* target = &out[uint64_t{head} * kShape.head_dim];
    for (uint64_t token = 0; token < token_count; ++token) {
      double score = 0;
      for (uint32_t dim = 0; dim < kShape.head_dim; ++dim) {
        score += static_cast<double>(query[head * kShape.head_dim + dim]) *
                 load(false, token, head / kGroupHeads, dim);
      }
      const double weight = std::exp(score * static_cast<double>(kSoftmaxScale));
      sum += weight;
      for (uint32_t dim = 0; dim < kShape.head_dim; ++dim) {
        target[dim] += weight * load(true, token, head / kGroupHeads, dim);
      }
    }
    for (uint32_t dim = 0; dim < kShape.head_dim; ++dim) target[dim] /= sum;
  }
  return out;
}

WorkspaceRows OwnRows(LayerCache* layer) {
  return {.type = ElementType::kBf16,
          .k = layer->k.data(),
          .v = layer->v.data(),
          .token_stride = kTokenStride,
          .head_stride = kShape.head_dim};
}

// Seals every block that has become full, straight from the engine's rows.
Status SealFullBlocks(Engine* engine, SealStats* stats) {
  while (engine->token_count >= engine->sealed_token_count() + kShape.block_tokens) {
    std::vector<std::byte> block(BlockBytes(kShape));
    const uint64_t first = engine->sealed_token_count() * kTokenStride;
    for (uint32_t layer = 0; layer < kShape.layer_count; ++layer) {
      for (uint32_t head = 0; head < kShape.kv_head_count; ++head) {
        const uint64_t at = first + uint64_t{head} * kShape.head_dim;
        const Status status = SealTile(
            TileOf(kShape),
            {.data = engine->layers[layer].k.data() + at, .token_stride = kTokenStride},
            {.data = engine->layers[layer].v.data() + at, .token_stride = kTokenStride},
            {.g_k = engine->g_k[head], .g_v = engine->g_v[head]},
            std::span(block).subspan(TileOffset(kShape, layer, head), TileBytes(TileOf(kShape))),
            stats);
        if (!status.ok()) return status;
      }
    }
    engine->blocks.push_back(std::move(block));
    engine->block_table.push_back(engine->blocks.back().data());
  }
  return Status();
}

// Flow 1. Attention reads the engine's own rows and never waits for blocks.
Status InitialPrefill(Engine* engine, uint32_t prompt_tokens, std::span<const float> query,
                      std::vector<double>* out, std::mt19937* random) {
  Project(engine, prompt_tokens, random);
  for (LayerCache& layer : engine->layers) {
    *out = EngineAttention(query, OwnRows(&layer), engine->token_count);
  }
  SealStats stats;
  return SealFullBlocks(engine, &stats);
}

// Flow 2. The prefix is sealed; a chunk of new tokens attends over a workspace that all layers use
// in turn: the gathered prefix, then the engine's own rows. Writes the last token's output a layer.
Status Extend(Engine* engine, uint32_t chunk_tokens, std::span<const float> query, ElementType type,
              std::span<std::byte> workspace, std::vector<std::vector<double>>* out,
              std::mt19937* random) {
  Project(engine, chunk_tokens, random);
  WorkspaceRows rows = DenseWorkspace(kShape, kContextMax, type, workspace.data());
  rows.k_scale = rows.v_scale = kFp8Scale;
  const uint64_t sealed = engine->sealed_token_count();
  for (uint32_t layer = 0; layer < kShape.layer_count; ++layer) {
    const Status status = GatherPrefix({.block_shape = kShape,
                                        .layer_idx = layer,
                                        .block_table = engine->block_table,
                                        .sealed_token_count = sealed,
                                        .g_k = engine->g_k,
                                        .g_v = engine->g_v,
                                        .target = rows});
    if (!status.ok()) return status;
    for (uint64_t i = sealed * kTokenStride; i < engine->token_count * kTokenStride; ++i) {
      const std::pair<void*, uint16_t> elements[] = {{rows.k, engine->layers[layer].k[i]},
                                                     {rows.v, engine->layers[layer].v[i]}};
      for (const auto& [data, bits] : elements) {
        const float x = Bf16ToFloat(bits);
        if (type == ElementType::kBf16) {
          static_cast<uint16_t*>(data)[i] = bits;
        } else {
          static_cast<uint8_t*>(data)[i] = static_cast<uint8_t>(
              EncodeE4m3Scale(std::fabs(x) / kFp8Scale) | (x < 0.0F ? 0x80 : 0));
        }
      }
    }
    out->push_back(EngineAttention(query, rows, engine->token_count));
  }
  return Status();
}

// Flow 3. Blocks are read in place, the unsealed tokens from the engine's rows.
Status DecodeStep(const Engine& engine, uint32_t layer, std::span<const float> query,
                  std::span<float> out, std::span<float> lse) {
  const uint64_t sealed = engine.sealed_token_count();
  return Decode({.block_shape = kShape,
                 .layer_idx = layer,
                 .query = query.data(),
                 .query_head_count = kQueryHeads,
                 .block_table = engine.block_table,
                 .sealed_token_count = sealed,
                 .tail = {.k = engine.layers[layer].k.data() + sealed * kTokenStride,
                          .v = engine.layers[layer].v.data() + sealed * kTokenStride,
                          .token_count = static_cast<uint32_t>(engine.token_count - sealed),
                          .token_stride = kTokenStride,
                          .head_stride = kShape.head_dim},
                 .softmax_scale = kSoftmaxScale,
                 .g_k = engine.g_k,
                 .g_v = engine.g_v,
                 .out = out,
                 .lse = lse});
}

std::vector<float> RandomQuery(std::mt19937* random) {
  std::normal_distribution<float> normal;
  std::vector<float> query(uint64_t{kQueryHeads} * kShape.head_dim);
  for (float& x : query) x = Bf16ToFloat(FloatToBf16(normal(*random)));
  return query;
}

double Difference(std::span<const double> a, std::span<const float> b) {
  double error = 0;
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    error = std::fmax(error, std::fabs(a[i] - static_cast<double>(b[i])));
    largest = std::fmax(largest, std::fabs(a[i]));
  }
  return error / largest;
}

// The error of NVFP4 itself on these data is about 0.1 of the largest output.
void RunFlows(ElementType type, double workspace_error) {
  std::mt19937 random(20261129);
  Engine engine;
  const std::vector<float> query = RandomQuery(&random);
  std::vector<double> prefill_out;
  ASSERT_TRUE(InitialPrefill(&engine, 53, query, &prefill_out, &random).ok());
  ASSERT_EQ(engine.sealed_token_count(), 48U);
  std::vector<float> out(query.size());
  std::vector<float> lse(kQueryHeads);
  ASSERT_TRUE(DecodeStep(engine, kShape.layer_count - 1, query, out, lse).ok());
  EXPECT_LT(Difference(prefill_out, out), 0.25);
  EXPECT_GT(Difference(prefill_out, out), 0.01);  // The blocks were read, not the rows.

  std::vector<std::byte> workspace(WorkspaceBytes(kShape, kContextMax, type));
  std::vector<std::vector<double>> extend_out;
  ASSERT_TRUE(Extend(&engine, 20, query, type, workspace, &extend_out, &random).ok());
  for (uint32_t layer = 0; layer < kShape.layer_count; ++layer) {
    ASSERT_TRUE(DecodeStep(engine, layer, query, out, lse).ok());  // 3 blocks, 25 tokens of tail.
    EXPECT_LT(Difference(extend_out[layer], out), workspace_error) << layer;
  }

  SealStats stats;
  ASSERT_TRUE(SealFullBlocks(&engine, &stats).ok());
  ASSERT_EQ(engine.sealed_token_count(), 64U);
  EXPECT_EQ(stats.nonfinite_count + stats.saturated_count, 0U);
  ASSERT_TRUE(DecodeStep(engine, 0, query, out, lse).ok());  // 4 blocks, 9 tokens of tail.
  EXPECT_LT(Difference(extend_out[0], out), 0.25);
}

TEST(EngineFlows, ExtendOverBf16EqualsDecodeInPlace) { RunFlows(ElementType::kBf16, 0x1p-9); }

TEST(EngineFlows, ExtendOverFp8IsWithinTheRoundingOfFp8) {
  RunFlows(ElementType::kFp8E4m3, 0x1p-4);
}

}  // namespace
}  // namespace kvtier::kernels
