// SPDX-License-Identifier: Apache-2.0
#ifndef KVTIER_KERNELS_EXECUTOR_H_
#define KVTIER_KERNELS_EXECUTOR_H_

#include <cstdint>

namespace kvtier::kernels {

// The caller's threads. run(self, count, task, context) calls task(context, i) once for every i in
// [0, count), in any order, on any threads, and returns when all of them have returned. The kernels
// have no thread of their own; results do not depend on how tasks are spread. Does not own `self`.
struct Executor {
  using Task = void (*)(void* context, uint32_t task_idx);

  void (*run)(void* self, uint32_t task_count, Task task, void* context) = nullptr;
  void* self = nullptr;
};

}  // namespace kvtier::kernels

#endif  // KVTIER_KERNELS_EXECUTOR_H_
