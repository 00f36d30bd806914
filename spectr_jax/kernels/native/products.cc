// The product of rows and a packed kernel as a call of XLA, on XLA's own threads.
//
// A thread of our own would fight XLA's pool for the cores. Panels are handed out in chunks by a counter, to the calling
// thread and to tasks on the pool; whoever comes late finds none left, and the caller waits for nobody who has not begun.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "product.h"
#include "xla/ffi/api/ffi.h"

namespace spectr {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kChunksPerThread = 8;
constexpr int64_t kLeast = 1 << 16;  // bytes of weights worth a thread

struct Form {
  const char* name;
  Panels* of_float32;   // a kernel in float32, rows in float32
  Panels* of_bfloat16;  // a kernel in bfloat16, rows in float32
  Panels* of_int8;      // a kernel in int8, rows in float32
  Panels* of_pairs;     // a kernel in bfloat16, rows in bfloat16; null where they are widened
};

constexpr Form kForms[] = {  // the best first; a processor that has one has those after it
    {"avx512_bf16", Avx512Float32, Avx512Bfloat16OfWideRows, Avx512Int8, Avx512Bfloat16},
    {"avx512", Avx512Float32, Avx512Bfloat16OfWideRows, Avx512Int8, nullptr},
    {"avx2", Avx2Float32, Avx2Bfloat16, Avx2Int8, nullptr},
};

const Form* FormOfThisProcessor() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
    return __builtin_cpu_supports("avx512bf16") ? &kForms[0] : &kForms[1];
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &kForms[2] : nullptr;
}

const Form*& CurrentForm() {
  static const Form* form = FormOfThisProcessor();
  return form;
}

// What the threads of one product share. A task that begins after the end finds no chunk and touches nothing else.
struct Work {
  Product product;
  Panels* compute;
  int64_t num_panels, num_chunks;
  std::atomic<int64_t> next{0}, done{0};

  void Run() {
    for (int64_t chunk; (chunk = next.fetch_add(1, std::memory_order_relaxed)) < num_chunks;) {
      compute(product, chunk * num_panels / num_chunks, (chunk + 1) * num_panels / num_chunks);
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

ffi::Error Multiply(ffi::ThreadPool pool, ffi::AnyBuffer rows, ffi::AnyBuffer kernel, ffi::Result<ffi::AnyBuffer> out) {
  const Form* form = CurrentForm();
  if (form == nullptr) return ffi::Error::Internal("this processor has neither AVX2 nor AVX-512");
  const auto row_sizes = rows.dimensions(), sizes = kernel.dimensions(), out_sizes = out->dimensions();
  const bool is_bfloat16 = kernel.element_type() == ffi::BF16, is_int8 = kernel.element_type() == ffi::S8;
  const int64_t num_together = is_int8 ? 4 : is_bfloat16 ? 2 : 1;  // inputs of a step
  const bool has_bfloat16_rows = rows.element_type() == ffi::BF16;
  if (!(is_int8 || is_bfloat16 || kernel.element_type() == ffi::F32) ||
      !(has_bfloat16_rows || rows.element_type() == ffi::F32) ||
      out->element_type() != ffi::F32 || row_sizes.size() != 2 || out_sizes.size() != 2 ||
      sizes.size() != (num_together > 1 ? 4u : 3u) || (num_together > 1 && sizes[3] != num_together) ||
      sizes[2] != kPanel || row_sizes[0] != out_sizes[0] ||
      row_sizes[1] != num_together * sizes[1] || (out_sizes[1] + kPanel - 1) / kPanel != sizes[0])
    return ffi::Error::InvalidArgument("rows, kernel and result do not fit each other");

  Panels* compute = is_int8 ? form->of_int8 : is_bfloat16 ? form->of_bfloat16 : form->of_float32;
  const void* inputs = rows.untyped_data();
  std::vector<float> widened;
  if (has_bfloat16_rows && is_bfloat16 && form->of_pairs != nullptr) {
    compute = form->of_pairs;
  } else if (has_bfloat16_rows) {
    widened.resize(row_sizes[0] * row_sizes[1]);
    const auto* from = static_cast<const uint16_t*>(inputs);
    for (size_t i = 0; i < widened.size(); ++i) {
      const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
      std::memcpy(&widened[i], &bits, sizeof bits);
    }
    inputs = widened.data();
  }

  auto work = std::make_shared<Work>();
  work->product = {inputs, static_cast<const char*>(kernel.untyped_data()), static_cast<float*>(out->untyped_data()),
                   row_sizes[0], sizes[1], out_sizes[1]};
  work->compute = compute;
  work->num_panels = sizes[0];
  const int64_t num_bytes = sizes[0] * sizes[1] * kPanel * 4;
  const int64_t num_threads = std::clamp<int64_t>(num_bytes / kLeast, 1, std::max<int64_t>(1, pool.num_threads()));
  work->num_chunks = num_threads == 1 ? 1 : std::min(work->num_panels, kChunksPerThread * num_threads);
  for (int64_t i = 1; i < num_threads; ++i) pool.Schedule([work] { work->Run(); });
  work->Run();
  while (work->done.load(std::memory_order_acquire) < work->num_chunks) __builtin_ia32_pause();
  return ffi::Error::Success();
}

}  // namespace
}  // namespace spectr

XLA_FFI_DEFINE_HANDLER_SYMBOL(spectr_product, spectr::Multiply,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());

// The name of the form for this processor, or null if there is none.
extern "C" const char* spectr_form() {
  return spectr::CurrentForm() == nullptr ? nullptr : spectr::CurrentForm()->name;
}

// Takes another form, for tests and comparisons. Returns whether this processor has it.
extern "C" bool spectr_use_form(const char* name) {
  const spectr::Form* best = spectr::FormOfThisProcessor();
  bool has = false;
  for (const spectr::Form& form : spectr::kForms) {
    has = has || &form == best;
    if (has && std::strcmp(form.name, name) == 0) return spectr::CurrentForm() = &form, true;
  }
  return false;
}
