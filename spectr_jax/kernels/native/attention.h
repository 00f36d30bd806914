// Attention of few queries over a cache and pending tokens, for vectors of any instruction set.
//
// Query heads that share keys are rows of one item, at most kItemRows at a time. An item goes through the slots in blocks
// and keeps the largest score, the sum of weights and the mixed values of each row (Milakov and Gimelshein 2018). Keys have
// slots last, so that lanes are slots; values have the width of a head last, so that lanes are its numbers.
//
// A row adds in the order of its text. The pending tokens that it sees take the slots that they will have once they are
// committed: the same block, the same lane of its sums, the same turn among its values. What others see, and what it does
// not see, adds exactly nothing. So a result is a function of the text before it, to the bit: not of the tree, of the calls
// that read the text, of the rows beside it, or of the cache's size.
//
// `V` names the type `Floats` of a vector, its lanes, and operations.

#ifndef SPECTR_JAX_KERNELS_NATIVE_ATTENTION_H_
#define SPECTR_JAX_KERNELS_NATIVE_ATTENTION_H_

#include <immintrin.h>

#include "product.h"

namespace spectr {
namespace {

constexpr int kBlockSlots = 256, kTileRows = 4;
constexpr float kHidden = -3.4028234663852886e38f;  // score of a slot that is not seen, below all others
constexpr float kLeastSeen = -3.4e38f;

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

// x bounded by a cap c: c tanh(x / c).
template <class V>
inline typename V::Floats Capped(typename V::Floats x, float cap) {
  const auto is_negative = V::IsLess(x, V::Set(0));
  const auto small = Exp<V>(V::Multiply(x, V::Select(is_negative, V::Set(2 / cap), V::Set(-2 / cap))));  // exp(-2 |x| / c)
  const auto size = V::Divide(V::Add(V::Set(cap), V::Multiply(small, V::Set(-cap))), V::Add(V::Set(1), small));
  return V::Select(is_negative, V::Multiply(size, V::Set(-1)), size);
}

// Tokens that are added together: keys [width][stride] and values [size][width].
struct Slots {
  const float *keys, *values;
  int64_t stride;
  int size;
};

// The rows of an item: their queries, and what they keep while they go through the slots.
template <class V>
struct AttentionItem {
  int64_t width, num_new;
  float soft_cap;  // of scores; 0 for none
  int num_rows;
  float query[kItemRows * kMostWidth], mixed[kItemRows * kMostWidth];
  float scores[kTileRows * kBlockSlots];  // and weights, of a block in the order of the text
  float apart[kTileRows * kBlockSlots];   // of pending tokens in the order in which they stand
  float top[kItemRows], total[kItemRows];
  const uint8_t* seen[kItemRows];     // the committed slots that each row sees
  const uint8_t* pending[kItemRows];  // the pending tokens that it sees
  int64_t slot[kItemRows], token[kItemRows];  // the slot that the next pending token from `token` on takes

  template <int kRows>
  inline void ScoresOf(int row, const Slots& slots, float* to) {
    for (int s = 0; s < slots.size; s += 2 * V::kLanes) {
      if (slots.size - s >= 2 * V::kLanes) {
        Scores<V, kRows, true>(query + row * width, width, slots.keys + s, slots.stride, 0, to + s);
        continue;
      }
      for (int part = s; part < slots.size; part += V::kLanes) {
        const int rest = slots.size - part < V::kLanes ? slots.size - part : V::kLanes;
        Scores<V, kRows, false>(query + row * width, width, slots.keys + part, slots.stride, rest, to + part);
      }
    }
  }

  template <int kRows>
  inline void MixOf(int row, const Slots& slots, const float* weights) {
    int64_t d = 0;
    for (; d + 2 * V::kLanes <= width; d += 2 * V::kLanes)
      Mix<V, kRows, 2>(weights, slots.size, slots.values + d, width, mixed + row * width + d);
    if (d < width) Mix<V, kRows, 1>(weights, slots.size, slots.values + d, width, mixed + row * width + d);
  }

