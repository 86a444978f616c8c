// One-pass statistics with AVX2. What matters, in order of effect:
//  - 8 streams, 64 KB apart, are read in turn, a cache line each: one stream reaches half of what a core can read;
//  - the loops over streams and lines are not unrolled: gcc would spill the accumulators;
//  - |x| is compared and maximised as an integer, so non-finite elements show in the maximum and need no test of their
//    own; a chunk that holds one, or whose powers would leave float32's range, is passed again, masked, in float64.
// float32 is accumulated in float64. Half types are accumulated in float32 over at most 32 additions, then in float64:
// their products are exact in float32.
#pragma once
#include <immintrin.h>

#include "portable.h"

#define MP_PRAGMA(x) _Pragma(#x)
#if defined(__clang__)
#define MP_UNROLL(n) MP_PRAGMA(clang loop unroll_count(n))
#else
#define MP_UNROLL(n) MP_PRAGMA(GCC unroll n)
#endif
// Keeps a load from being folded into, and repeated for, each of its uses.
#define MP_ONCE(v) asm("" : "+x"(v))
// Has two sums in registers here. gcc would interleave steps of a loop until the sums no longer fit, and add in memory.
#define MP_KEEP(u, v) asm("" : "+x"(u), "+x"(v))

namespace megatron_probes::cpu::avx2 {

using I = __m256i;
using F = __m256;
using D = __m256d;

constexpr int kStreams = 8;
constexpr int kPrefetch = 256;  // bytes ahead, each stream

inline D abs_mask() { return _mm256_castsi256_pd(_mm256_set1_epi64x(0x7fffffffffffffffll)); }
inline D low(F v) { return _mm256_cvtps_pd(_mm256_castps256_ps128(v)); }
inline D high(F v) { return _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)); }
inline D widened(F v) { return _mm256_add_pd(low(v), high(v)); }
inline F as_float(I v) { return _mm256_castsi256_ps(v); }

inline double total(D v) {
  const __m128d a = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
  return _mm_cvtsd_f64(a) + _mm_cvtsd_f64(_mm_unpackhi_pd(a, a));
}
inline int64_t total(I v) {  // of 8 int32
  alignas(32) int32_t lane[8];
  _mm256_store_si256(reinterpret_cast<I*>(lane), v);
  int64_t sum = 0;
  for (int32_t x : lane) sum += x;
  return sum;
}
template <class Lane>
inline uint32_t largest(I v) {
  alignas(32) Lane lane[32 / sizeof(Lane)];
  _mm256_store_si256(reinterpret_cast<I*>(lane), v);
  return *std::max_element(std::begin(lane), std::end(lane));
}
inline I load(const void* p) { return _mm256_loadu_si256(static_cast<const I*>(p)); }
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p) + kPrefetch, _MM_HINT_T0); }

// 8 elements as floats; for the masked pass and the residual rows.
inline F load8(const float* x) { return _mm256_loadu_ps(x); }
inline F load8(const Bf16* x) {
  return as_float(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))), 16));
}
inline F load8(const F16* x) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))); }

// 16 halves in a vector to two vectors of floats, in any order; bits() gives a half pattern as a float's.
template <class T>
struct Half;
template <>
struct Half<Bf16> {
  static constexpr uint32_t kInf = 0x7f80;
  static constexpr int kRounds = 4;  // additions a lane before float64: kRounds * streams
  static void unpack(I v, F& a, F& b) {
    a = as_float(_mm256_slli_epi32(v, 16));
    b = as_float(_mm256_and_si256(v, _mm256_set1_epi32(0xffff0000)));
  }
  static uint32_t bits(uint32_t half) { return half << 16; }
};
template <>
struct Half<F16> {
  static constexpr uint32_t kInf = 0x7c00;
  static constexpr int kRounds = 2;  // squares have 22 significant bits, BF16's 16
  static void unpack(I v, F& a, F& b) {
    a = _mm256_cvtph_ps(_mm256_castsi256_si128(v));
    b = _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1));
  }
  static uint32_t bits(uint32_t half) { return bits_of(widen(F16{uint16_t(half)})); }
};

