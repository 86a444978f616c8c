// One-pass statistics. A block reduces one chunk of one tensor to a Row; a second launch folds a tensor's rows in the
// order of its chunks, so the result is the same bit for bit in every run.
#include "device.cuh"

namespace megatron_probes::cuda {
namespace {

constexpr int kBatch = 4;  // 16-byte loads in flight, each thread

struct Sums {
  double sq = 0, abs = 0;
  PowerSums powers;
  uint32_t top = 0, zeros = 0, nonfinite = 0, nan = 0;
};

// Any finite magnitude, in float64; non-finite elements are counted and left out.
template <bool MOMENTS>
__device__ __forceinline__ void add_exact(float f, double shift, Sums& sums) {
  const uint32_t u = __float_as_uint(f) & kAbsMask;
  if (u >= kInfBits) {
    ++sums.nonfinite;
    sums.nan += u > kInfBits;
    return;
  }
  sums.zeros += u == 0;
  sums.top = max(sums.top, u);
  const double v = f;
  sums.abs += fabs(v);
  sums.sq = fma(v, v, sums.sq);
  if (MOMENTS) {
    const double d = v - shift, d2 = d * d;
    sums.powers.s1 += d;
    sums.powers.s2 += d2;
    sums.powers.s3 = fma(d2, d, sums.powers.s3);
    sums.powers.s4 = fma(d2, d2, sums.powers.s4);
  }
}

// Out of line, with sums of its own: what it touches may live in memory, the hot loop's sums stay in registers.
template <class T, bool MOMENTS>
__device__ __noinline__ void add_vectors_exact(const uint4* p, int vectors, int step, double shift, Sums* sums) {
#pragma unroll 1
  for (int k = 0; k < vectors; ++k) {
    float f[Vector<T>::kSize];
    Vector<T>::unpack(load_once(p + k * step), f);
#pragma unroll 1
    for (float x : f) add_exact<MOMENTS>(x, shift, *sums);
  }
}

template <class T, bool MOMENTS>
__device__ __noinline__ void add_elements_exact(const T* x, int64_t begin, int64_t end, double shift, Sums* sums) {
#pragma unroll 1
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) add_exact<MOMENTS>(widen(x[i]), shift, *sums);
}

// Whether sums in float32 over a batch hold: squares in range, and with moments fourth powers too.
template <class T, bool MOMENTS>
__device__ __forceinline__ bool batch_in_range(uint32_t top) {
  if (!MOMENTS && sizeof(T) == 4) return top < kInfBits;  // these are float64 sums
  const uint32_t low = (127u - (MOMENTS ? 24 : 50)) << 23, high = (127u + (MOMENTS ? 24 : 56)) << 23;
  return top == 0 || (top >= low && top < high);
}

// One batch: N vectors that lie `step` apart. Sums of half types and all powers are taken in float32 within the batch.
template <class T, bool MOMENTS, int N>
__device__ __forceinline__ void add_batch(const uint4* p, int step, float shift, bool exact, Sums& sums, Sums* rest) {
  uint4 raw[N];
#pragma unroll
  for (int k = 0; k < N; ++k) raw[k] = load_once(p + k * step);
  double sq = 0, ab = 0;
  float sq32 = 0, ab32 = 0, q1 = 0, q2 = 0, q3 = 0, q4 = 0;
  uint32_t top = 0, zeros = 0;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    float f[Vector<T>::kSize];
    Vector<T>::unpack(raw[k], f);
#pragma unroll
    for (float x : f) {
      const uint32_t u = __float_as_uint(x) & kAbsMask;
      top = max(top, u);
      zeros += u == 0;
      if (sizeof(T) == 4) {
        const double v = x;
        sq = fma(v, v, sq);
        ab += fabs(v);
      } else {
        sq32 = fmaf(x, x, sq32);
        ab32 += fabsf(x);
      }
      if (MOMENTS) {
        const float d = x - shift, d2 = d * d;
        q1 += d;
        q2 += d2;
        q3 = fmaf(d2, d, q3);
        q4 = fmaf(d2, d2, q4);
      }
    }
  }
  if (exact || !batch_in_range<T, MOMENTS>(top)) {
    add_vectors_exact<T, MOMENTS>(p, N, step, shift, rest);
    return;
  }
  sums.top = max(sums.top, top);
  sums.zeros += zeros;
  sums.sq += sizeof(T) == 4 ? sq : double(sq32);
  sums.abs += sizeof(T) == 4 ? ab : double(ab32);
  if (MOMENTS) {
    sums.powers.s1 += q1;
    sums.powers.s2 += q2;
    sums.powers.s3 += q3;
    sums.powers.s4 += q4;
  }
}

