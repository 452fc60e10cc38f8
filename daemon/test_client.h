// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/support/sync_stream.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/config.h"
#include "daemon/daemon.h"
#include "daemon/unix_socket.h"
#include "kvtier/v1/admin.grpc.pb.h"
#include "kvtier/v1/context_store.grpc.pb.h"
#include "proto/base/handle_wire.h"
#include "proto/base/key.h"
#include "proto/base/packed.h"

namespace kvtier {

// The wire as a client sees it, for tests of the daemon: no library between. Single-thread. A
// broken expectation fails the test.
class TestClient {
 public:
  explicit TestClient(const std::string& run_dir);
  ~TestClient();

  // Hello on the handle socket; empty when refused.
  std::string TakeToken();
  // Opens the session with the token; true when the first message came.
  bool Open(const std::string& token);
  // Of blocks of so many bytes.
  static v1::Layout RawLayout(uint32_t bytes);
  // Both, and one raw layout of `block_bytes`.
  void OpenWithLayout(uint32_t block_bytes);
  void CloseStream();
  // Waits for the stream's end.
  grpc::Status AwaitStreamEnd();
  void CloseHandleSocket() { handle_.Reset(); }
  // Maps a segment of the host or hbm tier.
  std::span<std::byte> Map(uint32_t tier, uint32_t segment_idx, bool writable);

  v1::ContextStoreService::Stub& stub() { return *stub_; }
  v1::AdminService::Stub& admin() { return *admin_; }
  // A context with a deadline.
  static std::unique_ptr<grpc::ClientContext> Deadline(int timeout_ms = 10'000);

  template <typename Request>
  Request Ask() const {
    Request request;
    request.set_session_id(session_id);
    request.set_namespace_id(namespace_id);
    return request;
  }

  // Reserves, fills through the mapping and commits; the statuses of the commit or of the reserve.
  std::vector<BlockStatus> Put(const std::vector<Key>& keys);
  std::vector<uint8_t> Lookup(const std::vector<Key>& keys);
  grpc::Status Acquire(const std::vector<Key>& keys, v1::AcquireResponse* response,
                       int timeout_ms = 10'000);

  uint64_t session_id = 0;
  uint32_t namespace_id = 0;
  uint32_t block_bytes = 0;
  uint64_t epoch = 0;
  v1::SessionOpened opened;

 private:
  std::unique_ptr<v1::ContextStoreService::Stub> stub_;
  std::unique_ptr<v1::AdminService::Stub> admin_;
  UniqueFd handle_;
  std::unique_ptr<grpc::ClientContext> stream_context_;
  std::unique_ptr<grpc::ClientReader<v1::OpenSessionResponse>> stream_;
  std::vector<std::span<std::byte>> mappings_;
};

// Made-up keys of one chain; different seeds give different chains.
std::vector<Key> TestChain(uint32_t seed, size_t count);
// What the block of a key holds in these tests.
std::string TestPayload(const Key& key, uint32_t block_bytes);
std::string PackKeys(const std::vector<Key>& keys);
std::string PackTestCrcs(const std::vector<Key>& keys, uint32_t block_bytes);

}  // namespace kvtier
