// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/client/bare_server.h"

#include <grpcpp/channel.h>
#include <grpcpp/server_builder.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>

#include "client/src/channel.h"
#include "daemon/requests.h"
#include "proto/base/key.h"
#include "tests/bench/tiers/meter.h"

namespace kvtier::bench {
namespace {

using grpc::CallbackServerContext;

// Takes every message in.
class Taker final : public grpc::ServerReadReactor<v1::WriteRequest> {
 public:
  Taker() { StartRead(&message_); }
  void OnReadDone(bool ok) override {
    if (ok) {
      StartRead(&message_);
    } else {
      Finish(grpc::Status::OK);
    }
  }
  bool InternalInlineable() override { return true; }
  void OnDone() override { delete this; }

 private:
  v1::WriteRequest message_;
};

// Sends one full chunk for each key of the request.
class Sender final : public grpc::ServerWriteReactor<v1::ReadResponse> {
 public:
  explicit Sender(size_t count) : left_(count) {
    message_.set_chunk(std::string(kChunkBytesMax, 'x'));
    OnWriteDone(true);
  }
  void OnWriteDone(bool ok) override {
    if (ok && left_-- > 0) {
      StartWrite(&message_);
    } else {
      Finish(grpc::Status::OK);
    }
  }
  bool InternalInlineable() override { return true; }
  void OnDone() override { delete this; }

 private:
  size_t left_;
  v1::ReadResponse message_;
};

class BareService final : public v1::ContextStoreService::CallbackService {
 public:
  grpc::ServerReadReactor<v1::WriteRequest>* Write(CallbackServerContext*,
                                                   v1::WriteResponse*) override {
    return new Taker;
  }
  grpc::ServerWriteReactor<v1::ReadResponse>* Read(CallbackServerContext*,
                                                   const v1::ReadRequest* request) override {
    return new Sender(request->keys().size() / Key::kBytes);
  }
};

}  // namespace

BareServer::BareServer() {
  const char* const tmpdir = std::getenv("TMPDIR");
  folder_ = std::string(tmpdir != nullptr ? tmpdir : "/tmp") + "/kvtier-bare-XXXXXX";
  if (mkdtemp(folder_.data()) == nullptr) Die("make a folder for the bare server");
  const std::string socket_path = folder_ + "/bare.sock";
  process_ = std::make_unique<testing::ChildProcess>(
      std::vector<std::string>{"/proc/self/exe", kFlag, socket_path}, folder_ + "/log");
  const auto channel = client::NewUnixChannel(socket_path);
  if (!channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(10))) {
    Die("the bare server did not start");
  }
  stub_ = v1::ContextStoreService::NewStub(channel);
}

BareServer::~BareServer() {
  process_.reset();
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

void BareServer::Serve(const std::string& socket_path) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  BareService service;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("unix:" + socket_path, grpc::InsecureServerCredentials());
  builder.RegisterService(&service);
  builder.SetMaxReceiveMessageSize(kMessageBytesMax);
  const auto server = builder.BuildAndStart();
  if (server == nullptr) Die("listen on " + socket_path);
  server->Wait();
  std::exit(0);
}

}  // namespace kvtier::bench