// float32, S streams of m elements (m % 16 == 0) that lie one behind the other.
template <int S>
inline void add_f32(const float* x, int64_t m, ChunkSums& sums) {
  const I magnitude = _mm256_set1_epi32(kAbsMask);
  D sq[4], ab[4];
  for (int k = 0; k < 4; ++k) sq[k] = ab[k] = _mm256_setzero_pd();
  I top = _mm256_setzero_si256(), zeros = top;
  MP_UNROLL(1)
  for (int64_t i = 0; i < m; i += 16) {
    const float* p = x + i;
    MP_UNROLL(1)
    for (int s = 0; s < S; ++s, p += m) {
      prefetch(p);
      MP_UNROLL(2)
      for (int k = 0; k < 2; ++k) {
        I a = _mm256_and_si256(load(p + 8 * k), magnitude);
        MP_ONCE(a);
        top = _mm256_max_epi32(top, a);
        zeros = _mm256_sub_epi32(zeros, _mm256_cmpeq_epi32(a, _mm256_setzero_si256()));
        const D lo = _mm256_cvtps_pd(_mm_loadu_ps(p + 8 * k)), hi = _mm256_cvtps_pd(_mm_loadu_ps(p + 8 * k + 4));
        sq[2 * k] = _mm256_fmadd_pd(lo, lo, sq[2 * k]);
        sq[2 * k + 1] = _mm256_fmadd_pd(hi, hi, sq[2 * k + 1]);
        ab[2 * k] = _mm256_add_pd(ab[2 * k], _mm256_and_pd(lo, abs_mask()));
        ab[2 * k + 1] = _mm256_add_pd(ab[2 * k + 1], _mm256_and_pd(hi, abs_mask()));
      }
    }
  }
  Stats& r = sums.stats;
  r.numel += S * m;
  r.abs_max = std::max(r.abs_max, largest<uint32_t>(top));
  r.zeros += total(zeros);
  r.sum_sq += total(_mm256_add_pd(_mm256_add_pd(sq[0], sq[1]), _mm256_add_pd(sq[2], sq[3])));
  r.sum_abs += total(_mm256_add_pd(_mm256_add_pd(ab[0], ab[1]), _mm256_add_pd(ab[2], ab[3])));
}

