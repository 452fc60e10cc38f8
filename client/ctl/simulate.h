// SPDX-License-Identifier: Apache-2.0
//
// What a cache of some size would hit on a recorded workload, under the daemon's policies and
// others. Runs in virtual time; needs no daemon.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "policy/sim/cache_sim.h"
#include "policy/sim/trace.h"

namespace kvtier::ctl {

// A capacity: bytes, or a share of all blocks of the trace.
struct CacheSize {
  std::string text;
  uint64_t bytes = 0;  // 0: `share`
  double share = 0;
};

// "5%,512GiB". Units: B, KiB, MiB, GiB, TiB. Errors: INVALID_ARGUMENT naming the part.
absl::StatusOr<std::vector<CacheSize>> ParseCacheSizes(std::string_view text);

// How K and V are stored. Bits of one value, with scales.
struct CodecSize {
  std::string name;
  double value_bits = 16;
};
// "bf16,fp8,nvfp4". Errors: INVALID_ARGUMENT naming the part.
absl::StatusOr<std::vector<CodecSize>> ParseCodecs(std::string_view text);

struct SimulateOptions {
  std::vector<CacheSize> sizes;
  std::vector<CodecSize> codecs;
  // Contexts at a time, one run each; empty: as recorded.
  std::vector<uint32_t> concurrency;
  // K and V of one token in BF16.
  uint64_t token_bytes = 327'680;
  // Clients say when they are finished and, with an error of 25 %, when they come back.
  bool hints = false;
  bool make_room_first = false;
};

struct SimulateRow {
  sim::CachePolicy policy = sim::CachePolicy::kLru;
  std::string codec;
  uint32_t concurrency = 0;  // 0: as recorded
  std::string size;
  uint64_t capacity_blocks = 0;
  double hit_rate = 0;
  // Blocks brought into the cache for each block that was asked for: what an inclusive nvme tier
  // of this size would write.
  double writes_per_block = 0;
};

// All policies at every size, codec and concurrency.
std::vector<SimulateRow> RunSimulations(const sim::Trace& trace, const SimulateOptions& options);

std::string SimulateText(const std::vector<SimulateRow>& rows);
nlohmann::json SimulateJson(const std::vector<SimulateRow>& rows);
// Hit rate over size (as the share of the trace's blocks), a line for each policy and codec; or
// over concurrency, where that was swept.
std::string SimulateSvg(const std::vector<SimulateRow>& rows, const sim::Trace& trace);

}  // namespace kvtier::ctl
