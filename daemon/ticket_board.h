// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "daemon/unix_socket.h"
#include "proto/base/ticket_board.h"

namespace kvtier {

// The memory of one session's ticket board: a sealed memfd, of which others can have read-only
// descriptors. Thread-safe: nothing of it changes but the page's slots.
class TicketBoard {
 public:
  // Errors: those of the system.
  static absl::StatusOr<std::shared_ptr<TicketBoard>> Create();
  ~TicketBoard();
  TicketBoard(const TicketBoard&) = delete;
  TicketBoard& operator=(const TicketBoard&) = delete;

  TicketBoardPage& page() { return *page_; }
  // A new descriptor, which cannot be written through.
  absl::StatusOr<UniqueFd> Export() const;

 private:
  TicketBoard(UniqueFd fd, TicketBoardPage* page) : fd_(std::move(fd)), page_(page) {}

  const UniqueFd fd_;
  TicketBoardPage* const page_;
};

}  // namespace kvtier
