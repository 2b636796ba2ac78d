// Work that is cut into chunks, which the calling thread and threads of XLA's pool claim one by one.
#ifndef ENTMTP_JAX_KERNELS_CHUNKS_H_
#define ENTMTP_JAX_KERNELS_CHUNKS_H_

#include <atomic>
#include <cstddef>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace entmtp {

using Size = std::ptrdiff_t;

constexpr int kSpins = 1 << 16;  // before the processor is given away

// Calls work(c) once for each c in 0..count-1, by at most this many threads, and returns when all calls have returned.
// The caller works too and afterwards waits only for chunks that a running thread has claimed. So a pool whose threads
// are all busy, or whose only thread is the caller, costs speed but cannot cause a deadlock.
template <typename Work>
void RunChunks(xla::ffi::ThreadPool& pool, Size threads, Size count, const Work& work) {
  struct Chunks {  // shared ownership: a helper may start after the call has returned, and then finds nothing to claim
    Size count;
    Work work;
    std::atomic<Size> next{0}, done{0};
    Chunks(Size n, const Work& w) : count(n), work(w) {}
    void Claim() {
      for (Size c; (c = next.fetch_add(1)) < count; done.fetch_add(1)) work(c);
    }
  };
  auto chunks = std::make_shared<Chunks>(count, work);
  for (Size i = 1; i < threads; i++) pool.Schedule([=] { chunks->Claim(); });
  chunks->Claim();
  // A claimed chunk takes tens of microseconds; a thread that the system has put aside may take milliseconds.
  for (int spins = 0; chunks->done.load() < count; spins++) {
    if (spins > kSpins) std::this_thread::yield();
  }
}

}  // namespace entmtp

#endif  // ENTMTP_JAX_KERNELS_CHUNKS_H_
