// SPDX-License-Identifier: Apache-2.0
#include "daemon/metrics.h"

#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace kvtier {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<ClientMetric::Label>;

std::string NameOf(v1::Tier tier) {
  switch (tier) {
    case v1::TIER_HBM:
      return "hbm";
    case v1::TIER_HOST:
      return "host";
    case v1::TIER_NVME:
      return "nvme";
    default:
      return "unknown";
  }
}

// Families in the order in which they are added.
class Exposition {
 public:
  // A family; its samples follow.
  void Counter(std::string name, std::string help) {
    Add(MetricType::Counter, std::move(name), std::move(help));
  }
  void Gauge(std::string name, std::string help) {
    Add(MetricType::Gauge, std::move(name), std::move(help));
  }
  void Sample(uint64_t value, Labels labels = {}) {
    ClientMetric metric;
    metric.label = std::move(labels);
    // The serializer takes the one of the family's type.
    metric.counter.value = static_cast<double>(value);
    metric.gauge.value = static_cast<double>(value);
    families_.back().metric.push_back(std::move(metric));
  }
  void CounterOf(std::string name, std::string help, uint64_t value) {
    Counter(std::move(name), std::move(help));
    Sample(value);
  }
  void GaugeOf(std::string name, std::string help, uint64_t value) {
    Gauge(std::move(name), std::move(help));
    Sample(value);
  }

  std::string Text() const { return prometheus::TextSerializer().Serialize(families_); }

 private:
  void Add(MetricType type, std::string name, std::string help) {
    MetricFamily family;
    family.name = std::move(name);
    family.help = std::move(help);
    family.type = type;
    families_.push_back(std::move(family));
  }

  std::vector<MetricFamily> families_;
};

void AddDaemon(const v1::GetStatusResponse& status, Exposition* out) {
  out->Gauge("kvtier_build_info", "1; the version, the device of hbm and the I/O engine of nvme.");
  out->Sample(1, {{"version", status.version()},
                  {"device", status.device()},
                  {"io_engine", status.io_engine()}});
  // Not a counter: it starts again with the daemon, as the counters do.
  out->Gauge("kvtier_uptime_seconds", "Since the daemon started.");
  out->Sample(status.uptime_ms() / 1000);
  out->GaugeOf("kvtier_draining", "1 while the daemon is stopping.", status.draining() ? 1 : 0);
  out->GaugeOf("kvtier_sessions", "Engine processes connected.", status.session_count());
  out->GaugeOf("kvtier_contexts", "Contexts known.", status.context_count());
  out->GaugeOf("kvtier_index_blocks", "Blocks in the index, of all tiers.", status.block_count());
  out->Gauge("kvtier_tier_healthy", "0 while the tier is degraded: it serves less, or nothing.");
  for (const v1::TierHealth& health : status.tier_healths()) {
    out->Sample(health.degraded() ? 0 : 1, {{"tier", NameOf(health.tier())}});
  }
}

struct TierFamily {
  const char* name;
  const char* help;
  bool is_counter;
  uint64_t (v1::TierStats::*value)() const;
};

constexpr TierFamily kTierFamilies[] = {
    {"kvtier_tier_capacity_bytes", "Size of the tier.", false, &v1::TierStats::capacity_bytes},
    {"kvtier_tier_used_bytes", "Bytes in slots; on nvme live payload with headers and padding.",
     false, &v1::TierStats::used_bytes},
    {"kvtier_tier_pinned_bytes",
     "Bytes under lease, reservation, transfer or quarantine: they cannot leave now.", false,
     &v1::TierStats::pinned_bytes},
    {"kvtier_tier_quarantined_bytes", "Bytes whose reuse waits for a client to be gone.", false,
     &v1::TierStats::quarantined_bytes},
    {"kvtier_tier_blocks", "Blocks with a replica on the tier.", false,
     &v1::TierStats::block_count},
    {"kvtier_tier_physical_bytes", "Bytes that segment files occupy; 0 for memory tiers.", false,
     &v1::TierStats::physical_bytes},
    {"kvtier_lookup_hit_blocks_total", "Blocks that lookups found, by the best tier they are on.",
     true, &v1::TierStats::hit_block_count},
    {"kvtier_evicted_blocks_total", "Replicas that left the tier to make room.", true,
     &v1::TierStats::evicted_block_count},
    {"kvtier_corrupt_blocks_total",
     "Replicas dropped because their bytes were not the ones stored.", true,
     &v1::TierStats::corrupt_block_count},
};

void AddTiers(const v1::GetTiersResponse& tiers, Exposition* out) {
  for (const TierFamily& family : kTierFamilies) {
    if (family.is_counter) {
      out->Counter(family.name, family.help);
    } else {
      out->Gauge(family.name, family.help);
    }
    for (const v1::TierStats& tier : tiers.tiers()) {
      out->Sample((tier.*family.value)(), {{"tier", NameOf(tier.tier())}});
    }
  }
}

