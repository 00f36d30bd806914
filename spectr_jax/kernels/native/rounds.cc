// What a round of decoding computes beside its networks, as calls of XLA: draws of tokens and writes of what is kept.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "xla/ffi/api/ffi.h"

namespace spectr {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kBlock = 64;  // weights that are summed before a level is looked for among them

// The sum of up to `kBlock` weights, in one order.
double SumOf(const float* weights, int64_t count) {
  double sums[8] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    for (int64_t j = 0; j < 8; ++j) sums[j] += weights[i + j];
  for (; i < count; ++i) sums[i % 8] += weights[i];
  for (int64_t j = 1; j < 8; ++j) sums[0] += sums[j];
  return sums[0];
}

// The first of positive weight whose cumulative sum exceeds `uniform` times the sum of all; the last of positive weight if
// rounding leaves none.
int32_t Draw(float uniform, const float* weights, int64_t size) {
  double total = 0;
  for (int64_t start = 0; start < size; start += kBlock)
    total += SumOf(weights + start, std::min(kBlock, size - start));
  const double level = uniform * total;
  double before = 0;
  int64_t start = 0;
  for (; start < size; start += kBlock) {
    const double sum = SumOf(weights + start, std::min(kBlock, size - start));
    if (before + sum > level) break;
    before += sum;
  }
  // In another order the sum of the block may be less, so the search does not end with it.
  for (int64_t i = start; i < size; ++i) {
    before += weights[i];
    if (weights[i] > 0 && before > level) return static_cast<int32_t>(i);
  }
  int64_t i = size - 1;
  while (i > 0 && !(weights[i] > 0)) --i;
  return static_cast<int32_t>(weights[i] > 0 ? i : size - 1);
}

// Tokens [.., K] by uniforms [.., K] from weights [.., V], with the same sizes in front.
ffi::Error DrawSeveral(ffi::Buffer<ffi::F32> uniforms, ffi::Buffer<ffi::F32> weights,
                       ffi::Result<ffi::Buffer<ffi::S32>> tokens) {
  const auto sizes = weights.dimensions(), draws = uniforms.dimensions();
  if (sizes.size() == 0 || sizes.size() != draws.size() || sizes.back() == 0 ||
      !std::equal(sizes.begin(), sizes.end() - 1, draws.begin()) || tokens->element_count() != uniforms.element_count())
    return ffi::Error::InvalidArgument("uniforms, weights and tokens do not fit each other");
  const int64_t size = sizes.back(), num_rows = weights.element_count() / size, num_draws = draws.back();
  for (int64_t i = 0; i < num_rows * num_draws; ++i)
    tokens->typed_data()[i] =
        Draw(uniforms.typed_data()[i], weights.typed_data() + i / num_draws * size, size);
  return ffi::Error::Success();
}

// For each array [B, .., S, ..] and its pending entries [B, .., M, ..], where S stands at its place in `axes`: entries
// `path` [B, D] at `slots` [B, D]; those that are not from 0 to S - 1 are dropped. The results are the arrays themselves.
ffi::Error Write(ffi::Buffer<ffi::S32> path, ffi::Buffer<ffi::S32> slots, ffi::RemainingArgs arrays,
                 ffi::RemainingRets results, ffi::Span<const int64_t> axes) {
  const auto misfit = ffi::Error::InvalidArgument("arrays, pending entries, path and slots do not fit each other");
  const auto sizes = path.dimensions();
  if (sizes.size() != 2 || slots.element_count() != path.element_count() || arrays.size() != 2 * axes.size() ||
      results.size() != axes.size())
    return misfit;
  const int64_t batch = sizes[0], depth = sizes[1];
  for (size_t k = 0; k < axes.size(); ++k) {
    const auto array = arrays.get<ffi::AnyBuffer>(k), pending = arrays.get<ffi::AnyBuffer>(axes.size() + k);
    auto result = results.get<ffi::AnyBuffer>(k);
    if (array.has_error() || pending.has_error() || result.has_error()) return misfit;
    const auto own = array->dimensions(), others = pending->dimensions();
    const int64_t axis = axes[k];
    if (axis < 1 || axis >= static_cast<int64_t>(own.size()) || own.size() != others.size() || own[0] != batch ||
        array->element_type() != pending->element_type() || array->size_bytes() != (*result)->size_bytes())
      return misfit;
    int64_t outer = 1, inner = ffi::ByteWidth(array->element_type());
    for (int64_t i = 0; i < static_cast<int64_t>(own.size()); ++i) {
      if (i != axis && own[i] != others[i]) return misfit;
      if (i > 0 && i < axis) outer *= own[i];
      if (i > axis) inner *= own[i];
    }
    auto* to = static_cast<char*>((*result)->untyped_data());
    if (to != array->untyped_data()) std::memcpy(to, array->untyped_data(), array->size_bytes());
    const auto* from = static_cast<const char*>(pending->untyped_data());
    const auto copy = [&](auto width) {  // an entry of one number is copied without a call
      for (int64_t i = 0; i < batch * depth; ++i) {
        const int64_t slot = slots.typed_data()[i], entry = path.typed_data()[i], row = i / depth * outer;
        if (slot < 0 || slot >= own[axis] || entry < 0 || entry >= others[axis]) continue;
        for (int64_t j = row; j < row + outer; ++j)
          std::memcpy(to + (j * own[axis] + slot) * width, from + (j * others[axis] + entry) * width, width);
      }
    };
    if (inner == 4)
      copy(std::integral_constant<int64_t, 4>());
    else if (inner == 2)
      copy(std::integral_constant<int64_t, 2>());
    else
      copy(inner);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace spectr

XLA_FFI_DEFINE_HANDLER_SYMBOL(spectr_draw, spectr::DrawSeveral,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(spectr_write, spectr::Write,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<xla::ffi::Span<const int64_t>>("axes"));
