// Processors that multiply pairs of bfloat16: Zen 4, Cooper Lake, Sapphire Rapids and later.

#include <immintrin.h>

#include "panels.h"

namespace spectr {
namespace {

struct Pairs {
  using Sums = __m512;
  using Weights = __m512i;
  using Input = __m512i;
  using Row = uint32_t;
  static constexpr int kLanes = 16, kSums = 24;
  static Sums Zero() { return _mm512_setzero_ps(); }
  static Weights Load(const char* at) { return _mm512_loadu_si512(at); }
  static Input Broadcast(const Row* at) { return _mm512_set1_epi32(static_cast<int>(*at)); }
  static Sums Add(Sums sums, Weights weights, Input input) {
    return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(weights), reinterpret_cast<__m512bh>(input));
  }
  static void Store(float* at, Sums sums) { _mm512_storeu_ps(at, sums); }
};

}  // namespace

void Avx512Bfloat16(const Product& product, int64_t first, int64_t last) { Compute<Pairs>(product, first, last); }

}  // namespace spectr
