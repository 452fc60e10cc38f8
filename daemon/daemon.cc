// SPDX-License-Identifier: Apache-2.0
#include "daemon/daemon.h"

#include <grpc/grpc.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <thread>
#include <utility>

#include "absl/synchronization/notification.h"
#include "daemon/admin_auditor.h"
#include "daemon/fd_store.h"
#include "daemon/holder.h"
#include "daemon/log.h"
#include "daemon/metrics.h"
#include "daemon/monotonic.h"
#include "daemon/random_bytes.h"
#include "daemon/requests.h"
#include "daemon/status_page.h"
#include "policy/policy.h"
#include "proto/base/status_util.h"
#include "proto/base/timed_wait.h"
#include "tiers/cuda/cuda_tier.h"
#include "tiers/cuda/real_driver.h"
#ifdef KVTIER_FAULT_INJECTION
#include "tiers/nvme/fault_injection.h"
#endif

namespace kvtier {
namespace {

constexpr char kServiceName[] = "kvtier.v1.ContextStoreService";
constexpr uint32_t kAdminSocketMode = 0600;
// Write and Read streams at once; each holds one message of at most 4 MiB.
constexpr uint32_t kDataStreamsMax = 64;
// Sockets and sessions, the files of a small index, what the libraries open.
constexpr uint64_t kDescriptorsBesideSegments = 256;
// Ids count up from a random start below this, and never come near the end of 64 bits.
constexpr uint64_t kFirstIdMask = (1ULL << 62) - 1;
// Of the time to stop: what closing sockets and tiers may take.
constexpr uint64_t kCloseMsMax = 1000;
// Blocks of a drive that comes back are taken over so many at a time, beside everybody's calls.
constexpr size_t kAdoptedPerTurn = 256;

NvmeIoEngine ParseIoEngine(const std::string& name) {
  if (name == "io_uring") return NvmeIoEngine::kIoUring;
  if (name == "pread") return NvmeIoEngine::kPread;
  return NvmeIoEngine::kAuto;
}

absl::StatusOr<std::string> ReadBootId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot_id;
  if (!(file >> boot_id)) return Unavailable("/proc/sys/kernel/random/boot_id: not readable");
  return boot_id;
}

MemoryTier::LockMemory ParseLockMemory(const std::string& name) {
  if (name == "on") return MemoryTier::LockMemory::kOn;
  if (name == "off") return MemoryTier::LockMemory::kOff;
  return MemoryTier::LockMemory::kAuto;
}

void WarnAboutPinning(const absl::Status& status) {
  Log(LogLevel::kWarning,
      "not all of host is pinned for the GPU: copies of the rest take a CPU core and are slower",
      {{"error", FromAbsl(status.message())}});
}

}  // namespace

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(const Config& config,
                                                      std::shared_ptr<CudaDriver> cuda,
                                                      std::vector<KeptFd> kept) {
  KVT_ASSIGN_OR_RETURN(RunDir run_dir, RunDir::Lock(config.server.run_dir));
  std::unique_ptr<Daemon> daemon(new Daemon(config, std::move(run_dir), std::move(cuda)));
  daemon->keeper_ = daemon->OpenKeeper(std::move(kept));
  KVT_RETURN_IF_ERROR(daemon->OpenTiers());
  KVT_RETURN_IF_ERROR(daemon->OpenStore());
  KVT_RETURN_IF_ERROR(daemon->Listen());
  {
    absl::MutexLock lock(&daemon->failure_mutex_);
    if (!daemon->failure_.ok()) return daemon->failure_;
    daemon->serving_ = true;
  }
  return daemon;
}

Daemon::Daemon(const Config& config, RunDir run_dir, std::shared_ptr<CudaDriver> cuda)
    : config_(config),
      epoch_(RandomNonZero()),
      tenants_(config, geteuid()),
      run_dir_(std::move(run_dir)),
      cuda_(std::move(cuda)),
      rates_(&tenants_) {}

Daemon::~Daemon() { Stop(); }

