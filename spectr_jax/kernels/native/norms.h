// Norms and sums of rows, for vectors of any instruction set. A row's sum has one order, whatever rows are beside it.

#ifndef SPECTR_JAX_KERNELS_NATIVE_NORMS_H_
#define SPECTR_JAX_KERNELS_NATIVE_NORMS_H_

#include "product.h"

namespace spectr {
namespace {

// The sum of `term` of the numbers of a row, by lanes, then of the lanes in order.
template <class V, class Term>
inline float SumOf(const float* row, int64_t width, Term term) {
  auto sums = V::Set(0);
  int64_t d = 0;
  for (; d + V::kLanes <= width; d += V::kLanes) sums = term(V::Load(row + d), sums);
  float lanes[V::kLanes];
  if (d < width) {  // what stands behind the end has no term
    float rest[V::kLanes] = {};
    for (int64_t i = d; i < width; ++i) rest[i - d] = row[i];
    V::Store(lanes, term(V::Load(rest), V::Set(0)));
    for (int64_t i = width - d; i < V::kLanes; ++i) lanes[i] = 0;
    sums = V::Add(sums, V::Load(lanes));
  }
  V::Store(lanes, sums);
  for (int i = 1; i < V::kLanes; ++i) lanes[0] += lanes[i];
  return lanes[0];
}

template <class V>
void TotalsOf(const Norm& norm, int64_t first, int64_t last) {
  constexpr int64_t kPart = 512;  // numbers that are added before they meet others, which keeps rounding small
  for (int64_t i = first; i < last; ++i) {
    float total = 0;
    for (int64_t d = 0; d < norm.width; d += kPart)
      total += SumOf<V>(norm.rows + i * norm.width + d, norm.width - d < kPart ? norm.width - d : kPart,
                        [](auto x, auto sums) { return V::Add(sums, x); });
    norm.out[i] = total;
  }
}

template <class V>
void NormOf(const Norm& norm, int64_t first, int64_t last) {
  const float count = static_cast<float>(norm.width);
  for (int64_t i = first; i < last; ++i) {
    const float* row = norm.rows + i * norm.width;
    float* out = norm.out + i * norm.width;
    float mean = 0;
    if (norm.bias != nullptr)
      mean = SumOf<V>(row, norm.width, [](auto x, auto sums) { return V::Add(sums, x); }) / count;
    const float squares = SumOf<V>(row, norm.width, [mean](auto x, auto sums) {
      const auto centered = V::Add(x, V::Set(-mean));
      return V::MultiplyAdd(centered, centered, sums);
    });
    const float variance = squares / count + norm.epsilon;
    float lanes[V::kLanes];
    V::Store(lanes, V::Root(V::Set(variance)));
    // NaN where squares overflow: 0 would make numbers out of range look sound.
    const float scale = variance < __builtin_inff() ? 1 / lanes[0] : __builtin_nanf("");
    for (int64_t d = 0; d < norm.width; ++d)
      out[d] = (row[d] - mean) * scale * norm.gain[d] + (norm.bias != nullptr ? norm.bias[d] : 0);
  }
}

}  // namespace
}  // namespace spectr

#endif  // SPECTR_JAX_KERNELS_NATIVE_NORMS_H_
