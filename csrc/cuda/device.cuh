// What the kernels share.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "launch.h"

namespace megatron_probes::cuda {

constexpr int kThreads = 256;
constexpr unsigned kWarp = 0xffffffffu;

__device__ __forceinline__ bool nonzero(const Flags& flags, int64_t i) {
  if (flags.data == nullptr) return true;
  const char* p = static_cast<const char*>(flags.data) + i * flags.size;
  unsigned long long bits = 0;
  switch (flags.size) {
    case 1:
      bits = *reinterpret_cast<const uint8_t*>(p);
      break;
    case 2:
      bits = *reinterpret_cast<const uint16_t*>(p);
      break;
    case 4:
      bits = *reinterpret_cast<const uint32_t*>(p);
      break;
    default:
      bits = *reinterpret_cast<const unsigned long long*>(p);
  }
  if (flags.floating) bits &= ~(1ull << (8 * flags.size - 1));
  return bits != 0;
}

// Padding is the other way round: a missing mask pads nothing.
__device__ __forceinline__ bool padded(const Flags& flags, int64_t i) {
  return flags.data != nullptr && nonzero(flags, i);
}

// Read once and not again: past L1.
__device__ __forceinline__ uint4 load_once(const uint4* p) {
  uint4 r;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p));
  return r;
}

template <class T>
struct Vector;  // 16 bytes of T as floats

template <>
struct Vector<float> {
  static constexpr int kSize = 4;
  __device__ static void unpack(uint4 r, float* f) {
    f[0] = __uint_as_float(r.x);
    f[1] = __uint_as_float(r.y);
    f[2] = __uint_as_float(r.z);
    f[3] = __uint_as_float(r.w);
  }
};
template <>
struct Vector<Bf16> {
  static constexpr int kSize = 8;
  __device__ static void unpack(uint4 r, float* f) {
    const uint32_t w[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      f[2 * i] = __uint_as_float(w[i] << 16);
      f[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
    }
  }
};
template <>
struct Vector<F16> {
  static constexpr int kSize = 8;
  __device__ static void unpack(uint4 r, float* f) {
    uint32_t w[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(*reinterpret_cast<__half2*>(&w[i]));
      f[2 * i] = pair.x;
      f[2 * i + 1] = pair.y;
    }
  }
};

template <class T>
__device__ __forceinline__ T warp_sum(T v) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) v += __shfl_xor_sync(kWarp, v, offset);
  return v;
}

// Sum over the block in a fixed order; thread 0 gets it. `shared` holds a value a warp.
template <class T>
__device__ __forceinline__ T block_sum(T v, T* shared) {
  v = warp_sum(v);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = v;
  __syncthreads();
  if (threadIdx.x != 0) return T();
  T sum = shared[0];
  for (int w = 1; w < int(blockDim.x >> 5); ++w) sum += shared[w];
  return sum;
}

}  // namespace megatron_probes::cuda
