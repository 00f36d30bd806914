// Products of rows and a packed kernel as calls of XLA, on XLA's own threads.

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "product.h"
#include "threads.h"
#include "xla/ffi/api/ffi.h"

namespace spectr {
namespace {

struct Form {
  const char* name;
  Panels* of_float32;   // a kernel in float32, rows in float32
  Panels* of_bfloat16;  // a kernel in bfloat16, rows in float32
  Panels* of_int8;      // a kernel in int8, rows in float32
  Panels* of_pairs;     // a kernel in bfloat16, rows in bfloat16; null where they are widened
  BlockPanels* of_blocks;
  Items* attention;
  NormRows* norm;
  SoftmaxRows* softmax;
  NormRows* totals;
};

constexpr Form kForms[] = {  // the best first; a processor that has one has those after it
    {"avx512_bf16", Avx512Float32, Avx512Bfloat16OfWideRows, Avx512Int8, Avx512Bfloat16, Avx512VnniBlocks, Avx512Attention,
     Avx512Norm, Avx512Softmax, Avx512Totals},
    {"avx512_vnni", Avx512Float32, Avx512Bfloat16OfWideRows, Avx512Int8, nullptr, Avx512VnniBlocks, Avx512Attention,
     Avx512Norm, Avx512Softmax, Avx512Totals},
    {"avx512", Avx512Float32, Avx512Bfloat16OfWideRows, Avx512Int8, nullptr, Avx512Blocks, Avx512Attention,
     Avx512Norm, Avx512Softmax, Avx512Totals},
    {"avx2", Avx2Float32, Avx2Bfloat16, Avx2Int8, nullptr, Avx2Blocks, Avx2Attention, Avx2Norm, Avx2Softmax, Avx2Totals},
};

const Form* FormOfThisProcessor() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
    return __builtin_cpu_supports("avx512vnni") ? __builtin_cpu_supports("avx512bf16") ? &kForms[0] : &kForms[1]
                                                : &kForms[2];
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") ? &kForms[3]
                                                                                                      : nullptr;
}

const Form*& CurrentForm() {
  static const Form* form = FormOfThisProcessor();
  return form;
}

// bfloat16 of `count` float32, the nearest, to even.
void Narrow(const float* from, int64_t count, void* to) {
  auto* halves = static_cast<uint16_t*>(to);
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &from[i], sizeof bits);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    halves[i] = static_cast<uint16_t>(is_nan ? bits >> 16 | 0x40 : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
  }
}

// float32 of `count` bfloat16.
void Widen(const void* from, int64_t count, float* to) {
  const auto* halves = static_cast<const uint16_t*>(from);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(halves[i]) << 16;
    std::memcpy(&to[i], &bits, sizeof bits);
  }
}

