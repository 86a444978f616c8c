// Number formats by their bits, for host and device.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define MP_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MP_HOST_DEVICE inline
#endif

namespace megatron_probes {

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

constexpr uint32_t kAbsMask = 0x7fffffffu;
constexpr uint32_t kInfBits = 0x7f800000u;

MP_HOST_DEVICE uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
#endif
}

MP_HOST_DEVICE float float_of(uint32_t u) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(u);
#else
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
#endif
}

MP_HOST_DEVICE float widen(float x) { return x; }
MP_HOST_DEVICE float widen(Bf16 x) { return float_of(uint32_t(x.bits) << 16); }
MP_HOST_DEVICE float widen(F16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, exponent = (x.bits >> 10) & 31, mantissa = x.bits & 1023;
  if (exponent == 31) return float_of(sign | kInfBits | (mantissa << 13));
  if (exponent != 0) return float_of(sign | ((exponent + 112) << 23) | (mantissa << 13));
  return float_of(sign | bits_of(float(mantissa) * 0x1p-24f));
}

// float32 to BF16, to nearest even; a NaN stays one.
MP_HOST_DEVICE uint16_t bf16_bits(float x) {
  const uint32_t u = bits_of(x);
  if ((u & kAbsMask) > kInfBits) return 0x7fc0;
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// The BF16 copies are equal as values: -0 equals 0, NaN equals nothing.
MP_HOST_DEVICE bool bf16_equal(float a, float b) { return widen(Bf16{bf16_bits(a)}) == widen(Bf16{bf16_bits(b)}); }

}  // namespace megatron_probes
