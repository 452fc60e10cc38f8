// SPDX-License-Identifier: Apache-2.0
#include "client/examples/engine.h"

#include <span>
#include <utility>

#include "proto/base/status_util.h"

namespace kvtier::example {

absl::StatusOr<std::vector<std::vector<float>>> Engine::Serve(
    const std::vector<Request>& requests) {
  outputs_.assign(requests.size(), {});
  for (size_t i = 0; i < requests.size(); ++i) {
    waiting_.push_back({.request = &requests[i], .output_idx = i});
  }
  while (!waiting_.empty() || !running_.empty()) {
    KVT_RETURN_IF_ERROR(Admit());
    if (running_.empty())
      return Exhausted("%s has more tokens than the cache", waiting_.front().request->name);
    ++counts_.step_count;
    std::vector<Sequence> still_running;
    for (Sequence& sequence : running_) {
      Compute(&sequence);
      KVT_RETURN_IF_ERROR(SaveFull(&sequence));
      if (sequence.cached_count == sequence.request->tokens.size()) {
        FreePages(&sequence);
      } else if (sequence.cached_count == sequence.request->pause_at && !sequence.was_paused) {
        KVT_RETURN_IF_ERROR(PauseSequence(&sequence));
      } else {
        still_running.push_back(std::move(sequence));
      }
    }
    running_ = std::move(still_running);
  }
  return std::move(outputs_);
}

absl::Status Engine::Admit() {
  while (!waiting_.empty() && running_.size() < options_.batch_max) {
    Sequence& next = waiting_.front();
    const size_t page_tokens = options_.shape.page_tokens;
    const size_t page_count = (next.request->tokens.size() + page_tokens - 1) / page_tokens;
    if (cache_.free_count() < page_count) return absl::OkStatus();
    while (next.pages.size() < page_count) next.pages.push_back(*cache_.Allocate());
    const uint32_t end = next.was_paused ? next.request->pause_at : next.request->prompt_count - 1;
    if (next.was_paused && store_ != nullptr) {
      KVT_RETURN_IF_ERROR(store_->Resume(next.request->name));
    }
    KVT_RETURN_IF_ERROR(Prefill(&next, end));
    running_.push_back(std::move(next));
    waiting_.pop_front();
  }
  return absl::OkStatus();
}

absl::Status Engine::Prefill(Sequence* sequence, uint32_t end) {
  if (store_ != nullptr) {
    const std::vector<Key> keys = store_->KeysOf(std::span(sequence->request->tokens).first(end));
    KVT_ASSIGN_OR_RETURN(sequence->saved_count, store_->Load(keys, sequence->pages, &cache_));
    sequence->cached_count =
        static_cast<uint32_t>(sequence->saved_count) * options_.shape.page_tokens;
  }
  while (sequence->cached_count < end) {
    ++counts_.prefilled_token_count;
    Compute(sequence);
  }
  return SaveFull(sequence);
}

void Engine::Compute(Sequence* sequence) {
  const uint32_t position = sequence->cached_count++;
  const std::vector<float> output =
      model_.Step(sequence->request->tokens[position], position, sequence->pages, &cache_);
  // What is computed again after a pause was put out before it.
  const uint32_t first =
      sequence->was_paused ? sequence->request->pause_at : sequence->request->prompt_count - 1;
  if (position < first) return;
  std::vector<float>& outputs = outputs_[sequence->output_idx];
  outputs.insert(outputs.end(), output.begin(), output.end());
}

absl::Status Engine::SaveFull(Sequence* sequence) {
  if (store_ == nullptr) return absl::OkStatus();
  const std::vector<Key> keys = KeysOf(*sequence);
  KVT_RETURN_IF_ERROR(store_->Save(keys, sequence->saved_count, sequence->pages, &cache_));
  sequence->saved_count = keys.size();
  return absl::OkStatus();
}

absl::Status Engine::PauseSequence(Sequence* sequence) {
  ++counts_.pause_count;
  if (store_ != nullptr) {
    KVT_RETURN_IF_ERROR(store_->Pause(sequence->request->name, KeysOf(*sequence)));
  }
  FreePages(sequence);
  // Behind all that wait: by then the tool has answered.
  waiting_.push_back(
      {.request = sequence->request, .output_idx = sequence->output_idx, .was_paused = true});
  return absl::OkStatus();
}

std::vector<Key> Engine::KeysOf(const Sequence& sequence) const {
  return store_->KeysOf(std::span(sequence.request->tokens).first(sequence.cached_count));
}

void Engine::FreePages(Sequence* sequence) {
  for (const uint32_t page : sequence->pages) cache_.Free(page);
  sequence->pages.clear();
}

}  // namespace kvtier::example
