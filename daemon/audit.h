// SPDX-License-Identifier: Apache-2.0
//
// Who did what, and who was refused: one line of the log each,
//   info 2026-01-31T12:00:00.000Z audit who=operator peer=ipv4:10.0.0.7:4711 what=Flush outcome=OK
// Thread-safe. Never called under a lock.
#pragma once

#include <string>
#include <string_view>

namespace kvtier {

struct AuditLine {
  // A name of [[admin]], a certificate's names, "uid 1001", or "admin.sock" for whoever can open
  // it.
  std::string who;
  // As gRPC has it, "unix" on a unix socket.
  std::string peer;
  // The call, without its service.
  std::string what;
  // "OK", or the error.
  std::string outcome;
};

// An act of an admin: always written.
void AuditAct(const AuditLine& line);

// Something refused, which anybody can cause: at most ten lines a second are written; the next one
// says how many were left out before it.
void AuditRefusal(const AuditLine& line);

}  // namespace kvtier
