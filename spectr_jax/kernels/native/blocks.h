// Products of a kernel in blocks of 4 or 8 bits, as files of llama.cpp have them, for vectors of any instruction set.
//
// Inputs are rounded to 8 bits, each block of a row with a scale of its own, and multiplied as integers: a sum over a block
// is exact. A weight is scale * value + least, with the value from 0 to 15, or scale * value, from -128 to 127. Panels have
// 16 outputs, as in product.h. A line of 64 bytes has four inputs of each output, in 4 bits two fours: the lower halves of
// bytes are of the first half of a block, the upper ones of the second. An output's blocks are added in the order of the
// inputs, whatever rows there are beside: a row does not depend on its batch.
//
// `V` names the types `Floats`, `Sums` (of products while a block lasts) and `Ints` of a vector, its lanes, and operations.

#ifndef SPECTR_JAX_KERNELS_NATIVE_BLOCKS_H_
#define SPECTR_JAX_KERNELS_NATIVE_BLOCKS_H_

#include <immintrin.h>

#include "product.h"

namespace spectr {
namespace {

constexpr int64_t kBytesOfLine = 64;

// The inputs of a block as 8 bits, with their scale and the sum of what they stand for. A number that is not finite makes
// the scale NaN, and so every output.
template <int kBlock>
inline void Round(const float* row, int8_t* values, float* scale, float* sum) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 largest = _mm256_setzero_ps(), nothing = _mm256_setzero_ps();
  for (int i = 0; i < kBlock; i += 8) {
    const __m256 x = _mm256_loadu_ps(row + i);
    largest = _mm256_max_ps(largest, _mm256_andnot_ps(sign, x));
    nothing = _mm256_fmadd_ps(x, _mm256_setzero_ps(), nothing);
  }
  float lanes[8], none[8];
  _mm256_storeu_ps(lanes, largest);
  _mm256_storeu_ps(none, nothing);
  for (int i = 1; i < 8; ++i) {
    lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
    none[0] += none[i];
  }
  const __m256 factor = _mm256_set1_ps(lanes[0] > 1e-30f ? 127 / lanes[0] : 0);
  __m256i total = _mm256_setzero_si256();
  for (int i = 0; i < kBlock; i += 8) {
    const __m256i rounded = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(row + i), factor));
    total = _mm256_add_epi32(total, rounded);
    const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(values + i), _mm_packs_epi16(halves, halves));
  }
  int32_t sums[8];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums), total);
  for (int i = 1; i < 8; ++i) sums[0] += sums[i];
  *scale = lanes[0] / 127 + none[0];
  *sum = *scale * static_cast<float>(sums[0]);
}

template <int kBlock>
inline void RoundRows(const float* rows, const BlockProduct& product) {
  const int64_t num_blocks = product.num_rows * product.num_blocks;
  for (int64_t i = 0; i < num_blocks; ++i)
    Round<kBlock>(rows + i * kBlock, product.values + i * kBlock, product.scales + i, product.sums + i);
}

inline void RoundInputs(const float* rows, const BlockProduct& product) {
  product.block_size == 16 ? RoundRows<16>(rows, product) : RoundRows<32>(rows, product);
}

// Products of a block: sums of `kNumRows` rows and a panel while the block lasts, in registers. A line is taken apart once
// for all rows, and an input is read once for all vectors. In 8 bits the two halves of a byte are summed apart where the
// processor does not multiply by whole bytes.
template <class V, int kBits, int kNumRows>
struct BlockSums {
  static constexpr int kVectors = kPanel / V::kLanes, kParts = kBits == 8 && !V::kTakesBytes ? 2 : 1;
  typename V::Sums of[kNumRows][kVectors][kParts];

  BlockSums() {
    for (int r = 0; r < kNumRows; ++r)
      for (int v = 0; v < kVectors; ++v)
        for (int part = 0; part < kParts; ++part) of[r][v][part] = V::NoSums();
  }

