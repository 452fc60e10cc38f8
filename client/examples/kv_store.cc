// SPDX-License-Identifier: Apache-2.0
#include "client/examples/kv_store.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "kernels/gather.h"
#include "kernels/nvfp4.h"
#include "kernels/seal.h"
#include "proto/base/status_util.h"

namespace kvtier::example {
namespace {

// Calibrated: no K or V of the toy model is larger than 8. See docs/scale-sets.md.
constexpr float kGlobalScale = 0x1p-5F;
constexpr char kScaleSet[] = "toy-8";

absl::Status StatusOf(const kernels::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return status.code() == kernels::StatusCode::kDataLoss ? DataLoss("%s", status.message())
                                                         : Invalid("%s", status.message());
}

}  // namespace

absl::StatusOr<std::unique_ptr<KvStore>> KvStore::Open(const Options& options,
                                                       const CacheShape& shape) {
  std::unique_ptr<KvStore> store(new KvStore(options, shape));
  KVT_ASSIGN_OR_RETURN(
      store->client_,
      client::Client::Connect({.run_dir = options.run_dir, .client_name = options.engine_name}));
  Layout layout;
  layout.model = "toy";
  layout.layer_count = shape.layer_count;
  layout.kv_head_count = shape.kv_head_count;
  layout.head_dim = shape.head_dim;
  layout.block_tokens = shape.page_tokens;
  layout.codec = options.codec;
  // Blocks sealed with other scales must not meet.
  if (options.codec == Codec::kNvfp4) layout.scale_set = kScaleSet;
  KVT_ASSIGN_OR_RETURN(store->ns_, store->client_->RegisterLayout(layout));
  return store;
}

std::vector<Key> KvStore::KeysOf(std::span<const uint32_t> tokens) const {
  std::vector<Key> keys;
  std::optional<Key> parent;
  for (size_t end = shape_.page_tokens; end <= tokens.size(); end += shape_.page_tokens) {
    parent = HashBlock(ns_.hash, parent,
                       tokens.subspan(end - shape_.page_tokens).first(shape_.page_tokens));
    keys.push_back(*parent);
  }
  return keys;
}

kernels::LayerFormat KvStore::format() const {
  if (options_.codec == Codec::kNvfp4) return {};
  return {.k = kernels::SideFormat::kBf16, .v = kernels::SideFormat::kBf16};
}

template <typename Visit>
absl::Status KvStore::ForEachTile(Visit&& visit) const {
  const uint64_t tile_bytes = kernels::TileBytes(tile(), format());
  for (uint32_t layer = 0; layer < shape_.layer_count; ++layer) {
    for (uint32_t head = 0; head < shape_.kv_head_count; ++head) {
      const uint64_t tile_idx = uint64_t{layer} * shape_.kv_head_count + head;
      KVT_RETURN_IF_ERROR(StatusOf(visit(layer, head, tile_idx * tile_bytes, tile_bytes)));
    }
  }
  return absl::OkStatus();
}

absl::Status KvStore::SealPage(uint32_t page, std::span<std::byte> block, PagedCache* cache) const {
  const bool has_scales = options_.codec == Codec::kNvfp4;
  const kernels::SealOptions scales{.g_k = has_scales ? kGlobalScale : 1.0F,
                                    .g_v = has_scales ? kGlobalScale : 1.0F};
  kernels::SealStats stats;
  KVT_RETURN_IF_ERROR(ForEachTile([&](uint32_t layer, uint32_t head, uint64_t at, uint64_t bytes) {
    const auto rows = [&](bool is_v) {
      return kernels::ConstRows{.data = cache->Rows(page, layer, is_v, head),
                                .token_stride = shape_.head_dim};
    };
    return kernels::SealTile(tile(), format(), rows(false), rows(true), scales,
                             block.subspan(at, bytes), &stats);
  }));
  if (stats.nonfinite_count + stats.saturated_count == 0) return absl::OkStatus();
  return FailedPrecondition("a page does not fit the scale set");
}

absl::Status KvStore::GatherPage(std::span<const std::byte> block, uint32_t page,
                                 PagedCache* cache) const {
  const bool has_scales = options_.codec == Codec::kNvfp4;
  const kernels::GatherOptions scales{.g_k = has_scales ? kGlobalScale : 1.0F,
                                      .g_v = has_scales ? kGlobalScale : 1.0F};
  return ForEachTile([&](uint32_t layer, uint32_t head, uint64_t at, uint64_t bytes) {
    const auto rows = [&](bool is_v) {
      return kernels::MutableRows{.data = cache->Rows(page, layer, is_v, head),
                                  .token_stride = shape_.head_dim};
    };
    return kernels::GatherTile(tile(), format(), block.subspan(at, bytes), scales, rows(false),
                               rows(true));
  });
}

absl::Status KvStore::Save(std::span<const Key> keys, size_t first, std::span<const uint32_t> pages,
                           PagedCache* cache) {
  if (first == keys.size()) return absl::OkStatus();
  const std::optional<Key> parent = first == 0 ? std::nullopt : std::optional(keys[first - 1]);
  KVT_ASSIGN_OR_RETURN(const client::Fill fill, client_->Reserve(ns_, parent, keys.subspan(first)));
  for (size_t i = 0; i < fill.blocks.size(); ++i) {
    if (fill.blocks[i].status != BlockStatus::kOk) continue;
    absl::Status sealed = SealPage(pages[first + i], fill.blocks[i].bytes, cache);
    if (!sealed.ok()) {
      client_->Abort(ns_, fill).IgnoreError();
      return sealed;
    }
  }
  KVT_ASSIGN_OR_RETURN(const std::vector<BlockStatus> committed, client_->Commit(ns_, fill));
  counts_.stored +=
      static_cast<uint64_t>(std::count(committed.begin(), committed.end(), BlockStatus::kOk));
  return absl::OkStatus();
}

absl::StatusOr<size_t> KvStore::Load(std::span<const Key> keys, std::span<const uint32_t> pages,
                                     PagedCache* cache) {
  if (keys.empty()) return size_t{0};
  KVT_ASSIGN_OR_RETURN(const client::Lease lease, client_->Acquire(ns_, keys));
  const size_t count = lease.ok_prefix_count();
  for (size_t i = 0; i < count; ++i) {
    KVT_RETURN_IF_ERROR(GatherPage(lease.blocks()[i].bytes, pages[i], cache));
  }
  // Of V: it counts in full where its token does.
  if (options_.flips_a_bit && counts_.loaded == 0 && count > 0) {
    *cache->Rows(pages[0], 0, true, 0) ^= 1;
  }
  counts_.loaded += count;
  return count;
}

absl::Status KvStore::Pause(const std::string& name, std::span<const Key> keys) {
  KVT_RETURN_IF_ERROR(client_->CreateContext(ns_, name).status());
  KVT_RETURN_IF_ERROR(client_->AppendContext(ns_, name, 0, keys).status());
  return client_->PauseContext(ns_, name).status();
}

absl::Status KvStore::Resume(const std::string& name) {
  KVT_ASSIGN_OR_RETURN(client::Ticket ticket, client_->ResumeContext(ns_, name));
  while (!ticket.done) {
    std::this_thread::sleep_for(
        std::chrono::milliseconds(ticket.eta_known ? std::max(ticket.eta_ms, 1U) : 1));
    KVT_ASSIGN_OR_RETURN(ticket, client_->GetTicket(ticket.ticket_id));
  }
  return client_->CloseContext(ns_, name, false).status();
}

}  // namespace kvtier::example
