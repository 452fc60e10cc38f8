// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/fake_systemd.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <fstream>

#include "proto/base/check.h"

namespace kvtier::testing {
namespace {

constexpr int kFirst = 3;

void Block(int fd) {
  const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
  KVT_CHECK(null >= 0 && (null == fd || dup3(null, fd, O_CLOEXEC) == fd));
  if (null != fd) close(null);
}

// The value of "KEY=value" among lines.
std::string Field(const std::string& text, const std::string& key) {
  const size_t at = text.find(key + "=");
  if (at == std::string::npos) return "";
  const size_t begin = at + key.size() + 1;
  return text.substr(begin, text.find('\n', begin) - begin);
}

}  // namespace

void FakeSystemd::ClaimDescriptors() {
  for (int fd = kFirst; fd < kFirst + kDescriptorsMax; ++fd) Block(fd);
}

FakeSystemd::FakeSystemd(const std::string& directory) : directory_(directory) {
  socket_ = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = directory + "/notify";
  KVT_CHECK(socket_ >= 0 && path.size() < sizeof(address.sun_path));
  std::memcpy(address.sun_path, path.data(), path.size());
  KVT_CHECK(bind(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
  receiver_ = std::jthread([this] { Receive(); });
}

FakeSystemd::~FakeSystemd() {
  shutdown(socket_, SHUT_RDWR);
  receiver_.join();
  close(socket_);
  for (const auto& [name, fd] : stored_) close(fd);
}

void FakeSystemd::Receive() {
  while (true) {
    std::array<char, 4096> text{};
    iovec payload{.iov_base = text.data(), .iov_len = text.size()};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
    msghdr message{};
    message.msg_iov = &payload;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t got = recvmsg(socket_, &message, MSG_CMSG_CLOEXEC);
    if (got <= 0) return;
    const std::string state(text.data(), static_cast<size_t>(got));
    const std::string name = Field(state, "FDNAME");
    absl::MutexLock lock(&mutex_);
    if (const cmsghdr* rights = CMSG_FIRSTHDR(&message); rights != nullptr) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(rights), sizeof(fd));
      KVT_CHECK(Field(state, "FDSTORE") == "1");
      stored_.emplace(name, fd);
    } else if (Field(state, "FDSTOREREMOVE") == "1") {
      const auto [first, last] = stored_.equal_range(name);
      for (auto it = first; it != last; ++it) close(it->second);
      stored_.erase(first, last);
    }
  }
}

std::string FakeSystemd::Wrap(const std::string& program) {
  const std::string path = directory_ + "/start";
  std::string names;
  int fd = kFirst;
  absl::MutexLock lock(&mutex_);
  for (const auto& [name, stored] : stored_) {
    KVT_CHECK(fd < kFirst + kDescriptorsMax);
    KVT_CHECK(dup2(stored, fd++) >= 0);
    names += (names.empty() ? "" : ":") + name;
  }
  std::ofstream(path) << "#!/bin/sh\nexport NOTIFY_SOCKET=" << directory_
                      << "/notify\nexport LISTEN_PID=$$ LISTEN_FDS=" << fd - kFirst
                      << "\nexport LISTEN_FDNAMES=" << names << "\nexec " << program << " \"$@\"\n";
  KVT_CHECK(chmod(path.c_str(), 0700) == 0);
  return path;
}

void FakeSystemd::TakeBack() { ClaimDescriptors(); }

std::vector<std::string> FakeSystemd::Names() const {
  absl::MutexLock lock(&mutex_);
  std::vector<std::string> names;
  for (const auto& [name, fd] : stored_) names.push_back(name);
  return names;
}

}  // namespace kvtier::testing