ffi::Error Multiply(ffi::ThreadPool pool, ffi::AnyBuffer rows, ffi::AnyBuffer kernel, ffi::Result<ffi::AnyBuffer> out) {
  const Form* form = CurrentForm();
  if (form == nullptr) return ffi::Error::Internal("this processor has neither AVX2 nor AVX-512");
  const auto row_sizes = rows.dimensions(), sizes = kernel.dimensions(), out_sizes = out->dimensions();
  const bool is_bfloat16 = kernel.element_type() == ffi::BF16, is_int8 = kernel.element_type() == ffi::S8;
  const int64_t num_together = is_int8 ? 4 : is_bfloat16 ? 2 : 1;  // inputs of a step
  const bool has_bfloat16_rows = rows.element_type() == ffi::BF16;
  if (!(is_int8 || is_bfloat16 || kernel.element_type() == ffi::F32) ||
      !(has_bfloat16_rows || rows.element_type() == ffi::F32) ||
      out->element_type() != ffi::F32 || row_sizes.size() != 2 || out_sizes.size() != 2 ||
      sizes.size() != (num_together > 1 ? 4u : 3u) || (num_together > 1 && sizes[3] != num_together) ||
      sizes[2] != kPanel || row_sizes[0] != out_sizes[0] ||
      row_sizes[1] != num_together * sizes[1] || (out_sizes[1] + kPanel - 1) / kPanel != sizes[0])
    return ffi::Error::InvalidArgument("rows, kernel and result do not fit each other");

  Panels* compute = is_int8 ? form->of_int8 : is_bfloat16 ? form->of_bfloat16 : form->of_float32;
  const void* inputs = rows.untyped_data();
  std::vector<float> widened;
  if (has_bfloat16_rows && is_bfloat16 && form->of_pairs != nullptr) {
    compute = form->of_pairs;
  } else if (has_bfloat16_rows) {
    widened.resize(row_sizes[0] * row_sizes[1]);
    Widen(inputs, widened.size(), widened.data());
    inputs = widened.data();
  }

  auto work = std::make_shared<Work<Product>>();
  work->product = {inputs, static_cast<const char*>(kernel.untyped_data()), static_cast<float*>(out->untyped_data()),
                   row_sizes[0], sizes[1], out_sizes[1]};
  work->compute = compute;
  RunOnThreads(pool, work, sizes[0], sizes[0] * sizes[1] * kPanel * 4);
  return ffi::Error::Success();
}

// Products of rows and the kernels of some experts.
template <class AnyProduct>
struct ExpertProduct {
  void (*compute)(const AnyProduct&, int64_t first, int64_t last);
  std::vector<AnyProduct> products;  // one for each expert that has rows
  int64_t num_panels;                // of a kernel
};

template <class AnyProduct>
void MultiplyByExperts(const ExpertProduct<AnyProduct>& all, int64_t first, int64_t last) {
  for (int64_t end; first < last; first += end) {
    const int64_t panel = first % all.num_panels;
    end = std::min(last - first, all.num_panels - panel);
    all.compute(all.products[first / all.num_panels], panel, panel + end);
  }
}

// Rows in the order of their experts.
struct Order {
  std::vector<int64_t> places;  // of each row
  std::vector<int64_t> begins;  // of each expert's rows, and where the last ones end
};

// False if a number is no expert's. Without numbers all rows are of the first one.
bool Sort(const ffi::Buffer<ffi::S32>& experts, int64_t num_rows, int64_t num_experts, Order& order) {
  order.begins.assign(num_experts + 1, 0);
  order.places.resize(num_rows);
  if (experts.element_count() == 0) {
    for (int64_t row = 0; row < num_rows; ++row) order.places[row] = row;
    std::fill(order.begins.begin() + 1, order.begins.end(), num_rows);
    return num_rows == 0 || num_experts == 1;
  }
  if (experts.element_count() != static_cast<size_t>(num_rows)) return false;
  const int32_t* numbers = experts.typed_data();
  for (int64_t row = 0; row < num_rows; ++row) {
    if (numbers[row] < 0 || numbers[row] >= num_experts) return false;
    ++order.begins[numbers[row] + 1];
  }
  for (int64_t expert = 0; expert < num_experts; ++expert) order.begins[expert + 1] += order.begins[expert];
  std::vector<int64_t> next(order.begins.begin(), order.begins.end() - 1);
  for (int64_t row = 0; row < num_rows; ++row) order.places[row] = next[numbers[row]]++;
  return true;
}

// Calls `add(expert, begin, count)` for each expert that has rows.
template <class Add>
void ForEachExpert(const Order& order, Add add) {
  for (size_t expert = 0; expert + 1 < order.begins.size(); ++expert)
    if (const int64_t begin = order.begins[expert], count = order.begins[expert + 1] - begin; count > 0)
      add(expert, begin, count);
}

