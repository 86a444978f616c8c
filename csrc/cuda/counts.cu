// Counts: BF16 no-ops, tokens an expert, margins. Each block counts in integers and adds them to the float64 result
// with an atomic: sums of integers below 2^53 are exact, so their order changes nothing.
#include "../common/bins.h"
#include "device.cuh"

namespace megatron_probes::cuda {
namespace {

constexpr int kBlocks = 528;
constexpr int kSharedExperts = 4096;

__device__ const BinEdges kEdges = make_bin_edges();

__global__ void clear_kernel(Out out, int n, Flags enabled) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n && nonzero(enabled, 0)) out.data[i * out.step] = 0;
}

void clear(Out out, int n, bool accumulate, Flags enabled, cudaStream_t stream) {
  if (!accumulate) clear_kernel<<<(n + kThreads - 1) / kThreads, kThreads, 0, stream>>>(out, n, enabled);
}

template <bool MASTER, class A, class B>
__global__ void __launch_bounds__(kThreads) noop_kernel(const A* a, const B* b, int64_t n, Out out, Flags enabled) {
  if (!nonzero(enabled, 0)) return;
  __shared__ unsigned long long scratch[kThreads / 32];
  unsigned long long noop = 0, moved = 0;
#pragma unroll 4
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += int64_t(gridDim.x) * kThreads) {
    const float x = widen(a[i]), y = widen(b[i]);
    const bool moves = MASTER ? x != y : y != 0;
    moved += moves;
    noop += moves && bf16_equal(MASTER ? y : x + y, x);
  }
  noop = block_sum(noop, scratch);
  moved = block_sum(moved, scratch);
  if (threadIdx.x == 0) {
    atomicAdd(&out.data[0], double(noop));
    atomicAdd(&out.data[out.step], double(moved));
  }
}

template <bool MASTER>
void launch_noop(Dtype da, const void* a, Dtype db, const void* b, int64_t n, Out out, Flags enabled, cudaStream_t st) {
  const int blocks = int(std::min<int64_t>(kBlocks, (n + kThreads - 1) / kThreads));
  if (blocks == 0) return;
  const auto af = static_cast<const float*>(a), bf = static_cast<const float*>(b);
  const auto ah = static_cast<const Bf16*>(a), bh = static_cast<const Bf16*>(b);
  if (da == Dtype::f32 && db == Dtype::f32)
    noop_kernel<MASTER><<<blocks, kThreads, 0, st>>>(af, bf, n, out, enabled);
  else if (da == Dtype::f32)
    noop_kernel<MASTER><<<blocks, kThreads, 0, st>>>(af, bh, n, out, enabled);
  else if (db == Dtype::f32)
    noop_kernel<MASTER><<<blocks, kThreads, 0, st>>>(ah, bf, n, out, enabled);
  else
    noop_kernel<MASTER><<<blocks, kThreads, 0, st>>>(ah, bh, n, out, enabled);
}

// PACK bytes of a row a thread: bools are added as bytes, 255 rows at most before they would overflow.
template <int PACK>
__global__ void __launch_bounds__(kThreads)
    map_kernel(const uint8_t* map, Flags padding, int64_t tokens, int experts, Out out, Flags enabled) {
  if (!nonzero(enabled, 0)) return;
  const int columns = experts / PACK;
  for (int column = blockIdx.y * blockDim.x + threadIdx.x; column < columns; column += gridDim.y * blockDim.x) {
    unsigned long long counts[PACK] = {};
    uint32_t packed = 0;
    int rows = 0;
    const auto flush = [&] {
#pragma unroll
      for (int i = 0; i < PACK; ++i) counts[i] += (packed >> (8 * i)) & 255;
      packed = 0;
      rows = 0;
    };
    for (int64_t t = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; t < tokens; t += int64_t(gridDim.x) * blockDim.y) {
      if (padded(padding, t)) continue;
      const uint8_t* p = map + t * experts + PACK * column;
      packed += PACK == 4 ? *reinterpret_cast<const uint32_t*>(p) : *p;
      if (++rows == 255) flush();
    }
    flush();
#pragma unroll
    for (int i = 0; i < PACK; ++i)
      if (counts[i]) atomicAdd(&out.data[(PACK * column + i) * out.step], double(counts[i]));
  }
}

template <class Index>
__global__ void __launch_bounds__(kThreads)
    index_kernel(const Index* indices, Flags padding, int64_t tokens, int k, int experts, Out out, Flags enabled) {
  if (!nonzero(enabled, 0)) return;
  extern __shared__ unsigned counts[];
  const bool shared = experts <= kSharedExperts;
  if (shared) {
    for (int e = threadIdx.x; e < experts; e += kThreads) counts[e] = 0;
    __syncthreads();
  }
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < tokens * k; i += int64_t(gridDim.x) * kThreads) {
    const int64_t e = indices[i];
    if (e < 0 || e >= experts || padded(padding, i / k)) continue;
    if (shared)
      atomicAdd(&counts[e], 1u);
    else
      atomicAdd(&out.data[e * out.step], 1.0);
  }
  if (!shared) return;
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += kThreads)
    if (counts[e]) atomicAdd(&out.data[e * out.step], double(counts[e]));
}

