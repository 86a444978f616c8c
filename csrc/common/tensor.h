// What the bindings need to know of a tensor.
#pragma once
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <vector>

namespace megatron_probes {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Whether the elements fill one stretch of memory without gaps or overlap, in whatever order: statistics that do not
// depend on order read such a tensor as it lies, a transpose say.
inline bool densely_stored(const Tensor& x) {
  if (x.is_contiguous()) return true;
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (int64_t i = 0; i < x.dim(); ++i)
    if (x.size(i) != 1) dims.emplace_back(x.stride(i), x.size(i));
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

// A float64 result of one or two dimensions, any strides.
struct Slot {
  double* data;
  int64_t columns, step, row_step;

  static Slot of(const Tensor& out) {
    const int64_t last = out.dim() - 1;
    return {static_cast<double*>(out.mutable_data_ptr()), out.size(last), out.stride(last),
            last > 0 ? out.stride(0) : 0};
  }
  double* row(int64_t i) const { return data + i * row_step; }
  void write(int64_t i, const double* values, bool accumulate) const {
    double* p = row(i);
    for (int64_t c = 0; c < columns; ++c) p[c * step] = accumulate ? p[c * step] + values[c] : values[c];
  }
};

}  // namespace megatron_probes