// As `Multiply`, each row by the kernel of its expert, of which only those that have rows are read.
ffi::Error MultiplyExperts(ffi::ThreadPool pool, ffi::AnyBuffer rows, ffi::Buffer<ffi::S32> experts, ffi::AnyBuffer kernels,
                           ffi::Result<ffi::Buffer<ffi::F32>> out) {
  const Form* form = CurrentForm();
  if (form == nullptr) return ffi::Error::Internal("this processor has neither AVX2 nor AVX-512");
  const auto row_sizes = rows.dimensions(), sizes = kernels.dimensions(), out_sizes = out->dimensions();
  const bool is_bfloat16 = kernels.element_type() == ffi::BF16, is_int8 = kernels.element_type() == ffi::S8;
  const int64_t num_together = is_int8 ? 4 : is_bfloat16 ? 2 : 1;  // inputs of a step
  const bool has_bfloat16_rows = rows.element_type() == ffi::BF16;
  Order order;
  if (!(is_int8 || is_bfloat16 || kernels.element_type() == ffi::F32) ||
      !(has_bfloat16_rows || rows.element_type() == ffi::F32) || row_sizes.size() != 2 || out_sizes.size() != 2 ||
      sizes.size() != (num_together > 1 ? 5u : 4u) || (num_together > 1 && sizes[4] != num_together) ||
      sizes[3] != kPanel || row_sizes[0] != out_sizes[0] || row_sizes[1] != num_together * sizes[2] ||
      (out_sizes[1] + kPanel - 1) / kPanel != sizes[1] || !Sort(experts, row_sizes[0], sizes[0], order))
    return ffi::Error::InvalidArgument("rows, experts, kernels and result do not fit each other");
  const int64_t num_rows = row_sizes[0], num_in = row_sizes[1], num_out = out_sizes[1];
  if (num_rows == 0 || num_out == 0) return ffi::Error::Success();

  auto work = std::make_shared<Work<ExpertProduct<Product>>>();
  const bool is_paired = has_bfloat16_rows && is_bfloat16 && form->of_pairs != nullptr;
  const int64_t entry = is_paired ? sizeof(uint16_t) : sizeof(float);
  work->owned.resize(num_rows * (num_in * entry + num_out * sizeof(float)));
  auto* results = reinterpret_cast<float*>(work->owned.data());
  char* inputs = work->owned.data() + num_rows * num_out * sizeof(float);
  const auto* from = static_cast<const char*>(rows.untyped_data());
  for (int64_t row = 0; row < num_rows; ++row) {
    char* to = inputs + order.places[row] * num_in * entry;
    if (has_bfloat16_rows && !is_paired)
      Widen(from + row * num_in * sizeof(uint16_t), num_in, reinterpret_cast<float*>(to));
    else
      std::memcpy(to, from + row * num_in * entry, num_in * entry);
  }
  const int64_t kernel_bytes = kernels.size_bytes() / sizes[0];
  auto& all = work->product;
  all.compute = is_paired ? form->of_pairs : is_int8 ? form->of_int8 : is_bfloat16 ? form->of_bfloat16 : form->of_float32;
  all.num_panels = sizes[1];
  ForEachExpert(order, [&](int64_t expert, int64_t begin, int64_t count) {
    all.products.push_back({inputs + begin * num_in * entry,
                            static_cast<const char*>(kernels.untyped_data()) + expert * kernel_bytes,
                            results + begin * num_out, count, sizes[2], num_out});
  });
  work->compute = MultiplyByExperts<Product>;
  const int64_t num_products = all.products.size();
  RunOnThreads(pool, work, num_products * sizes[1], num_products * kernel_bytes);
  for (int64_t row = 0; row < num_rows; ++row)
    std::memcpy(out->typed_data() + row * num_out, results + order.places[row] * num_out, num_out * sizeof(float));
  return ffi::Error::Success();
}

