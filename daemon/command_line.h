// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/config.h"

namespace kvtier {

enum class CommandLineAction : uint8_t {
  kServe,
  kHelp,
  kVersion,
  kCheckConfig,
  kPrintConfig,
  kHold
};

struct CommandLine {
  CommandLineAction action = CommandLineAction::kServe;
  // File and flags; the environment is the caller's to add.
  ConfigSources sources;
  // -1: none.
  int ready_fd = -1;
};

// Arguments without the program's name. INVALID_ARGUMENT naming the argument.
absl::StatusOr<CommandLine> ParseCommandLine(std::span<const std::string> arguments);

std::string HelpText();

}  // namespace kvtier
