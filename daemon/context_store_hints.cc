// SPDX-License-Identifier: Apache-2.0
//
// ContextStoreService: hints. Each action is a call of the core that a client could have made.
#include <algorithm>
#include <memory>

#include "daemon/answer.h"
#include "daemon/context_store_service.h"
#include "proto/base/packed.h"
#include "proto/base/reasons.h"
#include "proto/base/status_util.h"

namespace kvtier {
namespace {

constexpr int kActionsMax = 64;
constexpr size_t kHintTextBytesMax = 128;
// Times and counts beyond this are this.
constexpr double kNumberMax = 1e12;

using Payload = google::protobuf::Struct;

const google::protobuf::Value* Field(const Payload& payload, const std::string& name) {
  const auto found = payload.fields().find(name);
  return found == payload.fields().end() ? nullptr : &found->second;
}

// 0 where it is missing.
absl::StatusOr<double> NumberField(const Payload& payload, const std::string& name) {
  const google::protobuf::Value* value = Field(payload, name);
  if (value == nullptr) return 0;
  const double number = value->number_value();
  if (value->kind_case() != google::protobuf::Value::kNumberValue || !(number >= 0)) {
    return Invalid("payload.%s: must be a number, 0 or more", name);
  }
  return std::min(number, kNumberMax);
}

absl::StatusOr<uint64_t> CountField(const Payload& payload, const std::string& name) {
  KVT_ASSIGN_OR_RETURN(const double number, NumberField(payload, name));
  return static_cast<uint64_t>(number);
}

absl::StatusOr<std::string> ContextField(const Payload& payload) {
  const google::protobuf::Value* value = Field(payload, "context");
  if (value == nullptr || value->kind_case() != google::protobuf::Value::kStringValue) {
    return Invalid("payload.context: must be the name of a context");
  }
  KVT_RETURN_IF_ERROR(CheckContextName(value->string_value(), "payload.context"));
  return value->string_value();
}

absl::StatusOr<std::vector<Key>> KeysField(const Payload& payload) {
  const google::protobuf::Value* value = Field(payload, "block_hashes");
  if (value == nullptr || value->kind_case() != google::protobuf::Value::kListValue) {
    return Invalid("payload.block_hashes: must be a list of keys");
  }
  const auto& texts = value->list_value().values();
  if (texts.empty() || texts.size() > static_cast<int>(kKeysPerCallMax)) {
    return Invalid("payload.block_hashes: %d keys, must be 1 to %d", texts.size(), kKeysPerCallMax);
  }
  std::vector<Key> keys;
  for (const google::protobuf::Value& text : texts) {
    const absl::StatusOr<Key> key = Key::FromHex(text.string_value());
    if (!key.ok()) return Annotate(key.status(), "payload.block_hashes");
    keys.push_back(*key);
  }
  return keys;
}

absl::StatusOr<policy::NextStep> NextStepField(const Payload& payload) {
  const google::protobuf::Value* value = Field(payload, "next_step");
  if (value == nullptr) return policy::NextStep::kUnknown;
  if (value->string_value() == "tool") return policy::NextStep::kTool;
  if (value->string_value() == "user") return policy::NextStep::kUser;
  return Invalid("payload.next_step: must be \"tool\" or \"user\"");
}

absl::StatusOr<core::PrefetchHint> PrefetchFields(const Payload& payload, const char* when) {
  core::PrefetchHint hint;
  KVT_ASSIGN_OR_RETURN(hint.needed_in_ms, CountField(payload, when));
  KVT_ASSIGN_OR_RETURN(hint.prefill_tokens_per_second,
                       NumberField(payload, "prefill_tokens_per_second"));
  return hint;
}

void Answer(v1::KvHintOutcome* outcome, const char* word, std::string detail = "") {
  outcome->set_outcome(word);
  outcome->set_detail(std::move(detail));
}

// What a ticket says of the chain that was to be brought.
void AnswerTicket(const core::TicketState& state, v1::KvHintOutcome* outcome) {
  const uint32_t asked = state.block_count;
  if (state.covered_block_count == 0) {
    return Answer(outcome, "missing", absl::StrFormat("none of %d blocks is stored", asked));
  }
  FillTicket(state, outcome->mutable_ticket());
  const uint32_t coming = state.covered_block_count - state.recompute_block_count;
  if (coming < asked) {
    return Answer(outcome, "clipped",
                  absl::StrFormat("%d of %d blocks are stored, %d are worth a read",
                                  state.covered_block_count, asked, coming));
  }
  Answer(outcome, "accepted");
}

// One action after the other, of one call.
class HintedActions {
 public:
  HintedActions(Store* store, core::SessionId session, core::NamespaceIdx ns)
      : store_(store), session_(session), ns_(ns) {}

