// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/emu/warp_functions.h"

#include <bit>

#include "kernels/nvfp4.h"

namespace kvtier::kernels::cuda::emu {
namespace {

constexpr uint32_t kUndefined = 0xDEADBEEF;

bool HasLane(const WarpExchange& exchange, uint32_t lane) {
  return lane < kWarpLanes && (exchange.mask >> lane & 1U) != 0;
}

template <typename SourceLane>
void Shuffle(WarpExchange* exchange, const SourceLane& source_lane) {
  for (uint32_t lane = 0; lane < kWarpLanes; ++lane) {
    if (!HasLane(*exchange, lane)) continue;
    const uint32_t source = source_lane(lane, exchange->in[lane][1]);
    exchange->out[lane][0] = HasLane(*exchange, source) ? exchange->in[source][0] : kUndefined;
  }
}

// Element `idx` (0 or 1) of a register that holds two 16-bit elements.
uint16_t Half(uint32_t word, uint32_t idx) { return static_cast<uint16_t>(word >> (16 * idx)); }

template <typename Widen>
void Mma(WarpExchange* exchange, const Widen& widen) {
  double a[16][16];
  double b[16][8];
  for (uint32_t lane = 0; lane < kWarpLanes; ++lane) {
    const uint32_t g = lane / 4;
    const uint32_t t = lane % 4;
    const auto& in = exchange->in[lane];
    for (uint32_t e = 0; e < 2; ++e) {
      a[g][2 * t + e] = widen(Half(in[0], e));
      a[g + 8][2 * t + e] = widen(Half(in[1], e));
      a[g][2 * t + 8 + e] = widen(Half(in[2], e));
      a[g + 8][2 * t + 8 + e] = widen(Half(in[3], e));
      b[2 * t + e][g] = widen(Half(in[4], e));
      b[2 * t + 8 + e][g] = widen(Half(in[5], e));
    }
  }
  for (uint32_t lane = 0; lane < kWarpLanes; ++lane) {
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t row = lane / 4 + 8 * (i / 2);
      const uint32_t column = 2 * (lane % 4) + i % 2;
      double sum = static_cast<double>(std::bit_cast<float>(exchange->in[lane][6 + i]));
      for (uint32_t k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
      exchange->out[lane][i] = std::bit_cast<uint32_t>(static_cast<float>(sum));
    }
  }
}

}  // namespace

void ShuffleXor(WarpExchange& exchange) {
  Shuffle(&exchange, [](uint32_t lane, uint32_t bits) { return lane ^ bits; });
}
void ShuffleFrom(WarpExchange& exchange) {
  Shuffle(&exchange, [](uint32_t, uint32_t lane) { return lane % kWarpLanes; });
}
void ShuffleDown(WarpExchange& exchange) {
  Shuffle(&exchange, [](uint32_t lane, uint32_t count) {
    return lane + count < kWarpLanes ? lane + count : lane;
  });
}

void Ballot(WarpExchange& exchange) {
  uint32_t ballot = 0;
  for (uint32_t lane = 0; lane < kWarpLanes; ++lane) {
    if (HasLane(exchange, lane)) ballot |= exchange.in[lane][0] << lane;
  }
  for (auto& out : exchange.out) out[0] = ballot;
}

void TransposeMatrix(WarpExchange& exchange) {
  uint16_t matrix[8][8];
  for (uint32_t lane = 0; lane < kWarpLanes; ++lane) {
    for (uint32_t e = 0; e < 2; ++e) {
      matrix[lane / 4][2 * (lane % 4) + e] = Half(exchange.in[lane][0], e);
    }
  }
  for (uint32_t lane = 0; lane < kWarpLanes; ++lane) {
    const uint32_t row = lane / 4;
    const uint32_t column = 2 * (lane % 4);
    exchange.out[lane][0] = matrix[column][row] | uint32_t{matrix[column + 1][row]} << 16;
  }
}

void MmaF16(WarpExchange& exchange) {
  Mma(&exchange, [](uint16_t bits) { return static_cast<double>(Fp16ToFloat(bits)); });
}
void MmaBf16(WarpExchange& exchange) {
  Mma(&exchange, [](uint16_t bits) { return static_cast<double>(Bf16ToFloat(bits)); });
}

uint32_t Exchange(WarpFunction function, uint32_t mask, uint32_t value, uint32_t argument,
                  const Site& site) {
  const uint32_t in[] = {value, argument};
  uint32_t out[1];
  Collective(function, mask, in, out, site);
  return out[0];
}

}  // namespace kvtier::kernels::cuda::emu
