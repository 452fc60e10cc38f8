// SPDX-License-Identifier: Apache-2.0
#include "daemon/test_client.h"

#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "proto/base/crc32c.h"
#include "proto/base/status_util.h"

namespace kvtier {
namespace {

std::shared_ptr<grpc::Channel> NewChannel(const std::string& socket_path) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // Who does not read holds up his stream after 64 KiB, and not after megabytes.
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  return grpc::CreateCustomChannel("unix:" + socket_path, grpc::InsecureChannelCredentials(),
                                   arguments);
}

UniqueFd ConnectHandles(const std::string& path) {
  UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  if (connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) return {};
  const timeval patience{.tv_sec = 10, .tv_usec = 0};
  setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  return fd;
}

}  // namespace

TestClient::TestClient(const std::string& run_dir)
    : stub_(v1::ContextStoreService::NewStub(NewChannel(run_dir + "/kvtierd.sock"))),
      admin_(v1::AdminService::NewStub(NewChannel(run_dir + "/admin.sock"))),
      handle_(ConnectHandles(run_dir + "/handles.sock")) {}

TestClient::~TestClient() {
  CloseStream();
  for (const auto& mapping : mappings_) munmap(mapping.data(), mapping.size());
}

std::string TestClient::TakeToken() {
  const HandleRequest request{.kind = HandleRequestKind::kHello};
  HandleReply reply;
  EXPECT_EQ(send(handle_.get(), &request, sizeof(request), MSG_NOSIGNAL), ssize_t{sizeof(request)});
  EXPECT_EQ(recv(handle_.get(), &reply, sizeof(reply), 0), ssize_t{sizeof(reply)});
  if (reply.status != HandleStatus::kOk) return "";
  return std::string(reinterpret_cast<const char*>(reply.token), sizeof(reply.token));
}

bool TestClient::Open(const std::string& token) {
  v1::OpenSessionRequest request;
  request.set_token(token);
  request.set_client_name("test");
  stream_context_ = std::make_unique<grpc::ClientContext>();
  stream_ = stub_->OpenSession(stream_context_.get(), request);
  v1::OpenSessionResponse first;
  if (!stream_->Read(&first)) return false;
  EXPECT_TRUE(first.has_opened());
  opened = first.opened();
  session_id = opened.session_id();
  epoch = first.epoch();
  return true;
}

v1::Layout TestClient::RawLayout(uint32_t bytes) {
  v1::Layout layout;
  layout.set_model("test");
  layout.set_layer_count(1);
  layout.set_kv_head_count(1);
  layout.set_head_dim(64);
  layout.set_block_tokens(16);
  layout.set_codec(v1::CODEC_RAW);
  layout.set_raw_block_bytes(bytes);
  return layout;
}

