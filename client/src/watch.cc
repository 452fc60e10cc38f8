// SPDX-License-Identifier: Apache-2.0
#include "client/include/kvtier/watch.h"

#include <pthread.h>

#include <deque>
#include <thread>
#include <utility>

#include "client/src/client_impl.h"
#include "proto/base/packed.h"
#include "proto/base/timed_wait.h"

namespace kvtier::client {
namespace {

// Updates that Next has not taken; then the stream is read no further.
constexpr size_t kUpdatesMax = 64;
constexpr absl::Duration kWatchBackoff = absl::Milliseconds(200);

absl::StatusOr<Residency> TierOf(v1::Tier tier) {
  switch (tier) {
    case v1::TIER_HBM:
      return Residency::kHbm;
    case v1::TIER_HOST:
      return Residency::kHost;
    case v1::TIER_NVME:
      return Residency::kNvme;
    default:
      return Internal("the daemon sent tier %d", static_cast<int>(tier));
  }
}

absl::StatusOr<WatchedBlocks> BlocksFrom(const v1::WatchedBlocks& message) {
  WatchedBlocks blocks{.stored = message.stored()};
  KVT_ASSIGN_OR_RETURN(blocks.tier, TierOf(message.tier()));
  KVT_ASSIGN_OR_RETURN(blocks.namespace_hash, NamespaceHash::FromBytes(message.namespace_hash()));
  blocks.block_tokens = message.block_tokens();
  KVT_ASSIGN_OR_RETURN(blocks.keys, UnpackRecords<Key>(message.keys(), "keys"));
  if (!blocks.stored) return blocks;
  KVT_ASSIGN_OR_RETURN(const std::vector<Key> parents,
                       UnpackRecords<Key>(message.parent_keys(), "parent_keys"));
  if (parents.size() != blocks.keys.size()) {
    return Internal("the daemon sent %d parents of %d blocks", parents.size(), blocks.keys.size());
  }
  for (const Key& parent : parents) {
    blocks.parents.push_back(parent == Key{} ? std::nullopt : std::optional(parent));
  }
  return blocks;
}

absl::StatusOr<WatchUpdate> UpdateFrom(const v1::WatchResponse& message) {
  WatchUpdate update{.epoch = message.epoch(), .sequence = message.sequence()};
  update.reset = message.snapshot_begins();
  update.is_snapshot = message.is_snapshot();
  update.lost = message.lost();
  update.complete = !update.lost && (!update.is_snapshot || message.snapshot_ends());
  for (const v1::WatchedBlocks& blocks : message.blocks()) {
    KVT_ASSIGN_OR_RETURN(WatchedBlocks converted, BlocksFrom(blocks));
    update.blocks.push_back(std::move(converted));
  }
  return update;
}

}  // namespace

std::string_view MediumOf(Residency tier) {
  switch (tier) {
    case Residency::kHbm:
      return "GPU";
    case Residency::kHost:
      return "CPU";
    case Residency::kNvme:
      return "STORAGE";
  }
  return "";
}

class Watch::Impl {
 public:
  explicit Impl(Client::Impl* client) : client_(client), thread_([this] { Run(); }) {}

  ~Impl() {
    closing_.Notify();
    {
      absl::MutexLock lock(&mutex_);
      if (context_ != nullptr) context_->TryCancel();
      changed_.NotifyAll();
    }
    thread_.join();
  }

  bool forked() const { return client_->forked(); }

  absl::StatusOr<WatchUpdate> Next(uint32_t timeout_ms) {
    KVT_RETURN_IF_ERROR(client_->CheckProcess());
    absl::MutexLock lock(&mutex_);
    const bool came = changed_.WaitFor(
        mutex_, absl::Milliseconds(timeout_ms),
        [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !updates_.empty(); });
    if (!came) return DeadlineExceeded("no event in %d ms", timeout_ms);
    const auto update = std::move(updates_.front());
    updates_.pop_front();
    changed_.NotifyAll();
    return std::move(*update);
  }

