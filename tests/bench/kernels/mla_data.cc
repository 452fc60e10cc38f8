// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/kernels/mla_data.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace kvtier::bench {
namespace {

constexpr uint32_t kBlockTokens = 64;
constexpr uint64_t kRowDims = kernels::kMlaLatentDim + kernels::kMlaRopeDim;
constexpr float kGlobalScale = 0x1p-6F;

}  // namespace

MlaContext::MlaContext(uint64_t token_count, uint32_t head_count)
    : token_count_(token_count),
      head_count_(head_count),
      shape_{.layer_count = 1, .tile = {.block_tokens = kBlockTokens}},
      rows_(token_count * kRowDims * 2),
      blocks_(token_count / kBlockTokens * kernels::MlaBlockBytes(shape_)),
      query_(head_count * kRowDims),
      out_(uint64_t{head_count} * kernels::kMlaLatentDim),
      lse_(head_count) {
  FillBf16(rows_);
  std::memcpy(query_.data(), rows_.words() + 1000, query_.size() * sizeof(uint16_t));
  kernels::SealStats stats;
  for (uint64_t block = 0; block < token_count / kBlockTokens; ++block) {
    const auto tile = blocks_.bytes().subspan(block * kernels::MlaBlockBytes(shape_),
                                              kernels::MlaTileBytes(shape_.tile));
    table_.push_back(tile.data());
    const uint16_t* latent = rows_.words() + block * kBlockTokens * kRowDims;
    const kernels::Status status =
        kernels::SealMlaTile(shape_.tile, {.data = latent, .token_stride = kRowDims},
                             {.data = latent + kernels::kMlaLatentDim, .token_stride = kRowDims},
                             {.g = kGlobalScale}, tile, &stats);
    if (!status.ok()) {
      std::fprintf(stderr, "seal: %s\n", status.message());
      std::exit(1);
    }
  }
}

kernels::DecodeMlaArgs MlaContext::Common(kernels::Isa isa) {
  kernels::DecodeMlaArgs args;
  args.block_shape = shape_;
  args.query_type = kernels::ElementType::kBf16;
  args.query = query_.data();
  args.query_head_count = head_count_;
  args.softmax_scale = 0.072F;  // 1 / sqrt(128 + 64)
  args.g = kGlobalScale;
  args.out = out_;
  args.lse = lse_;
  args.isa = isa;
  return args;
}

kernels::DecodeMlaArgs MlaContext::Sealed(kernels::Isa isa) {
  kernels::DecodeMlaArgs args = Common(isa);
  args.block_table = table_;
  args.sealed_token_count = token_count_;
  return args;
}

kernels::DecodeMlaArgs MlaContext::Bf16(kernels::Isa isa) {
  kernels::DecodeMlaArgs args = Common(isa);
  args.tail = {.latent = rows_.words(),
               .rope = rows_.words() + kernels::kMlaLatentDim,
               .token_count = static_cast<uint32_t>(token_count_),
               .latent_stride = kRowDims,
               .rope_stride = kRowDims};
  return args;
}

}  // namespace kvtier::bench