  // Errors are of the session, and end the call.
  absl::Status Apply(const v1::KvHintAction& action, v1::KvHintOutcome* outcome) {
    outcome->set_action_id(action.action_id());
    if (!action.action_version().starts_with("1.")) {
      Answer(outcome, "rejected", "action_version: 1.0 is known here");
      return absl::OkStatus();
    }
    const absl::Status status = Do(action.action_type(), action.payload(), outcome);
    switch (status.code()) {
      case absl::StatusCode::kOk:
        return absl::OkStatus();
      case absl::StatusCode::kNotFound:
        Answer(outcome, "missing", std::string(status.message()));
        return absl::OkStatus();
      case absl::StatusCode::kInvalidArgument:
      case absl::StatusCode::kOutOfRange:
      case absl::StatusCode::kResourceExhausted:
        Answer(outcome, "rejected", std::string(status.message()));
        return absl::OkStatus();
      default:
        return status;
    }
  }

 private:
  absl::Status Do(const std::string& type, const Payload& payload, v1::KvHintOutcome* outcome) {
    if (type == "kv.fetch") return Fetch(payload, "needed_in_ms", outcome);
    if (type == "kv.retain") return Fetch(payload, "retain_ms", outcome);
    if (type == "kv.pause") return Pause(payload, outcome);
    if (type == "kv.resume") return Resume(payload, outcome);
    if (type == "kv.finish") return Finish(payload, outcome);
    if (type == "kv.truncate") return Truncate(payload, outcome);
    return Invalid("action_type: unknown here");
  }

  absl::Status Fetch(const Payload& payload, const char* when, v1::KvHintOutcome* outcome) {
    KVT_ASSIGN_OR_RETURN(const core::PrefetchHint hint, PrefetchFields(payload, when));
    std::vector<Key> keys;
    if (Field(payload, "block_hashes") == nullptr) {
      KVT_ASSIGN_OR_RETURN(const std::string context, ContextField(payload));
      KVT_ASSIGN_OR_RETURN(keys,
                           store_->Run([&](core::StoreCore& core, core::TimeMs, core::Effects*) {
                             return core.ContextKeys(session_, ns_, context);
                           }));
    } else {
      KVT_ASSIGN_OR_RETURN(keys, KeysField(payload));
    }
    KVT_ASSIGN_OR_RETURN(
        const core::TicketState state,
        store_->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
          return core.Prefetch(session_, ns_, keys, hint, now_ms, effects);
        }));
    AnswerTicket(state, outcome);
    return absl::OkStatus();
  }

