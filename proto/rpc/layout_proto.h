// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "absl/status/statusor.h"
#include "kvtier/v1/types.pb.h"
#include "proto/base/layout.h"

namespace kvtier {

v1::Layout LayoutToProto(const Layout& layout);

// A valid layout (Layout::Validate). Rank counts of 0 become 1. INVALID_ARGUMENT naming the field.
absl::StatusOr<Layout> LayoutFromProto(const v1::Layout& proto);

}  // namespace kvtier
