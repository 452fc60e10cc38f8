// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"

namespace kvtier::ctl {

// A JSON file as a value. Names twice in one object, more than 32 levels and files above
// `bytes_max` are refused: others read such files differently, or not at all. Errors: those of
// MappedFile::Open; DATA_LOSS otherwise.
absl::StatusOr<nlohmann::json> ReadStrictJson(const std::string& path, uint64_t bytes_max);

}  // namespace kvtier::ctl
