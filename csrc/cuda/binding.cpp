// The CUDA kernels as operators. Scratch comes from torch's caching allocator (under capture, from the graph's own
// pool); a tensor with gaps is first copied to a dense one, on the device.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>

#include <optional>
#include <vector>

#include "../common/bins.h"
#include "../common/tensor.h"
#include "launch.h"

namespace megatron_probes::cuda {
namespace {

struct Device {
  explicit Device(const Tensor& x) : guard(x.get_device_index()) {
    void* current = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &current));
    stream = static_cast<cudaStream_t>(current);
  }
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream;
};

void check_launch() {
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, "megatron_probes: launch failed: ", cudaGetErrorString(error));
}

Dtype dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return Dtype::f32;
    case ScalarType::BFloat16:
      return Dtype::bf16;
    case ScalarType::Half:
      return Dtype::f16;
    default:
      STD_TORCH_CHECK(false, "megatron_probes: the compiled kernels take float32, float16 and bfloat16");
  }
}

Flags flags_of(const Tensor& x) {
  const ScalarType t = x.scalar_type();
  const bool floating =
      t == ScalarType::Float || t == ScalarType::Double || t == ScalarType::Half || t == ScalarType::BFloat16;
  return {x.const_data_ptr(), int(x.element_size()), floating};
}

Flags flags_of(const std::optional<Tensor>& x) { return x ? flags_of(*x) : Flags(); }

std::optional<Tensor> dense(const std::optional<Tensor>& x) {
  return x ? std::optional<Tensor>(torch::stable::contiguous(*x)) : std::nullopt;
}

Out out_of(const Tensor& x) {
  const Slot slot = Slot::of(x);
  return {slot.data, slot.step};
}

Tensor scratch(const Tensor& like, int64_t bytes) {
  const int64_t size[1] = {std::max<int64_t>(bytes, 1)};
  return torch::stable::empty({size, 1}, ScalarType::Byte, std::nullopt, like.device());
}

// ---- statistics

int64_t chunk_elements(int64_t numel, int64_t element_size) {
  constexpr int64_t kSmallest = 64 << 10;  // bytes: 4 batches a thread
  const int64_t smallest = kSmallest / element_size;
  const int64_t even = (numel + kMaxChunks - 1) / kMaxChunks;
  return std::max(smallest, (even + smallest - 1) / smallest * smallest);
}

void launch_list(const TensorList& list, const Tensor& first, Dtype dtype, const Slot& slot, bool accumulate,
                 const std::optional<Tensor>& enabled, cudaStream_t stream) {
  const Tensor partials = scratch(first, int64_t(list.first[list.count]) * int64_t(sizeof(Row)));
  stats(dtype, slot.columns > kStatsColumns, list, static_cast<Row*>(partials.mutable_data_ptr()),
        {slot.data, slot.step}, slot.row_step, accumulate, flags_of(enabled), stream);
  check_launch();
}

void run_stats(const std::vector<Tensor>& tensors, const Tensor& out, bool accumulate,
               const std::optional<Tensor>& enabled) {
  const Device device(tensors[0]);
  const Slot slot = Slot::of(out);
  std::vector<Tensor> held;
  held.reserve(tensors.size());
  for (const Tensor& x : tensors) held.push_back(densely_stored(x) ? x : torch::stable::contiguous(x));
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
    TensorList list;
    list.count = list.first[0] = 0;
    for (size_t i = 0; i < held.size(); ++i) {
      const Tensor& x = held[i];
      if (dtype_of(x) != dtype) continue;
      const int64_t n = x.numel(), chunk = chunk_elements(n, int64_t(x.element_size()));
      const int t = list.count++;
      list.data[t] = x.const_data_ptr();
      list.numel[t] = n;
      list.chunk[t] = chunk;
      list.row[t] = int(i);
      list.first[t + 1] = list.first[t] + int((n + chunk - 1) / chunk);
      if (list.count == kTensorsALaunch) {
        launch_list(list, x, dtype, slot, accumulate, enabled, device.stream);
        list.count = 0;
      }
    }
    if (list.count) launch_list(list, held[0], dtype, slot, accumulate, enabled, device.stream);
  }
}

void tensor_stats(const Tensor& x, Tensor out, bool accumulate, std::optional<Tensor> enabled) {
  run_stats({x}, out, accumulate, enabled);
}

void multi_tensor_stats(std::vector<Tensor> tensors, Tensor out, bool accumulate, std::optional<Tensor> enabled) {
  if (!tensors.empty()) run_stats(tensors, out, accumulate, enabled);
}

// ---- residual path

