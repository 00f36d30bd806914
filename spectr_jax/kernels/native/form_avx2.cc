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

// Four int8 of an output stand in 32 bits. Each is put into the upper byte, the others cleared, and converted: to 2^24
// times its value, which the end of a sum takes back, exactly.
struct Fours {
  struct Weights {
    __m256 of[4];
  };
  struct Input {
    __m256 of[4];
  };
  struct Row {
    float of[4];
  };
  using Sums = __m256;
  static constexpr int kLanes = 8, kSums = 10;
  static Sums Zero() { return _mm256_setzero_ps(); }
  static __m256 Widened(__m256i upper) { return _mm256_cvtepi32_ps(upper); }
  static Weights Load(const char* at) {
    const __m256i fours = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xff000000u));
    return {{Widened(_mm256_slli_epi32(fours, 24)), Widened(_mm256_and_si256(_mm256_slli_epi32(fours, 16), upper)),
             Widened(_mm256_and_si256(_mm256_slli_epi32(fours, 8), upper)), Widened(_mm256_and_si256(fours, upper))}};
  }
  static Input Broadcast(const Row* at) {
    return {{_mm256_broadcast_ss(&at->of[0]), _mm256_broadcast_ss(&at->of[1]), _mm256_broadcast_ss(&at->of[2]), _mm256_broadcast_ss(&at->of[3])}};
  }
  static Sums Add(Sums sums, const Weights& weights, const Input& input) {
    for (int i = 0; i < 4; ++i) sums = _mm256_fmadd_ps(weights.of[i], input.of[i], sums);
    return sums;
  }
  static void Store(float* at, Sums sums) { _mm256_storeu_ps(at, _mm256_mul_ps(sums, _mm256_set1_ps(0x1p-24f))); }
};

}  // namespace

void Avx2Float32(const Product& product, int64_t first, int64_t last) { Compute<Singles>(product, first, last); }

void Avx2Bfloat16(const Product& product, int64_t first, int64_t last) { Compute<Split>(product, first, last); }

void Avx2Int8(const Product& product, int64_t first, int64_t last) { Compute<Fours>(product, first, last); }

}  // namespace spectr
