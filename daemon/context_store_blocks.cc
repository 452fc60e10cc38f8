// SPDX-License-Identifier: Apache-2.0
//
// ContextStoreService: blocks: lookup, fills, leases, prefetch.
#include "daemon/context_store_service.h"
#include "proto/base/packed.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"

namespace kvtier {
namespace {

// Leases that one call may end.
constexpr int kLeasesPerCallMax = 4096;

// What a Reserve asks for, checked.
struct ReserveArguments {
  std::vector<Key> keys;
  std::optional<Key> parent;
  TierId tier = TierId::kHbm;
};

absl::StatusOr<ReserveArguments> ParseReserve(const v1::ReserveRequest& request) {
  ReserveArguments arguments;
  KVT_ASSIGN_OR_RETURN(arguments.keys, ParseKeys(request.keys()));
  KVT_ASSIGN_OR_RETURN(arguments.parent, ParseParentKey(request.parent_key()));
  KVT_ASSIGN_OR_RETURN(arguments.tier, ParseMemoryTier(request.tier()));
  return arguments;
}

}  // namespace

std::string ContextStoreService::PackPlaces(const std::vector<core::PlacedBlock>& blocks) const {
  std::vector<BlockResult> results;
  results.reserve(blocks.size());
  for (const core::PlacedBlock& block : blocks) {
    BlockResult result{.status = block.status};
    if (block.status == BlockStatus::kOk) {
      const SlotPlace place = service_.store->tiers().Memory(block.tier)->Place(block.replica);
      result.tier = static_cast<uint8_t>(TierToProto(block.tier));
      result.segment_idx = place.segment_idx;
      result.offset_bytes = place.offset_bytes;
    }
    results.push_back(result);
  }
  return PackRecords<BlockResult>(results);
}

absl::Status ContextStoreService::Do(const v1::LookupRequest& request,
                                     v1::LookupResponse* response) {
  KVT_ASSIGN_OR_RETURN(const core::SessionId session, CoreSession(request.session_id()));
  KVT_ASSIGN_OR_RETURN(const std::vector<Key> keys, ParseKeys(request.keys()));
  KVT_ASSIGN_OR_RETURN(
      const core::LookupResult result,
      service_.store->Run([&](core::StoreCore& core, core::TimeMs, core::Effects*) {
        return core.Lookup(session, request.namespace_id(), keys);
      }));
  response->set_hit_count(static_cast<uint32_t>(result.residency.size()));
  response->set_residency(PackRecords<uint8_t>(result.residency));
  return absl::OkStatus();
}

ContextStoreService::Unary* ContextStoreService::Reserve(Context* context,
                                                         const v1::ReserveRequest* request,
                                                         v1::ReserveResponse* response) {
  const auto session = AdmitCall(service_, *context, request->session_id());
  if (!session.ok()) return FinishNow(context, session.status(), service_.epoch, response);
  if (service_.is_tcp()) return FinishNow(context, NotMapped(), service_.epoch, response);
  const absl::StatusOr<ReserveArguments> arguments = ParseReserve(*request);
  if (!arguments.ok()) return FinishNow(context, arguments.status(), service_.epoch, response);
  response->set_epoch(service_.epoch);
  auto* call = new WaitingCall(context);  // deletes itself
  const core::TimeMs deadline_ms = DeadlineMs(*context, kDefaultTransferDeadlineMs);
  const core::NamespaceIdx ns = request->namespace_id();
  auto done = [this, call, response, ns, keys = arguments->keys,
               session = session->core_id](absl::StatusOr<std::vector<core::PlacedBlock>> blocks) {
    if (!blocks.ok()) {
      call->Answer(blocks.status());
      return;
    }
    response->set_results(PackPlaces(*blocks));
    std::vector<Key> reserved;
    for (size_t i = 0; i < keys.size(); ++i) {
      if ((*blocks)[i].status == BlockStatus::kOk) reserved.push_back(keys[i]);
    }
    call->Answer(absl::OkStatus(), [this, session, ns, reserved = std::move(reserved)] {
      // An error means that the session is gone, and the slots with it.
      service_.store->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
        core.Abort(session, ns, reserved, now_ms, effects).IgnoreError();
      });
    });
  };
  service_.store->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
    core.Reserve(session->core_id, ns, arguments->parent, arguments->keys, arguments->tier,
                 deadline_ms, now_ms, std::move(done), effects);
  });
  return call;
}

