// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "client/src/handle_connection.h"
#include "proto/base/ticket_board.h"

namespace kvtier::client {

// The ticket board of one session, mapped read-only. Thread-safe. Tickets share it, and may outlive
// the session and the client.
class TicketBoard {
 public:
  // Takes the descriptor. Errors: those of the system; INTERNAL (it holds no board).
  static absl::StatusOr<std::shared_ptr<TicketBoard>> Map(UniqueFd fd);
  ~TicketBoard();
  TicketBoard(const TicketBoard&) = delete;
  TicketBoard& operator=(const TicketBoard&) = delete;

  const TicketBoardPage& page() const { return *page_; }
  // The session is gone: nobody writes here any more.
  void MarkLost() { lost_.store(true, std::memory_order_relaxed); }
  bool lost() const { return lost_.load(std::memory_order_relaxed); }

 private:
  explicit TicketBoard(const TicketBoardPage* page) : page_(page) {}

  const TicketBoardPage* const page_;
  std::atomic<bool> lost_ = false;
};

}  // namespace kvtier::client
