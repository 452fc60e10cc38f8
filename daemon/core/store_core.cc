// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/store_core.h"

#include <utility>

#include "daemon/core/core_impl.h"
#include "proto/base/check.h"

namespace kvtier::core {

StoreCore::StoreCore(const CoreOptions& options, SlotSource* hbm, SlotSource* host,
                     SlotSource* nvme, std::unique_ptr<policy::EvictionPolicy> eviction)
    : impl_(std::make_unique<Impl>(options, hbm, host, nvme, std::move(eviction))) {
  KVT_CHECK(hbm != nullptr && host != nullptr);
}

StoreCore::~StoreCore() = default;

bool StoreCore::Adopt(const BlockMeta& meta, ReplicaId nvme_replica) {
  return impl_->Adopt(meta, kNvme, nvme_replica);
}

bool StoreCore::AdoptHost(const BlockMeta& meta, ReplicaId host_replica) {
  return impl_->Adopt(meta, kHost, host_replica);
}

bool StoreCore::AdoptLate(const BlockMeta& meta, ReplicaId nvme_replica) {
  return impl_->AdoptLate(meta, nvme_replica);
}

std::string StoreCore::SavePolicy() const { return impl_->SavePolicy(); }

absl::Status StoreCore::RestorePolicy(std::string_view saved) {
  return impl_->RestorePolicy(saved);
}

absl::StatusOr<SessionId> StoreCore::OpenSession(OwnerIdx owner, TimeMs /*now_ms*/) {
  return impl_->OpenSession(owner);
}

void StoreCore::EndSession(SessionId session, TimeMs now_ms, Effects* effects) {
  impl_->EndSession(session, now_ms, effects);
}

void StoreCore::AttachMapping(SessionId session) {
  if (const auto found = impl_->FindSession(session); found.ok()) (*found)->mapped = true;
}

void StoreCore::ShowTickets(SessionId session, std::shared_ptr<TicketBoardPage> board) {
  if (const auto found = impl_->FindSession(session); found.ok()) {
    (*found)->board = std::move(board);
  }
}

void StoreCore::DetachMapping(SessionId session, TimeMs now_ms, Effects* effects) {
  impl_->DetachMapping(session, now_ms, effects);
}

absl::StatusOr<NamespaceIdx> StoreCore::OpenNamespace(SessionId session,
                                                      const NamespaceSpec& spec) {
  return impl_->OpenNamespace(session, spec);
}

absl::StatusOr<LookupResult> StoreCore::Lookup(SessionId session, NamespaceIdx ns,
                                               std::span<const Key> keys) {
  return impl_->Lookup(session, ns, keys);
}

void StoreCore::Reserve(SessionId session, NamespaceIdx ns, const std::optional<Key>& parent,
                        std::span<const Key> keys, TierId tier, TimeMs deadline_ms, TimeMs now_ms,
                        std::function<void(absl::StatusOr<std::vector<PlacedBlock>>)> done,
                        Effects* effects) {
  ReserveWaiter waiter{.session = session,
                       .ns = ns,
                       .parent = parent,
                       .keys = {keys.begin(), keys.end()},
                       .tier = static_cast<size_t>(tier),
                       .deadline_ms = deadline_ms};
  waiter.done = std::move(done);
  impl_->Reserve(std::move(waiter), now_ms, effects);
}

absl::StatusOr<std::vector<BlockStatus>> StoreCore::Commit(SessionId session, NamespaceIdx ns,
                                                           std::span<const Key> keys,
                                                           std::span<const uint32_t> crc32cs,
                                                           TimeMs now_ms, Effects* effects) {
  return impl_->Commit(session, ns, keys, crc32cs, now_ms, effects);
}

absl::Status StoreCore::Abort(SessionId session, NamespaceIdx ns, std::span<const Key> keys,
                              TimeMs now_ms, Effects* effects) {
  return impl_->Abort(session, ns, keys, now_ms, effects);
}

void StoreCore::Acquire(SessionId session, NamespaceIdx ns, std::span<const Key> keys,
                        TimeMs deadline_ms, TimeMs now_ms,
                        std::function<void(absl::StatusOr<AcquireResult>)> done, Effects* effects) {
  impl_->Acquire(session, ns, keys, deadline_ms, now_ms, std::move(done), effects);
}

absl::Status StoreCore::Release(SessionId session, std::span<const LeaseId> leases, TimeMs now_ms,
                                Effects* effects) {
  return impl_->Release(session, leases, now_ms, effects);
}

absl::StatusOr<uint32_t> StoreCore::ReportBad(SessionId session, NamespaceIdx ns,
                                              std::span<const Key> keys, TimeMs now_ms,
                                              Effects* effects) {
  return impl_->ReportBad(session, ns, keys, now_ms, effects);
}

absl::StatusOr<TicketState> StoreCore::Prefetch(SessionId session, NamespaceIdx ns,
                                                std::span<const Key> keys, const PrefetchHint& hint,
                                                TimeMs now_ms, Effects* effects) {
  return impl_->Prefetch(session, ns, keys, hint, now_ms, effects);
}

absl::StatusOr<TicketState> StoreCore::GetTicket(SessionId session, TicketId ticket) {
  return impl_->GetTicket(session, ticket);
}

absl::Status StoreCore::CancelTicket(SessionId session, TicketId ticket) {
  return impl_->CancelTicket(session, ticket);
}

absl::StatusOr<uint32_t> StoreCore::CreateContext(SessionId session, NamespaceIdx ns,
                                                  std::string_view name, TimeMs now_ms) {
  return impl_->CreateContext(session, ns, name, now_ms);
}

absl::StatusOr<uint32_t> StoreCore::AppendContext(SessionId session, NamespaceIdx ns,
                                                  std::string_view name, uint32_t base_block_count,
                                                  std::span<const Key> keys, TimeMs now_ms,
                                                  Effects* effects) {
  return impl_->AppendContext(session, ns, name, base_block_count, keys, now_ms, effects);
}

void StoreCore::PauseContext(SessionId session, NamespaceIdx ns, std::string_view name,
                             const Expectation& expectation, TimeMs deadline_ms, TimeMs now_ms,
                             std::function<void(absl::StatusOr<PauseResult>)> done,
                             Effects* effects) {
  impl_->PauseContext(session, ns, name, expectation, deadline_ms, now_ms, std::move(done),
                      effects);
}

absl::StatusOr<TicketState> StoreCore::ResumeContext(SessionId session, NamespaceIdx ns,
                                                     std::string_view name,
                                                     const PrefetchHint& hint, TimeMs now_ms,
                                                     Effects* effects) {
  return impl_->ResumeContext(session, ns, name, hint, now_ms, effects);
}

absl::StatusOr<uint32_t> StoreCore::ForkContext(SessionId session, NamespaceIdx ns,
                                                std::string_view parent, std::string_view name,
                                                uint32_t block_count, TimeMs now_ms,
                                                Effects* effects) {
  return impl_->ForkContext(session, ns, parent, name, block_count, now_ms, effects);
}

absl::StatusOr<std::vector<Key>> StoreCore::ContextKeys(SessionId session, NamespaceIdx ns,
                                                        std::string_view name) {
  return impl_->ContextKeys(session, ns, name);
}

absl::StatusOr<uint64_t> StoreCore::CloseContext(SessionId session, NamespaceIdx ns,
                                                 std::string_view name, bool drop, TimeMs now_ms,
                                                 Effects* effects) {
  return impl_->CloseContext(session, ns, name, drop, now_ms, effects);
}

void StoreCore::OnTransferDone(JobId job, const absl::Status& status, TimeMs now_ms,
                               Effects* effects) {
  impl_->OnTransferDone(job, status, now_ms, effects);
}

void StoreCore::LoseTier(TierId tier, TimeMs now_ms, Effects* effects) {
  KVT_CHECK(tier != TierId::kNvme);
  impl_->LoseTier(static_cast<size_t>(tier), now_ms, effects);
}

void StoreCore::LoseNvmeBlock(const NamespaceHash& namespace_hash, const Key& key, TimeMs now_ms,
                              Effects* effects) {
  impl_->LoseNvmeBlock(namespace_hash, key, now_ms, effects);
}

void StoreCore::Tick(TimeMs now_ms, Effects* effects) { impl_->Tick(now_ms, effects); }

void StoreCore::Flush(TimeMs deadline_ms, TimeMs now_ms,
                      std::function<void(absl::StatusOr<uint64_t>)> done, Effects* effects) {
  impl_->Flush(deadline_ms, std::move(done));
  impl_->Pump(now_ms, effects);
}

void StoreCore::Drain(TimeMs now_ms, Effects* effects) {
  impl_->Drain(effects);
  impl_->Pump(now_ms, effects);
}

absl::StatusOr<uint64_t> StoreCore::BeginWatch(SessionId session) {
  return impl_->BeginWatch(session);
}

absl::StatusOr<WatchedEvents> StoreCore::ReadEvents(SessionId session, uint64_t after,
                                                    size_t count_max) {
  return impl_->ReadEvents(session, after, count_max);
}

absl::StatusOr<WatchedSnapshot> StoreCore::ReadSnapshot(SessionId session, uint64_t position,
                                                        size_t step) {
  return impl_->ReadSnapshot(session, position, step);
}

bool StoreCore::Waits() const { return impl_->Waits(); }

CoreCounters StoreCore::Counters() const { return impl_->Counters(); }

TenantsReport StoreCore::Tenants() const { return impl_->Tenants(); }

std::vector<ContextSummary> StoreCore::Contexts(size_t limit) const {
  return impl_->Contexts(limit);
}

absl::StatusOr<std::vector<BlockSummary>> StoreCore::WhereContext(std::string_view name) const {
  return impl_->WhereContext(name);
}

absl::StatusOr<std::vector<BlockSummary>> StoreCore::WhereKey(const Key& key) const {
  return impl_->WhereKey(key);
}

MissAnswer StoreCore::WhyMiss(const std::optional<NamespaceHash>& asked, const Key& key) const {
  return impl_->WhyMiss(asked, key);
}

void StoreCore::CheckInvariants() const { impl_->CheckInvariants(); }

}  // namespace kvtier::core