void TestClient::OpenWithLayout(uint32_t bytes) {
  ASSERT_TRUE(Open(TakeToken()));
  v1::RegisterLayoutRequest request;
  request.set_session_id(session_id);
  *request.mutable_layout() = RawLayout(bytes);
  v1::RegisterLayoutResponse response;
  const grpc::Status status = stub_->RegisterLayout(Deadline().get(), request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  namespace_id = response.namespace_id();
  block_bytes = response.block_bytes();
  ASSERT_EQ(block_bytes, bytes);
}

void TestClient::CloseStream() {
  if (stream_ == nullptr) return;
  stream_context_->TryCancel();
  AwaitStreamEnd();
}

grpc::Status TestClient::AwaitStreamEnd() {
  v1::OpenSessionResponse heartbeat;
  while (stream_->Read(&heartbeat)) EXPECT_EQ(heartbeat.epoch(), epoch);
  grpc::Status status = stream_->Finish();
  stream_.reset();
  return status;
}

std::span<std::byte> TestClient::Map(uint32_t tier, uint32_t segment_idx, bool writable) {
  const HandleRequest request{.kind = HandleRequestKind::kGetSegment,
                              .tier = tier,
                              .segment_idx = segment_idx,
                              .writable = writable ? 1U : 0U};
  EXPECT_EQ(send(handle_.get(), &request, sizeof(request), MSG_NOSIGNAL), ssize_t{sizeof(request)});
  HandleReply reply;
  iovec payload{.iov_base = &reply, .iov_len = sizeof(reply)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &payload;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  EXPECT_EQ(recvmsg(handle_.get(), &message, MSG_CMSG_CLOEXEC), ssize_t{sizeof(reply)});
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (reply.status != HandleStatus::kOk || header == nullptr) return {};
  int raw_fd = -1;
  std::memcpy(&raw_fd, CMSG_DATA(header), sizeof(raw_fd));
  const UniqueFd fd(raw_fd);
  void* base = mmap(nullptr, reply.segment_bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ,
                    MAP_SHARED, fd.get(), 0);
  EXPECT_NE(base, MAP_FAILED);
  mappings_.emplace_back(static_cast<std::byte*>(base), reply.segment_bytes);
  return mappings_.back();
}

std::unique_ptr<grpc::ClientContext> TestClient::Deadline(int timeout_ms) {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(timeout_ms));
  return context;
}

std::vector<BlockStatus> TestClient::Put(const std::vector<Key>& keys) {
  auto reserve = Ask<v1::ReserveRequest>();
  reserve.set_keys(PackKeys(keys));
  v1::ReserveResponse reserved;
  grpc::Status status = stub_->Reserve(Deadline().get(), reserve, &reserved);
  EXPECT_TRUE(status.ok()) << status.error_message();
  const auto places = UnpackRecords<BlockResult>(reserved.results(), "results").value();
  std::vector<BlockStatus> statuses;
  std::vector<Key> filled;
  for (size_t i = 0; i < places.size(); ++i) {
    statuses.push_back(places[i].status);
    if (places[i].status != BlockStatus::kOk) continue;
    const auto segment = Map(places[i].tier, places[i].segment_idx, true);
    const std::string payload = TestPayload(keys[i], block_bytes);
    std::memcpy(segment.data() + places[i].offset_bytes, payload.data(), payload.size());
    filled.push_back(keys[i]);
  }
  auto commit = Ask<v1::CommitRequest>();
  commit.set_keys(PackKeys(filled));
  commit.set_crc32cs(PackTestCrcs(filled, block_bytes));
  v1::CommitResponse committed;
  status = stub_->Commit(Deadline().get(), commit, &committed);
  EXPECT_TRUE(status.ok()) << status.error_message();
  for (size_t i = 0, done = 0; i < statuses.size(); ++i) {
    if (statuses[i] == BlockStatus::kOk) {
      statuses[i] = static_cast<BlockStatus>(committed.statuses().at(done++));
    }
  }
  return statuses;
}

std::vector<uint8_t> TestClient::Lookup(const std::vector<Key>& keys) {
  auto request = Ask<v1::LookupRequest>();
  request.set_keys(PackKeys(keys));
  v1::LookupResponse response;
  const grpc::Status status = stub_->Lookup(Deadline().get(), request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.hit_count(), response.residency().size());
  return {response.residency().begin(), response.residency().end()};
}

grpc::Status TestClient::Acquire(const std::vector<Key>& keys, v1::AcquireResponse* response,
                                 int timeout_ms) {
  auto request = Ask<v1::AcquireRequest>();
  request.set_keys(PackKeys(keys));
  return stub_->Acquire(Deadline(timeout_ms).get(), request, response);
}

std::vector<Key> TestChain(uint32_t seed, size_t count) {
  std::vector<Key> keys;
  std::optional<Key> parent;
  for (size_t i = 0; i < count; ++i) {
    const std::vector<uint32_t> tokens = {seed, static_cast<uint32_t>(i)};
    keys.push_back(HashBlock(NamespaceHash{}, parent, tokens));
    parent = keys.back();
  }
  return keys;
}

std::string TestPayload(const Key& key, uint32_t block_bytes) {
  std::string payload;
  payload.reserve(block_bytes);
  while (payload.size() < block_bytes) {
    payload.append(key.AsBytes().substr(0, block_bytes - payload.size()));
  }
  return payload;
}

std::string PackKeys(const std::vector<Key>& keys) { return PackRecords<Key>(keys); }

std::string PackTestCrcs(const std::vector<Key>& keys, uint32_t block_bytes) {
  std::vector<uint32_t> crc32cs;
  for (const Key& key : keys) {
    const std::string payload = TestPayload(key, block_bytes);
    crc32cs.push_back(Crc32c(std::as_bytes(std::span(payload))));
  }
  return PackRecords<uint32_t>(crc32cs);
}

}  // namespace kvtier