absl::StatusOr<std::unique_ptr<MappedTier>> Daemon::OpenHbm() {
  if (config_.hbm_device.device != "cuda") {
    return MemoryTier::Create({.id = TierId::kHbm,
                               .capacity_bytes = config_.hbm.capacity_bytes,
                               .segment_bytes = config_.hbm.segment_bytes,
                               .observers = NvmeObservers()});
  }
  if (cuda_ == nullptr) {
    auto driver = OpenCudaDriver();
    if (!driver.ok()) return Annotate(driver.status(), "hbm.device = cuda");
    cuda_ = std::move(driver).value();
  }
  KVT_ASSIGN_OR_RETURN(const std::vector<CudaDeviceInfo> devices, cuda_->Devices());
  if (config_.hbm_device.cuda_device_idx >= devices.size()) {
    return Invalid("hbm.cuda_device_idx: %d, but the CUDA driver sees %d devices",
                   config_.hbm_device.cuda_device_idx, devices.size());
  }
  const CudaDeviceInfo& info = devices[config_.hbm_device.cuda_device_idx];
  KVT_ASSIGN_OR_RETURN(std::unique_ptr<CudaDevice> device, cuda_->OpenDevice(info.ordinal));
  Log(LogLevel::kInfo, "hbm on CUDA",
      {{"device", info.name}, {"uuid", CudaUuidText(info.uuid)}, {"bytes", info.total_bytes}});
  return CudaTier::Create(std::move(device),
                          {.capacity_bytes = config_.hbm.capacity_bytes,
                           .segment_bytes = config_.hbm.segment_bytes,
                           .demote_bytes_per_second = config_.hbm_device.demote_bytes_per_second,
                           .on_pin_failure = WarnAboutPinning,
                           .on_lost = [this](const absl::Status& reason) { OnHbmLost(reason); }});
}

void Daemon::OnHbmLost(const absl::Status& reason) {
  Log(LogLevel::kError, "hbm is lost; host and nvme serve until the end",
      {{"reason", FromAbsl(reason.message())}});
  absl::MutexLock lock(&failure_mutex_);
  failure_ = reason;
  if (!serving_) return;
  SetServing(false);
  store_->Run([](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
    core.LoseTier(TierId::kHbm, now_ms, effects);
  });
}

void Daemon::OnNvmeBlockLost(const NamespaceHash& namespace_hash, const Key& key) {
  absl::MutexLock lock(&failure_mutex_);
  // Before and after, whoever reads the block finds out.
  if (!serving_) return;
  store_->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
    core.LoseNvmeBlock(namespace_hash, key, now_ms, effects);
  });
}

void Daemon::OnNvmeJoined(const StripedTier::Blocks& blocks) {
  std::span<const StripedTier::Blocks::value_type> rest(blocks);
  while (!rest.empty()) {
    const auto batch = rest.first(std::min(rest.size(), kAdoptedPerTurn));
    rest = rest.subspan(batch.size());
    std::vector<ReplicaId> refused;
    store_->Run([&](core::StoreCore& core, core::TimeMs, core::Effects*) {
      for (const auto& [meta, replica] : batch) {
        if (!core.AdoptLate(meta, replica)) refused.push_back(replica);
      }
    });
    for (const ReplicaId replica : refused) nvme_->Free(replica);
  }
}

absl::Status Daemon::failure() const {
  absl::MutexLock lock(&failure_mutex_);
  return failure_;
}

std::unique_ptr<SegmentKeeper> Daemon::OpenKeeper(std::vector<KeptFd> kept) const {
  // Closes what systemd gave if that is not wanted.
  auto systemd = std::make_unique<SystemdFdStore>(std::move(kept));
  const std::string& way = config_.host_memory.warm_restart;
  if (way == "auto" && std::getenv("NOTIFY_SOCKET") != nullptr) return systemd;
  if (way != "holder") return nullptr;
  auto holder = HolderClient::Connect(
      {.run_dir = config_.server.run_dir, .hold_seconds = config_.host_memory.hold_seconds});
  if (holder.ok()) return std::move(holder).value();
  Log(LogLevel::kWarning, "host memory will not outlive this process",
      {{"error", FromAbsl(holder.status().message())}});
  return nullptr;
}

void Daemon::SayWhatHostKept() const {
  const MemoryTier::Adoption& adoption = host_->adoption();
  if (adoption.kept_count == 0 && adoption.refusal.empty()) return;
  Log(adoption.refusal.empty() ? LogLevel::kInfo : LogLevel::kWarning,
      "host blocks of the last process",
      {{"kept", store_->recovered_host_block_count()},
       {"kept_bytes", adoption.kept_bytes},
       {"refused", adoption.refused_count()},
       {"corrupt", adoption.corrupt_count},
       {"damaged", adoption.damaged_count},
       {"foreign", adoption.foreign_count},
       {"no_room", adoption.no_room_count},
       {"reason", adoption.refusal}});
}