// As `MultiplyExperts`, by kernels in blocks: weights [experts][panels][blocks][lines][16][4] with their scales
// [experts][panels][blocks][16], and in 4 bits what is added to each, of the same shape. Without experts there is one kernel.
ffi::Error MultiplyBlocks(ffi::ThreadPool pool, ffi::AnyBuffer rows, ffi::Buffer<ffi::S32> experts, ffi::AnyBuffer weights,
                          ffi::AnyBuffer scales, ffi::AnyBuffer least, ffi::Result<ffi::Buffer<ffi::F32>> out) {
  const Form* form = CurrentForm();
  if (form == nullptr) return ffi::Error::Internal("this processor has neither AVX2 nor AVX-512");
  const auto row_sizes = rows.dimensions(), sizes = weights.dimensions(), scale_sizes = scales.dimensions(),
             out_sizes = out->dimensions();
  const bool is_wide = scales.element_type() == ffi::F32, has_bfloat16_rows = rows.element_type() == ffi::BF16;
  const auto misfit = ffi::Error::InvalidArgument("rows, experts, kernel and result do not fit each other");
  Order order;
  if (row_sizes.size() != 2 || sizes.size() != 6 || scale_sizes.size() != 4 || out_sizes.size() != 2 ||
      weights.element_type() != ffi::U8 || !(is_wide || scales.element_type() == ffi::F16) ||
      !(has_bfloat16_rows || rows.element_type() == ffi::F32) || sizes[4] != kPanel || sizes[5] != 4 ||
      scale_sizes[0] != sizes[0] || scale_sizes[1] != sizes[1] || scale_sizes[2] != sizes[2] ||
      scale_sizes[3] != kPanel || row_sizes[0] != out_sizes[0] || (out_sizes[1] + kPanel - 1) / kPanel != sizes[1] ||
      sizes[2] == 0 || row_sizes[1] % sizes[2] != 0 || !Sort(experts, row_sizes[0], sizes[0], order))
    return misfit;
  const int64_t num_rows = row_sizes[0], num_in = row_sizes[1], num_out = out_sizes[1];
  const int64_t num_blocks = sizes[2], block_size = num_in / num_blocks;
  const bool is_4 = sizes[3] * 8 == block_size, is_8 = sizes[3] * 4 == block_size;
  const bool has_least = least.element_count() == scales.element_count() && least.element_type() == scales.element_type();
  if (!(is_4 && block_size == 32 && has_least) && !(is_8 && block_size == 32) && !(is_8 && block_size == 16 && is_wide))
    return misfit;
  if (num_rows == 0 || num_out == 0) return ffi::Error::Success();

  auto work = std::make_shared<Work<ExpertProduct<BlockProduct>>>();
  const bool is_sorted = experts.element_count() == 0;  // so that rows and results stay where they are
  const int64_t num_inputs = num_rows * num_in, num_of_blocks = num_rows * num_blocks;
  work->owned.resize(num_inputs + (2 * num_of_blocks + (is_sorted ? 0 : num_rows * num_out)) * sizeof(float));
  auto* values = reinterpret_cast<int8_t*>(work->owned.data());
  auto* input_scales = reinterpret_cast<float*>(values + num_inputs);  // inputs are a multiple of 16
  float* results = is_sorted ? out->typed_data() : input_scales + 2 * num_of_blocks;
  const auto* inputs = static_cast<const float*>(rows.untyped_data());
  std::vector<float> moved;
  if (has_bfloat16_rows || !is_sorted) {
    moved.resize(num_inputs);
    for (int64_t row = 0; row < num_rows; ++row) {
      float* to = moved.data() + order.places[row] * num_in;
      if (has_bfloat16_rows)
        Widen(static_cast<const uint16_t*>(rows.untyped_data()) + row * num_in, num_in, to);
      else
        std::memcpy(to, inputs + row * num_in, num_in * sizeof(float));
    }
    inputs = moved.data();
  }
  BlockProduct product = {values,
                          input_scales,
                          input_scales + num_of_blocks,
                          static_cast<const uint8_t*>(weights.untyped_data()),
                          scales.untyped_data(),
                          least.untyped_data(),
                          results,
                          num_rows,
                          num_blocks,
                          num_out,
                          block_size,
                          is_4 ? 4 : 8,
                          is_wide};
  RoundForBlocks(inputs, product);
  const int64_t kernel_bytes = weights.size_bytes() / sizes[0], scale_bytes = scales.size_bytes() / sizes[0];
  auto& all = work->product;
  all.compute = form->of_blocks;
  all.num_panels = sizes[1];
  ForEachExpert(order, [&](int64_t expert, int64_t begin, int64_t count) {
    BlockProduct own = product;
    own.values += begin * num_in;
    own.scales += begin * num_blocks;
    own.sums += begin * num_blocks;
    own.weights += expert * kernel_bytes;
    own.weight_scales = static_cast<const char*>(product.weight_scales) + expert * scale_bytes;
    own.weight_least = static_cast<const char*>(product.weight_least) + (has_least ? expert * scale_bytes : 0);
    own.out += begin * num_out;
    own.num_rows = count;
    all.products.push_back(own);
  });
  work->compute = MultiplyByExperts<BlockProduct>;
  const int64_t num_products = all.products.size();
  RunOnThreads(pool, work, num_products * sizes[1], num_products * kernel_bytes);
  if (!is_sorted)
    for (int64_t row = 0; row < num_rows; ++row)
      std::memcpy(out->typed_data() + row * num_out, results + order.places[row] * num_out, num_out * sizeof(float));
  return ffi::Error::Success();
}

