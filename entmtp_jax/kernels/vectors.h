// Vectors of 8 floats for any processor: loading, adding lanes, exp and softmax, all with one order of rounding.
#ifndef ENTMTP_JAX_KERNELS_VECTORS_H_
#define ENTMTP_JAX_KERNELS_VECTORS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

namespace entmtp {

using Size = std::ptrdiff_t;

constexpr int kLanes = 8;  // also where vectors are shorter: the compiler then splits every operation

using Vector [[gnu::vector_size(4 * kLanes)]] = float;
using Bits [[gnu::vector_size(4 * kLanes)]] = int32_t;
using Halves [[gnu::vector_size(2 * kLanes)]] = uint16_t;

inline Vector Load(const float* p) {
  Vector v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// A bfloat16 is the upper half of the float32 of the same value: widening is exact.
inline Vector Load(const uint16_t* p) {
  Halves halves;
  std::memcpy(&halves, p, sizeof halves);
  return (Vector)(__builtin_convertvector(halves, Bits) << 16);
}

// The first n < kLanes elements, then zeros.
template <typename T>
inline Vector LoadPart(const T* p, Size n) {
  T padded[kLanes] = {};
  std::memcpy(padded, p, n * sizeof(T));
  return Load(padded);
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

// Lanes 0..3 are the sums of the lanes of v[0..3], each ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)).
inline Vector SumLanes(const Vector* v) {
  const Vector even = Pick<0, 1, 2, 3, 8, 9, 10, 11>(v[0], v[2]) + Pick<4, 5, 6, 7, 12, 13, 14, 15>(v[0], v[2]);
  const Vector odd = Pick<0, 1, 2, 3, 8, 9, 10, 11>(v[1], v[3]) + Pick<4, 5, 6, 7, 12, 13, 14, 15>(v[1], v[3]);
  const Vector pairs = Pick<0, 1, 8, 9, 4, 5, 12, 13>(even, odd) + Pick<2, 3, 10, 11, 6, 7, 14, 15>(even, odd);
  return Pick<0, 2, 4, 6, 0, 2, 4, 6>(pairs, pairs) + Pick<1, 3, 5, 7, 1, 3, 5, 7>(pairs, pairs);
}

// exp(x) for x <= 0 to 2 units in the last place: x = n ln 2 + r, and a Taylor polynomial of degree 7 for exp(r).
inline Vector Exp(Vector x) {
  constexpr float kRounder = 12582912;  // 1.5 * 2^23: adding it leaves an integer in the low bits
  const Vector shifted = x * 1.44269504f + kRounder;
  const Vector n = shifted - kRounder;
  const Vector r = (x - n * 0.693359375f) - n * -2.12194440e-4f;  // ln 2 in two parts, the first with few bits
  Vector y = r * (1.f / 5040) + 1.f / 720;
  for (float c : {1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1.f, 1.f}) y = y * r + c;
  const Bits exponent = ((Bits)shifted - (Bits)(Vector{} + kRounder)) << 23;
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
  Vector sums[4] = {};
  for (Size n = 0; n < count; n += kLanes) {
    const Vector e = Exp(Load(s + n) - maximum);
    std::memcpy(s + n, &e, sizeof e);
    sums[0] += e;
  }
  return SumLanes(sums)[0];
}

}  // namespace entmtp

#endif  // ENTMTP_JAX_KERNELS_VECTORS_H_
