// The fixed logarithmic bins of megatron_probes/ops/bins.py: the same doubles, by the same multiplications.
#pragma once
#include "number.h"

namespace megatron_probes {

constexpr int kRatioBins = 1057;
constexpr int kBins = kRatioBins + 2;

struct BinEdges {
  double edge[kRatioBins + 1];
};

constexpr BinEdges make_bin_edges() {
  BinEdges edges{};
  double x = 1e-12;
  for (int i = 0; i <= kRatioBins; ++i, x *= 1.04) edges.edge[i] = x;
  return edges;
}

MP_HOST_DEVICE uint64_t bits_of(double x) {
#if defined(__CUDA_ARCH__)
  return uint64_t(__double_as_longlong(x));
#else
  uint64_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
#endif
}

// Bin of a value that is not NaN. The guess from the exponent and a parabola for log2 of the mantissa is within a bin;
// the edges decide.
MP_HOST_DEVICE int bin_index(double x, const double* edge) {
  if (x < edge[0]) return 0;
  if (x >= edge[kRatioBins]) return kBins - 1;
  const uint64_t u = bits_of(x);
  const double m = double(u & 0xfffffffffffffull) * 0x1p-52;
  const double log2_x = double(int(u >> 52) - 1023) + m + 0.344 * m * (1 - m);
  int i = int((log2_x + 39.863137138648355) * 17.672987685) /* log2(1e12), 1 / log2(1.04) */ + 1;
  i = i < 1 ? 1 : i > kRatioBins ? kRatioBins : i;
  while (x < edge[i - 1]) --i;
  while (x >= edge[i]) ++i;
  return i;
}

}  // namespace megatron_probes
