// From a token's sums to its residual-path quantities. Specification, section 8; the derivation of the angle without
// cancellation stands in megatron_probes/ops/residual.py.
#pragma once
#include <cmath>

#include "number.h"

namespace megatron_probes {

constexpr int kQuantities = 6;
constexpr int kResidualColumns = 2 + kQuantities;
constexpr int kTokenColumns = 5;

struct TokenSums {
  double ss = 0, bb = 0, sb = 0;
  int64_t noop = 0;
};

// (s + b)^2, never below 0.
MP_HOST_DEVICE double sum_square(const TokenSums& t) {
  const double aa = t.ss + 2 * t.sb + t.bb;
  return aa > 0 ? aa : 0;
}

MP_HOST_DEVICE bool finite(const TokenSums& t) { return t.ss + t.bb < HUGE_VAL; }

// branch_scale, stream_norm, branch_norm, block_importance, angular_distance, bf16_noop
MP_HOST_DEVICE void token_quantities(const TokenSums& t, int64_t d, double q[kQuantities]) {
  constexpr double kEps = 1e-12, kTwoOverPi = 0.63661977236758134308;
  const double s_norm = sqrt(t.ss), b_norm = sqrt(t.bb);
  const double p = s_norm * sqrt(sum_square(t)), sa = t.ss + t.sb;
  double gap = p - sa;
  if (sa > 0) {
    const double gram = t.ss * t.bb - t.sb * t.sb;
    gap = gram > 0 ? gram / (p + sa) : 0;
  }
  double importance = (gap + kEps) / (p + kEps);
  importance = importance < 0 ? 0 : importance > 2 ? 2 : importance;
  const double half = p > 0 ? gap / (2 * p) : 0.5;  // squared sine of half the angle
  q[0] = b_norm / (s_norm + kEps);
  q[1] = s_norm;
  q[2] = b_norm;
  q[3] = importance;
  q[4] = kTwoOverPi * asin(sqrt(half < 0 ? 0 : half > 1 ? 1 : half));
  q[5] = double(t.noop) / double(d > 0 ? d : 1);
}

}  // namespace megatron_probes
