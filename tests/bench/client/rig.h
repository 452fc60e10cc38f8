// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/include/kvtier/client.h"
#include "kvtier/v1/admin.pb.h"
#include "tests/integration/daemon_process.h"

namespace kvtier::bench {

// A daemon of its own, on the cpu device and without nvme, and one client of it. Dies with its
// errors. Single-thread.
class Rig {
 public:
  struct Options {
    std::string kvtierd;
    uint64_t memory_bytes = 64ULL << 20;
    uint64_t segment_bytes = 2ULL << 20;
    Layout layout;
  };
  explicit Rig(const Options& options);

  client::Client& client() { return *client_; }
  const client::Namespace& ns() const { return ns_; }
  const Layout& layout() const { return layout_; }
  std::string run_dir() const { return daemon_.run_dir(); }
  std::unique_ptr<client::Client> Connect(const std::string& name) const;
  // CPU time of the daemon and of this program so far.
  double CpuSeconds() const;
  // Counters of the daemon now.
  v1::GetTiersResponse Tiers() const;

 private:
  const Layout layout_;
  testing::DaemonProcess daemon_;
  std::unique_ptr<client::Client> client_;
  client::Namespace ns_;
};

// Blocks of `block_bytes` without a meaning.
Layout RawLayout(uint32_t block_bytes);
// Reserves, fills and commits; every block must be new and find room.
void PutBlocks(client::Client* client, const client::Namespace& ns, std::span<const Key> keys);

}  // namespace kvtier::bench
