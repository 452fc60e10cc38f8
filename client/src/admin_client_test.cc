// SPDX-License-Identifier: Apache-2.0
#include "client/src/admin_client.h"

#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <thread>

#include "proto/base/reasons.h"
#include "proto/base/status_util.h"
#include "proto/rpc/grpc_status.h"

namespace kvtier::client {
namespace {

class FakeAdmin final : public v1::AdminService::Service {
 public:
  grpc::Status GetStatus(grpc::ServerContext*, const v1::GetStatusRequest*,
                         v1::GetStatusResponse* response) override {
    response->set_version("9.9.9");
    return grpc::Status::OK;
  }
  grpc::Status GetTiers(grpc::ServerContext*, const v1::GetTiersRequest*,
                        v1::GetTiersResponse* response) override {
    response->add_tiers()->set_tier(v1::TIER_HOST);
    return grpc::Status::OK;
  }
  grpc::Status ListContexts(grpc::ServerContext*, const v1::ListContextsRequest* request,
                            v1::ListContextsResponse* response) override {
    response->set_total_count(request->limit());
    return grpc::Status::OK;
  }
  grpc::Status Where(grpc::ServerContext*, const v1::WhereRequest* request,
                     v1::WhereResponse* response) override {
    if (request->context() == "absent") {
      return ToGrpc(WithReason(NotFound("no context \"absent\""), reason::kContextUnknown));
    }
    response->add_blocks()->set_key(request->key() + request->context());
    return grpc::Status::OK;
  }
  // Answers only once its caller has gone.
  grpc::Status Flush(grpc::ServerContext* context, const v1::FlushRequest*,
                     v1::FlushResponse*) override {
    while (!context->IsCancelled()) std::this_thread::yield();
    return grpc::Status::OK;
  }
};

class AdminClientTest : public testing::Test {
 protected:
  void SetUp() override {
    char path[] = "/tmp/kvtier-admin-XXXXXX";
    ASSERT_NE(mkdtemp(path), nullptr);
    run_dir_ = path;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("unix:" + run_dir_ + "/admin.sock", grpc::InsecureServerCredentials());
    builder.RegisterService(&admin_);
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
  }
  void TearDown() override {
    server_->Shutdown();
    std::filesystem::remove_all(run_dir_);
  }

  std::string run_dir_;
  FakeAdmin admin_;
  std::unique_ptr<grpc::Server> server_;
};

TEST_F(AdminClientTest, CarriesRequestsAndReplies) {
  AdminClient client({.run_dir = run_dir_});
  EXPECT_EQ(client.GetStatus()->version(), "9.9.9");
  EXPECT_EQ(client.GetTiers()->tiers(0).tier(), v1::TIER_HOST);
  EXPECT_EQ(client.ListContexts(7)->total_count(), 7);
  EXPECT_EQ(client.WhereContext("chat")->blocks(0).key(), "chat");
  Key key;
  key.bytes[31] = 7;
  EXPECT_EQ(client.WhereKey(key)->blocks(0).key(), key.AsBytes());
}

TEST_F(AdminClientTest, PassesErrorsOnWithTheirReason) {
  AdminClient client({.run_dir = run_dir_});
  const auto where = client.WhereContext("absent");
  EXPECT_EQ(where.status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReasonOf(where.status()), reason::kContextUnknown);
}

TEST_F(AdminClientTest, GivesUpAtItsTimeout) {
  AdminClient client({.run_dir = run_dir_, .timeout_ms = 50});
  EXPECT_EQ(client.Flush().status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(AdminClientTest, IsUnavailableAtOnceWithoutADaemon) {
  AdminClient client({.run_dir = run_dir_ + "/nowhere", .timeout_ms = 60'000});
  EXPECT_EQ(client.GetStatus().status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace kvtier::client
