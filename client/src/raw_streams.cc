// SPDX-License-Identifier: Apache-2.0
#include "client/src/raw_streams.h"

#include <grpcpp/impl/rpc_method.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include "kvtier/v1/context_store.grpc.pb.h"

namespace kvtier::client {
namespace {

using grpc::internal::RpcMethod;

constexpr char kWrite[] = "/kvtier.v1.ContextStoreService/Write";
constexpr char kRead[] = "/kvtier.v1.ContextStoreService/Read";

}  // namespace

// In the way of the generated stubs.
std::unique_ptr<grpc::ClientWriter<grpc::ByteBuffer>> StartWrite(grpc::ChannelInterface* channel,
                                                                 grpc::ClientContext* context,
                                                                 v1::WriteResponse* response) {
  const RpcMethod method(kWrite, RpcMethod::CLIENT_STREAMING);
  return std::unique_ptr<grpc::ClientWriter<grpc::ByteBuffer>>(
      grpc::internal::ClientWriterFactory<grpc::ByteBuffer>::Create(channel, method, context,
                                                                    response));
}

std::unique_ptr<grpc::ClientReader<grpc::ByteBuffer>> StartRead(grpc::ChannelInterface* channel,
                                                                grpc::ClientContext* context,
                                                                const v1::ReadRequest& request) {
  const RpcMethod method(kRead, RpcMethod::SERVER_STREAMING);
  return std::unique_ptr<grpc::ClientReader<grpc::ByteBuffer>>(
      grpc::internal::ClientReaderFactory<grpc::ByteBuffer>::Create(channel, method, context,
                                                                    request));
}

}  // namespace kvtier::client