// A warp a token: k + 1 times the largest score not yet taken, in the order of (score, index).
template <class T>
__global__ void __launch_bounds__(kThreads)
    margin_kernel(const T* scores, Flags padding, int64_t tokens, int experts, int k, Out out, Flags enabled) {
  if (!nonzero(enabled, 0)) return;
  const int64_t token = int64_t(blockIdx.x) * (kThreads / 32) + (threadIdx.x >> 5);
  const int lane = threadIdx.x & 31;
  if (token >= tokens || padded(padding, token)) return;
  const T* row = scores + token * experts;
  bool nan = false;
  for (int e = lane; e < experts; e += 32) nan |= isnan(widen(row[e]));
  if (__any_sync(kWarp, nan)) return;
  float above = 0, taken = HUGE_VALF;
  int taken_index = -1;
  for (int rank = 0; rank <= k; ++rank) {
    above = taken;
    float best = -HUGE_VALF;
    int best_index = experts;
    for (int e = lane; e < experts; e += 32) {
      const float x = widen(row[e]);
      const bool open = x < taken || (x == taken && e > taken_index);
      if (open && (x > best || (x == best && e < best_index))) {
        best = x;
        best_index = e;
      }
    }
    for (int offset = 16; offset; offset >>= 1) {
      const float other = __shfl_xor_sync(kWarp, best, offset);
      const int other_index = __shfl_xor_sync(kWarp, best_index, offset);
      if (other > best || (other == best && other_index < best_index)) {
        best = other;
        best_index = other_index;
      }
    }
    taken = best;
    taken_index = best_index;
  }
  if (lane == 0) {
    const double margin = above == taken ? 0.0 : double(above) - double(taken);
    atomicAdd(&out.data[bin_index(margin, kEdges.edge) * out.step], 1.0);
  }
}

template <class T>
void launch_margins(const void* scores, Flags padding, int64_t tokens, int experts, int k, Out out, Flags enabled,
                    cudaStream_t stream) {
  const int blocks = int((tokens + kThreads / 32 - 1) / (kThreads / 32));
  margin_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<const T*>(scores), padding, tokens, experts, k, out,
                                                 enabled);
}

}  // namespace

void update_noop(bool master, Dtype first_dtype, const void* first, Dtype second_dtype, const void* second, int64_t n,
                 Out out, bool accumulate, Flags enabled, cudaStream_t stream) {
  clear(out, 2, accumulate, enabled, stream);
  if (master)
    launch_noop<true>(first_dtype, first, second_dtype, second, n, out, enabled, stream);
  else
    launch_noop<false>(first_dtype, first, second_dtype, second, n, out, enabled, stream);
}

void map_histogram(const uint8_t* map, Flags padding, int64_t tokens, int experts, Out out, bool accumulate,
                   Flags enabled, cudaStream_t stream) {
  clear(out, experts, accumulate, enabled, stream);
  if (tokens == 0 || experts == 0) return;
  const bool packed = experts % 4 == 0 && reinterpret_cast<uintptr_t>(map) % 4 == 0;
  const int columns = packed ? experts / 4 : experts;
  const dim3 block(std::min(columns, 64), kThreads / std::min(columns, 64));
  const dim3 grid(kBlocks, std::min((columns + 63) / 64, 64));
  if (packed)
    map_kernel<4><<<grid, block, 0, stream>>>(map, padding, tokens, experts, out, enabled);
  else
    map_kernel<1><<<grid, block, 0, stream>>>(map, padding, tokens, experts, out, enabled);
}

void index_histogram(const void* indices, bool wide, Flags padding, int64_t tokens, int k, int experts, Out out,
                     bool accumulate, Flags enabled, cudaStream_t stream) {
  clear(out, experts, accumulate, enabled, stream);
  const int blocks = int(std::min<int64_t>(kBlocks, (tokens * k + kThreads - 1) / kThreads));
  if (blocks == 0) return;
  const size_t bytes = experts <= kSharedExperts ? experts * sizeof(unsigned) : 0;
  if (wide)
    index_kernel<<<blocks, kThreads, bytes, stream>>>(static_cast<const int64_t*>(indices), padding, tokens, k, experts,
                                                      out, enabled);
  else
    index_kernel<<<blocks, kThreads, bytes, stream>>>(static_cast<const int32_t*>(indices), padding, tokens, k, experts,
                                                      out, enabled);
}

void margin_histogram(Dtype dtype, const void* scores, Flags padding, int64_t tokens, int experts, int k, Out out,
                      bool accumulate, Flags enabled, cudaStream_t stream) {
  clear(out, kBins, accumulate, enabled, stream);
  if (tokens == 0) return;
  if (dtype == Dtype::f32)
    launch_margins<float>(scores, padding, tokens, experts, k, out, enabled, stream);
  else if (dtype == Dtype::bf16)
    launch_margins<Bf16>(scores, padding, tokens, experts, k, out, enabled, stream);
  else
    launch_margins<F16>(scores, padding, tokens, experts, k, out, enabled, stream);
}

}  // namespace megatron_probes::cuda
