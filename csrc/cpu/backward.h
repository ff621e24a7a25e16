// Backward pass: one sweep that recomputes P from the saved log-sum-exp, five products, no atomics.
//
// A task owns the keys of one head group and walks them in tiles of kTile keys, which lie along the vector lanes (the
// forward pass with queries and keys exchanged). For each block of queries:
//
//     S  = Q K^T    dP = dO V^T               A = rows of Q, dO as they lie in memory;  B = K^T, V^T of the tile
//     P  = exp(S - lse)    dS = P * (dP - delta)
//     dV^T += dO^T P    dK^T += Q^T dS        A = rows of dO, Q again (unit rows);      B = P, dS
//     dQ   += dS K                            A = dS;  B = rows of K, lanes over the head dimension
//
// with delta = rowsum(dO * O) - dLSE. dK and dV stay in the tile's own accumulators, dQ accumulates in float32 over the
// tiles in their order: the result does not depend on the number of threads' timing. Where there are fewer head groups
// than threads, the tiles are dealt out to several tasks with a dQ of their own, summed at the end in a fixed order.
#pragma once

#include <numeric>

#include "forward.h"

namespace attnkern::cpu {
namespace {

// Which products are wanted.
struct Wanted {
  explicit Wanted(const Backward& p) : dq(p.dq.data != nullptr), dk(p.dk.data != nullptr), dv(p.dv.data != nullptr) {}
  bool dq, dk, dv;
};

// A unit: the smallest set of query heads that shares its key and value heads with no other.
inline int64_t heads_of_unit(const Attention& p) { return std::lcm(p.heads_q / p.heads_k, p.heads_q / p.heads_v); }

// How the gradient of a bias is made: while the tiles are passed, if it has all queries and keys. Units that share
// their bias are a group; its members take turns to add to the sums of one task, or of several with sums of their own.
// What is too much to go through memory for every member, or would keep threads idle, and a bias that is broadcast
// along queries or keys, takes a sweep of its own (backward_bias).
template <class C>
struct BiasGradPlan {
  enum Way {
    kNone,
    kStored,  // in passing: every entry has one score
    kAdded,   // in passing, to sums
    kApart,
  };
  static constexpr int64_t kMostBytes = 8 << 20;  // of a group

  BiasGradPlan(const Backward& p, int64_t threads, bool same_type) {
    if (p.dbias.data == nullptr) return;
    way = kApart;
    const Wanted wanted(p);
    if (p.bias_size[2] != p.seqlen_q || p.bias_size[3] != p.seqlen_k || !(wanted.dq || wanted.dk || wanted.dv)) return;
    const int64_t unit = heads_of_unit(p), units = p.heads_q / unit;  // of an entry of the batch
    const bool own_batch = p.bias_size[0] == p.batch, own_heads = p.bias_size[1] == p.heads_q;
    across = own_heads ? units : 1;
    groups = (own_batch ? p.batch : 1) * across;
    members_across = units / across;
    members = (own_batch ? 1 : p.batch) * members_across;
    size = (own_heads ? unit : 1) * p.seqlen_q * p.seqlen_k;
    if (members == 1 && (own_heads || unit == 1)) {
      way = kStored;
      return;
    }
    output_adds = same_type;
    // As few as keep all threads busy to the end, more or less.
    while (tasks < members && groups * tasks % threads != 0 && groups * tasks < 4 * threads) ++tasks;
    const bool idle = groups * tasks < threads && p.seqlen_k > kTile<C>;  // tiles of keys would be dealt out
    if (!idle && size * static_cast<int64_t>(sizeof(C)) <= kMostBytes) way = kAdded;
  }

  // Whether the output itself is what a group adds to.
  bool in_output() const { return output_adds && tasks == 1; }
  // The unit, of all of the batch, that is a member of a group.
  int64_t unit(int64_t group, int64_t member) const {
    return (group / across * (members / members_across) + member / members_across) * (across * members_across) +
           group % across * members_across + member % members_across;
  }

  Way way = kNone;
  int64_t groups = 0, members = 1;
  int64_t tasks = 1;                       // of a group
  int64_t size = 0;                        // entries of a group
  bool output_adds = false;                // the bias has the compute type
  int64_t across = 1, members_across = 1;  // of one entry of the batch
};

template <class Op>
struct BackwardScratch {
  using C = typename Op::Compute;
  using Scalar = typename Op::Scalar;

  BackwardScratch(void* memory, const Backward& p) {
    Arena arena(memory);
    const int64_t e = row_scalars<Op>(p.head_dim), ev = row_scalars<Op>(p.head_dim_v);
    const int64_t rows = max64(kBlock<Op>, kTile<C>), pairs = Op::kPack == 1 ? 0 : 1;
    k_tile = arena.take<Scalar>(e * kTile<C>);
    v_tile = arena.take<Scalar>(ev * kTile<C>);
    k_rows = arena.take<Scalar>(kTile<C> * e * Op::kPack);
    q_rows = arena.take<Scalar>(rows * e);
    grad_rows = arena.take<Scalar>(rows * ev);
    q_pairs = arena.take<Scalar>(pairs * rows * e);
    grad_pairs = arena.take<Scalar>(pairs * rows * ev);
    p_pairs = arena.take<Scalar>(pairs * kBlock<Op> / 2 * kTile<C>);
    ds_pairs = arena.take<Scalar>(pairs * kBlock<Op> / 2 * kTile<C>);
    ds_rows = arena.take<Scalar>(pairs * kBlock<Op> * kTile<C> / 2);
    scores = arena.take<C>(kBlock<Op> * kTile<C>);
    grad_scores = arena.take<C>(kBlock<Op> * kTile<C>);
    bias = arena.take<C>(Score<C>(p).has_bias ? kBlock<Op> * kTile<C> : 0);
    mask = arena.take<LaneBits>(kBlock<Op>);
    keep = arena.take<C>(p.dropout_p > 0 ? kBlock<Op> * kTile<C> : 0);
    dk = arena.take<C>(p.head_dim * kTile<C>);
    dv = arena.take<C>(p.head_dim_v * kTile<C>);
    bytes = arena.used();
  }

