// SPDX-License-Identifier: Apache-2.0
//
// Sequences of requests, from their bytes on, to the services of a daemon without a network: a
// store over small memory tiers and a map for nvme, sessions, the handle socket. A step of the
// input is a method, how much of its message is put right (the session, the namespace, keys of a
// chain), and the message. Afterwards the store is drained: every call ends, and nothing is held.
#include <google/protobuf/message.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "daemon/admin_service.h"
#include "daemon/context_store_service.h"
#include "daemon/direct_calls.h"
#include "daemon/fake_cold_tier.h"
#include "proto/base/check.h"
#include "proto/base/packed.h"
#include "proto/base/status_util.h"
#include "tests/fuzz/fuzz_input.h"
#include "tiers/memory/memory_tier.h"

namespace kvtier {
namespace {

using fuzz::FuzzInput;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

constexpr uint32_t kBlockBytes = 4096;
constexpr size_t kChains = 4;
constexpr size_t kDepth = 8;

// Keys with their bytes in order, so that an input can name them, too.
std::string PackedChain(size_t chain, size_t count) {
  std::string packed;
  for (size_t depth = 0; depth < count; ++depth) {
    packed.append(Key::kBytes, static_cast<char>(16 * chain + depth + 1));
  }
  return packed;
}

std::unique_ptr<MemoryTier> MakeTier(TierId id) {
  auto tier =
      MemoryTier::Create({.id = id, .capacity_bytes = 128 << 10, .segment_bytes = 64 << 10});
  KVT_CHECK(tier.ok());
  return std::move(tier).value();
}

// A daemon without sockets for gRPC; one for each run.
class Served {
 public:
  Served()
      : socket_path_(std::filesystem::temp_directory_path() /
                     absl::StrFormat("kvtier-fuzz-service-%d.sock", getpid())),
        hbm_(MakeTier(TierId::kHbm)),
        host_(MakeTier(TierId::kHost)),
        tenants_({}, getuid()),
        session_calls_(kHeartbeatMs),
        data_calls_(kHeartbeatMs),
        watch_calls_(kWatchBeatMs) {
    auto store = Store::Open({.core = {}, .copy_worker_count = 1},
                             {.hbm = hbm_.get(), .host = host_.get(), .nvme = &cold_});
    KVT_CHECK(store.ok());
    store_ = std::move(store).value();
    auto handles = HandleServer::Start(
        {.socket_path = socket_path_}, &tenants_,
        {.export_segment =
             [this](TierId tier, uint32_t idx, bool writable) {
               return store_->tiers().Memory(tier)->ExportSegment(idx, writable);
             },
         .on_session_gone =
             [this](uint64_t session) {
               store_->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
                 core.DetachMapping(session, now_ms, effects);
               });
             }});
    KVT_CHECK(handles.ok());
    handles_ = std::move(handles).value();
    service_ =
        std::make_unique<ContextStoreService>(ServiceContext{.epoch = 1,
                                                             .data_streams_max = 4,
                                                             .store = store_.get(),
                                                             .handles = handles_.get(),
                                                             .tenants = &tenants_,
                                                             .sessions = &sessions_,
                                                             .session_calls = &session_calls_,
                                                             .data_calls = &data_calls_,
                                                             .watch_calls = &watch_calls_});
    admin_ = std::make_unique<AdminService>(AdminService::Options{.epoch = 1, .device = "cpu"},
                                            store_.get(), &tenants_);
    OpenSession();
  }
  ~Served() {
    handles_.reset();
    unlink(socket_path_.c_str());
  }

  // Every call ends, and nothing is left that a session held.
  void Finish() {
    store_->Run([](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
      core.Drain(now_ms, effects);
    });
    watch_calls_.Drain();
    session_calls_.Drain();
    calls_.RunUntilAllEnd();
    EndSession();
    store_->Run([](core::StoreCore& core, core::TimeMs, core::Effects*) {
      core.CheckInvariants();
      const core::CoreCounters counters = core.Counters();
      KVT_CHECK(counters.session_count == 0 && counters.lease_count == 0 &&
                counters.pending_fill_count == 0);
      for (const core::TierCounters& tier : counters.tiers) {
        KVT_CHECK(tier.quarantined_bytes == 0);
      }
    });
  }

  ContextStoreService& service() { return *service_; }
  AdminService& admin() { return *admin_; }
  CallQueue* calls() { return &calls_; }
  uint64_t session_id() const { return session_id_; }
  core::NamespaceIdx namespace_id() const { return namespace_id_; }

  // Ends the session in the middle of everything, and opens another.
  void Reopen() {
    EndSession();
    OpenSession();
  }

