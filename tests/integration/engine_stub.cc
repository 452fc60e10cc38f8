// SPDX-License-Identifier: Apache-2.0
//
// An engine that reserves blocks, leases others, scribbles on its slots and waits to be killed.
//   engine_stub RUN_DIR MODEL READY_FILE
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "tests/integration/daemon_process.h"

int main(int argc, char** argv) {
  using kvtier::testing::MakeChain;
  if (argc != 4) return 2;
  auto client = kvtier::client::Client::Connect({.run_dir = argv[1], .client_name = "stub"});
  if (!client.ok()) return 3;
  const auto ns = (*client)->RegisterLayout(kvtier::testing::SmallLayout(argv[2]));
  if (!ns.ok()) return 4;
  const auto fill = (*client)->Reserve(*ns, std::nullopt, MakeChain(*ns, 1, 8));
  if (!fill.ok()) return 5;
  for (const auto& block : fill->blocks) {
    for (std::byte& byte : block.bytes) byte = std::byte{0x5A};
  }
  const auto lease = (*client)->Acquire(*ns, MakeChain(*ns, 2, 4));
  if (!lease.ok()) return 6;
  std::ofstream(argv[3]) << lease->ok_prefix_count() << std::endl;
  pause();
  return 0;
}
