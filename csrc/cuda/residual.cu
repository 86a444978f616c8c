// The residual path: a warp sums one token; then blocks turn tokens into quantities, sums and histograms; then the
// partial sums of the blocks are added in order. Histograms are integer counts: their order changes nothing.
#include "../common/bins.h"
#include "device.cuh"

namespace megatron_probes::cuda {
namespace {

__device__ const BinEdges kEdges = make_bin_edges();

__device__ __forceinline__ int64_t looked_at(const ResidualArguments& a) {
  return (a.tokens + a.stride - 1) / a.stride;
}

__device__ __forceinline__ void add_pair_exact(float x, float y, TokenSums& sums) {
  sums.ss = fma(double(x), double(x), sums.ss);
  sums.bb = fma(double(y), double(y), sums.bb);
  sums.sb = fma(double(x), double(y), sums.sb);
  sums.noop += y != 0 && bf16_equal(x + y, x);
}

template <class T>
__device__ __noinline__ void add_vector_exact(const uint4* s, const uint4* b, TokenSums* sums) {
  float x[Vector<T>::kSize], y[Vector<T>::kSize];
  Vector<T>::unpack(*s, x);
  Vector<T>::unpack(*b, y);
#pragma unroll 1
  for (int v = 0; v < Vector<T>::kSize; ++v) add_pair_exact(x[v], y[v], *sums);
}

// BF16 no-ops among two pairs; one packed rounding for both.
template <class T>
__device__ __forceinline__ int noops(float x0, float y0, float x1, float y1) {
  __nv_bfloat162 sum = __floats2bfloat162_rn(x0 + y0, x1 + y1);
  const uint32_t moved = *reinterpret_cast<uint32_t*>(&sum);
  float s0 = x0, s1 = x1;
  if (!std::is_same_v<T, Bf16>) {
    __nv_bfloat162 stream = __floats2bfloat162_rn(x0, x1);
    const uint32_t w = *reinterpret_cast<uint32_t*>(&stream);
    s0 = __uint_as_float(w << 16);
    s1 = __uint_as_float(w & 0xffff0000u);
  }
  return ((__uint_as_float(moved << 16) == s0) & (y0 != 0)) +
         ((__uint_as_float(moved & 0xffff0000u) == s1) & (y1 != 0));
}

template <class T>
__global__ void __launch_bounds__(kThreads) token_kernel(const __grid_constant__ ResidualArguments a) {
  if (!nonzero(a.enabled, 0)) return;
  const int lane = threadIdx.x & 31;
  const int64_t index = int64_t(blockIdx.x) * (kThreads / 32) + (threadIdx.x >> 5);
  if (index >= looked_at(a)) return;
  const int64_t token = index * a.stride;
  TokenSums total;
  if (!nonzero(a.mask, token)) {
    total.noop = -1;  // not looked at
    if (lane == 0) a.sums[index] = total;
    return;
  }
  const T* s = static_cast<const T*>(a.s) + token * a.d;
  const T* b = static_cast<const T*>(a.b) + token * a.d;
  double ss = 0, bb = 0, sb = 0;
  int noop = 0;
  TokenSums rest;
  const bool aligned = ((reinterpret_cast<uintptr_t>(s) | reinterpret_cast<uintptr_t>(b)) & 15) == 0;
  constexpr int V = Vector<T>::kSize;
  const int vectors = aligned ? int(a.d / V) : 0;
  const uint4* ps = reinterpret_cast<const uint4*>(s);
  const uint4* pb = reinterpret_cast<const uint4*>(b);
  for (int i = lane; i < vectors; i += 64) {
    const bool two = i + 32 < vectors;
    uint4 rs[2] = {load_once(ps + i), make_uint4(0, 0, 0, 0)}, rb[2] = {load_once(pb + i), make_uint4(0, 0, 0, 0)};
    if (two) {
      rs[1] = load_once(ps + i + 32);
      rb[1] = load_once(pb + i + 32);
    }
    float xx = 0, yy = 0, xy = 0;
    uint32_t any_s = 0, any_b = 0;
    int count = 0;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float x[V], y[V];
      Vector<T>::unpack(rs[k], x);
      Vector<T>::unpack(rb[k], y);
      any_s |= rs[k].x | rs[k].y | rs[k].z | rs[k].w;
      any_b |= rb[k].x | rb[k].y | rb[k].z | rb[k].w;
#pragma unroll
      for (int v = 0; v < V; v += 2) {
        xx = fmaf(x[v + 1], x[v + 1], fmaf(x[v], x[v], xx));
        yy = fmaf(y[v + 1], y[v + 1], fmaf(y[v], y[v], yy));
        xy = fmaf(x[v + 1], y[v + 1], fmaf(x[v], y[v], xy));
        count += noops<T>(x[v], y[v], x[v + 1], y[v + 1]);
      }
    }
    // Non-finite, or squares near the ends of float32's range: again, in float64.
    if (!(xx + yy < 1e37f) || (xx < 1e-28f && any_s) || (yy < 1e-28f && any_b)) {
      add_vector_exact<T>(ps + i, pb + i, &rest);
      if (two) add_vector_exact<T>(ps + i + 32, pb + i + 32, &rest);
    } else {
      ss += xx;
      bb += yy;
      sb += xy;
      noop += count;
    }
  }
#pragma unroll 1
  for (int64_t i = int64_t(vectors) * V + lane; i < a.d; i += 32) add_pair_exact(widen(s[i]), widen(b[i]), rest);
  total.ss = warp_sum(ss + rest.ss);
  total.bb = warp_sum(bb + rest.bb);
  total.sb = warp_sum(sb + rest.sb);
  total.noop = warp_sum(noop + int(rest.noop));
  if (lane == 0) a.sums[index] = total;
}

__global__ void __launch_bounds__(kThreads) clear_kernel(const __grid_constant__ ResidualArguments a) {
  if (!nonzero(a.enabled, 0)) return;
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (a.histograms && !a.accumulate && i < kQuantities * kBins)
    a.histograms[i / kBins * a.histogram_row_step + i % kBins * a.histogram_step] = 0;
}

__global__ void __launch_bounds__(kThreads) quantity_kernel(const __grid_constant__ ResidualArguments a) {
  if (!nonzero(a.enabled, 0)) return;
  __shared__ double scratch[kThreads / 32];
  __shared__ unsigned counts[kQuantities * kBins];
  if (a.histograms) {
    for (int i = threadIdx.x; i < kQuantities * kBins; i += kThreads) counts[i] = 0;
    __syncthreads();
  }
  double sums[kResidualColumns] = {};
  const int64_t count = looked_at(a);
#pragma unroll 1
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count; i += int64_t(gridDim.x) * kThreads) {
    const TokenSums t = a.sums[i];
    if (t.noop < 0) continue;
    if (!finite(t)) {
      sums[1] += 1;
      continue;
    }
    double q[kQuantities];
    token_quantities(t, a.d, q);
    sums[0] += 1;
#pragma unroll
    for (int j = 0; j < kQuantities; ++j) {
      sums[2 + j] += q[j];
      if (a.histograms) atomicAdd(&counts[j * kBins + bin_index(q[j], kEdges.edge)], 1u);
    }
  }
#pragma unroll
  for (int j = 0; j < kResidualColumns; ++j) {
    const double sum = block_sum(sums[j], scratch);
    if (threadIdx.x == 0) a.partials[blockIdx.x * kResidualColumns + j] = sum;
  }
  if (!a.histograms) return;
  __syncthreads();
  for (int i = threadIdx.x; i < kQuantities * kBins; i += kThreads)
    if (counts[i])
      atomicAdd(&a.histograms[i / kBins * a.histogram_row_step + i % kBins * a.histogram_step], double(counts[i]));
}