 private:
  void OpenSession() {
    const core::NamespaceSpec spec{.hash = {}, .layout = {}, .block_bytes = kBlockBytes};
    session_ = store_->Run([](core::StoreCore& core, core::TimeMs now_ms, core::Effects*) {
      return *core.OpenSession(0, now_ms);
    });
    namespace_id_ = store_->Run([&](core::StoreCore& core, core::TimeMs, core::Effects*) {
      return *core.OpenNamespace(session_, spec);
    });
    session_id_ = sessions_.Add({.core_id = session_, .owner = 0});
    KVT_CHECK(sessions_.AddNamespace(session_id_, namespace_id_, spec).ok());
  }
  void EndSession() {
    sessions_.Remove(session_id_);
    store_->Run([this](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
      core.EndSession(session_, now_ms, effects);
    });
  }

  const std::string socket_path_;
  FakeColdTier cold_;
  std::unique_ptr<MemoryTier> hbm_;
  std::unique_ptr<MemoryTier> host_;
  const TenantTable tenants_;
  std::unique_ptr<Store> store_;
  SessionTable sessions_;
  LiveCalls session_calls_;
  LiveCalls data_calls_;
  LiveCalls watch_calls_;
  std::unique_ptr<HandleServer> handles_;
  std::unique_ptr<ContextStoreService> service_;
  std::unique_ptr<AdminService> admin_;
  CallQueue calls_;
  core::SessionId session_ = 0;
  uint64_t session_id_ = 0;
  core::NamespaceIdx namespace_id_ = 0;
};

// What is put right in a message.
struct Repair {
  explicit Repair(FuzzInput* input)
      : flags(input->Byte()), chain(input->Below(kChains)), count(input->Below(kDepth + 1)) {}

  bool keys() const { return flags % 4 != 3; }
  bool session() const { return flags / 4 % 4 != 3; }
  bool context() const { return flags / 16 % 4 != 3; }

  const uint8_t flags;
  const size_t chain;
  const size_t count;
};

class Requests {
 public:
  Requests(Served* served, FuzzInput* input) : served_(served), input_(input) {}

