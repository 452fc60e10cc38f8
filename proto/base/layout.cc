// SPDX-License-Identifier: Apache-2.0
#include "proto/base/layout.h"

#include "proto/base/check.h"
#include "proto/base/status_util.h"

namespace kvtier {
namespace {

constexpr size_t kNameBytesMax = 256;
constexpr uint32_t kCountMax = 1024;

absl::Status CheckName(const char* field, const std::string& value) {
  if (value.size() > kNameBytesMax) {
    return Invalid("layout.%s has %d bytes; at most %d", field, value.size(), kNameBytesMax);
  }
  return absl::OkStatus();
}

absl::Status CheckCount(const char* field, uint32_t value) {
  if (value < 1 || value > kCountMax) {
    return Invalid("layout.%s is %d; allowed 1..%d", field, value, kCountMax);
  }
  return absl::OkStatus();
}

absl::Status CheckRank(const char* name, uint32_t rank, uint32_t size) {
  if (size < 1 || size > kCountMax || rank >= size) {
    return Invalid("layout.%s_rank %d of %d; allowed 0 <= rank < size <= %d", name, rank, size,
                   kCountMax);
  }
  return absl::OkStatus();
}

uint64_t AttentionBlockBytes(const Layout& layout) {
  const uint64_t values =
      2ULL * layout.layer_count * layout.kv_head_count * layout.block_tokens * layout.head_dim;
  switch (layout.codec) {
    case Codec::kNvfp4:
      return values / 16 * 9;  // 8 code bytes and 1 scale byte per 16 values
    case Codec::kFp8:
      return values;
    case Codec::kBf16:
      return values * 2;
    case Codec::kRaw:
      return layout.raw_block_bytes;
  }
  return 0;
}

}  // namespace

absl::Status Layout::Validate() const {
  if (model.empty()) return Invalid("layout.model is empty; name the model");
  KVT_RETURN_IF_ERROR(CheckName("model", model));
  KVT_RETURN_IF_ERROR(CheckName("weights_revision", weights_revision));
  KVT_RETURN_IF_ERROR(CheckName("tokenizer", tokenizer));
  KVT_RETURN_IF_ERROR(CheckName("scale_set", scale_set));
  KVT_RETURN_IF_ERROR(CheckName("rope", rope));
  KVT_RETURN_IF_ERROR(CheckCount("layer_count", layer_count));
  KVT_RETURN_IF_ERROR(CheckCount("kv_head_count", kv_head_count));
  if (head_dim != 64 && head_dim != 96 && head_dim != 128 && head_dim != 192 && head_dim != 256) {
    return Invalid("layout.head_dim is %d; allowed 64, 96, 128, 192, 256", head_dim);
  }
  if (block_tokens != 16 && block_tokens != 32 && block_tokens != 64 && block_tokens != 128) {
    return Invalid("layout.block_tokens is %d; allowed 16, 32, 64, 128", block_tokens);
  }
  KVT_RETURN_IF_ERROR(CheckRank("tp", tp_rank, tp_size));
  KVT_RETURN_IF_ERROR(CheckRank("pp", pp_rank, pp_size));
  if (static_cast<uint32_t>(codec) < 1 || static_cast<uint32_t>(codec) > 4) {
    return Invalid("layout.codec is %d; allowed nvfp4, fp8, bf16, raw", static_cast<int>(codec));
  }
  if ((codec == Codec::kRaw) != (raw_block_bytes != 0)) {
    return Invalid("layout.raw_block_bytes is %d; it is set for codec raw and only then",
                   raw_block_bytes);
  }
  const uint64_t bytes = AttentionBlockBytes(*this);
  if (bytes > kBlockBytesMax) {
    return Invalid("a block of this layout has %d bytes; at most %d", bytes, kBlockBytesMax);
  }
  return absl::OkStatus();
}

uint32_t Layout::BlockBytes() const {
  const uint64_t bytes = AttentionBlockBytes(*this);
  KVT_CHECK(bytes > 0 && bytes <= kBlockBytesMax);
  return static_cast<uint32_t>(bytes);
}

LayoutFingerprint Layout::Fingerprint() const {
  return FieldHasher()
      .Add("kvtier-layout")
      .AddU32(kFormatVersion)
      .Add(model)
      .Add(weights_revision)
      .Add(tokenizer)
      .AddU32(layer_count)
      .AddU32(kv_head_count)
      .AddU32(head_dim)
      .AddU32(block_tokens)
      .AddU32(static_cast<uint32_t>(codec))
      .Add(scale_set)
      .Add(rope)
      .AddU32(tp_rank)
      .AddU32(tp_size)
      .AddU32(pp_rank)
      .AddU32(pp_size)
      .AddU32(raw_block_bytes)
      .Finish();
}

}  // namespace kvtier
