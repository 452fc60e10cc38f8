/* SPDX-License-Identifier: Apache-2.0
 *
 * The client library for C and for languages that call C: libkvtier.so exports these symbols and
 * no others. What each call does stands in client.h, where it has the same name; here is what
 * differs.
 *
 *   kvtier_client* client = NULL;
 *   kvtier_error error;
 *   const kvtier_options options = {sizeof(options), "/run/kvtierd", "engine", 0, 0, 0};
 *   if (kvtier_connect(&options, &client, &error) != KVTIER_OK) puts(error.message);
 *
 * Calls answer a code: KVTIER_OK or that of an error, which `error` (may be NULL) then explains.
 * Nothing is written to other outputs after an error. Pointers that are given are read during the
 * call only. A pointer that must not be NULL and is gives KVTIER_INVALID_ARGUMENT.
 *
 * A client may be used by several threads, a fill or lease by one at a time. Free fills and release
 * leases before their client is closed.
 *
 * Compatible within a major version: functions and values are added, never changed; structures
 * that grow begin with their size as the caller knows it, and fields the caller does not know are
 * as if zero. */
#ifndef KVTIER_KVTIER_H_
#define KVTIER_KVTIER_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVTIER_ABI_MAJOR 0

/* Codes of gRPC and Abseil. */
enum {
  KVTIER_OK = 0,
  KVTIER_CANCELLED = 1,
  KVTIER_UNKNOWN = 2,
  KVTIER_INVALID_ARGUMENT = 3,
  KVTIER_DEADLINE_EXCEEDED = 4,
  KVTIER_NOT_FOUND = 5,
  KVTIER_ALREADY_EXISTS = 6,
  KVTIER_PERMISSION_DENIED = 7,
  KVTIER_RESOURCE_EXHAUSTED = 8,
  KVTIER_FAILED_PRECONDITION = 9,
  KVTIER_ABORTED = 10,
  KVTIER_OUT_OF_RANGE = 11,
  KVTIER_UNIMPLEMENTED = 12,
  KVTIER_INTERNAL = 13,
  KVTIER_UNAVAILABLE = 14,
  KVTIER_DATA_LOSS = 15
};

/* What became of one block. */
enum {
  KVTIER_BLOCK_OK = 1,
  KVTIER_BLOCK_MISS = 2,
  KVTIER_BLOCK_EXISTS = 3,
  KVTIER_BLOCK_PENDING = 4,
  KVTIER_BLOCK_EXHAUSTED = 5,
  KVTIER_BLOCK_PRECONDITION = 6,
  KVTIER_BLOCK_CORRUPT = 7,
  KVTIER_BLOCK_UNAVAILABLE = 8
};

/* Tiers of a slot, and bits of where a block is. */
enum { KVTIER_TIER_HBM = 1, KVTIER_TIER_HOST = 2 };
enum { KVTIER_ON_HBM = 1, KVTIER_ON_HOST = 2, KVTIER_ON_NVME = 4 };

enum { KVTIER_CODEC_NVFP4 = 1, KVTIER_CODEC_FP8 = 2, KVTIER_CODEC_BF16 = 3, KVTIER_CODEC_RAW = 4 };

typedef struct kvtier_client kvtier_client;
typedef struct kvtier_fill kvtier_fill;
typedef struct kvtier_lease kvtier_lease;

typedef struct {
  /* A stable name for programs, "" if there is none; cut to fit, as the message. */
  char reason[64];
  char message[448];
} kvtier_error;

typedef struct {
  uint8_t bytes[32];
} kvtier_key;

/* Zeros and NULLs stand for the defaults of kvtier::client::ClientOptions. */
typedef struct {
  size_t struct_bytes;
  const char* run_dir;
  const char* client_name;
  uint32_t control_timeout_ms;
  uint32_t transfer_timeout_ms;
  uint32_t reconnect_timeout_ms;
} kvtier_options;

/* kvtier::Layout; NULLs are empty, and 0 stands for block_tokens 64, codec NVFP4, tp_size 1 and
 * pp_size 1. */
