// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/ctl/commands.h"
#include "client/ctl/replay_format.h"
#include "daemon/core/sim/virtual_core.h"
#include "kvtier/v1/admin.pb.h"

namespace kvtier::ctl {

// The simulator's options for a daemon with these tiers and blocks of this layout. What a block
// takes of a tier is read off a tier that holds some.
core::VirtualCoreOptions SimOptionsFor(const v1::GetTiersResponse& tiers, uint32_t block_bytes,
                                       const policy::Watermarks& marks);

// A line on standard error, redrawn on a terminal. Prints at most once a second.
class ProgressLine {
 public:
  explicit ProgressLine(bool enabled);
  void Update(uint64_t done, uint64_t total);
  void Finish();

 private:
  const bool enabled_;
  const bool terminal_;
  std::chrono::steady_clock::time_point next_;
  bool drawn_ = false;
};

}  // namespace kvtier::ctl
