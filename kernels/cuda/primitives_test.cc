// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/primitives.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/emu/launch.h"
#include "kernels/nvfp4.h"

// The emulated bodies against plain arithmetic. tests/gpu compares them with the instructions.

namespace kvtier::kernels::cuda {
namespace {

constexpr uint32_t kSeed = 20261130;

TEST(Primitives, PermutesBytes) {
  EXPECT_EQ(PermuteBytes(0x33221100, 0x77665544, 0x3210), 0x33221100U);
  EXPECT_EQ(PermuteBytes(0x33221100, 0x77665544, 0x7654), 0x77665544U);
  EXPECT_EQ(PermuteBytes(0x33221100, 0x77665544, 0x6240), 0x66224400U);
  EXPECT_EQ(PermuteBytes(0x80FF7F00, 0, 0xBA98), 0xFFFF0000U);
}

TEST(Primitives, MultipliesHalvesExactlyInTheSubnormals) {
  // Every E2M1 value times 2^-14, times every block scale: exact, down to 2^-24.
  for (uint32_t code = 0; code < 16; ++code) {
    for (uint32_t scale = 0; scale < 0x7F; ++scale) {
      const uint32_t bits = (code & 8U) << 12 | (code & 7U) << 9;
      const float factor = DecodeE4m3Scale(static_cast<uint8_t>(scale));
      const uint32_t product = MulHalf2(bits, PackHalf2(factor, 0.0F));
      EXPECT_EQ(FirstHalf(product) * 0x1p14F, DecodeE2m1(static_cast<uint8_t>(code)) * factor);
    }
  }
}

TEST(Primitives, FusedHalvesRoundOnce) {
  std::mt19937 random(kSeed);
  for (uint32_t i = 0; i < 200000; ++i) {
    const auto finite = [&] {
      return static_cast<uint32_t>((random() & 0x83FFU) | random() % 31 << 10);
    };
    const uint32_t a = finite();
    const uint32_t b = finite();
    const uint32_t c = finite();
    const long double exact =
        static_cast<long double>(FirstHalf(a)) * static_cast<long double>(FirstHalf(b)) +
        static_cast<long double>(FirstHalf(c));
    const float result = FirstHalf(FmaHalf2(a, b, c));
    if (std::isinf(result)) {
      ASSERT_GE(std::fabs(exact), 65520.0L);
      continue;
    }
    // No neighbour is nearer.
    const uint32_t bits = PackHalf2(result, 0.0F);
    for (const uint32_t neighbour : {bits + 1, bits - 1}) {
      const float other = FirstHalf(neighbour);
      if (std::isnan(other) || std::isinf(other)) continue;
      ASSERT_LE(std::fabs(exact - static_cast<long double>(result)),
                std::fabs(exact - static_cast<long double>(other)))
          << a << " " << b << " " << c << " seed " << kSeed;
    }
  }
}

TEST(Primitives, RoundsHalvesUpAndDown) {
  EXPECT_EQ(HalfAbove(1.0F), 0x3C00U);
  EXPECT_EQ(HalfBelow(1.0F), 0x3C00U);
  EXPECT_EQ(HalfAbove(1.0001F), 0x3C01U);
  EXPECT_EQ(HalfBelow(1.0009F), 0x3C00U);
  EXPECT_EQ(HalfAbove(0x1p-60F), 0x0001U);
  EXPECT_EQ(HalfBelow(0x1p-60F), 0x0000U);
  EXPECT_EQ(HalfAbove(65505.0F), 0x7C00U);
  EXPECT_EQ(HalfBelow(1e30F), 0x7BFFU);
}

TEST(Primitives, ComparesWithNanAsTrue) {
  EXPECT_EQ(GreaterOrNanMask(0x3C003C00, 0x3C003BFF), 0x0000FFFFU);
  EXPECT_EQ(GreaterEqualOrNanMask(0x3C003C00, 0x3C013C00), 0x0000FFFFU);
  EXPECT_EQ(GreaterEqualOrNanMask(0x7F800000, 0x7BFF7BFF), 0xFFFF0000U);
  EXPECT_EQ(MaxNanHalf2(0x7F803C00, 0x40003800), 0x7FFF3C00U);
  EXPECT_EQ(MaxNanBf162(0x7FC03F80, 0x00003F00), 0x7FFF3F80U);
}

TEST(Primitives, PacksCodesLowNibbleFirst) {
  const float x[8] = {1.0F, -6.0F, 0.25F, 0.75F, -0.1F, 5.0F, NAN, 1e30F};
  EXPECT_EQ(PackE2m1(x), 0x776820F2U);
  uint32_t pairs[4];
  E2m1ToHalf2(0x000000F2, pairs);
  EXPECT_EQ(FirstHalf(pairs[0]), 1.0F);
  EXPECT_EQ(SecondHalf(pairs[0]), -6.0F);
}

TEST(Primitives, MultipliesMatrices) {
  std::mt19937 random(kSeed);
  std::vector<float> a(256);
  std::vector<float> b(128);
  for (float& x : a) x = static_cast<float>(random() % 17) - 8.0F;
  for (float& x : b) x = static_cast<float>(random() % 17) - 8.0F;
  for (const bool is_bf16 : {false, true}) {
    std::vector<float> out(256);
    emu::Memory memory;
    memory.AddOutput(std::span(out));
    const auto pack = [&](float x, float y) { return is_bf16 ? PackBf162(x, y) : PackHalf2(x, y); };
    const emu::Report report = emu::LaunchThreads({.block = {32}}, memory, [&] {
      const uint32_t g = LaneId() / 4;
      const uint32_t t = LaneId() % 4;
      const auto a_pair = [&](uint32_t row, uint32_t column) {
        return pack(a[row * 16 + column], a[row * 16 + column + 1]);
      };
      const auto b_pair = [&](uint32_t row) { return pack(b[row * 8 + g], b[(row + 1) * 8 + g]); };
      float c[4] = {1.0F, 2.0F, 3.0F, 4.0F};
      const uint32_t a_words[4] = {a_pair(g, 2 * t), a_pair(g + 8, 2 * t), a_pair(g, 2 * t + 8),
                                   a_pair(g + 8, 2 * t + 8)};
      if (is_bf16) {
        MmaBf16(c, a_words, b_pair(2 * t), b_pair(2 * t + 8));
      } else {
        MmaF16(c, a_words, b_pair(2 * t), b_pair(2 * t + 8));
      }
      const Global<float> base{out.data()};
      for (uint32_t i = 0; i < 4; ++i) {
        StoreGlobal<float>(base + ((g + i / 2 * 8) * 8 + 2 * t + i % 2), c[i]);
      }
    });
    ASSERT_TRUE(report.ok()) << report.ToString();
    for (uint32_t row = 0; row < 16; ++row) {
      for (uint32_t column = 0; column < 8; ++column) {
        const uint32_t element = column % 2 + row / 8 * 2;
        float expected = 1.0F + static_cast<float>(element);
        for (uint32_t k = 0; k < 16; ++k) expected += a[row * 16 + k] * b[k * 8 + column];
        EXPECT_EQ(out[row * 8 + column], expected);
      }
    }
  }
}

TEST(Primitives, TransposesMatricesAndVotes) {
  emu::LaunchThreads({.block = {32}}, {}, [] {
    const uint32_t g = LaneId() / 4;
    const uint32_t t = LaneId() % 4;
    const uint32_t transposed = TransposeMatrix((8 * g + 2 * t) | (8 * g + 2 * t + 1) << 16);
    EXPECT_EQ(transposed, (16 * t + g) | (16 * t + 8 + g) << 16);
    EXPECT_EQ(Ballot(LaneId() % 3 == 0), 0x49249249U);
    EXPECT_TRUE(AnyLane(LaneId() == 31));
    EXPECT_FALSE(AllLanes(LaneId() != 31));
    EXPECT_EQ(ShuffleDown(LaneId(), 4), LaneId() < 28 ? LaneId() + 4 : LaneId());
  });
}

}  // namespace
}  // namespace kvtier::kernels::cuda
