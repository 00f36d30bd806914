// What a product is, and what a form for a kind of processor offers.
//
// A kernel [in, out] is packed once: panels of 16 outputs, in each of which the weights stand in the order in which they
// are read. In float32 it is [out / 16][in][16]. In bfloat16 two inputs stand beside each other, [out / 16][in / 2][16][2],
// in int8 four, [out / 16][in / 4][16][4]. A step of each is a cache line. A panel is read from its beginning to its end,
// and no sum crosses the lanes of a register.

#ifndef SPECTR_JAX_KERNELS_NATIVE_PRODUCT_H_
#define SPECTR_JAX_KERNELS_NATIVE_PRODUCT_H_

#include <cstdint>

namespace spectr {

constexpr int64_t kPanel = 16;  // outputs of a panel

struct Product {
  const void* rows;  // [num_rows, num_steps], of one, two or four inputs each
  const char* panels;
  float* out;  // [num_rows, num_out]
  int64_t num_rows;
  int64_t num_steps;  // inputs in float32, pairs of inputs in bfloat16, fours in int8
  int64_t num_out;
};

// Computes the outputs of the panels from `first` to `last`, the latter excluded.
using Panels = void(const Product&, int64_t first, int64_t last);

// The loop of each kind of processor, in a file of its own, which is compiled for these processors and must be called on
// them alone. Nothing of the standard library is used there: the linker keeps one copy of an inline function, perhaps
// that one. Rows are float32 where the name does not say otherwise.
Panels Avx512Bfloat16, Avx512Bfloat16OfWideRows, Avx512Float32, Avx512Int8, Avx2Bfloat16, Avx2Float32, Avx2Int8;

}  // namespace spectr

#endif  // SPECTR_JAX_KERNELS_NATIVE_PRODUCT_H_
