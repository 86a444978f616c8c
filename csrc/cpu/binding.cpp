// The CPU kernels as operators. Schemas and shape checks stand beside the references in megatron_probes/ops.
#include <torch/csrc/stable/library.h>

#include <memory>
#include <optional>
#include <vector>

#include "../common/bins.h"
#include "../common/tensor.h"
#include "kernels.h"

namespace megatron_probes::cpu {
namespace {

constexpr BinEdges kEdges = make_bin_edges();

bool is_enabled(const std::optional<Tensor>& flag) {
  if (!flag) return true;
  const void* p = flag->const_data_ptr();
  switch (flag->scalar_type()) {
    case ScalarType::Float:
      return *static_cast<const float*>(p) != 0;
    case ScalarType::Double:
      return *static_cast<const double*>(p) != 0;
    default:
      break;
  }
  const char* bytes = static_cast<const char*>(p);
  return std::any_of(bytes, bytes + flag->element_size(), [](char c) { return c != 0; });
}

// One byte an element of a mask of any dtype: whether it is not 0.
std::vector<uint8_t> nonzero_bytes(const Tensor& mask_in) {
  const Tensor mask = torch::stable::contiguous(mask_in);
  const int64_t size = int64_t(mask.element_size());
  const uint8_t* p = static_cast<const uint8_t*>(mask.const_data_ptr());
  std::vector<uint8_t> bytes(mask.numel());
  for (size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = std::any_of(p + i * size, p + (i + 1) * size, [](uint8_t c) { return c != 0; });
  return bytes;
}

// ---- statistics

template <class T>
void chunk_row(const void* x, int64_t begin, int64_t n, bool with_moments, Row& row) {
  const FloatKernels<T>& k = kernels().of<T>();
  (with_moments ? k.moments : k.stats)(static_cast<const T*>(x) + begin, n, row);
}

struct Piece {
  Tensor tensor;  // dense: owns a copy where the caller's tensor has gaps
  const void* data;
  ScalarType dtype;
  int64_t numel, chunk, first, chunks;
};

Piece piece_of(const Tensor& x, int64_t first) {
  Tensor dense = densely_stored(x) ? x : torch::stable::contiguous(x);
  const ScalarType dtype = x.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half,
                  "tensor_stats: the compiled kernels take float32, float16 and bfloat16");
  const int64_t n = x.numel(), chunk = kChunkBytes / int64_t(x.element_size());
  const void* data = dense.const_data_ptr();
  return {std::move(dense), data, dtype, n, chunk, first, (n + chunk - 1) / chunk};
}

void run_chunk(const Piece& piece, int64_t index, bool with_moments, Row& row) {
  const int64_t begin = index * piece.chunk, n = std::min(piece.chunk, piece.numel - begin);
  if (piece.dtype == ScalarType::Float)
    chunk_row<float>(piece.data, begin, n, with_moments, row);
  else if (piece.dtype == ScalarType::BFloat16)
    chunk_row<Bf16>(piece.data, begin, n, with_moments, row);
  else
    chunk_row<F16>(piece.data, begin, n, with_moments, row);
}

// In pairs of halves: the error grows with the depth, not with the number of chunks.
Row merged(const Row* rows, int64_t n) {
  if (n == 0) return {};
  if (n == 1) return rows[0];
  Row row = merged(rows, n / 2);
  row.merge(merged(rows + n / 2, n - n / 2));
  return row;
}

void write_piece(const Piece& piece, const Row* rows, const Slot& out, int64_t index, bool accumulate) {
  const Row row = merged(rows, piece.chunks);
  write_row(out.row(index), out.step, row, float_of(row.stats.abs_max), out.columns > kStatsColumns, accumulate);
}

void run_pieces(const std::vector<Piece>& pieces, const Slot& out, bool accumulate) {
  const bool with_moments = out.columns > kStatsColumns;
  const int64_t chunks = pieces.back().first + pieces.back().chunks;
  std::vector<Row> rows(chunks);
  std::vector<int32_t> owner(chunks);
  for (size_t p = 0; p < pieces.size(); ++p) std::fill_n(owner.begin() + pieces[p].first, pieces[p].chunks, int32_t(p));
  torch::stable::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      const Piece& piece = pieces[owner[c]];
      run_chunk(piece, c - piece.first, with_moments, rows[c]);
    }
  });
  for (size_t p = 0; p < pieces.size(); ++p)
    write_piece(pieces[p], rows.data() + pieces[p].first, out, int64_t(p), accumulate);
}

