// SPDX-License-Identifier: Apache-2.0
//
// Blocks by value, over gRPC streams.
#include <algorithm>
#include <cstring>
#include <utility>

#include "client/src/client_impl.h"
#include "client/src/raw_streams.h"
#include "proto/base/crc32c.h"
#include "proto/rpc/chunk_message.h"

namespace kvtier::client {

// Takes in what a Read brings, one byte after the other: into a vector that grows or into memory
// that is given and holds all blocks asked for.
class ReadTarget {
 public:
  ReadTarget(uint32_t block_bytes, std::vector<std::byte>* vector)
      : block_bytes_(block_bytes), vector_(vector) {}
  ReadTarget(uint32_t block_bytes, std::span<std::byte> memory)
      : block_bytes_(block_bytes), memory_(memory) {}

  // Forgets what came before.
  void Begin(size_t due_bytes) {
    due_bytes_ = due_bytes;
    taken_bytes_ = 0;
    crc32cs_.assign(due_bytes / block_bytes_, 0);
    if (vector_ == nullptr) return;
    vector_->clear();
    vector_->reserve(due_bytes);
  }

  absl::Status Take(const ChunkMessage& message) {
    if (message.chunk_bytes > due_bytes_ - taken_bytes_) {
      return Internal("the daemon sent more than the %d bytes due", due_bytes_);
    }
    for (const std::span<const std::byte> part : message.parts) Append(part);
    return absl::OkStatus();
  }

  absl::Status End() const {
    if (taken_bytes_ == due_bytes_) return absl::OkStatus();
    return Internal("the daemon sent %d of the %d bytes due", taken_bytes_, due_bytes_);
  }

  size_t taken_bytes() const { return taken_bytes_; }
  // Of each block taken in.
  std::span<const uint32_t> crc32cs() const { return crc32cs_; }

 private:
  // The checksum is computed while the bytes are in the caches.
  void Append(std::span<const std::byte> rest) {
    while (!rest.empty()) {
      const auto part =
          rest.first(std::min(rest.size(), block_bytes_ - taken_bytes_ % block_bytes_));
      if (vector_ != nullptr) {
        vector_->insert(vector_->end(), part.begin(), part.end());
      } else {
        std::memcpy(memory_.data() + taken_bytes_, part.data(), part.size());
      }
      uint32_t& crc32c = crc32cs_[taken_bytes_ / block_bytes_];
      crc32c = Crc32c(part, crc32c);
      taken_bytes_ += part.size();
      rest = rest.subspan(part.size());
    }
  }