  // Calls `visit(r, token, place in the block)` for the pending tokens from `first` to `last` of the rows of a tile that
  // stand in a block, from where each row is, and moves it on. Returns whether any row has more of the block to come.
  template <int kRows, class Visit>
  inline bool Place(int row, int64_t first, int64_t last, int64_t begin, int64_t* slots, int64_t* tokens, Visit visit) {
    bool has_more = false;
    for (int r = 0; r < kRows; ++r) {
      const uint8_t* sees = pending[row + r];
      int64_t slot = slots[r], m = tokens[r];
      for (; m < last && slot < begin + kBlockSlots; ++m)
        if (sees[m]) visit(r, m - first, slot++ - begin);
      slots[r] = slot;
      tokens[r] = m;
      has_more = has_more || (slot < begin + kBlockSlots && m < num_new);
    }
    return has_more;
  }

  // Pending tokens of a call, from one on, as far as they are visited together.
  static inline Slots Part(const Slots& all, int64_t width, int64_t first) {
    const int64_t rest = all.size - first;
    return {all.keys + first, all.values + first * width, all.stride, static_cast<int>(rest < kBlockSlots ? rest : kBlockSlots)};
  }

  // Adds the block of slots from `begin` on: committed ones, and the pending tokens that stand in it.
  template <int kRows>
  inline void AddTile(int row, int64_t begin, const Slots& committed, const Slots& added) {
    float* lines = scores;
    if (committed.size > 0) ScoresOf<kRows>(row, committed, lines);
    int num_used = committed.size;
    for (int r = 0; r < kRows; ++r) {
      float* line = lines + r * kBlockSlots;
      const uint8_t* visible = seen[row + r] + begin;
      for (int s = 0; s < committed.size; ++s) line[s] = visible[s] ? line[s] : kHidden;
      for (int s = committed.size; s < kBlockSlots; ++s) line[s] = kHidden;
    }

    int64_t slots[kRows], tokens[kRows], first = num_new;
    for (int r = 0; r < kRows; ++r) {
      slots[r] = slot[row + r];
      tokens[r] = token[row + r];
      if (slots[r] < begin + kBlockSlots && tokens[r] < first) first = tokens[r];
    }
    const int64_t from = first;
    for (bool has_more = true; has_more && first < num_new; first += kBlockSlots) {
      const Slots part = Part(added, width, first);
      ScoresOf<kRows>(row, part, apart);
      has_more = Place<kRows>(row, first, first + part.size, begin, slots, tokens, [&](int r, int64_t m, int64_t place) {
        lines[r * kBlockSlots + place] = apart[r * kBlockSlots + m];
        if (place >= num_used) num_used = static_cast<int>(place) + 1;
      });
    }

    const int padded = (num_used + V::kLanes - 1) / V::kLanes * V::kLanes;
    for (int r = 0; r < kRows; ++r) {
      float* line = lines + r * kBlockSlots;
      if (soft_cap != 0)
        for (int s = 0; s < padded; s += V::kLanes) {
          const auto raw = V::Load(line + s);
          V::Store(line + s, V::Select(V::IsLess(raw, V::Set(kLeastSeen)), raw, Capped<V>(raw, soft_cap)));
        }
      const float before = top[row + r], largest = Largest<V>(line, padded);
      const float now = before > largest ? before : largest;
      auto sum = V::Set(0);
      for (int s = 0; s < padded; s += V::kLanes) {
        const auto raw = V::Load(line + s);
        // Selected, not multiplied: a hidden slot adds nothing whatever the largest score is.
        const auto weight = V::Select(V::IsLess(raw, V::Set(kLeastSeen)), V::Set(0), Exp<V>(V::Add(raw, V::Set(-now))));
        V::Store(line + s, weight);
        sum = V::Add(sum, weight);
      }
      float lanes[V::kLanes];
      V::Store(lanes, Exp<V>(V::Set(before - now)));
      const float kept = lanes[0];
      V::Store(lanes, sum);
      for (int i = 1; i < V::kLanes; ++i) lanes[0] += lanes[i];
      total[row + r] = kept * total[row + r] + lanes[0];
      top[row + r] = now;
      float* own_mixed = mixed + (row + r) * width;
      for (int64_t d = 0; d < width; d += V::kLanes)
        V::Store(own_mixed + d, V::Multiply(V::Load(own_mixed + d), V::Set(kept)));
    }

    if (committed.size > 0) MixOf<kRows>(row, committed, lines);
    first = from;
    for (bool has_more = true; has_more && first < num_new; first += kBlockSlots) {
      const Slots part = Part(added, width, first);
      for (int r = 0; r < kRows; ++r)
        for (int m = 0; m < part.size; ++m) apart[r * kBlockSlots + m] = 0;
      has_more = Place<kRows>(row, first, first + part.size, begin, slot + row, token + row,
                              [&](int r, int64_t m, int64_t place) { apart[r * kBlockSlots + m] = lines[r * kBlockSlots + place]; });
      MixOf<kRows>(row, part, apart);
    }
  }

