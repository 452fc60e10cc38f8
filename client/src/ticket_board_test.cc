// SPDX-License-Identifier: Apache-2.0
#include "client/src/ticket_board.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <vector>

#include "kvtier/client.h"

namespace kvtier::client {
namespace {

UniqueFd FileOf(const TicketBoardPage& page, off_t bytes) {
  UniqueFd fd(memfd_create("ticket-board-test", MFD_CLOEXEC));
  EXPECT_EQ(write(fd.get(), &page, sizeof(page)), static_cast<ssize_t>(sizeof(page)));
  EXPECT_EQ(ftruncate(fd.get(), bytes), 0);
  return fd;
}

TEST(TicketBoardTest, ShowsWhatTheDaemonWrites) {
  TicketBoardPage page;
  page.Show(1, 77, {.done = false, .moved_block_count = 3});
  auto board = TicketBoard::Map(FileOf(page, sizeof(page)));
  ASSERT_TRUE(board.ok()) << board.status();
  Ticket ticket{.ticket_id = 77, .board_slot = 1, .board = *board};
  uint32_t moved_block_count = 0;
  EXPECT_EQ(ticket.Poll(&moved_block_count), TicketPoll::kMoving);
  EXPECT_EQ(moved_block_count, 3U);
  ticket.board_slot = 2;
  EXPECT_EQ(ticket.Poll(), TicketPoll::kAsk) << "another slot";
  ticket.board_slot = kTicketSlotCount;
  EXPECT_EQ(ticket.Poll(), TicketPoll::kAsk) << "behind the last slot";
  ticket.board_slot = 1;
  (*board)->MarkLost();
  EXPECT_EQ(ticket.Poll(), TicketPoll::kAsk) << "the session has ended";
  EXPECT_EQ(Ticket{.ticket_id = 77}.Poll(), TicketPoll::kAsk) << "no board";
}

TEST(TicketBoardTest, RefusesWhatIsNoBoard) {
  TicketBoardPage page;
  for (const off_t bytes : {0, 4095, 8192}) {
    EXPECT_EQ(TicketBoard::Map(FileOf(page, bytes)).status().code(), absl::StatusCode::kInternal);
  }
  ++page.version;
  EXPECT_EQ(TicketBoard::Map(FileOf(page, 4096)).status().code(), absl::StatusCode::kInternal);
  --page.version;
  page.magic[0] = 'k';
  EXPECT_EQ(TicketBoard::Map(FileOf(page, 4096)).status().code(), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace kvtier::client
