// The loop over panels, for a step of any instruction set. Included by each form once.
//
// A step `S` names a type of sums, of weights, of inputs and of a row's entry; `kLanes` sums of a register; `kSums`
// registers for sums; and how to load, broadcast, add and store. An output's terms are added in the order of the inputs,
// whatever rows there are beside: a row does not depend on its batch.

#include "product.h"

namespace spectr {
namespace {

constexpr int64_t kLine = 64;       // bytes of a step of a panel: sixteen float32, pairs of bfloat16, or fours of int8
constexpr int64_t kAhead = 4096;    // bytes from what is read to what is fetched, all panels of a block together
constexpr int kMostPanels = 4;      // of a block, each a stream of memory

// Sums of `kNumRows` rows and `kPanels` panels, which stay in registers.
template <class S, int kNumRows, int kPanels>
inline void Block(const typename S::Row* rows, const char* panels, int64_t num_steps, float* out, int64_t out_stride) {
  constexpr int kVectors = kPanel / S::kLanes;  // of a panel
  typename S::Sums sums[kNumRows][kPanels][kVectors];
  for (int row = 0; row < kNumRows; ++row)
    for (int panel = 0; panel < kPanels; ++panel)
      for (int v = 0; v < kVectors; ++v) sums[row][panel][v] = S::Zero();
  for (int64_t step = 0; step < num_steps; ++step) {
    for (int panel = 0; panel < kPanels; ++panel) {
      const char* at = panels + (panel * num_steps + step) * kLine;
      __builtin_prefetch(at + kAhead / kPanels);
      typename S::Weights weights[kVectors];
      for (int v = 0; v < kVectors; ++v) weights[v] = S::Load(at + v * kLine / kVectors);
      for (int row = 0; row < kNumRows; ++row) {
        const typename S::Input input = S::Broadcast(rows + row * num_steps + step);
        for (int v = 0; v < kVectors; ++v) sums[row][panel][v] = S::Add(sums[row][panel][v], weights[v], input);
      }
    }
  }
  for (int row = 0; row < kNumRows; ++row)
    for (int panel = 0; panel < kPanels; ++panel)
      for (int v = 0; v < kVectors; ++v)
        S::Store(out + row * out_stride + panel * kPanel + v * S::kLanes, sums[row][panel][v]);
}

// The panels of some rows, as many at a time as there are registers for.
template <class S, int kNumRows>
inline void Rows(const typename S::Row* rows, const char* panels, int64_t num_panels, int64_t num_steps, float* out,
                 int64_t out_stride, int64_t num_out) {
  constexpr int kFit = S::kSums / (kNumRows * (kPanel / S::kLanes));
  constexpr int kPanels = kFit >= kMostPanels ? kMostPanels : kFit >= 2 ? 2 : 1;
  int64_t panel = 0;
  for (; panel + kPanels <= num_panels && (panel + kPanels) * kPanel <= num_out; panel += kPanels)
    Block<S, kNumRows, kPanels>(rows, panels + panel * num_steps * kLine, num_steps, out + panel * kPanel, out_stride);
  for (; panel < num_panels; ++panel) {
    const char* at = panels + panel * num_steps * kLine;
    const int64_t rest = num_out - panel * kPanel;
    if (rest >= kPanel) {
      Block<S, kNumRows, 1>(rows, at, num_steps, out + panel * kPanel, out_stride);
      continue;
    }
    float edge[kNumRows * kPanel];
    Block<S, kNumRows, 1>(rows, at, num_steps, edge, kPanel);
    for (int64_t row = 0; row < kNumRows; ++row)
      for (int64_t i = 0; i < rest; ++i) out[row * out_stride + panel * kPanel + i] = edge[row * kPanel + i];
  }
}

// As `Rows`, with a number of rows that is known at run time.
template <class S, int kNumRows>
inline void Dispatch(int64_t num_rows, const typename S::Row* rows, const char* panels, int64_t num_panels,
                     int64_t num_steps, float* out, int64_t out_stride, int64_t num_out) {
  if constexpr (kNumRows > 0) {
    if (num_rows == kNumRows)
      return Rows<S, kNumRows>(rows, panels, num_panels, num_steps, out, out_stride, num_out);
    Dispatch<S, kNumRows - 1>(num_rows, rows, panels, num_panels, num_steps, out, out_stride, num_out);
  }
}

template <class S>
void Compute(const Product& product, int64_t first, int64_t last) {
  constexpr int kMostRows = S::kSums / (kPanel / S::kLanes);
  constexpr int64_t kTogether = 4;  // panels that all rows are multiplied with before the next are read
  const auto* rows = static_cast<const typename S::Row*>(product.rows);
  const int64_t num_steps = product.num_steps, num_blocks = (product.num_rows + kMostRows - 1) / kMostRows;
  for (int64_t panel = first; panel < last; panel += kTogether) {
    const int64_t num_panels = last - panel < kTogether ? last - panel : kTogether;
    for (int64_t block = 0, row = 0; block < num_blocks; ++block) {
      // Blocks of nearly equal sizes: a block of one row would read all weights for little.
      const int64_t size = (product.num_rows - row + num_blocks - block - 1) / (num_blocks - block);
      Dispatch<S, kMostRows>(size, rows + row * num_steps, product.panels + panel * num_steps * kLine, num_panels,
                             num_steps, product.out + row * product.num_out + panel * kPanel, product.num_out,
                             product.num_out - panel * kPanel);
      row += size;
    }
  }
}

}  // namespace
}  // namespace spectr
