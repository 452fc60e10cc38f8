// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <string>

#include "daemon/store.h"
#include "daemon/tenants.h"
#include "kvtier/v1/admin.grpc.pb.h"

namespace kvtier {

class StripedTier;

// kvtier.v1.AdminService. Thread-safe; no method waits (gRPC callback API).
class AdminService final : public v1::AdminService::CallbackService {
 public:
  struct Options {
    uint64_t epoch = 0;
    // "cpu" or "cuda".
    std::string device;
    uint64_t write_bytes_per_day_max = 0;
  };

  // Not owned; both outlive the service and its calls.
  AdminService(Options options, Store* store, const TenantTable* tenants);

  // What GetStatus says from now on.
  void SetDraining() { draining_ = true; }

  // What GetStatus, GetTiers and ListTenants answer, without a call. The counters of one answer
  // are of one moment.
  void FillStatus(v1::GetStatusResponse* response);
  void FillTiers(v1::GetTiersResponse* response);
  void FillTenants(v1::ListTenantsResponse* response);

  using Context = grpc::CallbackServerContext;
  using Unary = grpc::ServerUnaryReactor;

  Unary* GetStatus(Context* context, const v1::GetStatusRequest* request,
                   v1::GetStatusResponse* response) override;
  Unary* GetTiers(Context* context, const v1::GetTiersRequest* request,
                  v1::GetTiersResponse* response) override;
  Unary* ListTenants(Context* context, const v1::ListTenantsRequest* request,
                     v1::ListTenantsResponse* response) override;
  Unary* ListContexts(Context* context, const v1::ListContextsRequest* request,
                      v1::ListContextsResponse* response) override;
  Unary* Where(Context* context, const v1::WhereRequest* request,
               v1::WhereResponse* response) override;
  Unary* WhyMiss(Context* context, const v1::WhyMissRequest* request,
                 v1::WhyMissResponse* response) override;
  Unary* Flush(Context* context, const v1::FlushRequest* request,
               v1::FlushResponse* response) override;

 private:
  core::CoreCounters Counters();
  absl::StatusOr<std::vector<core::BlockSummary>> FindBlocks(const v1::WhereRequest& request);
  // Null: there is none.
  const StripedTier* Nvme() const;
  void FillTenantTiers(const core::TenantCounters& counters,
                       google::protobuf::RepeatedPtrField<v1::TenantTier>* tiers) const;
  void FillNvme(v1::NvmeStats* nvme) const;
  void FillTier(TierId id, const core::TierCounters& counters,
                v1::GetTiersResponse* response) const;

  const Options options_;
  const uint64_t started_ms_;
  Store* const store_;
  const TenantTable* const tenants_;
  // A lone flag: no other data is published with it.
  std::atomic<bool> draining_{false};
};

}  // namespace kvtier
