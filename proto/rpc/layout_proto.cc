// SPDX-License-Identifier: Apache-2.0
#include "proto/rpc/layout_proto.h"

#include "proto/base/status_util.h"

namespace kvtier {

static_assert(static_cast<int>(Codec::kNvfp4) == v1::CODEC_NVFP4);
static_assert(static_cast<int>(Codec::kFp8) == v1::CODEC_FP8);
static_assert(static_cast<int>(Codec::kBf16) == v1::CODEC_BF16);
static_assert(static_cast<int>(Codec::kRaw) == v1::CODEC_RAW);

v1::Layout LayoutToProto(const Layout& layout) {
  v1::Layout proto;
  proto.set_model(layout.model);
  proto.set_weights_revision(layout.weights_revision);
  proto.set_tokenizer(layout.tokenizer);
  proto.set_layer_count(layout.layer_count);
  proto.set_kv_head_count(layout.kv_head_count);
  proto.set_head_dim(layout.head_dim);
  proto.set_block_tokens(layout.block_tokens);
  proto.set_codec(static_cast<v1::Codec>(layout.codec));
  proto.set_scale_set(layout.scale_set);
  proto.set_rope(layout.rope);
  proto.set_tp_rank(layout.tp_rank);
  proto.set_tp_size(layout.tp_size);
  proto.set_pp_rank(layout.pp_rank);
  proto.set_pp_size(layout.pp_size);
  proto.set_raw_block_bytes(layout.raw_block_bytes);
  return proto;
}

absl::StatusOr<Layout> LayoutFromProto(const v1::Layout& proto) {
  // Proto3 enums are open: the number may be one that this version does not know.
  if (proto.codec() < v1::CODEC_NVFP4 || proto.codec() > v1::CODEC_RAW) {
    return Invalid("layout.codec is %d; allowed nvfp4, fp8, bf16, raw",
                   static_cast<int>(proto.codec()));
  }
  Layout layout;
  layout.model = proto.model();
  layout.weights_revision = proto.weights_revision();
  layout.tokenizer = proto.tokenizer();
  layout.layer_count = proto.layer_count();
  layout.kv_head_count = proto.kv_head_count();
  layout.head_dim = proto.head_dim();
  layout.block_tokens = proto.block_tokens();
  layout.codec = static_cast<Codec>(proto.codec());
  layout.scale_set = proto.scale_set();
  layout.rope = proto.rope();
  layout.tp_rank = proto.tp_rank();
  layout.tp_size = proto.tp_size() == 0 ? 1 : proto.tp_size();
  layout.pp_rank = proto.pp_rank();
  layout.pp_size = proto.pp_size() == 0 ? 1 : proto.pp_size();
  layout.raw_block_bytes = proto.raw_block_bytes();
  KVT_RETURN_IF_ERROR(layout.Validate());
  return layout;
}

}  // namespace kvtier
