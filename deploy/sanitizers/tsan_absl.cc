// SPDX-License-Identifier: Apache-2.0
//
// Makes absl::Mutex, absl::CondVar and absl::Notification visible to ThreadSanitizer.
//
// Debian's Abseil is compiled without instrumentation, so ThreadSanitizer sees neither its atomics
// nor its futexes, and would report every access that an absl::Mutex guards as a race. Each
// function below takes the place of Abseil's own (the executable comes first in symbol lookup, so
// gRPC's calls land here too), tells ThreadSanitizer which happens-before edge the lock gives, and
// calls the original. This file is linked into programs only with KVTIER_SANITIZE=thread and is
// itself not instrumented.

#include <absl/synchronization/mutex.h>
#include <absl/time/time.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

extern "C" {
// The runtime's interface; GCC 12 ships no header that declares all of it.
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
}

namespace {

// Abseil's definition of `symbol`. A member function takes `this` as its first argument (Itanium
// C++ ABI), so it is called here as a plain function.
template <typename Function>
Function* Next(const char* symbol) {
  void* address = dlsym(RTLD_NEXT, symbol);
  if (address == nullptr) {
    std::fprintf(stderr, "tsan_absl: %s not found: another Abseil than Debian 12's?\n", symbol);
    std::abort();
  }
  return reinterpret_cast<Function*>(address);
}

}  // namespace

// KVTIER_LOCK: acquires on return (and on success, for a function that returns bool).
// KVTIER_UNLOCK: releases before the call. KVTIER_WAIT: gives the lock up and takes it again.
#define KVTIER_NEXT(symbol, type) static auto* const next = Next<type>(symbol)

#define KVTIER_LOCK(function, symbol)         \
  void function(absl::Mutex* mu) asm(symbol); \
  void function(absl::Mutex* mu) {            \
    KVTIER_NEXT(symbol, void(absl::Mutex*));  \
    next(mu);                                 \
    __tsan_acquire(mu);                       \
  }

#define KVTIER_TRY_LOCK(function, symbol)     \
  bool function(absl::Mutex* mu) asm(symbol); \
  bool function(absl::Mutex* mu) {            \
    KVTIER_NEXT(symbol, bool(absl::Mutex*));  \
    const bool locked = next(mu);             \
    if (locked) __tsan_acquire(mu);           \
    return locked;                            \
  }

#define KVTIER_UNLOCK(function, symbol)       \
  void function(absl::Mutex* mu) asm(symbol); \
  void function(absl::Mutex* mu) {            \
    KVTIER_NEXT(symbol, void(absl::Mutex*));  \
    __tsan_release(mu);                       \
    next(mu);                                 \
  }

#define KVTIER_LOCK_WHEN(function, symbol)                                           \
  void function(absl::Mutex* mu, const absl::Condition& condition) asm(symbol);      \
  void function(absl::Mutex* mu, const absl::Condition& condition) {                 \
    KVTIER_NEXT(symbol, void(absl::Mutex*, const absl::Condition&));                 \
    __tsan_release(mu); /* Await gives up the lock; harmless where it is not held */ \
    next(mu, condition);                                                             \
    __tsan_acquire(mu);                                                              \
  }

#define KVTIER_LOCK_WHEN_UNTIL(function, symbol, Limit)                                      \
  bool function(absl::Mutex* mu, const absl::Condition& condition, Limit limit) asm(symbol); \
  bool function(absl::Mutex* mu, const absl::Condition& condition, Limit limit) {            \
    KVTIER_NEXT(symbol, bool(absl::Mutex*, const absl::Condition&, Limit));                  \
    __tsan_release(mu);                                                                      \
    const bool result = next(mu, condition, limit);                                          \
    __tsan_acquire(mu);                                                                      \
    return result;                                                                           \
  }

#define KVTIER_WAIT_UNTIL(function, symbol, Limit)                            \
  bool function(absl::CondVar* cv, absl::Mutex* mu, Limit limit) asm(symbol); \
  bool function(absl::CondVar* cv, absl::Mutex* mu, Limit limit) {            \
    KVTIER_NEXT(symbol, bool(absl::CondVar*, absl::Mutex*, Limit));           \
    __tsan_release(mu);                                                       \
    const bool timed_out = next(cv, mu, limit);                               \
    __tsan_acquire(mu);                                                       \
    return timed_out;                                                         \
  }

#define KVTIER_MUTEX "_ZN4absl7debian35Mutex"
#define KVTIER_CONDVAR "_ZN4absl7debian37CondVar"
#define KVTIER_CONDITION_DURATION "ERKNS0_9ConditionENS0_8DurationE"
#define KVTIER_CONDITION_TIME "ERKNS0_9ConditionENS0_4TimeE"