  const size_t block_bytes_;
  std::vector<std::byte>* const vector_ = nullptr;
  const std::span<std::byte> memory_;
  size_t due_bytes_ = 0;
  size_t taken_bytes_ = 0;
  std::vector<uint32_t> crc32cs_;
};

namespace {

constexpr size_t kChunkBytesMax = 1 << 20;

size_t ChunkBytes(const Session& session) {
  const size_t limit = session.limits().chunk_bytes_max();
  return limit == 0 ? kChunkBytesMax : std::min(limit, kChunkBytesMax);
}

// The checksums the blocks were committed with.
absl::StatusOr<std::vector<uint32_t>> ReceiveBlocks(const Session& session,
                                                    grpc::ClientReader<grpc::ByteBuffer>& reader,
                                                    size_t key_count, uint32_t block_bytes,
                                                    ReadTarget& target) {
  target.Begin(0);
  grpc::ByteBuffer bytes;
  // Without a first message, the status of the stream says why.
  if (!reader.Read(&bytes)) return std::vector<uint32_t>();
  v1::ReadHeader header;
  KVT_ASSIGN_OR_RETURN(ChunkMessage message, ParseChunkMessage(&bytes, &header));
  if (!message.has_header) return Internal("the daemon sent payloads without a header");
  KVT_RETURN_IF_ERROR(CheckEpoch(session, header.epoch()));
  KVT_ASSIGN_OR_RETURN(const std::vector<BlockStatus> statuses,
                       UnpackStatuses(header.statuses(), key_count));
  KVT_ASSIGN_OR_RETURN(std::vector<uint32_t> crc32cs, UnpackCrc32cs(header.crc32cs(), key_count));
  const auto first_bad = std::find_if(statuses.begin(), statuses.end(), [](BlockStatus status) {
    return status != BlockStatus::kOk;
  });
  target.Begin(static_cast<size_t>(first_bad - statuses.begin()) * block_bytes);
  KVT_RETURN_IF_ERROR(target.Take(message));
  while (true) {
    message = {};
    if (!reader.Read(&bytes)) break;
    KVT_ASSIGN_OR_RETURN(message, ParseChunkMessage(&bytes, &header));
    KVT_RETURN_IF_ERROR(target.Take(message));
  }
  KVT_RETURN_IF_ERROR(target.End());
  return crc32cs;
}

// The stream's own error, if it has one, explains a short read better than the bytes do.
absl::Status Finish(grpc::ClientContext& context, grpc::ClientReader<grpc::ByteBuffer>& reader,
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
    v1::WriteHeader header;
    header.set_session_id(session.session_id());
    header.set_namespace_id(namespace_id);
    if (parent.has_value()) header.set_parent_key(std::string(parent->AsBytes()));
    header.set_keys(PackKeys(keys));
    header.set_crc32cs(PackRecords(std::span<const uint32_t>(crc32cs)));
    grpc::ClientContext context;
    SetDeadline(context, impl_->options().transfer_timeout_ms);
    response.Clear();
    const auto writer = StartWrite(session.channel(), &context, &response);
    const size_t chunk_bytes = ChunkBytes(session);
    bool open = writer->Write(MakeChunkMessage(&header, grpc::Slice()));
    for (size_t sent = 0; open && sent < payloads.size();) {
      const auto part = payloads.subspan(sent, std::min(chunk_bytes, payloads.size() - sent));
      // gRPC may hold a message longer than the call lasts, so it gets a copy.
      ChunkBuffer chunk(part.size());
      std::memcpy(chunk.bytes.data(), part.data(), part.size());
      impl_->AddCopiedBytes(part.size());
      open = writer->Write(MakeChunkMessage(nullptr, std::move(chunk.slice)));
      sent += part.size();
    }
    writer->WritesDone();
    KVT_RETURN_IF_ERROR(FromGrpc(writer->Finish()));
    return CheckEpoch(session, response.epoch());
  };
  KVT_RETURN_IF_ERROR(impl_->InSession({}, attempt));
  return UnpackStatuses(response.statuses(), keys.size());
}

absl::StatusOr<std::vector<uint32_t>> Client::Impl::Receive(const NamespaceSpec& spec,
                                                            std::span<const Key> keys,
                                                            ReadTarget& target) {
  v1::ReadRequest request;
  request.set_keys(PackKeys(keys));
  std::vector<uint32_t> crc32cs;
  KVT_RETURN_IF_ERROR(InSession({}, [&](Session& session) -> absl::Status {
    KVT_ASSIGN_OR_RETURN(const uint32_t namespace_id, NamespaceIdIn(session, spec));
    request.set_session_id(session.session_id());
    request.set_namespace_id(namespace_id);
    grpc::ClientContext context;
    SetDeadline(context, options_.transfer_timeout_ms);
    const auto reader = StartRead(session.channel(), &context, request);
    auto received = ReceiveBlocks(session, *reader, keys.size(), spec.ns.block_bytes, target);
    if (received.ok()) crc32cs = *std::move(received);
    return Finish(context, *reader, received.status());
  }));
  AddCopiedBytes(target.taken_bytes());
  return crc32cs;
}

absl::Status Client::ReadChecked(const Namespace& ns, std::span<const Key> keys,
                                 ReadTarget& target) {
  KVT_ASSIGN_OR_RETURN(const auto spec, impl_->SpecOf(ns));
  KVT_ASSIGN_OR_RETURN(const std::vector<uint32_t> committed, impl_->Receive(*spec, keys, target));
  for (size_t i = 0; i < target.crc32cs().size(); ++i) {
    const uint32_t crc32c = target.crc32cs()[i];
    if (crc32c == committed[i]) continue;
    const absl::Status reported = ReportBad(ns, keys.subspan(i, 1));
    return DataLoss("block %s arrived with CRC-32C %08x; %08x was committed (report: %s)",
                    keys[i].Hex(), crc32c, committed[i], reported.ToString());
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::byte>> Client::Read(const Namespace& ns,
                                                    std::span<const Key> keys) {
  KVT_ASSIGN_OR_RETURN(const auto spec, impl_->SpecOf(ns));
  std::vector<std::byte> payloads;
  ReadTarget target(spec->ns.block_bytes, &payloads);
  KVT_RETURN_IF_ERROR(ReadChecked(ns, keys, target));
  return payloads;
}

absl::StatusOr<size_t> Client::ReadInto(const Namespace& ns, std::span<const Key> keys,
                                        std::span<std::byte> memory) {
  KVT_ASSIGN_OR_RETURN(const auto spec, impl_->SpecOf(ns));
  const size_t block_bytes = spec->ns.block_bytes;
  if (memory.size() < keys.size() * block_bytes) {
    return Invalid("%d bytes of memory for %d blocks of %d bytes", memory.size(), keys.size(),
                   block_bytes);
  }
  ReadTarget target(spec->ns.block_bytes, memory);
  KVT_RETURN_IF_ERROR(ReadChecked(ns, keys, target));
  return target.taken_bytes() / block_bytes;
}

}  // namespace kvtier::client
