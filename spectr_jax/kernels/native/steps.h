// The steps of a loop over panels, for the vectors `V` of any instruction set.
//
// `V` names the types `Floats` and `Ints` of a vector, the number `kLanes` of its lanes, and its operations. Included by
// each form, which names a `V` of its own.

#include "panels.h"

namespace spectr {
namespace {

// float32, one input at a time.
template <class V>
struct Singles {
  using Sums = typename V::Floats;
  using Weights = Sums;
  using Input = Sums;
  using Row = float;
  static constexpr int kLanes = V::kLanes, kSums = V::kSumsOfSingles;
  static Sums Zero() { return V::Zero(); }
  static Weights Load(const char* at) { return V::AsFloats(V::Load(at)); }
  static Input Broadcast(const Row* at) { return V::Broadcast(at); }
  static Sums Add(Sums sums, Weights weights, Input input) { return V::MultiplyAdd(weights, input, sums); }
  static void Store(float* at, Sums sums) { V::Store(at, sums); }
};

// bfloat16, two inputs at a time. A bfloat16 is the upper half of a float32. Both of a pair are put there.
template <class V>
struct Split {
  struct Weights {
    typename V::Floats first, second;
  };
  struct Input {
    typename V::Floats first, second;
  };
  struct Row {
    float first, second;
  };
  using Sums = typename V::Floats;
  static constexpr int kLanes = V::kLanes, kSums = V::kSumsOfPairs;
  static Sums Zero() { return V::Zero(); }
  static Weights Load(const char* at) {
    const auto pairs = V::Load(at);
    return {V::AsFloats(V::template ShiftLeft<16>(pairs)), V::AsFloats(V::And(pairs, 0xffff0000u))};
  }
  static Input Broadcast(const Row* at) { return {V::Broadcast(&at->first), V::Broadcast(&at->second)}; }
  static Sums Add(Sums sums, const Weights& weights, const Input& input) {
    return V::MultiplyAdd(weights.second, input.second, V::MultiplyAdd(weights.first, input.first, sums));
  }
  static void Store(float* at, Sums sums) { V::Store(at, sums); }
};

// int8, four inputs at a time, which stand in 32 bits. Each is put into the upper byte, the others cleared, and converted:
// to 2^24 times its value, which the end of a sum takes back, exactly.
template <class V>
struct Fours {
  struct Weights {
    typename V::Floats of[4];
  };
  struct Input {
    typename V::Floats of[4];
  };
  struct Row {
    float of[4];
  };
  using Sums = typename V::Floats;
  static constexpr int kLanes = V::kLanes, kSums = V::kSumsOfFours;
  static Sums Zero() { return V::Zero(); }
  template <int kShift>
  static Sums Widened(typename V::Ints fours) {
    const auto upper = V::template ShiftLeft<kShift>(fours);
    if constexpr (kShift == 24) return V::Converted(upper);  // nothing is left below
    return V::Converted(V::And(upper, 0xff000000u));
  }
  static Weights Load(const char* at) {
    const auto fours = V::Load(at);
    return {{Widened<24>(fours), Widened<16>(fours), Widened<8>(fours), Widened<0>(fours)}};
  }
  static Input Broadcast(const Row* at) {
    return {{V::Broadcast(at->of), V::Broadcast(at->of + 1), V::Broadcast(at->of + 2), V::Broadcast(at->of + 3)}};
  }
  static Sums Add(Sums sums, const Weights& weights, const Input& input) {
    for (int i = 0; i < 4; ++i) sums = V::MultiplyAdd(weights.of[i], input.of[i], sums);
    return sums;
  }
  static void Store(float* at, Sums sums) { V::Store(at, V::Multiply(sums, 0x1p-24f)); }
};

}  // namespace
}  // namespace spectr
