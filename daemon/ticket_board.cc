// SPDX-License-Identifier: Apache-2.0
#include "daemon/ticket_board.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <new>
#include <string>

#include "proto/base/status_util.h"

namespace kvtier {

absl::StatusOr<std::shared_ptr<TicketBoard>> TicketBoard::Create() {
  UniqueFd fd(memfd_create("kvtier-tickets", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return ErrnoStatus(errno, "make the memfd of a ticket board");
  // Mode 0400: a client of another uid cannot reopen its read-only descriptor for writing.
  if (ftruncate(fd.get(), sizeof(TicketBoardPage)) != 0 ||
      fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0 ||
      fchmod(fd.get(), S_IRUSR) != 0) {
    return ErrnoStatus(errno, "prepare the memfd of a ticket board");
  }
  void* const base =
      mmap(nullptr, sizeof(TicketBoardPage), PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (base == MAP_FAILED) return ErrnoStatus(errno, "map a ticket board");
  return std::shared_ptr<TicketBoard>(new TicketBoard(std::move(fd), new (base) TicketBoardPage()));
}

TicketBoard::~TicketBoard() { munmap(page_, sizeof(TicketBoardPage)); }

absl::StatusOr<UniqueFd> TicketBoard::Export() const {
  const std::string self = "/proc/self/fd/" + std::to_string(fd_.get());
  UniqueFd fd(open(self.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(errno, "export a ticket board");
  return fd;
}

}  // namespace kvtier
