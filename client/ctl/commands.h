// SPDX-License-Identifier: Apache-2.0
//
// The commands of kvtierctl, apart from the command line: data goes to standard output, everything
// else to standard error. Each returns OK, or the error that fixes the exit status.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "client/ctl/format.h"
#include "client/ctl/replay.h"
#include "client/src/admin_client.h"

namespace kvtier::ctl {

struct GlobalOptions {
  std::string run_dir = "/run/kvtierd";
  client::TcpOptions tcp;
  bool json = false;
  double timeout_seconds = 10;

  uint32_t timeout_ms() const { return static_cast<uint32_t>(timeout_seconds * 1000); }
  client::AdminClient::Options admin() const {
    return {.run_dir = run_dir, .timeout_ms = timeout_ms(), .tcp = tcp};
  }
};

// Writes `data` or `text` to standard output. Errors: those of the write.
absl::Status Print(bool json, const Json& data, const std::string& text);

absl::Status ShowStatus(const GlobalOptions& global);
absl::Status ShowTiers(const GlobalOptions& global);
absl::Status ShowTenants(const GlobalOptions& global);
absl::Status ShowContexts(const GlobalOptions& global, uint32_t limit);
// One of the two is set.
// `key_hex`: 64 hexadecimal digits.
absl::Status ShowWhyMiss(const GlobalOptions& global, const std::string& key_hex);
absl::Status ShowWhere(const GlobalOptions& global, const std::string& context,
                       const std::string& key_hex);
absl::Status ShowVersion(const GlobalOptions& global);

struct ReplayCommand {
  // Empty: the built-in generator with `sessions` sessions.
  std::string trace_path;
  uint32_t generated_session_count = 24;
  std::string layout = "small";
  uint64_t request_count_max = 0;
  double speed = 0;
  uint64_t seed = 1;
  uint32_t decode_every = 64;
  uint64_t resume_ahead_ms = 2000;
  bool pauses = true;
  bool progress = false;
  bool simulate = false;
  double simulate_tolerance = 0.01;
  // What the daemon was started with; the daemon does not tell.
  double high_watermark = 0.95;
  double low_watermark = 0.90;
  std::string admission = "all";
  std::string eviction = "hazard";
  uint32_t restart_timeout_ms = 60'000;
  uint64_t oracle_cache_mib = 1024;
};
absl::Status RunReplay(const GlobalOptions& global, const ReplayCommand& command);

struct DemoCommand {
  std::string daemon_path;
  // Holds the daemon's sockets, data and log; created if missing, left in place.
  std::string dir;
  uint64_t seed = 1;
  // Ends with what to try in `dir`.
  bool hints = true;
};
absl::Status RunDemo(const GlobalOptions& global, const DemoCommand& command);

}  // namespace kvtier::ctl
