// SPDX-License-Identifier: Apache-2.0
//
// TCP with mutual TLS, end to end: a daemon in this process, the client library, and certificates
// of authorities that the test makes.
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <thread>

#include "absl/strings/str_format.h"
#include "client/include/kvtier/client.h"
#include "client/src/admin_client.h"
#include "client/src/channel.h"
#include "daemon/service_fixture.h"
#include "proto/base/reasons.h"
#include "proto/rpc/grpc_status.h"
#include "tests/integration/test_authority.h"

namespace kvtier {
namespace {

using client::AdminClient;
using client::Client;
using client::ClientOptions;
using client::Namespace;
using client::TcpOptions;
using testing::Each;
using testing::HasSubstr;

constexpr char kEngine[] = "URI:spiffe://test/engine";

class TlsTest : public ServiceFixture {
 protected:
  void SetUp() override {
    authority_ = std::make_unique<TestAuthority>(folder_.path(), "authority");
    const TlsPaths server =
        authority_->Issue("server", {.alternative_names = "DNS:kvtierd.test,IP:127.0.0.1"});
    config_.server.tcp_address = "127.0.0.1:0";
    config_.server.tls_cert = server.cert;
    config_.server.tls_key = server.key;
    config_.server.tls_ca = server.ca;
    config_.tenants = {{.name = "engines", .certificates = {"spiffe://test/engine"}},
                       {.name = "others", .certificates = {"dns:other.test"}},
                       {.name = "batch", .certificates = {"cn:batch job"}}};
    config_.admins = {{.name = "operator", .certificates = {"spiffe://test/operator"}}};
    ServiceFixture::SetUp();
  }

  // Of a peer with this certificate, who believes its authority.
  TcpOptions OptionsOf(const TlsPaths& paths) const {
    return {.address = absl::StrFormat("127.0.0.1:%d", daemon_->tcp_port()),
            .cert_path = paths.cert,
            .key_path = paths.key,
            .ca_path = paths.ca};
  }
  TcpOptions Peer(const TestAuthority::Subject& subject) {
    return OptionsOf(authority_->Issue(absl::StrFormat("peer%d", ++peer_count_), subject));
  }
  TcpOptions Engine() { return Peer({.alternative_names = kEngine}); }

  static absl::StatusOr<std::unique_ptr<Client>> Connect(const TcpOptions& tcp) {
    return Client::Connect({.tcp = tcp, .client_name = "test", .reconnect_timeout_ms = 500});
  }
  static absl::Status GetStatus(const TcpOptions& tcp) {
    return AdminClient({.timeout_ms = 5000, .tcp = tcp}).GetStatus().status();
  }
  static std::unique_ptr<v1::ContextStoreService::Stub> NewStub(const TcpOptions& tcp) {
    return v1::ContextStoreService::NewStub(client::NewTcpChannel(tcp).value());
  }

  static Layout TestLayout() {
    Layout layout;
    layout.model = "test";
    layout.layer_count = 1;
    layout.kv_head_count = 1;
    layout.head_dim = 64;
    layout.block_tokens = 16;
    layout.codec = Codec::kRaw;
    layout.raw_block_bytes = kBytes;
    return layout;
  }
  static std::vector<Key> Chain(const Namespace& ns, size_t count) {
    std::vector<Key> keys;
    for (uint32_t i = 0; i < count; ++i) {
      std::optional<Key> parent;
      if (i > 0) parent = keys.back();
      keys.push_back(HashBlock(ns.hash, parent, std::span(&i, 1)));
    }
    return keys;
  }
  static std::vector<std::byte> Payloads(size_t count, uint8_t seed = 1) {
    std::vector<std::byte> bytes(count * kBytes);
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = std::byte(i / kBytes * 7 + i + seed);
    return bytes;
  }
  static void ExpectWritesAndReads(Client& client, size_t count = 4) {
    const auto ns = client.RegisterLayout(TestLayout());
    ASSERT_TRUE(ns.ok()) << ns.status();
    const auto keys = Chain(*ns, count);
    const auto payloads = Payloads(count);
    const auto written = client.Write(*ns, std::nullopt, keys, payloads);
    ASSERT_TRUE(written.ok()) << written.status();
    EXPECT_THAT(*written, Each(BlockStatus::kOk));
    EXPECT_EQ(client.Lookup(*ns, keys)->size(), count);
    const auto read = client.Read(*ns, keys);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(*read, payloads);
  }