// The same with power sums of x - shift, in float32 over 4 lines a stream. SHIFTED = false: shift is 0, and the second
// power is the sum of squares.
template <int S, bool SHIFTED>
inline void add_f32_moments(const float* x, int64_t m, float shift, ChunkSums& sums) {
  constexpr int64_t kRounds = S > 1 ? 2 : 16;
  const I magnitude = _mm256_set1_epi32(kAbsMask);
  const F centre = _mm256_set1_ps(shift);
  D sq[2] = {_mm256_setzero_pd(), _mm256_setzero_pd()}, ab = sq[0], p1 = ab, p2 = ab, p3 = ab, p4 = ab;
  I top = _mm256_setzero_si256(), zeros = top;
  MP_UNROLL(1)
  for (int64_t o = 0; o < m; o += 16 * kRounds) {
    F q1 = _mm256_setzero_ps(), q2 = q1, q3 = q1, q4 = q1;
    const int64_t stop = std::min(m, o + 16 * kRounds);
    MP_UNROLL(1)
    for (int64_t i = o; i < stop; i += 16) {
      const float* p = x + i;
      MP_UNROLL(1)
      for (int s = 0; s < S; ++s, p += m) {
        prefetch(p);
        MP_UNROLL(2)
        for (int k = 0; k < 2; ++k) {
          I raw = load(p + 8 * k);
          MP_ONCE(raw);
          const I a = _mm256_and_si256(raw, magnitude);
          top = _mm256_max_epi32(top, a);
          zeros = _mm256_sub_epi32(zeros, _mm256_cmpeq_epi32(a, _mm256_setzero_si256()));
          const D lo = _mm256_cvtps_pd(_mm_loadu_ps(p + 8 * k)), hi = _mm256_cvtps_pd(_mm_loadu_ps(p + 8 * k + 4));
          sq[0] = _mm256_fmadd_pd(lo, lo, sq[0]);
          sq[1] = _mm256_fmadd_pd(hi, hi, sq[1]);
          ab = _mm256_add_pd(ab, _mm256_add_pd(_mm256_and_pd(lo, abs_mask()), _mm256_and_pd(hi, abs_mask())));
          F d = as_float(raw);
          if (SHIFTED) d = _mm256_sub_ps(d, centre);
          const F d2 = _mm256_mul_ps(d, d);
          q1 = _mm256_add_ps(q1, d);
          if (SHIFTED) q2 = _mm256_add_ps(q2, d2);
          q3 = _mm256_fmadd_ps(d2, d, q3);
          q4 = _mm256_fmadd_ps(d2, d2, q4);
          MP_KEEP(sq[0], sq[1]);
          MP_KEEP(ab, q1);
          MP_KEEP(top, zeros);
          MP_KEEP(q3, q4);
        }
      }
    }
    p1 = _mm256_add_pd(p1, widened(q1));
    if (SHIFTED) p2 = _mm256_add_pd(p2, widened(q2));
    p3 = _mm256_add_pd(p3, widened(q3));
    p4 = _mm256_add_pd(p4, widened(q4));
  }
  Stats& r = sums.stats;
  const double squares = total(_mm256_add_pd(sq[0], sq[1]));
  r.numel += S * m;
  r.abs_max = std::max(r.abs_max, largest<uint32_t>(top));
  r.zeros += total(zeros);
  r.sum_sq += squares;
  r.sum_abs += total(ab);
  sums.powers.s1 += total(p1);
  sums.powers.s2 += SHIFTED ? total(p2) : squares;
  sums.powers.s3 += total(p3);
  sums.powers.s4 += total(p4);
}

// Half types, S streams of m elements (m % 32 == 0).
template <class T, int S>
inline void add_half(const T* x, int64_t m, ChunkSums& sums) {
  constexpr int64_t kRounds = Half<T>::kRounds * (kStreams / S);
  const I magnitude = _mm256_set1_epi16(0x7fff);
  D sq = _mm256_setzero_pd(), ab = sq;
  I top = _mm256_setzero_si256(), zeros = top;
  MP_UNROLL(1)
  for (int64_t o = 0; o < m; o += 32 * kRounds) {
    F q[4], a[4];
    for (int k = 0; k < 4; ++k) q[k] = a[k] = _mm256_setzero_ps();
    I z = _mm256_setzero_si256();
    const int64_t stop = std::min(m, o + 32 * kRounds);
    MP_UNROLL(1)
    for (int64_t i = o; i < stop; i += 32) {
      const T* p = x + i;
      MP_UNROLL(1)
      for (int s = 0; s < S; ++s, p += m) {
        prefetch(p);
        MP_UNROLL(2)
        for (int k = 0; k < 2; ++k) {
          I v = _mm256_and_si256(load(p + 16 * k), magnitude);
          MP_ONCE(v);
          top = _mm256_max_epi16(top, v);
          z = _mm256_sub_epi16(z, _mm256_cmpeq_epi16(v, _mm256_setzero_si256()));
          F lo, hi;
          Half<T>::unpack(v, lo, hi);
          a[2 * k] = _mm256_add_ps(a[2 * k], lo);
          a[2 * k + 1] = _mm256_add_ps(a[2 * k + 1], hi);
          q[2 * k] = _mm256_fmadd_ps(lo, lo, q[2 * k]);
          q[2 * k + 1] = _mm256_fmadd_ps(hi, hi, q[2 * k + 1]);
        }
      }
    }
    for (int k = 0; k < 4; ++k) {
      sq = _mm256_add_pd(sq, widened(q[k]));
      ab = _mm256_add_pd(ab, widened(a[k]));
    }
    zeros = _mm256_add_epi32(zeros, _mm256_madd_epi16(z, _mm256_set1_epi16(1)));
  }
  Stats& r = sums.stats;
  const uint32_t half = largest<uint16_t>(top);
  r.numel += S * m;
  r.abs_max = std::max(r.abs_max, half >= Half<T>::kInf ? kInfBits : Half<T>::bits(half));
  r.zeros += total(zeros);
  r.sum_sq += total(sq);
  r.sum_abs += total(ab);
}