  Scalar *k_tile, *v_tile, *k_rows, *q_rows, *grad_rows, *q_pairs, *grad_pairs, *p_pairs, *ds_pairs, *ds_rows;
  LaneBits* mask;
  C *scores, *grad_scores, *bias, *keep, *dk, *dv;
  int64_t bytes;
};

// What a row of scores needs: P = norm * exp(S + shift), dS = P * (dP - delta).
template <class C>
struct RowTerms {
  C* shift;  // -lse, in the unit of the scores; -inf where the row has no live key
  C* delta;  // rowsum(dO * O) - dLSE
  C* norm;   // null: 1 for all rows
  RowTerms from(int64_t row) const { return {shift + row, delta + row, norm == nullptr ? nullptr : norm + row}; }
};

// S, dP -> P (dropped), dS in place, for one segment of scores that aren't plain. Rows are queries, lanes keys. dS is
// the gradient of the scaled q k^T; that of the scores as the softmax sees them, which is the bias's, replaces the bias
// where bias_grad is set.
template <class Op, class C = typename Op::Compute>
inline void differentiate_scores(const Score<C>& score, const BandWalk<C>& walk, const Segment& segment,
                                 RowTerms<C> terms, C* bias, bool bias_grad, const LaneBits* mask, const C* keep,
                                 C* scores, C* grad_scores) {
  using S = Simd<C>;
  using V = typename S::V;
  const V scale = S::set1(score.scale);
  const Exponential<Op, false, Op::kSums> exponential(1);
  const Range live = walk.live_lanes(segment.row);
  for (int64_t v = segment.first; v < segment.last; ++v) {
    const bool cut = segment.cut && !LaneMask<C>::all(live, v, segment.rows);
    LaneMask<C> band(live, v);
    int64_t at = v * S::kLanes;
    for (int64_t i = segment.row; i < segment.row + segment.rows; ++i, at += kTile<C>) {
      V t = S::zero(), g = S::load(grad_scores + at);
      V p = exponential(finish_score(score, S::load(scores + at), scale, bias + at, &t), S::set1(terms.shift[i]));
      if (terms.norm != nullptr) p *= S::set1(terms.norm[i]);
      if (mask != nullptr) p = S::select(mask[i - segment.row] >> (v * S::kLanes), p, S::zero());
      if (cut) {
        p = band.select(p, S::zero());
        band.advance();
      }
      V dropped = p;
      if (keep != nullptr) {
        const V factor = S::load(keep + at);
        g *= factor;
        dropped *= factor;
      }
      V ds = p * (g - S::set1(terms.delta[i]));
      if (bias_grad) S::store(bias + at, ds);
      if (score.cap != C(0)) ds *= S::set1(C(1)) - t * t;
      S::store(scores + at, dropped);
      S::store(grad_scores + at, ds);
    }
  }
}

#if defined(__AVX512BF16__)
// Rows i and i + 1 of dS as plain rows of bfloat16; the second one if it isn't null.
inline void store_rows(Simd<float>::V first, Simd<float>::V second, PairDot::Scalar* row, PairDot::Scalar* next) {
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(row), _mm512_castsi512_si256(both));
  if (next != nullptr) _mm256_storeu_si256(reinterpret_cast<__m256i*>(next), _mm512_extracti64x4_epi64(both, 1));
}
#endif

// P and dS from two products that are still in registers, of plain scores or of those with a bias; packed as Op's
// products will read them.
template <class Op, bool kBias>
struct GradientTile {
  using Scalar = typename Op::Scalar;
  using C = typename Op::Compute;
  Factors<Op, false> q_k;
  int64_t depth;
  Factors<Op, false> grad_v;
  int64_t depth_v;
  C factor;  // of the products: what they aren't scaled by yet
  RowTerms<C> terms;
  const LaneBits* mask;  // may be null
  bool cut;              // by the band
  Range live;            // lanes of the first row
  int64_t vector;
  C* bias;
  bool bias_grad;            // replaces the bias
  Scalar *p, *ds, *ds_rows;  // ds_rows: of pairs
  FetchStreams* next;        // may be null

  template <int kRows, int kVectors>
  void run(int64_t row, int64_t first_vector) const {
    using S = typename Op::S;
    using V = typename S::V;
    const int64_t lane = first_vector * S::kLanes;
    V score[kRows][kVectors] = {}, grad_p[kRows][kVectors] = {};
    Walk<Op, false> first(q_k, row, lane), second(grad_v, row, lane);
    int64_t k = 0;
    // Side by side: either alone has too few sums for the latency of its instruction.
    const bool pays = (Op::kPack == 2 || kVectors == 1) && max64(depth, depth_v) <= kLongestSum;
    for (const int64_t both = pays ? min64(depth, depth_v) : 0; k < both;) {
      for (const int64_t end = next == nullptr ? both : min64(both, k + kFetchSteps); k < end; ++k) {
        first.step(score);
        second.step(grad_p);
      }
      if (next != nullptr) next->fetch();
    }
    add_products(first, k, depth, next, score);
    add_products(second, k, depth_v, next, grad_p);
    const auto bias_at = [&](int r, int v) { return bias + (row + r) * kTile<C> + lane + v * S::kLanes; };
    if constexpr (kBias) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) score[r][v] = S::fma(score[r][v], S::set1(factor), S::load(bias_at(r, v)));
    }
    const V dead = S::set1(-kInfinity<C>);
    exclude_tile<C>(score, bits_from(mask, row), vector + first_vector, dead);
    if (cut) mask_tile<C>(score, {live.begin + row, live.end + row}, vector + first_vector, dead);
    // A bias may have a gradient in float32, whatever the elements are.
    const Exponential<Op, !kBias, kBias ? Op::kSums : Op::kWeights> exponential(factor);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const V shift = S::set1(terms.shift[row + r]), delta = S::set1(terms.delta[row + r]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) score[r][v] = exponential(score[r][v], shift);
      if (terms.norm != nullptr) [[unlikely]] {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) score[r][v] *= S::set1(terms.norm[row + r]);
      }
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) grad_p[r][v] = score[r][v] * (grad_p[r][v] - delta);
    }
    if (kBias && bias_grad) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) S::store(bias_at(r, v), grad_p[r][v]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r += Op::kPack)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const bool single = r + Op::kPack > kRows;
        const int64_t at = (row + r) / Op::kPack * kTile<C> + lane + v * S::kLanes;
        const V second = single ? S::zero() : grad_p[r + Op::kPack - 1][v];
        store_probabilities<Op>(score[r][v], single ? S::zero() : score[r + Op::kPack - 1][v], p + at);
        store_probabilities<Op>(grad_p[r][v], second, ds + at);
#if defined(__AVX512BF16__)
        if constexpr (Op::kPack == 2) {
          Scalar* target = ds_rows + ((row + r) * kTile<C> + lane + v * S::kLanes) / 2;
          store_rows(grad_p[r][v], second, target, single ? nullptr : target + kTile<C> / 2);
        }
#endif
      }
  }
};

// How often GradientTile will call fetch.
template <class Op>
inline int64_t fetches_of_gradients(const Backward& p, int64_t rows, int64_t vectors) {
  const int64_t depth = Op::kPack == 2 ? max64(p.head_dim, p.head_dim_v) / 2 : p.head_dim + p.head_dim_v;
  return max64(1, fetches_of<kPairRows * kPairVectors, kPairVectors>(rows, vectors, depth));
}

// To be fetched by GradientTile: rows of Q and dO of the next block, and `sums`, the block's own rows of dQ.
template <class T, class Op>
inline FetchStreams coming_queries(const Backward& p, const BlockPlan& block, int64_t batch, int64_t head,
                                   int64_t vectors, const ComingRows& sums) {
  const int64_t row = block.row + block.rows, calls = fetches_of_gradients<Op>(p, block.rows, vectors);
  return {{coming_rows<T>(p.q, batch, head, row, block.rows, p.seqlen_q, p.head_dim), calls},
          {coming_rows<T>(p.grad_out, batch, head, row, block.rows, p.seqlen_q, p.head_dim_v), calls},
          {sums, calls}};
}

// To be fetched where there is a bias: rows of it of the next block, and the block's own of its gradient, or of `sums`,
// if any, to which a head's gradients are added.
template <class T, class Op, class C = typename Op::Compute>
inline FetchStreams coming_biases(const Backward& p, const BlockPlan& block, int64_t batch, int64_t head, int64_t key,
                                  int64_t keys, int64_t vectors, bool bias_grad, const C* sums) {
  const int64_t element = bias_bytes<T>(p);
  const auto rows_of = [&](const void* data, int64_t size, int64_t entry, int64_t step, int64_t rows) -> ComingRows {
    return {static_cast<const char*>(data) + entry * size, step * size, rows, keys * size};
  };
  const int64_t row = block.row + block.rows, calls = fetches_of_gradients<Op>(p, block.rows, vectors);
  const int64_t entry = block.row * p.seqlen_k + key;
  ComingRows biases, grads;
  if (has_bias_rows(p)) biases = coming_bias<T>(p, batch, head, row, min64(block.rows, p.seqlen_q - row), key, keys);
  if (bias_grad && sums != nullptr) grads = rows_of(sums, sizeof(C), entry, p.seqlen_k, block.rows);
  else if (bias_grad)
    grads = rows_of(p.dbias.data, element, (batch * p.heads_q + head) * p.seqlen_q * p.seqlen_k + entry, p.seqlen_k,
                    block.rows);
  return {{biases, calls}, {grads, calls}, {}};
}