__global__ void finish_kernel(const __grid_constant__ ResidualArguments a, int blocks) {
  if (!nonzero(a.enabled, 0)) return;
  const int j = threadIdx.x;
  if (j >= kResidualColumns) return;
  double sum = 0;
  for (int i = 0; i < blocks; ++i) sum += a.partials[i * kResidualColumns + j];
  double& slot = a.out.data[j * a.out.step];
  slot = a.accumulate ? slot + sum : sum;
}

__global__ void __launch_bounds__(kThreads) per_token_kernel(const __grid_constant__ ResidualArguments a) {
  if (!nonzero(a.enabled, 0)) return;
  const int64_t token = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (token >= a.tokens) return;
  double columns[kTokenColumns] = {};
  if (token % a.stride == 0) {
    const TokenSums t = a.sums[token / a.stride];
    if (t.noop >= 0) {
      columns[0] = sqrt(t.ss);
      columns[1] = sqrt(t.bb);
      columns[2] = t.sb;
      columns[3] = sqrt(sum_square(t));
      columns[4] = double(t.noop);
    }
  }
#pragma unroll
  for (int j = 0; j < kTokenColumns; ++j) a.per_token[token * a.per_token_row_step + j * a.per_token_step] = columns[j];
}

int blocks_for(int64_t items, int per_block) { return int((items + per_block - 1) / per_block); }

}  // namespace

void residual(Dtype dtype, const ResidualArguments& a, cudaStream_t stream) {
  const int64_t count = (a.tokens + a.stride - 1) / a.stride;
  const int blocks = std::min(kResidualBlocks, std::max(1, blocks_for(count, kThreads)));
  if (count > 0) {
    const int token_blocks = blocks_for(count, kThreads / 32);
    if (dtype == Dtype::f32)
      token_kernel<float><<<token_blocks, kThreads, 0, stream>>>(a);
    else if (dtype == Dtype::bf16)
      token_kernel<Bf16><<<token_blocks, kThreads, 0, stream>>>(a);
    else
      token_kernel<F16><<<token_blocks, kThreads, 0, stream>>>(a);
  }
  if (a.histograms) clear_kernel<<<blocks_for(kQuantities * kBins, kThreads), kThreads, 0, stream>>>(a);
  quantity_kernel<<<blocks, kThreads, 0, stream>>>(a);
  finish_kernel<<<1, 32, 0, stream>>>(a, blocks);
  if (a.per_token && a.tokens > 0) per_token_kernel<<<blocks_for(a.tokens, kThreads), kThreads, 0, stream>>>(a);
}

}  // namespace megatron_probes::cuda