typedef struct {
  size_t struct_bytes;
  const char* model;
  const char* weights_revision;
  const char* tokenizer;
  const char* scale_set;
  const char* rope;
  uint32_t layer_count;
  uint32_t kv_head_count;
  uint32_t head_dim;
  uint32_t block_tokens;
  uint32_t codec;
  uint32_t tp_rank;
  uint32_t tp_size;
  uint32_t pp_rank;
  uint32_t pp_size;
  uint32_t raw_block_bytes;
  /* kvtier::HashDomain; NULL: keys are those of kvtier_hash_block. */
  const char* hash_domain;
  const void* hash_probe;
  size_t hash_probe_bytes;
} kvtier_layout;

/* A plain value, of the client that made it. */
typedef struct {
  uint8_t hash[32];
  uint8_t layout[32];
  uint32_t client_idx;
  uint32_t block_bytes;
} kvtier_namespace;

/* A slot in this process. On a GPU `bytes` is NULL and `device_address` is not 0. In a lease the
 * bytes are read-only. */
typedef struct {
  void* bytes;
  uint64_t device_address;
  int32_t device_ordinal;
  uint32_t crc32c;
  uint8_t status;
  uint8_t tier;
  uint8_t reserved[6];
} kvtier_block;

typedef struct {
  uint64_t ticket_id;
  uint64_t pending_bytes;
  uint32_t block_count;
  uint32_t covered_block_count;
  uint32_t ready_block_count;
  uint32_t eta_ms;
  uint8_t eta_known;
  uint8_t done;
  uint8_t reserved[6];
} kvtier_ticket;

/* KVTIER_ABI_MAJOR of the library: another one than the program was built with cannot be used. */
uint32_t kvtier_abi_major(void);
/* For example "0.1.0". */
const char* kvtier_version(void);

int kvtier_connect(const kvtier_options* options, kvtier_client** client, kvtier_error* error);
/* NULL is fine. */
void kvtier_close(kvtier_client* client);

/* `adapter` and `salt` may be NULL. */
int kvtier_register_layout(kvtier_client* client, const kvtier_layout* layout, const char* adapter,
                           const char* salt, kvtier_namespace* ns, kvtier_error* error);

/* The key of a block: `parent` is NULL for the first of a chain, `extra` may be NULL. */
int kvtier_hash_block(const kvtier_namespace* ns, const kvtier_key* parent,
                      const uint32_t* token_ids, size_t token_count, const void* extra,
                      size_t extra_bytes, kvtier_key* key);

/* The key of a block that the engine has hashed itself, in a namespace with a hash domain. */
int kvtier_hash_engine_block(const kvtier_namespace* ns, const void* engine_hash,
                             size_t engine_hash_bytes, const void* extra, size_t extra_bytes,
                             kvtier_key* key);

/* `residency` has room for key_count bytes; `found_count` of them are written. */
int kvtier_lookup(kvtier_client* client, const kvtier_namespace* ns, const kvtier_key* keys,
                  size_t key_count, uint8_t* residency, size_t* found_count, kvtier_error* error);

int kvtier_reserve(kvtier_client* client, const kvtier_namespace* ns, const kvtier_key* parent,
                   const kvtier_key* keys, size_t key_count, int tier, kvtier_fill** fill,
                   kvtier_error* error);
/* KVTIER_OUT_OF_RANGE: it has fewer blocks. */
int kvtier_fill_block(const kvtier_fill* fill, size_t block_idx, kvtier_block* block);
/* `statuses` has room for a byte a block of the fill. */
int kvtier_commit(kvtier_client* client, const kvtier_namespace* ns, const kvtier_fill* fill,
                  uint8_t* statuses, kvtier_error* error);
/* For slots on a GPU; `stream` is a cudaStream_t or CUstream, NULL the legacy default stream. */
int kvtier_commit_on_stream(kvtier_client* client, const kvtier_namespace* ns,
                            const kvtier_fill* fill, void* stream, uint8_t* statuses,
                            kvtier_error* error);
int kvtier_abort(kvtier_client* client, const kvtier_namespace* ns, const kvtier_fill* fill,
                 kvtier_error* error);
