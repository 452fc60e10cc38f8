// SPDX-License-Identifier: Apache-2.0
#include "client/src/fake_daemon.h"

#include <grpcpp/server_builder.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "proto/base/check.h"
#include "proto/base/crc32c.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"
#include "proto/rpc/grpc_status.h"
#include "proto/rpc/layout_proto.h"

namespace kvtier::client {
namespace {

UniqueFd Listen(const std::string& path) {
  UniqueFd listener(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  KVT_CHECK(path.size() < sizeof(address.sun_path));
  std::memcpy(address.sun_path, path.data(), path.size());
  ::unlink(path.c_str());
  KVT_CHECK(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
  KVT_CHECK(::listen(listener.get(), 16) == 0);
  return listener;
}

}  // namespace

FakeDaemon::FakeDaemon(std::string run_dir, uint64_t epoch)
    : run_dir_(std::move(run_dir)),
      epoch_(epoch),
      memfd_(::memfd_create("fake-hbm", MFD_CLOEXEC)),
      listener_(Listen(run_dir_ + "/handles.sock")),
      stop_event_(::eventfd(0, EFD_CLOEXEC)) {
  const size_t segment_bytes = size_t{kSlotCount} * kBlockBytes;
  KVT_CHECK(::ftruncate(memfd_.get(), static_cast<off_t>(segment_bytes)) == 0);
  void* base = ::mmap(nullptr, segment_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd_.get(), 0);
  KVT_CHECK(base != MAP_FAILED);
  segment_ = std::span(static_cast<std::byte*>(base), segment_bytes);
  handle_thread_ = std::jthread([this] { ServeHandles(); });
  grpc::ServerBuilder builder;
  builder.AddListeningPort("unix:" + run_dir_ + "/kvtierd.sock", grpc::InsecureServerCredentials());
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
  KVT_CHECK(server_ != nullptr);
}

FakeDaemon::~FakeDaemon() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  const uint64_t one = 1;
  KVT_CHECK(::write(stop_event_.get(), &one, sizeof(one)) == sizeof(one));
  handle_thread_.join();
  server_->Shutdown(std::chrono::system_clock::now());
  ::munmap(segment_.data(), segment_.size());
}

Layout FakeDaemon::TestLayout() {
  Layout layout;
  layout.model = "fake";
  layout.layer_count = 1;
  layout.kv_head_count = 1;
  layout.head_dim = 64;
  layout.codec = Codec::kRaw;
  layout.raw_block_bytes = kBlockBytes;
  return layout;
}

void FakeDaemon::EndSessions() {
  absl::MutexLock lock(&mutex_);
  sessions_.clear();
}

int FakeDaemon::CallCount(const std::string& method) const {
  absl::MutexLock lock(&mutex_);
  const auto place = call_counts_.find(method);
  return place == call_counts_.end() ? 0 : place->second;
}

int FakeDaemon::handle_connection_count() const {
  absl::MutexLock lock(&mutex_);
  return handle_connection_count_;
}

void FakeDaemon::AwaitHandleConnections(int count) const {
  const auto reached = [this, count]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return handle_connection_count_ == count;
  };
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&reached));
}

std::set<Key> FakeDaemon::reported() const {
  absl::MutexLock lock(&mutex_);
  return reported_;
}

std::set<Key> FakeDaemon::pending() const {
  absl::MutexLock lock(&mutex_);
  std::set<Key> keys;
  for (const auto& [key, block] : blocks_) {
    if (!block.committed) keys.insert(key);
  }
  return keys;
}

