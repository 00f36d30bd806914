// What a product is, and what a form for a kind of processor offers.
//
// A kernel [in, out] is packed once: panels of 16 outputs, in each of which the weights stand in the order in which they
// are read. In float32 it is [out / 16][in][16]. In bfloat16 two inputs stand beside each other, [out / 16][in / 2][16][2],
// in int8 four, [out / 16][in / 4][16][4]. A step of each is a cache line. A panel is read from its beginning to its end,
// and no sum crosses the lanes of a register.

#ifndef SPECTR_JAX_KERNELS_NATIVE_PRODUCT_H_
#define SPECTR_JAX_KERNELS_NATIVE_PRODUCT_H_

#include <cstdint>

namespace spectr {

constexpr int64_t kPanel = 16;  // outputs of a panel

struct Product {
  const void* rows;  // [num_rows, num_steps], of one, two or four inputs each
  const char* panels;
  float* out;  // [num_rows, num_out]
  int64_t num_rows;
  int64_t num_steps;  // inputs in float32, pairs of inputs in bfloat16, fours in int8
  int64_t num_out;
};

using Half = uint16_t;  // the bits of a float16

// The product of rows and a kernel in blocks; see blocks.h.
struct BlockProduct {
  int8_t* values;  // [num_rows, num_blocks, block_size], rounded inputs
  float* scales;   // [num_rows, num_blocks], of a block's inputs
  float* sums;     // [num_rows, num_blocks], of a block's inputs after rounding
  const uint8_t* weights;     // [panels][num_blocks] of 16 * block_size weights
  const void* weight_scales;  // [panels][num_blocks][16], float16 or float32
  const void* weight_least;   // likewise, in 4 bits
  float* out;                 // [num_rows, num_out]
  int64_t num_rows, num_blocks, num_out, block_size, num_bits;
  bool has_wide_scales;
};

// Attention over a cache and pending tokens; see attention.h. Rows of `visible` and `mask` may be one for all.
struct Attention {
  const float* query;       // [batch, num_queries, num_heads, width], scaled
  const float* new_keys;    // [batch, num_kv_heads, width, num_new]
  const float* new_values;  // [batch, num_kv_heads, num_new, width]
  const uint8_t* mask;      // [num_mask_rows, num_queries, num_new]
  const float* keys;        // [batch, num_kv_heads, width, num_slots]
  const float* values;      // [batch, num_kv_heads, num_slots, width]
  const uint8_t* visible;   // [batch, num_visible_rows, num_slots]
  const int64_t* num_seen;  // [batch], slots up to the last that a query sees
  const int32_t* places;    // [batch, num_queries], the slot that each query's own token will take
  const float* sinks;       // [num_heads], scores that count in a softmax and mix no value; or null
  float* out;               // like `query`
  int64_t num_queries, num_heads, num_kv_heads, width, num_new, num_slots, num_mask_rows, num_visible_rows;
  float soft_cap;  // the bound of scores; 0 for none
};

// Root-mean-square norms, or with a bias layer norms; or without a gain sums of rows.
struct Norm {
  const float* rows;  // [num_rows, width]
  const float* gain;  // [width], or null
  const float* bias;  // [width], or null
  float* out;         // [num_rows, width], or [num_rows] sums
  int64_t width;
  float epsilon;
};

// Distributions of rows of logits.
struct Softmax {
  const float* logits;       // [num_rows, width]
  const float* scale;        // one of every `num_together` rows
  const uint8_t* is_greedy;  // likewise
  float* out;                // [num_rows, width]
  int64_t num_together, width;
};

constexpr int kItemRows = 16, kMostWidth = 512;  // rows of an item, and numbers of a head

// Computes the outputs of the panels from `first` to `last`, the latter excluded.
using Panels = void(const Product&, int64_t first, int64_t last);
using BlockPanels = void(const BlockProduct&, int64_t first, int64_t last);
// Computes the items from `first` to `last`: of each row of the batch the heads of keys, and of each its rows of queries.
using Items = void(const Attention&, int64_t first, int64_t last);
// Computes the rows from `first` to `last`.
using NormRows = void(const Norm&, int64_t first, int64_t last);
using SoftmaxRows = void(const Softmax&, int64_t first, int64_t last);

// The loop of each kind of processor, in a file of its own, which is compiled for these processors and must be called on
// them alone. Nothing of the standard library is used there: the linker keeps one copy of an inline function, perhaps
// that one. Rows are float32 where the name does not say otherwise.
Panels Avx512Bfloat16, Avx512Bfloat16OfWideRows, Avx512Float32, Avx512Int8, Avx2Bfloat16, Avx2Float32, Avx2Int8;
BlockPanels Avx512VnniBlocks, Avx512Blocks, Avx2Blocks;
Items Avx512Attention, Avx2Attention;
NormRows Avx512Norm, Avx512Totals, Avx2Norm, Avx2Totals;
SoftmaxRows Avx512Softmax, Avx2Softmax;
// Rounds rows [num_rows, num_blocks * block_size] to the inputs of a product.
void RoundForBlocks(const float* rows, const BlockProduct& product);

}  // namespace spectr

#endif  // SPECTR_JAX_KERNELS_NATIVE_PRODUCT_H_