/* Once it is committed or aborted. NULL is fine. */
void kvtier_fill_free(kvtier_fill* fill);

int kvtier_acquire(kvtier_client* client, const kvtier_namespace* ns, const kvtier_key* keys,
                   size_t key_count, kvtier_lease** lease, kvtier_error* error);
/* Blocks from the start that are there. */
size_t kvtier_lease_ok_prefix(const kvtier_lease* lease);
/* KVTIER_OUT_OF_RANGE: it has fewer blocks. */
int kvtier_lease_block(const kvtier_lease* lease, size_t block_idx, kvtier_block* block);
/* Checks the bytes of a block against the checksum of their commit. */
int kvtier_lease_verify(kvtier_client* client, const kvtier_namespace* ns,
                        const kvtier_lease* lease, size_t block_idx, kvtier_error* error);
/* Ends the lease and frees it. NULL is fine. */
void kvtier_lease_release(kvtier_lease* lease);

int kvtier_report_bad(kvtier_client* client, const kvtier_namespace* ns, const kvtier_key* keys,
                      size_t key_count, kvtier_error* error);

int kvtier_prefetch(kvtier_client* client, const kvtier_namespace* ns, const kvtier_key* keys,
                    size_t key_count, kvtier_ticket* ticket, kvtier_error* error);
int kvtier_get_ticket(kvtier_client* client, uint64_t ticket_id, kvtier_ticket* ticket,
                      kvtier_error* error);
/* How a ticket that this client was given stands, without a call: kvtier::client::Ticket::Poll. */
enum { KVTIER_TICKET_MOVING = 0, KVTIER_TICKET_DONE = 1, KVTIER_TICKET_ASK = 2 };
/* `moved_block_count` may be NULL. One of the last 256 tickets; KVTIER_TICKET_ASK for any other. */
int kvtier_poll_ticket(kvtier_client* client, uint64_t ticket_id, uint32_t* moved_block_count);
int kvtier_cancel_prefetch(kvtier_client* client, uint64_t ticket_id, kvtier_error* error);

/* `payloads` holds key_count blocks; `statuses` has room for as many bytes. */
int kvtier_write(kvtier_client* client, const kvtier_namespace* ns, const kvtier_key* parent,
                 const kvtier_key* keys, size_t key_count, const void* payloads,
                 size_t payload_bytes, uint8_t* statuses, kvtier_error* error);
/* `memory` has room for key_count blocks. */
int kvtier_read_into(kvtier_client* client, const kvtier_namespace* ns, const kvtier_key* keys,
                     size_t key_count, void* memory, size_t memory_bytes, size_t* block_count,
                     kvtier_error* error);

/* `block_count`, `freed_bytes` and the like may be NULL. */
int kvtier_create_context(kvtier_client* client, const kvtier_namespace* ns, const char* context,
                          uint32_t* block_count, kvtier_error* error);
int kvtier_append_context(kvtier_client* client, const kvtier_namespace* ns, const char* context,
                          uint32_t base_block_count, const kvtier_key* keys, size_t key_count,
                          uint32_t* block_count, kvtier_error* error);
int kvtier_pause_context(kvtier_client* client, const kvtier_namespace* ns, const char* context,
                         uint32_t expected_resume_ms, uint64_t* freed_bytes,
                         uint64_t* resident_bytes, kvtier_error* error);
int kvtier_resume_context(kvtier_client* client, const kvtier_namespace* ns, const char* context,
                          uint32_t needed_in_ms, kvtier_ticket* ticket, kvtier_error* error);
int kvtier_fork_context(kvtier_client* client, const kvtier_namespace* ns, const char* parent,
                        const char* context, uint32_t block_count, uint32_t* forked_block_count,
                        kvtier_error* error);
int kvtier_close_context(kvtier_client* client, const kvtier_namespace* ns, const char* context,
                         int drop, uint64_t* dropped_bytes, kvtier_error* error);

#ifdef __cplusplus
}
#endif

#endif /* KVTIER_KVTIER_H_ */
