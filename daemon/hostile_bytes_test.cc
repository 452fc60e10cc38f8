// SPDX-License-Identifier: Apache-2.0
//
// Bytes that no client of ours would send, to every call and to the handle socket: the daemon
// answers or refuses, serves others meanwhile, and holds nothing for them afterwards.
// KVTIER_FUZZ_ROUNDS sets how many messages each test sends (2000), KVTIER_FUZZ_SEED the seed.
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <google/protobuf/struct.pb.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstdlib>
#include <cstring>
#include <random>

#include "daemon/service_fixture.h"

namespace kvtier {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

uint64_t NumberFrom(const char* variable, uint64_t otherwise) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

class HostileBytesTest : public ServiceFixture {
 protected:
  void SetUp() override {
    ServiceFixture::SetUp();
    std::cout << "KVTIER_FUZZ_SEED=" << seed_ << "\n";
    witness_ = NewClient();
    witness_->Put(keys_);
  }

  // Others are served, and nothing is held for those who are gone.
  void TearDown() override {
    EXPECT_EQ(witness_->Lookup(keys_).size(), keys_.size());
    EXPECT_TRUE(Eventually([](const core::CoreCounters& counters) {
      return counters.session_count == 1 && counters.pending_fill_count == 0 &&
             counters.lease_count == 0 && counters.tiers[0].quarantined_bytes == 0 &&
             counters.tiers[1].quarantined_bytes == 0;
    }));
    daemon_->store().Run(
        [](core::StoreCore& core, core::TimeMs, core::Effects*) { core.CheckInvariants(); });
  }

  uint64_t Below(uint64_t count) { return random_() % count; }

  std::string RandomBytes(size_t bytes_max) {
    std::string bytes(Below(bytes_max + 1), '\0');
    for (char& byte : bytes) byte = static_cast<char>(random_());
    return bytes;
  }

  const uint64_t seed_ = NumberFrom("KVTIER_FUZZ_SEED", std::random_device()());
  const uint64_t rounds_ = NumberFrom("KVTIER_FUZZ_ROUNDS", 2000);
  std::mt19937_64 random_{seed_};
  const std::vector<Key> keys_ = TestChain(1, 4);
  std::unique_ptr<TestClient> witness_;
};

class HostileRequestsTest : public HostileBytesTest {
 protected:
  void SetUp() override {
    HostileBytesTest::SetUp();
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    stub_ = std::make_unique<grpc::GenericStub>(
        grpc::CreateCustomChannel("unix:" + config_.server.run_dir + "/kvtierd.sock",
                                  grpc::InsecureChannelCredentials(), arguments));
    // Another layout than the witness's, whose blocks it has a right to drop otherwise.
    client_ = std::make_unique<TestClient>(config_.server.run_dir);
    client_->OpenWithLayout(kBytes / 2);
    client_->Put(TestChain(1, 5));
  }
  void TearDown() override {
    client_.reset();
    HostileBytesTest::TearDown();
  }

  // What an action of hints may have in its payload, and what it may not.
  google::protobuf::Struct RandomPayload() {
    google::protobuf::Struct payload;
    for (const char* const name : {"context", "block_hashes", "needed_in_ms", "retain_ms",
                                   "expected_resume_ms", "next_step", "drop", "block_count"}) {
      google::protobuf::Value value;
      switch (Below(6)) {
        case 0:
          value.set_string_value(std::string(Below(3), 'c'));
          break;
        case 1:
          value.set_number_value(Below(2) == 0 ? -1e300 : static_cast<double>(RandomNumber()));
          break;
        case 2:
          value.mutable_list_value()->add_values()->set_string_value(std::string(64, 'a'));
          break;
        case 3:
          value.set_bool_value(true);
          break;
        case 4:
          value.mutable_struct_value();
          break;
        default:
          continue;
      }
      (*payload.mutable_fields())[name] = value;
    }
    return payload;
  }

  // A message whose fields are right, odd or missing.
  std::unique_ptr<Message> RandomMessage(const Descriptor* type) {
    std::unique_ptr<Message> message(
        google::protobuf::MessageFactory::generated_factory()->GetPrototype(type)->New());
    if (type == google::protobuf::Struct::descriptor()) {
      message->CopyFrom(RandomPayload());
      return message;
    }
    for (int i = 0; i < type->field_count(); ++i) {
      if (Below(8) != 0) SetField(message.get(), type->field(i));
    }
    return message;
  }