absl::StatusOr<std::unique_ptr<MemoryTier>> Daemon::OpenHost() {
  MemoryTier::Options options;
  options.id = TierId::kHost;
  options.capacity_bytes = config_.host.capacity_bytes;
  options.segment_bytes = config_.host.segment_bytes;
  options.observers = NvmeObservers();
  if (auto* const cuda = dynamic_cast<CudaTier*>(hbm_.get()); cuda != nullptr) {
    options.observers.push_back(cuda->host_observer());
  }
  if (config_.hbm_device.device == "cpu") options.promised_bytes = config_.hbm.capacity_bytes;
  options.prepare_thread_count = std::clamp(std::thread::hardware_concurrency() / 2, 1U, 4U);
  options.lock_memory = ParseLockMemory(config_.host_memory.lock_memory);
  options.reserved_huge_pages = config_.host_memory.huge_pages == "reserved";
  options.node_idx = NodeOfThisProcess();
  options.keeper = keeper_.get();
  if (keeper_ != nullptr) {
    KVT_ASSIGN_OR_RETURN(options.boot_id, ReadBootId());
    for (OwnerIdx owner = 0; owner < tenants_.count(); ++owner) {
      options.owner_tags.push_back(
          FieldHasher().Add("kvtier-tenant-1").Add(tenants_.Name(owner)).Finish());
    }
  }
  const uint64_t start_ms = MonotonicMs();
  options.on_prepared = [start_ms](const MemoryTier::Prepared& prepared) {
    Log(LogLevel::kInfo, "host memory prepared",
        {{"ready_bytes", prepared.ready_bytes},
         {"locked_bytes", prepared.locked_bytes},
         {"reserved_huge_bytes", prepared.reserved_huge_bytes},
         {"ms", MonotonicMs() - start_ms}});
    if (!prepared.shortfall.empty()) {
      Log(LogLevel::kWarning, "host memory is not as asked for", {{"reason", prepared.shortfall}});
    }
  };
  return MemoryTier::Create(options);
}

std::vector<SegmentObserver*> Daemon::NvmeObservers() const {
  // Registering locks pages, which is off.
  if (nvme_ == nullptr || config_.host_memory.lock_memory == "off") return {};
  return {&nvme_->memory_observer()};
}

