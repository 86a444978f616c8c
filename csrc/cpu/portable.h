// Loops in plain C++, compiled once an instruction set: the namespace MP_ISA and the target that is in force where this
// file is included make the difference. They are whole kernels where nothing faster is written, and tails elsewhere.
#pragma once
#include <algorithm>
#include <cmath>

#include "kernels.h"

namespace megatron_probes::cpu {

// What a pass over part of a chunk adds up; the power sums are of x - shift.
struct ChunkSums {
  Stats stats;
  PowerSums powers;
};

}  // namespace megatron_probes::cpu

namespace megatron_probes::cpu::MP_ISA {

template <class T>
inline void add_block(const T* x, int64_t n, double shift, ChunkSums& sums) {
  Stats& s = sums.stats;
  double sum_abs = 0, sum_sq = 0;
  PowerSums p;
  for (int64_t i = 0; i < n; ++i) {
    const float f = widen(x[i]);
    const uint32_t u = bits_of(f) & kAbsMask;
    if (u >= kInfBits) {
      ++s.nonfinite;
      s.nan += u > kInfBits;
      continue;
    }
    s.zeros += u == 0;
    s.abs_max = std::max(s.abs_max, u);
    const double v = f, d = v - shift, d2 = d * d;
    sum_abs += std::fabs(v);
    sum_sq += v * v;
    p.s1 += d;
    p.s2 += d2;
    p.s3 += d2 * d;
    p.s4 += d2 * d2;
  }
  s.numel += n;
  s.sum_abs += sum_abs;
  s.sum_sq += sum_sq;
  sums.powers.s1 += p.s1;
  sums.powers.s2 += p.s2;
  sums.powers.s3 += p.s3;
  sums.powers.s4 += p.s4;
}

// In short blocks: a chain of additions over a whole chunk would lose 1e-12 where all elements are equal.
template <class T>
inline void add_portable(const T* x, int64_t n, double shift, ChunkSums& sums) {
  constexpr int64_t kBlock = 1024;
  for (int64_t i = 0; i < n; i += kBlock) add_block(x + i, std::min(kBlock, n - i), shift, sums);
}

// A value near the mean: the mean of 64 elements spread over the chunk, as a float. 0 when the mean is small against
// the spread: nothing cancels then, and no subtraction is needed.
template <class T>
inline float sample_shift(const T* x, int64_t n) {
  constexpr int64_t kSamples = 64;
  const int64_t step = std::max<int64_t>(1, n / kSamples);
  double sum = 0, squares = 0;
  int64_t count = 0;
  for (int64_t i = 0; i < n && count < kSamples; i += step) {
    const double v = widen(x[i]);
    if (!(std::fabs(v) < HUGE_VAL)) continue;
    sum += v;
    squares += v * v;
    ++count;
  }
  if (sum * sum <= 0.2 * squares * double(count)) return 0;
  return float(sum / double(count));
}

// Fills `row` from sums about a shift that the caller can move: while the mean of x - shift is larger than the spread,
// central sums would cancel, so the pass is made again about the mean.
template <class T, class Pass>
inline void moments_about_mean(const T* x, int64_t n, const Pass& pass, Row& row) {
  float shift = sample_shift(x, n);
  ChunkSums sums;
  for (int attempt = 0;; ++attempt) {
    sums = pass(x, n, shift);
    const double count = double(n - sums.stats.nonfinite), offset = count > 0 ? sums.powers.s1 / count : 0;
    const float moved = float(double(shift) + offset);
    if (attempt == 2 || moved == shift || 2 * offset * offset * count <= sums.powers.s2) break;
    shift = moved;
  }
  row.stats = sums.stats;
  row.moments = sums.powers.about_mean(double(n - sums.stats.nonfinite), shift);
}

template <class T>
inline TokenSums residual_row_portable(const T* s, const T* b, int64_t d) {
  TokenSums t;
  for (int64_t i = 0; i < d; ++i) {
    const float x = widen(s[i]), y = widen(b[i]);
    t.ss += double(x) * x;
    t.bb += double(y) * y;
    t.sb += double(x) * y;
    t.noop += y != 0 && bf16_equal(x + y, x);
  }
  return t;
}

template <class A, class B>
inline NoopCounts update_noop(const A* weight, const B* update, int64_t n) {
  int32_t noop = 0, nonzero = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float w = widen(weight[i]), u = widen(update[i]);
    const bool moves = u != 0;
    nonzero += moves;
    noop += moves & bf16_equal(w + u, w);
  }
  return {noop, nonzero};
}

template <class A, class B>
inline NoopCounts master_noop(const A* before, const B* after, int64_t n) {
  int32_t noop = 0, nonzero = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float x = widen(before[i]), y = widen(after[i]);
    const bool moves = x != y;
    nonzero += moves;
    noop += moves & bf16_equal(x, y);
  }
  return {noop, nonzero};
}

// Bytes are added as bytes, 255 rows at most before they would overflow.
inline void map_histogram(const uint8_t* map, const uint8_t* padding, int64_t begin, int64_t end, int64_t experts,
                          int64_t* counts) {
  constexpr int64_t kStrip = 128;
  for (int64_t e = 0; e < experts; e += kStrip) {
    const int64_t width = std::min(kStrip, experts - e);
    for (int64_t t = begin; t < end;) {
      uint8_t sums[kStrip] = {};
      for (const int64_t stop = std::min(end, t + 255); t < stop; ++t) {
        if (padding && padding[t]) continue;
        const uint8_t* row = map + t * experts + e;
        if (width == kStrip)
          for (int64_t i = 0; i < kStrip; ++i) sums[i] += row[i];
        else
          for (int64_t i = 0; i < width; ++i) sums[i] += row[i];
      }
      for (int64_t i = 0; i < width; ++i) counts[e + i] += sums[i];
    }
  }
}

}  // namespace megatron_probes::cpu::MP_ISA
