// SPDX-License-Identifier: Apache-2.0
#include "client/include/kvtier/client.h"

#include <algorithm>
#include <utility>

#include "client/src/client_impl.h"
#include "client/src/ticket_board.h"

namespace kvtier::client {
namespace {

constexpr size_t kClientNameBytesMax = 128;

absl::Status Check(const ClientOptions& options) {
  if (options.client_name.size() > kClientNameBytesMax) {
    return Invalid("client_name has %d bytes; at most %d", options.client_name.size(),
                   kClientNameBytesMax);
  }
  if (options.control_timeout_ms == 0 || options.transfer_timeout_ms == 0 ||
      options.reconnect_timeout_ms == 0) {
    return Invalid("a timeout of the client is 0 ms; at least 1");
  }
  return absl::OkStatus();
}

}  // namespace

Ticket TicketFrom(const v1::Ticket& ticket, std::shared_ptr<const TicketBoard> board) {
  return {.ticket_id = ticket.ticket_id(),
          .block_count = ticket.block_count(),
          .covered_block_count = ticket.covered_block_count(),
          .ready_block_count = ticket.ready_block_count(),
          .pending_bytes = ticket.pending_bytes(),
          .eta_ms = ticket.eta_ms(),
          .eta_known = ticket.eta_known(),
          .done = ticket.done(),
          .recompute_block_count = ticket.recompute_block_count(),
          .board_slot = ticket.board_slot(),
          .board = std::move(board)};
}

absl::StatusOr<std::vector<uint8_t>> ResidencyFrom(const v1::LookupResponse& response,
                                                   size_t key_count) {
  const std::string& residency = response.residency();
  if (residency.size() != response.hit_count() || residency.size() > key_count) {
    return Internal("the daemon found %d blocks of %d and sent the places of %d",
                    response.hit_count(), key_count, residency.size());
  }
  return std::vector<uint8_t>(residency.begin(), residency.end());
}

TicketPoll Ticket::Poll(uint32_t* moved_block_count) const {
  if (board == nullptr || board->lost()) return TicketPoll::kAsk;
  const std::optional<TicketProgress> shown = board->page().Find(board_slot, ticket_id);
  if (!shown.has_value()) return TicketPoll::kAsk;
  if (moved_block_count != nullptr) *moved_block_count = shown->moved_block_count;
  return shown->done ? TicketPoll::kDone : TicketPoll::kMoving;
}

Client::Client(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Client::~Client() {
  // In a forked child the threads to join do not exist; the parent ends the session.
  if (impl_->forked()) {
    [[maybe_unused]] Impl* const left_as_it_is = impl_.release();
  }
}

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(ClientOptions options) {
  KVT_RETURN_IF_ERROR(Check(options));
  auto impl = std::make_unique<Impl>(std::move(options));
  KVT_RETURN_IF_ERROR(impl->CurrentSession().status());
  return std::unique_ptr<Client>(new Client(std::move(impl)));
}

absl::StatusOr<Namespace> Client::RegisterLayout(const Layout& layout, std::string_view adapter,
                                                 std::string_view salt,
                                                 const HashDomain& hash_domain) {
  return impl_->RegisterLayout(layout, adapter, salt, hash_domain);
}

absl::StatusOr<std::vector<uint8_t>> Client::Lookup(const Namespace& ns,
                                                    std::span<const Key> keys) {
  v1::LookupRequest request;
  request.set_keys(PackKeys(keys));
  KVT_ASSIGN_OR_RETURN(
      const v1::LookupResponse response,
      impl_->Call(&Stub::Lookup, &ns, std::move(request), impl_->options().control_timeout_ms));
  return ResidencyFrom(response, keys.size());
}

absl::StatusOr<Ticket> Client::Prefetch(const Namespace& ns, std::span<const Key> keys) {
  v1::PrefetchRequest request;
  request.set_keys(PackKeys(keys));
  KVT_ASSIGN_OR_RETURN(
      const v1::PrefetchResponse response,
      impl_->Call(&Stub::Prefetch, &ns, std::move(request), impl_->options().control_timeout_ms));
  return TicketFrom(response.ticket(), impl_->Board());
}

absl::StatusOr<Ticket> Client::GetTicket(uint64_t ticket_id) {
  v1::GetTicketRequest request;
  request.set_ticket_id(ticket_id);
  KVT_ASSIGN_OR_RETURN(const v1::GetTicketResponse response,
                       impl_->Call(&Stub::GetTicket, nullptr, std::move(request),
                                   impl_->options().control_timeout_ms));
  return TicketFrom(response.ticket(), impl_->Board());
}

absl::Status Client::CancelPrefetch(uint64_t ticket_id) {
  v1::CancelPrefetchRequest request;
  request.set_ticket_id(ticket_id);
  return impl_
      ->Call(&Stub::CancelPrefetch, nullptr, std::move(request),
             impl_->options().control_timeout_ms)
      .status();
}

absl::StatusOr<uint32_t> Client::CreateContext(const Namespace& ns, std::string_view context) {
  v1::CreateContextRequest request;
  request.set_context(std::string(context));
  KVT_ASSIGN_OR_RETURN(const v1::CreateContextResponse response,
                       impl_->Call(&Stub::CreateContext, &ns, std::move(request),
                                   impl_->options().control_timeout_ms));
  return response.block_count();
}

absl::StatusOr<uint32_t> Client::AppendContext(const Namespace& ns, std::string_view context,
                                               uint32_t base_block_count,
                                               std::span<const Key> keys) {
  v1::AppendContextRequest request;
  request.set_context(std::string(context));
  request.set_base_block_count(base_block_count);
  request.set_keys(PackKeys(keys));
  KVT_ASSIGN_OR_RETURN(const v1::AppendContextResponse response,
                       impl_->Call(&Stub::AppendContext, &ns, std::move(request),
                                   impl_->options().control_timeout_ms));
  return response.block_count();
}

absl::StatusOr<PauseResult> Client::PauseContext(const Namespace& ns, std::string_view context,
                                                 uint32_t expected_resume_ms) {
  v1::PauseContextRequest request;
  request.set_context(std::string(context));
  request.set_expected_resume_ms(expected_resume_ms);
  KVT_ASSIGN_OR_RETURN(const v1::PauseContextResponse response,
                       impl_->Call(&Stub::PauseContext, &ns, std::move(request),
                                   impl_->options().transfer_timeout_ms));
  return PauseResult{.freed_bytes = response.freed_bytes(),
                     .resident_bytes = response.resident_bytes()};
}

absl::StatusOr<Ticket> Client::ResumeContext(const Namespace& ns, std::string_view context,
                                             uint32_t needed_in_ms) {
  v1::ResumeContextRequest request;
  request.set_context(std::string(context));
  request.set_needed_in_ms(needed_in_ms);
  KVT_ASSIGN_OR_RETURN(const v1::ResumeContextResponse response,
                       impl_->Call(&Stub::ResumeContext, &ns, std::move(request),
                                   impl_->options().control_timeout_ms));
  return TicketFrom(response.ticket(), impl_->Board());
}

absl::StatusOr<uint32_t> Client::ForkContext(const Namespace& ns, std::string_view parent,
                                             std::string_view context, uint32_t block_count) {
  v1::ForkContextRequest request;
  request.set_parent_context(std::string(parent));
  request.set_context(std::string(context));
  request.set_block_count(block_count);
  KVT_ASSIGN_OR_RETURN(const v1::ForkContextResponse response,
                       impl_->Call(&Stub::ForkContext, &ns, std::move(request),
                                   impl_->options().control_timeout_ms));
  return response.block_count();
}

absl::StatusOr<uint64_t> Client::CloseContext(const Namespace& ns, std::string_view context,
                                              bool drop) {
  v1::CloseContextRequest request;
  request.set_context(std::string(context));
  request.set_drop(drop);
  KVT_ASSIGN_OR_RETURN(const v1::CloseContextResponse response,
                       impl_->Call(&Stub::CloseContext, &ns, std::move(request),
                                   impl_->options().control_timeout_ms));
  return response.dropped_bytes();
}

uint64_t Client::epoch() const {
  if (impl_->forked()) return 0;
  const auto session = impl_->PeekSession();
  return session == nullptr ? 0 : session->epoch();
}

ClientStats Client::stats() const { return impl_->forked() ? ClientStats{} : impl_->stats(); }

Lease::Lease(Lease&& other) noexcept { *this = std::move(other); }

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this == &other) return *this;
  Release();
  client_ = std::exchange(other.client_, nullptr);
  session_generation_ = other.session_generation_;
  lease_id_ = other.lease_id_;
  blocks_ = std::exchange(other.blocks_, {});
  mappings_ = std::exchange(other.mappings_, {});
  return *this;
}

Lease::~Lease() { Release(); }

size_t Lease::ok_prefix_count() const {
  const auto end = std::find_if(blocks_.begin(), blocks_.end(), [](const MappedBlock& block) {
    return block.status != BlockStatus::kOk;
  });
  return static_cast<size_t>(end - blocks_.begin());
}

void Lease::Release() {
  Client* const client = std::exchange(client_, nullptr);
  // The views go first: from the daemon's answer on, the bytes may be those of other blocks.
  blocks_.clear();
  mappings_.clear();
  if (client != nullptr) client->impl_->ReleaseLease(session_generation_, lease_id_);
}

}  // namespace kvtier::client
