// Processors with AVX2 and FMA: Haswell, Zen and later.

#include <immintrin.h>

#include "panels.h"

namespace spectr {
namespace {

struct Singles {
  using Sums = __m256;
  using Weights = __m256;
  using Input = __m256;
  using Row = float;
  static constexpr int kLanes = 8, kSums = 12;
  static Sums Zero() { return _mm256_setzero_ps(); }
  static Weights Load(const char* at) { return _mm256_loadu_ps(reinterpret_cast<const float*>(at)); }
  static Input Broadcast(const Row* at) { return _mm256_broadcast_ss(at); }
  static Sums Add(Sums sums, Weights weights, Input input) { return _mm256_fmadd_ps(weights, input, sums); }
  static void Store(float* at, Sums sums) { _mm256_storeu_ps(at, sums); }
};

// A bfloat16 is the upper half of a float32. Both of a pair are put there.
struct Split {
  struct Weights {
    __m256 first, second;
  };
  struct Input {
    __m256 first, second;
  };
  struct Row {
    float first, second;
  };
  using Sums = __m256;
  static constexpr int kLanes = 8, kSums = 10;
  static Sums Zero() { return _mm256_setzero_ps(); }
  static Weights Load(const char* at) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)), _mm256_castsi256_ps(_mm256_and_si256(pairs, upper))};
  }
  static Input Broadcast(const Row* at) {
    return {_mm256_broadcast_ss(&at->first), _mm256_broadcast_ss(&at->second)};
  }
  static Sums Add(Sums sums, const Weights& weights, const Input& input) {
    return _mm256_fmadd_ps(weights.second, input.second, _mm256_fmadd_ps(weights.first, input.first, sums));
  }
  static void Store(float* at, Sums sums) { _mm256_storeu_ps(at, sums); }
};

}  // namespace

void Avx2Float32(const Product& product, int64_t first, int64_t last) { Compute<Singles>(product, first, last); }

void Avx2Bfloat16(const Product& product, int64_t first, int64_t last) { Compute<Split>(product, first, last); }

}  // namespace spectr
