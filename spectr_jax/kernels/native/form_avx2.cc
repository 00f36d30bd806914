// Processors with AVX2 and FMA: Haswell, Zen and later.

#include <immintrin.h>

#include "attention.h"
#include "blocks.h"
#include "norms.h"
#include "softmax.h"
#include "steps.h"

namespace spectr {
namespace {

struct Avx2 {
  using Floats = __m256;
  using Ints = __m256i;
  static constexpr int kLanes = 8, kSumsOfSingles = 12, kSumsOfPairs = 10, kSumsOfFours = 10;
  static Floats Zero() { return _mm256_setzero_ps(); }
  static Ints Load(const char* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
  static Floats Broadcast(const float* at) { return _mm256_broadcast_ss(at); }
  static Floats MultiplyAdd(Floats x, Floats y, Floats sums) { return _mm256_fmadd_ps(x, y, sums); }
  static Floats Multiply(Floats x, float factor) { return _mm256_mul_ps(x, _mm256_set1_ps(factor)); }
  static void Store(float* at, Floats x) { _mm256_storeu_ps(at, x); }
  static Floats AsFloats(Ints x) { return _mm256_castsi256_ps(x); }
  static Floats Converted(Ints x) { return _mm256_cvtepi32_ps(x); }
  static Ints And(Ints x, uint32_t mask) { return _mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(mask))); }
  template <int kBits>
  static Ints ShiftLeft(Ints x) {
    return _mm256_slli_epi32(x, kBits);
  }
};

struct AttentionAvx2 {
  using Floats = __m256;
  static constexpr int kLanes = 8;
  static Floats Set(float x) { return _mm256_set1_ps(x); }
  static Floats Load(const float* at) { return _mm256_loadu_ps(at); }
  static Floats LoadFirst(const float* at, int size) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_maskload_ps(at, _mm256_cmpgt_epi32(_mm256_set1_epi32(size), lanes));
  }
  static void Store(float* at, Floats x) { _mm256_storeu_ps(at, x); }
  static Floats Add(Floats x, Floats y) { return _mm256_add_ps(x, y); }
  static Floats Multiply(Floats x, Floats y) { return _mm256_mul_ps(x, y); }
  static Floats Divide(Floats x, Floats y) { return _mm256_div_ps(x, y); }
  static Floats Root(Floats x) { return _mm256_sqrt_ps(x); }
  static Floats MultiplyAdd(Floats x, Floats y, Floats sums) { return _mm256_fmadd_ps(x, y, sums); }
  static Floats Round(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static Floats Scaled(Floats x, Floats n) {  // x 2^n
    return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(
                                _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23)));
  }
  static Floats IsLess(Floats x, Floats y) { return _mm256_cmp_ps(x, y, _CMP_LT_OQ); }
  static Floats Select(Floats mask, Floats x, Floats y) { return _mm256_blendv_ps(y, x, mask); }
  static Floats Larger(Floats x, Floats y) { return _mm256_max_ps(x, y); }
};

}  // namespace

void Avx2Attention(const Attention& attention, int64_t first, int64_t last) {
  AttendOf<AttentionAvx2>(attention, first, last);
}

void Avx2Norm(const Norm& norm, int64_t first, int64_t last) { NormOf<AttentionAvx2>(norm, first, last); }

void Avx2Softmax(const Softmax& softmax, int64_t first, int64_t last) {
  SoftmaxOf<AttentionAvx2>(softmax, first, last);
}

void Avx2Totals(const Norm& norm, int64_t first, int64_t last) { TotalsOf<AttentionAvx2>(norm, first, last); }

void Avx2Float32(const Product& product, int64_t first, int64_t last) { Compute<Singles<Avx2>>(product, first, last); }

void Avx2Bfloat16(const Product& product, int64_t first, int64_t last) { Compute<Split<Avx2>>(product, first, last); }

void Avx2Int8(const Product& product, int64_t first, int64_t last) { Compute<Fours<Avx2>>(product, first, last); }

void Avx2Blocks(const BlockProduct& product, int64_t first, int64_t last) { BlocksOf<BlocksAvx2>(product, first, last); }

void RoundForBlocks(const float* rows, const BlockProduct& product) { RoundInputs(rows, product); }

}  // namespace spectr