// P and dS of one block of queries against the tile of keys in scratch, by GradientTile.
template <class Op, bool kBias>
inline void gradients_in_registers(const BackwardScratch<Op>& scratch, const Score<typename Op::Compute>& score,
                                   const BandWalk<typename Op::Compute>& walk, const BlockPlan& block, int64_t depth,
                                   int64_t depth_v, RowTerms<typename Op::Compute> terms,
                                   Rows<typename Op::Scalar> q_rows, Rows<typename Op::Scalar> grad_rows,
                                   const LaneBits* mask, bool bias_grad, FetchStreams* next) {
  using C = typename Op::Compute;
  using Scalar = typename Op::Scalar;
  Scalar* p = Op::kPack == 2 ? scratch.p_pairs : reinterpret_cast<Scalar*>(scratch.scores);
  Scalar* ds = Op::kPack == 2 ? scratch.ds_pairs : reinterpret_cast<Scalar*>(scratch.grad_scores);
  for (int64_t s = 0; s < block.segments; ++s) {
    const Segment& segment = block.segment[s];
    const int64_t row = segment.row - block.row, lane = segment.first * Simd<C>::kLanes;
    const int64_t packed = row / Op::kPack * kTile<C> + lane;
    for_tiles<kPairRows * kPairVectors, kPairVectors, Op::kPack>(
        segment.rows, segment.last - segment.first,
        GradientTile<Op, kBias>{
            {q_rows.data + row * q_rows.step, q_rows.step, scratch.k_tile + lane, kTile<C>},
            depth,
            {grad_rows.data + row * grad_rows.step, grad_rows.step, scratch.v_tile + lane, kTile<C>},
            depth_v,
            kBias ? score.scale : score.template product_factor<Op>(),
            terms.from(segment.row),
            bits_from(mask, row),
            segment.cut,
            walk.live_lanes(segment.row),
            segment.first,
            kBias ? scratch.bias + row * kTile<C> + lane : nullptr,
            bias_grad,
            p + packed,
            ds + packed,
            scratch.ds_rows + (row * kTile<C> + lane) / 2,
            next});
  }
}

// The scores of one block of queries against the tile of keys in scratch: fills scratch.scores with P and
// scratch.grad_scores with dS for the block's segments (and scratch.bias with d(bias), if bias_grad).
template <class T, class Op>
inline void score_block(const Backward& p, const BackwardScratch<Op>& scratch, const Score<typename Op::Compute>& score,
                        const BandWalk<typename Op::Compute>& walk, const BlockPlan& block, int64_t batch, int64_t head,
                        int64_t key, int64_t keys, RowTerms<typename Op::Compute> terms, bool need_ds, bool bias_grad,
                        const LaneBits* mask, Rows<typename Op::Scalar> q_rows, Rows<typename Op::Scalar> grad_rows) {
  using C = typename Op::Compute;
  using S = Simd<C>;
  const int64_t depth = (p.head_dim + Op::kPack - 1) / Op::kPack, depth_v = (p.head_dim_v + Op::kPack - 1) / Op::kPack;
  if (score.has_bias) bias_tile<C, T>(p, 2, batch, head, block.row, block.rows, key, keys, scratch.bias);
  if (score.dropout) dropout_tile<C>(p, 2, batch, head, block.row, block.rows, key, keys, scratch.keep);
  for (int64_t s = 0; s < block.segments; ++s) {
    const Segment& segment = block.segment[s];
    const int64_t row = segment.row - block.row, lane = segment.first * S::kLanes, at = row * kTile<C>;
    const int64_t vectors = segment.last - segment.first;
    gemm<typename Op::Product>(segment.rows, vectors, depth,
                               {q_rows.data + row * q_rows.step, q_rows.step, scratch.k_tile + lane, kTile<C>},
                               {scratch.scores + at + lane, kTile<C>, Epilogue::kStore, nullptr});
    if (need_ds)
      gemm<typename Op::Product>(
          segment.rows, vectors, depth_v,
          {grad_rows.data + row * grad_rows.step, grad_rows.step, scratch.v_tile + lane, kTile<C>},
          {scratch.grad_scores + at + lane, kTile<C>, Epilogue::kStore, nullptr});
    differentiate_scores<Op>(score, walk, segment, terms, scratch.bias + at, bias_grad, bits_from(mask, row),
                             score.dropout ? scratch.keep + at : nullptr, scratch.scores + at,
                             scratch.grad_scores + at);
  }
}

// scratch <- K^T and V^T of a tile of keys, with the scale, as far as it belongs there, in K^T.
template <class T, class Op>
inline void load_key_tile(const Backward& p, const BackwardScratch<Op>& scratch,
                          const Score<typename Op::Compute>& score, int64_t batch, int64_t head, int64_t key,
                          int64_t keys) {
  const int64_t depth = (p.head_dim + Op::kPack - 1) / Op::kPack;
  transpose_tile<Op>(operand_rows<Op, T>(p.k, batch, head, key, keys, p.head_dim, scratch.q_rows), keys, depth,
                     score.template operand_factor<Op>(), scratch.k_tile);
}
template <class T, class Op>
inline void load_value_tile(const Backward& p, const BackwardScratch<Op>& scratch, int64_t batch, int64_t head,
                            int64_t key, int64_t keys) {
  const int64_t depth = (p.head_dim_v + Op::kPack - 1) / Op::kPack;
  transpose_tile<Op>(operand_rows<Op, T>(p.v, batch, head, key, keys, p.head_dim_v, scratch.grad_rows), keys, depth, 1,
                     scratch.v_tile);
}

// use(pointer) to the bias's gradient, which has the bias's dtype.
template <class T, class Use>
inline void with_bias_grad(const Backward& p, const Use& use) {
  if (p.bias_dtype == DType::kFloat32) use(static_cast<float*>(p.dbias.data));
  else use(static_cast<T*>(p.dbias.data));
}

// The bias's gradient of a block, from scratch to the output, or added to a head's `sums` if there are any.
template <class T, class C>
inline void store_bias_grad(const Backward& p, const BlockPlan& block, int64_t batch, int64_t head, int64_t key,
                            int64_t keys, const C* tile, C* sums) {
  using S = Simd<C>;
  for (int64_t s = 0; s < block.segments; ++s) {
    const Segment& segment = block.segment[s];
    for (int64_t i = segment.row; i < segment.row + segment.rows; ++i)
      for (int64_t v = segment.first; v < segment.last; ++v) {
        const int64_t lane = v * S::kLanes;
        const int64_t index = i * p.seqlen_k + key + lane,
                      of_head = (batch * p.heads_q + head) * p.seqlen_q * p.seqlen_k;
        const auto value = S::load(tile + (i - block.row) * kTile<C> + lane);
        if (sums != nullptr) S::store_as(sums + index, S::load_as(sums + index, keys - lane) + value, keys - lane);
        else with_bias_grad<T>(p, [&](auto* dbias) { S::store_as(dbias + of_head + index, value, keys - lane); });
      }
  }
}

