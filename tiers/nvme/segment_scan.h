// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "absl/status/status.h"
#include "tiers/nvme/record.h"

namespace kvtier::nvme {

// Finds every intact record of a segment's last activation: header, payload checksum, generation,
// nonce. `fd` may be open with O_DIRECT. Without a `header` (damaged), the first record speaks for
// the activation. Calls `visit` with each record and its offset. Blocks: reads the whole file.
// Errors: UNAVAILABLE (I/O).
absl::Status ScanSegment(int fd, uint64_t file_bytes, const std::optional<SegmentHeader>& header,
                         const std::function<void(const RecordHeader&, uint64_t)>& visit);

}  // namespace kvtier::nvme