void FakeDaemon::ServeHandles() {
  std::vector<UniqueFd> connections;
  while (true) {
    std::vector<pollfd> polls = {{stop_event_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    for (const UniqueFd& connection : connections) polls.push_back({connection.get(), POLLIN, 0});
    if (::poll(polls.data(), polls.size(), -1) < 0) continue;
    if (polls[0].revents != 0) return;
    for (size_t i = polls.size(); i-- > 2;) {
      if (polls[i].revents == 0) continue;
      HandleRequest request;
      if (::recv(polls[i].fd, &request, sizeof(request), 0) == sizeof(request)) {
        AnswerHandle(polls[i].fd, request);
      } else {
        connections.erase(connections.begin() + static_cast<ptrdiff_t>(i) - 2);
      }
    }
    if (polls[1].revents != 0) {
      UniqueFd connection(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (const auto status = hooks.refuse(); status.has_value()) {
        const HandleReply reply = {.status = *status};
        KVT_CHECK(::send(connection.get(), &reply, sizeof(reply), 0) == sizeof(reply));
      } else {
        connections.push_back(std::move(connection));
      }
    }
    absl::MutexLock lock(&mutex_);
    handle_connection_count_ = static_cast<int>(connections.size());
  }
}

void FakeDaemon::AnswerHandle(int connection, const HandleRequest& request) {
  HandleAnswer answer;
  answer.reply.epoch = epoch_;
  if (request.kind == HandleRequestKind::kHello) {
    absl::MutexLock lock(&mutex_);
    std::memcpy(answer.reply.token, &next_id_, sizeof(next_id_));
    ++next_id_;
    tokens_.emplace(reinterpret_cast<const char*>(answer.reply.token), sizeof(answer.reply.token));
  } else if (request.tier == 1 && request.segment_idx == 0) {
    answer.reply.segment_bytes = segment_.size();
    answer.fd_count = 1;
  } else {
    answer.reply.status = HandleStatus::kNoSegment;
  }
  hooks.handle(request, answer);

  iovec buffer = {.iov_base = &answer.reply, .iov_len = answer.reply_bytes};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(8 * sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &buffer;
  message.msg_iovlen = 1;
  if (answer.fd_count > 0) {
    const size_t fd_bytes = static_cast<size_t>(answer.fd_count) * sizeof(int);
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(fd_bytes);
    cmsghdr* part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(fd_bytes);
    const std::vector<int> fds(static_cast<size_t>(answer.fd_count), memfd_.get());
    std::memcpy(CMSG_DATA(part), fds.data(), fd_bytes);
  }
  // A client that has hung up shows at the next poll.
  static_cast<void>(::sendmsg(connection, &message, MSG_NOSIGNAL));
}

grpc::Status FakeDaemon::Before(const std::string& method) {
  {
    absl::MutexLock lock(&mutex_);
    ++call_counts_[method];
  }
  return hooks.before(method);
}

grpc::Status FakeDaemon::CheckSession(uint64_t session_id) {
  absl::MutexLock lock(&mutex_);
  if (sessions_.contains(session_id)) return grpc::Status::OK;
  return ToGrpc(WithReason(Aborted("session %d", session_id), reason::kSessionUnknown));
}

std::vector<Key> FakeDaemon::KeysOf(const std::string& packed) {
  const auto keys = UnpackRecords<Key>(packed, "keys");
  KVT_CHECK(keys.ok());
  return *keys;
}

BlockResult FakeDaemon::PlaceOf(const Block& block, BlockStatus status) const {
  return {.status = status,
          .tier = 1,
          .segment_idx = 0,
          .offset_bytes = uint64_t{block.slot_idx} * kBlockBytes};
}

#define FAKE_RETURN_IF_ERROR(expression)         \
  do {                                           \
    const grpc::Status fake_status = expression; \
    if (!fake_status.ok()) return fake_status;   \
  } while (false)

grpc::Status FakeDaemon::OpenSession(grpc::ServerContext* context,
                                     const v1::OpenSessionRequest* request,
                                     grpc::ServerWriter<v1::OpenSessionResponse>* writer) {
  FAKE_RETURN_IF_ERROR(Before("OpenSession"));
  v1::OpenSessionResponse response;
  uint64_t session_id;
  {
    absl::MutexLock lock(&mutex_);
    if (tokens_.erase(request->token()) == 0) {
      return ToGrpc(WithReason(PermissionDenied("token"), reason::kTokenUnknown));
    }
    session_id = epoch_ * 1000 + next_id_++;
    sessions_.insert(session_id);
  }
  response.set_epoch(epoch_);
  response.mutable_opened()->set_session_id(session_id);
  response.mutable_opened()->set_tenant(kTenant);
  response.mutable_opened()->mutable_limits()->set_chunk_bytes_max(3000);
  hooks.open_session(response);
  if (!hangs) writer->Write(response);
  const auto ended = [this, session_id]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stopping_ || !sessions_.contains(session_id);
  };
  absl::MutexLock lock(&mutex_);
  while (!context->IsCancelled() &&
         !mutex_.AwaitWithTimeout(absl::Condition(&ended), absl::Milliseconds(2))) {
  }
  sessions_.erase(session_id);
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::RegisterLayout(grpc::ServerContext*,
                                        const v1::RegisterLayoutRequest* request,
                                        v1::RegisterLayoutResponse* response) {
  FAKE_RETURN_IF_ERROR(Before("RegisterLayout"));
  FAKE_RETURN_IF_ERROR(CheckSession(request->session_id()));
  const auto layout = LayoutFromProto(request->layout());
  if (!layout.ok()) return ToGrpc(layout.status());
  const LayoutFingerprint fingerprint = layout->Fingerprint();
  absl::MutexLock lock(&mutex_);
  const auto namespace_id = static_cast<uint32_t>(next_id_++);
  namespaces_.emplace(request->session_id(), namespace_id);
  response->set_epoch(epoch_);
  response->set_namespace_id(namespace_id);
  response->set_namespace_hash(
      std::string(HashNamespace(kTenant, fingerprint, request->adapter(), request->salt(),
                                {.name = request->hash_domain().name(),
                                 .probe = request->hash_domain().probe()})
                      .AsBytes()));
  response->set_layout_fingerprint(std::string(fingerprint.AsBytes()));
  response->set_block_bytes(layout->BlockBytes());
  hooks.register_layout(*response);
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::Lookup(grpc::ServerContext* context, const v1::LookupRequest* request,
                                v1::LookupResponse* response) {
  FAKE_RETURN_IF_ERROR(Before("Lookup"));
  while (hangs && !context->IsCancelled()) std::this_thread::yield();
  FAKE_RETURN_IF_ERROR(CheckSession(request->session_id()));
  absl::MutexLock lock(&mutex_);
  if (!namespaces_.contains({request->session_id(), request->namespace_id()})) {
    return ToGrpc(WithReason(FailedPrecondition("namespace"), reason::kNamespaceUnknown));
  }
  response->set_epoch(epoch_);
  for (const Key& key : KeysOf(request->keys())) {
    const auto place = blocks_.find(key);
    if (place == blocks_.end() || !place->second.committed) break;
    response->mutable_residency()->push_back(static_cast<char>(kResidentHbm));
  }
  response->set_hit_count(static_cast<uint32_t>(response->residency().size()));
  hooks.lookup(*response);
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::Reserve(grpc::ServerContext*, const v1::ReserveRequest* request,
                                 v1::ReserveResponse* response) {
  FAKE_RETURN_IF_ERROR(Before("Reserve"));
  FAKE_RETURN_IF_ERROR(CheckSession(request->session_id()));
  std::vector<BlockResult> results;
  absl::MutexLock lock(&mutex_);
  for (const Key& key : KeysOf(request->keys())) {
    const auto slot_idx = static_cast<uint32_t>(blocks_.size());
    if (blocks_.contains(key)) {
      results.push_back({.status = BlockStatus::kExists});
    } else if (slot_idx >= kSlotCount) {
      results.push_back({.status = BlockStatus::kExhausted});
    } else {
      blocks_[key] = {.slot_idx = slot_idx};
      results.push_back(PlaceOf(blocks_[key], BlockStatus::kOk));
    }
  }
  response->set_epoch(epoch_);
  response->set_results(PackRecords(std::span<const BlockResult>(results)));
  hooks.reserve(*response);
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::Commit(grpc::ServerContext*, const v1::CommitRequest* request,
                                v1::CommitResponse* response) {
  FAKE_RETURN_IF_ERROR(Before("Commit"));
  FAKE_RETURN_IF_ERROR(CheckSession(request->session_id()));
  const std::vector<Key> keys = KeysOf(request->keys());
  const auto crc32cs = UnpackRecords<uint32_t>(request->crc32cs(), "crc32cs");
  KVT_CHECK(crc32cs.ok() && crc32cs->size() == keys.size());
  absl::MutexLock lock(&mutex_);
  for (size_t i = 0; i < keys.size(); ++i) {
    const auto place = blocks_.find(keys[i]);
    const bool reserved = place != blocks_.end() && !place->second.committed;
    if (reserved) {
      place->second.committed = true;
      place->second.crc32c = (*crc32cs)[i];
    }
    response->mutable_statuses()->push_back(
        static_cast<char>(reserved ? BlockStatus::kOk : BlockStatus::kPrecondition));
  }
  response->set_epoch(epoch_);
  hooks.commit(*response);
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::Abort(grpc::ServerContext*, const v1::AbortRequest* request,
                               v1::AbortResponse* response) {
  FAKE_RETURN_IF_ERROR(Before("Abort"));
  FAKE_RETURN_IF_ERROR(CheckSession(request->session_id()));
  absl::MutexLock lock(&mutex_);
  for (const Key& key : KeysOf(request->keys())) {
    const auto place = blocks_.find(key);
    if (place != blocks_.end() && !place->second.committed) blocks_.erase(place);
  }
  response->set_epoch(epoch_);
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::Acquire(grpc::ServerContext*, const v1::AcquireRequest* request,
                                 v1::AcquireResponse* response) {
  FAKE_RETURN_IF_ERROR(Before("Acquire"));
  FAKE_RETURN_IF_ERROR(CheckSession(request->session_id()));
  std::vector<BlockResult> results;
  std::vector<uint32_t> crc32cs;
  absl::MutexLock lock(&mutex_);
  for (const Key& key : KeysOf(request->keys())) {
    const auto place = blocks_.find(key);
    if (place != blocks_.end() && place->second.committed) {
      results.push_back(PlaceOf(place->second, BlockStatus::kOk));
      crc32cs.push_back(place->second.crc32c);
      response->set_lease_id(77);
    } else {
      results.push_back({.status = BlockStatus::kMiss});
      crc32cs.push_back(0);
    }
  }
  response->set_epoch(epoch_);
  response->set_results(PackRecords(std::span<const BlockResult>(results)));
  response->set_crc32cs(PackRecords(std::span<const uint32_t>(crc32cs)));
  hooks.acquire(*response);
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::Release(grpc::ServerContext*, const v1::ReleaseRequest* request,
                                 v1::ReleaseResponse* response) {
  FAKE_RETURN_IF_ERROR(Before("Release"));
  FAKE_RETURN_IF_ERROR(CheckSession(request->session_id()));
  response->set_epoch(epoch_);
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::Prefetch(grpc::ServerContext*, const v1::PrefetchRequest* request,
                                  v1::PrefetchResponse* response) {
  FAKE_RETURN_IF_ERROR(Before("Prefetch"));
  FAKE_RETURN_IF_ERROR(CheckSession(request->session_id()));
  response->set_epoch(epoch_);
  v1::Ticket& ticket = *response->mutable_ticket();
  ticket.set_ticket_id(1);
  ticket.set_block_count(2);
  ticket.set_covered_block_count(3);
  ticket.set_ready_block_count(4);
  ticket.set_pending_bytes(5);
  ticket.set_eta_ms(6);
  ticket.set_eta_known(true);
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::GetTicket(grpc::ServerContext*, const v1::GetTicketRequest* request,
                                   v1::GetTicketResponse* response) {
  FAKE_RETURN_IF_ERROR(Before("GetTicket"));
  FAKE_RETURN_IF_ERROR(CheckSession(request->session_id()));
  if (request->ticket_id() != 1) {
    return ToGrpc(WithReason(NotFound("ticket %d", request->ticket_id()), reason::kTicketUnknown));
  }
  response->set_epoch(epoch_);
  response->mutable_ticket()->set_ticket_id(1);
  response->mutable_ticket()->set_done(true);
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::Write(grpc::ServerContext*, grpc::ServerReader<v1::WriteRequest>* reader,
                               v1::WriteResponse* response) {
  FAKE_RETURN_IF_ERROR(Before("Write"));
  v1::WriteRequest message;
  KVT_CHECK(reader->Read(&message));
  const v1::WriteHeader header = message.header();
  FAKE_RETURN_IF_ERROR(CheckSession(header.session_id()));
  std::string payloads = message.chunk();
  while (reader->Read(&message)) payloads += message.chunk();
  const std::vector<Key> keys = KeysOf(header.keys());
  const auto crc32cs = UnpackRecords<uint32_t>(header.crc32cs(), "crc32cs");
  KVT_CHECK(crc32cs.ok() && payloads.size() == keys.size() * kBlockBytes);
  absl::MutexLock lock(&mutex_);
  for (size_t i = 0; i < keys.size(); ++i) {
    const Block block = {.slot_idx = static_cast<uint32_t>(blocks_.size()),
                         .crc32c = (*crc32cs)[i],
                         .committed = true};
    const auto slot = segment_.subspan(size_t{block.slot_idx} * kBlockBytes, kBlockBytes);
    std::memcpy(slot.data(), payloads.data() + i * kBlockBytes, kBlockBytes);
    const bool intact = Crc32c(slot) == block.crc32c;
    if (intact) blocks_[keys[i]] = block;
    response->mutable_statuses()->push_back(
        static_cast<char>(intact ? BlockStatus::kOk : BlockStatus::kCorrupt));
  }
  response->set_epoch(epoch_);
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::Read(grpc::ServerContext*, const v1::ReadRequest* request,
                              grpc::ServerWriter<v1::ReadResponse>* writer) {
  FAKE_RETURN_IF_ERROR(Before("Read"));
  FAKE_RETURN_IF_ERROR(CheckSession(request->session_id()));
  v1::ReadResponse message;
  std::string payloads;
  {
    absl::MutexLock lock(&mutex_);
    v1::ReadHeader& header = *message.mutable_header();
    header.set_epoch(epoch_);
    bool missed = false;
    for (const Key& key : KeysOf(request->keys())) {
      const auto place = blocks_.find(key);
      missed = missed || place == blocks_.end();
      const uint32_t crc32c = missed ? 0 : place->second.crc32c;
      header.mutable_statuses()->push_back(
          static_cast<char>(missed ? BlockStatus::kMiss : BlockStatus::kOk));
      header.mutable_crc32cs()->append(PackRecords(std::span(&crc32c, 1)));
      if (missed) continue;
      const auto slot = segment_.subspan(size_t{place->second.slot_idx} * kBlockBytes, kBlockBytes);
      payloads.append(reinterpret_cast<const char*>(slot.data()), slot.size());
    }
  }
  constexpr size_t kChunkBytes = 3000;
  for (size_t sent = 0; sent == 0 || sent < payloads.size(); sent += kChunkBytes) {
    message.set_chunk(payloads.substr(sent, kChunkBytes));
    hooks.read(message);
    writer->Write(message);
    message.clear_header();
  }
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::CreateContext(grpc::ServerContext*,
                                       const v1::CreateContextRequest* request,
                                       v1::CreateContextResponse* response) {
  FAKE_RETURN_IF_ERROR(Before("CreateContext " + request->context()));
  FAKE_RETURN_IF_ERROR(CheckSession(request->session_id()));
  response->set_epoch(epoch_);
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::AppendContext(grpc::ServerContext*,
                                       const v1::AppendContextRequest* request,
                                       v1::AppendContextResponse* response) {
  FAKE_RETURN_IF_ERROR(Before("AppendContext"));
  FAKE_RETURN_IF_ERROR(CheckSession(request->session_id()));
  response->set_epoch(epoch_);
  response->set_block_count(request->base_block_count() +
                            static_cast<uint32_t>(KeysOf(request->keys()).size()));
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::PauseContext(grpc::ServerContext*, const v1::PauseContextRequest* request,
                                      v1::PauseContextResponse* response) {
  FAKE_RETURN_IF_ERROR(Before("PauseContext"));
  FAKE_RETURN_IF_ERROR(CheckSession(request->session_id()));
  response->set_epoch(epoch_);
  response->set_freed_bytes(request->expected_resume_ms());
  response->set_resident_bytes(9);
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::ResumeContext(grpc::ServerContext*,
                                       const v1::ResumeContextRequest* request,
                                       v1::ResumeContextResponse* response) {
  FAKE_RETURN_IF_ERROR(Before("ResumeContext"));
  FAKE_RETURN_IF_ERROR(CheckSession(request->session_id()));
  response->set_epoch(epoch_);
  response->mutable_ticket()->set_eta_ms(request->needed_in_ms());
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::ForkContext(grpc::ServerContext*, const v1::ForkContextRequest* request,
                                     v1::ForkContextResponse* response) {
  FAKE_RETURN_IF_ERROR(
      Before("ForkContext " + request->parent_context() + " " + request->context()));
  FAKE_RETURN_IF_ERROR(CheckSession(request->session_id()));
  response->set_epoch(epoch_);
  response->set_block_count(request->block_count());
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::CloseContext(grpc::ServerContext*, const v1::CloseContextRequest* request,
                                      v1::CloseContextResponse* response) {
  FAKE_RETURN_IF_ERROR(Before("CloseContext"));
  FAKE_RETURN_IF_ERROR(CheckSession(request->session_id()));
  response->set_epoch(epoch_);
  response->set_dropped_bytes(request->drop() ? 11 : 0);
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::ReportBad(grpc::ServerContext*, const v1::ReportBadRequest* request,
                                   v1::ReportBadResponse* response) {
  FAKE_RETURN_IF_ERROR(Before("ReportBad"));
  FAKE_RETURN_IF_ERROR(CheckSession(request->session_id()));
  absl::MutexLock lock(&mutex_);
  for (const Key& key : KeysOf(request->keys())) reported_.insert(key);
  response->set_epoch(epoch_);
  return grpc::Status::OK;
}

}  // namespace kvtier::client
