// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/replay.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "proto/base/check.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"

namespace kvtier::ctl {
namespace {

using std::chrono::steady_clock;

constexpr auto kRetryPause = std::chrono::milliseconds(20);
constexpr auto kTicketPoll = std::chrono::milliseconds(2);
constexpr uint64_t kSampleEveryRequests = 32;

constexpr std::array<const char*, policy::kTierCount> kTierNames = {"hbm", "host", "nvme"};

// Errors that a daemon which died, or came back without what it knew, explains.
bool FromRestart(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
      return true;
    case absl::StatusCode::kNotFound:
      return ReasonOf(status) == reason::kContextUnknown;
    case absl::StatusCode::kFailedPrecondition:
      return ReasonOf(status) == reason::kNamespaceUnknown;
    default:
      return false;
  }
}

policy::TierIdx FastestTier(uint8_t residency) {
  if ((residency & kResidentHbm) != 0) return sim::kHbm;
  if ((residency & kResidentHost) != 0) return sim::kHost;
  return sim::kNvme;
}

}  // namespace

template <typename Call>
auto Replayer::Timed(ReplayCall kind, Call call) {
  const auto begin = steady_clock::now();
  auto result = call();
  report_.latencies[static_cast<size_t>(kind)].Record(steady_clock::now() - begin);
  return result;
}

Replayer::Replayer(const sim::Trace* trace, client::AdminClient* admin, ReplayOptions options)
    : trace_(trace),
      admin_(admin),
      options_(std::move(options)),
      generator_(options_.layout.shape),
      oracle_(&generator_, trace->blocks.size(), options_.oracle_cache_bytes),
      contexts_(trace->contexts.size()),
      start_(steady_clock::now()) {}

absl::StatusOr<std::unique_ptr<Replayer>> Replayer::Create(const sim::Trace* trace,
                                                           client::AdminClient* admin,
                                                           ReplayOptions options) {
  auto replayer = std::unique_ptr<Replayer>(new Replayer(trace, admin, std::move(options)));
  KVT_ASSIGN_OR_RETURN(
      replayer->client_,
      client::Client::Connect({.run_dir = replayer->options_.run_dir,
                               .client_name = "kvtierctl replay",
                               .transfer_timeout_ms = replayer->options_.transfer_timeout_ms,
                               .reconnect_timeout_ms = replayer->options_.restart_timeout_ms}));
  const std::string salt = absl::StrFormat("replay-%d", replayer->options_.seed);
  KVT_ASSIGN_OR_RETURN(replayer->namespace_, replayer->client_->RegisterLayout(
                                                 LayoutOf(replayer->options_.layout), "", salt));
  replayer->keys_.reserve(trace->blocks.size());
  for (const sim::TraceBlock& block : trace->blocks) {
    std::optional<Key> parent;
    if (block.parent != sim::kNoBlock) parent = replayer->keys_[block.parent];
    replayer->keys_.push_back(
        HashBlock(replayer->namespace_.hash, parent,
                  TokensOfHashId(block.hash_id, replayer->options_.layout.shape.block_tokens)));
  }
  for (size_t i = 0; i < replayer->contexts_.size(); ++i) {
    replayer->contexts_[i].name = absl::StrFormat("agent-%05d", i);
  }
  replayer->SampleTraffic();
  return replayer;
}

std::vector<Key> Replayer::KeysOf(std::span<const sim::BlockRef> chain) const {
  std::vector<Key> keys;
  keys.reserve(chain.size());
  for (const sim::BlockRef block : chain) keys.push_back(keys_[block]);
  return keys;
}

void Replayer::SampleTraffic() {
  // A daemon that is gone just now is sampled the next time.
  if (const auto tiers = admin_->GetTiers(); tiers.ok()) traffic_.Add(*tiers);
}

void Replayer::WaitUntil(uint64_t at_ms) {
  if (options_.speed <= 0) return;
  if (!first_event_ms_) first_event_ms_ = at_ms;
  const double wait_ms = static_cast<double>(at_ms - *first_event_ms_) / options_.speed;
  std::this_thread::sleep_until(start_ +
                                std::chrono::microseconds(static_cast<int64_t>(wait_ms * 1000)));
}

