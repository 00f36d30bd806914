// Processors with AVX2 and FMA: Haswell, Zen and later.

#include <immintrin.h>

#include "blocks.h"
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

}  // namespace

void Avx2Float32(const Product& product, int64_t first, int64_t last) { Compute<Singles<Avx2>>(product, first, last); }

void Avx2Bfloat16(const Product& product, int64_t first, int64_t last) { Compute<Split<Avx2>>(product, first, last); }

void Avx2Int8(const Product& product, int64_t first, int64_t last) { Compute<Fours<Avx2>>(product, first, last); }

void Avx2Blocks(const BlockProduct& product, int64_t first, int64_t last) { BlocksOf<BlocksAvx2>(product, first, last); }

void RoundForBlocks(const float* rows, const BlockProduct& product) { RoundInputs(rows, product); }

}  // namespace spectr