template <class T, int S, bool SHIFTED>
inline void add_half_moments(const T* x, int64_t m, float shift, ChunkSums& sums) {
  constexpr int64_t kRounds = S > 1 ? 2 : 16;
  const I magnitude = _mm256_set1_epi16(0x7fff);
  const F magnitude32 = as_float(_mm256_set1_epi32(kAbsMask)), centre = _mm256_set1_ps(shift);
  D ab = _mm256_setzero_pd(), p1 = ab, p2 = ab, p3 = ab, p4 = ab;
  I top = _mm256_setzero_si256(), zeros = top;
  MP_UNROLL(1)
  for (int64_t o = 0; o < m; o += 32 * kRounds) {
    F a = _mm256_setzero_ps(), q1 = a, q2 = a, q3[2] = {a, a}, q4[2] = {a, a};
    I z = _mm256_setzero_si256();
    const int64_t stop = std::min(m, o + 32 * kRounds);
    MP_UNROLL(1)
    for (int64_t i = o; i < stop; i += 32) {
      const T* p = x + i;
      MP_UNROLL(1)
      for (int s = 0; s < S; ++s, p += m) {
        prefetch(p);
        MP_UNROLL(2)
        for (int k = 0; k < 2; ++k) {
          I raw = load(p + 16 * k);
          MP_ONCE(raw);
          const I v = _mm256_and_si256(raw, magnitude);
          top = _mm256_max_epi16(top, v);
          z = _mm256_sub_epi16(z, _mm256_cmpeq_epi16(v, _mm256_setzero_si256()));
          F d[2];
          Half<T>::unpack(raw, d[0], d[1]);
          // Pairs are added first: one chain of additions an accumulator then keeps up.
          a = _mm256_add_ps(a, _mm256_add_ps(_mm256_and_ps(d[0], magnitude32), _mm256_and_ps(d[1], magnitude32)));
          if (SHIFTED)
            for (F& e : d) e = _mm256_sub_ps(e, centre);
          const F d2[2] = {_mm256_mul_ps(d[0], d[0]), _mm256_mul_ps(d[1], d[1])};
          q1 = _mm256_add_ps(q1, _mm256_add_ps(d[0], d[1]));
          q2 = _mm256_add_ps(q2, _mm256_add_ps(d2[0], d2[1]));
          for (int h = 0; h < 2; ++h) {
            q3[h] = _mm256_fmadd_ps(d2[h], d[h], q3[h]);
            q4[h] = _mm256_fmadd_ps(d2[h], d2[h], q4[h]);
          }
          MP_KEEP(a, q1);
          MP_KEEP(q2, z);
          MP_KEEP(q3[0], q3[1]);
          MP_KEEP(q4[0], q4[1]);
          MP_ONCE(top);
        }
      }
    }
    ab = _mm256_add_pd(ab, widened(a));
    p1 = _mm256_add_pd(p1, widened(q1));
    p2 = _mm256_add_pd(p2, widened(q2));
    p3 = _mm256_add_pd(p3, _mm256_add_pd(widened(q3[0]), widened(q3[1])));
    p4 = _mm256_add_pd(p4, _mm256_add_pd(widened(q4[0]), widened(q4[1])));
    zeros = _mm256_add_epi32(zeros, _mm256_madd_epi16(z, _mm256_set1_epi16(1)));
  }
  Stats& r = sums.stats;
  const uint32_t half = largest<uint16_t>(top);
  const double s1 = total(p1), s2 = total(p2);
  r.numel += S * m;
  r.abs_max = std::max(r.abs_max, half >= Half<T>::kInf ? kInfBits : Half<T>::bits(half));
  r.zeros += total(zeros);
  // x^2 = d^2 + 2 c d + c^2: exact enough, since a shift is only used when it is not small against the spread
  r.sum_sq += s2 + 2 * double(shift) * s1 + double(S * m) * double(shift) * double(shift);
  r.sum_abs += total(ab);
  sums.powers.s1 += s1;
  sums.powers.s2 += s2;
  sums.powers.s3 += total(p3);
  sums.powers.s4 += total(p4);
}

