// SPDX-License-Identifier: Apache-2.0
#include "proto/base/layout.h"

#include <gtest/gtest.h>

#include <functional>
#include <vector>

namespace kvtier {
namespace {

Layout ValidLayout() {
  Layout layout;
  layout.model = "model";
  layout.layer_count = 32;
  layout.kv_head_count = 8;
  layout.head_dim = 128;
  return layout;
}

TEST(Layout, SizesEveryCodec) {
  Layout layout = ValidLayout();
  const uint32_t value_count = 2 * 32 * 8 * 64 * 128;
  EXPECT_EQ(layout.BlockBytes(), value_count / 16 * 9);
  EXPECT_EQ(layout.BlockBytes(), 2u * 32 * 8 * (9216 / 2));
  layout.codec = Codec::kFp8;
  EXPECT_EQ(layout.BlockBytes(), value_count);
  layout.codec = Codec::kBf16;
  EXPECT_EQ(layout.BlockBytes(), value_count * 2);
  layout.codec = Codec::kRaw;
  layout.raw_block_bytes = 12'345;
  EXPECT_EQ(layout.BlockBytes(), 12'345);
}

TEST(Layout, NamesTheFieldItRejects) {
  struct Case {
    const char* field;
    std::function<void(Layout&)> spoil;
  };
  const std::vector<Case> cases = {
      {"model", [](Layout& l) { l.model.clear(); }},
      {"model", [](Layout& l) { l.model.assign(257, 'x'); }},
      {"weights_revision", [](Layout& l) { l.weights_revision.assign(257, 'x'); }},
      {"tokenizer", [](Layout& l) { l.tokenizer.assign(257, 'x'); }},
      {"scale_set", [](Layout& l) { l.scale_set.assign(257, 'x'); }},
      {"rope", [](Layout& l) { l.rope.assign(257, 'x'); }},
      {"layer_count", [](Layout& l) { l.layer_count = 0; }},
      {"layer_count", [](Layout& l) { l.layer_count = 1025; }},
      {"kv_head_count", [](Layout& l) { l.kv_head_count = 0; }},
      {"head_dim", [](Layout& l) { l.head_dim = 100; }},
      {"block_tokens", [](Layout& l) { l.block_tokens = 48; }},
      {"tp_rank", [](Layout& l) { l.tp_rank = 1; }},
      {"tp_rank", [](Layout& l) { l.tp_size = 0; }},
      {"pp_rank", [](Layout& l) { l.pp_size = 1025; }},
      {"codec", [](Layout& l) { l.codec = static_cast<Codec>(5); }},
      {"codec", [](Layout& l) { l.codec = static_cast<Codec>(0); }},
      {"raw_block_bytes", [](Layout& l) { l.raw_block_bytes = 1; }},
      {"raw_block_bytes", [](Layout& l) { l.codec = Codec::kRaw; }},
  };
  ASSERT_TRUE(ValidLayout().Validate().ok());
  for (const Case& c : cases) {
    Layout layout = ValidLayout();
    c.spoil(layout);
    const absl::Status status = layout.Validate();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.field;
    EXPECT_NE(status.ToString().find(c.field), std::string::npos) << status;
  }
}

TEST(Layout, RejectsBlocksAboveTheLimit) {
  Layout layout = ValidLayout();
  layout.codec = Codec::kRaw;
  layout.raw_block_bytes = static_cast<uint32_t>(kBlockBytesMax);
  EXPECT_TRUE(layout.Validate().ok());
  layout.raw_block_bytes += 1;
  EXPECT_EQ(layout.Validate().code(), absl::StatusCode::kInvalidArgument);
  layout.codec = Codec::kBf16;
  layout.raw_block_bytes = 0;
  layout.layer_count = 1024;
  layout.kv_head_count = 1024;
  EXPECT_EQ(layout.Validate().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvtier
