// SPDX-License-Identifier: Apache-2.0
//
// kvtier/kvtier.h on top of kvtier/client.h.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "kvtier/client.h"
#include "kvtier/kvtier.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"
#include "proto/base/ticket_board.h"
#include "proto/base/version.h"

using kvtier::BlockStatus;
using kvtier::Key;
using kvtier::client::Client;
using kvtier::client::Fill;
using kvtier::client::Lease;
using kvtier::client::MappedBlock;
using kvtier::client::Namespace;
using kvtier::client::Ticket;
using kvtier::client::TicketPoll;

struct kvtier_client {
  // The tickets that were given out, by their slots. Thread-safe.
  class Tickets {
   public:
    void Add(const Ticket& ticket) {
      absl::MutexLock lock(&mutex_);
      last_[ticket.board_slot % last_.size()] = ticket;
    }
    Ticket Find(uint64_t ticket_id) const {
      absl::MutexLock lock(&mutex_);
      for (const Ticket& ticket : last_) {
        if (ticket.ticket_id == ticket_id) return ticket;
      }
      return {};
    }

   private:
    mutable absl::Mutex mutex_;
    std::array<Ticket, kvtier::kTicketSlotCount> last_ ABSL_GUARDED_BY(mutex_);
  };

  std::unique_ptr<Client> client;
  Tickets tickets;
};
struct kvtier_fill {
  Fill fill;
};
struct kvtier_lease {
  std::vector<Key> keys;
  Lease lease;
};

namespace {

static_assert(sizeof(kvtier_key) == Key::kBytes);
static_assert(sizeof(kvtier_error) == 512);
static_assert(sizeof(kvtier_namespace) == 72);
static_assert(sizeof(kvtier_block) == 32);
static_assert(sizeof(kvtier_ticket) == 40);
static_assert(KVTIER_BLOCK_UNAVAILABLE == static_cast<int>(BlockStatus::kUnavailable));
static_assert(KVTIER_CODEC_RAW == static_cast<int>(kvtier::Codec::kRaw));
static_assert(KVTIER_DATA_LOSS == static_cast<int>(absl::StatusCode::kDataLoss));

template <size_t n>
void CopyText(std::string_view text, char (&to)[n]) {
  const size_t bytes = std::min(text.size(), n - 1);
  std::memcpy(to, text.data(), bytes);
  std::memset(to + bytes, 0, n - bytes);
}

int Answer(const absl::Status& status, kvtier_error* error) {
  if (!status.ok() && error != nullptr) {
    CopyText(kvtier::ReasonOf(status), error->reason);
    CopyText(kvtier::FromAbsl(status.message()), error->message);
  }
  return static_cast<int>(status.code());
}

int AnswerNull(kvtier_error* error) {
  return Answer(kvtier::Invalid("a pointer that must not be NULL is"), error);
}

template <typename... Pointers>
bool AnyNull(const Pointers*... pointers) {
  return ((pointers == nullptr) || ...);
}

std::string_view Text(const char* text) { return text == nullptr ? "" : text; }

Key ToKey(const kvtier_key& from) {
  Key key;
  std::memcpy(key.bytes.data(), from.bytes, Key::kBytes);
  return key;
}

std::optional<Key> ToParent(const kvtier_key* parent) {
  return parent == nullptr ? std::nullopt : std::optional(ToKey(*parent));
}

std::vector<Key> ToKeys(const kvtier_key* keys, size_t count) {
  std::vector<Key> all(count);
  for (size_t i = 0; i < count; ++i) all[i] = ToKey(keys[i]);
  return all;
}

Namespace ToNamespace(const kvtier_namespace& from) {
  Namespace ns{
      .client_idx = from.client_idx, .hash = {}, .layout = {}, .block_bytes = from.block_bytes};
  std::memcpy(ns.hash.bytes.data(), from.hash, sizeof(from.hash));
  std::memcpy(ns.layout.bytes.data(), from.layout, sizeof(from.layout));
  return ns;
}

kvtier_block FromBlock(const MappedBlock& from) {
  kvtier_block block{};
  block.bytes = from.bytes.data();
  block.device_address = from.device_address;
  block.device_ordinal = from.device_ordinal;
  block.crc32c = from.crc32c;
  block.status = static_cast<uint8_t>(from.status);
  block.tier = from.tier;
  return block;
}

int GetBlock(std::span<const MappedBlock> blocks, size_t block_idx, kvtier_block* block) {
  if (block_idx >= blocks.size()) return KVTIER_OUT_OF_RANGE;
  *block = FromBlock(blocks[block_idx]);
  return KVTIER_OK;
}

int GetTicket(kvtier_client* client, const absl::StatusOr<Ticket>& from, kvtier_ticket* ticket,
              kvtier_error* error) {
  if (!from.ok()) return Answer(from.status(), error);
  client->tickets.Add(*from);
  *ticket = {.ticket_id = from->ticket_id,
             .pending_bytes = from->pending_bytes,
             .block_count = from->block_count,
             .covered_block_count = from->covered_block_count,
             .ready_block_count = from->ready_block_count,
             .eta_ms = from->eta_ms,
             .eta_known = from->eta_known,
             .done = from->done,
             .reserved = {}};
  return KVTIER_OK;
}

int GetStatuses(const absl::StatusOr<std::vector<BlockStatus>>& from, uint8_t* statuses,
                kvtier_error* error) {
  if (!from.ok()) return Answer(from.status(), error);
  std::ranges::transform(*from, statuses, [](BlockStatus s) { return static_cast<uint8_t>(s); });
  return KVTIER_OK;
}

template <typename Value>
int Get(const absl::StatusOr<Value>& from, Value* value, kvtier_error* error) {
  if (!from.ok()) return Answer(from.status(), error);
  if (value != nullptr) *value = *from;
  return KVTIER_OK;
}

// A caller's structure of an older or newer version as this one. False: its size makes no sense.
template <typename Struct>
bool Known(const Struct* given, Struct* known) {
  if (given->struct_bytes < sizeof(size_t) || given->struct_bytes > 4096) return false;
  std::memset(known, 0, sizeof(*known));
  std::memcpy(known, given, std::min(given->struct_bytes, sizeof(*known)));
  return true;
}

std::string Bytes(const void* bytes, size_t count) {
  return bytes == nullptr ? std::string() : std::string(static_cast<const char*>(bytes), count);
}

kvtier::Layout ToLayout(const kvtier_layout& from) {
  kvtier::Layout layout;
  layout.model = Text(from.model);
  layout.weights_revision = Text(from.weights_revision);
  layout.tokenizer = Text(from.tokenizer);
  layout.scale_set = Text(from.scale_set);
  layout.rope = Text(from.rope);
  layout.layer_count = from.layer_count;
  layout.kv_head_count = from.kv_head_count;
  layout.head_dim = from.head_dim;
  if (from.block_tokens != 0) layout.block_tokens = from.block_tokens;
  if (from.codec != 0) layout.codec = static_cast<kvtier::Codec>(from.codec);
  layout.tp_rank = from.tp_rank;
  if (from.tp_size != 0) layout.tp_size = from.tp_size;
  layout.pp_rank = from.pp_rank;
  if (from.pp_size != 0) layout.pp_size = from.pp_size;
  layout.raw_block_bytes = from.raw_block_bytes;
  return layout;
}

}  // namespace

uint32_t kvtier_abi_major(void) { return KVTIER_ABI_MAJOR; }

const char* kvtier_version(void) { return kvtier::kVersion; }

int kvtier_connect(const kvtier_options* options, kvtier_client** client, kvtier_error* error) {
  if (AnyNull(options, client)) return AnswerNull(error);
  kvtier_options known;
  if (!Known(options, &known)) {
    return Answer(kvtier::Invalid("struct_bytes of the options is %d", options->struct_bytes),
                  error);
  }
  kvtier::client::ClientOptions asked;
  if (known.run_dir != nullptr) asked.run_dir = known.run_dir;
  if (known.client_name != nullptr) asked.client_name = known.client_name;
  if (known.control_timeout_ms != 0) asked.control_timeout_ms = known.control_timeout_ms;
  if (known.transfer_timeout_ms != 0) asked.transfer_timeout_ms = known.transfer_timeout_ms;
  if (known.reconnect_timeout_ms != 0) asked.reconnect_timeout_ms = known.reconnect_timeout_ms;
  auto connected = Client::Connect(std::move(asked));
  if (!connected.ok()) return Answer(connected.status(), error);
  *client = new kvtier_client{.client = std::move(connected).value(), .tickets = {}};
  return KVTIER_OK;
}