KVTIER_LOCK(TsanLock, KVTIER_MUTEX "4LockEv")
KVTIER_LOCK(TsanReaderLock, KVTIER_MUTEX "10ReaderLockEv")
KVTIER_TRY_LOCK(TsanTryLock, KVTIER_MUTEX "7TryLockEv")
KVTIER_TRY_LOCK(TsanReaderTryLock, KVTIER_MUTEX "13ReaderTryLockEv")
KVTIER_UNLOCK(TsanUnlock, KVTIER_MUTEX "6UnlockEv")
KVTIER_UNLOCK(TsanReaderUnlock, KVTIER_MUTEX "12ReaderUnlockEv")
KVTIER_LOCK_WHEN(TsanLockWhen, KVTIER_MUTEX "8LockWhenERKNS0_9ConditionE")
KVTIER_LOCK_WHEN(TsanReaderLockWhen, KVTIER_MUTEX "14ReaderLockWhenERKNS0_9ConditionE")
KVTIER_LOCK_WHEN(TsanAwait, KVTIER_MUTEX "5AwaitERKNS0_9ConditionE")
KVTIER_LOCK_WHEN_UNTIL(TsanLockWhenWithTimeout,
                       KVTIER_MUTEX "19LockWhenWithTimeout" KVTIER_CONDITION_DURATION,
                       absl::Duration)
KVTIER_LOCK_WHEN_UNTIL(TsanReaderLockWhenWithTimeout,
                       KVTIER_MUTEX "25ReaderLockWhenWithTimeout" KVTIER_CONDITION_DURATION,
                       absl::Duration)
KVTIER_LOCK_WHEN_UNTIL(TsanAwaitWithTimeout,
                       KVTIER_MUTEX "16AwaitWithTimeout" KVTIER_CONDITION_DURATION, absl::Duration)
KVTIER_LOCK_WHEN_UNTIL(TsanLockWhenWithDeadline,
                       KVTIER_MUTEX "20LockWhenWithDeadline" KVTIER_CONDITION_TIME, absl::Time)
KVTIER_LOCK_WHEN_UNTIL(TsanReaderLockWhenWithDeadline,
                       KVTIER_MUTEX "26ReaderLockWhenWithDeadline" KVTIER_CONDITION_TIME,
                       absl::Time)
KVTIER_LOCK_WHEN_UNTIL(TsanAwaitWithDeadline,
                       KVTIER_MUTEX "17AwaitWithDeadline" KVTIER_CONDITION_TIME, absl::Time)
KVTIER_WAIT_UNTIL(TsanWaitWithTimeout,
                  KVTIER_CONDVAR "15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE", absl::Duration)
KVTIER_WAIT_UNTIL(TsanWaitWithDeadline, KVTIER_CONDVAR "16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE",
                  absl::Time)

#define KVTIER_CONDVAR_WAIT KVTIER_CONDVAR "4WaitEPNS0_5MutexE"
void TsanWait(absl::CondVar* cv, absl::Mutex* mu) asm(KVTIER_CONDVAR_WAIT);
void TsanWait(absl::CondVar* cv, absl::Mutex* mu) {
  KVTIER_NEXT(KVTIER_CONDVAR_WAIT, void(absl::CondVar*, absl::Mutex*));
  __tsan_release(mu);
  next(cv, mu);
  __tsan_acquire(mu);
}

// Abseil evaluates a waiter's condition in whichever thread holds the lock, also between the
// release told above and the real one; those reads are ordered, but not for ThreadSanitizer.
#define KVTIER_CONDITION_EVAL "_ZNK4absl7debian39Condition4EvalEv"
bool TsanEval(const absl::Condition* condition) asm(KVTIER_CONDITION_EVAL);
bool TsanEval(const absl::Condition* condition) {
  KVTIER_NEXT(KVTIER_CONDITION_EVAL, bool(const absl::Condition*));
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  const bool result = next(condition);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  return result;
}

// HasBeenNotified() is an inline, instrumented load of the flag that follows the mutex; Notify()
// stores it inside the library.
#define KVTIER_NOTIFY "_ZN4absl7debian312Notification6NotifyEv"
void TsanNotify(absl::Mutex* notification) asm(KVTIER_NOTIFY);
void TsanNotify(absl::Mutex* notification) {
  KVTIER_NEXT(KVTIER_NOTIFY, void(absl::Mutex*));
  __tsan_release(notification + 1);
  next(notification);
}