#if defined(__AVX512BF16__)
// P and dS of a segment in the two forms that the bfloat16 products read: pairs of rows, and dS also as plain rows.
inline void pack_segment(const Segment& segment, const float* p, const float* ds, PairDot::Scalar* p_pairs,
                         PairDot::Scalar* ds_pairs, PairDot::Scalar* ds_rows) {
  using S = Simd<float>;
  constexpr int64_t kStep = kTile<float>;
  for (int64_t i = 0; i < segment.rows; i += 2)
    for (int64_t v = segment.first; v < segment.last; ++v) {
      const int64_t at = i * kStep + v * S::kLanes, pair = i / 2 * kStep + v * S::kLanes;
      const bool single = i + 1 == segment.rows;
      const auto first = S::load(ds + at), second = single ? S::zero() : S::load(ds + at + kStep);
      store_probabilities<PairDot>(S::load(p + at), single ? S::zero() : S::load(p + at + kStep), p_pairs + pair);
      store_probabilities<PairDot>(first, second, ds_pairs + pair);
      PairDot::Scalar* target = ds_rows + at / 2;
      store_rows(first, second, target, single ? nullptr : target + kStep / 2);
    }
}
#endif

// Where a head's dQ is summed: the output itself, or a buffer of the compute type with rows of whole vectors. Or both:
// an output of 16-bit elements has room for the sums of half of its rows.
template <class C>
struct QueryGrad {
  C* data;            // of the rows from `split` on
  int64_t step;       // from row to row
  int64_t head_step;  // from head to head
  int64_t split = 0;
  C* first = nullptr;  // of the rows before it
  int64_t first_head_step = 0;

  C* row(int64_t head, int64_t i) const {
    return i < split ? first + head * first_head_step + i * step : data + head * head_step + (i - split) * step;
  }
};

// All keys of tiles first, first + stride, ... for the query heads [head, head + heads) of one batch entry.
template <class T, class Op>
void backward_heads(const Backward& p, const BackwardScratch<Op>& scratch, int64_t batch, int64_t head, int64_t heads,
                    int64_t first_tile, int64_t tile_stride, RowTerms<typename Op::Compute> terms,
                    QueryGrad<typename Op::Compute> dq, bool bias_grad, typename Op::Compute* bias_grads,
                    KeptRows<typename Op::Scalar>* kept) {
  using C = typename Op::Compute;
  using S = Simd<C>;
  using Scalar = typename Op::Scalar;
  const Score<C> score(p);
  const Wanted wanted(p);
  const int64_t group_k = p.heads_q / p.heads_k, group_v = p.heads_q / p.heads_v;
  const int64_t columns = (p.head_dim + S::kLanes - 1) / S::kLanes;
  const int64_t depth = (p.head_dim + Op::kPack - 1) / Op::kPack, depth_v = (p.head_dim_v + Op::kPack - 1) / Op::kPack;
  // Every tile meets all queries, what is given of their gradients, and the sums of the others.
  const int64_t given_bytes = (p.head_dim + p.head_dim_v) * static_cast<int64_t>(sizeof(T));
  const int64_t sums_bytes = wanted.dq ? p.head_dim * static_cast<int64_t>(sizeof(C)) : 0;
  // With a bias that pays in pairs only: other products are faster one by one.
  const bool biased = Op::kPack == 2 && score.has_bias && score.cap == C(0) && !score.dropout;
  const bool fetches_bias = biased && p.seqlen_q * p.seqlen_k * static_cast<int64_t>(sizeof(C)) >= kFarBytes;
  const bool fetches = score.plain() && p.seqlen_q * (given_bytes + sums_bytes) >= kFarBytes;
  C scale[kTile<C>];  // of dK: dS is the gradient of scores that are scaled already
  for (C& lane : scale) lane = score.signed_scale;
  const bool need_ds = wanted.dq || wanted.dk || bias_grad;
  // A gradient of the bias that is stored would have to be set to 0.
  const bool leaves_out = score.has_bias && !(bias_grad && bias_grads == nullptr);

  for (int64_t key = first_tile * kTile<C>; key < p.seqlen_k; key += tile_stride * kTile<C>) {
    const int64_t keys = min64(kTile<C>, p.seqlen_k - key);
    const int64_t vectors = (keys + S::kLanes - 1) / S::kLanes;
    Rows<Scalar> k_rows{};
    Epilogue dk_epilogue = Epilogue::kStore, dv_epilogue = dk_epilogue;  // until the first block
    for (int64_t h = head; h < head + heads; ++h) {
      const int64_t head_k = h / group_k, head_v = h / group_v;
      if (h == head || h % group_k == 0) {
        load_key_tile<T, Op>(p, scratch, score, batch, head_k, key, keys);
        if (wanted.dq) {
          if constexpr (Op::kPack == 1) {
            k_rows = operand_rows<Op, T>(p.k, batch, head_k, key, keys, p.head_dim, scratch.k_rows, true);
          } else {
            const int64_t step = columns * S::kLanes;
            interleave_rows(at<T>(p.k, batch, head_k, key), p.k.stride[2], p.k.stride[3], keys, p.head_dim,
                            scratch.k_rows, step);
            k_rows = {scratch.k_rows, step};
          }
        }
        dk_epilogue = Epilogue::kStore;
      }
      if (h == head || h % group_v == 0) {
        load_value_tile<T, Op>(p, scratch, batch, head_v, key, keys);
        dv_epilogue = Epilogue::kStore;
      }

      BandWalk<C> walk(p.band.transposed(), key, keys, {0, p.seqlen_q}, kBlock<Op>);
      BlockPlan block;
      while (walk.next(block)) {
        if (block.segments == 0 || (leaves_out && excludes_all<T>(p, batch, h, block.row, block.rows, key, keys)))
          continue;
        const LaneBits* mask = nullptr;
        if (score.has_mask && !apply_mask<C>(p, 2, batch, h, key, keys, scratch.mask, block, mask)) continue;
        Rows<Scalar> q_rows, grad_rows;
        KeptRows<Scalar>* of_head = kept == nullptr ? nullptr : kept + 2 * (h - head);
        const auto copied_q = [&](Scalar* space) {
          return copied_rows<T, Op>(p.q, p.heads_q, batch, h, block.row, block.rows, p.seqlen_q, p.head_dim, space,
                                    of_head);
        };
        const auto copied_grad = [&](Scalar* space) {
          return copied_rows<T, Op>(p.grad_out, p.heads_q, batch, h, block.row, block.rows, p.seqlen_q, p.head_dim_v,
                                    space, of_head == nullptr ? nullptr : of_head + 1);
        };
        if constexpr (kConverts<T, Op>) {
          q_rows = copied_q(scratch.q_rows);
          grad_rows = copied_grad(scratch.grad_rows);
        } else {
          q_rows = operand_rows<Op, T>(p.q, batch, h, block.row, block.rows, p.head_dim, scratch.q_rows);
          grad_rows = operand_rows<Op, T>(p.grad_out, batch, h, block.row, block.rows, p.head_dim_v, scratch.grad_rows);
        }
        const RowTerms<C> row_terms = terms.from((batch * p.heads_q + h) * p.seqlen_q);
        FetchStreams coming;
        if (fetches) {
          ComingRows sums;
          if (wanted.dq)
            sums = {reinterpret_cast<const char*>(dq.row(h - head, block.row)),
                    dq.step * static_cast<int64_t>(sizeof(C)), block.rows, sums_bytes};
          coming = coming_queries<T, Op>(p, block, batch, h, vectors, sums);
        }
        const int64_t bias_head = p.bias_size[1] == p.heads_q ? h - head : 0;
        C* const bias_sums = bias_grads == nullptr ? nullptr : bias_grads + bias_head * p.seqlen_q * p.seqlen_k;
        const auto by_tiles = [&]<bool kBias>() {
          gradients_in_registers<Op, kBias>(scratch, score, walk, block, depth, need_ds ? depth_v : 0, row_terms,
                                            q_rows, grad_rows, mask, bias_grad,
                                            fetches || fetches_bias ? &coming : nullptr);
        };
        if (score.plain()) {
          by_tiles.template operator()<false>();
        } else if (biased) {
          if constexpr (Op::kPack == 2) {
            bias_tile<C, T>(p, 2, batch, h, block.row, block.rows, key, keys, scratch.bias);
            if (fetches_bias)
              coming = coming_biases<T, Op>(p, block, batch, h, key, keys, vectors, bias_grad, bias_sums);
            by_tiles.template operator()<true>();
          }
        } else {
          score_block<T, Op>(p, scratch, score, walk, block, batch, h, key, keys, row_terms, need_ds, bias_grad, mask,
                             q_rows, grad_rows);
        }
        if (bias_grad) store_bias_grad<T>(p, block, batch, h, key, keys, scratch.bias, bias_sums);

        // The same rows as operand A of dV and dK, where the queries are summed over.
        Rows<Scalar> q_sum = q_rows, grad_sum = grad_rows;
        const Scalar *probabilities, *ds, *ds_rows;
        int64_t ds_step = kTile<C>;
        if constexpr (Op::kPack == 1) {
          probabilities = scratch.scores;
          ds = ds_rows = scratch.grad_scores;
        } else {
#if defined(__AVX512BF16__)
          for (int64_t s = 0; s < block.segments && !score.plain() && !biased; ++s) {
            const int64_t at = (block.segment[s].row - block.row) * kTile<C>;
            pack_segment(block.segment[s], scratch.scores + at, scratch.grad_scores + at, scratch.p_pairs + at / 2,
                         scratch.ds_pairs + at / 2, scratch.ds_rows + at / 2);
          }
          if (wanted.dk) q_sum = copied_q(scratch.q_pairs);
          if (wanted.dv) grad_sum = copied_grad(scratch.grad_pairs);
#endif
          probabilities = scratch.p_pairs;
          ds = scratch.ds_pairs;
          ds_rows = scratch.ds_rows;
          ds_step = kTile<C> / 2;
        }

        if (wanted.dv)
          gemm_over_block<typename Op::Product>(p.head_dim_v, vectors, block,
                                                {grad_sum.data, grad_sum.step, probabilities, kTile<C>},
                                                {scratch.dv, kTile<C>, dv_epilogue, nullptr});
        if (wanted.dk)
          gemm_over_block<typename Op::Product>(p.head_dim, vectors, block, {q_sum.data, q_sum.step, ds, kTile<C>},
                                                {scratch.dk, kTile<C>, dk_epilogue, nullptr});
        dk_epilogue = dv_epilogue = Epilogue::kAdd;
        for (int64_t s = 0; s < block.segments && wanted.dq; ++s) {
          const Segment& segment = block.segment[s];
          const int64_t row = segment.row - block.row, lane = segment.first * S::kLanes;
          // Lanes past the last key hold nothing of meaning: sum over real keys only.
          const int64_t live = min64(segment.last * S::kLanes, keys) - lane;
          if constexpr (Op::kPack == 2) {
            if (live % 2 != 0)  // the odd key's partner is a zero row of K, but dS must be finite there
              for (int64_t i = row; i < row + segment.rows; ++i)
                reinterpret_cast<uint16_t*>(const_cast<Scalar*>(ds_rows) + i * ds_step)[lane + live] = 0;
          }
          for (int64_t i = segment.row, last = i + segment.rows; i < last;) {
            const int64_t end = i < dq.split ? min64(last, dq.split) : last;
            gemm<typename Op::Product>(end - i, columns, (live + Op::kPack - 1) / Op::kPack,
                                       {ds_rows + (i - block.row) * ds_step + lane / Op::kPack, ds_step,
                                        k_rows.data + lane / Op::kPack * k_rows.step, k_rows.step},
                                       {dq.row(h - head, i), dq.step, Epilogue::kAdd, nullptr});
            i = end;
          }
        }
      }

      // Keys that no query was left for.
      if (dk_epilogue == Epilogue::kStore) std::memset(scratch.dk, 0, p.head_dim * kTile<C> * sizeof(C));
      if (dv_epilogue == Epilogue::kStore) std::memset(scratch.dv, 0, p.head_dim_v * kTile<C> * sizeof(C));
      if (wanted.dk && (h + 1) % group_k == 0)
        store_transposed<C, T>(scratch.dk, keys, p.head_dim, scale, at<T>(p.dk, batch, head_k, key), p.dk.stride[2]);
      if (wanted.dv && (h + 1) % group_v == 0)
        store_transposed<C, T>(scratch.dv, keys, p.head_dim_v, nullptr, at<T>(p.dv, batch, head_v, key),
                               p.dv.stride[2]);
    }
  }
}

