// Attention of few queries over a cache and pending tokens, for vectors of any instruction set.
//
// Query heads that share keys are rows of one item, at most kItemRows at a time. An item goes through the slots in blocks
// and keeps the largest score, the sum of weights and the mixed values of each row (Milakov and Gimelshein 2018). Keys have
// slots last, so that lanes are slots; values have the width of a head last, so that lanes are its numbers. What a row
// computes does not depend on the rows beside it.
//
// `V` names the type `Floats` of a vector, its lanes, and operations.

#ifndef SPECTR_JAX_KERNELS_NATIVE_ATTENTION_H_
#define SPECTR_JAX_KERNELS_NATIVE_ATTENTION_H_

#include <immintrin.h>

#include "product.h"

namespace spectr {
namespace {

constexpr int kBlockSlots = 256, kTileRows = 4;
constexpr float kHidden = -3.4028234663852886e38f;  // score of a slot that is not seen

// exp, within 2 units in the last place, by 2^n times a polynomial (coefficients of Cephes' expf); 0 below -87, and NaN of
// NaN. Scores are at most 0 here.
template <class V>
inline typename V::Floats Exp(typename V::Floats x) {
  const auto is_small = V::IsLess(x, V::Set(-87.0f));
  x = V::Select(is_small, V::Set(-87.0f), x);
  const auto n = V::Round(V::Multiply(x, V::Set(1.44269504f)));
  auto r = V::MultiplyAdd(n, V::Set(-0.693359375f), x);
  r = V::MultiplyAdd(n, V::Set(2.12194440e-4f), r);
  auto p = V::Set(1.9875691500e-4f);
  p = V::MultiplyAdd(p, r, V::Set(1.3981999507e-3f));
  p = V::MultiplyAdd(p, r, V::Set(8.3334519073e-3f));
  p = V::MultiplyAdd(p, r, V::Set(4.1665795894e-2f));
  p = V::MultiplyAdd(p, r, V::Set(1.6666665459e-1f));
  p = V::MultiplyAdd(p, r, V::Set(5.0000001201e-1f));
  p = V::Add(V::MultiplyAdd(p, V::Multiply(r, r), r), V::Set(1));
  return V::Select(is_small, V::Set(0), V::Scaled(p, n));
}

// The largest score of a row. NaN is none, but makes the sum of weights NaN.
template <class V>
inline float Largest(const float* row, int size) {
  auto largest = V::Set(kHidden);
  for (int i = 0; i < size; i += V::kLanes) largest = V::Larger(V::Load(row + i), largest);
  float lanes[V::kLanes];
  V::Store(lanes, largest);
  for (int i = 1; i < V::kLanes; ++i) lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
  return lanes[0];
}

// Scores of kRows rows [kRows][width] and the slots of two vectors, or of what there is of one.
template <class V, int kRows, bool kIsWhole>
inline void Scores(const float* query, int64_t width, const float* keys, int64_t stride, int size, float* scores) {
  constexpr int kVectors = kIsWhole ? 2 : 1;
  typename V::Floats sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) sums[r][v] = V::Set(0);
  for (int64_t d = 0; d < width; ++d) {
    typename V::Floats key[kVectors];
    for (int v = 0; v < kVectors; ++v)
      key[v] = kIsWhole ? V::Load(keys + d * stride + v * V::kLanes) : V::LoadFirst(keys + d * stride, size);
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v) sums[r][v] = V::MultiplyAdd(V::Set(query[r * width + d]), key[v], sums[r][v]);
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) V::Store(scores + r * kBlockSlots + v * V::kLanes, sums[r][v]);
}

// Adds the values of `size` slots times the weights of kRows rows to two vectors of each, or to one.
template <class V, int kRows, int kVectors>
inline void Mix(const float* weights, int size, const float* values, int64_t width, float* mixed) {
  typename V::Floats sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) sums[r][v] = V::Load(mixed + r * width + v * V::kLanes);
  for (int s = 0; s < size; ++s) {
    typename V::Floats value[kVectors];
    for (int v = 0; v < kVectors; ++v) value[v] = V::Load(values + s * width + v * V::kLanes);
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v)
        sums[r][v] = V::MultiplyAdd(V::Set(weights[r * kBlockSlots + s]), value[v], sums[r][v]);
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) V::Store(mixed + r * width + v * V::kLanes, sums[r][v]);
}

// The rows of an item: their queries, and what they keep while they go through the slots.
template <class V>
struct AttentionItem {
  int64_t width;
  int num_rows;
  float query[kItemRows * kMostWidth], mixed[kItemRows * kMostWidth];
  float scores[kItemRows * kBlockSlots];
  float top[kItemRows], total[kItemRows];
  const uint8_t* seen[kItemRows];  // the slots that each row sees

