// SPDX-License-Identifier: Apache-2.0
#include "proto/rpc/layout_proto.h"

#include <gtest/gtest.h>

namespace kvtier {
namespace {

// Every field has a value of its own, so that a swapped or forgotten one shows.
Layout DistinctLayout() {
  Layout layout;
  layout.model = "model";
  layout.weights_revision = "revision";
  layout.tokenizer = "tokenizer";
  layout.layer_count = 3;
  layout.kv_head_count = 5;
  layout.head_dim = 96;
  layout.block_tokens = 32;
  layout.codec = Codec::kRaw;
  layout.scale_set = "scales";
  layout.rope = "rope";
  layout.tp_rank = 1;
  layout.tp_size = 4;
  layout.pp_rank = 2;
  layout.pp_size = 6;
  layout.raw_block_bytes = 4096;
  return layout;
}

TEST(LayoutProto, KeepsEveryField) {
  const Layout layout = DistinctLayout();
  const auto back = LayoutFromProto(LayoutToProto(layout));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->Fingerprint(), layout.Fingerprint());
  EXPECT_EQ(back->BlockBytes(), 4096);
}

TEST(LayoutProto, EveryFieldOfTheMessageReachesTheFingerprint) {
  const v1::Layout base = LayoutToProto(DistinctLayout());
  const auto* descriptor = v1::Layout::descriptor();
  ASSERT_EQ(descriptor->field_count(), 15);
  const LayoutFingerprint fingerprint = DistinctLayout().Fingerprint();
  const auto differs = [&](auto change) {
    v1::Layout changed = base;
    change(changed);
    const auto layout = LayoutFromProto(changed);
    EXPECT_TRUE(layout.ok()) << layout.status();
    return layout.ok() && layout->Fingerprint() != fingerprint;
  };
  EXPECT_TRUE(differs([](v1::Layout& l) { l.set_model("x"); }));
  EXPECT_TRUE(differs([](v1::Layout& l) { l.set_weights_revision("x"); }));
  EXPECT_TRUE(differs([](v1::Layout& l) { l.set_tokenizer("x"); }));
  EXPECT_TRUE(differs([](v1::Layout& l) { l.set_layer_count(9); }));
  EXPECT_TRUE(differs([](v1::Layout& l) { l.set_kv_head_count(9); }));
  EXPECT_TRUE(differs([](v1::Layout& l) { l.set_head_dim(64); }));
  EXPECT_TRUE(differs([](v1::Layout& l) { l.set_block_tokens(64); }));
  EXPECT_TRUE(differs([](v1::Layout& l) {
    l.set_codec(v1::CODEC_FP8);
    l.set_raw_block_bytes(0);
  }));
  EXPECT_TRUE(differs([](v1::Layout& l) { l.set_scale_set("x"); }));
  EXPECT_TRUE(differs([](v1::Layout& l) { l.set_rope("x"); }));
  EXPECT_TRUE(differs([](v1::Layout& l) { l.set_tp_rank(0); }));
  EXPECT_TRUE(differs([](v1::Layout& l) { l.set_tp_size(9); }));
  EXPECT_TRUE(differs([](v1::Layout& l) { l.set_pp_rank(0); }));
  EXPECT_TRUE(differs([](v1::Layout& l) { l.set_pp_size(9); }));
  EXPECT_TRUE(differs([](v1::Layout& l) { l.set_raw_block_bytes(8192); }));
}

TEST(LayoutProto, RankCountsOfZeroMeanOne) {
  v1::Layout proto = LayoutToProto(DistinctLayout());
  proto.set_tp_rank(0);
  proto.set_tp_size(0);
  proto.set_pp_rank(0);
  proto.set_pp_size(0);
  const auto layout = LayoutFromProto(proto);
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->tp_size, 1);
  EXPECT_EQ(layout->pp_size, 1);
}

TEST(LayoutProto, RejectsUnknownCodecsAndInvalidLayouts) {
  v1::Layout proto = LayoutToProto(DistinctLayout());
  for (int codec : {0, 5, -1, 256 + 1}) {
    proto.set_codec(static_cast<v1::Codec>(codec));
    EXPECT_EQ(LayoutFromProto(proto).status().code(), absl::StatusCode::kInvalidArgument) << codec;
  }
  proto.set_codec(v1::CODEC_RAW);
  proto.set_layer_count(0);
  EXPECT_EQ(LayoutFromProto(proto).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvtier
