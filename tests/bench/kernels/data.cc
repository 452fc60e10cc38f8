// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/kernels/data.h"

#include <sys/mman.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "kernels/nvfp4.h"
#include "kernels/seal.h"

namespace kvtier::bench {
namespace {

constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;
constexpr uint32_t kBlockTokens = 64;
constexpr float kGlobalScale = 0x1p-6F;

}  // namespace

Buffer::Buffer(uint64_t bytes)
    : bytes_(bytes),
      data_(static_cast<std::byte*>(std::aligned_alloc(
          kHugePageBytes, (bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes))) {
  if (data_ == nullptr) {
    std::fputs("out of memory\n", stderr);
    std::exit(1);
  }
  // Refused where huge pages are off: the numbers are then a little lower.
  (void)madvise(data_.get(), bytes_, MADV_HUGEPAGE);
  std::memset(data_.get(), 0, bytes_);
}

void Buffer::Free::operator()(std::byte* data) const { std::free(data); }

void FillBf16(const Buffer& buffer) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> pattern((1 << 20) - 33);  // Odd, so that rows differ.
  for (uint16_t& x : pattern) x = kernels::FloatToBf16(normal(random));
  const uint64_t count = buffer.bytes().size() / sizeof(uint16_t);
  for (uint64_t done = 0; done < count; done += pattern.size()) {
    std::memcpy(buffer.words() + done, pattern.data(),
                std::min<uint64_t>(pattern.size(), count - done) * sizeof(uint16_t));
  }
}

Context::Context(uint64_t token_count, uint32_t kv_head_count, uint32_t group_heads,
                 uint32_t head_dim)
    : token_count_(token_count),
      shape_{.layer_count = 1,
             .kv_head_count = kv_head_count,
             .block_tokens = kBlockTokens,
             .head_dim = head_dim},
      query_heads_(kv_head_count * group_heads),
      k_(token_count * kv_head_count * head_dim * 2),
      v_(token_count * kv_head_count * head_dim * 2),
      blocks_(token_count / kBlockTokens * kernels::BlockBytes(shape_)),
      query_(uint64_t{query_heads_} * head_dim),
      g_(kv_head_count, kGlobalScale),
      out_(query_.size()),
      lse_(query_heads_) {
  FillBf16(k_);
  FillBf16(v_);
  std::memcpy(query_.data(), k_.words() + 1000, query_.size() * sizeof(uint16_t));
  const kernels::TileShape tile = kernels::TileOf(shape_);
  kernels::SealStats stats;
  for (uint64_t block = 0; block < token_count / kBlockTokens; ++block) {
    const auto bytes =
        blocks_.bytes().subspan(block * kernels::BlockBytes(shape_), kernels::BlockBytes(shape_));
    table_.push_back(bytes.data());
    for (uint32_t head = 0; head < kv_head_count; ++head) {
      const uint64_t at = (head * token_count + block * kBlockTokens) * head_dim;
      const kernels::Status status = kernels::SealTile(
          tile, {.data = k_.words() + at, .token_stride = head_dim},
          {.data = v_.words() + at, .token_stride = head_dim},
          {.g_k = kGlobalScale, .g_v = kGlobalScale},
          bytes.subspan(kernels::TileOffset(shape_, 0, head), kernels::TileBytes(tile)), &stats);
      if (!status.ok()) {
        std::fprintf(stderr, "seal: %s\n", status.message());
        std::exit(1);
      }
    }
  }
}

kernels::DecodeArgs Context::Common(kernels::Isa isa) {
  kernels::DecodeArgs args;
  args.block_shape = shape_;
  args.query_type = kernels::ElementType::kBf16;
  args.query = query_.data();
  args.query_head_count = query_heads_;
  args.softmax_scale = 1.0F / std::sqrt(static_cast<float>(shape_.head_dim));
  args.g_k = g_;
  args.g_v = g_;
  args.out = out_;
  args.lse = lse_;
  args.isa = isa;
  return args;
}

kernels::DecodeArgs Context::Sealed(kernels::Isa isa) {
  kernels::DecodeArgs args = Common(isa);
  args.block_table = table_;
  args.sealed_token_count = token_count_;
  return args;
}

kernels::DecodeArgs Context::Bf16(kernels::Isa isa) {
  kernels::DecodeArgs args = Common(isa);
  args.tail = {.k = k_.words(),
               .v = v_.words(),
               .token_count = static_cast<uint32_t>(token_count_),
               .token_stride = shape_.head_dim,
               .head_stride = token_count_ * shape_.head_dim};
  return args;
}

}  // namespace kvtier::bench