absl::Status ContextStoreService::Do(const v1::CommitRequest& request,
                                     v1::CommitResponse* response) {
  KVT_ASSIGN_OR_RETURN(const core::SessionId session, CoreSession(request.session_id()));
  KVT_ASSIGN_OR_RETURN(const std::vector<Key> keys, ParseKeys(request.keys()));
  KVT_ASSIGN_OR_RETURN(const std::vector<uint32_t> crc32cs,
                       ParseCrcs(request.crc32cs(), keys.size()));
  KVT_ASSIGN_OR_RETURN(
      const std::vector<BlockStatus> statuses,
      service_.store->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
        return core.Commit(session, request.namespace_id(), keys, crc32cs, now_ms, effects);
      }));
  response->set_statuses(PackStatuses(statuses));
  return absl::OkStatus();
}

absl::Status ContextStoreService::Do(const v1::AbortRequest& request, v1::AbortResponse*) {
  KVT_ASSIGN_OR_RETURN(const core::SessionId session, CoreSession(request.session_id()));
  KVT_ASSIGN_OR_RETURN(const std::vector<Key> keys, ParseKeys(request.keys()));
  return service_.store->Run(
      [&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
        return core.Abort(session, request.namespace_id(), keys, now_ms, effects);
      });
}

ContextStoreService::Unary* ContextStoreService::Acquire(Context* context,
                                                         const v1::AcquireRequest* request,
                                                         v1::AcquireResponse* response) {
  const auto session = AdmitCall(service_, *context, request->session_id());
  if (!session.ok()) return FinishNow(context, session.status(), service_.epoch, response);
  if (service_.is_tcp()) return FinishNow(context, NotMapped(), service_.epoch, response);
  const absl::StatusOr<std::vector<Key>> keys = ParseKeys(request->keys());
  if (!keys.ok()) return FinishNow(context, keys.status(), service_.epoch, response);
  response->set_epoch(service_.epoch);
  auto* call = new WaitingCall(context);  // deletes itself
  const core::TimeMs deadline_ms = DeadlineMs(*context, kDefaultTransferDeadlineMs);
  auto done = [this, call, response,
               session = session->core_id](absl::StatusOr<core::AcquireResult> result) {
    if (!result.ok()) {
      call->Answer(result.status());
      return;
    }
    std::vector<uint32_t> crc32cs;
    for (const core::PlacedBlock& block : result->blocks) {
      crc32cs.push_back(block.status == BlockStatus::kOk ? block.crc32c : 0);
    }
    response->set_lease_id(result->lease);
    response->set_results(PackPlaces(result->blocks));
    response->set_crc32cs(PackRecords<uint32_t>(crc32cs));
    call->Answer(absl::OkStatus(), [this, session, lease = result->lease] {
      // An error means that the session is gone, and the lease with it.
      service_.store->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
        core.Release(session, {&lease, 1}, now_ms, effects).IgnoreError();
      });
    });
  };
  service_.store->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
    core.Acquire(session->core_id, request->namespace_id(), *keys, deadline_ms, now_ms,
                 std::move(done), effects);
  });
  return call;
}

absl::Status ContextStoreService::Do(const v1::ReleaseRequest& request, v1::ReleaseResponse*) {
  KVT_ASSIGN_OR_RETURN(const core::SessionId session, CoreSession(request.session_id()));
  if (request.lease_ids_size() > kLeasesPerCallMax) {
    return WithReason(
        Invalid("lease_ids: %d, more than %d", request.lease_ids_size(), kLeasesPerCallMax),
        reason::kBadArgument);
  }
  const std::vector<core::LeaseId> leases(request.lease_ids().begin(), request.lease_ids().end());
  return service_.store->Run(
      [&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
        return core.Release(session, leases, now_ms, effects);
      });
}

