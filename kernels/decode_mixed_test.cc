// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/decode.h"
#include "kernels/decode_sequence.h"
#include "kernels/nvfp4.h"
#include "kernels/seal.h"
#include "kernels/tile_layout.h"

// Decode over blocks whose layers have different formats, and over memory beyond 4 GiB.

namespace kvtier::kernels {
namespace {

constexpr SideFormat kFormats[] = {SideFormat::kNvfp4, SideFormat::kFp8, SideFormat::kBf16};

class MixedDecode : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (!IsaIsAvailable(GetParam())) GTEST_SKIP() << "not on this machine";
  }
};

INSTANTIATE_TEST_SUITE_P(Isas, MixedDecode, testing::ValuesIn(kAllIsas),
                         [](const auto& param_info) { return IsaName(param_info.param); });

// Values of one side of one tile [token][dim], and its bytes.
struct Side {
  Side(SideFormat format, const TileShape& shape, float scale, bool is_v, std::mt19937* random) {
    std::normal_distribution<float> normal;
    std::vector<float> rows(uint64_t{shape.block_tokens} * shape.head_dim);
    for (float& x : rows) x = Bf16ToFloat(FloatToBf16(normal(*random)));
    values.resize(rows.size());
    bytes.resize(SideBytes(shape, format));
    for (size_t i = 0; format == SideFormat::kBf16 && i < rows.size(); ++i) {
      const uint16_t bits = FloatToBf16(rows[i]);
      std::memcpy(&bytes[2 * i], &bits, sizeof(bits));
      values[i] = rows[i];
    }
    for (size_t i = 0; format == SideFormat::kFp8 && i < rows.size(); ++i) {
      bytes[i] = static_cast<std::byte>(EncodeE4m3Scale(std::fabs(rows[i] / scale)) |
                                        (rows[i] < 0.0F ? 0x80 : 0));
      values[i] = DecodeE4m3Scale(std::to_integer<uint8_t>(bytes[i])) * scale;
    }
    if (format != SideFormat::kNvfp4) return;
    std::vector<std::byte> tile(TileBytes(shape));
    const ConstRows source{
        .type = ElementType::kFp32, .data = rows.data(), .token_stride = shape.head_dim};
    SealStats stats;
    EXPECT_TRUE(SealTile(shape, source, source, {.g_k = scale, .g_v = scale}, tile, &stats).ok());
    std::memcpy(bytes.data(), tile.data() + (is_v ? VDataOffset(shape) : 0), bytes.size());
    for (size_t i = 0; i < rows.size(); i += kVectorDims) {
      uint8_t codes[kVectorCodeBytes];
      uint8_t scale_byte = 0;
      Quantize16(&rows[i], scale, codes, &scale_byte);
      Dequantize16(codes, scale_byte, scale, &values[i]);
    }
  }

  std::vector<float> values;
  std::vector<std::byte> bytes;
};

// FP64 attention of one query over [token][dim] values.
std::vector<double> Attend(const std::vector<float>& query, const std::vector<float>& k,
                           const std::vector<float>& v, double scale) {
  const size_t head_dim = query.size();
  std::vector<double> mean(head_dim);
  double sum = 0;
  for (size_t t = 0; t < k.size() / head_dim; ++t) {
    double score = 0;
    for (size_t i = 0; i < head_dim; ++i) {
      score += static_cast<double>(query[i]) * static_cast<double>(k[t * head_dim + i]);
    }
    const double weight = std::exp(score * scale);
    sum += weight;
    for (size_t i = 0; i < head_dim; ++i) {
      mean[i] += weight * static_cast<double>(v[t * head_dim + i]);
    }
  }
  for (double& x : mean) x /= sum;
  return mean;
}