void tensor_stats(const Tensor& x, Tensor out, bool accumulate, std::optional<Tensor> enabled) {
  if (!is_enabled(enabled)) return;
  const Slot slot = Slot::of(out);
  const Piece piece = piece_of(x, 0);
  if (piece.chunks <= 1) {  // no list, no threads: small tensors are many
    Row row;
    if (piece.chunks == 1) run_chunk(piece, 0, slot.columns > kStatsColumns, row);
    write_piece(piece, &row, slot, 0, accumulate);
    return;
  }
  run_pieces({piece}, slot, accumulate);
}

void multi_tensor_stats(std::vector<Tensor> tensors, Tensor out, bool accumulate, std::optional<Tensor> enabled) {
  if (!is_enabled(enabled) || tensors.empty()) return;
  std::vector<Piece> pieces;
  pieces.reserve(tensors.size());
  for (const Tensor& x : tensors)
    pieces.push_back(piece_of(x, pieces.empty() ? 0 : pieces.back().first + pieces.back().chunks));
  run_pieces(pieces, Slot::of(out), accumulate);
}

// ---- residual path

struct Token {
  TokenSums sums;
  double quantity[kQuantities];
  bool looked_at = false;
};

template <class T>
void residual_rows(const Tensor& s, const Tensor& b, const uint8_t* mask, int64_t stride, std::vector<Token>& tokens) {
  const int64_t d = s.size(s.dim() - 1);
  const T* s_TD = static_cast<const T*>(s.const_data_ptr());
  const T* b_TD = static_cast<const T*>(b.const_data_ptr());
  const auto row = kernels().of<T>().residual_row;
  const int64_t grain = std::max<int64_t>(1, kChunkBytes / std::max<int64_t>(1, 2 * d * int64_t(sizeof(T))));
  torch::stable::parallel_for(0, int64_t(tokens.size()), grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t t = i * stride;
      if (mask && !mask[t]) continue;
      Token& token = tokens[i];
      token.looked_at = true;
      token.sums = row(s_TD + t * d, b_TD + t * d, d);
      if (finite(token.sums)) token_quantities(token.sums, d, token.quantity);
    }
  });
}

void residual_stats(const Tensor& s_in, const Tensor& b_in, std::optional<Tensor> mask, int64_t stride, Tensor out,
                    std::optional<Tensor> histograms, std::optional<Tensor> per_token, bool accumulate,
                    std::optional<Tensor> enabled) {
  if (!is_enabled(enabled)) return;
  const Tensor s = torch::stable::contiguous(s_in), b = torch::stable::contiguous(b_in);
  int64_t count = 1;
  for (int64_t i = 0; i + 1 < s.dim(); ++i) count *= s.size(i);
  const std::vector<uint8_t> valid = mask ? nonzero_bytes(*mask) : std::vector<uint8_t>();
  std::vector<Token> tokens((count + stride - 1) / stride);
  const uint8_t* valid_T = mask ? valid.data() : nullptr;
  if (s.scalar_type() == ScalarType::Float)
    residual_rows<float>(s, b, valid_T, stride, tokens);
  else if (s.scalar_type() == ScalarType::BFloat16)
    residual_rows<Bf16>(s, b, valid_T, stride, tokens);
  else
    residual_rows<F16>(s, b, valid_T, stride, tokens);

  double row[kResidualColumns] = {};
  std::vector<double> counts(histograms ? kQuantities * kBins : 0);
  for (const Token& token : tokens) {
    if (!token.looked_at) continue;
    if (!finite(token.sums)) {
      row[1] += 1;
      continue;
    }
    row[0] += 1;
    for (int q = 0; q < kQuantities; ++q) {
      row[2 + q] += token.quantity[q];
      if (histograms) counts[q * kBins + bin_index(token.quantity[q], kEdges.edge)] += 1;
    }
  }
  Slot::of(out).write(0, row, accumulate);
  if (histograms)
    for (int q = 0; q < kQuantities; ++q) Slot::of(*histograms).write(q, counts.data() + q * kBins, accumulate);
  if (!per_token) return;
  const Slot slot = Slot::of(*per_token);
  for (int64_t t = 0; t < count; ++t) {
    double columns[kTokenColumns] = {};
    if (t % stride == 0 && tokens[t / stride].looked_at) {
      const TokenSums& sums = tokens[t / stride].sums;
      const double values[] = {std::sqrt(sums.ss), std::sqrt(sums.bb), sums.sb, std::sqrt(sum_square(sums)),
                               double(sums.noop)};
      std::copy(std::begin(values), std::end(values), columns);
    }
    slot.write(t, columns, false);
  }
}

