#define MP_ISA baseline
#include "portable.h"

namespace megatron_probes::cpu::baseline {

template <class T>
static ChunkSums sums_of(const T* x, int64_t n, float shift) {
  ChunkSums sums;
  add_portable(x, n, shift, sums);
  return sums;
}

template <class T>
static void stats(const T* x, int64_t n, Row& row) {
  row.stats = sums_of(x, n, 0).stats;
}

template <class T>
static void moments(const T* x, int64_t n, Row& row) {
  moments_about_mean(x, n, sums_of<T>, row);
}

static uint64_t read(const char* p, int64_t bytes) {
  uint64_t sum = 0;
  for (int64_t i = 0; i + 8 <= bytes; i += 8) {
    uint64_t u;
    std::memcpy(&u, p + i, 8);
    sum ^= u;
  }
  return sum;
}

template <class T>
constexpr FloatKernels<T> kFloatKernels{stats<T>, moments<T>, residual_row_portable<T>};

const Kernels kernels{
    kFloatKernels<float>,
    kFloatKernels<Bf16>,
    kFloatKernels<F16>,
    update_noop<float, float>,
    master_noop<float, float>,
    update_noop<float, Bf16>,
    master_noop<float, Bf16>,
    update_noop<Bf16, float>,
    master_noop<Bf16, float>,
    update_noop<Bf16, Bf16>,
    master_noop<Bf16, Bf16>,
    map_histogram,
    read,
};

}  // namespace megatron_probes::cpu::baseline
