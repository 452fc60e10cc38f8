// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <atomic>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "daemon/admin_service.h"
#include "daemon/config.h"
#include "daemon/context_store_service.h"
#include "daemon/handle_server.h"
#include "daemon/http_server.h"
#include "daemon/live_calls.h"
#include "daemon/policy_file.h"
#include "daemon/run_dir.h"
#include "daemon/session_table.h"
#include "daemon/standby_thread.h"
#include "daemon/store.h"
#include "daemon/tenants.h"
#include "proto/base/timed_wait.h"
#include "tiers/cuda/driver.h"
#include "tiers/memory/memory_tier.h"
#include "tiers/memory/segment_keeper.h"
#include "tiers/nvme/storage.h"
#include "tiers/nvme/striped_tier.h"

namespace kvtier {

// A whole kvtierd inside a process: tiers, store, sockets, services. Owns all of it. Start and Stop
// from one thread.
class Daemon {
 public:
  // Locks the directories, opens and recovers the tiers, listens. When it returns, clients are
  // served. Errors: INVALID_ARGUMENT for what the configuration asks for and cannot be,
  // FAILED_PRECONDITION when another daemon has the directories, and those of the system.
  // `cuda` is for the cuda device, and for tests; null: the driver of this machine, if it is
  // needed.
  // `kept`: what systemd started this process with; the daemon's from now on.
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(const Config& config,
                                                       std::shared_ptr<CudaDriver> cuda = nullptr,
                                                       std::vector<KeptFd> kept = {});

  // Stops within server.drain_timeout_ms: not ready any more, waiters answered, sessions ended,
  // memory written to nvme, sockets closed, tiers closed. Idempotent.
  void Stop();
  ~Daemon();
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  // OK while this daemon can do what it was configured for. Else why it cannot any more, for good:
  // hbm is gone with its GPU. host and nvme are served until Stop, health says NOT_SERVING, and the
  // process should end, since it can use the GPU no more. Thread-safe.
  absl::Status failure() const ABSL_LOCKS_EXCLUDED(failure_mutex_);

  uint64_t epoch() const { return epoch_; }
  Store& store() { return *store_; }
  // See Store. Thread-safe until Stop.
  uint64_t last_beat_ms() const { return store_->last_beat_ms(); }
  const RunDir& run_dir() const { return run_dir_; }
  // The port of metrics.listen; 0 without.
  uint16_t http_port() const { return http_ == nullptr ? 0 : http_->port(); }
  // The port of server.tcp_address; 0 without.
  uint16_t tcp_port() const { return tcp_port_; }

 private:
  Daemon(const Config& config, RunDir run_dir, std::shared_ptr<CudaDriver> cuda);

  absl::Status OpenTiers();
  absl::StatusOr<std::unique_ptr<StripedTier>> OpenNvme();
  // nvme.fault_injection, with the first of its directories.
  absl::Status InjectFaults(const std::string& dir);
  // Who is told of memory that nvme reads into and writes from.
  std::vector<SegmentObserver*> NvmeObservers() const;
  absl::StatusOr<std::unique_ptr<MappedTier>> OpenHbm();
  absl::StatusOr<std::unique_ptr<MemoryTier>> OpenHost();
  // Null: host memory ends with the process.
  std::unique_ptr<SegmentKeeper> OpenKeeper(std::vector<KeptFd> kept) const;
  void SayWhatHostKept() const;
  void OnHbmLost(const absl::Status& reason) ABSL_LOCKS_EXCLUDED(failure_mutex_);
  void OnNvmeBlockLost(const NamespaceHash& namespace_hash, const Key& key)
      ABSL_LOCKS_EXCLUDED(failure_mutex_);
  absl::Status OpenStore();
  // Says what of the disk an operator should look at.
  void WarnAboutDescriptors() const;
  void WarnAboutDirectories() const;
  // A drive has come back.
  void OnNvmeJoined(const StripedTier::Blocks& blocks);
  absl::Status Listen();
  absl::Status ListenHttp();
  // The services once more, for peers with certificates.
  absl::Status ListenTcp();
  AdminService::Options AdminOptions() const;
  // Of messages and streams.
  static void SetLimits(grpc::ServerBuilder* builder);
  absl::StatusOr<std::unique_ptr<grpc::Server>> ListenGrpc(grpc::Service* service,
                                                           const std::string& socket_path,
                                                           uint32_t socket_mode);
  void SetServing(bool ready);
  // Ends the gRPC servers: calls get `grace_ms` to end by themselves.
  // What closing sockets and tiers may take at the end, and calls in progress of it.
  uint64_t CloseMs() const;
  uint64_t GraceMs() const { return CloseMs() / 4; }
  void CutConnections();
  void StopServers();
  // Writes memory to nvme until `deadline_ms`.
  void FlushToNvme(uint64_t deadline_ms);

  const Config config_;
  const uint64_t epoch_;
  const TenantTable tenants_;
  // Declared in the order of use: each is destroyed before what it uses.
  RunDir run_dir_;
  std::shared_ptr<CudaDriver> cuda_;
  // Held while the loss of hbm is dealt with, so that what that needs is there.
  mutable absl::Mutex failure_mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(failure_mutex_);
  // Start is over, and Stop has not begun.
  bool serving_ ABSL_GUARDED_BY(failure_mutex_) = false;
  // Null: the disk as it is.
  std::unique_ptr<nvme::Storage> faulty_storage_;
  // Told of the memory of the next two.
  std::unique_ptr<StripedTier> nvme_;
  std::unique_ptr<MappedTier> hbm_;
  std::unique_ptr<SegmentKeeper> keeper_;
  std::unique_ptr<MemoryTier> host_;
  std::unique_ptr<Store> store_;
  // Null: nothing is learned, or there is no place to keep it.
  std::unique_ptr<PolicyFile> policy_file_;
  TenantRates rates_;
  SessionTable sessions_;
  HashDomains hash_domains_;
  // Apart: the id of a session on a unix socket is worth nothing on TCP.
  SessionTable tcp_sessions_;
  std::unique_ptr<HandleServer> handles_;
  std::unique_ptr<LiveCalls> session_calls_;
  std::unique_ptr<LiveCalls> data_calls_;
  std::unique_ptr<LiveCalls> watch_calls_;
  std::unique_ptr<ContextStoreService> service_;
  std::unique_ptr<AdminService> admin_service_;
  // Null without server.tcp_address, as the server.
  std::unique_ptr<ContextStoreService> tcp_service_;
  std::unique_ptr<AdminService> tcp_admin_service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<grpc::Server> admin_server_;
  std::unique_ptr<grpc::Server> tcp_server_;
  uint16_t tcp_port_ = 0;
  std::unique_ptr<HttpServer> http_;
  // What /readyz answers; no other data is published with it.
  std::atomic<bool> ready_{false};
  bool stopped_ = false;
  TimedNotification servers_stopped_;
  StandbyThread cutter_{[this] { CutConnections(); }};
};

}  // namespace kvtier
