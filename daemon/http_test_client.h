// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <string>

namespace kvtier {

// A TCP connection to 127.0.0.1, for tests of the HTTP port.
class HttpTestClient {
 public:
  explicit HttpTestClient(uint16_t port) : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const timeval timeout{.tv_sec = 20, .tv_usec = 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  }
  ~HttpTestClient() { close(fd_); }
  HttpTestClient(const HttpTestClient&) = delete;
  HttpTestClient& operator=(const HttpTestClient&) = delete;

  void Send(const std::string& text) {
    EXPECT_EQ(send(fd_, text.data(), text.size(), MSG_NOSIGNAL), static_cast<ssize_t>(text.size()));
  }
  // All until the peer closes.
  std::string ReadAll() {
    std::string all;
    char buffer[4096];
    for (ssize_t n = 0; (n = recv(fd_, buffer, sizeof(buffer), 0)) > 0;) all.append(buffer, n);
    return all;
  }

  // The whole answer to one request, with its headers.
  static std::string Ask(uint16_t port, const std::string& request) {
    HttpTestClient client(port);
    client.Send(request);
    return client.ReadAll();
  }
  static std::string Get(uint16_t port, const std::string& path) {
    return Ask(port, "GET " + path + " HTTP/1.1\r\nHost: test\r\n\r\n");
  }

 private:
  const int fd_;
};

}  // namespace kvtier