absl::Status Daemon::OpenTiers() {
  if (config_.nvme.enabled) {
    KVT_ASSIGN_OR_RETURN(nvme_, OpenNvme());
  }
  KVT_ASSIGN_OR_RETURN(hbm_, OpenHbm());
  KVT_ASSIGN_OR_RETURN(host_, OpenHost());
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<StripedTier>> Daemon::OpenNvme() {
  KVT_RETURN_IF_ERROR(MakeDirectory(config_.server.data_dir));
  NvmeOptions options;
  std::vector<std::string> dirs = SplitPaths(config_.nvme.dirs);
  if (dirs.empty()) dirs = {config_.server.data_dir + "/nvme"};
  options.capacity_bytes = config_.nvme.capacity_bytes;
  // A small tier needs several segments to reclaim from, whatever the default size says.
  options.segment_bytes =
      std::min(config_.nvme.segment_bytes,
               std::max(NvmeTier::kSegmentBytesMin,
                        std::bit_floor(options.capacity_bytes / dirs.size() / 16)));
  options.io_engine = ParseIoEngine(config_.nvme.io_engine);
  options.write_bytes_per_day_max = config_.nvme.write_bytes_per_day_max;
  options.scrub_bytes_per_second = config_.nvme.scrub_bytes_per_second;
  options.on_lost = [this](const NamespaceHash& namespace_hash, const Key& key) {
    OnNvmeBlockLost(namespace_hash, key);
  };
  KVT_RETURN_IF_ERROR(InjectFaults(dirs.front()));
  options.storage = faulty_storage_.get();
  return StripedTier::Create(dirs, options);
}

absl::Status Daemon::InjectFaults([[maybe_unused]] const std::string& dir) {
#ifdef KVTIER_FAULT_INJECTION
  const std::string& rules = config_.nvme.fault_injection;
  if (rules.empty()) return absl::OkStatus();
  auto storage = nvme::MakeFaultyStorage(rules, dir);
  if (!storage.ok()) return Annotate(storage.status(), "nvme.fault_injection");
  faulty_storage_ = std::move(storage).value();
  Log(LogLevel::kWarning, "nvme fails as it is told to", {{"rules", rules}});
#endif
  return absl::OkStatus();
}

absl::Status Daemon::OpenStore() {
  Store::Options options;
  options.core.watermarks = {{
      {.high = config_.hbm.high_watermark, .low = config_.hbm.low_watermark},
      {.high = config_.host.high_watermark, .low = config_.host.low_watermark},
      {.high = config_.nvme.high_watermark, .low = config_.nvme.low_watermark},
  }};
  KVT_ASSIGN_OR_RETURN(options.core.nvme_admission, policy::ParseAdmission(config_.nvme.admission));
  KVT_ASSIGN_OR_RETURN(options.eviction, policy::ParseEviction(config_.policy.eviction));
  for (const TenantBytes& tenant : tenants_.Limits(config_)) {
    options.core.tenants.push_back(
        {.quota_bytes = tenant.quotas, .reserve_bytes = tenant.reserves});
  }
  // The cuda device sees to it itself.
  if (config_.hbm_device.device == "cpu") {
    options.demote_bytes_per_second = config_.hbm_device.demote_bytes_per_second;
  }
  // Every data stream is a session of its own towards the core.
  options.core.sessions_max = config_.server.sessions_max + kDataStreamsMax;
  options.core.first_id = (RandomNonZero() & kFirstIdMask) | 1;
  KVT_ASSIGN_OR_RETURN(
      store_, Store::Open(options, {.hbm = hbm_.get(), .host = host_.get(), .nvme = nvme_.get()}));
  Log(LogLevel::kInfo, "tiers open",
      {{"hbm_bytes", config_.hbm.capacity_bytes},
       {"host_bytes", config_.host.capacity_bytes},
       {"nvme_bytes", nvme_ == nullptr ? 0 : config_.nvme.capacity_bytes},
       {"io_engine", nvme_ == nullptr ? "" : nvme_->Stats().io_engine},
       {"recovered_blocks", store_->recovered_block_count()}});
  SayWhatHostKept();
  if (options.eviction == policy::EvictionKind::kHazard && nvme_ != nullptr) {
    policy_file_ = std::make_unique<PolicyFile>(config_.server.data_dir + "/policy", store_.get());
  }
  WarnAboutDescriptors();
  if (nvme_ != nullptr) {
    WarnAboutDirectories();
    nvme_->StartRejoining([this](const StripedTier::Blocks& blocks) { OnNvmeJoined(blocks); });
  }
  return absl::OkStatus();
}

void Daemon::WarnAboutDescriptors() const {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  uint64_t wanted_count = kDescriptorsBesideSegments;
  for (const MemoryTierConfig& tier : {config_.hbm, config_.host}) {
    wanted_count += tier.capacity_bytes / tier.segment_bytes;
  }
  if (nvme_ != nullptr && nvme_->Stats().segment_bytes > 0) {
    wanted_count += config_.nvme.capacity_bytes / nvme_->Stats().segment_bytes;
  }
  if (limit.rlim_cur >= wanted_count) return;
  Log(LogLevel::kWarning, "fewer descriptors than the tiers take; raise LimitNOFILE=",
      {{"limit", uint64_t{limit.rlim_cur}}, {"wanted", wanted_count}});
}

void Daemon::WarnAboutDirectories() const {
  struct stat root{};
  if (stat("/", &root) != 0) return;
  // The default lies where the system puts state; one that is named is meant to be a drive's.
  for (const std::string& dir : SplitPaths(config_.nvme.dirs)) {
    struct stat status{};
    if (stat(dir.c_str(), &status) != 0 || status.st_dev != root.st_dev) continue;
    Log(LogLevel::kWarning,
        "a directory of nvme.dirs is on the root file system: is its drive mounted?",
        {{"dir", dir}});
  }
}

absl::Status Daemon::Listen() {
  // Never given back: gRPC's last grpc_shutdown, inside the end of a server, may sit there for ten
  // seconds after large messages (seen with 1.51), and the end of the process needs none of it.
  grpc_init();
  KVT_RETURN_IF_ERROR(run_dir_.RemoveStaleSockets());
  session_calls_ = std::make_unique<LiveCalls>(kHeartbeatMs);
  data_calls_ = std::make_unique<LiveCalls>(kHeartbeatMs);
  watch_calls_ = std::make_unique<LiveCalls>(kWatchBeatMs);
  KVT_ASSIGN_OR_RETURN(
      handles_,
      HandleServer::Start({.socket_path = run_dir_.handle_socket(),
                           .socket_mode = config_.server.socket_mode,
                           .epoch = epoch_,
                           // A process opens its next session before its last connection is closed.
                           .connections_max = 2 * config_.server.sessions_max},
                          &tenants_,
                          {.export_segment =
                               [this](TierId tier, uint32_t segment_idx, bool writable) {
                                 return store_->tiers().Memory(tier)->ExportSegment(segment_idx,
                                                                                    writable);
                               },
                           .on_session_gone =
                               [this](uint64_t session) {
                                 store_->Run([&](core::StoreCore& core, core::TimeMs now_ms,
                                                 core::Effects* effects) {
                                   core.DetachMapping(session, now_ms, effects);
                                 });
                               }}));
  service_ =
      std::make_unique<ContextStoreService>(ServiceContext{.epoch = epoch_,
                                                           .data_streams_max = kDataStreamsMax,
                                                           .store = store_.get(),
                                                           .handles = handles_.get(),
                                                           .tenants = &tenants_,
                                                           .sessions = &sessions_,
                                                           .hash_domains = &hash_domains_,
                                                           .rates = &rates_,
                                                           .session_calls = session_calls_.get(),
                                                           .data_calls = data_calls_.get(),
                                                           .watch_calls = watch_calls_.get()});
  admin_service_ = std::make_unique<AdminService>(AdminOptions(), store_.get(), &tenants_);
  grpc::EnableDefaultHealthCheckService(true);
  KVT_ASSIGN_OR_RETURN(
      server_, ListenGrpc(service_.get(), run_dir_.engine_socket(), config_.server.socket_mode));
  KVT_ASSIGN_OR_RETURN(admin_server_,
                       ListenGrpc(admin_service_.get(), run_dir_.admin_socket(), kAdminSocketMode));
  KVT_RETURN_IF_ERROR(ListenTcp());
  KVT_RETURN_IF_ERROR(ListenHttp());
  SetServing(true);
  return absl::OkStatus();
}

absl::Status Daemon::ListenHttp() {
  if (config_.metrics.listen.empty()) return absl::OkStatus();
  const auto answer_with = [this](auto text_of) {
    v1::GetStatusResponse status;
    v1::GetTiersResponse tiers;
    admin_service_->FillStatus(&status);
    admin_service_->FillTiers(&tiers);
    return text_of(status, tiers);
  };
  auto http = HttpServer::Start(
      {.listen = config_.metrics.listen,
       .pages = {
           {"/",
            [] {
              return HttpAnswer{.content_type = "text/html; charset=utf-8", .body = kStatusPage};
            }},
           {"/metrics",
            [this, answer_with] {
              v1::ListTenantsResponse tenants;
              admin_service_->FillTenants(&tenants);
              return HttpAnswer{.content_type = "text/plain; version=0.0.4; charset=utf-8",
                                .body = answer_with([&](const auto& status, const auto& tiers) {
                                  return MetricsText(status, tiers, tenants);
                                })};
            }},
           {"/readyz",
            [this] {
              return ready_ ? HttpAnswer{.body = "ready\n"}
                            : HttpAnswer{.status = 503, .body = "not ready\n"};
            }},
           {"/status.json", [answer_with] {
              return HttpAnswer{.content_type = "application/json",
                                .body = answer_with(StatusJson)};
            }}}});
  if (!http.ok()) return Annotate(http.status(), "metrics.listen");
  http_ = std::move(http).value();
  Log(LogLevel::kInfo, "metrics and status page",
      {{"listen", config_.metrics.listen}, {"port", http_->port()}});
  return absl::OkStatus();
}

void Daemon::SetLimits(grpc::ServerBuilder* builder) {
  builder->SetMaxReceiveMessageSize(kMessageBytesMax);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, 1024);
}

