// SPDX-License-Identifier: Apache-2.0
#include "policy/policy.h"

namespace kvtier::policy {

uint64_t BytesToDemote(const Watermarks& marks, uint64_t capacity_bytes, uint64_t used_bytes,
                       uint64_t leaving_bytes, bool draining) {
  const double capacity = static_cast<double>(capacity_bytes);
  const bool above_high = static_cast<double>(used_bytes) > marks.high * capacity;
  if (!above_high && !draining) return 0;
  const uint64_t target_bytes = static_cast<uint64_t>(marks.low * capacity);
  // What leaves already can exceed what is used only by an accounting error; then nothing is asked.
  const uint64_t staying_bytes = used_bytes > leaving_bytes ? used_bytes - leaving_bytes : 0;
  return staying_bytes > target_bytes ? staying_bytes - target_bytes : 0;
}

}  // namespace kvtier::policy