TEST_P(MixedDecode, MatchesFp64ForEveryPairOfFormats) {
  constexpr uint32_t kBlocks = 5;
  for (const uint32_t head_dim : {64U, 80U, 96U, 128U, 192U, 256U}) {
    for (const SideFormat k_format : kFormats) {
      for (const SideFormat v_format : kFormats) {
        std::mt19937 random(kSeed);
        // Layer 0 has another format, so that the offset of layer 1 depends on it.
        const LayerFormat formats[] = {{.k = SideFormat::kBf16}, {.k = k_format, .v = v_format}};
        const BlockShape shape{
            .layer_count = 2, .kv_head_count = 1, .block_tokens = 16, .head_dim = head_dim};
        const float k_scale = k_format == SideFormat::kFp8 ? 0.3F : 0x1p-6F;
        const float v_scale = v_format == SideFormat::kFp8 ? 0.7F : 0x1p-6F;
        std::vector<std::vector<std::byte>> blocks;
        std::vector<const std::byte*> table;
        std::vector<float> k_values;
        std::vector<float> v_values;
        for (uint32_t i = 0; i < kBlocks; ++i) {
          const Side k(k_format, TileOf(shape), k_scale, false, &random);
          const Side v(v_format, TileOf(shape), v_scale, true, &random);
          blocks.emplace_back(BlockBytes(shape, formats), std::byte{0xFF});
          std::byte* tile = blocks.back().data() + LayerOffset(shape, formats, 1);
          std::memcpy(tile, k.bytes.data(), k.bytes.size());
          std::memcpy(tile + k.bytes.size(), v.bytes.data(), v.bytes.size());
          k_values.insert(k_values.end(), k.values.begin(), k.values.end());
          v_values.insert(v_values.end(), v.values.begin(), v.values.end());
        }
        for (const auto& block : blocks) table.push_back(block.data());
        std::vector<float> query(uint64_t{3} * head_dim);
        std::normal_distribution<float> normal;
        for (float& x : query) x = normal(random);
        std::vector<float> out(query.size());
        std::vector<float> lse(3);
        DecodeArgs args{.block_shape = shape,
                        .layer_idx = 1,
                        .query = query.data(),
                        .query_head_count = 3,
                        .block_table = table,
                        .sealed_token_count = kBlocks * 16,
                        .softmax_scale = 0.1F,
                        .g_k = std::span(&k_scale, 1),
                        .g_v = std::span(&v_scale, 1),
                        .out = out,
                        .lse = lse,
                        .layer_formats = formats,
                        .isa = GetParam()};
        ASSERT_TRUE(Decode(args).ok());
        for (uint32_t head = 0; head < 3; ++head) {
          const std::vector<float> one(query.begin() + head * head_dim,
                                       query.begin() + (head + 1) * head_dim);
          const std::vector<double> expected =
              Attend(one, k_values, v_values, static_cast<double>(0.1F));
          for (uint32_t i = 0; i < head_dim; ++i) {
            ASSERT_NEAR(static_cast<double>(out[head * head_dim + i]), expected[i],
                        4 * DecodeTolerance(GetParam()))
                << "d " << head_dim << " formats " << int(k_format) << int(v_format);
          }
        }
        args.layer_formats = args.layer_formats.first(1);
        EXPECT_EQ(Decode(args).code(), StatusCode::kInvalidArgument);
      }
    }
  }
}

// One block of one tile with wide sides of ones; tests change bytes of it.
class WideTile {
 public:
  WideTile(SideFormat format, Isa isa) : isa_(isa), formats_{{.k = format, .v = format}} {
    const bool fp8 = format == SideFormat::kFp8;
    bytes_.resize(BlockBytes(kShape, formats_));
    row_bytes_ = uint64_t{kShape.head_dim} * (fp8 ? 1 : 2);
    for (size_t i = 0; i < bytes_.size(); ++i) {
      // 1.0 is the byte 0x38 in FP8 and the bytes 0x80 0x3F in BF16.
      bytes_[i] = std::byte{static_cast<uint8_t>(fp8 ? 0x38 : (i % 2 == 0 ? 0x80 : 0x3F))};
    }
  }

  std::byte* Row(bool is_v, uint32_t token) {
    return bytes_.data() + (uint64_t{is_v} * kShape.block_tokens + token) * row_bytes_;
  }

  Status Run(uint64_t window) {
    const std::byte* const table[] = {bytes_.data()};
    const std::vector<float> query(uint64_t{2} * kShape.head_dim, 0.25F);
    const float scale = 1.0F;
    out_.assign(query.size(), 7.0F);
    std::vector<float> lse(2);
    return Decode({.block_shape = kShape,
                   .query = query.data(),
                   .query_head_count = 1,
                   .block_table = table,
                   .sealed_token_count = kShape.block_tokens,
                   .softmax_scale = 0.1F,
                   .g_k = std::span(&scale, 1),
                   .g_v = std::span(&scale, 1),
                   .out = out_,
                   .lse = lse,
                   .query_len = 2,
                   .window = window,
                   .layer_formats = formats_,
                   .isa = isa_});
  }

  const std::vector<float>& out() const { return out_; }

 private:
  static constexpr BlockShape kShape{
      .layer_count = 1, .kv_head_count = 1, .block_tokens = 16, .head_dim = 64};

  Isa isa_;
  LayerFormat formats_[1];
  std::vector<std::byte> bytes_;
  uint64_t row_bytes_;
  std::vector<float> out_;
};

TEST_P(MixedDecode, NonfiniteVOutsideOfTheWindowDoesNotMatter) {
  WideTile tile(SideFormat::kBf16, GetParam());
  const uint16_t infinity = 0x7F80;
  std::memcpy(tile.Row(true, 3), &infinity, sizeof(infinity));
  std::memcpy(tile.Row(true, 15) + 2, &infinity, sizeof(infinity));
  ASSERT_TRUE(tile.Run(4).ok());
  for (size_t i = 0; i < tile.out().size(); ++i) {
    const bool reached = i == 64 + 1;  // The last token is seen by the second query only.
    EXPECT_EQ(std::isfinite(tile.out()[i]), !reached) << i;
  }
}

TEST_P(MixedDecode, ReportsFp8NanInATile) {
  for (const uint32_t byte : {0x7EU, 0xFEU, 0x7FU, 0xFFU}) {
    for (const bool is_v : {false, true}) {
      WideTile tile(SideFormat::kFp8, GetParam());
      tile.Row(is_v, 7)[33] = static_cast<std::byte>(byte);
      EXPECT_EQ(tile.Run(0).code(),
                (byte & 0x7F) == 0x7F ? StatusCode::kDataLoss : StatusCode::kOk);
    }
  }
}