  absl::Status Pause(const Payload& payload, v1::KvHintOutcome* outcome) {
    KVT_ASSIGN_OR_RETURN(const std::string context, ContextField(payload));
    core::Expectation expectation;
    KVT_ASSIGN_OR_RETURN(expectation.next, NextStepField(payload));
    KVT_ASSIGN_OR_RETURN(expectation.returns_in_ms, CountField(payload, "expected_resume_ms"));
    // What is done at once is answered at once; nobody waits for the rest.
    const auto answer = std::make_shared<PauseAnswer>();
    store_->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
      core.PauseContext(
          session_, ns_, context, expectation, now_ms + kDefaultTransferDeadlineMs, now_ms,
          [answer](absl::StatusOr<core::PauseResult> result) {
            absl::MutexLock lock(&answer->mutex);
            answer->result = std::move(result);
          },
          effects);
    });
    absl::MutexLock lock(&answer->mutex);
    if (!answer->result.has_value()) {
      Answer(outcome, "deferred", "its blocks are on their way out of hbm");
      return absl::OkStatus();
    }
    KVT_RETURN_IF_ERROR(answer->result->status());
    Answer(outcome, "accepted");
    return absl::OkStatus();
  }

  absl::Status Resume(const Payload& payload, v1::KvHintOutcome* outcome) {
    KVT_ASSIGN_OR_RETURN(const std::string context, ContextField(payload));
    KVT_ASSIGN_OR_RETURN(const core::PrefetchHint hint, PrefetchFields(payload, "needed_in_ms"));
    KVT_ASSIGN_OR_RETURN(
        const core::TicketState state,
        store_->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
          return core.ResumeContext(session_, ns_, context, hint, now_ms, effects);
        }));
    AnswerTicket(state, outcome);
    return absl::OkStatus();
  }

  absl::Status Finish(const Payload& payload, v1::KvHintOutcome* outcome) {
    KVT_ASSIGN_OR_RETURN(const std::string context, ContextField(payload));
    const google::protobuf::Value* drop = Field(payload, "drop");
    KVT_RETURN_IF_ERROR(
        store_
            ->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
              return core.CloseContext(session_, ns_, context,
                                       drop != nullptr && drop->bool_value(), now_ms, effects);
            })
            .status());
    Answer(outcome, "accepted");
    return absl::OkStatus();
  }

  absl::Status Truncate(const Payload& payload, v1::KvHintOutcome* outcome) {
    KVT_ASSIGN_OR_RETURN(const std::string context, ContextField(payload));
    if (Field(payload, "block_count") == nullptr) return Invalid("payload.block_count: missing");
    KVT_ASSIGN_OR_RETURN(const uint64_t block_count, CountField(payload, "block_count"));
    KVT_RETURN_IF_ERROR(
        store_
            ->Run([&](core::StoreCore& core, core::TimeMs now_ms, core::Effects* effects) {
              return core.AppendContext(
                  session_, ns_, context,
                  static_cast<uint32_t>(std::min<uint64_t>(block_count, UINT32_MAX)), {}, now_ms,
                  effects);
            })
            .status());
    Answer(outcome, "accepted");
    return absl::OkStatus();
  }

  struct PauseAnswer {
    absl::Mutex mutex;
    std::optional<absl::StatusOr<core::PauseResult>> result ABSL_GUARDED_BY(mutex);
  };

  Store* const store_;
  const core::SessionId session_;
  const core::NamespaceIdx ns_;
};

}  // namespace

absl::Status ContextStoreService::Do(const v1::ApplyHintsRequest& request,
                                     v1::ApplyHintsResponse* response) {
  KVT_ASSIGN_OR_RETURN(const core::SessionId session, CoreSession(request.session_id()));
  const v1::KvHintsEnvelope& envelope = request.envelope();
  KVT_RETURN_IF_ERROR(CheckTextBytes(envelope.message_id(), kHintTextBytesMax, "message_id"));
  if (envelope.actions_size() > kActionsMax) {
    return BadArgument(Invalid("actions: %d, more than %d", envelope.actions_size(), kActionsMax));
  }
  for (const v1::KvHintAction& action : envelope.actions()) {
    KVT_RETURN_IF_ERROR(CheckTextBytes(action.action_id(), kHintTextBytesMax, "action_id"));
  }
  response->set_message_id(envelope.message_id());
  const bool known = envelope.protocol_version().starts_with("0.");
  HintedActions actions(service_.store, session, request.namespace_id());
  for (const v1::KvHintAction& action : envelope.actions()) {
    v1::KvHintOutcome* const outcome = response->add_outcomes();
    if (known) {
      KVT_RETURN_IF_ERROR(actions.Apply(action, outcome));
    } else {
      outcome->set_action_id(action.action_id());
      Answer(outcome, "rejected", "protocol_version: 0.1 is known here");
    }
  }
  return absl::OkStatus();
}

ContextStoreService::Unary* ContextStoreService::ApplyHints(Context* context,
                                                            const v1::ApplyHintsRequest* request,
                                                            v1::ApplyHintsResponse* response) {
  return AnswerNow(context, *request, response);
}

}  // namespace kvtier
