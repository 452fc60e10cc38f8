// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/client/rig.h"

#include <time.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "client/src/admin_client.h"
#include "tests/bench/client/timing.h"

namespace kvtier::bench {
namespace {

std::vector<std::string> Flags(const Rig::Options& options) {
  const std::string bytes = std::to_string(options.memory_bytes);
  const std::string segment = std::to_string(options.segment_bytes);
  return {"--hbm.capacity_bytes=" + bytes,  "--hbm.segment_bytes=" + segment,
          "--host.capacity_bytes=" + bytes, "--host.segment_bytes=" + segment,
          "--nvme.enabled=false",           "--log.level=warning"};
}

}  // namespace

Rig::Rig(const Options& options)
    : layout_(options.layout), daemon_(options.kvtierd, Flags(options)) {
  if (const absl::Status started = daemon_.Start(); !started.ok()) {
    Die(started.ToString() + "\n" + daemon_.Log());
  }
  client_ = Connect("bench");
  ns_ = ValueOf(client_->RegisterLayout(layout_));
}

std::unique_ptr<client::Client> Rig::Connect(const std::string& name) const {
  return ValueOf(client::Client::Connect({.run_dir = run_dir(), .client_name = name}));
}

double Rig::CpuSeconds() const {
  clockid_t clock{};
  timespec used{};
  if (clock_getcpuclockid(daemon_.pid(), &clock) != 0 || clock_gettime(clock, &used) != 0) {
    Die("the daemon is gone");
  }
  return bench::CpuSeconds() + static_cast<double>(used.tv_sec) +
         static_cast<double>(used.tv_nsec) * 1e-9;
}

v1::GetTiersResponse Rig::Tiers() const {
  return ValueOf(client::AdminClient({.run_dir = run_dir()}).GetTiers());
}

Layout RawLayout(uint32_t block_bytes) {
  Layout layout;
  layout.model = "bench";
  layout.layer_count = 1;
  layout.kv_head_count = 1;
  layout.head_dim = 64;
  layout.codec = Codec::kRaw;
  layout.raw_block_bytes = block_bytes;
  return layout;
}

void PutBlocks(client::Client* client, const client::Namespace& ns, std::span<const Key> keys) {
  const client::Fill fill = ValueOf(client->Reserve(ns, std::nullopt, keys));
  for (const client::MappedBlock& block : fill.blocks) {
    std::fill(block.bytes.begin(), block.bytes.end(), std::byte{0x5A});
  }
  for (const BlockStatus status : ValueOf(client->Commit(ns, fill))) {
    if (status != BlockStatus::kOk)
      Die("a block was not taken: " + std::string(BlockStatusName(status)));
  }
}

}  // namespace kvtier::bench