// A sparse mapping: only the pages that are touched exist.
class Sparse {
 public:
  explicit Sparse(uint64_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
  ~Sparse() {
    if (ok()) munmap(data_, bytes_);
  }
  bool ok() const { return data_ != MAP_FAILED; }
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  uint64_t bytes_;
  void* data_;
};

TEST_P(MixedDecode, ReachesBeyondFourGigabytes) {
  // The tile of the last layer and the second row of the tail lie more than 2^32 bytes away.
  const BlockShape shape{
      .layer_count = 65536, .kv_head_count = 64, .block_tokens = 16, .head_dim = 64};
  const TileShape tile = TileOf(shape);
  ASSERT_GT(TileOffset(shape, 65535, 0), uint64_t{1} << 32);
  constexpr uint64_t kTokenStride = (uint64_t{1} << 31) + 64;  // Elements: 2^32 + 128 bytes.
  const Sparse block(BlockBytes(shape));
  const Sparse tail(2 * kTokenStride * 2);
  if (!block.ok() || !tail.ok()) GTEST_SKIP() << "no address space";
  std::mt19937 random(kSeed);
  const Side k(SideFormat::kNvfp4, tile, 0x1p-6F, false, &random);
  const Side v(SideFormat::kNvfp4, tile, 0x1p-6F, true, &random);
  for (uint32_t head = 0; head < 64; ++head) {
    std::byte* target = block.data() + TileOffset(shape, 65535, head);
    std::memcpy(target, k.bytes.data(), k.bytes.size());
    std::memcpy(target + k.bytes.size(), v.bytes.data(), v.bytes.size());
  }
  const std::vector<uint16_t> ones(64 * 64, FloatToBf16(1.0F));
  std::vector<float> k_values = k.values;
  std::vector<float> v_values = v.values;
  for (const uint64_t token : {0U, 1U}) {
    std::memcpy(tail.data() + token * kTokenStride * 2, ones.data(), ones.size() * 2);
    k_values.insert(k_values.end(), 64, 1.0F);
    v_values.insert(v_values.end(), 64, 1.0F);
  }
  std::vector<float> query(64 * 64, 0.25F);
  const std::vector<float> g(64, 0x1p-6F);
  std::vector<float> out(query.size());
  std::vector<float> lse(64);
  const std::byte* const table[] = {block.data()};
  ASSERT_TRUE(Decode({.block_shape = shape,
                      .layer_idx = 65535,
                      .query = query.data(),
                      .query_head_count = 64,
                      .block_table = table,
                      .sealed_token_count = 16,
                      .tail = {.k = tail.data(),
                               .v = tail.data(),
                               .token_count = 2,
                               .token_stride = kTokenStride,
                               .head_stride = 64},
                      .softmax_scale = 0.125F,
                      .g_k = g,
                      .g_v = g,
                      .out = out,
                      .lse = lse,
                      .isa = GetParam()})
                  .ok());
  const std::vector<double> expected =
      Attend(std::vector<float>(64, 0.25F), k_values, v_values, 0.125);
  for (size_t i = 0; i < out.size(); ++i) {
    ASSERT_NEAR(static_cast<double>(out[i]), expected[i % 64], 4 * DecodeTolerance(GetParam()));
  }
}

TEST_P(MixedDecode, SealsAndGathersBeyondFourGigabytes) {
  const TileShape tile{.block_tokens = 16, .head_dim = 64};
  constexpr uint64_t kPageStride = (uint64_t{1} << 31) + 4096;  // Elements of 2 bytes.
  const Sparse pages(3 * kPageStride * 2);
  if (!pages.ok()) GTEST_SKIP() << "no address space";
  std::vector<uint16_t> dense;
  const uint32_t table[] = {2, 0};
  for (const uint32_t page : table) {
    for (uint32_t i = 0; i < 8 * 64; ++i) {
      const uint16_t x = FloatToBf16(static_cast<float>(i % 97) - 48.0F);
      std::memcpy(pages.data() + (page * kPageStride + i) * 2, &x, sizeof(x));
      dense.push_back(x);
    }
  }
  const Paging paging{
      .page_table = table, .page_table_count = 2, .page_tokens = 8, .page_stride = kPageStride};
  const ConstRows paged{.data = pages.data(), .token_stride = 64, .paging = paging};
  const ConstRows plain{.data = dense.data(), .token_stride = 64};
  std::vector<std::byte> tiles[2];
  SealStats stats;
  for (const bool is_paged : {false, true}) {
    tiles[is_paged].resize(TileBytes(tile));
    const ConstRows& rows = is_paged ? paged : plain;
    ASSERT_TRUE(SealTile(tile, rows, rows, {.isa = GetParam()}, tiles[is_paged], &stats).ok());
  }
  EXPECT_EQ(tiles[0], tiles[1]);
}

}  // namespace
}  // namespace kvtier::kernels
