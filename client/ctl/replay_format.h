// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

#include "client/ctl/format.h"
#include "client/ctl/replay.h"
#include "policy/sim/replay_rules.h"

namespace kvtier::ctl {

// The result of --simulate.
struct SimulationReport {
  sim::SimHits hits;
  // Largest allowed difference of token hit rates.
  double tolerance = 0;
  // What was compared: |measured - simulated|, the largest of each tier and all.
  double difference = 0;
  bool within = false;
};

// The schema is stable, as in format.h.
Json ReplayJson(const ReplayReport& report, const std::optional<SimulationReport>& simulation);
std::string ReplayText(const ReplayReport& report,
                       const std::optional<SimulationReport>& simulation);

}  // namespace kvtier::ctl
