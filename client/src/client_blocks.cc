// SPDX-License-Identifier: Apache-2.0
//
// Blocks in place: reserve, fill and commit; acquire, verify and report.
#include <algorithm>
#include <utility>

#include "client/src/client_impl.h"
#include "proto/base/crc32c.h"
#include "proto/base/reasons.h"

namespace kvtier::client {
namespace {

std::vector<Key> OkKeys(std::span<const Key> keys, std::span<const MappedBlock> blocks) {
  std::vector<Key> result;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (blocks[i].status == BlockStatus::kOk) result.push_back(keys[i]);
  }
  return result;
}

absl::Status CheckFill(const Fill& fill, uint32_t block_bytes) {
  if (fill.keys.size() != fill.blocks.size()) {
    return Invalid("the fill has %d keys and %d blocks", fill.keys.size(), fill.blocks.size());
  }
  for (const MappedBlock& block : fill.blocks) {
    if (block.status == BlockStatus::kOk && block.device_address == 0 &&
        block.bytes.size() != block_bytes) {
      return Invalid("the fill has a block of %d bytes; the namespace's have %d",
                     block.bytes.size(), block_bytes);
    }
  }
  return absl::OkStatus();
}

bool IsOnDevice(const MappedBlock& block) {
  return block.status == BlockStatus::kOk && block.device_address != 0;
}

// The checksums of the OK blocks, in order.
absl::StatusOr<std::vector<uint32_t>> ChecksumsOf(DeviceMap& devices,
                                                  std::span<const MappedBlock> blocks,
                                                  uint32_t block_bytes, DeviceStream stream,
                                                  absl::Duration timeout) {
  std::vector<CudaAddress> addresses;
  int device_ordinal = 0;
  for (const MappedBlock& block : blocks) {
    if (!IsOnDevice(block)) continue;
    addresses.push_back(block.device_address);
    device_ordinal = block.device_ordinal;  // a daemon has hbm on one GPU
  }
  std::vector<uint32_t> on_device;
  if (!addresses.empty()) {
    const auto raw = static_cast<CudaStream>(reinterpret_cast<uintptr_t>(stream.handle));
    KVT_ASSIGN_OR_RETURN(on_device,
                         devices.Crc32cs(device_ordinal, raw, addresses, block_bytes, timeout));
  }
  std::vector<uint32_t> crc32cs;
  auto next = on_device.begin();
  for (const MappedBlock& block : blocks) {
    if (block.status != BlockStatus::kOk) continue;
    crc32cs.push_back(IsOnDevice(block) ? *next++ : Crc32c(block.bytes));
  }
  return crc32cs;
}

absl::Status CheckTier(uint8_t tier) {
  if (tier == v1::TIER_HBM || tier == v1::TIER_HOST) return absl::OkStatus();
  return Invalid("tier is %d; allowed 1 (hbm), 2 (host)", static_cast<int>(tier));
}

}  // namespace

absl::StatusOr<v1::ReserveRequest> NewReserveRequest(const std::optional<Key>& parent,
                                                     std::span<const Key> keys, uint8_t tier) {
  KVT_RETURN_IF_ERROR(CheckTier(tier));
  v1::ReserveRequest request;
  if (parent.has_value()) request.set_parent_key(std::string(parent->AsBytes()));
  request.set_keys(PackKeys(keys));
  request.set_tier(static_cast<v1::Tier>(tier));
  return request;
}

absl::StatusOr<Fill> Client::Impl::TakeFill(Session& session, const NamespaceSpec& spec,
                                            std::span<const Key> keys,
                                            const v1::ReserveResponse& response) {
  auto mapped = MapBlocks(session, response.results(), keys.size(), spec.ns.block_bytes,
                          /*writable=*/true);
  if (!mapped.ok()) {
    // Slots that cannot be reached must not stay pending. What became of this is not known better
    // than what became of the reservation; the first error is the one to tell.
    v1::AbortRequest abort;
    abort.set_keys(PackKeys(keys));
    v1::AbortResponse ignored;
    Unary(session, &Stub::Abort, &spec, abort, ignored, options_.control_timeout_ms).IgnoreError();
    return mapped.status();
  }
  return Fill{.session_generation = session.generation(),
              .keys = {keys.begin(), keys.end()},
              .blocks = std::move(mapped->blocks),
              .mappings = std::move(mapped->mappings)};
}

