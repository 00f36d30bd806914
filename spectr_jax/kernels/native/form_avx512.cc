// Processors with AVX-512 and no products of bfloat16: Skylake-X and later.

#include <immintrin.h>

#include "panels.h"

namespace spectr {
namespace {

struct Singles {
  using Sums = __m512;
  using Weights = __m512;
  using Input = __m512;
  using Row = float;
  static constexpr int kLanes = 16, kSums = 24;
  static Sums Zero() { return _mm512_setzero_ps(); }
  static Weights Load(const char* at) { return _mm512_loadu_ps(at); }
  static Input Broadcast(const Row* at) { return _mm512_set1_ps(*at); }
  static Sums Add(Sums sums, Weights weights, Input input) { return _mm512_fmadd_ps(weights, input, sums); }
  static void Store(float* at, Sums sums) { _mm512_storeu_ps(at, sums); }
};

// A bfloat16 is the upper half of a float32. Both of a pair are put there.
struct Split {
  struct Weights {
    __m512 first, second;
  };
  struct Input {
    __m512 first, second;
  };
  struct Row {
    float first, second;
  };
  using Sums = __m512;
  static constexpr int kLanes = 16, kSums = 24;
  static Sums Zero() { return _mm512_setzero_ps(); }
  static Weights Load(const char* at) {
    const __m512i pairs = _mm512_loadu_si512(at);
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)), _mm512_castsi512_ps(_mm512_and_si512(pairs, upper))};
  }
  static Input Broadcast(const Row* at) { return {_mm512_set1_ps(at->first), _mm512_set1_ps(at->second)}; }
  static Sums Add(Sums sums, const Weights& weights, const Input& input) {
    return _mm512_fmadd_ps(weights.second, input.second, _mm512_fmadd_ps(weights.first, input.first, sums));
  }
  static void Store(float* at, Sums sums) { _mm512_storeu_ps(at, sums); }
};

// Four int8 of an output stand in 32 bits. Each is put into the upper byte, the others cleared, and converted: to 2^24
// times its value, which the end of a sum takes back, exactly.
struct Fours {
  struct Weights {
    __m512 of[4];
  };
  struct Input {
    __m512 of[4];
  };
  struct Row {
    float of[4];
  };
  using Sums = __m512;
  static constexpr int kLanes = 16, kSums = 20;
  static Sums Zero() { return _mm512_setzero_ps(); }
  static __m512 Widened(__m512i upper) { return _mm512_cvtepi32_ps(upper); }
  static Weights Load(const char* at) {
    const __m512i fours = _mm512_loadu_si512(at);
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xff000000u));
    return {{Widened(_mm512_slli_epi32(fours, 24)), Widened(_mm512_and_si512(_mm512_slli_epi32(fours, 16), upper)),
             Widened(_mm512_and_si512(_mm512_slli_epi32(fours, 8), upper)), Widened(_mm512_and_si512(fours, upper))}};
  }
  static Input Broadcast(const Row* at) {
    return {{_mm512_set1_ps(at->of[0]), _mm512_set1_ps(at->of[1]), _mm512_set1_ps(at->of[2]), _mm512_set1_ps(at->of[3])}};
  }
  static Sums Add(Sums sums, const Weights& weights, const Input& input) {
    for (int i = 0; i < 4; ++i) sums = _mm512_fmadd_ps(weights.of[i], input.of[i], sums);
    return sums;
  }
  static void Store(float* at, Sums sums) { _mm512_storeu_ps(at, _mm512_mul_ps(sums, _mm512_set1_ps(0x1p-24f))); }
};

}  // namespace

void Avx512Float32(const Product& product, int64_t first, int64_t last) { Compute<Singles>(product, first, last); }

void Avx512Bfloat16OfWideRows(const Product& product, int64_t first, int64_t last) { Compute<Split>(product, first, last); }

void Avx512Int8(const Product& product, int64_t first, int64_t last) { Compute<Fours>(product, first, last); }

}  // namespace spectr
