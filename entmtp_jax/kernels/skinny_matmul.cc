// y[t, o] = sum_k x[t, k] * w[o, k] for few rows t: what verifying a small tree of tokens needs.
//
// The weights are larger than any cache, so their bytes set the time of one row. A general matrix product packs its
// operands into panels, which costs several times that when there are 2..32 rows. Here every weight is read from memory
// once, straight from its row-major [num_out, depth] array, and meets all rows while it is in a register or L1.
//
// Order of summation: lane l of one vector accumulator adds the products of k = l, l + kStep, l + 2 kStep, ... and a
// fixed tree adds the lanes. It depends on neither the number of rows nor the split over threads, so a row's result is
// bit for bit the same alone and inside a tree, and the same for bfloat16 weights and their float32 copies.

#include <algorithm>
#include <cstdint>

#include "chunks.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using namespace entmtp;

constexpr int kStep = kLanesOf<WideVector>;
// 3 x 4 accumulators and up to 4 vectors of operands beside them fill 16 registers.
constexpr int kTileOuts = 3;
constexpr int kTileRows = 4;
constexpr Size kGrainBytes = 256 * 1024;  // of weights: too few to wake another thread for, enough to claim at a time

// Bytes that later work will read: fetched a little at every step of k, so that memory and arithmetic overlap.
struct Prefetch {
  const char* p;
  Size bytes_per_k;
};

template <int kOuts, int kRows, typename W>
void Tile(const float* x, const W* w, float* y, Size depth, Size num_out, Prefetch prefetch) {
  WideVector acc[kOuts][kRows] = {};
  Size k = 0;
  for (; k + kStep <= depth; k += kStep) {
    __builtin_prefetch(prefetch.p + k * prefetch.bytes_per_k);
    WideVector xs[kRows];
#pragma GCC unroll 4
    for (int t = 0; t < kRows; t++) xs[t] = Load<WideVector>(x + t * depth + k);
#pragma GCC unroll 4
    for (int o = 0; o < kOuts; o++) {
      const WideVector ws = Load<WideVector>(w + o * depth + k);
#pragma GCC unroll 4
      for (int t = 0; t < kRows; t++) acc[o][t] = MultiplyAdd(ws, xs[t], acc[o][t]);
    }
  }
  const Size rest = depth - k;
  for (int o = 0; rest > 0 && o < kOuts; o++) {
    const auto part = [=](const auto* p) { return LoadPart<WideVector>(p + k, rest); };
    for (int t = 0; t < kRows; t++) acc[o][t] = MultiplyAdd(part(w + o * depth), part(x + t * depth), acc[o][t]);
  }
  for (int t = 0; t < kRows; t++) {
    for (int o = 0; o < kOuts; o++) y[t * num_out + o] = SumLanes(acc[o][t]);
  }
}

template <typename W>
struct Problem {
  const float* x;  // [rows, depth]
  const W* w;      // [num_out, depth]
  float* y;        // [rows, num_out]
  Size rows, depth, num_out;
};

// kOuts outputs of all rows; the weights stay in L1 from one group of rows to the next.
template <int kOuts, typename W>
void Band(const Problem<W>& p, Size o, bool more) {
  const W* w = p.w + o * p.depth;
  const Size groups = (p.rows + kTileRows - 1) / kTileRows;
  // The groups share the fetching of the next band; the last band touches what is in cache anyway.
  Prefetch prefetch{reinterpret_cast<const char*>(w), 0};
  if (more) prefetch = {reinterpret_cast<const char*>(w + kOuts * p.depth), kOuts * Size{sizeof(W)} / groups};
  for (Size g = 0; g < groups; g++) {
    const Size t = p.rows * g / groups;  // groups of nearly equal size: 5 rows are 2 + 3, not 4 + 1
    const float* x = p.x + t * p.depth;
    float* y = p.y + t * p.num_out + o;
    switch (p.rows * (g + 1) / groups - t) {
      case 1: Tile<kOuts, 1>(x, w, y, p.depth, p.num_out, prefetch); break;
      case 2: Tile<kOuts, 2>(x, w, y, p.depth, p.num_out, prefetch); break;
      case 3: Tile<kOuts, 3>(x, w, y, p.depth, p.num_out, prefetch); break;
      case 4: Tile<kOuts, 4>(x, w, y, p.depth, p.num_out, prefetch); break;
    }
    prefetch.p += prefetch.bytes_per_k * p.depth;
  }
}

// Outputs o..end-1 of all rows.
template <typename W>
void Work(const Problem<W>& p, Size o, Size end) {
  for (; o + kTileOuts <= end; o += kTileOuts) Band<kTileOuts>(p, o, o + 2 * kTileOuts <= end);
  for (; o < end; o++) Band<1>(p, o, false);
}

template <typename W>
ffi::Error Run(ffi::ThreadPool& pool, const Problem<W>& p) {
  const Size bytes = p.num_out * p.depth * Size{sizeof(W)};
  const Size threads = std::clamp<Size>(bytes / kGrainBytes, 1, std::max<Size>(pool.num_threads(), 1));
  const Size chunk_bytes = std::min(kGrainBytes, bytes / (4 * threads));  // four each, to share evenly
  const Size size = (chunk_bytes / (kTileOuts * Size{sizeof(W)} * (p.depth + 1)) + 1) * kTileOuts;
  RunChunks(pool, threads, (p.num_out + size - 1) / size, [=](Size c) {
    Work(p, c * size, std::min((c + 1) * size, p.num_out));
  });
  return ffi::Error::Success();
}

using Matrix = ffi::Buffer<ffi::F32, 2>;

ffi::Error SkinnyMatmul(ffi::ThreadPool pool, Matrix x, ffi::AnyBuffer w, ffi::Result<Matrix> y) {
  const Size rows = x.dimensions()[0], depth = x.dimensions()[1], num_out = y->dimensions()[1];
  const auto shape = w.dimensions();
  if (shape.size() != 2 || shape[0] != num_out || shape[1] != depth || y->dimensions()[0] != rows) {
    return ffi::Error::InvalidArgument("skinny matmul: x[T, K], w[O, K] and y[T, O] do not fit together");
  }
  const float* xs = x.typed_data();
  float* ys = y->typed_data();
  const void* ws = w.untyped_data();
  if (w.element_type() == ffi::F32) return Run<float>(pool, {xs, (const float*)ws, ys, rows, depth, num_out});
  if (w.element_type() == ffi::BF16) return Run<uint16_t>(pool, {xs, (const uint16_t*)ws, ys, rows, depth, num_out});
  return ffi::Error::InvalidArgument("skinny matmul: w must be float32 or bfloat16");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    EntmtpSkinnyMatmul, SkinnyMatmul,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Matrix>().Arg<ffi::AnyBuffer>().Ret<Matrix>());