// delta and shift of `rows` rows of a head, a vector of rows at a time.
template <class T, class C>
inline void compute_terms(const Backward& p, bool plain, int64_t batch, int64_t head, int64_t row, int64_t rows,
                          RowTerms<C> terms) {
  using S = Simd<C>;
  using V = typename S::V;
  const int64_t base = (batch * p.heads_q + head) * p.seqlen_q, end = row + rows;
  const int64_t grad_stride = p.grad_out.stride[3], out_stride = p.out.stride[3];
  for (; row < end; row += S::kLanes) {
    const int64_t count = min64(S::kLanes, end - row);
    V product[S::kLanes] = {};
    for (int64_t r = 0; r < count; ++r) {
      const T* grad = at<T>(p.grad_out, batch, head, row + r);
      const T* out = at<T>(p.out, batch, head, row + r);
      if (grad_stride == 1 && out_stride == 1) {
        for (int64_t d = 0; d < p.head_dim_v; d += S::kLanes)
          product[r] =
              S::fma(S::load_as(grad + d, p.head_dim_v - d), S::load_as(out + d, p.head_dim_v - d), product[r]);
      } else {
        for (int64_t d = 0; d < p.head_dim_v; ++d)
          product[r][0] += to_compute<C>(grad[d * grad_stride]) * to_compute<C>(out[d * out_stride]);
      }
    }
    const auto given = [&](const void* vector) {
      return S::load_as(static_cast<const C*>(vector) + base + row, count);
    };
    const V lse = given(p.lse), scaled = lse * S::set1(plain ? -kLog2E<C> : C(-1));
    const V delta = S::sum_each(product) - (p.grad_lse == nullptr ? S::zero() : given(p.grad_lse));
    S::store_as(terms.shift + base + row, lse == S::set1(-kInfinity<C>) ? lse : scaled, count);
    S::store_as(terms.delta + base + row, delta, count);
  }
}

// From this log-sum-exp on its rounding, and that of scores which the forward pass has summed in another order, is felt
// in P, which 16-bit results see later. Of a row of finfo.min alone, it has lost the number of keys.
template <class T, class C>
inline constexpr C kLargeLse = std::is_same_v<T, C> ? C(64) : C(1024);