absl::StatusOr<Fill> Client::Reserve(const Namespace& ns, const std::optional<Key>& parent,
                                     std::span<const Key> keys, uint8_t tier) {
  KVT_RETURN_IF_ERROR(impl_->CheckMapped());
  KVT_ASSIGN_OR_RETURN(const auto spec, impl_->SpecOf(ns));
  KVT_ASSIGN_OR_RETURN(v1::ReserveRequest request, NewReserveRequest(parent, keys, tier));
  Fill fill;
  const auto attempt = [&](Session& session) -> absl::Status {
    v1::ReserveResponse response;
    KVT_RETURN_IF_ERROR(impl_->Unary(session, &Stub::Reserve, spec.get(), request, response,
                                     impl_->options().transfer_timeout_ms));
    KVT_ASSIGN_OR_RETURN(fill, impl_->TakeFill(session, *spec, keys, response));
    return absl::OkStatus();
  };
  KVT_RETURN_IF_ERROR(impl_->InSession({.repeat = false}, attempt));
  return fill;
}

absl::StatusOr<std::vector<BlockStatus>> Client::Commit(const Namespace& ns, const Fill& fill) {
  if (std::ranges::any_of(fill.blocks, IsOnDevice)) {
    return FailedPrecondition(
        "the fill has slots on a GPU; commit it with the stream that fills them");
  }
  return Commit(ns, fill, DeviceStream{});
}

absl::StatusOr<std::vector<BlockStatus>> Client::Commit(const Namespace& ns, const Fill& fill,
                                                        DeviceStream stream) {
  KVT_ASSIGN_OR_RETURN(const auto spec, impl_->SpecOf(ns));
  KVT_RETURN_IF_ERROR(CheckFill(fill, spec->ns.block_bytes));
  const std::vector<Key> keys = OkKeys(fill.keys, fill.blocks);
  std::vector<BlockStatus> result;
  result.reserve(fill.blocks.size());
  for (const MappedBlock& block : fill.blocks) result.push_back(block.status);
  if (keys.empty()) return result;
  KVT_ASSIGN_OR_RETURN(const std::vector<uint32_t> crc32cs,
                       ChecksumsOf(impl_->devices(), fill.blocks, spec->ns.block_bytes, stream,
                                   absl::Milliseconds(impl_->options().transfer_timeout_ms)));

  v1::CommitRequest request;
  request.set_keys(PackKeys(keys));
  request.set_crc32cs(PackRecords(std::span<const uint32_t>(crc32cs)));
  v1::CommitResponse response;
  KVT_RETURN_IF_ERROR(impl_->InSession(
      {.repeat = false, .generation = fill.session_generation}, [&](Session& session) {
        return impl_->Unary(session, &Stub::Commit, spec.get(), request, response,
                            impl_->options().control_timeout_ms);
      }));
  KVT_ASSIGN_OR_RETURN(const std::vector<BlockStatus> statuses,
                       UnpackStatuses(response.statuses(), keys.size()));
  auto status = statuses.begin();
  for (BlockStatus& block : result) {
    if (block == BlockStatus::kOk) block = *status++;
  }
  return result;
}

absl::Status Client::Abort(const Namespace& ns, const Fill& fill) {
  KVT_ASSIGN_OR_RETURN(const auto spec, impl_->SpecOf(ns));
  KVT_RETURN_IF_ERROR(CheckFill(fill, spec->ns.block_bytes));
  const std::vector<Key> keys = OkKeys(fill.keys, fill.blocks);
  const auto session = impl_->PeekSession();
  // The end of a session gives back all that it had reserved.
  if (keys.empty() || session->lost() || session->generation() != fill.session_generation) {
    return absl::OkStatus();
  }
  v1::AbortRequest request;
  request.set_keys(PackKeys(keys));
  v1::AbortResponse response;
  absl::Status status = impl_->Unary(*session, &Stub::Abort, spec.get(), request, response,
                                     impl_->options().control_timeout_ms);
  if (!IsSessionLoss(status)) return status;
  session->MarkLost();
  return absl::OkStatus();
}