// Slots of a row of the batch up to the last that a query sees.
int64_t NumSeen(const uint8_t* visible, int64_t num_rows, int64_t num_slots) {
  int64_t seen = 0;
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t slot = num_slots; slot > seen; --slot)
      if (visible[row * num_slots + slot - 1]) seen = slot;
  return seen;
}

ffi::Error Attend(ffi::ThreadPool pool, ffi::AnyBuffer query, ffi::Buffer<ffi::F32> new_keys,
                  ffi::Buffer<ffi::F32> new_values, ffi::Buffer<ffi::PRED> mask, ffi::Buffer<ffi::F32> keys,
                  ffi::Buffer<ffi::F32> values, ffi::Buffer<ffi::PRED> visible, ffi::Buffer<ffi::S32> places,
                  ffi::Buffer<ffi::F32> sinks, float soft_cap, ffi::Result<ffi::Buffer<ffi::F32>> out) {
  const Form* form = CurrentForm();
  if (form == nullptr) return ffi::Error::Internal("this processor has neither AVX2 nor AVX-512");
  const auto sizes = query.dimensions(), new_sizes = new_keys.dimensions(), old_sizes = keys.dimensions(),
             mask_sizes = mask.dimensions(), seen_sizes = visible.dimensions();
  const bool has_bfloat16 = query.element_type() == ffi::BF16;
  const auto misfit = ffi::Error::InvalidArgument("queries, keys, values and masks do not fit each other");
  if (!(has_bfloat16 || query.element_type() == ffi::F32) || sizes.size() != 4 || new_sizes.size() != 4 ||
      old_sizes.size() != 4 || mask_sizes.size() != 3 || seen_sizes.size() != 3)
    return misfit;
  const int64_t batch = sizes[0], num_queries = sizes[1], num_heads = sizes[2], width = sizes[3];
  const int64_t num_kv_heads = old_sizes[1], num_slots = old_sizes[3], num_new = new_sizes[3];
  if (width > kMostWidth || width % 16 != 0 || num_kv_heads == 0 || num_heads % num_kv_heads != 0 ||
      old_sizes[0] != batch || old_sizes[2] != width || new_sizes[0] != batch || new_sizes[1] != num_kv_heads ||
      new_sizes[2] != width || mask_sizes[1] != num_queries || mask_sizes[2] != num_new ||
      !(mask_sizes[0] == 1 || mask_sizes[0] == batch) || seen_sizes[0] != batch || seen_sizes[2] != num_slots ||
      !(seen_sizes[1] == 1 || seen_sizes[1] == num_queries) ||
      new_values.element_count() != new_keys.element_count() || values.element_count() != keys.element_count() ||
      out->element_count() != query.element_count() ||
      places.element_count() != static_cast<size_t>(batch * num_queries) ||
      (sinks.element_count() != 0 && sinks.element_count() != static_cast<size_t>(num_heads)))
    return misfit;
  if (query.element_count() == 0) return ffi::Error::Success();

  auto work = std::make_shared<Work<Attention>>();
  work->owned.resize(batch * sizeof(int64_t) + (has_bfloat16 ? query.element_count() * sizeof(float) : 0));
  auto* num_seen = reinterpret_cast<int64_t*>(work->owned.data());
  const auto* seen = reinterpret_cast<const uint8_t*>(visible.typed_data());
  int64_t num_products = 0;
  for (int64_t row = 0; row < batch; ++row) {
    num_seen[row] = NumSeen(seen + row * seen_sizes[1] * num_slots, seen_sizes[1], num_slots);
    num_products += (num_seen[row] + num_new) * num_queries * num_heads * width;
  }
  const auto* queries = static_cast<const float*>(query.untyped_data());
  if (has_bfloat16) {
    auto* widened = reinterpret_cast<float*>(num_seen + batch);
    Widen(query.untyped_data(), query.element_count(), widened);
    queries = widened;
  }
  work->product = {queries, new_keys.typed_data(), new_values.typed_data(),
                   reinterpret_cast<const uint8_t*>(mask.typed_data()), keys.typed_data(), values.typed_data(), seen,
                   num_seen, places.typed_data(), sinks.element_count() == 0 ? nullptr : sinks.typed_data(),
                   out->typed_data(), num_queries, num_heads, num_kv_heads, width, num_new, num_slots,
                   mask_sizes[0], seen_sizes[1], soft_cap};
  work->compute = form->attention;
  const int64_t num_rows = num_queries * (num_heads / num_kv_heads);
  const int64_t num_items = batch * num_kv_heads * ((num_rows + kItemRows - 1) / kItemRows);
  RunOnThreads(pool, work, num_items, num_products / 8);
  return ffi::Error::Success();
}

