// SPDX-License-Identifier: Apache-2.0
//
// Messages of a daemon to the client on the handle socket. The input is what the daemon sends: each
// message with descriptors, of any bytes or right but for some. What the client then calls a
// segment must be mapped memory of the size that it says, to its last byte.
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "client/src/handle_connection.h"
#include "client/src/segment_map.h"
#include "proto/base/check.h"
#include "proto/base/handle_wire.h"
#include "proto/base/status_util.h"
#include "tests/fuzz/fuzz_input.h"

namespace kvtier::client {
namespace {

constexpr uint64_t kSegmentBytes = 16 << 10;
constexpr size_t kDescriptorsMax = 6;

struct Message {
  std::string bytes;
  size_t descriptor_count = 0;
  uint64_t file_bytes = 0;
};

UniqueFd MakeFile(uint64_t file_bytes) {
  UniqueFd fd(memfd_create("fuzz-segment", MFD_CLOEXEC));
  KVT_CHECK(fd.valid() && ftruncate(fd.get(), static_cast<off_t>(file_bytes)) == 0);
  return fd;
}

void Send(int socket, const Message& message) {
  iovec payload{.iov_base = const_cast<char*>(message.bytes.data()),
                .iov_len = message.bytes.size()};
  msghdr header{};
  header.msg_iov = &payload;
  header.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kDescriptorsMax * sizeof(int))> control{};
  const UniqueFd file = MakeFile(message.file_bytes);
  if (message.descriptor_count > 0) {
    header.msg_control = control.data();
    header.msg_controllen = CMSG_SPACE(message.descriptor_count * sizeof(int));
    cmsghdr* const rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(message.descriptor_count * sizeof(int));
    for (size_t i = 0; i < message.descriptor_count; ++i) {
      const int fd = file.get();
      std::memcpy(CMSG_DATA(rights) + i * sizeof(int), &fd, sizeof(fd));
    }
  }
  // The client may be gone by now.
  (void)sendmsg(socket, &header, MSG_NOSIGNAL);
}

// Sends what it was given to whoever connects, and hangs up: the client never waits.
class Daemon {
 public:
  Daemon()
      : path_(std::filesystem::temp_directory_path() /
              absl::StrFormat("kvtier-fuzz-daemon-%d.sock", getpid())),
        listener_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path_.data(), path_.size());
    unlink(path_.c_str());
    KVT_CHECK(bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    KVT_CHECK(listen(listener_.get(), 4) == 0);
    thread_ = std::jthread([this] { Serve(); });
  }
  ~Daemon() {
    KVT_CHECK(shutdown(listener_.get(), SHUT_RDWR) == 0);
    thread_.join();
    unlink(path_.c_str());
  }

  const std::string& path() const { return path_; }
  // For the next connection.
  void SetMessages(std::vector<Message> messages) {
    absl::MutexLock lock(&mutex_);
    messages_ = std::move(messages);
  }

 private:
  void Serve() {
    while (true) {
      const UniqueFd peer(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!peer.valid()) return;
      std::vector<Message> messages;
      {
        absl::MutexLock lock(&mutex_);
        messages.swap(messages_);
      }
      for (const Message& message : messages) Send(peer.get(), message);
    }
  }

  const std::string path_;
  const UniqueFd listener_;
  absl::Mutex mutex_;
  std::vector<Message> messages_ ABSL_GUARDED_BY(mutex_);
  std::jthread thread_;
};

Message MessageFrom(fuzz::FuzzInput* input, bool is_hello) {
  const uint8_t flags = input->Byte();
  Message message{.bytes = {}, .descriptor_count = is_hello ? 0U : 1U, .file_bytes = kSegmentBytes};
  if (flags % 4 == 3) message.descriptor_count = input->Below(kDescriptorsMax + 1);
  if (flags / 4 % 4 == 3) message.file_bytes = input->Number() % (2 * kSegmentBytes);
  if (flags / 16 % 4 == 3) {
    message.bytes = fuzz::TextOf(input->Take(input->Byte()));
    return message;
  }
  const HandleReply reply{.epoch = 42, .segment_bytes = kSegmentBytes};
  message.bytes.assign(reinterpret_cast<const char*>(&reply), sizeof(reply));
  const size_t at = input->Byte();
  const auto changes = input->Take(input->Byte() % 16);
  for (size_t i = 0; i < changes.size() && at + i < message.bytes.size(); ++i) {
    message.bytes[at + i] = static_cast<char>(changes[i]);
  }
  return message;
}

void MapSegments(const std::shared_ptr<HandleConnection>& connection) {
  // No GPU: what a device's segment needs is another's test.
  SegmentMap segments(connection, std::make_shared<DeviceMap>(nullptr));
  for (uint32_t i = 0; i < 4; ++i) {
    const auto mapping =
        segments.Get({.tier = 1 + i % 2, .segment_idx = i / 2, .writable = i % 2 == 0});
    if (!mapping.ok()) continue;
    const std::span<std::byte> bytes = (*mapping)->bytes();
    KVT_CHECK(!bytes.empty() && bytes.size() == (*mapping)->segment_bytes());
    // A SIGBUS if the file is shorter.
    for (size_t at = 0; at < bytes.size(); at += 4096) KVT_CHECK(bytes[at] == std::byte{0});
    KVT_CHECK(bytes.back() == std::byte{0});
  }
}

}  // namespace
}  // namespace kvtier::client

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size_bytes) {
  static kvtier::client::Daemon daemon;
  kvtier::fuzz::FuzzInput input(data, size_bytes);
  std::vector<kvtier::client::Message> messages;
  while (!input.empty() && messages.size() < 8) {
    messages.push_back(kvtier::client::MessageFrom(&input, messages.empty()));
  }
  daemon.SetMessages(std::move(messages));
  const auto connection = kvtier::client::HandleConnection::Open(daemon.path(), 10'000);
  if (connection.ok()) kvtier::client::MapSegments(*connection);
  return 0;
}