  void Add(int64_t begin, const Slots& committed, const Slots& added) {
    int row = 0;
    for (; row + kTileRows <= num_rows; row += kTileRows) AddTile<kTileRows>(row, begin, committed, added);
    for (; row < num_rows; ++row) AddTile<1>(row, begin, committed, added);
  }
};

template <class V>
void AttendOf(const Attention& attention, int64_t first, int64_t last) {
  const int64_t group = attention.num_heads / attention.num_kv_heads, width = attention.width;
  const int64_t num_rows = attention.num_queries * group, num_parts = (num_rows + kItemRows - 1) / kItemRows;
  const int64_t num_new = attention.num_new, num_slots = attention.num_slots;
  AttentionItem<V> item;
  item.width = width;
  item.num_new = num_new;
  item.soft_cap = attention.soft_cap;
  for (int64_t i = first; i < last; ++i) {
    const int64_t part = i % num_parts, head = i / num_parts % attention.num_kv_heads;
    const int64_t batch = i / num_parts / attention.num_kv_heads;
    const int64_t begin = part * num_rows / num_parts, end = (part + 1) * num_rows / num_parts;
    const int64_t kv = batch * attention.num_kv_heads + head, num_seen = attention.num_seen[batch];
    item.num_rows = static_cast<int>(end - begin);
    int64_t at[kItemRows];  // of each row's numbers among the queries
    int64_t num_used = num_seen;
    for (int r = 0; r < item.num_rows; ++r) {
      const int64_t node = (begin + r) / group, own = head * group + (begin + r) % group;
      at[r] = ((batch * attention.num_queries + node) * attention.num_heads + own) * width;
      for (int64_t d = 0; d < width; ++d) {
        item.query[r * width + d] = attention.query[at[r] + d];
        item.mixed[r * width + d] = 0;
      }
      // A sink is the first that a row adds.
      item.top[r] = attention.sinks == nullptr ? kHidden : attention.sinks[own];
      item.total[r] = attention.sinks == nullptr ? 0 : 1;
      item.seen[r] =
          attention.visible + (batch * attention.num_visible_rows + node % attention.num_visible_rows) * num_slots;
      item.pending[r] = attention.mask + (batch % attention.num_mask_rows * attention.num_queries + node) * num_new;
      int64_t count = 0;
      for (int64_t m = 0; m < num_new; ++m) count += item.pending[r][m] != 0;
      // Its own place is that of the last token that it sees. Where a place leaves no room, tokens follow what is committed.
      const int64_t earliest = attention.places[batch * attention.num_queries + node] - count + 1;
      item.slot[r] = earliest > num_seen && earliest < num_seen + num_slots + num_new ? earliest : num_seen;
      item.token[r] = count == 0 ? num_new : 0;
      if (item.slot[r] + count > num_used) num_used = item.slot[r] + count;
    }
    const float *keys = attention.keys + kv * width * num_slots, *values = attention.values + kv * num_slots * width;
    const Slots added = {attention.new_keys + kv * width * num_new, attention.new_values + kv * num_new * width, num_new,
                         static_cast<int>(num_new)};
    for (int64_t start = 0; start < num_used; start += kBlockSlots) {
      const int64_t rest = num_seen - start;
      const int size = static_cast<int>(rest < 0 ? 0 : rest < kBlockSlots ? rest : kBlockSlots);
      item.Add(start, {keys + start, values + start * width, num_slots, size}, added);
    }
    for (int r = 0; r < item.num_rows; ++r)
      for (int64_t d = 0; d < width; ++d)
        attention.out[at[r] + d] = item.total[r] == 0 ? 0 : item.mixed[r * width + d] / item.total[r];
  }
}

}  // namespace
}  // namespace spectr

#endif  // SPECTR_JAX_KERNELS_NATIVE_ATTENTION_H_