void residual_stats(const Tensor& s_in, const Tensor& b_in, std::optional<Tensor> mask_in, int64_t stride, Tensor out,
                    std::optional<Tensor> histograms, std::optional<Tensor> per_token, bool accumulate,
                    std::optional<Tensor> enabled) {
  const Device device(s_in);
  const Tensor s = torch::stable::contiguous(s_in), b = torch::stable::contiguous(b_in);
  const std::optional<Tensor> mask = dense(mask_in);
  ResidualArguments a{};
  a.s = s.const_data_ptr();
  a.b = b.const_data_ptr();
  a.d = s.size(s.dim() - 1);
  a.tokens = 1;
  for (int64_t i = 0; i + 1 < s.dim(); ++i) a.tokens *= s.size(i);
  a.stride = stride;
  a.mask = flags_of(mask);
  a.enabled = flags_of(enabled);
  const Tensor sums = scratch(s, (a.tokens + stride - 1) / stride * int64_t(sizeof(TokenSums)));
  const Tensor partials = scratch(s, kResidualBlocks * kResidualColumns * int64_t(sizeof(double)));
  a.sums = static_cast<TokenSums*>(sums.mutable_data_ptr());
  a.partials = static_cast<double*>(partials.mutable_data_ptr());
  a.out = out_of(out);
  a.accumulate = accumulate;
  if (histograms) {
    const Slot slot = Slot::of(*histograms);
    a.histograms = slot.data;
    a.histogram_step = slot.step;
    a.histogram_row_step = slot.row_step;
  }
  if (per_token) {
    const Slot slot = Slot::of(*per_token);
    a.per_token = slot.data;
    a.per_token_step = slot.step;
    a.per_token_row_step = slot.row_step;
  }
  residual(dtype_of(s), a, device.stream);
  check_launch();
}

// ---- updates

void count_noop(bool master, const Tensor& first_in, const Tensor& second_in, const Tensor& out, bool accumulate,
                const std::optional<Tensor>& enabled) {
  const Device device(first_in);
  const Tensor first = torch::stable::contiguous(first_in), second = torch::stable::contiguous(second_in);
  update_noop(master, dtype_of(first), first.const_data_ptr(), dtype_of(second), second.const_data_ptr(), first.numel(),
              out_of(out), accumulate, flags_of(enabled), device.stream);
  check_launch();
}

void bf16_update_noop(const Tensor& weight, const Tensor& update, Tensor out, bool accumulate,
                      std::optional<Tensor> enabled) {
  count_noop(false, weight, update, out, accumulate, enabled);
}

void bf16_update_noop_master(const Tensor& before, const Tensor& after, Tensor out, bool accumulate,
                             std::optional<Tensor> enabled) {
  count_noop(true, before, after, out, accumulate, enabled);
}

// ---- routing

void routing_histogram(const Tensor& routed_in, std::optional<Tensor> padding_in, Tensor out, bool accumulate,
                       std::optional<Tensor> enabled) {
  const Device device(routed_in);
  const Tensor routed = torch::stable::contiguous(routed_in);
  const std::optional<Tensor> padding = dense(padding_in);
  const int experts = int(out.numel()), width = int(routed.size(routed.dim() - 1));
  const int64_t tokens = width == 0 ? 0 : routed.numel() / width;
  if (routed.scalar_type() == ScalarType::Bool)
    map_histogram(static_cast<const uint8_t*>(routed.const_data_ptr()), flags_of(padding), tokens, experts, out_of(out),
                  accumulate, flags_of(enabled), device.stream);
  else
    index_histogram(routed.const_data_ptr(), routed.scalar_type() == ScalarType::Long, flags_of(padding), tokens, width,
                    experts, out_of(out), accumulate, flags_of(enabled), device.stream);
  check_launch();
}

void topk_margin_histogram(const Tensor& scores_in, int64_t k, std::optional<Tensor> padding_in, Tensor out,
                           bool accumulate, std::optional<Tensor> enabled) {
  const Device device(scores_in);
  const Tensor scores = torch::stable::contiguous(scores_in);
  const std::optional<Tensor> padding = dense(padding_in);
  const int experts = int(scores.size(scores.dim() - 1));
  margin_histogram(dtype_of(scores), scores.const_data_ptr(), flags_of(padding), scores.numel() / experts, experts,
                   int(k), out_of(out), accumulate, flags_of(enabled), device.stream);
  check_launch();
}

}  // namespace
}  // namespace megatron_probes::cuda

using namespace megatron_probes::cuda;

STABLE_TORCH_LIBRARY_IMPL(megatron_probes, CUDA, m) {
  m.impl("tensor_stats", TORCH_BOX(&tensor_stats));
  m.impl("multi_tensor_stats", TORCH_BOX(&multi_tensor_stats));
  m.impl("residual_stats", TORCH_BOX(&residual_stats));
  m.impl("bf16_update_noop", TORCH_BOX(&bf16_update_noop));
  m.impl("bf16_update_noop_master", TORCH_BOX(&bf16_update_noop_master));
  m.impl("routing_histogram", TORCH_BOX(&routing_histogram));
  m.impl("topk_margin_histogram", TORCH_BOX(&topk_margin_histogram));
}
