// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>

namespace kvtier {

// grpc.health.v1.Health/Watch of one service, spoken without generated code: Debian ships none.
class HealthWatch {
 public:
  HealthWatch(const std::string& socket_path, const std::string& service)
      : stub_(grpc::CreateChannel("unix:" + socket_path, grpc::InsecureChannelCredentials())),
        call_(stub_.PrepareCall(&context_, "/grpc.health.v1.Health/Watch", &queue_)) {
    call_->StartCall(Tag(1));
    EXPECT_TRUE(Await(1));
    // HealthCheckRequest { string service = 1; }
    const grpc::Slice request(std::string({'\x0a', static_cast<char>(service.size())}) + service);
    call_->Write(grpc::ByteBuffer(&request, 1), Tag(2));
    EXPECT_TRUE(Await(2));
  }

  // HealthCheckResponse { ServingStatus status = 1; }: 1 SERVING, 2 NOT_SERVING, 3 SERVICE_UNKNOWN;
  // -1 at the end of the stream.
  int NextStatus() {
    grpc::ByteBuffer response;
    call_->Read(&response, Tag(3));
    if (!Await(3)) return -1;
    grpc::Slice slice;
    EXPECT_TRUE(response.DumpToSingleSlice(&slice).ok());
    return slice.size() == 2 ? slice.begin()[1] : 0;
  }

 private:
  static void* Tag(uintptr_t number) { return reinterpret_cast<void*>(number); }
  bool Await(uintptr_t number) {
    void* tag = nullptr;
    bool ok = false;
    EXPECT_TRUE(queue_.Next(&tag, &ok));
    EXPECT_EQ(tag, Tag(number));
    return ok;
  }

  grpc::CompletionQueue queue_;
  grpc::ClientContext context_;
  grpc::GenericStub stub_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
};

}  // namespace kvtier
