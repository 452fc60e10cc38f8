// SPDX-License-Identifier: Apache-2.0
//
// Blocks by value, over gRPC streams.
#include <algorithm>
#include <utility>

#include "client/src/client_impl.h"
#include "proto/base/crc32c.h"

namespace kvtier::client {
namespace {

constexpr size_t kChunkBytesMax = 1 << 20;

size_t ChunkBytes(const Session& session) {
  const size_t limit = session.limits().chunk_bytes_max();
  return limit == 0 ? kChunkBytesMax : std::min(limit, kChunkBytesMax);
}

// What a Read brought, before it is checked against its checksums.
struct ReadBlocks {
  std::vector<std::byte> payloads;
  std::vector<uint32_t> crc32cs;
};

// Takes one message in; `due_bytes` is what the header promised.
absl::Status TakeChunk(const std::string& chunk, size_t due_bytes,
                       std::vector<std::byte>& payloads) {
  if (chunk.size() > due_bytes - payloads.size()) {
    return Internal("the daemon sent more than the %d bytes due", due_bytes);
  }
  const auto bytes = std::as_bytes(std::span(chunk));
  payloads.insert(payloads.end(), bytes.begin(), bytes.end());
  return absl::OkStatus();
}

absl::Status ReceiveBlocks(const Session& session, grpc::ClientReader<v1::ReadResponse>& reader,
                           size_t key_count, uint32_t block_bytes, ReadBlocks& read) {
  v1::ReadResponse message;
  // Without a first message, the status of the stream says why.
  if (!reader.Read(&message)) return absl::OkStatus();
  if (!message.has_header()) return Internal("the daemon sent payloads without a header");
  KVT_RETURN_IF_ERROR(CheckEpoch(session, message.header().epoch()));
  KVT_ASSIGN_OR_RETURN(const std::vector<BlockStatus> statuses,
                       UnpackStatuses(message.header().statuses(), key_count));
  KVT_ASSIGN_OR_RETURN(read.crc32cs, UnpackCrc32cs(message.header().crc32cs(), key_count));
  const auto first_bad = std::find_if(statuses.begin(), statuses.end(), [](BlockStatus status) {
    return status != BlockStatus::kOk;
  });
  const size_t due_bytes = static_cast<size_t>(first_bad - statuses.begin()) * block_bytes;
  read.payloads.reserve(due_bytes);
  do {
    KVT_RETURN_IF_ERROR(TakeChunk(message.chunk(), due_bytes, read.payloads));
  } while (reader.Read(&message));
  if (read.payloads.size() == due_bytes) return absl::OkStatus();
  return Internal("the daemon sent %d of the %d bytes due", read.payloads.size(), due_bytes);
}

// The stream's own error, if it has one, explains a short read better than the bytes do.
absl::Status Finish(grpc::ClientContext& context, grpc::ClientReader<v1::ReadResponse>& reader,
                    const absl::Status& received) {
  if (received.ok()) return FromGrpc(reader.Finish());
  context.TryCancel();
  const absl::Status stream = FromGrpc(reader.Finish());
  return stream.ok() || stream.code() == absl::StatusCode::kCancelled ? received : stream;
}

}  // namespace

absl::StatusOr<std::vector<BlockStatus>> Client::Write(const Namespace& ns,
                                                       const std::optional<Key>& parent,
                                                       std::span<const Key> keys,
                                                       std::span<const std::byte> payloads) {
  KVT_ASSIGN_OR_RETURN(const auto spec, impl_->SpecOf(ns));
  const size_t block_bytes = spec->ns.block_bytes;
  if (payloads.size() != keys.size() * block_bytes) {
    return Invalid("%d bytes of payloads for %d blocks of %d bytes", payloads.size(), keys.size(),
                   block_bytes);
  }
  std::vector<uint32_t> crc32cs;
  crc32cs.reserve(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    crc32cs.push_back(Crc32c(payloads.subspan(i * block_bytes, block_bytes)));
  }
  v1::WriteResponse response;
  const auto attempt = [&](Session& session) -> absl::Status {
    KVT_ASSIGN_OR_RETURN(const uint32_t namespace_id, impl_->NamespaceIdIn(session, *spec));
    v1::WriteRequest message;
    v1::WriteHeader& header = *message.mutable_header();
    header.set_session_id(session.session_id());
    header.set_namespace_id(namespace_id);
    if (parent.has_value()) header.set_parent_key(std::string(parent->AsBytes()));
    header.set_keys(PackKeys(keys));
    header.set_crc32cs(PackRecords(std::span<const uint32_t>(crc32cs)));
    grpc::ClientContext context;
    SetDeadline(context, impl_->options().transfer_timeout_ms);
    response.Clear();
    const auto writer = session.stub().Write(&context, &response);
    const size_t chunk_bytes = ChunkBytes(session);
    for (size_t sent = 0; writer->Write(message) && sent < payloads.size();) {
      const auto chunk = payloads.subspan(sent, std::min(chunk_bytes, payloads.size() - sent));
      message.clear_header();
      message.set_chunk(chunk.data(), chunk.size());
      impl_->AddCopiedBytes(chunk.size());
      sent += chunk.size();
    }
    writer->WritesDone();
    KVT_RETURN_IF_ERROR(FromGrpc(writer->Finish()));
    return CheckEpoch(session, response.epoch());
  };
  KVT_RETURN_IF_ERROR(impl_->InSession({}, attempt));
  return UnpackStatuses(response.statuses(), keys.size());
}

absl::StatusOr<std::vector<std::byte>> Client::Read(const Namespace& ns,
                                                    std::span<const Key> keys) {
  KVT_ASSIGN_OR_RETURN(const auto spec, impl_->SpecOf(ns));
  const uint32_t block_bytes = spec->ns.block_bytes;
  v1::ReadRequest request;
  request.set_keys(PackKeys(keys));
  ReadBlocks read;
  const auto attempt = [&](Session& session) -> absl::Status {
    read = {};
    KVT_ASSIGN_OR_RETURN(const uint32_t namespace_id, impl_->NamespaceIdIn(session, *spec));
    request.set_session_id(session.session_id());
    request.set_namespace_id(namespace_id);
    grpc::ClientContext context;
    SetDeadline(context, impl_->options().transfer_timeout_ms);
    const auto reader = session.stub().Read(&context, request);
    const absl::Status received = ReceiveBlocks(session, *reader, keys.size(), block_bytes, read);
    return Finish(context, *reader, received);
  };
  KVT_RETURN_IF_ERROR(impl_->InSession({}, attempt));
  impl_->AddCopiedBytes(read.payloads.size());
  const std::span<const std::byte> payloads = read.payloads;
  for (size_t i = 0; i < payloads.size() / block_bytes; ++i) {
    const uint32_t crc32c = Crc32c(payloads.subspan(i * block_bytes, block_bytes));
    if (crc32c == read.crc32cs[i]) continue;
    const absl::Status reported = ReportBad(ns, keys.subspan(i, 1));
    return DataLoss("block %s arrived with CRC-32C %08x; %08x was committed (report: %s)",
                    keys[i].Hex(), crc32c, read.crc32cs[i], reported.ToString());
  }
  return std::move(read.payloads);
}

}  // namespace kvtier::client
