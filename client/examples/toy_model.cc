// SPDX-License-Identifier: Apache-2.0
#include "client/examples/toy_model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>

namespace kvtier::example {
namespace {

constexpr uint32_t kWidth = 64;

float FloatOf(uint16_t bf16) { return std::bit_cast<float>(uint32_t{bf16} << 16); }

// Rounds to nearest, ties to even. Requires: finite.
uint16_t Bf16Of(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// In [-1, 1), from the generator's bits: distributions differ between libraries.
float Uniform(std::mt19937* random) {
  return static_cast<float>(static_cast<int32_t>((*random)())) * 0x1p-31F;
}

// Mean square 1.
void Normalize(std::vector<float>* x) {
  float sum = 0;
  for (const float value : *x) sum += value * value;
  const float scale = 1.0F / std::sqrt(sum / static_cast<float>(x->size()) + 1e-6F);
  for (float& value : *x) value *= scale;
}

}  // namespace

std::vector<float> ToyModel::Matrix::Times(std::span<const float> x) const {
  std::vector<float> result(values.size() / width);
  for (size_t row = 0; row < result.size(); ++row) {
    for (uint32_t i = 0; i < width; ++i) result[row] += values[row * width + i] * x[i];
  }
  return result;
}

ToyModel::ToyModel(const CacheShape& shape) : shape_(shape), layers_(shape.layer_count) {
  std::mt19937 random(1);
  const uint32_t kv_width = shape.kv_head_count * shape.head_dim;
  const auto fill = [&random](Matrix* matrix, uint32_t rows, uint32_t width) {
    matrix->width = width;
    matrix->values.resize(size_t{rows} * width);
    const float scale = std::sqrt(3.0F / static_cast<float>(width));
    for (float& value : matrix->values) value = scale * Uniform(&random);
  };
  for (Layer& layer : layers_) {
    fill(&layer.query, kQueriesPerKvHead * kv_width, kWidth);
    fill(&layer.key, kv_width, kWidth);
    fill(&layer.value, kv_width, kWidth);
    fill(&layer.out, kWidth, kQueriesPerKvHead * kv_width);
  }
}

std::vector<float> ToyModel::Embed(uint32_t token, uint32_t position) const {
  std::mt19937 random(token);
  std::vector<float> x(kWidth);
  for (uint32_t i = 0; i < kWidth; ++i) {
    const float angle = static_cast<float>(position) / static_cast<float>(1 + i);
    x[i] = 1.7F * Uniform(&random) + 0.5F * std::sin(angle);
  }
  return x;
}

void ToyModel::Store(std::span<const float> heads, uint32_t layer, bool is_v, uint32_t position,
                     std::span<const uint32_t> pages, PagedCache* cache) const {
  const uint32_t page = pages[position / shape_.page_tokens];
  const size_t slot = position % shape_.page_tokens;
  for (uint32_t head = 0; head < shape_.kv_head_count; ++head) {
    uint16_t* const row = cache->Rows(page, layer, is_v, head) + slot * shape_.head_dim;
    for (uint32_t i = 0; i < shape_.head_dim; ++i) {
      row[i] = Bf16Of(heads[size_t{head} * shape_.head_dim + i]);
    }
  }
}

std::vector<float> ToyModel::Attend(std::span<const float> queries, uint32_t layer,
                                    uint32_t position, std::span<const uint32_t> pages,
                                    PagedCache* cache) const {
  std::vector<float> out(queries.size());
  std::vector<float> weights(position + 1);
  const float scale = 1.0F / std::sqrt(static_cast<float>(shape_.head_dim));
  const auto row_of = [&](uint32_t token, bool is_v, uint32_t kv_head) {
    return cache->Rows(pages[token / shape_.page_tokens], layer, is_v, kv_head) +
           size_t{token % shape_.page_tokens} * shape_.head_dim;
  };
  for (size_t head = 0; head < queries.size() / shape_.head_dim; ++head) {
    const auto kv_head = static_cast<uint32_t>(head / kQueriesPerKvHead);
    const auto query = queries.subspan(head * shape_.head_dim, shape_.head_dim);
    for (uint32_t token = 0; token <= position; ++token) {
      const uint16_t* const key = row_of(token, false, kv_head);
      float score = 0;
      for (uint32_t i = 0; i < shape_.head_dim; ++i) score += query[i] * FloatOf(key[i]);
      weights[token] = score * scale;
    }
    const float largest = *std::max_element(weights.begin(), weights.end());
    float sum = 0;
    for (float& weight : weights) sum += weight = std::exp(weight - largest);
    for (uint32_t token = 0; token <= position; ++token) {
      const uint16_t* const value = row_of(token, true, kv_head);
      const float share = weights[token] / sum;
      for (uint32_t i = 0; i < shape_.head_dim; ++i) {
        out[head * shape_.head_dim + i] += share * FloatOf(value[i]);
      }
    }
  }
  return out;
}

std::vector<float> ToyModel::Step(uint32_t token, uint32_t position,
                                  std::span<const uint32_t> pages, PagedCache* cache) const {
  std::vector<float> x = Embed(token, position);
  std::vector<float> attended;
  for (uint32_t layer = 0; layer < shape_.layer_count; ++layer) {
    const Layer& weights = layers_[layer];
    Normalize(&x);
    Store(weights.key.Times(x), layer, false, position, pages, cache);
    Store(weights.value.Times(x), layer, true, position, pages, cache);
    attended = Attend(weights.query.Times(x), layer, position, pages, cache);
    const std::vector<float> added = weights.out.Times(attended);
    for (uint32_t i = 0; i < kWidth; ++i) x[i] += added[i];
  }
  return attended;
}

}  // namespace kvtier::example
