// SPDX-License-Identifier: Apache-2.0
//
// The read-only HTTP port: metrics, readiness and the status page. HTTP is civetweb's.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "daemon/standby_thread.h"
#include "proto/base/timed_wait.h"

struct mg_connection;
struct mg_context;

namespace kvtier {

struct HttpAnswer {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
};

// Serves GET and HEAD of fixed paths; everything else is 404 or 405. Four threads; a peer that does
// not read or write loses its connection after five seconds.
class HttpServer {
 public:
  // Called from the server's threads, at once perhaps.
  using Handler = std::function<HttpAnswer()>;
  struct Options {
    // "127.0.0.1:9464" or "[::1]:9464".
    std::string listen;
    // Path and what answers it.
    std::map<std::string, Handler> pages;
  };

  // UNAVAILABLE with the library's reason when the address cannot be had.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(Options options);
  // Ends connections and threads; no handler runs afterwards. At once, but for two seconds when a
  // peer is connected and says nothing.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  // The port that is listened on: the kernel's choice when `listen` has port 0.
  uint16_t port() const { return port_; }

 private:
  explicit HttpServer(Options options) : options_(std::move(options)) {}
  // In a thread of its own.
  void Stop();
  static int Answer(mg_connection* connection, void* self);
  static int TakeMessage(const mg_connection* connection, const char* message);

  const Options options_;
  absl::Mutex mutex_;
  // The library's first complaint while it starts: of why it did not.
  std::string complaint_ ABSL_GUARDED_BY(mutex_);
  bool started_ ABSL_GUARDED_BY(mutex_) = false;
  mg_context* context_ = nullptr;
  uint16_t port_ = 0;
  TimedNotification stopped_;
  StandbyThread stopper_{[this] { Stop(); }};
};

}  // namespace kvtier