// ---- updates

template <class A, class B>
void count_noop(NoopKernel<A, B> kernel, const Tensor& a_in, const Tensor& b_in, const Tensor& out, bool accumulate) {
  const Tensor a = torch::stable::contiguous(a_in), b = torch::stable::contiguous(b_in);
  const A* pa = static_cast<const A*>(a.const_data_ptr());
  const B* pb = static_cast<const B*>(b.const_data_ptr());
  constexpr int64_t kChunk = 1 << 16;
  const int64_t n = a.numel(), chunks = (n + kChunk - 1) / kChunk;
  std::vector<NoopCounts> parts(chunks);
  torch::stable::parallel_for(0, chunks, 4, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c)
      parts[c] = kernel(pa + c * kChunk, pb + c * kChunk, std::min(kChunk, n - c * kChunk));
  });
  double row[2] = {};
  for (const NoopCounts& part : parts) {
    row[0] += double(part.noop);
    row[1] += double(part.nonzero);
  }
  Slot::of(out).write(0, row, accumulate);
}

void bf16_update_noop(const Tensor& weight, const Tensor& update, Tensor out, bool accumulate,
                      std::optional<Tensor> enabled) {
  if (!is_enabled(enabled)) return;
  const bool wf = weight.scalar_type() == ScalarType::Float, uf = update.scalar_type() == ScalarType::Float;
  const Kernels& k = kernels();
  if (wf && uf)
    count_noop(k.update_ff, weight, update, out, accumulate);
  else if (wf)
    count_noop(k.update_fb, weight, update, out, accumulate);
  else if (uf)
    count_noop(k.update_bf, weight, update, out, accumulate);
  else
    count_noop(k.update_bb, weight, update, out, accumulate);
}

void bf16_update_noop_master(const Tensor& before, const Tensor& after, Tensor out, bool accumulate,
                             std::optional<Tensor> enabled) {
  if (!is_enabled(enabled)) return;
  const bool bf = before.scalar_type() == ScalarType::Float, af = after.scalar_type() == ScalarType::Float;
  const Kernels& k = kernels();
  if (bf && af)
    count_noop(k.master_ff, before, after, out, accumulate);
  else if (bf)
    count_noop(k.master_fb, before, after, out, accumulate);
  else if (af)
    count_noop(k.master_bf, before, after, out, accumulate);
  else
    count_noop(k.master_bb, before, after, out, accumulate);
}

// ---- routing

template <class Index>
void count_indices(const Tensor& indices, const uint8_t* padding, int64_t tokens, std::vector<int64_t>& counts) {
  const int64_t k = indices.size(indices.dim() - 1), experts = int64_t(counts.size());
  const Index* p = static_cast<const Index*>(indices.const_data_ptr());
  for (int64_t t = 0; t < tokens; ++t) {
    if (padding && padding[t]) continue;
    for (int64_t i = 0; i < k; ++i) {
      const int64_t e = p[t * k + i];
      if (e >= 0 && e < experts) ++counts[e];
    }
  }
}