absl::StatusOr<Lease> Client::Impl::TakeLease(Client* client, Session& session,
                                              const NamespaceSpec& spec, size_t key_count,
                                              const v1::AcquireResponse& response) {
  Lease lease;
  if (response.lease_id() != 0) {
    lease.client_ = client;
    lease.session_generation_ = session.generation();
    lease.lease_id_ = response.lease_id();
  }
  // From here on an error ends the lease, with the object.
  KVT_ASSIGN_OR_RETURN(const std::vector<uint32_t> crc32cs,
                       UnpackCrc32cs(response.crc32cs(), key_count));
  KVT_ASSIGN_OR_RETURN(MappedBlocks mapped,
                       MapBlocks(session, response.results(), key_count, spec.ns.block_bytes,
                                 /*writable=*/false));
  if (response.lease_id() == 0 && !mapped.mappings.empty()) {
    return Internal("the daemon sent blocks without a lease");
  }
  for (size_t i = 0; i < key_count; ++i) mapped.blocks[i].crc32c = crc32cs[i];
  lease.blocks_ = std::move(mapped.blocks);
  lease.mappings_ = std::move(mapped.mappings);
  return lease;
}

absl::StatusOr<Lease> Client::Acquire(const Namespace& ns, std::span<const Key> keys) {
  KVT_RETURN_IF_ERROR(impl_->CheckMapped());
  KVT_ASSIGN_OR_RETURN(const auto spec, impl_->SpecOf(ns));
  v1::AcquireRequest request;
  request.set_keys(PackKeys(keys));
  Lease lease;
  const auto attempt = [&](Session& session) -> absl::Status {
    v1::AcquireResponse response;
    KVT_RETURN_IF_ERROR(impl_->Unary(session, &Stub::Acquire, spec.get(), request, response,
                                     impl_->options().transfer_timeout_ms));
    KVT_ASSIGN_OR_RETURN(lease, impl_->TakeLease(this, session, *spec, keys.size(), response));
    return absl::OkStatus();
  };
  KVT_RETURN_IF_ERROR(impl_->InSession({}, attempt));
  return lease;
}

absl::Status Client::Verify(const Namespace& ns, const Key& key, const MappedBlock& block) {
  KVT_ASSIGN_OR_RETURN(const auto spec, impl_->SpecOf(ns));
  if (block.status != BlockStatus::kOk ||
      (!IsOnDevice(block) && block.bytes.size() != spec->ns.block_bytes)) {
    return Invalid("block %s is not a leased block of this namespace", key.Hex());
  }
  KVT_ASSIGN_OR_RETURN(
      const std::vector<uint32_t> crc32cs,
      ChecksumsOf(impl_->devices(), std::span(&block, 1), spec->ns.block_bytes, DeviceStream{},
                  absl::Milliseconds(impl_->options().transfer_timeout_ms)));
  const uint32_t crc32c = crc32cs.front();
  if (crc32c == block.crc32c) return absl::OkStatus();
  const absl::Status reported = ReportBad(ns, std::span(&key, 1));
  return DataLoss("block %s has CRC-32C %08x; %08x was committed (report: %s)", key.Hex(), crc32c,
                  block.crc32c, reported.ToString());
}

absl::Status Client::ReportBad(const Namespace& ns, std::span<const Key> keys) {
  v1::ReportBadRequest request;
  request.set_keys(PackKeys(keys));
  return impl_->Call(&Stub::ReportBad, &ns, std::move(request), impl_->options().control_timeout_ms)
      .status();
}

}  // namespace kvtier::client