void AddLinks(const v1::GetTiersResponse& tiers, Exposition* out) {
  const auto labels = [](const v1::LinkStats& link) -> Labels {
    return {{"src", NameOf(link.source())}, {"dst", NameOf(link.target())}};
  };
  out->Counter("kvtier_transfer_bytes_total", "Payload bytes moved between two tiers.");
  for (const v1::LinkStats& link : tiers.links()) out->Sample(link.moved_bytes(), labels(link));
  out->Counter("kvtier_transfer_blocks_total", "Blocks moved between two tiers.");
  for (const v1::LinkStats& link : tiers.links()) {
    out->Sample(link.moved_block_count(), labels(link));
  }
  out->Counter("kvtier_transfer_failures_total", "Transfers that ended in an error.");
  for (const v1::LinkStats& link : tiers.links()) {
    out->Sample(link.failed_block_count(), labels(link));
  }
  out->Gauge("kvtier_inflight_transfers", "Transfers under way.");
  for (const v1::LinkStats& link : tiers.links()) out->Sample(link.inflight_count(), labels(link));
}

void AddStore(const v1::StoreStats& store, Exposition* out) {
  out->CounterOf("kvtier_lookup_blocks_total", "Blocks that lookups asked for.",
                 store.lookup_block_count());
  out->CounterOf("kvtier_lookup_miss_blocks_total", "Blocks that lookups did not find.",
                 store.lookup_block_count() - store.lookup_hit_block_count());
  out->CounterOf("kvtier_committed_blocks_total", "Blocks that clients stored.",
                 store.committed_block_count());
  out->CounterOf("kvtier_committed_bytes_total", "Payload bytes that clients stored.",
                 store.committed_bytes());
  out->Counter("kvtier_acquired_blocks_total",
               "Blocks leased, in place or after a read from nvme.");
  out->Sample(store.acquired_in_place_block_count(), {{"path", "in_place"}});
  out->Sample(store.acquired_after_read_block_count(), {{"path", "after_read"}});
  out->GaugeOf("kvtier_leases", "Leases held by clients.", store.lease_count());
  out->GaugeOf("kvtier_pending_fills", "Blocks reserved and not yet committed.",
               store.pending_fill_count());
  out->CounterOf("kvtier_admission_rejected_blocks_total",
                 "Blocks that nvme did not take: not worth a write.",
                 store.admission_rejected_block_count());
  out->CounterOf("kvtier_evicted_then_missed_blocks_total",
                 "Blocks looked up within an hour after they were gone.",
                 store.evicted_then_missed_block_count());
  out->CounterOf("kvtier_prefetched_blocks_total", "Blocks read from nvme ahead of their use.",
                 store.prefetched_block_count());
  out->CounterOf("kvtier_prefetched_unused_blocks_total",
                 "Blocks read ahead that left memory unused.",
                 store.prefetched_unused_block_count());
}

struct TenantFamily {
  const char* name;
  const char* help;
  bool is_counter;
  uint64_t (*value)(const v1::TenantTier& tier, const v1::TierStats& whole);
};

constexpr TenantFamily kTenantFamilies[] = {
    {"kvtier_tenant_used_bytes", "Bytes in slots of the tier that are the tenant's.", false,
     [](const v1::TenantTier& tier, const v1::TierStats&) { return tier.used_bytes(); }},
    {"kvtier_tenant_quota_bytes",
     "The most that the tenant may have there; without a quota, the size of the tier.", false,
     [](const v1::TenantTier& tier, const v1::TierStats& whole) {
       return tier.has_quota_bytes() ? tier.quota_bytes() : whole.capacity_bytes();
     }},
    {"kvtier_tenant_reserve_bytes", "What other tenants leave to it there.", false,
     [](const v1::TenantTier& tier, const v1::TierStats&) { return tier.reserve_bytes(); }},
    {"kvtier_tenant_pinned_bytes", "Of its bytes, those that cannot leave now.", false,
     [](const v1::TenantTier& tier, const v1::TierStats&) { return tier.pinned_bytes(); }},
    {"kvtier_tenant_blocks", "Blocks of the tenant with a replica on the tier.", false,
     [](const v1::TenantTier& tier, const v1::TierStats&) { return tier.block_count(); }},
    {"kvtier_tenant_displaced_blocks_total",
     "Its replicas that left the tier to make room for another tenant.", true,
     [](const v1::TenantTier& tier, const v1::TierStats&) { return tier.displaced_block_count(); }},
};

void AddTenants(const v1::GetTiersResponse& tiers, const v1::ListTenantsResponse& tenants,
                Exposition* out) {
  for (const TenantFamily& family : kTenantFamilies) {
    if (family.is_counter) {
      out->Counter(family.name, family.help);
    } else {
      out->Gauge(family.name, family.help);
    }
    for (const v1::TenantInfo& tenant : tenants.tenants()) {
      // Both answers have the tiers that there are, fastest first.
      for (int i = 0; i < std::min(tenant.tiers_size(), tiers.tiers_size()); ++i) {
        out->Sample(family.value(tenant.tiers(i), tiers.tiers(i)),
                    {{"tenant", tenant.tenant()}, {"tier", NameOf(tenant.tiers(i).tier())}});
      }
    }
  }
}

}  // namespace

std::string MetricsText(const v1::GetStatusResponse& status, const v1::GetTiersResponse& tiers,
                        const v1::ListTenantsResponse& tenants) {
  Exposition out;
  AddDaemon(status, &out);
  AddTiers(tiers, &out);
  AddLinks(tiers, &out);
  AddStore(tiers.store(), &out);
  AddTenants(tiers, tenants, &out);
  return out.Text();
}

}  // namespace kvtier