template <class T, class C>
inline bool has_large_lse(const C* lse, int64_t rows) {
  bool large = false;
  for (int64_t i = 0; i < rows; ++i) {
    const C magnitude = lse[i] < C(0) ? -lse[i] : lse[i];
    large |= (magnitude >= kLargeLse<T, C>)&(magnitude < kInfinity<C>);
  }
  return large;
}

// The scores of a segment that has been multiplied, as P will be made of them, into the lanes' maxima and sums of their
// exponentials: of row `row` and on.
template <class Op, bool kPlain, class C = typename Op::Compute>
inline void add_to_sums(const Score<C>& score, const BandWalk<C>& walk, const Segment& segment, int64_t keys,
                        const C* bias, const LaneBits* mask, const C* scores, C* largest, C* sum) {
  using S = Simd<C>;
  using V = typename S::V;
  const C factor = kPlain ? score.template product_factor<Op>() : C(1);
  const V scale = S::set1(score.scale), dead = S::set1(-kInfinity<C>), unit = S::set1(kPlain ? C(1) : kLog2E<C>);
  const Exponential<Op, kPlain, Precision::kFull> exponential(factor);
  const Range live = walk.live_lanes(segment.row);
  for (int64_t i = 0; i < segment.rows; ++i) {
    V m = S::load(largest + i * S::kLanes), total = S::load(sum + i * S::kLanes);
    for (int64_t v = segment.first; v < segment.last; ++v) {
      const int64_t at = i * kTile<C> + v * S::kLanes;
      V x = S::load(scores + at);
      if constexpr (!kPlain) x = finish_score(score, x, scale, bias + at);
      if (mask != nullptr) x = S::select(mask[i] >> (v * S::kLanes), x, dead);
      if (segment.cut) x = LaneMask<C>({live.begin + i, live.end + i}, v).select(x, dead);
      if ((v + 1) * S::kLanes > keys) x = LaneMask<C>({0, keys}, v).select(x, dead);
      const V old = m;
      m = S::max(S::product(x, S::set1(factor)), old);
      const V shift = m == dead ? S::zero() : m;
      total = S::fma(total, S::exp2((old - shift) * unit), exponential(x, -shift));
    }
    S::store(largest + i * S::kLanes, m);
    S::store(sum + i * S::kLanes, total);
  }
}

// shift and norm of rows whose lse is large, from the very scores that their P is made of.
template <class T, class Op, class C = typename Op::Compute>
[[gnu::noinline]] void normalise_again(const Backward& p, const BackwardScratch<Op>& scratch, int64_t batch,
                                       int64_t head, int64_t row, int64_t rows, RowTerms<C> terms) {
  using S = Simd<C>;
  using V = typename S::V;
  const Score<C> score(p);
  const int64_t depth = (p.head_dim + Op::kPack - 1) / Op::kPack;
  C *largest = scratch.grad_scores, *sum = largest + rows * S::kLanes;
  for (int64_t i = 0; i < rows * S::kLanes; ++i) largest[i] = -kInfinity<C>, sum[i] = C(0);
  for (int64_t key = 0; key < p.seqlen_k; key += kTile<C>) {
    const int64_t keys = min64(kTile<C>, p.seqlen_k - key);
    load_key_tile<T, Op>(p, scratch, score, batch, head / (p.heads_q / p.heads_k), key, keys);
    BandWalk<C> walk(p.band.transposed(), key, keys, {row, row + rows}, kBlock<Op>);
    BlockPlan block;
    while (walk.next(block)) {
      if (block.segments == 0 || (score.has_bias && excludes_all<T>(p, batch, head, block.row, block.rows, key, keys)))
        continue;
      const LaneBits* mask = nullptr;
      if (score.has_mask && !apply_mask<C>(p, 2, batch, head, key, keys, scratch.mask, block, mask)) continue;
      if (score.has_bias) bias_tile<C, T>(p, 2, batch, head, block.row, block.rows, key, keys, scratch.bias);
      const auto q_rows = operand_rows<Op, T>(p.q, batch, head, block.row, block.rows, p.head_dim, scratch.q_rows);
      for (int64_t s = 0; s < block.segments; ++s) {
        const Segment& segment = block.segment[s];
        const int64_t first = segment.row - block.row, lane = segment.first * S::kLanes, at = first * kTile<C>;
        gemm<typename Op::Product>(segment.rows, segment.last - segment.first, depth,
                                   {q_rows.data + first * q_rows.step, q_rows.step, scratch.k_tile + lane, kTile<C>},
                                   {scratch.scores + at + lane, kTile<C>, Epilogue::kStore, nullptr});
        const int64_t lanes = (segment.row - row) * S::kLanes;
        const auto add = score.plain() ? add_to_sums<Op, true> : add_to_sums<Op, false>;
        add(score, walk, segment, keys, scratch.bias + at, bits_from(mask, first), scratch.scores + at, largest + lanes,
            sum + lanes);
      }
    }
  }
  const V unit = S::set1(score.plain() ? C(1) : kLog2E<C>);
  for (int64_t i = 0; i < rows; ++i) {
    const V of_lanes = S::load(largest + i * S::kLanes), m = S::max_all(of_lanes);
    const V shift = m == S::set1(-kInfinity<C>) ? S::zero() : m;
    const C total = S::sum(S::load(sum + i * S::kLanes) * S::exp2((of_lanes - shift) * unit));
    terms.shift[i] = -m[0] < kInfinity<C> ? -m[0] : -kInfinity<C>;
    terms.norm[i] = total == C(0) ? C(1) : C(1) / total;
  }
}

// All terms of `rows` rows of a head.
template <class T, class Op, class C = typename Op::Compute>
inline void make_terms(const Backward& p, const BackwardScratch<Op>& scratch, int64_t batch, int64_t head, int64_t row,
                       int64_t rows, RowTerms<C> terms) {
  compute_terms<T>(p, Score<C>(p).plain(), batch, head, row, rows, terms);
  if (terms.norm == nullptr) return;
  constexpr int64_t kMost = kBlock<Op> * kTile<C> / (2 * Simd<C>::kLanes);  // rows that scratch has room for
  for (const int64_t end = row + rows; row < end; row += kMost) {
    const int64_t index = (batch * p.heads_q + head) * p.seqlen_q + row, count = min64(kMost, end - row);
    const RowTerms<C> some = terms.from(index);
    if (has_large_lse<T>(static_cast<const C*>(p.lse) + index, count))
      normalise_again<T>(p, scratch, batch, head, row, count, some);
    else
      for (int64_t i = 0; i < count; ++i) some.norm[i] = C(1);
  }
}

