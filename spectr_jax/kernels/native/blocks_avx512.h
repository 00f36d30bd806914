// Vectors of AVX-512 for products of kernels in blocks, with and without VNNI. Included by the forms that have them.

#include "blocks.h"

namespace spectr {
namespace {

struct BlocksAvx512 {
  using Floats = __m512;
  using Ints = __m512i;
  using Sums = __m512i;
  static constexpr int kLanes = 16, kMostRows = 12;
  static constexpr bool kTakesBytes = false;
  static Floats Set(float x) { return _mm512_set1_ps(x); }
  static Ints Load(const uint8_t* at) { return _mm512_loadu_si512(at); }
  static Floats Load(const float* at) { return _mm512_loadu_ps(at); }
  static Floats Load(const Half* at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
  }
  static Ints Lower(Ints x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
  static Ints Upper(Ints x) { return Lower(_mm512_srli_epi16(x, 4)); }
  static Ints Raised(Ints x) { return _mm512_xor_si512(x, _mm512_set1_epi8(-128)); }
  static Ints Broadcast(const int8_t* at) {
    int four;
    __builtin_memcpy(&four, at, 4);
    return _mm512_set1_epi32(four);
  }
  static Sums NoSums() { return _mm512_setzero_si512(); }
  static Sums Add(Sums sums, Ints weights, Ints four) {
    sums = _mm512_add_epi16(sums, _mm512_maddubs_epi16(weights, four));
    __asm__("" : "+v"(sums));  // as in blocks.h
    return sums;
  }
  static Floats Total(Sums sums) { return _mm512_cvtepi32_ps(_mm512_madd_epi16(sums, _mm512_set1_epi16(1))); }
  static Floats Multiply(Floats x, Floats y) { return _mm512_mul_ps(x, y); }
  static Floats MultiplyAdd(Floats x, Floats y, Floats sums) { return _mm512_fmadd_ps(x, y, sums); }
  static void Store(float* at, Floats x) { _mm512_storeu_ps(at, x); }
};

#ifdef __AVX512VNNI__
struct BlocksVnni : BlocksAvx512 {
  static constexpr bool kTakesBytes = true;
  static Sums Add(Sums sums, Ints weights, Ints four) {
    sums = _mm512_dpbusd_epi32(sums, weights, four);
    __asm__("" : "+v"(sums));  // as in blocks.h
    return sums;
  }
  static Floats Total(Sums sums) { return _mm512_cvtepi32_ps(sums); }
};
#endif

}  // namespace
}  // namespace spectr