void kvtier_close(kvtier_client* client) { delete client; }

int kvtier_register_layout(kvtier_client* client, const kvtier_layout* layout, const char* adapter,
                           const char* salt, kvtier_namespace* ns, kvtier_error* error) {
  if (AnyNull(client, layout, ns)) return AnswerNull(error);
  kvtier_layout known;
  if (!Known(layout, &known)) {
    return Answer(kvtier::Invalid("struct_bytes of the layout is %d", layout->struct_bytes), error);
  }
  if (known.codec > KVTIER_CODEC_RAW) {
    return Answer(kvtier::Invalid("codec: %d is none", known.codec), error);
  }
  const auto registered =
      client->client->RegisterLayout(ToLayout(known), Text(adapter), Text(salt),
                                     {.name = std::string(Text(known.hash_domain)),
                                      .probe = Bytes(known.hash_probe, known.hash_probe_bytes)});
  if (!registered.ok()) return Answer(registered.status(), error);
  std::memcpy(ns->hash, registered->hash.bytes.data(), sizeof(ns->hash));
  std::memcpy(ns->layout, registered->layout.bytes.data(), sizeof(ns->layout));
  ns->client_idx = registered->client_idx;
  ns->block_bytes = registered->block_bytes;
  return KVTIER_OK;
}

int kvtier_hash_block(const kvtier_namespace* ns, const kvtier_key* parent,
                      const uint32_t* token_ids, size_t token_count, const void* extra,
                      size_t extra_bytes, kvtier_key* key) {
  if (AnyNull(ns, token_ids, key)) return KVTIER_INVALID_ARGUMENT;
  const Key hashed =
      kvtier::HashBlock(ToNamespace(*ns).hash, ToParent(parent), std::span(token_ids, token_count),
                        Bytes(extra, extra_bytes));
  std::memcpy(key->bytes, hashed.bytes.data(), Key::kBytes);
  return KVTIER_OK;
}

int kvtier_hash_engine_block(const kvtier_namespace* ns, const void* engine_hash,
                             size_t engine_hash_bytes, const void* extra, size_t extra_bytes,
                             kvtier_key* key) {
  if (AnyNull(ns, engine_hash, key)) return KVTIER_INVALID_ARGUMENT;
  const Key hashed = kvtier::HashEngineBlock(
      ToNamespace(*ns).hash, Bytes(engine_hash, engine_hash_bytes), Bytes(extra, extra_bytes));
  std::memcpy(key->bytes, hashed.bytes.data(), Key::kBytes);
  return KVTIER_OK;
}

int kvtier_lookup(kvtier_client* client, const kvtier_namespace* ns, const kvtier_key* keys,
                  size_t key_count, uint8_t* residency, size_t* found_count, kvtier_error* error) {
  if (AnyNull(client, ns, keys, residency, found_count)) return AnswerNull(error);
  const auto found = client->client->Lookup(ToNamespace(*ns), ToKeys(keys, key_count));
  if (!found.ok()) return Answer(found.status(), error);
  std::ranges::copy(*found, residency);
  *found_count = found->size();
  return KVTIER_OK;
}

int kvtier_reserve(kvtier_client* client, const kvtier_namespace* ns, const kvtier_key* parent,
                   const kvtier_key* keys, size_t key_count, int tier, kvtier_fill** fill,
                   kvtier_error* error) {
  if (AnyNull(client, ns, keys, fill)) return AnswerNull(error);
  if (tier != KVTIER_TIER_HBM && tier != KVTIER_TIER_HOST) {
    return Answer(kvtier::Invalid("tier: %d is neither hbm (1) nor host (2)", tier), error);
  }
  auto reserved = client->client->Reserve(ToNamespace(*ns), ToParent(parent),
                                          ToKeys(keys, key_count), static_cast<uint8_t>(tier));
  if (!reserved.ok()) return Answer(reserved.status(), error);
  *fill = new kvtier_fill{std::move(reserved).value()};
  return KVTIER_OK;
}

int kvtier_fill_block(const kvtier_fill* fill, size_t block_idx, kvtier_block* block) {
  if (AnyNull(fill, block)) return KVTIER_INVALID_ARGUMENT;
  return GetBlock(fill->fill.blocks, block_idx, block);
}

