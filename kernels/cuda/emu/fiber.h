// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_CUDA_EMU_FIBER_H_
#define KVTIER_KERNELS_CUDA_EMU_FIBER_H_

#include <cstddef>

// A stack of its own that runs one function at a time and gives control back when it asks to.

namespace kvtier::kernels::cuda::emu {

// Owns its stack (mapped on construction, with a guard page below). All calls come from one
// operating-system thread. AddressSanitizer and ThreadSanitizer are told of every switch. On x86-64
// a switch is a dozen instructions; elsewhere it is swapcontext.
class Fiber {
 public:
  using Entry = void (*)(void* argument);

  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Makes the next Resume call entry(argument). Requires: idle (never started, finished or
  // abandoned).
  void Start(Entry entry, void* argument);

  // Runs the fiber until it suspends or its entry returns. Requires: started, called on the owner's
  // stack.
  void Resume();

  // Returns from Resume. Requires: called on this fiber.
  void Suspend();

  // Forgets a suspended function: nothing on its stack is destroyed.
  void Abandon();

  bool is_idle() const { return entry_ == nullptr; }

 private:
  struct Context;

  static void Main(void* self);
  void Prepare();

  Entry entry_ = nullptr;
  void* argument_ = nullptr;
  Context* context_;
};

}  // namespace kvtier::kernels::cuda::emu

#endif  // KVTIER_KERNELS_CUDA_EMU_FIBER_H_