absl::StatusOr<std::unique_ptr<grpc::Server>> Daemon::ListenGrpc(grpc::Service* service,
                                                                 const std::string& socket_path,
                                                                 uint32_t socket_mode) {
  grpc::ServerBuilder builder;
  int bound = 0;
  builder.AddListeningPort("unix:" + socket_path, grpc::InsecureServerCredentials(), &bound);
  builder.RegisterService(service);
  AuditAdminCalls(&builder, &tenants_);
  SetLimits(&builder);
  std::unique_ptr<grpc::Server> server;
  {
    const PrivateUmask umask_guard;
    server = builder.BuildAndStart();
  }
  if (server == nullptr || bound == 0) return Unavailable("cannot listen on %s", socket_path);
  if (chmod(socket_path.c_str(), socket_mode) != 0) {
    return ErrnoStatus(errno, "chmod " + socket_path);
  }
  return server;
}

void Daemon::SetServing(bool ready) {
  ready_ = ready;
  for (grpc::Server* server : {server_.get(), admin_server_.get(), tcp_server_.get()}) {
    if (server == nullptr) continue;
    grpc::HealthCheckServiceInterface* health = server->GetHealthCheckService();
    for (const char* name : {"", "readiness", kServiceName}) {
      health->SetServingStatus(name, ready);
    }
    // Stopping is no failure of the process.
    if (ready) health->SetServingStatus("liveness", true);
  }
}

