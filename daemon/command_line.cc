// SPDX-License-Identifier: Apache-2.0
#include "daemon/command_line.h"

#include <charconv>
#include <optional>

#include "proto/base/status_util.h"

namespace kvtier {
namespace {

std::optional<CommandLineAction> ActionOf(std::string_view argument) {
  if (argument == "--help" || argument == "-h") return CommandLineAction::kHelp;
  if (argument == "--version") return CommandLineAction::kVersion;
  if (argument == "--check-config") return CommandLineAction::kCheckConfig;
  if (argument == "--print-config") return CommandLineAction::kPrintConfig;
  if (argument == "--hold") return CommandLineAction::kHold;
  return std::nullopt;
}

absl::StatusOr<int> ParseFd(const std::string& text) {
  int fd = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), fd);
  if (error != std::errc() || end != text.data() + text.size() || fd < 0) {
    return Invalid("--ready-fd: %s is not a file descriptor (0 or more)", text);
  }
  return fd;
}

}  // namespace

absl::StatusOr<CommandLine> ParseCommandLine(std::span<const std::string> arguments) {
  CommandLine line;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (const auto action = ActionOf(argument)) {
      line.action = *action;
      continue;
    }
    if (!argument.starts_with("--")) return Invalid("%s: unknown argument (see --help)", argument);
    const size_t equals = argument.find('=');
    const std::string name = argument.substr(2, equals == std::string::npos ? equals : equals - 2);
    std::string value;
    if (equals != std::string::npos) {
      value = argument.substr(equals + 1);
    } else if (++i < arguments.size()) {
      value = arguments[i];
    } else {
      return Invalid("%s: needs a value", argument);
    }
    if (name == "config") {
      line.sources.file = value;
    } else if (name == "ready-fd") {
      KVT_ASSIGN_OR_RETURN(line.ready_fd, ParseFd(value));
    } else {
      line.sources.flags.emplace_back(name, value);
    }
  }
  return line;
}

std::string HelpText() {
  return R"(Usage: kvtierd [--config FILE] [--SECTION.KEY=VALUE ...]

Keeps the KV cache of LLM conversations on hbm, host memory and nvme.

  kvtierd                                    with defaults
  kvtierd --config /etc/kvtier/kvtierd.toml
  kvtierd --server.run_dir=/tmp/run --server.data_dir=/tmp/data --hbm.capacity_bytes="1 GiB"

  --config FILE     TOML file; flags beat environment variables beat the file
  --check-config    exit 0 if the configuration is valid, 2 with one line if not
  --print-config    the configuration in force, as a commented TOML file
  --hold            keep host memory for the next daemon of the same run_dir; the daemon starts
                    this itself with host.warm_restart = holder
  --ready-fd N      write "READY" and a line break to descriptor N once clients are served
  --version
  -h, --help

SIGTERM and SIGINT stop the daemon in order; a second one stops it at once.
Exit status: 0 stopped in order, 1 failed, 2 usage or configuration.

Configuration:
)" + ConfigHelp();
}

}  // namespace kvtier
