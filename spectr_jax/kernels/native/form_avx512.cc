// Processors with AVX-512 and no products of bfloat16: Skylake-X and later.

#include <immintrin.h>

#include "attention.h"
#include "blocks_avx512.h"
#include "norms.h"
#include "softmax.h"
#include "steps.h"

namespace spectr {
namespace {

struct Avx512 {
  using Floats = __m512;
  using Ints = __m512i;
  static constexpr int kLanes = 16, kSumsOfSingles = 24, kSumsOfPairs = 24, kSumsOfFours = 20;
  static Floats Zero() { return _mm512_setzero_ps(); }
  static Ints Load(const char* at) { return _mm512_loadu_si512(at); }
  static Floats Broadcast(const float* at) { return _mm512_set1_ps(*at); }
  static Floats MultiplyAdd(Floats x, Floats y, Floats sums) { return _mm512_fmadd_ps(x, y, sums); }
  static Floats Multiply(Floats x, float factor) { return _mm512_mul_ps(x, _mm512_set1_ps(factor)); }
  static void Store(float* at, Floats x) { _mm512_storeu_ps(at, x); }
  static Floats AsFloats(Ints x) { return _mm512_castsi512_ps(x); }
  static Floats Converted(Ints x) { return _mm512_cvtepi32_ps(x); }
  static Ints And(Ints x, uint32_t mask) { return _mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(mask))); }
  template <int kBits>
  static Ints ShiftLeft(Ints x) {
    return _mm512_slli_epi32(x, kBits);
  }
};

struct AttentionAvx512 {
  using Floats = __m512;
  static constexpr int kLanes = 16;
  static Floats Set(float x) { return _mm512_set1_ps(x); }
  static Floats Load(const float* at) { return _mm512_loadu_ps(at); }
  static Floats LoadFirst(const float* at, int size) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << size) - 1), at);
  }
  static void Store(float* at, Floats x) { _mm512_storeu_ps(at, x); }
  static Floats Add(Floats x, Floats y) { return _mm512_add_ps(x, y); }
  static Floats Multiply(Floats x, Floats y) { return _mm512_mul_ps(x, y); }
  static Floats Divide(Floats x, Floats y) { return _mm512_div_ps(x, y); }
  static Floats Root(Floats x) { return _mm512_sqrt_ps(x); }
  static Floats MultiplyAdd(Floats x, Floats y, Floats sums) { return _mm512_fmadd_ps(x, y, sums); }
  static Floats Round(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static Floats Scaled(Floats x, Floats n) {  // x 2^n
    return _mm512_mul_ps(x, _mm512_castsi512_ps(_mm512_slli_epi32(
                                _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23)));
  }
  static __mmask16 IsLess(Floats x, Floats y) { return _mm512_cmp_ps_mask(x, y, _CMP_LT_OQ); }
  static Floats Select(__mmask16 mask, Floats x, Floats y) { return _mm512_mask_blend_ps(mask, y, x); }
  static Floats Larger(Floats x, Floats y) { return _mm512_max_ps(x, y); }
};

}  // namespace

void Avx512Attention(const Attention& attention, int64_t first, int64_t last) {
  AttendOf<AttentionAvx512>(attention, first, last);
}

void Avx512Norm(const Norm& norm, int64_t first, int64_t last) { NormOf<AttentionAvx512>(norm, first, last); }

void Avx512Softmax(const Softmax& softmax, int64_t first, int64_t last) {
  SoftmaxOf<AttentionAvx512>(softmax, first, last);
}

void Avx512Totals(const Norm& norm, int64_t first, int64_t last) { TotalsOf<AttentionAvx512>(norm, first, last); }

void Avx512Float32(const Product& product, int64_t first, int64_t last) {
  Compute<Singles<Avx512>>(product, first, last);
}

void Avx512Bfloat16OfWideRows(const Product& product, int64_t first, int64_t last) {
  Compute<Split<Avx512>>(product, first, last);
}

void Avx512Int8(const Product& product, int64_t first, int64_t last) { Compute<Fours<Avx512>>(product, first, last); }

void Avx512Blocks(const BlockProduct& product, int64_t first, int64_t last) {
  BlocksOf<BlocksAvx512>(product, first, last);
}

}  // namespace spectr