  void SetField(Message* message, const FieldDescriptor* field) {
#ifdef __SANITIZE_THREAD__
    // The map of Debian's libprotobuf and one that is compiled for ThreadSanitizer are not the
    // same: what one makes crashes the other, in one thread.
    if (field->message_type() == google::protobuf::Struct::descriptor()) return;
#endif
    const auto* const access = message->GetReflection();
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_MESSAGE:
        if (field->is_repeated()) {
          for (uint64_t i = Below(4); i > 0; --i) {
            access->AddMessage(message, field)->CopyFrom(*RandomMessage(field->message_type()));
          }
        } else {
          access->MutableMessage(message, field)->CopyFrom(*RandomMessage(field->message_type()));
        }
        break;
      case FieldDescriptor::CPPTYPE_STRING:
        access->SetString(message, field,
                          field->type() == FieldDescriptor::TYPE_BYTES
                              ? RandomKeys()
                              : std::string(Below(3), 'c'));
        break;
      case FieldDescriptor::CPPTYPE_UINT32:
        access->SetUInt32(message, field,
                          field->name() == "namespace_id" && Below(8) != 0
                              ? client_->namespace_id
                              : static_cast<uint32_t>(RandomNumber()));
        break;
      case FieldDescriptor::CPPTYPE_UINT64:
        if (field->is_repeated()) {
          access->AddUInt64(message, field, RandomNumber());
        } else {
          const bool is_session = field->name() == "session_id" && Below(16) != 0;
          access->SetUInt64(message, field, is_session ? client_->session_id : RandomNumber());
        }
        break;
      case FieldDescriptor::CPPTYPE_ENUM:
        access->SetEnumValue(message, field, static_cast<int>(Below(6)) - 1);
        break;
      case FieldDescriptor::CPPTYPE_BOOL:
        access->SetBool(message, field, Below(2) == 0);
        break;
      default:
        FAIL() << "a field of a new type: " << field->full_name();
    }
  }

  uint64_t RandomNumber() {
    const uint64_t numbers[] = {0, 1, 2, 100, 1ULL << 31, (1ULL << 32) - 1, ~0ULL, random_()};
    return numbers[Below(std::size(numbers))];
  }

  // Stored keys, keys of nobody, and what is no keys at all.
  std::string RandomKeys() {
    if (Below(4) == 0) return RandomBytes(100);
    std::string keys = PackKeys(TestChain(static_cast<uint32_t>(1 + Below(3)), Below(6)));
    if (Below(16) == 0) keys.append(RandomBytes(40));
    return keys;
  }

  std::string RandomRequest(const google::protobuf::MethodDescriptor* method) {
    if (Below(10) == 0) return RandomBytes(200);
    std::string bytes = RandomMessage(method->input_type())->SerializeAsString();
    if (Below(2) == 0 || bytes.empty()) return bytes;
    for (uint64_t i = 0; i <= Below(4); ++i) bytes[Below(bytes.size())] ^= char(1 << Below(8));
    if (Below(8) == 0) bytes.resize(Below(bytes.size()));
    return bytes;
  }

  // Its status does not matter; that it ends does.
  void Send(const google::protobuf::MethodDescriptor* method, const std::string& bytes) {
    const std::string path = "/" + method->service()->full_name() + "/" + method->name();
    const grpc::Slice slice(bytes);
    const grpc::ByteBuffer request(&slice, 1);
    grpc::CompletionQueue queue;
    const auto context = TestClient::Deadline(200);
    const auto await = [&] {
      void* tag = nullptr;
      bool ok = false;
      return queue.Next(&tag, &ok) && ok;
    };
    const auto call = stub_->PrepareCall(context.get(), path, &queue);
    call->StartCall(nullptr);
    if (await()) {
      call->WriteLast(request, grpc::WriteOptions(), nullptr);
      (void)await();
    }
    grpc::ByteBuffer answer;
    for (bool more = true; more;) {
      call->Read(&answer, nullptr);
      more = await();
    }
    grpc::Status status;
    call->Finish(&status, nullptr);
    ASSERT_TRUE(await());
    queue.Shutdown();
    EXPECT_NE(status.error_code(), grpc::StatusCode::UNAVAILABLE) << path;
  }

  std::unique_ptr<grpc::GenericStub> stub_;
  std::unique_ptr<TestClient> client_;
};

TEST_F(HostileRequestsTest, EveryCallOutlivesThem) {
  const auto* const service = google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(
      "kvtier.v1.ContextStoreService");
  ASSERT_NE(service, nullptr);
  for (uint64_t round = 0; round < rounds_ && !HasFailure(); ++round) {
    // OpenSession among them: without a token it ends at once.
    const auto* const method =
        service->method(static_cast<int>(Below(static_cast<uint64_t>(service->method_count()))));
    Send(method, RandomRequest(method));
  }
}

TEST_F(HostileBytesTest, TheHandleSocketOutlivesThem) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = config_.server.run_dir + "/handles.sock";
  std::memcpy(address.sun_path, path.data(), path.size());
  for (uint64_t round = 0; round < rounds_; ++round) {
    const UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    for (uint64_t i = 0; i <= Below(4); ++i) {
      HandleRequest request{.kind = static_cast<HandleRequestKind>(Below(4)),
                            .tier = static_cast<uint32_t>(Below(4)),
                            .segment_idx = static_cast<uint32_t>(Below(3)),
                            .writable = static_cast<uint32_t>(Below(3))};
      std::string message(reinterpret_cast<const char*>(&request), sizeof(request));
      if (Below(2) == 0) message[Below(message.size())] ^= char(1 << Below(8));
      if (Below(3) == 0) message = RandomBytes(80);
      // It may be closed by now.
      (void)send(fd.get(), message.data(), message.size(), MSG_NOSIGNAL);
    }
  }
}

}  // namespace
}  // namespace kvtier
