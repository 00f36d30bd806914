// Distributions of rows of logits, for vectors of any instruction set. A row's sum has one order, whatever stands beside.

#ifndef SPECTR_JAX_KERNELS_NATIVE_SOFTMAX_H_
#define SPECTR_JAX_KERNELS_NATIVE_SOFTMAX_H_

#include "attention.h"
#include "product.h"

namespace spectr {
namespace {

constexpr int64_t kSummed = 1024;  // weights that are summed in float32, before their sum joins the others

// The largest of a row; NaN if any is.
template <class V>
inline float LargestOrNan(const float* row, int64_t width) {
  const auto* bits = reinterpret_cast<const uint32_t*>(row);
  uint32_t is_nan = 0;
  for (int64_t d = 0; d < width; ++d) is_nan |= (bits[d] & 0x7fffffffu) > 0x7f800000u;
  if (is_nan) return __builtin_nanf("");
  float largest = -__builtin_inff();
  int64_t d = 0;
  if (width >= V::kLanes) {
    auto of_lanes = V::Load(row);
    for (d = V::kLanes; d + V::kLanes <= width; d += V::kLanes) of_lanes = V::Larger(V::Load(row + d), of_lanes);
    float lanes[V::kLanes];
    V::Store(lanes, of_lanes);
    for (float x : lanes) largest = x > largest ? x : largest;
  }
  for (; d < width; ++d) largest = row[d] > largest ? row[d] : largest;
  return largest;
}

template <class V>
void SoftmaxOf(const Softmax& softmax, int64_t first, int64_t last) {
  const int64_t width = softmax.width;
  for (int64_t i = first; i < last; ++i) {
    const float* row = softmax.logits + i * width;
    float* out = softmax.out + i * width;
    const float largest = LargestOrNan<V>(row, width);
    if (!(largest - largest == 0)) {  // not finite
      for (int64_t d = 0; d < width; ++d) out[d] = __builtin_nanf("");
      continue;
    }
    if (softmax.is_greedy[i / softmax.num_together]) {
      int64_t point = 0;
      while (row[point] != largest) ++point;
      for (int64_t d = 0; d < width; ++d) out[d] = 0;
      out[point] = 1;
      continue;
    }
    const auto top = V::Set(-largest), scale = V::Set(softmax.scale[i / softmax.num_together]);
    const auto weight_of = [&](const float* at) { return Exp<V>(V::Divide(V::Add(V::Load(at), top), scale)); };
    double total = 0;
    float lanes[V::kLanes];
    for (int64_t start = 0; start < width; start += kSummed) {
      const int64_t end = start + kSummed < width ? start + kSummed : width;
      auto sums = V::Set(0);
      int64_t d = start;
      for (; d + V::kLanes <= end; d += V::kLanes) {
        const auto weights = weight_of(row + d);
        V::Store(out + d, weights);
        sums = V::Add(sums, weights);
      }
      V::Store(lanes, sums);
      for (float sum : lanes) total += sum;
      if (d < end) {
        for (int64_t j = 0; j < V::kLanes; ++j) lanes[j] = d + j < end ? row[d + j] : largest;
        V::Store(lanes, weight_of(lanes));
        for (int64_t j = 0; d + j < end; ++j) total += out[d + j] = lanes[j];
      }
    }
    const auto divisor = V::Set(static_cast<float>(total));
    int64_t d = 0;
    for (; d + V::kLanes <= width; d += V::kLanes) V::Store(out + d, V::Divide(V::Load(out + d), divisor));
    for (; d < width; ++d) out[d] /= static_cast<float>(total);
  }
}

}  // namespace
}  // namespace spectr

#endif  // SPECTR_JAX_KERNELS_NATIVE_SOFTMAX_H_
