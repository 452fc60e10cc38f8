// SPDX-License-Identifier: Apache-2.0
//
// The handle socket: a SEQPACKET unix socket beside the gRPC one. It proves who the peer is
// (SO_PEERCRED), gives out session tokens and passes segment file descriptors (SCM_RIGHTS), which
// gRPC cannot carry. One fixed-size message each way, little-endian, version first.
//
//   client -> daemon  HandleRequest{kHello}                 daemon -> client  HandleReply + token
//   client -> daemon  HandleRequest{kGetSegment, ...}       daemon -> client  HandleReply + one fd
//   client -> daemon  HandleRequest{kGetBoard}              daemon -> client  HandleReply + one fd
//
// The connection belongs to the session opened with its token. The client keeps it open for as long
// as the process may touch mapped slots: after the session has ended, its slots are reused only
// once this connection is closed (the kernel closes it when the process dies).
#pragma once

#include <cstdint>
#include <type_traits>

namespace kvtier {

inline constexpr uint32_t kHandleWireVersion = 2;

// kGetBoard: the session's ticket board (ticket_board.h). A daemon that has none, or knows of none,
// answers kBadRequest and goes on.
enum class HandleRequestKind : uint32_t { kHello = 1, kGetSegment = 2, kGetBoard = 3 };

//   offset  size  field
//        0     4  version
//        4     4  kind (HandleRequestKind)
//        8     4  tier (kvtier.v1.Tier) of the segment
//       12     4  segment_idx
//       16     4  writable: 1 asks for a read-write descriptor, 0 for a read-only one (which GPU
//                 memory does not have)
//       20     4  reserved, 0
struct HandleRequest {
  uint32_t version = kHandleWireVersion;
  HandleRequestKind kind = HandleRequestKind::kHello;
  uint32_t tier = 0;
  uint32_t segment_idx = 0;
  uint32_t writable = 0;
  uint32_t reserved = 0;
};
static_assert(sizeof(HandleRequest) == 24 && std::is_trivially_copyable_v<HandleRequest>);

enum class HandleStatus : uint32_t {
  kOk = 0,
  kBadRequest = 1,
  // No tenant is configured for this peer.
  kForbidden = 2,
  // No such segment, or it belongs to another tenant, or the connection has no session yet.
  kNoSegment = 3,
  kVersionMismatch = 4,
  // The daemon holds as many handle connections as it allows.
  kLimitReached = 5,
  // The segment's device gives out nothing (any more).
  kUnavailable = 6,
};

//   offset  size  field
//        0     4  version
//        4     4  status (HandleStatus)
//        8     8  epoch
//       16     8  segment_bytes (kGetSegment)
//       24    16  token (kHello)
//       40    16  device_uuid (kGetSegment): the GPU whose memory the descriptor names, to be
//       imported
//                 with cuMemImportFromShareableHandle and mapped whole; all zero: a memfd, for mmap
struct HandleReply {
  uint32_t version = kHandleWireVersion;
  HandleStatus status = HandleStatus::kOk;
  uint64_t epoch = 0;
  uint64_t segment_bytes = 0;
  uint8_t token[16] = {};
  uint8_t device_uuid[16] = {};
};
static_assert(sizeof(HandleReply) == 56 && std::is_trivially_copyable_v<HandleReply>);

}  // namespace kvtier
