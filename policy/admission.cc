// SPDX-License-Identifier: Apache-2.0
#include "policy/policy.h"
#include "proto/base/status_util.h"

namespace kvtier::policy {

absl::StatusOr<Admission> ParseAdmission(std::string_view name) {
  if (name == "all") return Admission::kAll;
  if (name == "seen_again") return Admission::kSeenAgain;
  return Invalid("admission \"%s\" is unknown; use \"all\" or \"seen_again\"", name);
}

bool Admit(Admission admission, const BlockFacts& facts) {
  switch (admission) {
    case Admission::kAll:
      return true;
    case Admission::kSeenAgain:
      return facts.use_count >= 2;
  }
  return true;
}

}  // namespace kvtier::policy
