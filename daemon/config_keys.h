// SPDX-License-Identifier: Apache-2.0
//
// The table of configuration keys, as config.cc uses it.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "daemon/config.h"

namespace kvtier {

// How a value was written. kText: a flag or environment variable, which has no type of its own.
enum class RawKind : uint8_t { kText, kString, kInteger, kFloat, kBool, kOther };

struct RawValue {
  RawKind kind = RawKind::kText;
  std::string text;
};

// INVALID_ARGUMENT naming the key and what it takes.
absl::Status SetConfigKey(std::string_view name, const RawValue& value, Config* config);

// The shortest text that reads back as the same number.
std::string FormatReal(double real);

bool IsConfigSection(std::string_view section);

absl::Status UnknownKey(std::string_view name);

// "KVTIER_HBM_CAPACITY_BYTES" -> "hbm.capacity_bytes"; empty when the name is not
// KVTIER_<section>_.... The key itself may be unknown.
std::string ConfigKeyOfEnvironment(std::string_view variable);

}  // namespace kvtier