 private:
  void Run() {
    ::pthread_setname_np(::pthread_self(), "kvtier-watch");
    while (!closing_.HasBeenNotified()) {
      const absl::StatusOr<std::shared_ptr<Session>> session = client_->CurrentSession();
      absl::Status status = session.status();
      if (status.ok()) {
        status = ReadStream(**session);
        if (IsSessionLoss(status) || status.code() == absl::StatusCode::kAborted) {
          (*session)->MarkLost();
          // The next session says what has become of it.
          if (!closing_.WaitFor(kWatchBackoff)) continue;
        }
      }
      if (closing_.HasBeenNotified()) return;
      Put(status);
      closing_.WaitFor(kWatchBackoff);
    }
  }

  // Until it ends; never OK.
  absl::Status ReadStream(Session& session) {
    grpc::ClientContext context;
    {
      absl::MutexLock lock(&mutex_);
      context_ = &context;
    }
    if (closing_.HasBeenNotified()) context.TryCancel();
    v1::WatchRequest request;
    request.set_session_id(session.session_id());
    request.set_after_epoch(epoch_);
    request.set_after_sequence(sequence_);
    const auto stream = session.stub().Watch(&context, request);
    absl::Status status;
    v1::WatchResponse message;
    while (status.ok() && stream->Read(&message)) status = OnMessage(message);
    if (!status.ok()) context.TryCancel();
    const absl::Status ended = FromGrpc(stream->Finish());
    {
      absl::MutexLock lock(&mutex_);
      context_ = nullptr;
    }
    if (!status.ok()) return status;
    return ended.ok() ? Unavailable("the daemon ended the watch") : ended;
  }

  absl::Status OnMessage(const v1::WatchResponse& message) {
    // A snapshot can be gone on from at its end alone.
    epoch_ = 0;
    absl::StatusOr<WatchUpdate> update = UpdateFrom(message);
    if (!update.ok()) return Internal("%s", update.status().message());
    if (update->complete) {
      epoch_ = update->epoch;
      sequence_ = update->sequence;
    }
    Put(*std::move(update));
    return absl::OkStatus();
  }

  void Put(absl::StatusOr<WatchUpdate> update) {
    absl::MutexLock lock(&mutex_);
    // One error says it.
    if (!update.ok() && !updates_.empty()) return;
    while (updates_.size() >= kUpdatesMax) {
      if (closing_.HasBeenNotified()) return;
      changed_.WaitFor(mutex_, absl::Seconds(1), [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return updates_.size() < kUpdatesMax || closing_.HasBeenNotified();
      });
    }
    updates_.push_back(std::make_unique<absl::StatusOr<WatchUpdate>>(std::move(update)));
    changed_.NotifyAll();
  }

  Client::Impl* const client_;
  TimedNotification closing_;
  // Where to go on; the thread's. An epoch of 0: from the beginning.
  uint64_t epoch_ = 0;
  uint64_t sequence_ = 0;

  absl::Mutex mutex_;
  TimedCondition changed_;
  std::deque<std::unique_ptr<absl::StatusOr<WatchUpdate>>> updates_ ABSL_GUARDED_BY(mutex_);
  // Of the call in progress, or null.
  grpc::ClientContext* context_ ABSL_GUARDED_BY(mutex_) = nullptr;

  // Last, since it uses the others.
  std::jthread thread_;
};

Watch::Watch(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Watch::~Watch() {
  // In a forked child there is no thread to join.
  if (impl_->forked()) {
    [[maybe_unused]] Impl* const left_as_it_is = impl_.release();
  }
}

absl::StatusOr<std::unique_ptr<Watch>> Watch::Start(Client* client) {
  KVT_RETURN_IF_ERROR(client->impl_->CheckProcess());
  return std::unique_ptr<Watch>(new Watch(std::make_unique<Impl>(client->impl_.get())));
}

absl::StatusOr<WatchUpdate> Watch::Next(uint32_t timeout_ms) { return impl_->Next(timeout_ms); }

}  // namespace kvtier::client
