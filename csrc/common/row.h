// What one pass over a tensor leaves, and how two such results combine. The order of the columns is that of
// STATS_COLUMNS and MOMENT_COLUMNS in megatron_probes/ops/stats.py.
#pragma once
#include "number.h"

namespace megatron_probes {

constexpr int kStatsColumns = 7;
constexpr int kMomentColumns = 5;

// Number, mean and central sums of the finite elements. Combination: Pebay, SAND2008-6212.
struct Moments {
  double count = 0, mean = 0, m2 = 0, m3 = 0, m4 = 0;

  MP_HOST_DEVICE void merge(const Moments& b) {
    if (b.count == 0) return;
    const double n = count + b.count, fa = count / n, fb = b.count / n, delta = b.mean - mean, d2 = delta * delta;
    const double cross = count * fb;
    m4 += b.m4 + d2 * d2 * cross * (fa * fa - fa * fb + fb * fb) + 6 * d2 * (fa * fa * b.m2 + fb * fb * m2) +
          4 * delta * (fa * b.m3 - fb * m3);
    m3 += b.m3 + d2 * delta * cross * (fa - fb) + 3 * delta * (fa * b.m2 - fb * m2);
    m2 += b.m2 + d2 * cross;
    mean += delta * fb;
    count = n;
  }
};

// Power sums of x - shift over the finite elements.
struct PowerSums {
  double s1 = 0, s2 = 0, s3 = 0, s4 = 0;

  MP_HOST_DEVICE Moments about_mean(double count, double shift) const {
    if (count == 0) return {};
    const double d = s1 / count, d2 = d * d;
    return {count, shift + d, s2 - count * d2, s3 - 3 * d * s2 + 2 * count * d2 * d,
            s4 - 4 * d * s3 + 6 * d2 * s2 - 3 * count * d2 * d2};
  }
};

struct Stats {
  double sum_sq = 0, sum_abs = 0;
  uint32_t abs_max = 0;  // bits of the float
  int64_t zeros = 0, nonfinite = 0, nan = 0, numel = 0;

  MP_HOST_DEVICE void merge(const Stats& b) {
    sum_sq += b.sum_sq;
    sum_abs += b.sum_abs;
    abs_max = abs_max > b.abs_max ? abs_max : b.abs_max;
    zeros += b.zeros;
    nonfinite += b.nonfinite;
    nan += b.nan;
    numel += b.numel;
  }
};

struct Row {
  Stats stats;
  Moments moments;

  MP_HOST_DEVICE void merge(const Row& b) {
    stats.merge(b.stats);
    moments.merge(b.moments);
  }
};

// Writes one row; `moments` when the row is wide enough to hold them. Columns lie `step` doubles apart.
MP_HOST_DEVICE void write_row(double* out, int64_t step, const Row& row, double abs_max, bool moments,
                              bool accumulate) {
  const Stats& s = row.stats;
  const double values[kStatsColumns] = {s.sum_sq,      s.sum_abs,      abs_max, double(s.zeros), double(s.nonfinite),
                                        double(s.nan), double(s.numel)};
  for (int i = 0; i < kStatsColumns; ++i) {
    double& slot = out[i * step];
    if (!accumulate)
      slot = values[i];
    else if (i == 2)
      slot = slot > values[i] ? slot : values[i];
    else
      slot += values[i];
  }
  if (!moments) return;
  double* tail = out + kStatsColumns * step;
  Moments m;
  if (accumulate) m = {tail[0], tail[step], tail[2 * step], tail[3 * step], tail[4 * step]};
  m.merge(row.moments);
  tail[0] = m.count;
  tail[step] = m.mean;
  tail[2 * step] = m.m2;
  tail[3 * step] = m.m3;
  tail[4 * step] = m.m4;
}

}  // namespace megatron_probes
