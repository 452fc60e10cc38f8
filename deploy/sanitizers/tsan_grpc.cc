// SPDX-License-Identifier: Apache-2.0
//
// Tells ThreadSanitizer that what happens before an operation is given to gRPC happens before its
// completion is taken from a completion queue: gRPC is not instrumented (see tsan_absl.cc), and
// passes operations between its threads through lock-free queues. The tag names the operation.
// Callbacks take the same way: Debian's gRPC runs them from a completion queue of its own.
//
// A server's call is destroyed by whoever counts its outstanding callbacks down to none, which may
// be code of libgrpc++ that is not instrumented; and then in a thread of gRPC's executor, unless
// the reactor allows otherwise. Here it is destroyed at once, after all that others counted down
// before.
//
// A client and a server in one process are also ordered by the socket between them. The runtime
// models all sockets as one object; so does this file, since tsan.supp hides gRPC's socket calls.

#include <dlfcn.h>
#include <grpc/grpc.h>

#include <cstdio>
#include <cstdlib>

extern "C" {
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}

namespace {

template <typename Function>
Function* Next(const char* symbol, Function*) {
  void* address = dlsym(RTLD_NEXT, symbol);
  if (address == nullptr) {
    std::fprintf(stderr, "tsan_grpc: %s not found\n", symbol);
    std::abort();
  }
  return reinterpret_cast<Function*>(address);
}

char sockets;

grpc_event Completed(grpc_event event) {
  if (event.type == GRPC_OP_COMPLETE) {
    __tsan_acquire(event.tag);
    __tsan_acquire(&sockets);
  }
  return event;
}

}  // namespace

extern "C" {

grpc_call_error grpc_call_start_batch(grpc_call* call, const grpc_op* ops, size_t op_count,
                                      void* tag, void* reserved) {
  static auto* const next = Next("grpc_call_start_batch", &grpc_call_start_batch);
  __tsan_release(tag);
  __tsan_release(&sockets);
  return next(call, ops, op_count, tag, reserved);
}

grpc_event grpc_completion_queue_next(grpc_completion_queue* queue, gpr_timespec deadline,
                                      void* reserved) {
  static auto* const next = Next("grpc_completion_queue_next", &grpc_completion_queue_next);
  return Completed(next(queue, deadline, reserved));
}

grpc_event grpc_completion_queue_pluck(grpc_completion_queue* queue, void* tag,
                                       gpr_timespec deadline, void* reserved) {
  static auto* const next = Next("grpc_completion_queue_pluck", &grpc_completion_queue_pluck);
  return Completed(next(queue, tag, deadline, reserved));
}

}  // extern "C"

// grpc::internal::ServerCallbackCall::ScheduleOnDone(bool inline_ondone)
void ScheduleOnDone(char* call, bool inline_ondone) asm(
    "_ZN4grpc8internal18ServerCallbackCall14ScheduleOnDoneEb");
void ScheduleOnDone(char* call, bool /*inline_ondone*/) {
  static auto* const next =
      Next("_ZN4grpc8internal18ServerCallbackCall14ScheduleOnDoneEb", &ScheduleOnDone);
  // Behind the vtable and another count of the same size.
  constexpr size_t kOutstandingOffset = 12;
  __tsan_acquire(call + kOutstandingOffset);
  next(call, /*inline_ondone=*/true);
}