// Norms of rows [num_rows, width] in float32 or bfloat16, which the result has too; a bias of no numbers is none.
ffi::Error Normalize(ffi::ThreadPool pool, ffi::AnyBuffer rows, ffi::Buffer<ffi::F32> gain, ffi::Buffer<ffi::F32> bias,
                     float epsilon, ffi::Result<ffi::AnyBuffer> out) {
  const Form* form = CurrentForm();
  if (form == nullptr) return ffi::Error::Internal("this processor has neither AVX2 nor AVX-512");
  const auto sizes = rows.dimensions();
  const bool has_bfloat16 = rows.element_type() == ffi::BF16, has_bias = bias.element_count() > 0;
  const int64_t count = rows.element_count();
  if (!(has_bfloat16 || rows.element_type() == ffi::F32) || out->element_type() != rows.element_type() ||
      sizes.size() != 2 || gain.element_count() != static_cast<size_t>(sizes[1]) ||
      (has_bias && bias.element_count() != gain.element_count()) ||
      out->element_count() != static_cast<size_t>(count))
    return ffi::Error::InvalidArgument("rows, gain, bias and result do not fit each other");
  if (count == 0) return ffi::Error::Success();

  auto work = std::make_shared<Work<Norm>>();
  const auto* wide = static_cast<const float*>(rows.untyped_data());
  auto* results = static_cast<float*>(out->untyped_data());
  if (has_bfloat16) {
    work->owned.resize(2 * count * sizeof(float));
    auto* widened = reinterpret_cast<float*>(work->owned.data());
    Widen(rows.untyped_data(), count, widened);
    wide = widened;
    results = widened + count;
  }
  work->product = {wide, gain.typed_data(), has_bias ? bias.typed_data() : nullptr, results, sizes[1], epsilon};
  work->compute = form->norm;
  RunOnThreads(pool, work, sizes[0], count * sizeof(float));
  if (has_bfloat16) Narrow(results, count, out->untyped_data());
  return ffi::Error::Success();
}

