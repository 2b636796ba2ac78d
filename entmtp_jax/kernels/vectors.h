// Vectors of floats for any processor: loading, adding lanes, exp and softmax, all with one order of rounding.
#ifndef ENTMTP_JAX_KERNELS_VECTORS_H_
#define ENTMTP_JAX_KERNELS_VECTORS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace entmtp {

using Size = std::ptrdiff_t;

constexpr int kLanes = 8;  // also where vectors are shorter: the compiler then splits every operation

using Vector [[gnu::vector_size(4 * kLanes)]] = float;
using Bits [[gnu::vector_size(4 * kLanes)]] = int32_t;
using Halves [[gnu::vector_size(2 * kLanes)]] = uint16_t;

// The widest vectors that the processor has; narrower ones would be split there as well.
#ifdef __AVX512F__
using WideVector [[gnu::vector_size(64)]] = float;
#else
using WideVector = Vector;
#endif

template <typename V>
constexpr int kLanesOf = sizeof(V) / sizeof(float);

template <typename V = Vector>
inline V Load(const float* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// A bfloat16 is the upper half of the float32 of the same value: widening is exact.
inline void Widen(const uint16_t* p, Vector& v) {
#ifdef __AVX2__
  // One byte shuffle; GCC makes five instructions of the generic form.
  const __m256i to_upper_halves = _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7,  //
                                                   -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
  v = (Vector)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p)), to_upper_halves);
#else
  Halves halves;
  std::memcpy(&halves, p, sizeof halves);
  v = (Vector)(__builtin_convertvector(halves, Bits) << 16);
#endif
}

#ifdef __AVX512F__
inline void Widen(const uint16_t* p, WideVector& v) {
  v = (WideVector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
#endif

template <typename V = Vector>
inline V Load(const uint16_t* p) {
  V v;
  Widen(p, v);
  return v;
}

// The first n elements, fewer than lanes, then zeros.
template <typename V = Vector, typename T>
inline V LoadPart(const T* p, Size n) {
  T padded[kLanesOf<V>] = {};
  std::memcpy(padded, p, n * sizeof(T));
  return Load<V>(padded);
}

// a * b + c in each lane, rounded once where the processor can and twice where it cannot. It is spelled out because a
// compiler that may fuse on its own does not have to: tuned for some processors GCC fuses the sums of one tile and not
// those of the next, and a row's bits would then depend on the rows beside it.
template <typename V>
inline V MultiplyAdd(V a, V b, V c) {
#ifdef __AVX512F__
  if constexpr (sizeof(V) == 64) return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#endif
#if defined(__FMA__)
  if constexpr (sizeof(V) == 32) return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
  for (int i = 0; i < kLanesOf<V>; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}

// The upper half of the lanes is added to the lower until one is left: ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)) for 8.
template <typename V>
inline float SumLanes(V v) {
  for (int half = kLanesOf<V> / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; i++) v[i] += v[i + half];
  }
  return v[0];
}

// Lanes of a (numbers 0..7) and b (8..15).
template <int... kNumbers>
inline Vector Pick(Vector a, Vector b) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, kNumbers...);
#else
  return __builtin_shuffle(a, b, Bits{kNumbers...});
#endif
}

// Lanes 0..3 are the sums of the lanes of v[0..3], each in the order of SumLanes.
inline Vector SumLanesOfFour(const Vector* v) {
  const Vector even = Pick<0, 1, 2, 3, 8, 9, 10, 11>(v[0], v[2]) + Pick<4, 5, 6, 7, 12, 13, 14, 15>(v[0], v[2]);
  const Vector odd = Pick<0, 1, 2, 3, 8, 9, 10, 11>(v[1], v[3]) + Pick<4, 5, 6, 7, 12, 13, 14, 15>(v[1], v[3]);
  const Vector pairs = Pick<0, 1, 8, 9, 4, 5, 12, 13>(even, odd) + Pick<2, 3, 10, 11, 6, 7, 14, 15>(even, odd);
  return Pick<0, 2, 4, 6, 0, 2, 4, 6>(pairs, pairs) + Pick<1, 3, 5, 7, 1, 3, 5, 7>(pairs, pairs);
}

// exp(x) for x <= 0 to 2 units in the last place: x = n ln 2 + r, and a Taylor polynomial of degree 7 for exp(r).
inline Vector Exp(Vector x) {
  const auto all = [](float lane) { return Vector{} + lane; };
  const Vector rounder = all(12582912);  // 1.5 * 2^23: adding it leaves an integer in the low bits
  const Vector shifted = MultiplyAdd(x, all(1.44269504f), rounder);
  const Vector n = shifted - rounder;
  // ln 2 in two parts, the first with few bits
  const Vector r = MultiplyAdd(n, all(2.12194440e-4f), MultiplyAdd(n, all(-0.693359375f), x));
  Vector y = all(1.f / 5040);
  for (float c : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1.f, 1.f}) y = MultiplyAdd(y, r, all(c));
  const Bits exponent = ((Bits)shifted - (Bits)rounder) << 23;
  return x < -87.f ? Vector{} : (Vector)((Bits)y + exponent);
}

// Replaces scores by exp(score - maximum) and returns their sum; there must be room for kLanes more.
[[gnu::noinline]] inline float Softmax(float* s, Size count) {
  if (count == 0) return 1;  // a token that sees nothing gets zeros
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  std::fill_n(s + count, kLanes, kNever);
  float tops[kLanes];
  Vector top = Load(s);
  for (Size n = kLanes; n < count; n += kLanes) top = Load(s + n) > top ? Load(s + n) : top;
  std::memcpy(tops, &top, sizeof tops);
  const float maximum = *std::max_element(tops, tops + kLanes);
  Vector sum = {};
  for (Size n = 0; n < count; n += kLanes) {
    const Vector e = Exp(Load(s + n) - maximum);
    std::memcpy(s + n, &e, sizeof e);
    sum += e;
  }
  return SumLanes(sum);
}

}  // namespace entmtp

#endif  // ENTMTP_JAX_KERNELS_VECTORS_H_