// A value near the mean of a chunk, from 32 elements spread over it; the same in every thread.
template <class T>
__device__ float sample_shift(const T* x, int64_t n, float* shared) {
  if (threadIdx.x < 32) {
    const float f = widen(x[n * threadIdx.x / 32]);
    const bool finite = (__float_as_uint(f) & kAbsMask) < kInfBits;
    const double sum = warp_sum(finite ? double(f) : 0.0);
    const int count = __popc(__ballot_sync(kWarp, finite));
    if (threadIdx.x == 0) *shared = count ? float(sum / count) : 0.0f;
  }
  __syncthreads();
  return *shared;
}

struct Scratch {
  double sum[kThreads / 32];
  uint32_t count[kThreads / 32];
  float shift;
  bool again, exact;
};

template <class T, bool MOMENTS>
__device__ Sums pass(const T* x, int64_t n, float shift, bool exact) {
  Sums sums, rest;
  const int64_t misaligned = (16 - int64_t(reinterpret_cast<uintptr_t>(x) & 15)) & 15;
  const int64_t head = min(n, misaligned / int64_t(sizeof(T)));
  const int vectors = int((n - head) / Vector<T>::kSize);
  const uint4* p = reinterpret_cast<const uint4*>(x + head);
  int i = threadIdx.x;
  for (; i + (kBatch - 1) * kThreads < vectors; i += kBatch * kThreads)
    add_batch<T, MOMENTS, kBatch>(p + i, kThreads, shift, exact, sums, &rest);
  for (; i < vectors; i += kThreads) add_vectors_exact<T, MOMENTS>(p + i, 1, 0, shift, &rest);
  if (head > 0) add_elements_exact<T, MOMENTS>(x, 0, head, shift, &rest);
  if (const int64_t tail = head + int64_t(vectors) * Vector<T>::kSize; tail < n)
    add_elements_exact<T, MOMENTS>(x, tail, n, shift, &rest);
  sums.sq += rest.sq;
  sums.abs += rest.abs;
  sums.top = max(sums.top, rest.top);
  sums.zeros += rest.zeros;
  sums.nonfinite = rest.nonfinite;
  sums.nan = rest.nan;
  if (MOMENTS) {
    sums.powers.s1 += rest.powers.s1;
    sums.powers.s2 += rest.powers.s2;
    sums.powers.s3 += rest.powers.s3;
    sums.powers.s4 += rest.powers.s4;
  }
  return sums;
}

template <class T, bool MOMENTS>
__global__ void __launch_bounds__(kThreads)
    stats_kernel(const __grid_constant__ TensorList list, Row* partials, Flags enabled) {
  if (!nonzero(enabled, 0)) return;
  __shared__ Scratch shared;
  int low = 0, high = list.count;  // the tensor of this block: the last whose first block is not after it
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (list.first[middle] <= int(blockIdx.x) ? low : high) = middle;
  }
  const int64_t begin = int64_t(blockIdx.x - list.first[low]) * list.chunk[low];
  const int64_t n = min(list.chunk[low], list.numel[low] - begin);
  const T* x = static_cast<const T*>(list.data[low]) + begin;

  Row row;
  float shift = 0;
  if (MOMENTS && n > 0) shift = sample_shift(x, n, &shared.shift);
  bool exact = false;
  // With moments: while the mean is further from the shift than the spread, central sums would cancel, and where the
  // fourth power of the spread would vanish in float32, the pass is made again.
