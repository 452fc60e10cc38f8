// SPDX-License-Identifier: Apache-2.0
#include "daemon/admin_auditor.h"

#include <grpcpp/support/server_interceptor.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/audit.h"
#include "daemon/peer_names.h"

namespace kvtier {
namespace {

constexpr std::string_view kAdminService = "/kvtier.v1.AdminService/";
// They change nothing, and are called every few seconds. What is not named here is an act.
constexpr std::array<std::string_view, 5> kLooks = {"GetStatus", "GetTiers", "ListContexts",
                                                    "Where", "WhyMiss"};

// Of one call. Owned by gRPC.
class Auditor final : public grpc::experimental::Interceptor {
 public:
  Auditor(const TenantTable* tenants, std::string_view call, grpc::ServerContextBase* context)
      : tenants_(tenants), call_(call), context_(context) {}

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(
            grpc::experimental::InterceptionHookPoints::PRE_SEND_STATUS)) {
      Write(methods->GetSendStatus());
    }
    methods->Proceed();
  }

 private:
  void Write(const grpc::Status& status) const {
    const auto peer = context_->auth_context();
    const std::vector<std::string> names = PeerNames(*peer);
    const std::string& admin = tenants_->AdminOf(names);
    std::string outcome =
        absl::StatusCodeToString(static_cast<absl::StatusCode>(status.error_code()));
    if (!status.ok()) outcome += ": " + status.error_message();
    AuditAct({.who = admin.empty() ? "admin.sock" : admin,
              .peer = context_->peer(),
              .what = std::string(call_),
              .outcome = std::move(outcome)});
  }

  const TenantTable* const tenants_;
  const std::string call_;
  grpc::ServerContextBase* const context_;
};

class AuditorFactory final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit AuditorFactory(const TenantTable* tenants) : tenants_(tenants) {}

  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override {
    const std::string_view method = info->method();
    if (!method.starts_with(kAdminService)) return nullptr;
    const std::string_view call = method.substr(kAdminService.size());
    if (std::ranges::find(kLooks, call) != kLooks.end()) return nullptr;
    return new Auditor(tenants_, call, info->server_context());
  }

 private:
  const TenantTable* const tenants_;
};

}  // namespace

void AuditAdminCalls(grpc::ServerBuilder* builder, const TenantTable* tenants) {
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> factories;
  factories.push_back(std::make_unique<AuditorFactory>(tenants));
  builder->experimental().SetInterceptorCreators(std::move(factories));
}

}  // namespace kvtier
