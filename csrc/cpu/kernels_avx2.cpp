#if defined(__x86_64__)
// Everything that others compile too comes before the target is raised.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <type_traits>

#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#define MP_ISA avx2
#include "residual_avx2.h"

namespace megatron_probes::cpu::avx2 {

template <class T>
constexpr FloatKernels<T> kFloatKernels{stats<T>, moments<T>, residual_row<T>};

}  // namespace megatron_probes::cpu::avx2

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace megatron_probes::cpu::avx2 {

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

}  // namespace megatron_probes::cpu::avx2
#endif
