// SPDX-License-Identifier: Apache-2.0
//
// What reading from nvme costs an engine, and how much of it prefetch hides: a store core in
// virtual time under an engine that prefills one request after the other.
#pragma once

#include <cstdint>

#include "daemon/core/sim/virtual_core.h"
#include "policy/sim/trace.h"

namespace kvtier::core {

// When the engine tells the daemon that a request's blocks will be needed.
enum class Signal : uint8_t {
  kNever,      // they are read when the request is scheduled
  kAtArrival,  // with the time that the queue will take
  kAhead,      // so long before it arrives
  // As at arrival, and before that at the end of the context's request before it, as the time of
  // the return.
  kReturn,
};

struct StallOptions {
  VirtualCoreOptions store;
  // Where there is no context yet; prefill slows with its length as policy::ReadingIsFaster says.
  double prefill_tokens_per_second = 50'000;
  Signal signal = Signal::kNever;
  uint64_t ahead_ms = 0;
  // Of kReturn: off by at most this share of the time away, evenly distributed.
  double return_error = 0;
  uint64_t seed = 1;
};

struct StallReport {
  uint64_t request_count = 0;
  // Requests that waited for nvme once they were scheduled.
  uint64_t stall_count = 0;
  double stall_ms = 0;
  // Of those that waited.
  double stall_p50_ms = 0;
  double stall_p99_ms = 0;
  // Of all requests. What is compared between signals: that of those that waited rises when fewer
  // wait.
  double request_p99_ms = 0;
  // Blocks that left nvme.
  uint64_t read_block_count = 0;
  double hit_rate = 0;
};

// A context's requests follow each other as sim::SuccessorsOf says.
StallReport SimulateStalls(const sim::Trace& trace, const StallOptions& options);

}  // namespace kvtier::core