absl::Status Replayer::OverRestarts(const std::function<absl::Status()>& step) {
  const auto deadline =
      steady_clock::now() + std::chrono::milliseconds(options_.restart_timeout_ms);
  while (true) {
    absl::Status status = step();
    if (status.ok() || !FromRestart(status) || steady_clock::now() >= deadline) return status;
    // The daemon may not know any context now, though its epoch is the one they were made in.
    if (status.code() == absl::StatusCode::kNotFound) {
      for (ContextState& context : contexts_) context.epoch = 0;
    }
    ++report_.retry_count;
    std::this_thread::sleep_for(kRetryPause);
  }
}

absl::Status Replayer::Play(std::span<const sim::TraceEvent> events) {
  for (const sim::TraceEvent& event : events) {
    WaitUntil(event.at_ms);
    report_.event_ms.push_back(static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::milliseconds>(steady_clock::now() - start_)
            .count()));
    KVT_RETURN_IF_ERROR(PlayEvent(event));
  }
  SampleTraffic();
  return absl::OkStatus();
}

absl::Status Replayer::PlayEvent(const sim::TraceEvent& event) {
  ContextState* context = &contexts_[event.context_idx];
  switch (event.kind) {
    case sim::TraceEventKind::kRequest: {
      const sim::TraceRequest& request = trace_->requests[event.request_idx];
      KVT_RETURN_IF_ERROR(OverRestarts([&] { return ServeOnce(request, event.request_idx); }));
      if (report_.hits.request_count % kSampleEveryRequests == 0) SampleTraffic();
      if (options_.progress) {
        options_.progress(report_.hits.request_count, trace_->requests.size());
      }
      return absl::OkStatus();
    }
    case sim::TraceEventKind::kPause:
      return OverRestarts([&] { return PauseOnce(context, event.next_request_in_ms); });
    case sim::TraceEventKind::kResume:
      return OverRestarts([&] { return ResumeOnce(context); });
    case sim::TraceEventKind::kClose:
      return OverRestarts([&] { return CloseOnce(context); });
  }
  return absl::OkStatus();
}

absl::Status Replayer::Start(ContextState* context, const sim::TraceRequest& request) {
  const uint32_t parent_idx = trace_->contexts[request.context_idx].parent_idx;
  if (parent_idx != sim::kNoContext && !contexts_[parent_idx].closed) {
    ContextState* parent = &contexts_[parent_idx];
    KVT_RETURN_IF_ERROR(Ensure(parent));
    const auto end = std::mismatch(parent->chain.begin(), parent->chain.end(),
                                   request.chain.begin(), request.chain.end());
    const std::vector<sim::BlockRef> shared(parent->chain.begin(), end.first);
    const absl::Status forked = client_
                                    ->ForkContext(namespace_, parent->name, context->name,
                                                  static_cast<uint32_t>(shared.size()))
                                    .status();
    // The name exists when an earlier run was cut short, or an answer was lost: Ensure sets the
    // chain of that context.
    if (!forked.ok() && !absl::IsInvalidArgument(forked)) return forked;
    context->chain = shared;
    if (forked.ok()) context->epoch = client_->epoch();
  }
  context->started = true;
  return absl::OkStatus();
}

absl::Status Replayer::Ensure(ContextState* context) {
  if (context->epoch == client_->epoch()) return absl::OkStatus();
  KVT_RETURN_IF_ERROR(client_->CreateContext(namespace_, context->name).status());
  const uint64_t epoch = client_->epoch();
  const std::vector<Key> keys = KeysOf(context->chain);
  KVT_RETURN_IF_ERROR(client_->AppendContext(namespace_, context->name, 0, keys).status());
  context->epoch = epoch;
  return absl::OkStatus();
}

