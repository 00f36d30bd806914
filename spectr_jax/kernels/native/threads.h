// Work of a call on XLA's own threads.
//
// A thread of our own would fight XLA's pool for the cores. Panels are handed out in chunks by a counter, to the calling
// thread and to tasks on the pool; whoever comes late finds none left, and the caller waits for nobody who has not begun.

#ifndef SPECTR_JAX_KERNELS_NATIVE_THREADS_H_
#define SPECTR_JAX_KERNELS_NATIVE_THREADS_H_

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace spectr {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kChunksPerThread = 8;
constexpr int64_t kLeast = 1 << 16;  // bytes of weights worth a thread

// What the threads of one product share. A task that begins after the end finds no chunk and touches nothing else.
template <class AnyProduct>
struct Work {
  AnyProduct product;
  void (*compute)(const AnyProduct&, int64_t first, int64_t last);
  int64_t num_panels, num_chunks;
  std::vector<char> owned;  // memory that the product points into
  std::atomic<int64_t> next{0}, done{0};

  void Run() {
    for (int64_t chunk; (chunk = next.fetch_add(1, std::memory_order_relaxed)) < num_chunks;) {
      compute(product, chunk * num_panels / num_chunks, (chunk + 1) * num_panels / num_chunks);
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

// Runs a product of `num_panels` panels with `num_bytes` of weights on the threads that these are worth.
template <class AnyProduct>
void RunOnThreads(ffi::ThreadPool& pool, std::shared_ptr<Work<AnyProduct>> work, int64_t num_panels, int64_t num_bytes) {
  const int64_t num_threads = std::clamp<int64_t>(num_bytes / kLeast, 1, std::max<int64_t>(1, pool.num_threads()));
  work->num_panels = num_panels;
  work->num_chunks = num_threads == 1 ? 1 : std::min(num_panels, kChunksPerThread * num_threads);
  for (int64_t i = 1; i < num_threads; ++i) pool.Schedule([work] { work->Run(); });
  work->Run();
  while (work->done.load(std::memory_order_acquire) < work->num_chunks) __builtin_ia32_pause();
}

}  // namespace
}  // namespace spectr

#endif  // SPECTR_JAX_KERNELS_NATIVE_THREADS_H_