  // Adds the products of four inputs of each row.
  __attribute__((always_inline)) void Add(const typename V::Ints (&weights)[kVectors], int part, const int8_t* values,
                                          int64_t stride) {
    for (int r = 0; r < kNumRows; ++r) {
      const auto four = V::Broadcast(values + r * stride);
      for (int v = 0; v < kVectors; ++v) of[r][v][part] = V::Add(of[r][v][part], weights[v], four);
    }
  }

  // Adds a line, of the inputs at `values`, and in 4 bits also of those half a block later.
  __attribute__((always_inline)) void AddLine(const uint8_t* line, const int8_t* values, int64_t stride,
                                              int half_a_block) {
    typename V::Ints lower[kVectors], upper[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const auto bytes = V::Load(line + v * (kBytesOfLine / kVectors));
      const auto all = kBits == 4 ? bytes : V::Raised(bytes);
      lower[v] = kBits == 8 && kParts == 1 ? all : V::Lower(all);
      upper[v] = V::Upper(all);
    }
    Add(lower, 0, values, stride);
    if constexpr (kBits == 4) Add(upper, 0, values + half_a_block, stride);
    if constexpr (kParts == 2) Add(upper, 1, values, stride);
  }

  __attribute__((always_inline)) typename V::Floats Total(int r, int v) const {
    if constexpr (kParts == 1) return V::Total(of[r][v][0]);
    return V::MultiplyAdd(V::Total(of[r][v][kParts - 1]), V::Set(16), V::Total(of[r][v][0]));
  }
};

// The sums of `kNumRows` rows and a panel.
template <class V, int kBits, int kBlock, class Scale, int kNumRows>
inline void PanelOfRows(const BlockProduct& product, int64_t row, int64_t panel, float* out, int64_t out_stride) {
  constexpr int kVectors = kPanel / V::kLanes;
  constexpr int64_t kBytes = kPanel * kBlock * kBits / 8;
  const int64_t num_blocks = product.num_blocks, stride = num_blocks * kBlock;
  const uint8_t* block = product.weights + panel * num_blocks * kBytes;
  const auto* scales = static_cast<const Scale*>(product.weight_scales) + panel * num_blocks * kPanel;
  const auto* least = static_cast<const Scale*>(product.weight_least) + panel * num_blocks * kPanel;
  typename V::Floats sums[kNumRows][kVectors];
  for (int r = 0; r < kNumRows; ++r)
    for (int v = 0; v < kVectors; ++v) sums[r][v] = V::Set(0);
  for (int64_t b = 0; b < num_blocks; ++b, block += kBytes) {
    BlockSums<V, kBits, kNumRows> products;
    const int8_t* values = product.values + row * stride + b * kBlock;
    for (int64_t line = 0; line < kBytes / kBytesOfLine; ++line) {
      __builtin_prefetch(block + line * kBytesOfLine + 4096);
      products.AddLine(block + line * kBytesOfLine, values + 4 * line, stride, kBlock / 2);
    }
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = b * kPanel + v * V::kLanes;
      const auto scale = V::Load(scales + at);
      typename V::Floats lowest;
      if constexpr (kBits == 4)
        lowest = V::Load(least + at);
      else
        lowest = V::Multiply(scale, V::Set(-128));
      for (int r = 0; r < kNumRows; ++r) {
        const int64_t own = (row + r) * num_blocks + b;
        const auto both = V::Multiply(scale, V::Set(product.scales[own]));
        sums[r][v] = V::MultiplyAdd(lowest, V::Set(product.sums[own]),
                                    V::MultiplyAdd(products.Total(r, v), both, sums[r][v]));
      }
    }
  }
  for (int r = 0; r < kNumRows; ++r)
    for (int v = 0; v < kVectors; ++v) V::Store(out + r * out_stride + v * V::kLanes, sums[r][v]);
}

// As `PanelOfRows`, with a number of rows that is known at run time.
template <class V, int kBits, int kBlock, class Scale, int kNumRows>
inline void PanelOfSomeRows(int64_t num_rows, const BlockProduct& product, int64_t row, int64_t panel, float* out,
                            int64_t out_stride) {
  if constexpr (kNumRows > 0) {
    if (num_rows == kNumRows) return PanelOfRows<V, kBits, kBlock, Scale, kNumRows>(product, row, panel, out, out_stride);
    PanelOfSomeRows<V, kBits, kBlock, Scale, kNumRows - 1>(num_rows, product, row, panel, out, out_stride);
  }
}

