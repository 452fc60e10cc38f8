// SPDX-License-Identifier: Apache-2.0
//
// Where a tenant's blocks can be read, as a snapshot and the changes after it: what a router that
// sends requests to the node with the longest stored prefix has to know.
//
//   auto watch = kvtier::client::Watch::Start(client.get());
//   while (true) {
//     auto update = (*watch)->Next(1000);
//     if (!update.ok()) continue;                  // nothing yet, or the daemon is away
//     if (update->reset) index.clear();            // AllBlocksCleared
//     for (const auto& blocks : update->blocks) ...  // BlockStored, BlockRemoved
//   }
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/include/kvtier/client.h"
#include "proto/base/key.h"

namespace kvtier::client {

// What engines' events call the tier: "GPU", "CPU" or "STORAGE".
std::string_view MediumOf(Residency tier);

// Blocks of one namespace on one tier, all stored there or all removed from there, in the order in
// which that came about. A block that moves is stored before it is removed.
struct WatchedBlocks {
  bool stored = false;
  Residency tier = Residency::kHbm;
  NamespaceHash namespace_hash = {};
  // 0: not known (found when the daemon started, and not opened by a session since).
  uint32_t block_tokens = 0;
  std::vector<Key> keys = {};
  // If stored, one per key: the block before it in its chain, if there is one. Empty if removed.
  std::vector<std::optional<Key>> parents = {};
};

struct WatchUpdate {
  // The daemon's boot id: another one after a restart, and `reset` with it.
  uint64_t epoch = 0;
  // Of the tenant's last event in here, or that the snapshot is as of.
  uint64_t sequence = 0;
  // Forget all blocks: a snapshot begins with this update.
  bool reset = false;
  // Part of a snapshot: `blocks` are stored, whether they were known before the reset or not.
  bool is_snapshot = false;
  // What was told so far, in order, is all that is stored. False in a snapshot before its end.
  bool complete = false;
  // Events were lost, since Next was not called often enough; a reset follows.
  bool lost = false;
  std::vector<WatchedBlocks> blocks = {};
};

// Watches the blocks of the client's tenant, over restarts of the daemon. Events come some
// milliseconds late and in order; one may say what a snapshot has said already. What Next does not
// take is bounded: the daemon drops the earliest events and says so (`lost`), engines never wait.
// Thread-safe; owns one thread. Must not outlive its Client.
class Watch {
 public:
  // Does not wait for the daemon. FAILED_PRECONDITION in a forked child.
  static absl::StatusOr<std::unique_ptr<Watch>> Start(Client* client);
  // Waits for a re-connection that is under way: at most reconnect_timeout_ms.
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // The next update; waits for it for up to `timeout_ms`. The watch goes on after any error:
  // DEADLINE_EXCEEDED (none came), UNAVAILABLE (the daemon is away; tried again),
  // RESOURCE_EXHAUSTED (LIMIT_REACHED: too many are watching; tried again), INTERNAL (malformed
  // answer; begun anew).
  absl::StatusOr<WatchUpdate> Next(uint32_t timeout_ms);

 private:
  class Impl;
  explicit Watch(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace kvtier::client
