// SPDX-License-Identifier: Apache-2.0
//
// Messages of a peer to the handle socket. The input is steps: a message of any bytes, a message
// that is right but for some, or what the daemon does when the peer opens a session. Every message
// is answered or ends the connection; a descriptor is given to a session only, and of its tenant's
// segments.
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>

#include "absl/synchronization/mutex.h"
#include "daemon/handle_server.h"
#include "proto/base/check.h"
#include "proto/base/status_util.h"
#include "tests/fuzz/fuzz_input.h"

namespace kvtier {
namespace {

constexpr uint64_t kEpoch = 42;
constexpr uint64_t kSegmentBytes = 8192;

// The server, and what it told. One for all runs: each has a connection of its own.
class Served {
 public:
  Served()
      : path_(std::filesystem::temp_directory_path() /
              absl::StrFormat("kvtier-fuzz-handles-%d.sock", getpid())),
        segment_fd_(memfd_create("fuzz-segment", MFD_CLOEXEC)),
        tenants_({}, getuid()) {
    KVT_CHECK(ftruncate(segment_fd_.get(), kSegmentBytes) == 0);
    auto server = HandleServer::Start(
        {.socket_path = path_, .epoch = kEpoch}, &tenants_,
        {.export_segment = [this](TierId tier, uint32_t idx, bool) { return Export(tier, idx); },
         .on_session_gone =
             [this](uint64_t session) {
               absl::MutexLock lock(&mutex_);
               gone_ = session;
             }});
    KVT_CHECK(server.ok());
    server_ = std::move(server).value();
  }
  ~Served() {
    server_.reset();
    unlink(path_.c_str());
  }

  HandleServer& server() { return *server_; }
  UniqueFd Connect() const {
    UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path_.data(), path_.size());
    KVT_CHECK(connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    return fd;
  }
  void AwaitGone(uint64_t session) {
    absl::MutexLock lock(&mutex_);
    const auto is_gone = [this, session]()
                             ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return gone_ == session; };
    KVT_CHECK(mutex_.AwaitWithTimeout(absl::Condition(&is_gone), absl::Seconds(10)));
  }
  // Not while the session's connection is open.
  void CheckNotGone(uint64_t session) {
    absl::MutexLock lock(&mutex_);
    KVT_CHECK(gone_ != session);
  }

 private:
  // Segment 0 is of the peer's tenant, segment 1 of another, segment 2 is lost.
  absl::StatusOr<SegmentHandle> Export(TierId tier, uint32_t idx) const {
    KVT_CHECK(tier == TierId::kHbm || tier == TierId::kHost);
    if (idx > 2) return NotFound("no segment %d", idx);
    if (idx == 2) return Unavailable("lost");
    return SegmentHandle{
        .fd = dup(segment_fd_.get()), .segment_bytes = kSegmentBytes, .owner = idx};
  }

  const std::string path_;
  const UniqueFd segment_fd_;
  const TenantTable tenants_;
  std::unique_ptr<HandleServer> server_;
  absl::Mutex mutex_;
  uint64_t gone_ ABSL_GUARDED_BY(mutex_) = 0;
};

class Peer {
 public:
  explicit Peer(Served* served) : served_(served), fd_(served->Connect()) {}
  ~Peer() {
    if (session_.has_value()) served_->CheckNotGone(*session_);
    fd_.Reset();
    if (session_.has_value()) served_->AwaitGone(*session_);
  }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  bool is_open() const { return is_open_; }

  void Send(const std::string& message) {
    HandleRequest request;
    const bool is_whole = message.size() == sizeof(request);
    if (is_whole) std::memcpy(&request, message.data(), sizeof(request));
    const ssize_t sent = send(fd_.get(), message.data(), message.size(), MSG_NOSIGNAL);
    KVT_CHECK(sent == static_cast<ssize_t>(message.size()));
    Receive(is_whole ? std::optional(request) : std::nullopt);
  }

  // What the OpenSession call does with the token that the peer was given.
  void OpenSession() {
    if (token_.empty()) return;
    const auto claim = served_->server().ClaimToken(token_);
    token_.clear();
    KVT_CHECK(claim.has_value() && claim->owner == 0);
    static uint64_t last_session = 0;
    session_ = ++last_session;
    KVT_CHECK(served_->server().Bind(claim->connection, *session_, nullptr));
  }

 private:
  void Receive(const std::optional<HandleRequest>& request) {
    HandleReply reply;
    UniqueFd segment_fd;
    const auto got =
        ReceiveWithFd(fd_.get(), std::as_writable_bytes(std::span(&reply, 1)), &segment_fd);
    if (!got.ok() || *got == 0) {
      // A process with a session keeps its connection, whatever it sends.
      KVT_CHECK(!session_.has_value());
      is_open_ = false;
      return;
    }
    KVT_CHECK(*got == sizeof(reply) && reply.version == kHandleWireVersion &&
              reply.epoch == kEpoch);
    const bool is_segment = reply.status == HandleStatus::kOk && request.has_value() &&
                            request->kind == HandleRequestKind::kGetSegment;
    KVT_CHECK(segment_fd.valid() == is_segment);
    if (is_segment) {
      KVT_CHECK(session_.has_value() && request->segment_idx == 0 &&
                reply.segment_bytes == kSegmentBytes);
    } else if (reply.status == HandleStatus::kOk) {
      KVT_CHECK(request.has_value() && request->kind == HandleRequestKind::kHello);
      token_.assign(reinterpret_cast<const char*>(reply.token), sizeof(reply.token));
    }
    // Closed by the server after this answer.
    is_open_ = session_.has_value() || reply.status == HandleStatus::kOk ||
               reply.status == HandleStatus::kNoSegment ||
               reply.status == HandleStatus::kUnavailable;
  }

  Served* const served_;
  UniqueFd fd_;
  bool is_open_ = true;
  std::string token_;
  std::optional<uint64_t> session_;
};

std::string RequestFrom(fuzz::FuzzInput* input) {
  HandleRequest request{.kind = static_cast<HandleRequestKind>(input->Below(4)),
                        .tier = static_cast<uint32_t>(input->Below(4)),
                        .segment_idx = static_cast<uint32_t>(input->Below(5)),
                        .writable = static_cast<uint32_t>(input->Below(3))};
  std::string message(reinterpret_cast<const char*>(&request), sizeof(request));
  const size_t at = input->Byte();
  const auto changes = input->Take(input->Byte() % 8);
  for (size_t i = 0; i < changes.size() && at + i < message.size(); ++i) {
    message[at + i] = static_cast<char>(changes[i]);
  }
  return message;
}

}  // namespace
}  // namespace kvtier

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size_bytes) {
  static kvtier::Served served;
  kvtier::fuzz::FuzzInput input(data, size_bytes);
  kvtier::Peer peer(&served);
  for (int step = 0; step < 64 && !input.empty() && peer.is_open(); ++step) {
    switch (input.Below(8)) {
      case 0:
        peer.Send(kvtier::fuzz::TextOf(input.Take(input.Byte())));
        break;
      case 1:
        peer.OpenSession();
        break;
      default:
        peer.Send(kvtier::RequestFrom(&input));
        break;
    }
  }
  return 0;
}
