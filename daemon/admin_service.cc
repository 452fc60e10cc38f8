// SPDX-License-Identifier: Apache-2.0
#include "daemon/admin_service.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

#include "daemon/answer.h"
#include "daemon/monotonic.h"
#include "daemon/requests.h"
#include "proto/base/packed.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"
#include "proto/base/version.h"
#include "tiers/nvme/striped_tier.h"

namespace kvtier {
namespace {

constexpr std::array kTiers = {TierId::kHbm, TierId::kHost, TierId::kNvme};
constexpr uint32_t kContextsDefault = 1000;
constexpr uint32_t kContextsMax = 10'000;

// The engine without the reason why it is not a better one: "pread, without io_uring: ...".
std::string NameOf(const std::string& io_engine) {
  return io_engine.substr(0, io_engine.find(','));
}

void FillStore(const core::CoreCounters& counters, v1::StoreStats* store) {
  store->set_lookup_block_count(counters.lookup_block_count);
  store->set_lookup_hit_block_count(counters.lookup_hit_block_count);
  store->set_committed_block_count(counters.committed_block_count);
  store->set_committed_bytes(counters.committed_bytes);
  store->set_acquired_in_place_block_count(counters.acquired_in_place_block_count);
  store->set_acquired_after_read_block_count(counters.acquired_after_read_block_count);
  store->set_lease_count(counters.lease_count);
  store->set_pending_fill_count(counters.pending_fill_count);
  store->set_admission_rejected_block_count(counters.admission_rejected_block_count);
  store->set_evicted_then_missed_block_count(counters.regret.evicted_then_missed_block_count);
  store->set_prefetched_block_count(counters.regret.prefetched_block_count);
  store->set_prefetched_unused_block_count(counters.regret.prefetched_unused_block_count);
}

void FillLinks(const core::CoreCounters& counters, v1::GetTiersResponse* response) {
  for (const TierId source : kTiers) {
    for (const TierId target : kTiers) {
      if (source == target) continue;
      const core::LinkCounters& link =
          counters.links[static_cast<size_t>(source)][static_cast<size_t>(target)];
      v1::LinkStats* stats = response->add_links();
      stats->set_source(TierToProto(source));
      stats->set_target(TierToProto(target));
      stats->set_moved_bytes(link.moved_bytes);
      stats->set_moved_block_count(link.moved_block_count);
      stats->set_failed_block_count(link.failed_block_count);
      stats->set_inflight_count(link.inflight_count);
    }
  }
}

void FillBlock(const core::BlockSummary& block, v1::BlockInfo* info) {
  info->set_key(std::string(block.key.AsBytes()));
  info->set_depth(block.depth);
  info->set_bytes(block.bytes);
  if ((block.residency & kResidentHbm) != 0) info->add_tiers(v1::TIER_HBM);
  if ((block.residency & kResidentHost) != 0) info->add_tiers(v1::TIER_HOST);
  if ((block.residency & kResidentNvme) != 0) info->add_tiers(v1::TIER_NVME);
  info->set_lease_count(block.lease_count);
  info->set_use_count(block.use_count);
  info->set_state(block.pending ? "pending" : block.residency != 0 ? "committed" : "missing");
}

std::string ReasonText(const core::MissAnswer& answer) {
  if (answer.other_namespace) return "other_namespace";
  switch (answer.state) {
    case core::MissAnswer::State::kNeverStored:
      return "never_stored";
    case core::MissAnswer::State::kStored:
      return "stored";
    case core::MissAnswer::State::kPending:
      return "pending";
    case core::MissAnswer::State::kLeft:
      break;
  }
  constexpr std::array<const char*, policy::kMissReasonCount> kReasons = {
      "never_stored", "evicted", "not_admitted", "corrupt", "dropped", "tier_lost"};
  return kReasons[static_cast<size_t>(answer.departure.reason)];
}

void FillMiss(const Key& key, const core::MissAnswer& answer, core::TimeMs now_ms,
              v1::MissInfo* info) {
  info->set_key(std::string(key.AsBytes()));
  info->set_reason(ReasonText(answer));
  if (answer.state != core::MissAnswer::State::kLeft) return;
  const policy::Departure& left = answer.departure;
  info->set_left_ms_ago(now_ms - left.at_ms);
  info->set_tier(TierToProto(static_cast<TierId>(left.tier)));
  info->set_idle_ms(left.at_ms - std::min(left.at_ms, left.last_use_ms));
  info->set_use_count(left.use_count);
}

}  // namespace

AdminService::AdminService(Options options, Store* store, const TenantTable* tenants)
    : options_(std::move(options)), started_ms_(MonotonicMs()), store_(store), tenants_(tenants) {}

core::CoreCounters AdminService::Counters() {
  return store_->Run(
      [](core::StoreCore& core, core::TimeMs, core::Effects*) { return core.Counters(); });
}

void AdminService::FillStatus(v1::GetStatusResponse* response) {
  const core::CoreCounters counters = Counters();
  response->set_version(kVersion);
  response->set_uptime_ms(MonotonicMs() - started_ms_);
  response->set_device(options_.device);
  if (const StripedTier* const nvme = Nvme(); nvme != nullptr) {
    response->set_io_engine(NameOf(nvme->Stats().io_engine));
  }
  response->set_session_count(counters.session_count);
  response->set_context_count(counters.context_count);
  response->set_block_count(counters.block_count);
  response->set_pid(static_cast<uint32_t>(getpid()));
  response->set_draining(draining_);
  for (const TierId id : kTiers) {
    const Tier* const tier = store_->tiers().At(id);
    if (tier == nullptr) continue;
    const TierHealth health = tier->Health();
    v1::TierHealth* info = response->add_tier_healths();
    info->set_tier(TierToProto(id));
    info->set_degraded(health.degraded);
    info->set_reason(health.reason);
  }
}

AdminService::Unary* AdminService::GetStatus(Context* context, const v1::GetStatusRequest*,
                                             v1::GetStatusResponse* response) {
  FillStatus(response);
  return FinishNow(context, absl::OkStatus(), options_.epoch, response);
}

const StripedTier* AdminService::Nvme() const {
  return dynamic_cast<const StripedTier*>(store_->tiers().nvme);
}

void AdminService::FillNvme(v1::NvmeStats* nvme) const {
  const StripedTier* const tier = Nvme();
  if (tier == nullptr) return;
  const NvmeStats stats = tier->Stats();
  nvme->set_io_engine(stats.io_engine);
  nvme->set_registered_bytes(stats.registered_bytes);
  nvme->set_direct(stats.is_direct);
  nvme->set_segment_count(stats.segment_count);
  nvme->set_written_bytes(stats.written_bytes);
  nvme->set_moved_bytes(stats.moved_bytes);
  nvme->set_useful_read_bytes(stats.useful_read_bytes);
  nvme->set_written_today_bytes(stats.written_today_bytes);
  nvme->set_write_bytes_per_day_max(options_.write_bytes_per_day_max);
  nvme->set_scrubbed_block_count(stats.scrubbed_count);
  nvme->set_scrub_lost_block_count(stats.scrub_lost_count);
  nvme->set_scrub_round_count(stats.scrub_round_count);
  nvme->set_recovered_block_count(stats.recovered_count);
  nvme->set_dropped_block_count(stats.dropped_count);
  nvme->set_rebuilt(stats.is_rebuilt);
  for (const StripedTier::Member& member : tier->Members()) {
    v1::NvmeDirectory* const directory = nvme->add_directories();
    directory->set_path(member.dir);
    directory->set_failure(member.failure);
    directory->set_capacity_bytes(member.usage.capacity_bytes);
    directory->set_used_bytes(member.usage.used_bytes);
    directory->set_physical_bytes(member.usage.physical_bytes);
  }
}

void AdminService::FillTier(TierId id, const core::TierCounters& counters,
                            v1::GetTiersResponse* response) const {
  const Tier* const tier = store_->tiers().At(id);
  if (tier == nullptr) return;
  const TierUsage usage = tier->Usage();
  v1::TierStats* stats = response->add_tiers();
  stats->set_tier(TierToProto(id));
  stats->set_capacity_bytes(usage.capacity_bytes);
  stats->set_used_bytes(usage.used_bytes);
  stats->set_block_count(counters.block_count);
  stats->set_pinned_bytes(counters.pinned_bytes);
  stats->set_quarantined_bytes(counters.quarantined_bytes);
  stats->set_hit_block_count(counters.hit_block_count);
  stats->set_evicted_block_count(counters.evicted_block_count);
  stats->set_corrupt_block_count(counters.corrupt_block_count);
  stats->set_degraded(tier->Health().degraded);
  if (id == TierId::kNvme) {
    stats->set_physical_bytes(usage.physical_bytes);
    FillNvme(stats->mutable_nvme());
  }
  stats->set_ready_bytes(usage.ready_bytes);
}

void AdminService::FillTiers(v1::GetTiersResponse* response) {
  const core::CoreCounters counters = Counters();
  for (const TierId id : kTiers) FillTier(id, counters.tiers[static_cast<size_t>(id)], response);
  FillLinks(counters, response);
  FillStore(counters, response->mutable_store());
}

AdminService::Unary* AdminService::GetTiers(Context* context, const v1::GetTiersRequest*,
                                            v1::GetTiersResponse* response) {
  FillTiers(response);
  return FinishNow(context, absl::OkStatus(), options_.epoch, response);
}

void AdminService::FillTenants(v1::ListTenantsResponse* response) {
  const core::TenantsReport report = store_->Run(
      [](core::StoreCore& core, core::TimeMs, core::Effects*) { return core.Tenants(); });
  for (OwnerIdx owner = 0; owner < tenants_->count(); ++owner) {
    v1::TenantInfo* info = response->add_tenants();
    info->set_tenant(tenants_->Name(owner));
    FillTenantTiers(owner < report.tenants.size() ? report.tenants[owner] : core::TenantCounters(),
                    info->mutable_tiers());
  }
  FillTenantTiers(report.unclaimed, response->mutable_unclaimed());
}

void AdminService::FillTenantTiers(
    const core::TenantCounters& counters,
    google::protobuf::RepeatedPtrField<v1::TenantTier>* tiers) const {
  for (const TierId id : kTiers) {
    if (store_->tiers().At(id) == nullptr) continue;
    const core::TenantTierCounters& counts = counters.tiers[static_cast<size_t>(id)];
    const uint64_t quota_bytes = counters.limits.quota_bytes[static_cast<size_t>(id)];
    v1::TenantTier* tier = tiers->Add();
    tier->set_tier(TierToProto(id));
    tier->set_used_bytes(counts.used_bytes);
    if (quota_bytes != UINT64_MAX) tier->set_quota_bytes(quota_bytes);
    tier->set_reserve_bytes(counters.limits.reserve_bytes[static_cast<size_t>(id)]);
    tier->set_pinned_bytes(counts.pinned_bytes);
    tier->set_block_count(counts.block_count);
    tier->set_displaced_block_count(counts.displaced_block_count);
  }
}

AdminService::Unary* AdminService::ListTenants(Context* context, const v1::ListTenantsRequest*,
                                               v1::ListTenantsResponse* response) {
  FillTenants(response);
  return FinishNow(context, absl::OkStatus(), options_.epoch, response);
}

AdminService::Unary* AdminService::ListContexts(Context* context,
                                                const v1::ListContextsRequest* request,
                                                v1::ListContextsResponse* response) {
  const uint32_t limit = request->limit() == 0 ? kContextsDefault : request->limit();
  if (limit > kContextsMax) {
    return FinishNow(
        context,
        WithReason(Invalid("limit: %d, more than %d", limit, kContextsMax), reason::kBadArgument),
        options_.epoch, response);
  }
  core::TimeMs now_ms = 0;
  const std::vector<core::ContextSummary> contexts =
      store_->Run([&](core::StoreCore& core, core::TimeMs run_ms, core::Effects*) {
        now_ms = run_ms;
        response->set_total_count(core.Counters().context_count);
        return core.Contexts(limit);
      });
  for (const core::ContextSummary& summary : contexts) {
    v1::ContextInfo* info = response->add_contexts();
    info->set_context(summary.name);
    info->set_tenant(tenants_->Name(summary.owner));
    info->set_state(summary.active ? "active" : "paused");
    info->set_block_count(summary.block_count);
    info->set_hbm_block_count(summary.tier_block_count[0]);
    info->set_host_block_count(summary.tier_block_count[1]);
    info->set_nvme_block_count(summary.tier_block_count[2]);
    info->set_missing_block_count(summary.missing_block_count);
    info->set_idle_ms(now_ms - summary.last_use_ms);
  }
  return FinishNow(context, absl::OkStatus(), options_.epoch, response);
}

absl::StatusOr<std::vector<core::BlockSummary>> AdminService::FindBlocks(
    const v1::WhereRequest& request) {
  if (request.context().empty() == request.key().empty()) {
    return WithReason(Invalid("context, key: one of the two must be set"), reason::kBadArgument);
  }
  if (!request.context().empty()) {
    return store_->Run([&](core::StoreCore& core, core::TimeMs, core::Effects*) {
      return core.WhereContext(request.context());
    });
  }
  const absl::StatusOr<Key> key = Key::FromBytes(request.key());
  if (!key.ok()) return WithReason(Annotate(key.status(), "key"), reason::kBadArgument);
  return store_->Run(
      [&](core::StoreCore& core, core::TimeMs, core::Effects*) { return core.WhereKey(*key); });
}

AdminService::Unary* AdminService::Where(Context* context, const v1::WhereRequest* request,
                                         v1::WhereResponse* response) {
  const absl::StatusOr<std::vector<core::BlockSummary>> blocks = FindBlocks(*request);
  if (blocks.ok()) {
    for (const core::BlockSummary& block : *blocks) FillBlock(block, response->add_blocks());
  }
  return FinishNow(context, blocks.status(), options_.epoch, response);
}

AdminService::Unary* AdminService::WhyMiss(Context* context, const v1::WhyMissRequest* request,
                                           v1::WhyMissResponse* response) {
  const absl::StatusOr<std::vector<Key>> keys = ParseKeys(request->keys());
  absl::Status status = keys.status();
  std::optional<NamespaceHash> asked;
  if (status.ok() && !request->namespace_hash().empty()) {
    const absl::StatusOr<NamespaceHash> hash = NamespaceHash::FromBytes(request->namespace_hash());
    if (hash.ok()) {
      asked = *hash;
    } else {
      status = WithReason(Annotate(hash.status(), "namespace_hash"), reason::kBadArgument);
    }
  }
  if (status.ok()) {
    store_->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects*) {
      for (const Key& key : *keys) {
        FillMiss(key, core.WhyMiss(asked, key), now_ms, response->add_misses());
      }
    });
  }
  return FinishNow(context, status, options_.epoch, response);
}

AdminService::Unary* AdminService::Flush(Context* context, const v1::FlushRequest*,
                                         v1::FlushResponse* response) {
  response->set_epoch(options_.epoch);
  auto* call = new WaitingCall(context);  // deletes itself
  const core::TimeMs deadline_ms = DeadlineMs(*context, kDefaultTransferDeadlineMs);
  store_->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
    core.Flush(
        deadline_ms, now_ms,
        [call, response](absl::StatusOr<uint64_t> flushed) {
          if (flushed.ok()) response->set_flushed_block_count(*flushed);
          call->Answer(flushed.status());
        },
        effects);
  });
  return call;
}

}  // namespace kvtier