template <class V, int kBits, int kBlock, class Scale>
void ComputeBlocks(const BlockProduct& product, int64_t first, int64_t last) {
  constexpr int kMostRows = kBits == 8 && !V::kTakesBytes ? (V::kMostRows + 1) / 2 : V::kMostRows;
  const int64_t num_parts = (product.num_rows + kMostRows - 1) / kMostRows;
  for (int64_t panel = first; panel < last; ++panel) {
    const int64_t rest = product.num_out - panel * kPanel;
    float* out = product.out + panel * kPanel;
    for (int64_t part = 0, row = 0; part < num_parts; ++part) {
      const int64_t size = (product.num_rows - row + num_parts - part - 1) / (num_parts - part);
      if (rest >= kPanel) {
        PanelOfSomeRows<V, kBits, kBlock, Scale, kMostRows>(size, product, row, panel, out + row * product.num_out,
                                                            product.num_out);
      } else {
        float edge[kMostRows * kPanel];
        PanelOfSomeRows<V, kBits, kBlock, Scale, kMostRows>(size, product, row, panel, edge, kPanel);
        for (int64_t r = 0; r < size; ++r)
          for (int64_t i = 0; i < rest; ++i) out[(row + r) * product.num_out + i] = edge[r * kPanel + i];
      }
      row += size;
    }
  }
}

template <class V>
void BlocksOf(const BlockProduct& product, int64_t first, int64_t last) {
  if (product.num_bits == 4)
    product.has_wide_scales ? ComputeBlocks<V, 4, 32, float>(product, first, last)
                            : ComputeBlocks<V, 4, 32, Half>(product, first, last);
  else if (product.block_size == 16)
    ComputeBlocks<V, 8, 16, float>(product, first, last);
  else
    product.has_wide_scales ? ComputeBlocks<V, 8, 32, float>(product, first, last)
                            : ComputeBlocks<V, 8, 32, Half>(product, first, last);
}

// Vectors of AVX2. Products of pairs are summed in 16 bits: eight times 2 * 15 * 127 fit.
struct BlocksAvx2 {
  using Floats = __m256;
  using Ints = __m256i;
  using Sums = __m256i;
  static constexpr int kLanes = 8, kMostRows = 3;
  static constexpr bool kTakesBytes = false;
  static Floats Set(float x) { return _mm256_set1_ps(x); }
  static Ints Load(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
  static Floats Load(const float* at) { return _mm256_loadu_ps(at); }
  static Floats Load(const Half* at) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  }
  static Ints Lower(Ints x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
  static Ints Upper(Ints x) { return Lower(_mm256_srli_epi16(x, 4)); }
  static Ints Raised(Ints x) { return _mm256_xor_si256(x, _mm256_set1_epi8(-128)); }
  static Ints Broadcast(const int8_t* at) {
    int four;
    __builtin_memcpy(&four, at, 4);
    return _mm256_set1_epi32(four);
  }
  static Sums NoSums() { return _mm256_setzero_si256(); }
  static Sums Add(Sums sums, Ints weights, Ints four) {
    sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(weights, four));
    __asm__("" : "+x"(sums));  // or the compiler keeps all products in memory, and adds them last
    return sums;
  }
  static Floats Total(Sums sums) { return _mm256_cvtepi32_ps(_mm256_madd_epi16(sums, _mm256_set1_epi16(1))); }
  static Floats Multiply(Floats x, Floats y) { return _mm256_mul_ps(x, y); }
  static Floats MultiplyAdd(Floats x, Floats y, Floats sums) { return _mm256_fmadd_ps(x, y, sums); }
  static void Store(float* at, Floats x) { _mm256_storeu_ps(at, x); }
};

}  // namespace
}  // namespace spectr

#endif  // SPECTR_JAX_KERNELS_NATIVE_BLOCKS_H_