// Distributions [.., width] of logits of this shape, divided by the scale of their row of the batch, [batch]; the point
// mass at the first largest where a row is greedy.
ffi::Error Distribute(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> logits, ffi::Buffer<ffi::F32> scale,
                      ffi::Buffer<ffi::PRED> is_greedy, ffi::Result<ffi::Buffer<ffi::F32>> out) {
  const Form* form = CurrentForm();
  if (form == nullptr) return ffi::Error::Internal("this processor has neither AVX2 nor AVX-512");
  const int64_t count = logits.element_count(), batch = scale.element_count();
  const int64_t width = logits.dimensions().size() > 0 ? logits.dimensions().back() : 0;
  if (static_cast<int64_t>(out->element_count()) != count || static_cast<int64_t>(is_greedy.element_count()) != batch ||
      width == 0 || batch == 0 || count / width % batch != 0)
    return ffi::Error::InvalidArgument("logits, scale, is_greedy and result do not fit each other");
  auto work = std::make_shared<Work<Softmax>>();
  work->product = {logits.typed_data(), scale.typed_data(), reinterpret_cast<const uint8_t*>(is_greedy.typed_data()),
                   out->typed_data(), count / width / batch, width};
  work->compute = form->softmax;
  RunOnThreads(pool, work, count / width, count * sizeof(float));
  return ffi::Error::Success();
}

// Sums of rows [num_rows, width].
ffi::Error SumRows(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> rows, ffi::Result<ffi::Buffer<ffi::F32>> out) {
  const Form* form = CurrentForm();
  if (form == nullptr) return ffi::Error::Internal("this processor has neither AVX2 nor AVX-512");
  const auto sizes = rows.dimensions();
  if (sizes.size() != 2 || out->element_count() != static_cast<size_t>(sizes[0]))
    return ffi::Error::InvalidArgument("rows and sums do not fit each other");
  if (sizes[0] == 0) return ffi::Error::Success();
  auto work = std::make_shared<Work<Norm>>();
  work->product = {rows.typed_data(), nullptr, nullptr, out->typed_data(), sizes[1], 0};
  work->compute = form->totals;
  RunOnThreads(pool, work, sizes[0], rows.size_bytes());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace spectr

XLA_FFI_DEFINE_HANDLER_SYMBOL(spectr_softmax, spectr::Distribute,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::PRED>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(spectr_norm, spectr::Normalize,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<float>("epsilon")
                                  .Ret<xla::ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(spectr_totals, spectr::SumRows,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(spectr_attention, spectr::Attend,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::PRED>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::PRED>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<float>("soft_cap")
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(spectr_product, spectr::Multiply,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(spectr_expert_product, spectr::MultiplyExperts,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(spectr_block_products, spectr::MultiplyBlocks,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());

// The name of the form for this processor, or null if there is none.
extern "C" const char* spectr_form() {
  return spectr::CurrentForm() == nullptr ? nullptr : spectr::CurrentForm()->name;
}

// Takes another form, for tests and comparisons. Returns whether this processor has it.
extern "C" bool spectr_use_form(const char* name) {
  const spectr::Form* best = spectr::FormOfThisProcessor();
  bool has = false;
  for (const spectr::Form& form : spectr::kForms) {
    has = has || &form == best;
    if (has && std::strcmp(form.name, name) == 0) return spectr::CurrentForm() = &form, true;
  }
  return false;
}
