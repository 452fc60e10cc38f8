// SPDX-License-Identifier: Apache-2.0
//
// Reads recorded workloads: JSON lines, plain or compressed with xz (name ending in ".xz"). One
// request a line:
//   timestamp    arrival, milliseconds from the start              required
//   hash_ids     ids of the blocks of its prompt, in order         required
//   session      conversation (number or string)                   optional: a context of its own
//   api          milliseconds the engine worked on it              optional: 0
//   stop         what the client does next: "tool" or "user"       optional: unknown
// Other fields are ignored.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "policy/sim/trace.h"

namespace kvtier::sim {

// Errors: NOT_FOUND or the like when the file cannot be read, DATA_LOSS when it is not xz data,
// INVALID_ARGUMENT naming the line that is not a request. `request_count_max` 0: all.
absl::StatusOr<Trace> ReadTraceFile(const std::string& path, size_t request_count_max = 0);

// The same from text in memory; `name` is for messages.
absl::StatusOr<Trace> ParseTrace(std::string_view text, std::string_view name,
                                 size_t request_count_max = 0);

}  // namespace kvtier::sim