// Any finite magnitude, non-finite elements counted and left out, all in float64.
template <class T>
inline ChunkSums masked_sums(const T* x, int64_t n, float shift) {
  const I magnitude = _mm256_set1_epi32(kAbsMask), last_finite = _mm256_set1_epi32(kInfBits - 1),
          infinity = _mm256_set1_epi32(kInfBits);
  const D centre = _mm256_set1_pd(shift);
  D sq[2], ab[2], p1[2], p2[2], p3[2], p4[2];
  for (int k = 0; k < 2; ++k) sq[k] = ab[k] = p1[k] = p2[k] = p3[k] = p4[k] = _mm256_setzero_pd();
  I top = _mm256_setzero_si256(), zeros = top, nonfinite = top, nan = top;
  int64_t i = 0;
  MP_UNROLL(1)
  for (; i + 8 <= n; i += 8) {
    const F v = load8(x + i);
    I a = _mm256_and_si256(_mm256_castps_si256(v), magnitude);
    const I out = _mm256_cmpgt_epi32(a, last_finite);
    nonfinite = _mm256_sub_epi32(nonfinite, out);
    nan = _mm256_sub_epi32(nan, _mm256_cmpgt_epi32(a, infinity));
    zeros = _mm256_sub_epi32(zeros, _mm256_cmpeq_epi32(a, _mm256_setzero_si256()));
    top = _mm256_max_epi32(top, _mm256_andnot_si256(out, a));
    const F kept = _mm256_andnot_ps(as_float(out), v);
    const D w[2] = {low(kept), high(kept)};
    const D hidden[2] = {_mm256_castsi256_pd(_mm256_cvtepi32_epi64(_mm256_castsi256_si128(out))),
                         _mm256_castsi256_pd(_mm256_cvtepi32_epi64(_mm256_extracti128_si256(out, 1)))};
    for (int k = 0; k < 2; ++k) {
      sq[k] = _mm256_fmadd_pd(w[k], w[k], sq[k]);
      ab[k] = _mm256_add_pd(ab[k], _mm256_and_pd(w[k], abs_mask()));
      const D d = _mm256_andnot_pd(hidden[k], _mm256_sub_pd(w[k], centre)), d2 = _mm256_mul_pd(d, d);
      p1[k] = _mm256_add_pd(p1[k], d);
      p2[k] = _mm256_add_pd(p2[k], d2);
      p3[k] = _mm256_fmadd_pd(d2, d, p3[k]);
      p4[k] = _mm256_fmadd_pd(d2, d2, p4[k]);
    }
  }
  ChunkSums sums;
  Stats& r = sums.stats;
  r.numel = i;
  r.abs_max = largest<uint32_t>(top);
  r.zeros = total(zeros);
  r.nonfinite = total(nonfinite);
  r.nan = total(nan);
  r.sum_sq = total(_mm256_add_pd(sq[0], sq[1]));
  r.sum_abs = total(_mm256_add_pd(ab[0], ab[1]));
  sums.powers.s1 = total(_mm256_add_pd(p1[0], p1[1]));
  sums.powers.s2 = total(_mm256_add_pd(p2[0], p2[1]));
  sums.powers.s3 = total(_mm256_add_pd(p3[0], p3[1]));
  sums.powers.s4 = total(_mm256_add_pd(p4[0], p4[1]));
  add_portable(x + i, n - i, shift, sums);
  return sums;
}

