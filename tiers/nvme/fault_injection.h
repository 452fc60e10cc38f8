// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "tiers/nvme/storage.h"

namespace kvtier::nvme {

// A disk that fails as a line of text says, for tests that meet it with a whole daemon around it.
// Rules, between ';':
//   OPERATION FIRST[-[LAST]] FAULT   the FIRSTth of these operations, those up to LAST, or all that
//                                    follow. OPERATION is a transfer of segment files: read,
//                                    write, sync or allocate; counted from 1, over all directories.
//                                    FAULT:
//       EIO, ENOSPC, EROFS, ENOMEM   it fails with this, and nothing is done
//       short                        a read ends in the middle, as at the end of a file
//       torn                         a write reaches the disk by half, and says it is all there
//       corrupt                      a read has a wrong byte
//       slow MS                      it starts so many milliseconds later
//   full BYTES                       calls that allocate or write more than so many bytes in all
//   fail
//                                    with ENOSPC
//   index N full                     after N writes to RocksDB's files, these fail with ENOSPC
//   sync N power-off                 right after the Nth sync of anything, the process ends with
//                                    status 137 and leaves DIR.after-power-loss behind, which is
//                                    DIR without all that was not synced; alone, and for one
//                                    directory, whose files are kept in memory
//
// `dir`: the tier's directory. Thread-safe. INVALID_ARGUMENT names the rule.
absl::StatusOr<std::unique_ptr<Storage>> MakeFaultyStorage(std::string_view rules,
                                                           const std::string& dir);

}  // namespace kvtier::nvme