  std::unique_ptr<TestAuthority> authority_;
  int peer_count_ = 0;
};

TEST_F(TlsTest, BlocksGoByValueToTheTenantOfTheCertificate) {
  const std::pair<const char*, TestAuthority::Subject> peers[] = {
      {"engines", {.alternative_names = kEngine}},
      {"others", {.common_name = "batch job", .alternative_names = "DNS:a.test,DNS:Other.TEST"}},
      {"batch", {.common_name = "batch job"}}};
  for (const auto& [tenant, subject] : peers) {
    const auto client = Connect(Peer(subject));
    ASSERT_TRUE(client.ok()) << client.status();
    EXPECT_EQ((*client)->epoch(), daemon_->epoch());
    const auto ns = (*client)->RegisterLayout(TestLayout());
    ASSERT_TRUE(ns.ok()) << ns.status();
    EXPECT_EQ(ns->hash, HashNamespace(tenant, ns->layout, "", "")) << tenant;
    ExpectWritesAndReads(**client);
  }
  EXPECT_TRUE(Eventually([](const core::CoreCounters& c) { return c.session_count == 0; }));
}

TEST_F(TlsTest, CallsThatMapMemorySayWhatToDo) {
  const TcpOptions tcp = Engine();
  const auto client = Connect(tcp).value();
  const Namespace ns = client->RegisterLayout(TestLayout()).value();
  const auto keys = Chain(ns, 1);
  for (const absl::Status& status :
       {client->Reserve(ns, std::nullopt, keys).status(), client->Acquire(ns, keys).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(ReasonOf(status), reason::kNotMapped);
    EXPECT_THAT(std::string(status.message()), HasSubstr("Write and Read"));
  }
  // So does the daemon, to a client without manners.
  const auto stub = NewStub(tcp);
  const auto context = TestClient::Deadline();
  const auto stream = stub->OpenSession(context.get(), {});
  v1::OpenSessionResponse opened;
  ASSERT_TRUE(stream->Read(&opened));
  v1::ReserveRequest reserve;
  reserve.set_session_id(opened.opened().session_id());
  reserve.set_keys(PackKeys(keys));
  v1::ReserveResponse reserved;
  const absl::Status status =
      FromGrpc(stub->Reserve(TestClient::Deadline().get(), reserve, &reserved));
  EXPECT_EQ(ReasonOf(status), reason::kNotMapped) << status;
  v1::AcquireRequest acquire;
  acquire.set_session_id(opened.opened().session_id());
  acquire.set_keys(PackKeys(keys));
  v1::AcquireResponse acquired;
  EXPECT_EQ(ReasonOf(FromGrpc(stub->Acquire(TestClient::Deadline().get(), acquire, &acquired))),
            reason::kNotMapped);
}

TEST_F(TlsTest, WhoHasNoCertificateOfTheAuthorityDoesNotConnect) {
  TestAuthority other(folder_.path(), "other");
  TcpOptions forged = OptionsOf(other.Issue("forged", {.alternative_names = kEngine}));
  forged.ca_path = authority_->path();
  const TcpOptions expired = Peer({.alternative_names = kEngine, .days = -1});
  for (const TcpOptions& tcp : {forged, expired}) {
    const absl::Status status = Connect(tcp).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_EQ(GetStatus(tcp).code(), absl::StatusCode::kUnavailable);
  }
  std::ifstream file(authority_->path());
  const std::string roots{std::istreambuf_iterator<char>(file), {}};
  const std::string address = Engine().address;
  for (const auto& credentials :
       {grpc::SslCredentials({roots, "", ""}), grpc::InsecureChannelCredentials()}) {
    const auto stub = v1::ContextStoreService::NewStub(grpc::CreateChannel(address, credentials));
    v1::LookupResponse response;
    EXPECT_EQ(stub->Lookup(TestClient::Deadline(2000).get(), {}, &response).error_code(),
              grpc::StatusCode::UNAVAILABLE);
  }
  EXPECT_TRUE(Connect(Engine()).ok());
}

TEST_F(TlsTest, ADaemonWithoutTheExpectedNameOrAuthorityIsNotBelieved) {
  TcpOptions tcp = Engine();
  tcp.server_name = "kvtierd.test";
  EXPECT_TRUE(Connect(tcp).ok());
  tcp.server_name = "elsewhere.test";
  EXPECT_EQ(Connect(tcp).status().code(), absl::StatusCode::kUnavailable);
  const TestAuthority other(folder_.path(), "other");
  tcp.server_name = "";
  tcp.ca_path = other.path();
  EXPECT_EQ(Connect(tcp).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(TlsTest, NamesThatAreNobodysAreForbidden) {
  const TestAuthority::Subject strangers[] = {
      {.alternative_names = "URI:spiffe://test/stranger"},
      // A stronger kind is not made up for by a weaker one.
      {.common_name = "batch job", .alternative_names = "URI:spiffe://test/stranger"},
      {.common_name = "batch job", .alternative_names = "DNS:stranger.test"},
      // SPIFFE allows one URI.
      {.common_name = "batch job", .alternative_names = "URI:spiffe://test/engine,URI:http://a"},
      // The kind is part of the name.
      {.common_name = "spiffe:\\/\\/test\\/engine"},
      {.common_name = "other.test"},
      {.alternative_names = "DNS:spiffe.test,URI:https://test/engine"}};
  for (const TestAuthority::Subject& subject : strangers) {
    const TcpOptions tcp = Peer(subject);
    const absl::Status status = Connect(tcp).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied) << status;
    EXPECT_EQ(ReasonOf(status), reason::kIdentityUnknown) << status;
    v1::LookupResponse response;
    EXPECT_EQ(NewStub(tcp)->Lookup(TestClient::Deadline().get(), {}, &response).error_code(),
              grpc::StatusCode::PERMISSION_DENIED);
    EXPECT_EQ(GetStatus(tcp).code(), absl::StatusCode::kPermissionDenied);
  }
  // Of two tenants is of none.
  const auto both = Peer({.alternative_names = "DNS:other.test,DNS:third.test"});
  EXPECT_TRUE(Connect(both).ok());
  daemon_.reset();
  config_.tenants.push_back({.name = "third", .certificates = {"dns:third.test"}});
  Start();
  TcpOptions again = both;
  again.address = Engine().address;
  EXPECT_EQ(Connect(again).status().code(), absl::StatusCode::kPermissionDenied);
}

TEST_F(TlsTest, TenantsReachNeitherBlocksNorSessionsOfOthers) {
  const auto mine = Connect(Engine()).value();
  const Namespace ns = mine->RegisterLayout(TestLayout()).value();
  const auto keys = Chain(ns, 4);
  ASSERT_TRUE(mine->Write(ns, std::nullopt, keys, Payloads(4)).ok());

  const TcpOptions other = Peer({.alternative_names = "DNS:other.test"});
  const auto theirs = Connect(other).value();
  const Namespace their_ns = theirs->RegisterLayout(TestLayout()).value();
  EXPECT_NE(their_ns.hash, ns.hash);
  EXPECT_TRUE(theirs->Lookup(their_ns, keys)->empty());
  EXPECT_TRUE(theirs->Read(their_ns, keys)->empty());

  // With the number of a session of the other tenant, every call is refused.
  const auto my_stub = NewStub(Engine());
  const auto context = TestClient::Deadline();
  const auto stream = my_stub->OpenSession(context.get(), {});
  v1::OpenSessionResponse opened;
  ASSERT_TRUE(stream->Read(&opened));
  v1::RegisterLayoutRequest request;
  request.set_session_id(opened.opened().session_id());
  v1::RegisterLayoutResponse response;
  const auto stub = NewStub(other);
  absl::Status status =
      FromGrpc(stub->RegisterLayout(TestClient::Deadline().get(), request, &response));
  EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied) << status;
  v1::ReadRequest read;
  read.set_session_id(opened.opened().session_id());
  const auto read_context = TestClient::Deadline();
  status = FromGrpc(stub->Read(read_context.get(), read)->Finish());
  EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied) << status;
  v1::WriteResponse written;
  const auto write_context = TestClient::Deadline();
  const auto writer = stub->Write(write_context.get(), &written);
  v1::WriteRequest header;
  header.mutable_header()->set_session_id(opened.opened().session_id());
  writer->Write(header);
  writer->WritesDone();
  EXPECT_EQ(writer->Finish().error_code(), grpc::StatusCode::PERMISSION_DENIED);

  // Sessions of the unix sockets are not known here, nor the other way round.
  const auto local = NewClient();
  request.set_session_id(local->session_id);
  status = FromGrpc(my_stub->RegisterLayout(TestClient::Deadline().get(), request, &response));
  EXPECT_EQ(ReasonOf(status), reason::kSessionUnknown) << status;
  request.set_session_id(opened.opened().session_id());
  status = FromGrpc(local->stub().RegisterLayout(TestClient::Deadline().get(), request, &response));
  EXPECT_EQ(ReasonOf(status), reason::kSessionUnknown) << status;
}

TEST_F(TlsTest, AdminsAreThoseThatAreNamed) {
  const TcpOptions admin = Peer({.alternative_names = "URI:spiffe://test/operator"});
  EXPECT_TRUE(GetStatus(admin).ok());
  EXPECT_TRUE(AdminClient({.tcp = admin}).Flush().ok());
  // Being one is not being a tenant.
  EXPECT_EQ(Connect(admin).status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(GetStatus(Engine()).code(), absl::StatusCode::kPermissionDenied);
  // What is not named is not served.
  grpc::GenericStub stub(client::NewTcpChannel(Engine()).value());
  grpc::CompletionQueue queue;
  const auto context = TestClient::Deadline();
  const auto call = stub.PrepareUnaryCall(context.get(), "/grpc.reflection.v1alpha.Any/Call",
                                          grpc::ByteBuffer(), &queue);
  call->StartCall();
  grpc::ByteBuffer response;
  grpc::Status status;
  call->Finish(&response, &status, &queue);
  void* tag = nullptr;
  bool ok = false;
  ASSERT_TRUE(queue.Next(&tag, &ok));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::PERMISSION_DENIED);
}

TEST_F(TlsTest, AdminsAndTheRefusedAreAuditedByTheirNames) {
  const TcpOptions admin = Peer({.alternative_names = "URI:spiffe://test/operator"});
  const TcpOptions engine = Engine();
  const TcpOptions stranger = Peer({.common_name = "stranger"});
  testing::internal::CaptureStderr();
  EXPECT_TRUE(AdminClient({.tcp = admin}).Flush().ok());
  EXPECT_FALSE(AdminClient({.tcp = engine}).Flush().ok());
  EXPECT_FALSE(Connect(stranger).ok());
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, testing::ContainsRegex(
                       "audit who=operator peer=\"?ipv4:127.0.0.1:.* what=Flush outcome=OK"));
  EXPECT_THAT(log, HasSubstr("audit who=spiffe://test/engine peer=tcp what=Flush "
                             "outcome=PERMISSION_DENIED"));
  EXPECT_THAT(log, testing::ContainsRegex("audit who=cn:stranger peer=\"?ipv4:.* what=OpenSession "
                                          "outcome=\"PERMISSION_DENIED: "));
}

TEST_F(TlsTest, ARateIsTheTenantsOwn) {
  daemon_.reset();
  config_.tenants[0].calls_per_second = 4;
  Start();
  const auto engine = Connect(Engine()).value();
  const auto other = Connect(Peer({.alternative_names = "DNS:other.test"})).value();
  const Namespace ns = engine->RegisterLayout(TestLayout()).value();
  const Namespace their_ns = other->RegisterLayout(TestLayout()).value();
  // The library waits for what the daemon refuses, and gives up in time.
  int refused_count = 0;
  for (int i = 0; i < 40; ++i) {
    EXPECT_TRUE(other->Lookup(their_ns, Chain(their_ns, 1)).ok());
    const absl::Status status = engine->Lookup(ns, Chain(ns, 1)).status();
    if (status.ok()) continue;
    EXPECT_EQ(ReasonOf(status), reason::kRateLimited);
    ++refused_count;
  }
  EXPECT_GT(refused_count, 0);
  EXPECT_LT(refused_count, 40);
}

TEST_F(TlsTest, NewCertificatesAreUsedWithoutARestart) {
  const TcpOptions old_peer = Engine();
  const auto connected = Connect(old_peer).value();
  const Namespace ns = connected->RegisterLayout(TestLayout()).value();
  TestAuthority next(folder_.path(), "next");
  next.Issue("server", {.alternative_names = "DNS:kvtierd.test,IP:127.0.0.1"});
  std::filesystem::copy_file(next.path(), authority_->path(),
                             std::filesystem::copy_options::overwrite_existing);
  const TcpOptions new_peer = OptionsOf(next.Issue("next-peer", {.alternative_names = kEngine}));
  absl::StatusOr<std::unique_ptr<Client>> client;
  const uint64_t deadline_ms = MonotonicMs() + 20'000;
  do {
    client = Connect(new_peer);
  } while (!client.ok() && MonotonicMs() < deadline_ms);
  ASSERT_TRUE(client.ok()) << client.status();
  ExpectWritesAndReads(**client);
  // The old authority is believed no more.
  TcpOptions old_believes_new = old_peer;
  old_believes_new.ca_path = next.path();
  EXPECT_EQ(Connect(old_believes_new).status().code(), absl::StatusCode::kUnavailable);
  // A connection that is open stays.
  EXPECT_TRUE(connected->Lookup(ns, Chain(ns, 1)).ok());
  EXPECT_EQ(connected->stats().reopen_count, 0U);
}

TEST_F(TlsTest, FilesThatDoNotFitTogetherAreNamedAtTheStart) {
  daemon_.reset();
  const auto error = [this](const std::string& key, const std::string& cert) {
    Config config = config_;
    if (!key.empty()) config.server.tls_key = key;
    if (!cert.empty()) config.server.tls_cert = cert;
    return std::string(Daemon::Start(config).status().message());
  };
  EXPECT_THAT(error(folder_.path() + "/none.key", ""), HasSubstr("none.key: No such file"));
  const TlsPaths other = authority_->Issue("another", {});
  EXPECT_THAT(error(other.key, ""), HasSubstr("is not the key of the certificate in"));
  EXPECT_THAT(error("", other.key), HasSubstr("has no certificate in PEM"));
  ASSERT_EQ(chmod(other.cert.c_str(), 0600), 0);
  EXPECT_THAT(error(other.cert, ""), HasSubstr("is no private key in PEM"));
  ASSERT_EQ(chmod(config_.server.tls_key.c_str(), 0644), 0);
  EXPECT_THAT(error("", ""), HasSubstr("chmod 0600"));
  ASSERT_EQ(chmod(config_.server.tls_key.c_str(), 0640), 0);
  EXPECT_EQ(error("", ""), "");
}

TEST_F(TlsTest, AClientsOwnFilesAreNamedAtOnce) {
  TcpOptions tcp = Engine();
  tcp.key_path += ".none";
  absl::Status status = Connect(tcp).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(".none: No such file"));
  tcp.cert_path = "";
  status = Connect(tcp).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_EQ(GetStatus(tcp).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(TlsTest, OlderThanTls12IsRefused) {
  const TcpOptions peer = Engine();
  const auto connect = [&](const char* version) {
    return RunQuietly(absl::StrFormat(
        "openssl s_client -connect %s -cert %s -key %s -CAfile %s -verify_return_error -alpn h2 "
        "-cipher DEFAULT@SECLEVEL=0 %s",
        peer.address, peer.cert_path, peer.key_path, peer.ca_path, version));
  };
  EXPECT_EQ(connect("-tls1_3"), 0);
  EXPECT_EQ(connect("-tls1_2"), 0);
  EXPECT_NE(connect("-tls1_1"), 0);
}

TEST_F(TlsTest, TheToolGoesOverTcpAndExaminesCertificates) {
  const TcpOptions admin = Peer({.alternative_names = "URI:spiffe://test/operator"});
  const auto run = [](const TcpOptions& tcp, const std::string& command) {
    return RunQuietly(absl::StrFormat(
        "KVTIER_ADDRESS=%s KVTIER_TLS_CERT=%s KVTIER_TLS_KEY=%s %s --tls-ca %s %s", tcp.address,
        tcp.cert_path, tcp.key_path, KVTIERCTL_PATH, tcp.ca_path, command));
  };
  EXPECT_EQ(run(admin, "status"), 0);
  EXPECT_EQ(run(Engine(), "status"), 1);
  EXPECT_EQ(run(admin, "replay --generate"), 2);
  const auto examine = [this] {
    const std::string path = folder_.path() + "/kvtierd.toml";
    config_.nvme.enabled = false;
    std::ofstream(path) << PrintConfig(config_);
    return RunQuietly(absl::StrFormat("%s doctor --config %s", KVTIERCTL_PATH, path));
  };
  EXPECT_EQ(examine(), 0);
  config_.server.tls_cert = Peer({.days = -1}).cert_path;
  config_.server.tls_key = folder_.path() + absl::StrFormat("/peer%d.key", peer_count_);
  EXPECT_EQ(examine(), 1);
}

}  // namespace
}  // namespace kvtier
