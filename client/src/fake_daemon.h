// SPDX-License-Identifier: Apache-2.0
//
// A daemon in the test's process, just large enough for the client library: one tenant, one hbm
// segment in a memfd, blocks that are never evicted. Hooks let a test spoil any answer.
#pragma once

#include <grpcpp/server.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "client/src/handle_connection.h"
#include "kvtier/v1/context_store.grpc.pb.h"
#include "proto/base/handle_wire.h"
#include "proto/base/key.h"
#include "proto/base/layout.h"
#include "proto/base/packed.h"

namespace kvtier::client {

// What the fake's handle socket sends for one request.
struct HandleAnswer {
  HandleReply reply;
  size_t reply_bytes = sizeof(HandleReply);
  // Copies of the segment's descriptor to send along.
  int fd_count = 0;
};

template <typename Signature>
class Hook;

// A function that a test may set while the daemon's threads call it. Not set: does nothing.
template <typename Result, typename... Arguments>
class Hook<Result(Arguments...)> {
 public:
  using Function = std::function<Result(Arguments...)>;

  Hook& operator=(Function function) {
    absl::MutexLock lock(&mutex_);
    function_ = std::move(function);
    return *this;
  }
  Result operator()(Arguments... arguments) const {
    Function function;
    {
      absl::MutexLock lock(&mutex_);
      function = function_;
    }
    return function ? function(arguments...) : Result();
  }

 private:
  mutable absl::Mutex mutex_;
  Function function_ ABSL_GUARDED_BY(mutex_);
};

struct FakeHooks {
  // At each new handle connection: a status to send before closing it.
  Hook<std::optional<HandleStatus>()> refuse;
  Hook<void(const HandleRequest&, HandleAnswer&)> handle;
  Hook<void(v1::OpenSessionResponse&)> open_session;
  Hook<void(v1::RegisterLayoutResponse&)> register_layout;
  Hook<void(v1::LookupResponse&)> lookup;
  Hook<void(v1::ReserveResponse&)> reserve;
  Hook<void(v1::CommitResponse&)> commit;
  Hook<void(v1::AcquireResponse&)> acquire;
  // For each message of a Read.
  Hook<void(v1::ReadResponse&)> read;
  // Before a call is served: its status, if not OK, is the answer.
  Hook<grpc::Status(const std::string& method)> before;
};

// Thread-safe. Listens from construction to destruction.
class FakeDaemon final : public v1::ContextStoreService::Service {
 public:
  static constexpr uint32_t kBlockBytes = 4096;
  static constexpr uint32_t kSlotCount = 16;
  static constexpr char kTenant[] = "tenant-a";

  FakeDaemon(std::string run_dir, uint64_t epoch);
  ~FakeDaemon() override;

  FakeHooks hooks;
  // Lookup and OpenSession answer only once their caller has gone.
  std::atomic<bool> hangs = false;

  // Ends every session, as a daemon does that has lost sight of its clients.
  void EndSessions();
  std::span<std::byte> segment() { return segment_; }
  int CallCount(const std::string& method) const;
  int handle_connection_count() const;
  // Blocks until that many handle connections are open.
  void AwaitHandleConnections(int count) const;
  std::set<Key> reported() const;
  std::set<Key> pending() const;

  static Layout TestLayout();

 private:
  struct Block {
    uint32_t slot_idx = 0;
    uint32_t crc32c = 0;
    bool committed = false;
  };

  grpc::Status Before(const std::string& method);
  grpc::Status CheckSession(uint64_t session_id);
  void ServeHandles();
  void AnswerHandle(int connection, const HandleRequest& request);
  std::vector<Key> KeysOf(const std::string& packed);
  BlockResult PlaceOf(const Block& block, BlockStatus status) const;

  grpc::Status OpenSession(grpc::ServerContext*, const v1::OpenSessionRequest*,
                           grpc::ServerWriter<v1::OpenSessionResponse>*) override;
  grpc::Status RegisterLayout(grpc::ServerContext*, const v1::RegisterLayoutRequest*,
                              v1::RegisterLayoutResponse*) override;
  grpc::Status Lookup(grpc::ServerContext*, const v1::LookupRequest*, v1::LookupResponse*) override;
  grpc::Status Reserve(grpc::ServerContext*, const v1::ReserveRequest*,
                       v1::ReserveResponse*) override;
  grpc::Status Commit(grpc::ServerContext*, const v1::CommitRequest*, v1::CommitResponse*) override;
  grpc::Status Abort(grpc::ServerContext*, const v1::AbortRequest*, v1::AbortResponse*) override;
  grpc::Status Acquire(grpc::ServerContext*, const v1::AcquireRequest*,
                       v1::AcquireResponse*) override;
  grpc::Status Release(grpc::ServerContext*, const v1::ReleaseRequest*,
                       v1::ReleaseResponse*) override;
  grpc::Status Prefetch(grpc::ServerContext*, const v1::PrefetchRequest*,
                        v1::PrefetchResponse*) override;
  grpc::Status GetTicket(grpc::ServerContext*, const v1::GetTicketRequest*,
                         v1::GetTicketResponse*) override;
  grpc::Status Write(grpc::ServerContext*, grpc::ServerReader<v1::WriteRequest>*,
                     v1::WriteResponse*) override;
  grpc::Status Read(grpc::ServerContext*, const v1::ReadRequest*,
                    grpc::ServerWriter<v1::ReadResponse>*) override;
  grpc::Status CreateContext(grpc::ServerContext*, const v1::CreateContextRequest*,
                             v1::CreateContextResponse*) override;
  grpc::Status AppendContext(grpc::ServerContext*, const v1::AppendContextRequest*,
                             v1::AppendContextResponse*) override;
  grpc::Status PauseContext(grpc::ServerContext*, const v1::PauseContextRequest*,
                            v1::PauseContextResponse*) override;
  grpc::Status ResumeContext(grpc::ServerContext*, const v1::ResumeContextRequest*,
                             v1::ResumeContextResponse*) override;
  grpc::Status ForkContext(grpc::ServerContext*, const v1::ForkContextRequest*,
                           v1::ForkContextResponse*) override;
  grpc::Status CloseContext(grpc::ServerContext*, const v1::CloseContextRequest*,
                            v1::CloseContextResponse*) override;
  grpc::Status ReportBad(grpc::ServerContext*, const v1::ReportBadRequest*,
                         v1::ReportBadResponse*) override;

  const std::string run_dir_;
  const uint64_t epoch_;
  UniqueFd memfd_;
  std::span<std::byte> segment_;
  UniqueFd listener_;
  UniqueFd stop_event_;
  std::unique_ptr<grpc::Server> server_;

  mutable absl::Mutex mutex_;
  std::map<std::string, int> call_counts_ ABSL_GUARDED_BY(mutex_);
  std::map<Key, Block> blocks_ ABSL_GUARDED_BY(mutex_);
  std::set<Key> reported_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> tokens_ ABSL_GUARDED_BY(mutex_);
  std::set<uint64_t> sessions_ ABSL_GUARDED_BY(mutex_);
  // session id, namespace id
  std::set<std::pair<uint64_t, uint32_t>> namespaces_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_id_ ABSL_GUARDED_BY(mutex_) = 1;
  int handle_connection_count_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  std::jthread handle_thread_;
};

}  // namespace kvtier::client