#pragma unroll 1
  for (int attempt = 0;; ++attempt) {
    const Sums sums = pass<T, MOMENTS>(x, n, shift, exact);
    row.stats.sum_sq = block_sum(sums.sq, shared.sum);
    row.stats.sum_abs = block_sum(sums.abs, shared.sum);
    row.stats.zeros = block_sum(sums.zeros, shared.count);
    row.stats.nonfinite = block_sum(sums.nonfinite, shared.count);
    row.stats.nan = block_sum(sums.nan, shared.count);
    const uint32_t top = __reduce_max_sync(kWarp, sums.top);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) shared.count[threadIdx.x >> 5] = top;
    __syncthreads();
    if (threadIdx.x == 0)
      for (uint32_t t : shared.count) row.stats.abs_max = max(row.stats.abs_max, t);
    row.stats.numel = n;
    if (!MOMENTS) break;
    PowerSums powers;
    powers.s1 = block_sum(sums.powers.s1, shared.sum);
    powers.s2 = block_sum(sums.powers.s2, shared.sum);
    powers.s3 = block_sum(sums.powers.s3, shared.sum);
    powers.s4 = block_sum(sums.powers.s4, shared.sum);
    if (threadIdx.x == 0) {
      const double count = double(n - row.stats.nonfinite), offset = count > 0 ? powers.s1 / count : 0;
      const float moved = float(double(shift) + offset);
      const bool far = moved != shift && 2 * offset * offset * count > powers.s2;
      const bool vanishing = powers.s2 > 0 && powers.s2 < count * 0x1p-50;
      shared.again = attempt < 2 && (far || (vanishing && !exact));
      shared.exact = exact || vanishing;
      if (far) shared.shift = moved;
      row.moments = powers.about_mean(count, shift);
    }
    __syncthreads();
    if (!shared.again) break;
    shift = shared.shift;
    exact = shared.exact;
    row = Row();
  }
  if (threadIdx.x == 0) partials[blockIdx.x] = row;
}

template <bool MOMENTS>
__global__ void __launch_bounds__(kThreads) fold_kernel(const __grid_constant__ TensorList list, const Row* partials,
                                                        Out out, int64_t row_step, bool accumulate, Flags enabled) {
  if (!nonzero(enabled, 0)) return;
  __shared__ Row rows[kThreads];
  const int first = list.first[blockIdx.x], last = list.first[blockIdx.x + 1];
  Row sum;
  for (int i = first + threadIdx.x; i < last; i += kThreads) {
    sum.stats.merge(partials[i].stats);
    if (MOMENTS) sum.moments.merge(partials[i].moments);
  }
  rows[threadIdx.x] = sum;
  for (int half = kThreads / 2; half; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      rows[threadIdx.x].stats.merge(rows[threadIdx.x + half].stats);
      if (MOMENTS) rows[threadIdx.x].moments.merge(rows[threadIdx.x + half].moments);
    }
  }
  if (threadIdx.x == 0)
    write_row(out.data + list.row[blockIdx.x] * row_step, out.step, rows[0], float_of(rows[0].stats.abs_max), MOMENTS,
              accumulate);
}

template <class T>
void launch(bool moments, const TensorList& list, Row* partials, Flags enabled, cudaStream_t stream) {
  const int blocks = list.first[list.count];
  if (blocks == 0) return;
  if (moments)
    stats_kernel<T, true><<<blocks, kThreads, 0, stream>>>(list, partials, enabled);
  else
    stats_kernel<T, false><<<blocks, kThreads, 0, stream>>>(list, partials, enabled);
}

}  // namespace

void stats(Dtype dtype, bool moments, const TensorList& list, Row* partials, Out out, int64_t row_step, bool accumulate,
           Flags enabled, cudaStream_t stream) {
  if (dtype == Dtype::f32)
    launch<float>(moments, list, partials, enabled, stream);
  else if (dtype == Dtype::bf16)
    launch<Bf16>(moments, list, partials, enabled, stream);
  else
    launch<F16>(moments, list, partials, enabled, stream);
  if (moments)
    fold_kernel<true><<<list.count, kThreads, 0, stream>>>(list, partials, out, row_step, accumulate, enabled);
  else
    fold_kernel<false><<<list.count, kThreads, 0, stream>>>(list, partials, out, row_step, accumulate, enabled);
}

}  // namespace megatron_probes::cuda
