// A token's row of the residual path with AVX2: norms, dot and BF16 no-ops in one pass.
#pragma once
#include "stats_avx2.h"

namespace megatron_probes::cpu::avx2 {

constexpr int kRowPrefetch = 1024;  // bytes ahead, each of the two rows

// 16 elements as two vectors of floats in the order of unpacked halves.
inline void load16(const float* p, F& a, F& b) {
  a = load8(p);
  b = load8(p + 8);
}
inline void load16(const F16* p, F& a, F& b) {
  a = load8(p);
  b = load8(p + 8);
}

// float32 to BF16 to nearest even, in the upper half of each lane. A NaN may wrap; rows that hold one are passed again.
inline I rounded(F v) {
  const I u = _mm256_castps_si256(v);
  const I odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
}

struct RowLanes {
  F ss[2], bb[2], sb[2];
  I noop;
};

inline void add16(const Bf16* s, const Bf16* b, RowLanes& t) {
  I vs = load(s), vb = load(b);
  MP_ONCE(vs);
  MP_ONCE(vb);
  F x[2], y[2];
  Half<Bf16>::unpack(vs, x[0], x[1]);
  Half<Bf16>::unpack(vb, y[0], y[1]);
  for (int k = 0; k < 2; ++k) {
    t.ss[k] = _mm256_fmadd_ps(x[k], x[k], t.ss[k]);
    t.bb[k] = _mm256_fmadd_ps(y[k], y[k], t.bb[k]);
    t.sb[k] = _mm256_fmadd_ps(x[k], y[k], t.sb[k]);
  }
  const I even = rounded(_mm256_add_ps(x[0], y[0])), odd = rounded(_mm256_add_ps(x[1], y[1]));
  const I sum = _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa);
  const I zero = _mm256_cmpeq_epi16(_mm256_and_si256(vb, _mm256_set1_epi16(0x7fff)), _mm256_setzero_si256());
  t.noop = _mm256_sub_epi16(t.noop, _mm256_andnot_si256(zero, _mm256_cmpeq_epi16(sum, vs)));
}

template <class T>
inline void add16(const T* s, const T* b, RowLanes& t) {
  F x[2], y[2];
  load16(s, x[0], x[1]);
  load16(b, y[0], y[1]);
  I same[2];
  for (int k = 0; k < 2; ++k) {
    t.ss[k] = _mm256_fmadd_ps(x[k], x[k], t.ss[k]);
    t.bb[k] = _mm256_fmadd_ps(y[k], y[k], t.bb[k]);
    t.sb[k] = _mm256_fmadd_ps(x[k], y[k], t.sb[k]);
    const I change = _mm256_srli_epi32(_mm256_xor_si256(rounded(_mm256_add_ps(x[k], y[k])), rounded(x[k])), 16);
    const I equal = _mm256_cmpeq_epi32(change, _mm256_setzero_si256());
    same[k] = _mm256_andnot_si256(_mm256_castps_si256(_mm256_cmp_ps(y[k], _mm256_setzero_ps(), _CMP_EQ_OQ)), equal);
  }
  t.noop = _mm256_sub_epi16(t.noop, _mm256_packs_epi32(same[0], same[1]));
}

template <class T>
static bool all_zero(const T* x, int64_t d) {
  uint32_t any = 0;
  for (int64_t i = 0; i < d; ++i) any |= bits_of(widen(x[i])) & kAbsMask;
  return any == 0;
}

template <class T>
static TokenSums residual_row(const T* s, const T* b, int64_t d) {
  constexpr int64_t kRounds = 8;  // vectors a lane before float64
  D ss = _mm256_setzero_pd(), bb = ss, sb = ss;
  I noop = _mm256_setzero_si256();
  int64_t i = 0;
  MP_UNROLL(1)
  while (i + 16 <= d) {
    RowLanes t;
    for (int k = 0; k < 2; ++k) t.ss[k] = t.bb[k] = t.sb[k] = _mm256_setzero_ps();
    t.noop = _mm256_setzero_si256();
    const int64_t stop = std::min(d - 15, i + 16 * kRounds);
    MP_UNROLL(1)
    for (; i < stop; i += 16) {
      _mm_prefetch(reinterpret_cast<const char*>(s + i) + kRowPrefetch, _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(b + i) + kRowPrefetch, _MM_HINT_T0);
      add16(s + i, b + i, t);
    }
    ss = _mm256_add_pd(ss, _mm256_add_pd(widened(t.ss[0]), widened(t.ss[1])));
    bb = _mm256_add_pd(bb, _mm256_add_pd(widened(t.bb[0]), widened(t.bb[1])));
    sb = _mm256_add_pd(sb, _mm256_add_pd(widened(t.sb[0]), widened(t.sb[1])));
    noop = _mm256_add_epi32(noop, _mm256_madd_epi16(t.noop, _mm256_set1_epi16(1)));
  }
  TokenSums sums{total(ss), total(bb), total(sb), total(noop)};
  // Non-finite, or squares near the ends of float32's range or beyond them: again, in float64.
  const bool in_range =
      sums.ss + sums.bb < 1e37 && (sums.ss > 1e-28 || all_zero(s, d)) && (sums.bb > 1e-28 || all_zero(b, d));
  if (!in_range) return residual_row_portable(s, b, d);
  const TokenSums tail = residual_row_portable(s + i, b + i, d - i);
  return {sums.ss + tail.ss, sums.bb + tail.bb, sums.sb + tail.sb, sums.noop + tail.noop};
}

}  // namespace megatron_probes::cpu::avx2