// d(bias) in its own sweep: for each entry of the (broadcast) bias, dS summed over the dimensions it is broadcast
// along, in a fixed order. Costs the two products of dS once more, but no memory beyond a tile.
template <class T, class Op>
void backward_bias(const Backward& p, const Runtime& runtime, RowTerms<typename Op::Compute> terms) {
  using C = typename Op::Compute;
  using S = Simd<C>;
  constexpr int64_t kSpan = 384;  // queries of a task
  const bool per_query = p.bias_size[2] != 1, per_key = p.bias_size[3] != 1;
  const int64_t spans = per_query ? (p.seqlen_q + kSpan - 1) / kSpan : 1;
  const int64_t tiles = per_key ? (p.seqlen_k + kTile<C> - 1) / kTile<C> : 1;
  const int64_t scratch_bytes = BackwardScratch<Op>(nullptr, p).bytes;
  const int64_t sums = (per_query ? kSpan : 1) * kTile<C>;
  const auto body = [&](int64_t task, void* memory, int64_t) {
    const BackwardScratch<Op> scratch(memory, p);
    C* sum = reinterpret_cast<C*>(static_cast<char*>(memory) + scratch_bytes);  // [query][lane]
    for (int64_t i = 0; i < sums; ++i) sum[i] = C(0);
    const Score<C> score(p);
    const int64_t tile = task % tiles, span = task / tiles % spans, bias_index = task / tiles / spans;
    const int64_t bias_head = bias_index % p.bias_size[1], bias_batch = bias_index / p.bias_size[1];
    const Range queries = per_query ? Range{span * kSpan, min64((span + 1) * kSpan, p.seqlen_q)} : Range{0, p.seqlen_q};
    const Range all_keys =
        per_key ? Range{tile * kTile<C>, min64((tile + 1) * kTile<C>, p.seqlen_k)} : Range{0, p.seqlen_k};

    for (int64_t batch = 0; batch < p.batch; ++batch) {
      if (p.bias_size[0] != 1 && batch != bias_batch) continue;
      for (int64_t head = 0; head < p.heads_q; ++head) {
        if (p.bias_size[1] != 1 && head != bias_head) continue;
        for (int64_t key = all_keys.begin; key < all_keys.end; key += kTile<C>) {
          const int64_t keys = min64(kTile<C>, all_keys.end - key);
          load_key_tile<T, Op>(p, scratch, score, batch, head / (p.heads_q / p.heads_k), key, keys);
          load_value_tile<T, Op>(p, scratch, batch, head / (p.heads_q / p.heads_v), key, keys);
          BandWalk<C> walk(p.band.transposed(), key, keys, queries, kBlock<Op>);
          BlockPlan block;
          while (walk.next(block)) {
            if (block.segments == 0 || excludes_all<T>(p, batch, head, block.row, block.rows, key, keys)) continue;
            const auto q_rows =
                operand_rows<Op, T>(p.q, batch, head, block.row, block.rows, p.head_dim, scratch.q_rows);
            const auto grad_rows =
                operand_rows<Op, T>(p.grad_out, batch, head, block.row, block.rows, p.head_dim_v, scratch.grad_rows);
            score_block<T, Op>(p, scratch, score, walk, block, batch, head, key, keys,
                               terms.from((batch * p.heads_q + head) * p.seqlen_q), true, true, nullptr, q_rows,
                               grad_rows);
            for (int64_t s = 0; s < block.segments; ++s) {
              const Segment& segment = block.segment[s];
              for (int64_t i = segment.row; i < segment.row + segment.rows; ++i)
                for (int64_t v = segment.first; v < segment.last; ++v) {
                  C* total = sum + (per_query ? i - queries.begin : 0) * kTile<C> + v * S::kLanes;
                  auto ds = S::load(scratch.bias + (i - block.row) * kTile<C> + v * S::kLanes);
                  if ((v + 1) * S::kLanes > keys)  // lanes past the last key hold nothing of meaning
                    ds = LaneMask<C>({0, keys}, v).select(ds, S::zero());
                  S::store(total, S::load(total) + ds);
                }
            }
          }
        }
      }
    }

    const int64_t rows = per_query ? queries.end - queries.begin : 1;
    const int64_t columns = per_key ? all_keys.end - all_keys.begin : 1;
    for (int64_t i = 0; i < rows; ++i) {
      if (!per_key) {
        C total = C(0);
        for (int64_t lane = 0; lane < kTile<C>; ++lane) total += sum[i * kTile<C> + lane];
        sum[i * kTile<C>] = total;
      }
      const int64_t row = bias_index * p.bias_size[2] + (per_query ? queries.begin + i : 0);
      const int64_t index = row * p.bias_size[3] + (per_key ? all_keys.begin : 0);
      with_bias_grad<T>(p, [&]<class Bias>(Bias* dbias) {
        for (int64_t j = 0; j < columns; ++j) dbias[index + j] = from_compute<Bias>(sum[i * kTile<C> + j]);
      });
    }
  };
  run_tasks(p, runtime, p.bias_size[0] * p.bias_size[1] * spans * tiles,
            scratch_bytes + sums * static_cast<int64_t>(sizeof(C)), body);
}

// d(bias) of the sums that tasks have made, group after group.
template <class T, class C>
void add_bias_grads(const Backward& p, const Runtime& runtime, const BiasGradPlan<C>& plan, const C* sums) {
  using S = Simd<C>;
  constexpr int64_t kSpan = 1 << 14;
  const int64_t spans = (plan.size + kSpan - 1) / kSpan;
  run_tasks(p, runtime, plan.groups * spans, 0, [&](int64_t task, void*, int64_t) {
    const int64_t group = task / spans, first = task % spans * kSpan, end = min64(plan.size, first + kSpan);
    const C* of_group = sums + group * plan.tasks * plan.size;
    with_bias_grad<T>(p, [&](auto* dbias) {
      for (int64_t i = first; i < end; i += S::kLanes) {
        auto total = S::load_as(of_group + i, end - i);
        for (int64_t part = 1; part < plan.tasks; ++part) total += S::load_as(of_group + part * plan.size + i, end - i);
        S::store_as(dbias + group * plan.size + i, total, end - i);
      }
    });
  });
}

// Writes rows of a dQ buffer, scaled, to the output, which may be the buffer.
template <class T, class C>
inline void store_query_grad(const Backward& p, int64_t batch, int64_t head, int64_t row, int64_t rows, const C* source,
                             int64_t step) {
  using S = Simd<C>;
  const auto scale = S::set1(static_cast<C>(p.softmax_scale));
  for (int64_t i = 0; i < rows; ++i) {
    T* target = at<T>(p.dq, batch, head, row + i);
    for (int64_t d = 0; d < p.head_dim; d += S::kLanes)
      S::store_as(target + d, S::load(source + i * step + d) * scale, p.head_dim - d);
  }
}