absl::Status Replayer::SetChain(ContextState* context, std::span<const sim::BlockRef> chain) {
  const auto end =
      std::mismatch(context->chain.begin(), context->chain.end(), chain.begin(), chain.end());
  const auto base_count = static_cast<size_t>(end.second - chain.begin());
  const std::vector<Key> keys = KeysOf(chain.subspan(base_count));
  KVT_RETURN_IF_ERROR(Timed(ReplayCall::kAppend, [&] {
                        return client_->AppendContext(namespace_, context->name,
                                                      static_cast<uint32_t>(base_count), keys);
                      }).status());
  context->chain.assign(chain.begin(), chain.end());
  return absl::OkStatus();
}

absl::StatusOr<std::vector<policy::TierIdx>> Replayer::LookUp(std::span<const Key> keys) {
  KVT_ASSIGN_OR_RETURN(const std::vector<uint8_t> residency, Timed(ReplayCall::kLookup, [&] {
                         return client_->Lookup(namespace_, keys);
                       }));
  std::vector<policy::TierIdx> tiers;
  for (const uint8_t bits : residency) tiers.push_back(FastestTier(bits));
  return tiers;
}

absl::Status Replayer::Check(sim::BlockRef block, const Key& key,
                             const client::MappedBlock& mapped) {
  if (mapped.bytes.size() != generator_.block_bytes()) {
    return Internal("block %s: %d bytes are mapped, not %d", key.Hex(), mapped.bytes.size(),
                    generator_.block_bytes());
  }
  const std::optional<uint64_t> wrong = oracle_.FirstWrongByte(block, key, mapped.bytes);
  if (!wrong) {
    ++report_.verified_block_count;
    return absl::OkStatus();
  }
  ++report_.wrong_block_count;
  std::string message = absl::StrFormat("WRONG BYTES: block %s on %s differs first at byte %d",
                                        key.Hex(), kTierNames[mapped.tier - 1], *wrong);
  if (const absl::Status report = client_->ReportBad(namespace_, std::span(&key, 1));
      !report.ok()) {
    message += "; reporting it failed: " + report.ToString();
  }
  return absl::DataLossError(message);
}

absl::StatusOr<Replayer::Checked> Replayer::AcquireAndCheck(std::span<const sim::BlockRef> chain,
                                                            std::span<const Key> keys) {
  Checked checked;
  if (keys.empty()) return checked;
  KVT_ASSIGN_OR_RETURN(checked.lease, Timed(ReplayCall::kAcquire,
                                            [&] { return client_->Acquire(namespace_, keys); }));
  const std::span<const client::MappedBlock> blocks = checked.lease.blocks();
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].status != BlockStatus::kOk) continue;
    KVT_RETURN_IF_ERROR(Check(chain[i], keys[i], blocks[i]));
  }
  checked.ok_prefix_count = checked.lease.ok_prefix_count();
  return checked;
}

absl::StatusOr<size_t> Replayer::FillFrom(size_t first, std::span<const Key> keys) {
  while (first < keys.size()) {
    const auto batch = keys.subspan(
        first, std::min<size_t>(options_.rules.commit_batch_blocks, keys.size() - first));
    std::optional<Key> parent;
    if (first > 0) parent = keys[first - 1];
    KVT_ASSIGN_OR_RETURN(const client::Fill fill, Timed(ReplayCall::kReserve, [&] {
                           return client_->Reserve(namespace_, parent, batch);
                         }));
    for (size_t i = 0; i < fill.blocks.size(); ++i) {
      if (fill.blocks[i].status == BlockStatus::kOk) {
        generator_.SealBlock(batch[i], fill.blocks[i].bytes);
      }
    }
    KVT_ASSIGN_OR_RETURN(const std::vector<BlockStatus> statuses, Timed(ReplayCall::kCommit, [&] {
                           return client_->Commit(namespace_, fill);
                         }));
    for (size_t i = 0; i < statuses.size(); ++i) {
      if (statuses[i] == BlockStatus::kOk) NoteCommitted(batch[i]);
      if (statuses[i] != BlockStatus::kOk && statuses[i] != BlockStatus::kExists) return first;
      ++first;
    }
  }
  return first;
}

