// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/emu/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#define KVTIER_FIBER_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVTIER_FIBER_ASAN 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define KVTIER_FIBER_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define KVTIER_FIBER_TSAN 1
#endif
#endif

#if defined(KVTIER_FIBER_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(KVTIER_FIBER_TSAN)
#include <sanitizer/tsan_interface.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#if defined(__x86_64__)
extern "C" {
// Pushes the callee-saved registers, stores the stack pointer in *save, takes `load` as the stack
// pointer and pops the registers that were pushed there.
void KvtierFiberSwitch(void** save, void* load);
// The first "return address" of a fiber: calls %rbx with %r12.
void KvtierFiberEntry();
}
asm(R"(
.text
.type KvtierFiberSwitch, @function
KvtierFiberSwitch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size KvtierFiberSwitch, . - KvtierFiberSwitch
.type KvtierFiberEntry, @function
KvtierFiberEntry:
  movq %r12, %rdi
  callq *%rbx
  ud2
.size KvtierFiberEntry, . - KvtierFiberEntry
)");
#endif

namespace kvtier::kernels::cuda::emu {
namespace {

// Frames of instrumented code are several times as large; pages are mapped when they are touched.
constexpr size_t kStackBytes = 256 * 1024;

[[noreturn]] void Die(const char* what) {
  std::perror(what);
  std::abort();
}

}  // namespace

struct Fiber::Context {
  std::byte* mapping = nullptr;
  size_t mapping_bytes = 0;
  std::byte* stack = nullptr;
#if defined(__x86_64__)
  void* own_stack_pointer = nullptr;
  void* owner_stack_pointer = nullptr;
#else
  ucontext_t own;
  ucontext_t owner;
#endif
#if defined(KVTIER_FIBER_ASAN)
  void* own_fake_stack = nullptr;
  void* owner_fake_stack = nullptr;
  const void* owner_stack = nullptr;
  size_t owner_stack_bytes = 0;
#endif
#if defined(KVTIER_FIBER_TSAN)
  void* own_fiber = nullptr;
  void* owner_fiber = nullptr;
#endif
};

Fiber::Fiber() : context_(new Context) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  context_->mapping_bytes = kStackBytes + page;
  void* mapping = mmap(nullptr, context_->mapping_bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) Die("mmap of a fiber's stack");
  context_->mapping = static_cast<std::byte*>(mapping);
  if (mprotect(mapping, page, PROT_NONE) != 0) Die("mprotect of a fiber's guard page");
  context_->stack = context_->mapping + page;
  Prepare();
}

Fiber::~Fiber() {
#if defined(KVTIER_FIBER_ASAN)
  __asan_unpoison_memory_region(context_->stack, kStackBytes);
#endif
#if defined(KVTIER_FIBER_TSAN)
  __tsan_destroy_fiber(context_->own_fiber);
#endif
  munmap(context_->mapping, context_->mapping_bytes);
  delete context_;
}

void Fiber::Prepare() {
#if defined(KVTIER_FIBER_ASAN)
  __asan_unpoison_memory_region(context_->stack, kStackBytes);
  context_->own_fake_stack = nullptr;
#endif
#if defined(KVTIER_FIBER_TSAN)
  if (context_->own_fiber != nullptr) __tsan_destroy_fiber(context_->own_fiber);
  context_->own_fiber = __tsan_create_fiber(0);
#endif
#if defined(__x86_64__)
  // r15, r14, r13, r12, rbx, rbp, return address: what KvtierFiberSwitch pops, from low to high.
  // The entry finds the stack aligned to 16 bytes, as a call instruction needs it.
  auto** top = reinterpret_cast<void**>(context_->stack + kStackBytes) - 2;
  top[0] = nullptr;
  *--top = reinterpret_cast<void*>(&KvtierFiberEntry);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&Fiber::Main);
  *--top = this;
  for (int i = 0; i < 3; ++i) *--top = nullptr;
  context_->own_stack_pointer = static_cast<void*>(top);
#else
  getcontext(&context_->own);
  context_->own.uc_stack.ss_sp = context_->stack;
  context_->own.uc_stack.ss_size = kStackBytes;
  context_->own.uc_link = nullptr;
  // makecontext passes ints only.
  const auto self = reinterpret_cast<uintptr_t>(this);
  makecontext(&context_->own, reinterpret_cast<void (*)()>(+[](uint32_t high, uint32_t low) {
    Main(reinterpret_cast<void*>(uintptr_t{high} << 32 | low));
  }),
              2, static_cast<uint32_t>(self >> 32), static_cast<uint32_t>(self));
#endif
}

void Fiber::Main(void* self) {
  auto* fiber = static_cast<Fiber*>(self);
#if defined(KVTIER_FIBER_ASAN)
  __sanitizer_finish_switch_fiber(nullptr, &fiber->context_->owner_stack,
                                  &fiber->context_->owner_stack_bytes);
#endif
  for (;;) {
    fiber->entry_(fiber->argument_);
    fiber->entry_ = nullptr;
    fiber->Suspend();
  }
}

void Fiber::Start(Entry entry, void* argument) {
  entry_ = entry;
  argument_ = argument;
}

void Fiber::Resume() {
  Context& context = *context_;
#if defined(KVTIER_FIBER_ASAN)
  __sanitizer_start_switch_fiber(&context.owner_fake_stack, context.stack, kStackBytes);
#endif
#if defined(KVTIER_FIBER_TSAN)
  context.owner_fiber = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(context.own_fiber, 0);
#endif
#if defined(__x86_64__)
  KvtierFiberSwitch(&context.owner_stack_pointer, context.own_stack_pointer);
#else
  swapcontext(&context.owner, &context.own);
#endif
#if defined(KVTIER_FIBER_ASAN)
  __sanitizer_finish_switch_fiber(context.owner_fake_stack, nullptr, nullptr);
#endif
}

void Fiber::Suspend() {
  Context& context = *context_;
#if defined(KVTIER_FIBER_ASAN)
  __sanitizer_start_switch_fiber(&context.own_fake_stack, context.owner_stack,
                                 context.owner_stack_bytes);
#endif
#if defined(KVTIER_FIBER_TSAN)
  __tsan_switch_to_fiber(context.owner_fiber, 0);
#endif
#if defined(__x86_64__)
  KvtierFiberSwitch(&context.own_stack_pointer, context.owner_stack_pointer);
#else
  swapcontext(&context.own, &context.owner);
#endif
#if defined(KVTIER_FIBER_ASAN)
  __sanitizer_finish_switch_fiber(context.own_fake_stack, &context.owner_stack,
                                  &context.owner_stack_bytes);
#endif
}

void Fiber::Abandon() {
  if (is_idle()) return;
  entry_ = nullptr;
  Prepare();
}

}  // namespace kvtier::kernels::cuda::emu