void Daemon::FlushToNvme(uint64_t deadline_ms) {
  absl::StatusOr<uint64_t> flushed = uint64_t{0};
  absl::Notification done;
  store_->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
    core.Flush(
        deadline_ms, now_ms,
        [&](absl::StatusOr<uint64_t> result) {
          flushed = std::move(result);
          done.Notify();
        },
        effects);
  });
  // The core answers at its deadline.
  done.WaitForNotification();
  if (flushed.ok()) {
    Log(LogLevel::kInfo, "memory written to nvme", {{"blocks", *flushed}});
  } else {
    Log(LogLevel::kWarning, "memory not all written to nvme",
        {{"error", FromAbsl(flushed.status().message())}});
  }
}

uint64_t Daemon::CloseMs() const {
  return std::min<uint64_t>(kCloseMsMax, config_.server.drain_timeout_ms / 2);
}

// At the deadline of StopServers gRPC cancels the calls, but it cannot end one whose peer has
// stopped reading: the message that is on its way is never done. Such connections are cut.
void Daemon::CutConnections() {
  if (servers_stopped_.WaitFor(absl::Milliseconds(2 * GraceMs()))) return;
  ShutDownAccepted(run_dir_.engine_socket());
  ShutDownAccepted(run_dir_.admin_socket());
  if (tcp_port_ != 0) ShutDownAcceptedTcp(tcp_port_);
}

void Daemon::StopServers() {
  const auto deadline = std::chrono::system_clock::now() + std::chrono::milliseconds(GraceMs());
  cutter_.Begin();
  for (grpc::Server* server : {server_.get(), admin_server_.get(), tcp_server_.get()}) {
    if (server != nullptr) server->Shutdown(deadline);
  }
  servers_stopped_.Notify();
  server_.reset();
  admin_server_.reset();
  tcp_server_.reset();
}

void Daemon::Stop() {
  if (std::exchange(stopped_, true)) return;
  {
    absl::MutexLock lock(&failure_mutex_);
    serving_ = false;
  }
  const uint64_t start_ms = MonotonicMs();
  if (admin_service_ != nullptr) admin_service_->SetDraining();
  if (tcp_admin_service_ != nullptr) tcp_admin_service_->SetDraining();
  SetServing(false);
  if (store_ != nullptr) {
    store_->Run([](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
      core.Drain(now_ms, effects);
    });
  }
  if (watch_calls_ != nullptr) watch_calls_->Drain();
  if (session_calls_ != nullptr) session_calls_->Drain();
  if (auto* const cuda = dynamic_cast<CudaTier*>(hbm_.get()); cuda != nullptr) {
    cuda->LiftDemoteLimit();
  }
  if (nvme_ != nullptr && store_ != nullptr)
    FlushToNvme(start_ms + config_.server.drain_timeout_ms - CloseMs());
  StopServers();
  http_.reset();
  handles_.reset();
  session_calls_.reset();
  data_calls_.reset();
  watch_calls_.reset();
  // Sockets of a stopped daemon would look like those of a dead one.
  if (absl::Status removed = run_dir_.RemoveStaleSockets(); !removed.ok()) {
    Log(LogLevel::kWarning, "sockets not removed", {{"error", FromAbsl(removed.message())}});
  }
  policy_file_.reset();
  if (nvme_ != nullptr) nvme_->EndRejoining();
  store_.reset();
  if (nvme_ != nullptr) nvme_->Close();
}

}  // namespace kvtier
