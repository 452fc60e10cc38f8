// SPDX-License-Identifier: Apache-2.0
#include "daemon/http_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "daemon/http_test_client.h"
#include "proto/base/status_util.h"

namespace kvtier {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

std::unique_ptr<HttpServer> StartOn(const std::string& listen) {
  auto server = HttpServer::Start(
      {.listen = listen,
       .pages = {{"/", [] { return HttpAnswer{.body = "root"}; }},
                 {"/bad", [] { return HttpAnswer{.status = 503, .body = "no"}; }},
                 {"/large", [] { return HttpAnswer{.body = std::string(1 << 20, 'x')}; }}}});
  EXPECT_TRUE(server.ok()) << server.status();
  return server.ok() ? std::move(server).value() : nullptr;
}

TEST(HttpServerTest, ServesItsPagesAndNothingElse) {
  const auto server = StartOn("127.0.0.1:0");
  ASSERT_NE(server, nullptr);
  ASSERT_NE(server->port(), 0);
  EXPECT_THAT(HttpTestClient::Get(server->port(), "/"),
              AllOf(StartsWith("HTTP/1.1 200 OK\r\n"), HasSubstr("Content-Length: 4\r\n"),
                    HasSubstr("default-src 'none'"), EndsWith("\r\n\r\nroot")));
  EXPECT_THAT(HttpTestClient::Get(server->port(), "/bad"),
              AllOf(StartsWith("HTTP/1.1 503 "), EndsWith("no")));
  EXPECT_THAT(HttpTestClient::Get(server->port(), "/large"), EndsWith(std::string(1 << 20, 'x')));
  for (const char* path : {"/x", "/../etc/passwd", "/etc/passwd", "/%2e%2e/etc/passwd"}) {
    EXPECT_THAT(HttpTestClient::Get(server->port(), path), Not(StartsWith("HTTP/1.1 200"))) << path;
  }
}

TEST(HttpServerTest, TakesGetAndHeadOnly) {
  const auto server = StartOn("127.0.0.1:0");
  ASSERT_NE(server, nullptr);
  EXPECT_THAT(HttpTestClient::Ask(server->port(), "HEAD / HTTP/1.1\r\nHost: test\r\n\r\n"),
              AllOf(StartsWith("HTTP/1.1 200 OK\r\n"), HasSubstr("Content-Length: 4\r\n"),
                    EndsWith("\r\n\r\n")));
  for (const char* method : {"POST", "PUT", "DELETE", "OPTIONS"}) {
    EXPECT_THAT(HttpTestClient::Ask(
                    server->port(),
                    std::string(method) + " / HTTP/1.1\r\nHost: test\r\nContent-Length: 0\r\n\r\n"),
                AllOf(StartsWith("HTTP/1.1 405 "), HasSubstr("Allow: GET, HEAD\r\n")))
        << method;
  }
}

TEST(HttpServerTest, OutlivesGarbage) {
  const auto server = StartOn("127.0.0.1:0");
  ASSERT_NE(server, nullptr);
  const uint32_t seed = std::random_device()();
  std::mt19937 random(seed);
  for (int i = 0; i < 50; ++i) {
    std::string garbage(1 + random() % 3000, '\0');
    for (char& c : garbage) c = static_cast<char>(random());
    if (i % 2 == 0) garbage = "GET /" + garbage;
    HttpTestClient::Ask(server->port(), garbage + "\r\n\r\n");
  }
  EXPECT_THAT(HttpTestClient::Get(server->port(), "/"), EndsWith("root")) << "seed " << seed;
}

TEST(HttpServerTest, EndsWithConnectionsOpen) {
  auto server = StartOn("127.0.0.1:0");
  ASSERT_NE(server, nullptr);
  HttpTestClient silent(server->port());
  HttpTestClient half(server->port());
  half.Send("GET / HT");
  // Nobody reads this one's answer, which is larger than any socket buffer.
  HttpTestClient deaf(server->port());
  deaf.Send("GET /large HTTP/1.1\r\nHost: test\r\n\r\n");
  // Ends, whatever they do; and the port is free for the next.
  const std::string listen = absl::StrFormat("127.0.0.1:%d", server->port());
  server.reset();
  server = StartOn(listen);
  ASSERT_NE(server, nullptr);
  EXPECT_THAT(HttpTestClient::Get(server->port(), "/"), EndsWith("root"));
}

TEST(HttpServerTest, SaysWhyItCannotListen) {
  const auto server = StartOn("127.0.0.1:0");
  ASSERT_NE(server, nullptr);
  const std::string taken = absl::StrFormat("127.0.0.1:%d", server->port());
  const auto second = HttpServer::Start({.listen = taken, .pages = {}});
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), AllOf(HasSubstr(taken), HasSubstr("bind")));
}

}  // namespace
}  // namespace kvtier
