// SPDX-License-Identifier: Apache-2.0
#include "daemon/http_server.h"

#include <civetweb.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string_view>
#include <thread>
#include <utility>

#include "absl/time/time.h"
#include "daemon/log.h"
#include "proto/base/status_util.h"
#include "proto/base/timed_wait.h"

namespace kvtier {
namespace {

const char* StatusText(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    default:
      return "Service Unavailable";
  }
}

// Nothing is loaded from anywhere, and no site may frame or read it.
constexpr char kSecurityHeaders[] =
    "Cache-Control: no-store\r\n"
    "Content-Security-Policy: default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'\r\n"
    "X-Content-Type-Options: nosniff\r\n";

void Send(mg_connection* connection, const HttpAnswer& answer, bool with_body) {
  mg_printf(connection,
            "HTTP/1.1 %d %s\r\n"
            "Content-Type: %s\r\n"
            "Content-Length: %zu\r\n"
            "%s%s"
            "Connection: close\r\n\r\n",
            answer.status, StatusText(answer.status), answer.content_type.c_str(),
            answer.body.size(), answer.status == 405 ? "Allow: GET, HEAD\r\n" : "",
            kSecurityHeaders);
  // A peer that is gone is no error of ours.
  if (with_body) mg_write(connection, answer.body.data(), answer.body.size());
}

// Connects to `port` of the numeric address in `listen`, and hangs up.
void Knock(const std::string& listen, uint16_t port) {
  std::string host = listen.substr(0, listen.rfind(':'));
  if (host.starts_with('[')) host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return;
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd >= 0) {
    // Whether it is heard is seen elsewhere.
    static_cast<void>(connect(fd, found->ai_addr, found->ai_addrlen));
    close(fd);
  }
  freeaddrinfo(found);
}

}  // namespace

int HttpServer::Answer(mg_connection* connection, void* self) {
  const mg_request_info* request = mg_get_request_info(connection);
  const std::string_view method = request->request_method;
  const auto& pages = static_cast<HttpServer*>(self)->options_.pages;
  const auto page = pages.find(request->local_uri == nullptr ? "" : request->local_uri);
  HttpAnswer answer;
  if (page == pages.end()) {
    answer = {.status = 404, .body = "not found; there are:"};
    for (const auto& [path, handler] : pages) answer.body += " " + path;
    answer.body += "\n";
  } else if (method != "GET" && method != "HEAD") {
    answer = {.status = 405, .body = "only GET and HEAD\n"};
  } else {
    answer = page->second();
  }
  Send(connection, answer, method != "HEAD");
  return answer.status;
}

int HttpServer::TakeMessage(const mg_connection* connection, const char* message) {
  // While it starts, the connection stands for the server alone.
  const mg_context* context = connection == nullptr ? nullptr : mg_get_context(connection);
  auto* self = context == nullptr ? nullptr : static_cast<HttpServer*>(mg_get_user_data(context));
  if (self != nullptr) {
    absl::MutexLock lock(&self->mutex_);
    if (!self->started_ && self->complaint_.empty()) self->complaint_ = message;
  }
  Log(LogLevel::kDebug, "http", {{"message", message}});
  return 1;
}

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(Options options) {
  // Counted inside the library; never given back, as the process needs it to its end.
  mg_init_library(0);
  std::unique_ptr<HttpServer> server(new HttpServer(std::move(options)));
  const char* settings[] = {"listening_ports",
                            server->options_.listen.c_str(),
                            "num_threads",
                            "4",
                            "request_timeout_ms",
                            "5000",
                            "linger_timeout_ms",
                            "1000",
                            "enable_keep_alive",
                            "no",
                            nullptr};
  mg_callbacks callbacks{};
  callbacks.log_message = &HttpServer::TakeMessage;
  callbacks.begin_request = [](mg_connection* connection) {
    return Answer(connection, mg_get_user_data(mg_get_context(connection)));
  };
  server->context_ = mg_start(&callbacks, server.get(), settings);
  absl::MutexLock lock(&server->mutex_);
  if (server->context_ == nullptr) {
    return Unavailable("listen on %s: %s", server->options_.listen,
                       server->complaint_.empty() ? "failed" : server->complaint_);
  }
  server->started_ = true;
  mg_server_port port{};
  if (mg_get_server_ports(server->context_, 1, &port) == 1) {
    server->port_ = static_cast<uint16_t>(port.port);
  }
  return server;
}

void HttpServer::Stop() {
  mg_stop(context_);
  stopped_.Notify();
}

HttpServer::~HttpServer() {
  if (context_ == nullptr) return;
  stopper_.Begin();
  // The library looks whether it is to stop when somebody connects, else every two seconds.
  while (!stopped_.WaitFor(absl::Milliseconds(10))) Knock(options_.listen, port_);
}

}  // namespace kvtier
