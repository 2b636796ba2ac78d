// Scores and weighted sums for a few rows of queries and a sequence of keys or values, in register tiles.
#ifndef ENTMTP_JAX_KERNELS_TILES_H_
#define ENTMTP_JAX_KERNELS_TILES_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "vectors.h"

namespace entmtp {

// 3 x 4 accumulators and 4 vectors of operands fill 16 registers.
constexpr int kTileRows = 3;
constexpr int kTileKeys = 4;
constexpr int kTileVectors = 4;
constexpr Size kBlockKeys = 64;  // stay in L1 while all rows of a chunk meet them; a multiple of kTileKeys

// Keys or values [.., dim] in the order in which they are seen.
template <typename K>
struct Sequence {
  const K* base;
  const int32_t* order;
  Size count, dim;
  const K* operator[](Size n) const { return base + order[n] * dim; }
};

// Rows of scratch memory, one per query of a chunk.
struct Rows {
  float* base;
  Size stride;
  float* operator[](Size t) const { return base + t * stride; }
  Rows From(Size t, Size column = 0) const { return {base + t * stride + column, stride}; }
};

template <int kRows, typename K>
void ScoreTile(Rows q, const Sequence<K>& keys, Size begin, Size end, Rows scores) {
  for (Size n = begin; n < end; n += kTileKeys) {
    const K* k[kTileKeys];
    for (int j = 0; j < kTileKeys; j++) k[j] = keys[std::min(n + j, end - 1)];  // surplus scores are overwritten later
    Vector acc[kRows][kTileKeys] = {};
    const auto add = [&](Size c, auto load) {
      Vector qs[kRows];
#pragma GCC unroll 4
      for (int t = 0; t < kRows; t++) qs[t] = Load(q[t] + c);
#pragma GCC unroll 4
      for (int j = 0; j < kTileKeys; j++) {
        const Vector ks = load(k[j] + c);
#pragma GCC unroll 4
        for (int t = 0; t < kRows; t++) acc[t][j] = MultiplyAdd(qs[t], ks, acc[t][j]);
      }
    };
    Size c = 0;
    for (; c + kLanes <= keys.dim; c += kLanes) add(c, [](const K* p) { return Load(p); });
    if (c < keys.dim) add(c, [&](const K* p) { return LoadPart(p, keys.dim - c); });
    for (int t = 0; t < kRows; t++) {
      const Vector sums = SumLanesOfFour(acc[t]);
      std::memcpy(scores[t] + n, &sums, kTileKeys * sizeof(float));
    }
  }
}

template <int kRows, int kVectors, typename K, typename LoadVector>
void MixTile(Rows weights, const Sequence<K>& values, Size begin, Size end, Size c, Rows mixed, LoadVector load) {
  Vector acc[kRows][kVectors];
  for (int t = 0; t < kRows; t++) std::memcpy(acc[t], mixed[t] + c, sizeof acc[t]);
  for (Size n = begin; n < end; n++) {
    const K* v = values[n] + c;
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++) {
      const Vector vs = load(v + i * kLanes);
#pragma GCC unroll 4
      for (int t = 0; t < kRows; t++) acc[t][i] = MultiplyAdd(Vector{} + weights[t][n], vs, acc[t][i]);
    }
  }
  for (int t = 0; t < kRows; t++) std::memcpy(mixed[t] + c, acc[t], sizeof acc[t]);
}

// Calls tile(rows as a type, first row, first key, end of keys): keys in blocks, and for each block all rows.
template <typename Tile>
void ForTiles(Size rows, Size count, Tile tile) {
  for (Size n = 0; n < count; n += kBlockKeys) {
    const Size end = std::min(n + kBlockKeys, count);
    for (Size t = 0; t < rows; t += kTileRows) {
      switch (std::min<Size>(rows - t, kTileRows)) {
        case 1: tile(std::integral_constant<int, 1>{}, t, n, end); break;
        case 2: tile(std::integral_constant<int, 2>{}, t, n, end); break;
        case 3: tile(std::integral_constant<int, 3>{}, t, n, end); break;
      }
    }
  }
}

// Scores of the queries in rows 0..rows-1 for a sequence of keys.
template <typename K>
void Score(Size rows, Rows q, const Sequence<K>& keys, Rows scores) {
  ForTiles(rows, keys.count, [&](auto tile_rows, Size t, Size begin, Size end) {
    ScoreTile<tile_rows.value>(q.From(t), keys, begin, end, scores.From(t));
  });
}

// Adds the weighted values of a sequence to each row.
template <typename K>
void Mix(Size rows, Rows weights, const Sequence<K>& values, Rows mixed) {
  ForTiles(rows, values.count, [&](auto tile_rows, Size t, Size begin, Size end) {
    constexpr int kRows = tile_rows.value;
    const auto whole = [](const K* p) { return Load(p); };
    Size c = 0;
    for (; c + kTileVectors * kLanes <= values.dim; c += kTileVectors * kLanes) {
      MixTile<kRows, kTileVectors>(weights.From(t), values, begin, end, c, mixed.From(t), whole);
    }
    for (; c < values.dim; c += kLanes) {
      const Size part = std::min<Size>(values.dim - c, kLanes);
      const auto load = [=](const K* p) { return part < kLanes ? LoadPart(p, part) : Load(p); };
      MixTile<kRows, 1>(weights.From(t), values, begin, end, c, mixed.From(t), load);
    }
  });
}

}  // namespace entmtp

#endif  // ENTMTP_JAX_KERNELS_TILES_H_
