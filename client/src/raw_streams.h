// SPDX-License-Identifier: Apache-2.0
//
// The calls Write and Read with messages of bytes (proto/rpc/chunk_message.h), which generated
// stubs do not offer.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/sync_stream.h>

#include <memory>

#include "kvtier/v1/context_store.pb.h"

namespace kvtier::client {

// What is given lives as long as the stream.
std::unique_ptr<grpc::ClientWriter<grpc::ByteBuffer>> StartWrite(grpc::ChannelInterface* channel,
                                                                 grpc::ClientContext* context,
                                                                 v1::WriteResponse* response);
std::unique_ptr<grpc::ClientReader<grpc::ByteBuffer>> StartRead(grpc::ChannelInterface* channel,
                                                                grpc::ClientContext* context,
                                                                const v1::ReadRequest& request);

}  // namespace kvtier::client
