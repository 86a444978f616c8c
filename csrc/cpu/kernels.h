// The inner loops, once for every instruction set; which one runs is decided when the first is asked for.
#pragma once
#include "../common/residual.h"
#include "../common/row.h"

namespace megatron_probes::cpu {

// A tensor is cut into chunks of this size whatever the number of threads, and partial results are merged in order: the
// result depends on neither. 512 KB are 8 streams of 64 KB, see stats_avx2.h.
constexpr int64_t kChunkBytes = 512 << 10;

struct NoopCounts {
  int64_t noop = 0, nonzero = 0;
};

template <class T>
struct FloatKernels {
  void (*stats)(const T* x, int64_t n, Row& row);    // n * sizeof(T) <= kChunkBytes
  void (*moments)(const T* x, int64_t n, Row& row);  // likewise, with moments
  TokenSums (*residual_row)(const T* s, const T* b, int64_t d);
};

template <class A, class B>
using NoopKernel = NoopCounts (*)(const A*, const B*, int64_t n);

struct Kernels {
  FloatKernels<float> f32;
  FloatKernels<Bf16> bf16;
  FloatKernels<F16> f16;
  NoopKernel<float, float> update_ff, master_ff;
  NoopKernel<float, Bf16> update_fb, master_fb;
  NoopKernel<Bf16, float> update_bf, master_bf;
  NoopKernel<Bf16, Bf16> update_bb, master_bb;
  // Adds the rows [begin, end) of a bool map [tokens, experts] to counts [experts].
  void (*map_histogram)(const uint8_t* map, const uint8_t* padding, int64_t begin, int64_t end, int64_t experts,
                        int64_t* counts);
  uint64_t (*read)(const char* p, int64_t bytes);  // loads and xors: the yardstick of the benchmark

  template <class T>
  const FloatKernels<T>& of() const;
};

template <>
inline const FloatKernels<float>& Kernels::of<float>() const {
  return f32;
}
template <>
inline const FloatKernels<Bf16>& Kernels::of<Bf16>() const {
  return bf16;
}
template <>
inline const FloatKernels<F16>& Kernels::of<F16>() const {
  return f16;
}

namespace baseline {
extern const Kernels kernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kernels;
}
#endif

// The best of what this processor runs; MEGATRON_PROBES_CPU=baseline asks for the plainest.
const Kernels& kernels();

}  // namespace megatron_probes::cpu