int kvtier_commit(kvtier_client* client, const kvtier_namespace* ns, const kvtier_fill* fill,
                  uint8_t* statuses, kvtier_error* error) {
  if (AnyNull(client, ns, fill, statuses)) return AnswerNull(error);
  return GetStatuses(client->client->Commit(ToNamespace(*ns), fill->fill), statuses, error);
}

int kvtier_commit_on_stream(kvtier_client* client, const kvtier_namespace* ns,
                            const kvtier_fill* fill, void* stream, uint8_t* statuses,
                            kvtier_error* error) {
  if (AnyNull(client, ns, fill, statuses)) return AnswerNull(error);
  return GetStatuses(client->client->Commit(ToNamespace(*ns), fill->fill, {.handle = stream}),
                     statuses, error);
}

int kvtier_abort(kvtier_client* client, const kvtier_namespace* ns, const kvtier_fill* fill,
                 kvtier_error* error) {
  if (AnyNull(client, ns, fill)) return AnswerNull(error);
  return Answer(client->client->Abort(ToNamespace(*ns), fill->fill), error);
}

void kvtier_fill_free(kvtier_fill* fill) { delete fill; }

int kvtier_acquire(kvtier_client* client, const kvtier_namespace* ns, const kvtier_key* keys,
                   size_t key_count, kvtier_lease** lease, kvtier_error* error) {
  if (AnyNull(client, ns, keys, lease)) return AnswerNull(error);
  std::vector<Key> asked = ToKeys(keys, key_count);
  auto acquired = client->client->Acquire(ToNamespace(*ns), asked);
  if (!acquired.ok()) return Answer(acquired.status(), error);
  *lease = new kvtier_lease{std::move(asked), std::move(acquired).value()};
  return KVTIER_OK;
}

size_t kvtier_lease_ok_prefix(const kvtier_lease* lease) {
  return lease == nullptr ? 0 : lease->lease.ok_prefix_count();
}

int kvtier_lease_block(const kvtier_lease* lease, size_t block_idx, kvtier_block* block) {
  if (AnyNull(lease, block)) return KVTIER_INVALID_ARGUMENT;
  return GetBlock(lease->lease.blocks(), block_idx, block);
}

int kvtier_lease_verify(kvtier_client* client, const kvtier_namespace* ns,
                        const kvtier_lease* lease, size_t block_idx, kvtier_error* error) {
  if (AnyNull(client, ns, lease)) return AnswerNull(error);
  if (block_idx >= lease->keys.size()) {
    return Answer(kvtier::OutOfRange("block %d of %d", block_idx, lease->keys.size()), error);
  }
  return Answer(client->client->Verify(ToNamespace(*ns), lease->keys[block_idx],
                                       lease->lease.blocks()[block_idx]),
                error);
}

void kvtier_lease_release(kvtier_lease* lease) { delete lease; }

int kvtier_report_bad(kvtier_client* client, const kvtier_namespace* ns, const kvtier_key* keys,
                      size_t key_count, kvtier_error* error) {
  if (AnyNull(client, ns, keys)) return AnswerNull(error);
  return Answer(client->client->ReportBad(ToNamespace(*ns), ToKeys(keys, key_count)), error);
}

int kvtier_prefetch(kvtier_client* client, const kvtier_namespace* ns, const kvtier_key* keys,
                    size_t key_count, kvtier_ticket* ticket, kvtier_error* error) {
  if (AnyNull(client, ns, keys, ticket)) return AnswerNull(error);
  return GetTicket(client, client->client->Prefetch(ToNamespace(*ns), ToKeys(keys, key_count)),
                   ticket, error);
}

int kvtier_get_ticket(kvtier_client* client, uint64_t ticket_id, kvtier_ticket* ticket,
                      kvtier_error* error) {
  if (AnyNull(client, ticket)) return AnswerNull(error);
  return GetTicket(client, client->client->GetTicket(ticket_id), ticket, error);
}

int kvtier_poll_ticket(kvtier_client* client, uint64_t ticket_id, uint32_t* moved_block_count) {
  if (client == nullptr || ticket_id == 0) return KVTIER_TICKET_ASK;
  switch (client->tickets.Find(ticket_id).Poll(moved_block_count)) {
    case TicketPoll::kMoving:
      return KVTIER_TICKET_MOVING;
    case TicketPoll::kDone:
      return KVTIER_TICKET_DONE;
    case TicketPoll::kAsk:
      break;
  }
  return KVTIER_TICKET_ASK;
}

