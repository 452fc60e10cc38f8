// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/traffic_meter.h"

namespace kvtier::ctl {

void TrafficMeter::Add(const v1::GetTiersResponse& tiers) {
  for (const v1::LinkStats& link : tiers.links()) {
    const Link name(link.source(), link.target());
    const Counts counts{link.moved_bytes(), link.moved_block_count()};
    if (!started_) before_[name] = counts;
    last_[{tiers.epoch(), name}] = counts;
  }
  started_ = true;
}

std::vector<LinkTraffic> TrafficMeter::Totals() const {
  std::map<Link, Counts> totals;
  for (const auto& [epoch_link, counts] : last_) {
    Counts& total = totals[epoch_link.second];
    total.moved_bytes += counts.moved_bytes;
    total.moved_block_count += counts.moved_block_count;
  }
  std::vector<LinkTraffic> result;
  for (const auto& [link, total] : totals) {
    const auto before = before_.find(link);
    const Counts base = before == before_.end() ? Counts{} : before->second;
    result.push_back({.source = link.first,
                      .target = link.second,
                      .moved_bytes = total.moved_bytes - base.moved_bytes,
                      .moved_block_count = total.moved_block_count - base.moved_block_count});
  }
  return result;
}

}  // namespace kvtier::ctl
