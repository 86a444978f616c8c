// What the binding asks of the kernels. Nothing here copies from the host, waits or allocates; what a launch needs to
// know travels in its arguments, so every launch can be captured in a graph.
#pragma once
#include <cuda_runtime.h>

#include "../common/residual.h"
#include "../common/row.h"

namespace megatron_probes::cuda {

enum class Dtype : int { f32, bf16, f16 };

// A pointer to numbers of any dtype that are only compared with 0; null: all are valid.
struct Flags {
  const void* data = nullptr;
  int size = 1;           // bytes an element
  bool floating = false;  // then -0 is 0
};

// A float64 result; elements lie `step` apart.
struct Out {
  double* data;
  int64_t step;
};

// ---- statistics

constexpr int kTensorsALaunch = 112;
constexpr int64_t kMaxChunks = 4096;  // of one tensor

struct TensorList {
  const void* data[kTensorsALaunch];
  int64_t numel[kTensorsALaunch];
  int64_t chunk[kTensorsALaunch];  // elements a block
  int first[kTensorsALaunch + 1];  // first block, and the total
  int row[kTensorsALaunch];        // of the result
  int count;
};
static_assert(sizeof(TensorList) < 4000, "kernel arguments hold 4 KB");

// partials: one Row a block. Row r of the result starts at out.data + r * row_step.
void stats(Dtype dtype, bool moments, const TensorList& list, Row* partials, Out out, int64_t row_step, bool accumulate,
           Flags enabled, cudaStream_t stream);

// ---- residual path

constexpr int kResidualBlocks = 128;

struct ResidualArguments {
  const void *s, *b;
  int64_t tokens, d, stride;
  Flags mask, enabled;
  TokenSums* sums;   // scratch, one a token looked at
  double* partials;  // scratch, [kResidualBlocks, kResidualColumns]
  Out out;
  double* histograms;  // [kQuantities, kBins] or null
  int64_t histogram_step, histogram_row_step;
  double* per_token;  // [tokens, kTokenColumns] or null
  int64_t per_token_step, per_token_row_step;
  bool accumulate;
};

void residual(Dtype dtype, const ResidualArguments& arguments, cudaStream_t stream);

// ---- counts; each adds integers to float64, which is exact and so independent of order

void update_noop(bool master, Dtype first_dtype, const void* first, Dtype second_dtype, const void* second, int64_t n,
                 Out out, bool accumulate, Flags enabled, cudaStream_t stream);
void map_histogram(const uint8_t* map, Flags padding, int64_t tokens, int experts, Out out, bool accumulate,
                   Flags enabled, cudaStream_t stream);
void index_histogram(const void* indices, bool wide, Flags padding, int64_t tokens, int k, int experts, Out out,
                     bool accumulate, Flags enabled, cudaStream_t stream);
void margin_histogram(Dtype dtype, const void* scores, Flags padding, int64_t tokens, int experts, int k, Out out,
                      bool accumulate, Flags enabled, cudaStream_t stream);

}  // namespace megatron_probes::cuda