  template <int kRows>
  inline void AddTile(int row, const float* keys, int64_t stride, const float* values, int size) {
    float* own = scores + row * kBlockSlots;
    for (int s = 0; s < size; s += 2 * V::kLanes) {
      if (size - s >= 2 * V::kLanes) {
        Scores<V, kRows, true>(query + row * width, width, keys + s, stride, 0, own + s);
        continue;
      }
      for (int part = s; part < size; part += V::kLanes) {
        const int rest = size - part < V::kLanes ? size - part : V::kLanes;
        Scores<V, kRows, false>(query + row * width, width, keys + part, stride, rest, own + part);
      }
    }
    const int padded = (size + V::kLanes - 1) / V::kLanes * V::kLanes;
    for (int r = 0; r < kRows; ++r) {
      float* line = own + r * kBlockSlots;
      const uint8_t* visible = seen[row + r];
      for (int s = 0; s < size; ++s) line[s] = visible[s] ? line[s] : kHidden;
      for (int s = size; s < padded; ++s) line[s] = kHidden;
      const float before = top[row + r], largest = Largest<V>(line, padded);
      const float now = before > largest ? before : largest;
      auto sum = V::Set(0);
      for (int s = 0; s < padded; s += V::kLanes) {
        const auto weight = Exp<V>(V::Add(V::Load(line + s), V::Set(-now)));
        V::Store(line + s, weight);
        sum = V::Add(sum, weight);
      }
      float lanes[V::kLanes];
      V::Store(lanes, Exp<V>(V::Set(before - now)));
      const float kept = lanes[0];
      V::Store(lanes, sum);
      for (int i = 1; i < V::kLanes; ++i) lanes[0] += lanes[i];
      // A row that has seen nothing yet gives every hidden slot the weight 1; the first that it sees makes that 0. Slots
      // behind the end never count.
      const float surplus = now == kHidden ? static_cast<float>(padded - size) : 0;
      total[row + r] = kept * total[row + r] + lanes[0] - surplus;
      top[row + r] = now;
      float* own_mixed = mixed + (row + r) * width;
      for (int64_t d = 0; d < width; d += V::kLanes)
        V::Store(own_mixed + d, V::Multiply(V::Load(own_mixed + d), V::Set(kept)));
    }
    int64_t d = 0;
    for (; d + 2 * V::kLanes <= width; d += 2 * V::kLanes)
      Mix<V, kRows, 2>(own, size, values + d, width, mixed + row * width + d);
    if (d < width) Mix<V, kRows, 1>(own, size, values + d, width, mixed + row * width + d);
  }

  // Adds `size` slots, with keys [width][stride] and values [size][width].
  void Add(const float* keys, int64_t stride, const float* values, int size) {
    int row = 0;
    for (; row + kTileRows <= num_rows; row += kTileRows) AddTile<kTileRows>(row, keys, stride, values, size);
    for (; row < num_rows; ++row) AddTile<1>(row, keys, stride, values, size);
  }

  // Adds all of `count` slots, and moves on what each row sees.
  void AddAll(const float* keys, int64_t stride, const float* values, int64_t count) {
    for (int64_t start = 0; start < count; start += kBlockSlots) {
      const int size = count - start < kBlockSlots ? static_cast<int>(count - start) : kBlockSlots;
      Add(keys + start, stride, values + start * width, size);
      for (int r = 0; r < num_rows; ++r) seen[r] += size;
    }
  }
};

template <class V>
void AttendOf(const Attention& attention, int64_t first, int64_t last) {
  const int64_t group = attention.num_heads / attention.num_kv_heads, width = attention.width;
  const int64_t num_rows = attention.num_queries * group, num_parts = (num_rows + kItemRows - 1) / kItemRows;
  const int64_t num_new = attention.num_new, num_slots = attention.num_slots;
  AttentionItem<V> item;
  item.width = width;
  for (int64_t i = first; i < last; ++i) {
    const int64_t part = i % num_parts, head = i / num_parts % attention.num_kv_heads;
    const int64_t batch = i / num_parts / attention.num_kv_heads;
    const int64_t begin = part * num_rows / num_parts, end = (part + 1) * num_rows / num_parts;
    const int64_t kv = batch * attention.num_kv_heads + head;
    item.num_rows = static_cast<int>(end - begin);
    int64_t at[kItemRows];  // of each row's numbers among the queries
    for (int r = 0; r < item.num_rows; ++r) {
      const int64_t node = (begin + r) / group, own = head * group + (begin + r) % group;
      at[r] = ((batch * attention.num_queries + node) * attention.num_heads + own) * width;
      for (int64_t d = 0; d < width; ++d) {
        item.query[r * width + d] = attention.query[at[r] + d];
        item.mixed[r * width + d] = 0;
      }
      item.top[r] = kHidden;
      item.total[r] = 0;
      item.seen[r] =
          attention.visible + (batch * attention.num_visible_rows + node % attention.num_visible_rows) * num_slots;
    }
    item.AddAll(attention.keys + kv * width * num_slots, num_slots, attention.values + kv * num_slots * width,
                attention.num_seen[batch]);
    for (int r = 0; r < item.num_rows; ++r)
      item.seen[r] = attention.mask + (batch % attention.num_mask_rows * attention.num_queries + (begin + r) / group) * num_new;
    item.AddAll(attention.new_keys + kv * width * num_new, num_new, attention.new_values + kv * num_new * width, num_new);
    for (int r = 0; r < item.num_rows; ++r)
      for (int64_t d = 0; d < width; ++d)
        attention.out[at[r] + d] = item.mixed[r * width + d] / item.total[r];
  }
}

}  // namespace
}  // namespace spectr

#endif  // SPECTR_JAX_KERNELS_NATIVE_ATTENTION_H_
