// SPDX-License-Identifier: Apache-2.0
#include "daemon/watch_stream.h"

#include <string>
#include <utility>
#include <vector>

#include "daemon/call_admission.h"
#include "daemon/requests.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"
#include "proto/rpc/grpc_status.h"

namespace kvtier {
namespace {

constexpr size_t kWatchersMax = 64;
// In one message; of 130 bytes each at most.
constexpr size_t kEventsPerMessageMax = 2048;
// Some tens of microseconds under the core's lock.
constexpr size_t kSnapshotStep = 4096;

}  // namespace

WatchStream* WatchStream::Start(const ServiceContext& service,
                                const grpc::CallbackServerContext& context,
                                const v1::WatchRequest& request) {
  auto stream = std::make_shared<WatchStream>(service);
  stream->self_ = stream;
  absl::Status begun;
  if (service.watch_calls->count() >= kWatchersMax) {
    begun = WithReason(Exhausted("%d calls are watching, which is the limit", kWatchersMax),
                       reason::kLimitReached);
  } else {
    begun = stream->Begin(context, request);
  }
  if (!begun.ok()) {
    stream->RequestFinish(begun);
    return stream.get();
  }
  service.watch_calls->Add(stream);
  return stream.get();
}

absl::Status WatchStream::Begin(const grpc::CallbackServerContext& context,
                                const v1::WatchRequest& request) {
  KVT_ASSIGN_OR_RETURN(const SessionTable::Session session,
                       AdmitCall(service_, context, request.session_id()));
  session_ = session.core_id;
  const bool resumes = request.after_epoch() == service_.epoch;
  return service_.store->Run(
      [&](core::StoreCore& core, core::TimeMs, core::Effects*) -> absl::Status {
        KVT_ASSIGN_OR_RETURN(sequence_, core.BeginWatch(session_));
        if (!resumes) {
          snapshot_position_ = 0;
          return absl::OkStatus();
        }
        // If they are lost the first message says so.
        sequence_ = request.after_sequence();
        return absl::OkStatus();
      });
}

absl::StatusOr<bool> WatchStream::FillMessage() {
  message_.Clear();
  message_.set_epoch(service_.epoch);
  return snapshot_position_.has_value() ? FillWithSnapshot() : FillWithEvents();
}

absl::StatusOr<bool> WatchStream::FillWithSnapshot() {
  KVT_ASSIGN_OR_RETURN(
      const core::WatchedSnapshot snapshot,
      service_.store->Run([&](core::StoreCore& core, core::TimeMs, core::Effects*) {
        return core.ReadSnapshot(session_, *snapshot_position_, kSnapshotStep);
      }));
  message_.set_sequence(sequence_);
  message_.set_is_snapshot(true);
  message_.set_snapshot_begins(*snapshot_position_ == 0);
  message_.set_snapshot_ends(snapshot.done);
  AddBlocks(snapshot.events);
  snapshot_position_ = snapshot.position;
  if (snapshot.done) snapshot_position_.reset();
  return true;
}

absl::StatusOr<bool> WatchStream::FillWithEvents() {
  core::WatchedEvents events;
  KVT_RETURN_IF_ERROR(
      service_.store->Run([&](core::StoreCore& core, core::TimeMs, core::Effects*) -> absl::Status {
        KVT_ASSIGN_OR_RETURN(events, core.ReadEvents(session_, sequence_, kEventsPerMessageMax));
        if (!events.lost) return absl::OkStatus();
        KVT_ASSIGN_OR_RETURN(events.sequence, core.BeginWatch(session_));
        return absl::OkStatus();
      }));
  if (!events.lost && events.events.empty()) return false;
  sequence_ = events.sequence;
  if (events.lost) snapshot_position_ = 0;
  message_.set_sequence(sequence_);
  message_.set_lost(events.lost);
  AddBlocks(events.events);
  return true;
}

void WatchStream::AddBlocks(const std::vector<core::BlockEvent>& events) {
  v1::WatchedBlocks* blocks = nullptr;
  const core::BlockEvent* last = nullptr;
  for (const core::BlockEvent& event : events) {
    const bool same = last != nullptr && event.is_stored == last->is_stored &&
                      event.tier == last->tier && event.namespace_hash == last->namespace_hash;
    if (!same) {
      blocks = message_.add_blocks();
      blocks->set_stored(event.is_stored);
      blocks->set_tier(TierToProto(event.tier));
      blocks->set_namespace_hash(std::string(event.namespace_hash.AsBytes()));
      blocks->set_block_tokens(event.block_tokens);
    }
    blocks->mutable_keys()->append(event.key.AsBytes());
    if (event.is_stored) {
      blocks->mutable_parent_keys()->append(event.parent.value_or(Key{}).AsBytes());
    }
    last = &event;
  }
}

bool WatchStream::TakeTurn() {
  absl::MutexLock lock(&mutex_);
  if (busy_ || finish_status_.has_value()) return false;
  busy_ = true;
  return true;
}

void WatchStream::Advance() {
  const absl::StatusOr<bool> filled = FillMessage();
  if (filled.ok() && *filled) {
    StartWrite(&message_);
    return;
  }
  absl::Status status = filled.status();
  {
    absl::MutexLock lock(&mutex_);
    busy_ = false;
    if (status.ok() && !finish_status_.has_value()) return;
    if (finish_status_.has_value()) status = *finish_status_;
    finish_status_ = status;
    if (std::exchange(finished_, true)) return;
  }
  Finish(ToGrpc(status));
}

void WatchStream::RequestFinish(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    if (finish_status_.has_value()) return;
    finish_status_ = status;
    if (busy_) return;
    finished_ = true;
  }
  Finish(ToGrpc(status));
}

void WatchStream::OnWriteDone(bool ok) {
  absl::Status status = absl::CancelledError("the stream is closed");
  {
    absl::MutexLock lock(&mutex_);
    if (ok && !finish_status_.has_value()) {
      // Still its turn.
    } else {
      busy_ = false;
      if (finish_status_.has_value()) status = *finish_status_;
      finish_status_ = status;
      if (std::exchange(finished_, true)) return;
      ok = false;
    }
  }
  if (ok) {
    Advance();
  } else {
    Finish(ToGrpc(status));
  }
}

void WatchStream::OnBeat(uint64_t /*now_ms*/) {
  if (TakeTurn()) Advance();
}

void WatchStream::OnCancel() {
  RequestFinish(absl::CancelledError("the client closed the stream"));
}

void WatchStream::OnDone() {
  service_.watch_calls->Remove(this);
  // May be the last reference.
  const std::shared_ptr<WatchStream> self = std::move(self_);
}

void WatchStream::OnDrain() {
  RequestFinish(WithReason(Unavailable("the daemon is stopping"), reason::kDraining));
}

}  // namespace kvtier