int kvtier_cancel_prefetch(kvtier_client* client, uint64_t ticket_id, kvtier_error* error) {
  if (client == nullptr) return AnswerNull(error);
  return Answer(client->client->CancelPrefetch(ticket_id), error);
}

int kvtier_write(kvtier_client* client, const kvtier_namespace* ns, const kvtier_key* parent,
                 const kvtier_key* keys, size_t key_count, const void* payloads,
                 size_t payload_bytes, uint8_t* statuses, kvtier_error* error) {
  if (AnyNull(client, ns, keys, payloads, statuses)) return AnswerNull(error);
  const std::span bytes(static_cast<const std::byte*>(payloads), payload_bytes);
  return GetStatuses(
      client->client->Write(ToNamespace(*ns), ToParent(parent), ToKeys(keys, key_count), bytes),
      statuses, error);
}

int kvtier_read_into(kvtier_client* client, const kvtier_namespace* ns, const kvtier_key* keys,
                     size_t key_count, void* memory, size_t memory_bytes, size_t* block_count,
                     kvtier_error* error) {
  if (AnyNull(client, ns, keys, memory, block_count)) return AnswerNull(error);
  const std::span bytes(static_cast<std::byte*>(memory), memory_bytes);
  return Get(client->client->ReadInto(ToNamespace(*ns), ToKeys(keys, key_count), bytes),
             block_count, error);
}

int kvtier_create_context(kvtier_client* client, const kvtier_namespace* ns, const char* context,
                          uint32_t* block_count, kvtier_error* error) {
  if (AnyNull(client, ns, context)) return AnswerNull(error);
  return Get(client->client->CreateContext(ToNamespace(*ns), context), block_count, error);
}

int kvtier_append_context(kvtier_client* client, const kvtier_namespace* ns, const char* context,
                          uint32_t base_block_count, const kvtier_key* keys, size_t key_count,
                          uint32_t* block_count, kvtier_error* error) {
  if (AnyNull(client, ns, context, keys)) return AnswerNull(error);
  return Get(client->client->AppendContext(ToNamespace(*ns), context, base_block_count,
                                           ToKeys(keys, key_count)),
             block_count, error);
}

int kvtier_pause_context(kvtier_client* client, const kvtier_namespace* ns, const char* context,
                         uint32_t expected_resume_ms, uint64_t* freed_bytes,
                         uint64_t* resident_bytes, kvtier_error* error) {
  if (AnyNull(client, ns, context)) return AnswerNull(error);
  const auto paused = client->client->PauseContext(ToNamespace(*ns), context, expected_resume_ms);
  if (!paused.ok()) return Answer(paused.status(), error);
  if (freed_bytes != nullptr) *freed_bytes = paused->freed_bytes;
  if (resident_bytes != nullptr) *resident_bytes = paused->resident_bytes;
  return KVTIER_OK;
}

int kvtier_resume_context(kvtier_client* client, const kvtier_namespace* ns, const char* context,
                          uint32_t needed_in_ms, kvtier_ticket* ticket, kvtier_error* error) {
  if (AnyNull(client, ns, context, ticket)) return AnswerNull(error);
  return GetTicket(client, client->client->ResumeContext(ToNamespace(*ns), context, needed_in_ms),
                   ticket, error);
}

int kvtier_fork_context(kvtier_client* client, const kvtier_namespace* ns, const char* parent,
                        const char* context, uint32_t block_count, uint32_t* forked_block_count,
                        kvtier_error* error) {
  if (AnyNull(client, ns, parent, context)) return AnswerNull(error);
  return Get(client->client->ForkContext(ToNamespace(*ns), parent, context, block_count),
             forked_block_count, error);
}

int kvtier_close_context(kvtier_client* client, const kvtier_namespace* ns, const char* context,
                         int drop, uint64_t* dropped_bytes, kvtier_error* error) {
  if (AnyNull(client, ns, context)) return AnswerNull(error);
  return Get(client->client->CloseContext(ToNamespace(*ns), context, drop != 0), dropped_bytes,
             error);
}