void routing_histogram(const Tensor& routed_in, std::optional<Tensor> padding_mask, Tensor out, bool accumulate,
                       std::optional<Tensor> enabled) {
  if (!is_enabled(enabled)) return;
  const Tensor routed = torch::stable::contiguous(routed_in);
  const int64_t experts = out.numel(), width = routed.size(routed.dim() - 1);
  const int64_t tokens = width == 0 ? 0 : routed.numel() / width;
  const std::vector<uint8_t> padded = padding_mask ? nonzero_bytes(*padding_mask) : std::vector<uint8_t>();
  const uint8_t* padding = padding_mask ? padded.data() : nullptr;
  std::vector<int64_t> counts(experts);
  if (routed.scalar_type() == ScalarType::Bool)
    kernels().map_histogram(static_cast<const uint8_t*>(routed.const_data_ptr()), padding, 0, tokens, experts,
                            counts.data());
  else if (routed.scalar_type() == ScalarType::Int)
    count_indices<int32_t>(routed, padding, tokens, counts);
  else
    count_indices<int64_t>(routed, padding, tokens, counts);
  const std::vector<double> row(counts.begin(), counts.end());
  Slot::of(out).write(0, row.data(), accumulate);
}

template <class T>
void count_margins(const Tensor& scores, int64_t k, const uint8_t* padding, std::vector<double>& counts) {
  const int64_t experts = scores.size(scores.dim() - 1), tokens = scores.numel() / experts;
  const T* p = static_cast<const T*>(scores.const_data_ptr());
  std::vector<float> row(experts);
  for (int64_t t = 0; t < tokens; ++t) {
    if (padding && padding[t]) continue;
    std::transform(p + t * experts, p + (t + 1) * experts, row.begin(), [](T x) { return widen(x); });
    if (std::any_of(row.begin(), row.end(), [](float x) { return x != x; })) continue;
    std::nth_element(row.begin(), row.begin() + k, row.end(), std::greater<>());
    const double above = *std::min_element(row.begin(), row.begin() + k), below = row[k];
    counts[bin_index(above == below ? 0 : above - below, kEdges.edge)] += 1;
  }
}

void topk_margin_histogram(const Tensor& scores_in, int64_t k, std::optional<Tensor> padding_mask, Tensor out,
                           bool accumulate, std::optional<Tensor> enabled) {
  if (!is_enabled(enabled)) return;
  const Tensor scores = torch::stable::contiguous(scores_in);
  const std::vector<uint8_t> padded = padding_mask ? nonzero_bytes(*padding_mask) : std::vector<uint8_t>();
  const uint8_t* padding = padding_mask ? padded.data() : nullptr;
  std::vector<double> counts(kBins);
  if (scores.scalar_type() == ScalarType::Float)
    count_margins<float>(scores, k, padding, counts);
  else if (scores.scalar_type() == ScalarType::BFloat16)
    count_margins<Bf16>(scores, k, padding, counts);
  else
    count_margins<F16>(scores, k, padding, counts);
  Slot::of(out).write(0, counts.data(), accumulate);
}

int64_t read_bandwidth(const Tensor& x) {
  const char* p = static_cast<const char*>(x.const_data_ptr());
  const int64_t bytes = x.numel() * int64_t(x.element_size());
  const int64_t threads = torch::stable::get_num_threads(), part = (bytes / threads + 4095) / 4096 * 4096;
  std::vector<uint64_t> sums(threads);
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      if (i * part < bytes) sums[i] = kernels().read(p + i * part, std::min(part, bytes - i * part));
  });
  uint64_t sum = 0;
  for (uint64_t s : sums) sum ^= s;
  return int64_t(sum);
}

}  // namespace
}  // namespace megatron_probes::cpu

using namespace megatron_probes::cpu;

STABLE_TORCH_LIBRARY_IMPL(megatron_probes, CPU, m) {
  m.impl("tensor_stats", TORCH_BOX(&tensor_stats));
  m.impl("multi_tensor_stats", TORCH_BOX(&multi_tensor_stats));
  m.impl("residual_stats", TORCH_BOX(&residual_stats));
  m.impl("bf16_update_noop", TORCH_BOX(&bf16_update_noop));
  m.impl("bf16_update_noop_master", TORCH_BOX(&bf16_update_noop_master));
  m.impl("routing_histogram", TORCH_BOX(&routing_histogram));
  m.impl("topk_margin_histogram", TORCH_BOX(&topk_margin_histogram));
}

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_probes, m) { m.def("read_bandwidth(Tensor x) -> int"); }
STABLE_TORCH_LIBRARY_IMPL(megatron_probes, CompositeExplicitAutograd, m) {
  m.impl("read_bandwidth", TORCH_BOX(&read_bandwidth));
}
