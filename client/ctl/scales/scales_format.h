// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "client/ctl/scales/scale_set_file.h"

namespace kvtier::ctl {

// A scale set as `kvtierctl scales` shows it: identity, origin, and the ranges of each layer. The
// JSON's schema is stable.
nlohmann::json ScalesJson(const ScaleSetFile& file);
std::string ScalesText(const ScaleSetFile& file);

}  // namespace kvtier::ctl