template <class T, class Op>
void backward(const Backward& p, const Runtime& runtime) {
  using C = typename Op::Compute;
  const Wanted wanted(p);
  const int64_t all_heads = p.batch * p.heads_q;
  if (all_heads == 0) return;  // nothing that a gradient could come from: the caller has filled with zeros
  const int64_t all_rows = all_heads * p.seqlen_q;
  const Buffer<C> shift(all_rows), delta(all_rows);
  const Buffer<C> norm(has_large_lse<T>(static_cast<const C*>(p.lse), all_rows) ? all_rows : 0);
  const RowTerms<C> terms{shift.data(), delta.data(), norm.data()};
  const BackwardScratch<Op> sizes(nullptr, p);
  const int64_t unit = heads_of_unit(p), units = all_heads / unit;
  const int64_t tiles = max64(1, (p.seqlen_k + kTile<C> - 1) / kTile<C>);
  const bool bias_has_compute_type = p.bias_dtype == DType::kFloat32 ? std::is_same_v<C, float> : std::is_same_v<T, C>;
  const BiasGradPlan<C> bias_plan(p, runtime.num_threads, bias_has_compute_type);
  const bool bias_apart = bias_plan.way == bias_plan.kApart;
  const bool bias_sums = bias_plan.way == bias_plan.kAdded;
  // Whole units as long as every thread gets one; what is left is split by key tiles.
  const int64_t left = tiles == 1 || bias_sums ? 0 : units % runtime.num_threads, whole = units - left;
  const int64_t chunks = left == 0 ? 1 : min64(tiles, (runtime.num_threads + left - 1) / left);

  // A task that has a head to itself makes its terms; the others' come first.
  constexpr int64_t kRows = 512;
  const int64_t pieces = (p.seqlen_q + kRows - 1) / kRows;
  const int64_t first_head = bias_apart ? 0 : whole * unit;
  const int64_t terms_bytes = norm.data() == nullptr ? 0 : sizes.bytes;
  run_tasks(p, runtime, (all_heads - first_head) * pieces, terms_bytes, [&](int64_t task, void* memory, int64_t) {
    const BackwardScratch<Op> scratch(memory, p);
    const int64_t head = first_head + task / pieces, row = task % pieces * kRows;
    make_terms<T>(p, scratch, head / p.heads_q, head % p.heads_q, row, min64(kRows, p.seqlen_q - row), terms);
  });
  if (bias_apart) backward_bias<T, Op>(p, runtime, terms);
  if (bias_plan.way == bias_plan.kStored &&
      (p.band.left < kUnbounded || p.band.right < kUnbounded)) {  // the tiles leave out what lies outside the band
    const int64_t bytes = p.seqlen_q * p.seqlen_k * bias_bytes<T>(p);
    run_tasks(p, runtime, all_heads, 0, [&](int64_t head, void*, int64_t) {
      std::memset(static_cast<char*>(p.dbias.data) + head * bytes, 0, static_cast<size_t>(bytes));
    });
  }
  if (!wanted.dq && !wanted.dk && !wanted.dv) return;

  const int64_t step = round_up(p.head_dim, Simd<C>::kLanes), head_step = p.seqlen_q * step;
  const bool direct = std::is_same_v<T, C> && p.head_dim % Simd<C>::kLanes == 0;
  const bool split_direct = direct && chunks == 1;
  // A worker's dQ, if it isn't the output itself: in its scratch, as kept rows are, or too large to stay there.
  constexpr int64_t kScratchSums = 1 << 18;
  const int64_t sums = wanted.dq && !direct && whole > 0 ? unit * head_step : 0;
  const bool large = sums > kScratchSums;
  // The rows that the output has room for, where a head's rows lie one after the other.
  const int64_t split = large && sizeof(T) == 2 && sizeof(C) == 4 && step == p.head_dim && p.dq.stride[1] % 2 == 0 &&
                                p.dq.stride[2] == p.head_dim
                            ? p.seqlen_q / 2
                            : 0;
  const int64_t large_step = head_step - split * step;
  const Buffer<C> large_sums(large ? min64(runtime.num_threads, whole) * unit * large_step : 0);
  const Buffer<C> parts(wanted.dq && !split_direct ? left * chunks * unit * head_step : 0);

  const Buffer<C> bias_grads(bias_sums && !bias_plan.in_output() ? bias_plan.groups * bias_plan.tasks * bias_plan.size
                                                                 : 0);
  const int64_t tasks = bias_sums ? bias_plan.groups * bias_plan.tasks : whole + left * chunks;
  // Of q and of grad_out, where the queries are walked more than once.
  const int64_t copies = tiles > 1 && (kConverts<T, Op> || Op::kPack == 2) ? 2 * unit : 0;
  const int64_t widest = round_up(max64(p.head_dim, p.head_dim_v), Simd<C>::kLanes);
  const KeptByWorker<typename Op::Scalar> kept(min64(runtime.num_threads, tasks), copies,
                                               (p.seqlen_q + Op::kPack - 1) / Op::kPack, widest);
  const int64_t scratch_bytes = sizes.bytes + kept.bytes() + (large ? 0 : sums * static_cast<int64_t>(sizeof(C)));
  const auto body = [&](int64_t task, void* memory, int64_t worker, C* grads_of_bias) {
    const BackwardScratch<Op> scratch(memory, p);
    char* kept_memory = static_cast<char*>(memory) + sizes.bytes;
    const bool is_whole = task < whole;
    const int64_t index = is_whole ? task : whole + (task - whole) / chunks,
                  chunk = is_whole ? 0 : (task - whole) % chunks;
    const int64_t batch = index * unit / p.heads_q, head = index * unit % p.heads_q;
    QueryGrad<C> dq{nullptr, step, head_step};
    if (is_whole && !bias_apart)
      for (int64_t h = head; h < head + unit; ++h) make_terms<T>(p, scratch, batch, h, 0, p.seqlen_q, terms);
    const bool in_place = is_whole ? direct : split_direct;
    if (wanted.dq && p.head_dim > 0) {
      C* output = reinterpret_cast<C*>(at<T>(p.dq, batch, head));
      if (in_place) dq = {output, p.dq.stride[2], p.dq.stride[1]};
      else if (!is_whole) dq.data = parts.data() + (task - whole) * unit * head_step;
      else if (!large) dq.data = reinterpret_cast<C*>(kept_memory + kept.bytes());
      else dq = {large_sums.data() + worker * unit * large_step, step, large_step, split, output, p.dq.stride[1] / 2};
      for (int64_t h = 0; h < unit; ++h)
        for (int64_t i = 0; i < p.seqlen_q; ++i)
          std::memset(dq.row(h, i), 0, static_cast<size_t>(in_place ? p.head_dim : step) * sizeof(C));
    }
    backward_heads<T, Op>(p, scratch, batch, head, unit, chunk, is_whole ? 1 : chunks, terms, dq,
                          bias_sums || bias_plan.way == bias_plan.kStored, grads_of_bias, kept.of(worker, kept_memory));
    if (wanted.dq && (is_whole || in_place))
      for (int64_t h = 0; h < unit; ++h) {
        // In this order: row after row, the output takes less room than its sums before it.
        store_query_grad<T>(p, batch, head + h, 0, dq.split, dq.row(h, 0), dq.step);
        store_query_grad<T>(p, batch, head + h, dq.split, p.seqlen_q - dq.split, dq.row(h, dq.split), dq.step);
      }
  };
  run_tasks(p, runtime, tasks, scratch_bytes, [&](int64_t task, void* memory, int64_t worker) {
    if (!bias_sums) return body(task, memory, worker, nullptr);
    const int64_t group = task / bias_plan.tasks, part = task % bias_plan.tasks;
    C* grads = bias_plan.in_output() ? static_cast<C*>(p.dbias.data) + group * bias_plan.size
                                     : bias_grads.data() + task * bias_plan.size;
    std::memset(grads, 0, static_cast<size_t>(bias_plan.size) * sizeof(C));
    const int64_t end = bias_plan.members * (part + 1) / bias_plan.tasks;
    for (int64_t member = bias_plan.members * part / bias_plan.tasks; member < end; ++member)
      body(bias_plan.unit(group, member), memory, worker, grads);
  });
  if (bias_grads.data() != nullptr) add_bias_grads<T>(p, runtime, bias_plan, bias_grads.data());

  if (wanted.dq && left > 0 && !split_direct)
    run_tasks(p, runtime, left * unit * pieces, 0, [&](int64_t task, void*, int64_t) {
      using S = Simd<C>;
      const int64_t piece = task % pieces, h = task / pieces % unit, index = task / pieces / unit;
      const int64_t row = piece * kRows, rows = min64(kRows, p.seqlen_q - row);
      C* first = parts.data() + (index * chunks * unit + h) * head_step + row * step;
      for (int64_t chunk = 1; chunk < chunks; ++chunk)
        for (int64_t i = 0; i < rows * step; i += S::kLanes)
          S::store(first + i, S::load(first + i) + S::load(first + chunk * unit * head_step + i));
      const int64_t q_head = (whole + index) * unit + h;
      store_query_grad<T>(p, q_head / p.heads_q, q_head % p.heads_q, row, rows, first, step);
    });
}

}  // namespace
}  // namespace attnkern::cpu
