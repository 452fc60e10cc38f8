// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "kvtier/v1/context_store.grpc.pb.h"
#include "tests/integration/daemon_process.h"

namespace kvtier::bench {

// What gRPC alone can do with the messages of Write and Read: a process that takes and sends the
// same chunks, and neither looks at them nor keeps them. Killed with the object.
class BareServer {
 public:
  // Starts this program again, in a folder of its own.
  BareServer();
  ~BareServer();

  v1::ContextStoreService::Stub& stub() { return *stub_; }

  // What that process runs, for ever: a server on `socket_path`.
  [[noreturn]] static void Serve(const std::string& socket_path);
  static constexpr char kFlag[] = "--serve-bare";

 private:
  std::string folder_;
  std::unique_ptr<testing::ChildProcess> process_;
  std::unique_ptr<v1::ContextStoreService::Stub> stub_;
};

}  // namespace kvtier::bench