// Cuts n elements into 8 streams, short single streams and a scalar tail.
template <class T, class Block>
inline void in_streams(const T* x, int64_t n, float shift, ChunkSums& sums, const Block& block) {
  constexpr int64_t kStep = 32;
  if (n >= 4 * kStreams * kStep) {
    const int64_t m = n / (kStreams * kStep) * kStep;
    block(std::integral_constant<int, kStreams>{}, x, m);
    x += kStreams * m;
    n -= kStreams * m;
  }
  if (const int64_t m = n / kStep * kStep) {
    block(std::integral_constant<int, 1>{}, x, m);
    x += m;
    n -= m;
  }
  add_portable(x, n, shift, sums);
}

// The sums of a float32 pass over half types are trusted while squares stay in range.
inline bool squares_in_range(uint32_t abs_max) {
  return abs_max == 0 || (abs_max >= (127u - 50) << 23 && abs_max < (127u + 56) << 23);
}

// Fourth powers of x - shift must neither overflow nor vanish in float32.
inline bool powers_in_range(const ChunkSums& sums) {
  const uint32_t top = sums.stats.abs_max;
  const double spread = sums.powers.s2 / double(sums.stats.numel);
  return top < (127u + 24) << 23 && (top == 0 || (top >= (127u - 24) << 23 && (spread == 0 || spread >= 0x1p-50)));
}

template <class T>
static void stats(const T* x, int64_t n, Row& row) {
  ChunkSums sums;
  in_streams(x, n, 0, sums, [&](auto streams, const T* p, int64_t m) {
    if constexpr (std::is_same_v<T, float>)
      add_f32<streams()>(p, m, sums);
    else
      add_half<T, streams()>(p, m, sums);
  });
  const uint32_t top = sums.stats.abs_max;
  const bool trusted = std::is_same_v<T, float> ? top < kInfBits : squares_in_range(top);
  row.stats = trusted ? sums.stats : masked_sums(x, n, 0).stats;
}

template <class T, bool SHIFTED>
inline ChunkSums power_sums(const T* x, int64_t n, float shift) {
  ChunkSums sums;
  in_streams(x, n, shift, sums, [&](auto streams, const T* p, int64_t m) {
    if constexpr (std::is_same_v<T, float>)
      add_f32_moments<streams(), SHIFTED>(p, m, shift, sums);
    else
      add_half_moments<T, streams(), SHIFTED>(p, m, shift, sums);
  });
  return powers_in_range(sums) ? sums : masked_sums(x, n, shift);
}

template <class T>
static void moments(const T* x, int64_t n, Row& row) {
  moments_about_mean(
      x, n,
      [](const T* p, int64_t count, float shift) {
        return shift == 0 ? power_sums<T, false>(p, count, shift) : power_sums<T, true>(p, count, shift);
      },
      row);
}

// The yardstick: 8 streams over the whole buffer, nothing but loads and xors.
static uint64_t read(const char* x, int64_t bytes) {
  I a[8];
  for (I& v : a) v = _mm256_setzero_si256();
  const int64_t m = bytes / (kStreams * 128) * 128;
  for (int64_t i = 0; i < m; i += 128)
    for (int s = 0; s < kStreams; ++s)
      for (int k = 0; k < 4; ++k) {
        const int j = (k + 4 * s) & 7;
        a[j] = _mm256_xor_si256(a[j], load(x + s * m + i + 32 * k));
      }
  for (int64_t i = kStreams * m; i + 32 <= bytes; i += 32) a[0] = _mm256_xor_si256(a[0], load(x + i));
  for (int k = 1; k < 8; ++k) a[0] = _mm256_xor_si256(a[0], a[k]);
  alignas(32) uint64_t lane[4];
  _mm256_store_si256(reinterpret_cast<I*>(lane), a[0]);
  return lane[0] ^ lane[1] ^ lane[2] ^ lane[3];
}

}  // namespace megatron_probes::cpu::avx2