absl::Status ContextStoreService::Do(const v1::PrefetchRequest& request,
                                     v1::PrefetchResponse* response) {
  KVT_ASSIGN_OR_RETURN(const core::SessionId session, CoreSession(request.session_id()));
  KVT_ASSIGN_OR_RETURN(const std::vector<Key> keys, ParseKeys(request.keys()));
  KVT_ASSIGN_OR_RETURN(
      const core::TicketState state,
      service_.store->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
        return core.Prefetch(
            session, request.namespace_id(), keys,
            {.needed_in_ms = request.needed_in_ms(),
             .prefill_tokens_per_second = static_cast<double>(request.prefill_tokens_per_second())},
            now_ms, effects);
      }));
  FillTicket(state, response->mutable_ticket());
  return absl::OkStatus();
}

absl::Status ContextStoreService::Do(const v1::GetTicketRequest& request,
                                     v1::GetTicketResponse* response) {
  KVT_ASSIGN_OR_RETURN(const core::SessionId session, CoreSession(request.session_id()));
  KVT_ASSIGN_OR_RETURN(
      const core::TicketState state,
      service_.store->Run([&](core::StoreCore& core, core::TimeMs, core::Effects*) {
        return core.GetTicket(session, request.ticket_id());
      }));
  FillTicket(state, response->mutable_ticket());
  return absl::OkStatus();
}

absl::Status ContextStoreService::Do(const v1::CancelPrefetchRequest& request,
                                     v1::CancelPrefetchResponse*) {
  KVT_ASSIGN_OR_RETURN(const core::SessionId session, CoreSession(request.session_id()));
  return service_.store->Run([&](core::StoreCore& core, core::TimeMs, core::Effects*) {
    return core.CancelTicket(session, request.ticket_id());
  });
}

absl::Status ContextStoreService::Do(const v1::ReportBadRequest& request,
                                     v1::ReportBadResponse* response) {
  KVT_ASSIGN_OR_RETURN(const core::SessionId session, CoreSession(request.session_id()));
  KVT_ASSIGN_OR_RETURN(const std::vector<Key> keys, ParseKeys(request.keys()));
  KVT_ASSIGN_OR_RETURN(
      const uint32_t dropped_count,
      service_.store->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
        return core.ReportBad(session, request.namespace_id(), keys, now_ms, effects);
      }));
  response->set_dropped_count(dropped_count);
  return absl::OkStatus();
}

ContextStoreService::Unary* ContextStoreService::Lookup(Context* context,
                                                        const v1::LookupRequest* request,
                                                        v1::LookupResponse* response) {
  return AnswerNow(context, *request, response);
}

ContextStoreService::Unary* ContextStoreService::Commit(Context* context,
                                                        const v1::CommitRequest* request,
                                                        v1::CommitResponse* response) {
  return AnswerNow(context, *request, response);
}

ContextStoreService::Unary* ContextStoreService::Abort(Context* context,
                                                       const v1::AbortRequest* request,
                                                       v1::AbortResponse* response) {
  return AnswerNow(context, *request, response);
}

ContextStoreService::Unary* ContextStoreService::Release(Context* context,
                                                         const v1::ReleaseRequest* request,
                                                         v1::ReleaseResponse* response) {
  return AnswerNow(context, *request, response);
}

ContextStoreService::Unary* ContextStoreService::Prefetch(Context* context,
                                                          const v1::PrefetchRequest* request,
                                                          v1::PrefetchResponse* response) {
  return AnswerNow(context, *request, response);
}

ContextStoreService::Unary* ContextStoreService::GetTicket(Context* context,
                                                           const v1::GetTicketRequest* request,
                                                           v1::GetTicketResponse* response) {
  return AnswerNow(context, *request, response);
}

ContextStoreService::Unary* ContextStoreService::CancelPrefetch(
    Context* context, const v1::CancelPrefetchRequest* request,
    v1::CancelPrefetchResponse* response) {
  return AnswerNow(context, *request, response);
}

ContextStoreService::Unary* ContextStoreService::ReportBad(Context* context,
                                                           const v1::ReportBadRequest* request,
                                                           v1::ReportBadResponse* response) {
  return AnswerNow(context, *request, response);
}

}  // namespace kvtier
