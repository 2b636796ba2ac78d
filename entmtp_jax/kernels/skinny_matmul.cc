// y[t, o] = sum_k x[t, k] * w[o, k] for few rows t: what verifying a small tree of tokens needs.
//
// The weights are larger than any cache, so their bytes set the time of one row. A general matrix product packs its
// operands into panels, which costs several times that when there are 2..32 rows. Here every weight is read from memory
// once, straight from its row-major [num_out, depth] array, and meets all rows while it is in a register or L1.
//
// Order of summation: lane l of one vector accumulator adds the products of k = l, l + kLanes, l + 2 kLanes, ... and a
// fixed tree adds the lanes. It depends on neither the number of rows nor the split over threads, so a row's result is
// bit for bit the same alone and inside a tree, and the same for bfloat16 weights and their float32 copies.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using Size = std::ptrdiff_t;

#ifdef __AVX512F__
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;  // also where vectors are shorter: the compiler then splits every operation
#endif
// 3 x 4 accumulators and up to 4 vectors of operands beside them fill 16 registers.
constexpr int kTileOuts = 3;
constexpr int kTileRows = 4;
constexpr int kSpins = 1 << 16;  // before the processor is given away
constexpr Size kGrainBytes = 256 * 1024;  // of weights: too few to wake another thread for, enough to claim at a time

using Vector [[gnu::vector_size(4 * kLanes)]] = float;
using Bits [[gnu::vector_size(4 * kLanes)]] = uint32_t;
using Halves [[gnu::vector_size(2 * kLanes)]] = uint16_t;

inline Vector Load(const float* p) {
  Vector v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// A bfloat16 is the upper half of the float32 of equal value: widening is exact.
inline Vector Load(const uint16_t* p) {
#if defined(__AVX512F__)
  return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
  // One byte shuffle; GCC makes five instructions of the generic form.
  const __m256i to_upper_halves = _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7,  //
                                                   -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
  return (Vector)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p)), to_upper_halves);
#else
  Halves halves;
  std::memcpy(&halves, p, sizeof halves);
  return (Vector)(__builtin_convertvector(halves, Bits) << 16);
#endif
}

// The first n < kLanes elements, then zeros.
template <typename T>
inline Vector LoadPart(const T* p, Size n) {
  T padded[kLanes] = {};
  std::memcpy(padded, p, n * sizeof(T));
  return Load(padded);
}

inline float SumLanes(Vector v) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; i++) v[i] += v[i + half];
  }
  return v[0];
}

// Bytes that later work will read: fetched a little at every step of k, so that memory and arithmetic overlap.
struct Prefetch {
  const char* p;
  Size bytes_per_k;
};

template <int kOuts, int kRows, typename W>
void Tile(const float* x, const W* w, float* y, Size depth, Size num_out, Prefetch prefetch) {
  Vector acc[kOuts][kRows] = {};
  Size k = 0;
  for (; k + kLanes <= depth; k += kLanes) {
    __builtin_prefetch(prefetch.p + k * prefetch.bytes_per_k);
    Vector xs[kRows];
#pragma GCC unroll 4
    for (int t = 0; t < kRows; t++) xs[t] = Load(x + t * depth + k);
#pragma GCC unroll 4
    for (int o = 0; o < kOuts; o++) {
      const Vector ws = Load(w + o * depth + k);
#pragma GCC unroll 4
      for (int t = 0; t < kRows; t++) acc[o][t] += ws * xs[t];
    }
  }
  const Size rest = depth - k;
  for (int o = 0; rest > 0 && o < kOuts; o++) {
    for (int t = 0; t < kRows; t++) acc[o][t] += LoadPart(w + o * depth + k, rest) * LoadPart(x + t * depth + k, rest);
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

// Chunks of outputs that threads claim one by one; shared, since a helper may start after the call has returned.
struct Chunks {
  Size count, size;
  std::atomic<Size> next{0}, done{0};
};

template <typename W>
void Work(Chunks& chunks, const Problem<W>& p) {
  for (Size c; (c = chunks.next.fetch_add(1)) < chunks.count; chunks.done.fetch_add(1)) {
    Size o = c * chunks.size;
    const Size end = std::min(o + chunks.size, p.num_out);
    for (; o + kTileOuts <= end; o += kTileOuts) Band<kTileOuts>(p, o, o + 2 * kTileOuts <= end);
    for (; o < end; o++) Band<1>(p, o, false);
  }
}

// The caller works too and afterwards waits only for chunks that a running thread has claimed. So a pool whose threads
// are all busy, or whose only thread is the caller, costs speed but cannot cause a deadlock.
template <typename W>
ffi::Error Run(ffi::ThreadPool& pool, const Problem<W>& p) {
  const Size bytes = p.num_out * p.depth * Size{sizeof(W)};
  const Size threads = std::clamp<Size>(bytes / kGrainBytes, 1, std::max<Size>(pool.num_threads(), 1));
  const Size chunk_bytes = std::min(kGrainBytes, bytes / (4 * threads));  // four each, to share evenly
  auto chunks = std::make_shared<Chunks>();
  chunks->size = (chunk_bytes / (kTileOuts * Size{sizeof(W)} * (p.depth + 1)) + 1) * kTileOuts;
  chunks->count = (p.num_out + chunks->size - 1) / chunks->size;
  for (Size i = 1; i < threads; i++) pool.Schedule([=] { Work(*chunks, p); });
  Work(*chunks, p);
  // A claimed chunk takes tens of microseconds; a thread that the system has put aside may take milliseconds.
  for (int spins = 0; chunks->done.load() < chunks->count; spins++) {
    if (spins > kSpins) std::this_thread::yield();
  }
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