absl::Status Replayer::CheckDecode(uint64_t request_number, std::span<const Key> keys,
                                   const Checked& head, const Checked& rest) {
  std::vector<const std::byte*> table;
  for (const Checked* part : {&head, &rest}) {
    for (size_t i = 0; i < part->ok_prefix_count; ++i) {
      table.push_back(part->lease.blocks()[i].bytes.data());
    }
  }
  const uint64_t seed = SplitMix64(options_.seed, request_number);
  const auto layer_idx = static_cast<uint32_t>(seed % options_.layout.shape.layer_count);
  KVT_ASSIGN_OR_RETURN(const double error,
                       DecodeError(generator_, {.layer_idx = layer_idx,
                                                .seed = seed,
                                                .keys = keys.first(table.size()),
                                                .table = table}));
  ++report_.decode_check_count;
  report_.decode_error_max = std::max(report_.decode_error_max, error);
  if (error > kDecodeTolerance) {
    return DataLoss("WRONG DECODE: request %d, layer %d: error %g is above %g", request_number,
                    layer_idx, error, kDecodeTolerance);
  }
  return absl::OkStatus();
}

void Replayer::NoteCommitted(const Key& key) {
  ++report_.committed_block_count;
  if (committed_epoch_ != client_->epoch()) committed_in_epoch_.clear();
  committed_epoch_ = client_->epoch();
  committed_in_epoch_.insert(key);
}

void Replayer::CountRequest(const sim::TraceRequest& request, uint64_t epoch,
                            std::span<const Key> keys, std::span<const policy::TierIdx> found,
                            size_t hit_count) {
  sim::SimHits& hits = report_.hits;
  ++hits.request_count;
  hits.token_count += request.token_count;
  auto place = std::find_if(report_.epochs.begin(), report_.epochs.end(),
                            [epoch](const auto& entry) { return entry.first == epoch; });
  if (place == report_.epochs.end()) {
    place = report_.epochs.insert(place, {epoch, EpochReport()});
  }
  ++place->second.request_count;
  place->second.token_count += request.token_count;
  for (size_t i = 0; i < hit_count; ++i) {
    const uint64_t token_count = trace_->TokensOfBlock(request, i);
    hits.tier_hit_token_count[found[i]] += token_count;
    if (found[i] == sim::kNvme) place->second.nvme_hit_token_count += token_count;
    if (committed_epoch_ != epoch || !committed_in_epoch_.contains(keys[i])) {
      place->second.recovered_hit_token_count += token_count;
    }
  }
  report_.undelivered_block_count += found.size() - hit_count;
}

absl::Status Replayer::ServeOnce(const sim::TraceRequest& request, uint64_t request_number) {
  ContextState* context = &contexts_[request.context_idx];
  if (!context->started) KVT_RETURN_IF_ERROR(Start(context, request));
  KVT_RETURN_IF_ERROR(Ensure(context));
  const std::span<const sim::BlockRef> chain(request.chain);
  const std::vector<Key> keys = KeysOf(chain);
  KVT_ASSIGN_OR_RETURN(const std::vector<policy::TierIdx> found, LookUp(keys));
  const uint64_t epoch = client_->epoch();
  KVT_ASSIGN_OR_RETURN(const Checked head, AcquireAndCheck(chain.first(found.size()),
                                                           std::span(keys).first(found.size())));
  const size_t hit_count = head.ok_prefix_count;
  KVT_ASSIGN_OR_RETURN(const size_t stored_count, FillFrom(hit_count, keys));
  KVT_RETURN_IF_ERROR(SetChain(context, chain.first(stored_count)));
  if (options_.rules.DecodesAt(request_number)) {
    const size_t rest_count = stored_count - hit_count;
    KVT_ASSIGN_OR_RETURN(const Checked rest,
                         AcquireAndCheck(chain.subspan(hit_count, rest_count),
                                         std::span(keys).subspan(hit_count, rest_count)));
    KVT_RETURN_IF_ERROR(CheckDecode(request_number, keys, head, rest));
  }
  CountRequest(request, epoch, keys, found, hit_count);
  report_.hits.exhausted_block_count += chain.size() - stored_count;
  return absl::OkStatus();
}

