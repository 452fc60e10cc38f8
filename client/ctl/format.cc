// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/format.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "client/ctl/table.h"
#include "proto/base/key.h"

namespace kvtier::ctl {
namespace {

std::string KeyText(const std::string& bytes) {
  const auto key = Key::FromBytes(bytes);
  return key.ok() ? key->Hex() : "";
}

double ShareOf(uint64_t part, uint64_t whole) {
  return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
}

std::string LinkText(const v1::LinkStats& link) {
  return TierText(link.source()) + " -> " + TierText(link.target());
}

std::string TierList(const v1::BlockInfo& block) {
  std::string text;
  for (const int tier : block.tiers()) {
    if (!text.empty()) text += "+";
    text += TierText(static_cast<v1::Tier>(tier));
  }
  return text.empty() ? "-" : text;
}

}  // namespace

std::string TierText(v1::Tier tier) {
  switch (tier) {
    case v1::TIER_HBM:
      return "hbm";
    case v1::TIER_HOST:
      return "host";
    case v1::TIER_NVME:
      return "nvme";
    default:
      return "unspecified";
  }
}

std::string EpochText(uint64_t epoch) { return absl::StrFormat("%016x", epoch); }

Json StatusJson(const v1::GetStatusResponse& status) {
  Json healths = Json::array();
  for (const v1::TierHealth& health : status.tier_healths()) {
    healths.push_back({{"tier", TierText(health.tier())},
                       {"degraded", health.degraded()},
                       {"reason", health.reason()}});
  }
  return {{"version", status.version()},
          {"epoch", EpochText(status.epoch())},
          {"pid", status.pid()},
          {"uptime_ms", status.uptime_ms()},
          {"device", status.device()},
          {"io_engine", status.io_engine()},
          {"draining", status.draining()},
          {"session_count", status.session_count()},
          {"context_count", status.context_count()},
          {"block_count", status.block_count()},
          {"tiers", healths}};
}

std::string StatusText(const v1::GetStatusResponse& status) {
  bool degraded = false;
  std::string tiers;
  for (const v1::TierHealth& health : status.tier_healths()) {
    degraded = degraded || health.degraded();
    std::string state = health.degraded() ? "DEGRADED: " : "ok";
    // Some of its directories are of no use, others are.
    if (!health.degraded() && !health.reason().empty()) state += ", without ";
    tiers += absl::StrFormat("  %-9s %s\n", TierText(health.tier()), state + health.reason());
  }
  const char* state = status.draining() ? "draining" : degraded ? "degraded" : "serving";
  return absl::StrFormat(
             "kvtierd %s, pid %d, %s for %s\n"
             "  epoch     %s\n"
             "  device    %s, nvme by %s\n"
             "  sessions  %s\n"
             "  contexts  %s\n"
             "  blocks    %s\n",
             status.version(), status.pid(), state, HumanDuration(status.uptime_ms()),
             EpochText(status.epoch()), status.device(), status.io_engine(),
             HumanCount(status.session_count()), HumanCount(status.context_count()),
             HumanCount(status.block_count())) +
         tiers;
}

Json NvmeJson(const v1::NvmeStats& nvme) {
  Json directories = Json::array();
  for (const v1::NvmeDirectory& directory : nvme.directories()) {
    directories.push_back({{"path", directory.path()},
                           {"failure", directory.failure()},
                           {"capacity_bytes", directory.capacity_bytes()},
                           {"used_bytes", directory.used_bytes()},
                           {"physical_bytes", directory.physical_bytes()}});
  }
  return {{"io_engine", nvme.io_engine()},
          {"registered_bytes", nvme.registered_bytes()},
          {"direct", nvme.direct()},
          {"segment_count", nvme.segment_count()},
          {"written_bytes", nvme.written_bytes()},
          {"moved_bytes", nvme.moved_bytes()},
          {"useful_read_bytes", nvme.useful_read_bytes()},
          {"written_today_bytes", nvme.written_today_bytes()},
          {"write_bytes_per_day_max", nvme.write_bytes_per_day_max()},
          {"scrubbed_block_count", nvme.scrubbed_block_count()},
          {"scrub_lost_block_count", nvme.scrub_lost_block_count()},
          {"scrub_round_count", nvme.scrub_round_count()},
          {"recovered_block_count", nvme.recovered_block_count()},
          {"dropped_block_count", nvme.dropped_block_count()},
          {"rebuilt", nvme.rebuilt()},
          {"directories", directories}};
}

Json TiersJson(const v1::GetTiersResponse& response) {
  Json tiers = Json::array();
  for (const v1::TierStats& tier : response.tiers()) {
    tiers.push_back({{"tier", TierText(tier.tier())},
                     {"capacity_bytes", tier.capacity_bytes()},
                     {"used_bytes", tier.used_bytes()},
                     {"pinned_bytes", tier.pinned_bytes()},
                     {"quarantined_bytes", tier.quarantined_bytes()},
                     {"physical_bytes", tier.physical_bytes()},
                     {"ready_bytes", tier.ready_bytes()},
                     {"block_count", tier.block_count()},
                     {"hit_block_count", tier.hit_block_count()},
                     {"evicted_block_count", tier.evicted_block_count()},
                     {"corrupt_block_count", tier.corrupt_block_count()},
                     {"degraded", tier.degraded()}});
    if (tier.has_nvme()) tiers.back()["nvme"] = NvmeJson(tier.nvme());
  }
  Json links = Json::array();
  for (const v1::LinkStats& link : response.links()) {
    links.push_back({{"source", TierText(link.source())},
                     {"target", TierText(link.target())},
                     {"moved_bytes", link.moved_bytes()},
                     {"moved_block_count", link.moved_block_count()},
                     {"failed_block_count", link.failed_block_count()},
                     {"inflight_count", link.inflight_count()}});
  }
  const v1::StoreStats& store = response.store();
  return {{"epoch", EpochText(response.epoch())},
          {"tiers", tiers},
          {"links", links},
          {"store",
           {{"lookup_block_count", store.lookup_block_count()},
            {"lookup_hit_block_count", store.lookup_hit_block_count()},
            {"committed_block_count", store.committed_block_count()},
            {"committed_bytes", store.committed_bytes()},
            {"acquired_in_place_block_count", store.acquired_in_place_block_count()},
            {"acquired_after_read_block_count", store.acquired_after_read_block_count()},
            {"lease_count", store.lease_count()},
            {"pending_fill_count", store.pending_fill_count()},
            {"admission_rejected_block_count", store.admission_rejected_block_count()}}}};
}

std::string TiersText(const v1::GetTiersResponse& response) {
  TextTable tiers({"TIER", "CAPACITY>", "USED>", "FULL>", "PINNED>", "BLOCKS>", "HITS>", "EVICTED>",
                   "CORRUPT>", "STATE"});
  for (const v1::TierStats& tier : response.tiers()) {
    tiers.Add({TierText(tier.tier()), HumanBytes(tier.capacity_bytes()),
               HumanBytes(tier.used_bytes()),
               HumanShare(ShareOf(tier.used_bytes(), tier.capacity_bytes())),
               HumanBytes(tier.pinned_bytes()), HumanCount(tier.block_count()),
               HumanCount(tier.hit_block_count()), HumanCount(tier.evicted_block_count()),
               HumanCount(tier.corrupt_block_count()), tier.degraded() ? "degraded" : "ok"});
  }
  TextTable links({"LINK", "MOVED>", "BLOCKS>", "FAILED>", "IN FLIGHT>"});
  for (const v1::LinkStats& link : response.links()) {
    links.Add({LinkText(link), HumanBytes(link.moved_bytes()), HumanCount(link.moved_block_count()),
               HumanCount(link.failed_block_count()), HumanCount(link.inflight_count())});
  }
  const v1::StoreStats& store = response.store();
  TextTable blocks({"BLOCKS", "COUNT>"});
  blocks.Add({"looked up", HumanCount(store.lookup_block_count())});
  blocks.Add({"found", HumanCount(store.lookup_hit_block_count())});
  blocks.Add({"committed", HumanCount(store.committed_block_count())});
  blocks.Add({"leased in place", HumanCount(store.acquired_in_place_block_count())});
  blocks.Add({"leased after a read", HumanCount(store.acquired_after_read_block_count())});
  return tiers.Print() + "\n" + links.Print() + "\n" + blocks.Print();
}

Json TenantsJson(const v1::ListTenantsResponse& response) {
  const auto tiers_json = [](const auto& of_tenant) {
    Json tiers = Json::array();
    for (const v1::TenantTier& tier : of_tenant) {
      tiers.push_back({{"tier", TierText(tier.tier())},
                       {"used_bytes", tier.used_bytes()},
                       {"quota_bytes", nullptr},
                       {"reserve_bytes", tier.reserve_bytes()},
                       {"pinned_bytes", tier.pinned_bytes()},
                       {"block_count", tier.block_count()},
                       {"displaced_block_count", tier.displaced_block_count()}});
      if (tier.has_quota_bytes()) tiers.back()["quota_bytes"] = tier.quota_bytes();
    }
    return tiers;
  };
  Json tenants = Json::array();
  for (const v1::TenantInfo& tenant : response.tenants()) {
    tenants.push_back({{"tenant", tenant.tenant()}, {"tiers", tiers_json(tenant.tiers())}});
  }
  return {{"epoch", EpochText(response.epoch())},
          {"tenants", tenants},
          {"unclaimed", tiers_json(response.unclaimed())}};
}

std::string TenantsText(const v1::ListTenantsResponse& response) {
  TextTable table(
      {"TENANT", "TIER", "USED>", "QUOTA>", "RESERVE>", "PINNED>", "BLOCKS>", "DISPLACED>"});
  const auto add = [&table](const std::string& name, const v1::TenantTier& tier) {
    table.Add({name, TierText(tier.tier()), HumanBytes(tier.used_bytes()),
               tier.has_quota_bytes() ? HumanBytes(tier.quota_bytes()) : "-",
               tier.reserve_bytes() > 0 ? HumanBytes(tier.reserve_bytes()) : "-",
               HumanBytes(tier.pinned_bytes()), HumanCount(tier.block_count()),
               HumanCount(tier.displaced_block_count())});
  };
  for (const v1::TenantInfo& tenant : response.tenants()) {
    for (const v1::TenantTier& tier : tenant.tiers()) add(tenant.tenant(), tier);
  }
  for (const v1::TenantTier& tier : response.unclaimed()) {
    if (tier.block_count() > 0) add("(unclaimed)", tier);
  }
  return table.Print();
}

Json ContextsJson(const v1::ListContextsResponse& response) {
  Json contexts = Json::array();
  for (const v1::ContextInfo& context : response.contexts()) {
    contexts.push_back({{"context", context.context()},
                        {"tenant", context.tenant()},
                        {"state", context.state()},
                        {"block_count", context.block_count()},
                        {"hbm_block_count", context.hbm_block_count()},
                        {"host_block_count", context.host_block_count()},
                        {"nvme_block_count", context.nvme_block_count()},
                        {"missing_block_count", context.missing_block_count()},
                        {"idle_ms", context.idle_ms()}});
  }
  return {{"epoch", EpochText(response.epoch())},
          {"total_count", response.total_count()},
          {"contexts", contexts}};
}

std::string ContextsText(const v1::ListContextsResponse& response) {
  TextTable table(
      {"CONTEXT", "TENANT", "STATE", "BLOCKS>", "HBM>", "HOST>", "NVME>", "MISSING>", "IDLE>"});
  for (const v1::ContextInfo& context : response.contexts()) {
    table.Add({context.context(), context.tenant(), context.state(),
               HumanCount(context.block_count()), HumanCount(context.hbm_block_count()),
               HumanCount(context.host_block_count()), HumanCount(context.nvme_block_count()),
               HumanCount(context.missing_block_count()), HumanDuration(context.idle_ms())});
  }
  const auto shown_count = static_cast<uint32_t>(response.contexts_size());
  std::string text = table.Print();
  if (shown_count < response.total_count()) {
    text += absl::StrFormat("%d more\n", response.total_count() - shown_count);
  }
  return text;
}

Json WhereJson(const v1::WhereResponse& response) {
  Json blocks = Json::array();
  for (const v1::BlockInfo& block : response.blocks()) {
    Json tiers = Json::array();
    for (const int tier : block.tiers()) tiers.push_back(TierText(static_cast<v1::Tier>(tier)));
    blocks.push_back({{"key", KeyText(block.key())},
                      {"depth", block.depth()},
                      {"bytes", block.bytes()},
                      {"state", block.state()},
                      {"tiers", tiers},
                      {"lease_count", block.lease_count()},
                      {"use_count", block.use_count()}});
  }
  return {{"epoch", EpochText(response.epoch())}, {"blocks", blocks}};
}

Json WhyMissJson(const v1::WhyMissResponse& response) {
  Json misses = Json::array();
  for (const v1::MissInfo& miss : response.misses()) {
    Json row = {{"key", KeyText(miss.key())}, {"reason", miss.reason()}};
    if (miss.tier() != v1::TIER_UNSPECIFIED) {
      row["tier"] = TierText(miss.tier());
      row["left_ms_ago"] = miss.left_ms_ago();
      row["idle_ms"] = miss.idle_ms();
      row["use_count"] = miss.use_count();
    }
    misses.push_back(row);
  }
  return {{"epoch", EpochText(response.epoch())}, {"misses", misses}};
}

std::string WhyMissText(const v1::WhyMissResponse& response) {
  TextTable table({"KEY", "REASON", "TIER", "LEFT MS AGO>", "UNUSED FOR MS>", "USES>"});
  for (const v1::MissInfo& miss : response.misses()) {
    const bool left = miss.tier() != v1::TIER_UNSPECIFIED;
    table.Add({KeyText(miss.key()), miss.reason(), left ? TierText(miss.tier()) : "",
               left ? HumanCount(miss.left_ms_ago()) : "", left ? HumanCount(miss.idle_ms()) : "",
               left ? HumanCount(miss.use_count()) : ""});
  }
  return table.Print();
}

std::string WhereText(const v1::WhereResponse& response) {
  TextTable table({"DEPTH>", "KEY", "BYTES>", "STATE", "TIERS", "LEASES>", "USES>"});
  for (const v1::BlockInfo& block : response.blocks()) {
    table.Add({HumanCount(block.depth()), KeyText(block.key()), HumanCount(block.bytes()),
               block.state(), TierList(block), HumanCount(block.lease_count()),
               HumanCount(block.use_count())});
  }
  return table.Print();
}

}  // namespace kvtier::ctl
