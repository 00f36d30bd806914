// Processors with AVX-512 and no products of bfloat16: Skylake-X and later.

#include <immintrin.h>

#include "blocks_avx512.h"
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

}  // namespace

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
