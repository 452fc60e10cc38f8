// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "client/src/admin_client.h"

namespace kvtier::ctl {

struct LinkTraffic {
  v1::Tier source = v1::TIER_UNSPECIFIED;
  v1::Tier target = v1::TIER_UNSPECIFIED;
  uint64_t moved_bytes = 0;
  uint64_t moved_block_count = 0;
};

// What a daemon moved while it was watched, over restarts: counters begin at 0 in each epoch, so
// the last sample of every epoch is added up. What a killed daemon moved after its last sample is
// not seen. Single-thread.
class TrafficMeter {
 public:
  // Takes the reply of GetTiers; what the first one counted already is not counted.
  void Add(const v1::GetTiersResponse& tiers);
  std::vector<LinkTraffic> Totals() const;

 private:
  using Link = std::pair<v1::Tier, v1::Tier>;
  struct Counts {
    uint64_t moved_bytes = 0;
    uint64_t moved_block_count = 0;
  };
  std::map<std::pair<uint64_t, Link>, Counts> last_;  // by epoch and link
  std::map<Link, Counts> before_;
  bool started_ = false;
};

}  // namespace kvtier::ctl
