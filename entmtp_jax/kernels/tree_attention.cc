// Softmax attention of a few new tokens to the filled slots of a cache and to those new tokens that a mask shows them.
//
// Order of rounding: a query's visible keys form one sequence, first the filled slots, then the visible new tokens by
// row. A score depends on its query and key alone; lane l of the softmax sum adds the terms l, l + kLanes, ... of the
// sequence and a fixed tree adds the lanes; values are added key by key. So a token's result is bit for bit the same
// whether its ancestors lie in the cache or are new, and whatever other tokens there are.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "chunks.h"
#include "tiles.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using namespace entmtp;

constexpr Size kChunkRows = 24;            // of queries, at most
constexpr Size kThreadProducts = 1 << 18;  // fewer are not worth waking another thread for

template <typename K>
struct Problem {
  const float* query;                // [B, T, H, C]
  const K *keys, *values;            // [B, G, T, C]
  const bool* mask;                  // [B or 1, T, T]
  const K *slot_keys, *slot_values;  // [B, G, S, C]
  const int32_t* lengths;            // [B]
  float* mixed;                      // [B, T, H, C]
  Size batch, tokens, heads, groups, slots, dim, mask_batch;
};

// One batch row, one key/value head, and the queries that read it of the new tokens first..end-1.
template <typename K>
void Attend(const Problem<K>& p, Size b, Size g, Size first, Size end) {
  const Size repeats = p.heads / p.groups, rows = (end - first) * repeats;
  const Size filled = std::clamp<Size>(p.lengths[b], 0, p.slots);
  const Size padded = (p.dim + kLanes - 1) / kLanes * kLanes, room = filled + p.tokens + kLanes;
  std::vector<float> scratch(rows * (2 * padded + room));
  const Rows q{scratch.data(), padded}, mixed{q[rows], padded}, weights{mixed[rows], room};
  std::vector<int32_t> order(std::max(filled, p.tokens));

  const auto at = [&](Size t) {
    const Size token = b * p.tokens + first + t / repeats;
    return (token * p.heads + g * repeats + t % repeats) * p.dim;
  };
  const float scale = 1 / std::sqrt(static_cast<double>(p.dim));
  for (Size t = 0; t < rows; t++) {
    for (Size c = 0; c < p.dim; c++) q[t][c] = p.query[at(t) + c] * scale;
  }

  const Size slots = (b * p.groups + g) * p.slots * p.dim, news = (b * p.groups + g) * p.tokens * p.dim;
  const auto cached = [&](const K* base) {
    std::iota(order.begin(), order.begin() + filled, 0);
    return Sequence<K>{base + slots, order.data(), filled, p.dim};
  };
  const auto visible = [&](const K* base, Size token) {
    const bool* mask = p.mask + ((p.mask_batch > 1 ? b : 0) * p.tokens + token) * p.tokens;
    Size count = 0;
    for (Size j = 0; j < p.tokens; j++) {
      order[count] = j;
      count += mask[j];
    }
    return Sequence<K>{base + news, order.data(), count, p.dim};
  };
  Score(rows, q, cached(p.slot_keys), weights);
  std::vector<float> totals(rows);
  for (Size t = 0; t < rows; t += repeats) {
    const Sequence<K> keys = visible(p.keys, first + t / repeats);
    Score(repeats, q.From(t), keys, weights.From(t, filled));
    for (Size u = t; u < t + repeats; u++) totals[u] = Softmax(weights[u], filled + keys.count);
  }
  Mix(rows, weights, cached(p.slot_values), mixed);
  for (Size t = 0; t < rows; t += repeats) {
    Mix(repeats, weights.From(t, filled), visible(p.values, first + t / repeats), mixed.From(t));
    for (Size u = t; u < t + repeats; u++) {
      for (Size c = 0; c < p.dim; c++) p.mixed[at(u) + c] = mixed[u][c] / totals[u];
    }
  }
}

template <typename K>
void Run(ffi::ThreadPool& pool, const Problem<K>& p) {
  const Size pairs = p.batch * p.groups;
  if (pairs * p.tokens * p.heads * p.dim == 0) return;
  const Size longest = std::clamp<Size>(*std::max_element(p.lengths, p.lengths + p.batch), 0, p.slots);
  const Size products = 2 * p.batch * p.heads * p.tokens * p.dim * (longest + 1);
  const Size threads = std::clamp<Size>(products / kThreadProducts, 1, std::max<Size>(pool.num_threads(), 1));
  // About four chunks for each thread, to share evenly; a chunk holds whole tokens.
  const Size wanted = threads == 1 ? 1 : (4 * threads + pairs - 1) / pairs;
  const Size most = std::max<Size>(kChunkRows * p.groups / p.heads, 1);
  const Size blocks = std::min(std::max(wanted, (p.tokens + most - 1) / most), p.tokens);
  RunChunks(pool, threads, pairs * blocks, [=](Size c) {
    const Size block = c % blocks, pair = c / blocks;
    Attend(p, pair / p.groups, pair % p.groups, p.tokens * block / blocks, p.tokens * (block + 1) / blocks);
  });
}

using Shape = std::vector<Size>;
using Query = ffi::Buffer<ffi::F32, 4>;
using Mask = ffi::Buffer<ffi::PRED, 3>;
using Lengths = ffi::Buffer<ffi::S32, 1>;

template <typename Buffer>
Shape ShapeOf(const Buffer& buffer) {
  return {buffer.dimensions().begin(), buffer.dimensions().end()};
}

ffi::Error TreeAttention(ffi::ThreadPool pool, Query query, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                         Mask mask, ffi::AnyBuffer slot_keys, ffi::AnyBuffer slot_values, Lengths lengths,
                         ffi::Result<Query> mixed) {
  const Shape q = ShapeOf(query), k = ShapeOf(keys), s = ShapeOf(slot_keys), m = ShapeOf(mask);
  const bool fit = k.size() == 4 && s.size() == 4 && k == Shape{q[0], k[1], q[1], q[3]} &&
                   s == Shape{q[0], k[1], s[2], q[3]} && ShapeOf(values) == k && ShapeOf(slot_values) == s &&
                   m == Shape{m[0], q[1], q[1]} && (m[0] == 1 || m[0] == q[0]) && ShapeOf(lengths) == Shape{q[0]} &&
                   ShapeOf(*mixed) == q && k[1] > 0 && q[2] % k[1] == 0;
  if (!fit) return ffi::Error::InvalidArgument("tree attention: the shapes do not fit together");
  const auto run = [&](auto zero) {
    using K = decltype(zero);
    const auto data = [](const ffi::AnyBuffer& buffer) { return static_cast<const K*>(buffer.untyped_data()); };
    Run(pool, Problem<K>{query.typed_data(), data(keys), data(values), mask.typed_data(), data(slot_keys),
                         data(slot_values), lengths.typed_data(), mixed->typed_data(),
                         q[0], q[1], q[2], k[1], s[2], q[3], m[0]});
    return ffi::Error::Success();
  };
  const auto all = [&](ffi::DataType type) {
    return keys.element_type() == type && values.element_type() == type && slot_keys.element_type() == type &&
           slot_values.element_type() == type;
  };
  if (all(ffi::F32)) return run(float{});
  if (all(ffi::BF16)) return run(uint16_t{});
  return ffi::Error::InvalidArgument("tree attention: keys and values must all be float32 or all be bfloat16");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EntmtpTreeAttention, TreeAttention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Query>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Mask>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Lengths>()
                                  .Ret<Query>());
