// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/eval/sealed_head.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "client/ctl/eval/attention.h"
#include "client/ctl/eval/dataset.h"
#include "client/ctl/eval/quantizers.h"
#include "kernels/nvfp4.h"

namespace kvtier::ctl::eval {
namespace {

constexpr uint64_t kHeadSeed = 2;

Head MakeHead(uint32_t token_count, uint32_t head_dim) {
  Head head = MakeSynthetic(Family::kOutBias,
                            {.token_count = token_count, .head_dim = head_dim, .query_count = 17},
                            kHeadSeed);
  head.k = RoundToBf16(head.k);
  head.v = RoundToBf16(head.v);
  return head;
}

// By the scalar functions that specify the format.
Matrix ScalarRoundTrip(const Matrix& x, kernels::ScaleSearch search) {
  float g = 0.0F;
  EXPECT_TRUE(kernels::GlobalScaleFromAmax(static_cast<float>(Amax(x)), &g).ok());
  Matrix result(x.rows(), x.cols());
  for (size_t at = 0; at < x.values().size(); at += 16) {
    std::array<float, 16> vector;
    for (size_t i = 0; i < 16; ++i) vector[i] = static_cast<float>(x.values()[at + i]);
    std::array<uint8_t, 8> codes;
    uint8_t scale = 0;
    kernels::Quantize16(vector.data(), g, codes.data(), &scale, search);
    kernels::Dequantize16(codes.data(), scale, g, vector.data());
    for (size_t i = 0; i < 16; ++i) result.values()[at + i] = vector[i];
  }
  return result;
}

TEST(SealedHeadTest, IsTheFormatsRoundTrip) {
  // 70 tokens: a full tile and a part of one.
  const Head head = MakeHead(70, 96);
  for (const auto search : {kernels::ScaleSearch::kAmax6, kernels::ScaleSearch::kFourOverSix}) {
    const auto sealed = SealedHead::Seal(head.k, head.v, {.search = search});
    ASSERT_TRUE(sealed.ok()) << sealed.status();
    EXPECT_EQ(RelativeError(sealed->keys(), ScalarRoundTrip(head.k, search)), 0.0);
    EXPECT_EQ(RelativeError(sealed->values(), ScalarRoundTrip(head.v, search)), 0.0);
    EXPECT_EQ(sealed->full_tile_token_count(), 64U);
  }
}

TEST(SealedHeadTest, UnitScalesLoseSmallValues) {
  Head head = MakeHead(64, 64);
  for (double& value : head.v.values()) value *= 1e-4;
  const auto unit = SealedHead::Seal(head.k, head.v, {.unit_scales = true});
  const auto calibrated = SealedHead::Seal(head.k, head.v, {});
  ASSERT_TRUE(unit.ok() && calibrated.ok());
  EXPECT_EQ(Amax(unit->values()), 0.0);
  EXPECT_LT(RelativeError(calibrated->values(), head.v), 0.12);
}

TEST(SealedHeadTest, TransformIsUndone) {
  const Head head = MakeHead(64, 64);
  const auto plain = SealedHead::Seal(head.k, head.v, {});
  const auto moved = SealedHead::Seal(head.k, head.v, {.mean = true, .smooth_alpha = 0.5F});
  ASSERT_TRUE(plain.ok() && moved.ok());
  // The bias of the outlier channels is most of K: without it the rest is stored better.
  EXPECT_LT(RelativeError(moved->keys(), head.k), 0.5 * RelativeError(plain->keys(), head.k));
  EXPECT_EQ(RelativeError(moved->values(), plain->values()), 0.0);
}

TEST(SealedHeadTest, ZerosStayZeros) {
  const Matrix zeros(64, 64);
  const auto sealed = SealedHead::Seal(zeros, zeros, {.mean = true, .smooth_alpha = 1.0F});
  ASSERT_TRUE(sealed.ok()) << sealed.status();
  EXPECT_EQ(Amax(sealed->keys()), 0.0);
  EXPECT_EQ(Amax(sealed->values()), 0.0);
}

TEST(SealedHeadTest, AttendIsAttentionOverItsValues) {
  const Head head = MakeHead(200, 64);  // three full tiles
  for (const bool transformed : {false, true}) {
    SCOPED_TRACE(transformed);
    const auto sealed = SealedHead::Seal(
        head.k, head.v, {.mean = transformed, .smooth_alpha = transformed ? 0.5F : 0.0F});
    ASSERT_TRUE(sealed.ok()) << sealed.status();
    const auto measured = sealed->Attend(head.q, head.softmax_scale);
    ASSERT_TRUE(measured.ok()) << measured.status();
    const Matrix scores = Scores(head.q, sealed->keys().FirstRows(192), head.softmax_scale);
    const Matrix expected = WeightedSum(Softmax(scores), sealed->values().FirstRows(192));
    EXPECT_LT(RelativeMaxError(*measured, expected), 0x1p-9);
  }
}

TEST(SealedHeadTest, RefusesHeadDimsOutsideTheFormat) {
  for (const uint32_t dims : {32U, 72U, 272U}) {
    const Matrix x(16, dims);
    EXPECT_EQ(SealedHead::Seal(x, x, {}).status().code(), absl::StatusCode::kInvalidArgument)
        << dims;
  }
}

}  // namespace
}  // namespace kvtier::ctl::eval
