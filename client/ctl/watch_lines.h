// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "client/include/kvtier/watch.h"

namespace kvtier::ctl {

// What `kvtierctl watch` prints of an update: a line for each run of blocks, so that a chain that
// was stored at once is one line. JSON: events as engines publish them (BlockStored with
// block_hashes, parent_block_hash, block_size and medium, BlockRemoved, AllBlocksCleared), with
// epoch and sequence, and the namespace as hexadecimal text; token ids are not known here.
std::string WatchLines(const client::WatchUpdate& update, bool json);

}  // namespace kvtier::ctl
