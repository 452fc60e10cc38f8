// SPDX-License-Identifier: Apache-2.0
#include "proto/base/packed.h"

#include "proto/base/status_util.h"

namespace kvtier {

std::string_view BlockStatusName(BlockStatus status) {
  switch (status) {
    case BlockStatus::kOk:
      return "ok";
    case BlockStatus::kMiss:
      return "miss";
    case BlockStatus::kExists:
      return "exists";
    case BlockStatus::kPending:
      return "pending";
    case BlockStatus::kExhausted:
      return "exhausted";
    case BlockStatus::kPrecondition:
      return "precondition";
    case BlockStatus::kCorrupt:
      return "corrupt";
    case BlockStatus::kUnavailable:
      return "unavailable";
  }
  return "unknown";
}

absl::Status CheckPacked(std::string_view packed, size_t record_bytes, std::string_view field) {
  if (packed.size() % record_bytes != 0) {
    return Invalid("%s has %d bytes, which is no multiple of %d", field, packed.size(),
                   record_bytes);
  }
  return absl::OkStatus();
}

}  // namespace kvtier