  // False: gRPC would not have called the service.
  bool Fill(Message* message) {
    const Repair repair(input_);
    const auto bytes = input_->Piece();
    if (!message->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return false;
    Mend(repair, message);
    return true;
  }

  // The same for methods that decode messages themselves: mended or as it is, in up to three
  // slices.
  grpc::ByteBuffer Bytes(Message* message) {
    const Repair repair(input_);
    const size_t first_bytes = input_->Byte();
    std::string bytes = fuzz::TextOf(input_->Piece());
    if (repair.flags / 64 % 4 != 3 && message->ParseFromString(bytes)) {
      Mend(repair, message);
      Lengthen(message);
      bytes = message->SerializeAsString();
    }
    std::vector<grpc::Slice> slices;
    for (const size_t part_bytes : {first_bytes, 2 * first_bytes, bytes.size()}) {
      const size_t taken_bytes = std::min(part_bytes, bytes.size());
      slices.emplace_back(bytes.data(), taken_bytes);
      bytes.erase(0, taken_bytes);
    }
    return {slices.data(), slices.size()};
  }

 private:
  void Mend(const Repair& repair, Message* message) {
    const auto* const access = message->GetReflection();
    const auto* const type = message->GetDescriptor();
    for (int i = 0; i < type->field_count(); ++i) {
      const FieldDescriptor* const field = type->field(i);
      if (field->name() == "header") {
        if (repair.session()) Mend(repair, access->MutableMessage(message, field));
      } else if (field->name() == "session_id") {
        if (repair.session()) access->SetUInt64(message, field, served_->session_id());
      } else if (field->name() == "namespace_id") {
        if (repair.session()) access->SetUInt32(message, field, served_->namespace_id());
      } else if (field->name() == "keys") {
        if (repair.keys()) {
          access->SetString(message, field, PackedChain(repair.chain, repair.count));
        }
      } else if (field->name() == "crc32cs") {
        if (repair.keys()) access->SetString(message, field, std::string(4 * repair.count, '\0'));
      } else if (field->name() == "context") {
        if (repair.context()) {
          access->SetString(message, field, "c" + std::to_string(repair.chain));
        }
      }
    }
  }

  // A chunk of one byte stands for blocks that would be too long for an input.
  static void Lengthen(Message* message) {
    auto* const write = dynamic_cast<v1::WriteRequest*>(message);
    if (write == nullptr || write->chunk().size() != 1) return;
    write->set_chunk(std::string(kBlockBytes * (1 + write->chunk()[0] % kDepth), 'x'));
  }

  Served* const served_;
  FuzzInput* const input_;
};

template <typename Service, typename Request, typename Response>
using UnaryMethod = grpc::ServerUnaryReactor* (Service::*)(grpc::CallbackServerContext*,
                                                           const Request*, Response*);

template <typename Service, typename Request, typename Response>
void Call(Served* served, Service& service, UnaryMethod<Service, Request, Response> method,
          Requests requests) {
  auto* const call = new DirectUnary<Request, Response>(served->calls());  // deletes itself
  if (!requests.Fill(&call->request)) {
    call->Start([](auto* context, auto*, auto*) {
      grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
      reactor->Finish(grpc::Status(grpc::StatusCode::INTERNAL, "not a message"));
      return reactor;
    });
    return;
  }
  call->Start([&](auto* context, auto* request, auto* response) {
    return (service.*method)(context, request, response);
  });
}

void CallOpenSession(Served* served, Requests requests) {
  v1::OpenSessionRequest request;
  if (!requests.Fill(&request)) return;
  auto* const call = new DirectWriter<v1::OpenSessionRequest, v1::OpenSessionResponse>(
      served->calls());  // deletes itself
  call->request = std::move(request);
  call->Start([&](auto* context, auto* message) {
    return served->service().OpenSession(context, message);
  });
}

void CallRead(Served* served, Requests requests) {
  v1::ReadRequest request;
  auto* const call =
      new DirectWriter<grpc::ByteBuffer, grpc::ByteBuffer>(served->calls());  // deletes itself
  call->request = requests.Bytes(&request);
  call->Start(
      [&](auto* context, auto* message) { return served->service().Read(context, message); });
}

void CallWatch(Served* served, Requests requests) {
  v1::WatchRequest request;
  if (!requests.Fill(&request)) return;
  auto* const call =
      new DirectWriter<v1::WatchRequest, v1::WatchResponse>(served->calls());  // deletes itself
  call->request = std::move(request);
  call->Start(
      [&](auto* context, auto* message) { return served->service().Watch(context, message); });
}

// The messages are taken from the input before the call begins, which may go on for long.
void CallWrite(Served* served, FuzzInput* input) {
  std::vector<grpc::ByteBuffer> messages(input->Below(5));
  for (grpc::ByteBuffer& bytes : messages) {
    v1::WriteRequest message;
    bytes = Requests(served, input).Bytes(&message);
  }
  auto* const call = new DirectReader<grpc::ByteBuffer, grpc::ByteBuffer>(
      served->calls(),
      [messages = std::move(messages), next = size_t{0}](grpc::ByteBuffer* message) mutable {
        if (next == messages.size()) return false;
        message->Swap(&messages[next++]);
        return true;
      });  // deletes itself
  call->Start(
      [&](auto* context, auto* response) { return served->service().Write(context, response); });
}

void Step(Served* served, FuzzInput* input) {
  ContextStoreService& service = served->service();
  AdminService& admin = served->admin();
  Requests requests(served, input);
  using Service = ContextStoreService;
  switch (input->Below(30)) {
    case 0:
      return Call(served, service, &Service::RegisterLayout, requests);
    case 1:
      return Call(served, service, &Service::Lookup, requests);
    case 2:
      return Call(served, service, &Service::Reserve, requests);
    case 3:
      return Call(served, service, &Service::Commit, requests);
    case 4:
      return Call(served, service, &Service::Abort, requests);
    case 5:
      return Call(served, service, &Service::Acquire, requests);
    case 6:
      return Call(served, service, &Service::Release, requests);
    case 7:
      return Call(served, service, &Service::Prefetch, requests);
    case 8:
      return Call(served, service, &Service::GetTicket, requests);
    case 9:
      return Call(served, service, &Service::CancelPrefetch, requests);
    case 10:
      return Call(served, service, &Service::ReportBad, requests);
    case 11:
      return Call(served, service, &Service::CreateContext, requests);
    case 12:
      return Call(served, service, &Service::AppendContext, requests);
    case 13:
      return Call(served, service, &Service::PauseContext, requests);
    case 14:
      return Call(served, service, &Service::ResumeContext, requests);
    case 15:
      return Call(served, service, &Service::ForkContext, requests);
    case 16:
      return Call(served, service, &Service::CloseContext, requests);
    case 17:
      return CallWrite(served, input);
    case 18:
      return CallRead(served, requests);
    case 19:
      return CallOpenSession(served, requests);
    case 20:
      return Call(served, admin, &AdminService::GetStatus, requests);
    case 21:
      return Call(served, admin, &AdminService::GetTiers, requests);
    case 22:
      return Call(served, admin, &AdminService::ListContexts, requests);
    case 23:
      return Call(served, admin, &AdminService::Where, requests);
    case 24:
      return Call(served, admin, &AdminService::WhyMiss, requests);
    case 25:
      return Call(served, admin, &AdminService::Flush, requests);
    case 27:
      return CallWatch(served, requests);
    case 28:
      return Call(served, admin, &AdminService::ListTenants, requests);
    case 29:
      return Call(served, service, &Service::ApplyHints, requests);
    default:
      return served->Reopen();
  }
}

}  // namespace
}  // namespace kvtier

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size_bytes) {
  kvtier::fuzz::FuzzInput input(data, size_bytes);
  kvtier::Served served;
  for (int step = 0; step < 64 && !input.empty(); ++step) {
    kvtier::Step(&served, &input);
    served.calls()->Run();
  }
  served.Finish();
  return 0;
}
