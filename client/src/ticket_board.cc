// SPDX-License-Identifier: Apache-2.0
#include "client/src/ticket_board.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>

#include "proto/base/status_util.h"

namespace kvtier::client {

absl::StatusOr<std::shared_ptr<TicketBoard>> TicketBoard::Map(UniqueFd fd) {
  struct stat status{};
  if (fstat(fd.get(), &status) != 0) return ErrnoStatus(errno, "look at the ticket board");
  if (static_cast<uint64_t>(status.st_size) != sizeof(TicketBoardPage)) {
    return Internal("the daemon gave a ticket board of %d bytes", status.st_size);
  }
  void* const base = mmap(nullptr, sizeof(TicketBoardPage), PROT_READ, MAP_SHARED, fd.get(), 0);
  if (base == MAP_FAILED) return ErrnoStatus(errno, "map the ticket board");
  std::shared_ptr<TicketBoard> board(new TicketBoard(static_cast<const TicketBoardPage*>(base)));
  if (!board->page().IsValid()) return Internal("the daemon gave a ticket board without its mark");
  return board;
}

TicketBoard::~TicketBoard() {
  munmap(const_cast<TicketBoardPage*>(page_), sizeof(TicketBoardPage));
}

}  // namespace kvtier::client