absl::Status Replayer::PauseOnce(ContextState* context, uint64_t next_request_in_ms) {
  KVT_RETURN_IF_ERROR(Ensure(context));
  const auto expected_ms =
      static_cast<uint32_t>(std::min<uint64_t>(next_request_in_ms, UINT32_MAX));
  KVT_ASSIGN_OR_RETURN(const client::PauseResult result, Timed(ReplayCall::kPause, [&] {
                         return client_->PauseContext(namespace_, context->name, expected_ms);
                       }));
  ++report_.pause_count;
  report_.pause_freed_bytes += result.freed_bytes;
  report_.pause_resident_bytes += result.resident_bytes;
  return absl::OkStatus();
}

absl::Status Replayer::ResumeOnce(ContextState* context) {
  KVT_RETURN_IF_ERROR(Ensure(context));
  KVT_ASSIGN_OR_RETURN(const client::Ticket ticket, Timed(ReplayCall::kResume, [&] {
                         return client_->ResumeContext(
                             namespace_, context->name,
                             static_cast<uint32_t>(options_.rules.schedule.resume_ahead_ms));
                       }));
  ++report_.resume_count;
  // In a hurry, the time between resume and request is only as long as the promotion takes.
  return options_.speed > 0 ? absl::OkStatus() : WaitForTicket(ticket);
}

absl::Status Replayer::WaitForTicket(const client::Ticket& ticket) {
  const auto deadline =
      steady_clock::now() + std::chrono::milliseconds(options_.transfer_timeout_ms);
  client::Ticket now = ticket;
  while (now.ticket_id != 0 && !now.done && steady_clock::now() < deadline) {
    std::this_thread::sleep_for(kTicketPoll);
    absl::StatusOr<client::Ticket> next = client_->GetTicket(ticket.ticket_id);
    // Tickets end with their session; the request to come sees what was promoted.
    if (absl::IsNotFound(next.status())) return absl::OkStatus();
    KVT_RETURN_IF_ERROR(next.status());
    now = *next;
  }
  return absl::OkStatus();
}

absl::Status Replayer::CloseOnce(ContextState* context) {
  // A restart closes every context; there is nothing to close again.
  if (context->epoch == client_->epoch()) {
    const auto closed = client_->CloseContext(namespace_, context->name, /*drop=*/false);
    if (!closed.ok() && !absl::IsNotFound(closed.status())) return closed.status();
  }
  context->closed = true;
  context->epoch = 0;
  return absl::OkStatus();
}

absl::StatusOr<ResumeReport> Replayer::ResumeAll() {
  ResumeReport report;
  for (ContextState& context : contexts_) {
    if (!context.started || context.closed) continue;
    KVT_RETURN_IF_ERROR(OverRestarts([&] { return ResumeAndReadOnce(&context, &report); }));
  }
  SampleTraffic();
  return report;
}

absl::Status Replayer::ResumeAndReadOnce(ContextState* context, ResumeReport* report) {
  KVT_RETURN_IF_ERROR(Ensure(context));
  const std::vector<Key> keys = KeysOf(context->chain);
  KVT_ASSIGN_OR_RETURN(const std::vector<policy::TierIdx> found, LookUp(keys));
  KVT_RETURN_IF_ERROR(ResumeOnce(context));
  const uint64_t verified_before = report_.verified_block_count;
  KVT_ASSIGN_OR_RETURN(const Checked checked,
                       AcquireAndCheck(std::span(context->chain).first(found.size()),
                                       std::span(keys).first(found.size())));
  ++report->context_count;
  report->block_count += keys.size();
  for (const policy::TierIdx tier : found) ++report->tier_block_count[tier];
  report->missing_block_count += keys.size() - found.size();
  report->verified_block_count += report_.verified_block_count - verified_before;
  return PauseOnce(context, 0);
}

ReplayReport Replayer::Report() const {
  ReplayReport report = report_;
  report.client = client_->stats();
  report.links = traffic_.Totals();
  report.wall_seconds = std::chrono::duration<double>(steady_clock::now() - start_).count();
  return report;
}

}  // namespace kvtier::ctl
