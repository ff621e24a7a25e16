// P and dS from two products, for one block of queries against a tile of keys; packed as the next products read them.
#pragma once

#include "forward.h"

namespace attnkern::cpu {
namespace {

// Which products are wanted.
struct Wanted {
  explicit Wanted(const Backward& p) : dq(p.dq.data != nullptr), dk(p.dk.data != nullptr), dv(p.dv.data != nullptr) {}
  bool dq, dk, dv;
};

// The entries of a head in a table of distances.
inline int64_t distances(const Attention& p) { return p.seqlen_q + p.seqlen_k - 1; }

// How the gradient of a bias is computed. A bias with all queries and keys gets it in the main sweep: KV groups that
// share their bias form a bias group, whose members add in turn to the sums of one task, or of several tasks with sums
// of their own. A bias that is broadcast along queries or keys takes a sweep of its own (backward_bias), and so does
// one whose sums are too large to go through memory for every member or would keep threads idle. A table of distances
// is small: every task has sums of its own.
template <class C>
struct BiasGradPlan {
  enum Way {
    kNone,
    kStored,  // in the main sweep: every entry has one score
    kAdded,   // in the main sweep, to sums
    kByTask,  // in the main sweep, to sums of each task's own: a table of distances
    kApart,   // in a sweep of its own
  };
  static constexpr int64_t kMostBytes = 8 << 20;  // of a group

  BiasGradPlan(const Backward& p, int64_t threads, bool same_type) {
    if (p.dbias.data == nullptr) return;
    if (p.relative) {
      way = kByTask;
      size = (p.bias_size[1] == p.heads_q ? heads_of_kv_group(p) : 1) * distances(p);
      return;
    }
    way = kApart;
    const Wanted wanted(p);
    if (p.bias_size[2] != p.seqlen_q || p.bias_size[3] != p.seqlen_k || !(wanted.dq || wanted.dk || wanted.dv)) return;
    const int64_t kv_group = heads_of_kv_group(p), kv_groups = p.heads_q / kv_group;  // of an entry of the batch
    const bool own_batch = p.bias_size[0] == p.batch, own_heads = p.bias_size[1] == p.heads_q;
    across = own_heads ? kv_groups : 1;
    groups = (own_batch ? p.batch : 1) * across;
    members_across = kv_groups / across;
    members = (own_batch ? 1 : p.batch) * members_across;
    size = (own_heads ? kv_group : 1) * p.seqlen_q * p.seqlen_k;
    if (members == 1 && (own_heads || kv_group == 1)) {
      way = kStored;
      return;
    }
    output_adds = same_type;
    // As few tasks as keep all threads busy to the end, more or less.
    while (tasks < members && groups * tasks % threads != 0 && groups * tasks < 4 * threads) ++tasks;
    const bool idle = groups * tasks < threads && p.seqlen_k > kTile<C>;  // tiles of keys would be dealt out
    if (!idle && size * static_cast<int64_t>(sizeof(C)) <= kMostBytes) way = kAdded;
  }

  // Whether the output itself is what a group adds to.
  bool in_output() const { return output_adds && tasks == 1; }
  // The KV group, of all of the batch, that is a member of a group.
  int64_t kv_group(int64_t group, int64_t member) const {
    return (group / across * (members / members_across) + member / members_across) * (across * members_across) +
           group % across * members_across + member % members_across;
  }

  Way way = kNone;
  int64_t groups = 0, members = 1;
  int64_t tasks = 1;                       // of a group
  int64_t size = 0;                        // entries of a group, or of a task
  bool output_adds = false;                // the bias has the compute type
  int64_t across = 1, members_across = 1;  // of one entry of the batch
};

template <class Op>
struct BackwardScratch {
  using C = typename Op::Compute;
  using Scalar = typename Op::Scalar;

  BackwardScratch(void* memory, const Backward& p) : tiles(Tiles<Op>::uses(p)) {
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
    // In tiles: behind room for what lies before a block in its first piece of queries.
    const auto take_pairs = [&] {
      if (tiles) arena.take<Scalar>(Tiles<Op>::kKeys / 2 * kTile<C>);
      return arena.take<Scalar>(pairs * kBlock<Op> / 2 * kTile<C>);
    };
    p_pairs = take_pairs();
    ds_pairs = take_pairs();
    tail = arena.take<Scalar>(tiles ? 16 * max64(e, ev) : 0);
    ds_rows = arena.take<Scalar>(pairs * kBlock<Op> * kTile<C> / 2);
    scores = arena.take<C>(kBlock<Op> * kTile<C>);
    grad_scores = arena.take<C>(kBlock<Op> * kTile<C>);
    bias = arena.take<C>(ScoreParams<C>(p).has_bias ? kBlock<Op> * kTile<C> : 0);
    mask = arena.take<LaneBits>(kBlock<Op>);
    keep = arena.take<C>(p.dropout_p > 0 ? kBlock<Op> * kTile<C> : 0);
    dk = arena.take<C>(round_up(p.head_dim, Simd<C>::kLanes) * kTile<C>);
    dv = arena.take<C>(round_up(p.head_dim_v, Simd<C>::kLanes) * kTile<C>);
    bytes = arena.used();
  }

  bool tiles;  // products go to the matrix unit
  Scalar *k_tile, *v_tile, *k_rows, *q_rows, *grad_rows, *q_pairs, *grad_pairs, *p_pairs, *ds_pairs, *ds_rows, *tail;
  LaneBits* mask;
  C *scores, *grad_scores, *bias, *keep, *dk, *dv;
  int64_t bytes;
};

// What a row of scores needs: P = norm * exp(S + shift), dS = P * (dP - delta).
template <class C>
struct RowTerms {
  C* shift;  // -lse, in the scores' domain; -inf where the row has no live key
  C* delta;  // rowsum(dO * O) - dLSE
  C* norm;   // null: 1 for all rows
  RowTerms from(int64_t row) const { return {shift + row, delta + row, norm == nullptr ? nullptr : norm + row}; }
};

// S, dP -> P (dropped), dS in place, for one segment of the generic path. Rows are queries, lanes keys. dS is
// the gradient of the scaled q k^T; that of the scores as the softmax sees them, which is the bias's, replaces the bias
// where bias_grad is set.
template <class Op, class C = typename Op::Compute>
inline void differentiate_scores(const ScoreParams<C>& score, const BandWalk<C>& walk, const Segment& segment,
                                 RowTerms<C> terms, C* bias, bool bias_grad, const LaneBits* mask, const C* keep,
                                 C* scores, C* grad_scores) {
  using S = Simd<C>;
  using V = typename S::V;
  const V scale = S::set1(score.scale);
  const Exponential<Op, false, Op::kSums> exponential(1);
  const Range live = walk.live_lanes(segment.row);
  for (int64_t v = segment.first; v < segment.last; ++v) {
    const bool partial = segment.partial && !LaneMask<C>::all(live, v, segment.rows);
    LaneMask<C> band(live, v);
    int64_t at = v * S::kLanes;
    for (int64_t i = segment.row; i < segment.row + segment.rows; ++i, at += kTile<C>) {
      V t = S::zero(), g = S::load(grad_scores + at);
      V p = exponential(finish_score(score, S::load(scores + at), scale, bias + at, &t), S::set1(terms.shift[i]));
      if (terms.norm != nullptr) p *= S::set1(terms.norm[i]);
      V dropped = p;
      if (keep != nullptr) {
        const V factor = S::load(keep + at);
        g *= factor;
        dropped *= factor;
      }
      // Where query and key don't meet, all three factors of dS may be NaN.
      const auto live_lanes = [&](V x) {
        if (mask != nullptr) x = S::select(mask[i - segment.row] >> (v * S::kLanes), x, S::zero());
        return partial ? band.select(x, S::zero()) : x;
      };
      V ds = p * (g - S::set1(terms.delta[i]));
      if (bias_grad) S::store(bias + at, live_lanes(ds));
      if (score.cap != C(0)) ds *= S::set1(C(1)) - t * t;
      dropped = live_lanes(dropped);
      ds = live_lanes(ds);
      if (partial) band.advance();
      S::store(scores + at, dropped);
      S::store(grad_scores + at, ds);
    }
  }
}

#if defined(__AVX512BF16__)
// Rows i and i + 1 of dS as single rows of bfloat16; the second one if it isn't null.
inline void store_rows(Simd<float>::V first, Simd<float>::V second, PairDot::Scalar* row, PairDot::Scalar* next) {
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(row), _mm512_castsi512_si256(both));
  if (next != nullptr) _mm256_storeu_si256(reinterpret_cast<__m256i*>(next), _mm512_extracti64x4_epi64(both, 1));
}
#endif

// P and dS from two products that are still in registers, of the fast path or with a bias; packed as Op's
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
  bool partial;          // as of Segment
  Range live;            // lanes of the first row
  int64_t vector;
  C* bias;
  bool bias_grad;            // replaces the bias
  Scalar *p, *ds, *ds_rows;  // ds_rows: of pairs
  PrefetchStreams* next;     // may be null

  // With too few registers for the sums of both products P waits in memory until dP is there.
  template <int kRows, int kVectors>
  static constexpr bool kApart = (2 * kRows + 1) * kVectors + 1 > kRegisters;
  // Where they fit, side by side: either product alone has too few sums for the latency of its instruction.
  template <int kRows, int kVectors>
  static constexpr bool kSideBySide =
      !kApart<kRows, kVectors> && (Op::kPack == 2 || kVectors == 1 || kRows * kVectors < kSumsInFlight);

  template <int kRows, int kVectors>
  void run(int64_t row, int64_t first_vector) const {
    using S = typename Op::S;
    using V = typename S::V;
    const int64_t lane = first_vector * S::kLanes;
    V score[kRows][kVectors] = {}, grad_p[kRows][kVectors] = {};
    ProductWalk<Op, false> first(q_k, row, lane), second(grad_v, row, lane);
    int64_t k = 0;
    if constexpr (kSideBySide<kRows, kVectors>) {
      for (const int64_t both = max64(depth, depth_v) <= kLongestSum ? min64(depth, depth_v) : 0; k < both;) {
        for (const int64_t end = next == nullptr ? both : min64(both, k + kPrefetchSteps); k < end; ++k) {
          first.step(score);
          second.step(grad_p);
        }
        if (next != nullptr) next->prefetch();
      }
    }
    add_products(first, k, depth, next, score);
    if constexpr (!kApart<kRows, kVectors>) add_products(second, k, depth_v, next, grad_p);
    const auto bias_at = [&](int r, int v) { return bias + (row + r) * kTile<C> + lane + v * S::kLanes; };
    if constexpr (kBias) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) score[r][v] = S::fma(score[r][v], S::set1(factor), S::load(bias_at(r, v)));
    }
    const V dead = S::set1(-kInfinity<C>);
    exclude_tile<C>(score, bits_from(mask, row), vector + first_vector, dead);
    if (partial) mask_tile<C>(score, {live.begin + row, live.end + row}, vector + first_vector, dead);
    // A bias may have a gradient in float32, whatever the elements are.
    const Exponential<Op, !kBias, kBias ? Op::kSums : Op::kProbabilities> exponential(factor);
    const auto packed_at = [&](int r, int v) { return (row + r) / Op::kPack * kTile<C> + lane + v * S::kLanes; };
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const V shift = S::set1(terms.shift[row + r]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) score[r][v] = exponential(score[r][v], shift);
      if (terms.norm != nullptr) [[unlikely]] {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) score[r][v] *= S::set1(terms.norm[row + r]);
      }
      if constexpr (kApart<kRows, kVectors>) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) Op::S::store(p + packed_at(r, v), score[r][v]);
      }
    }
    if constexpr (kApart<kRows, kVectors>) {
      add_products(second, 0, depth_v, next, grad_p);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) score[r][v] = S::load(p + packed_at(r, v));
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const V delta = S::set1(terms.delta[row + r]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) grad_p[r][v] = score[r][v] * (grad_p[r][v] - delta);
    }
    // dP and delta may be NaN where P is 0.
    exclude_tile<C>(grad_p, bits_from(mask, row), vector + first_vector, S::zero());
    if (partial) mask_tile<C>(grad_p, {live.begin + row, live.end + row}, vector + first_vector, S::zero());
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
        const V second_row = single ? S::zero() : grad_p[r + Op::kPack - 1][v];
        if constexpr (!kApart<kRows, kVectors>)
          store_probabilities<Op>(score[r][v], single ? S::zero() : score[r + Op::kPack - 1][v], p + packed_at(r, v));
        store_probabilities<Op>(grad_p[r][v], second_row, ds + packed_at(r, v));
#if defined(__AVX512BF16__)
        if constexpr (Op::kPack == 2) {
          Scalar* target = ds_rows + ((row + r) * kTile<C> + lane + v * S::kLanes) / 2;
          store_rows(grad_p[r][v], second_row, target, single ? nullptr : target + kTile<C> / 2);
        }
#endif
      }
  }
};

// How often GradientTile will call prefetch.
template <class Op>
inline int64_t prefetch_calls_of_gradients(const Backward& p, int64_t rows, int64_t vectors) {
  const int64_t depth = Op::kPack == 2 ? max64(p.head_dim, p.head_dim_v) / 2 : p.head_dim + p.head_dim_v;
  return max64(1, prefetch_calls<kPairRows * kPairVectors, kPairVectors>(rows, vectors, depth));
}

// To be prefetched by GradientTile: rows of Q and dO of the next block, and `sums`, the block's own rows of dQ.
template <class T, class Op>
inline PrefetchStreams queries_to_prefetch(const Backward& p, const BlockPlan& block, int64_t batch, int64_t head,
                                           int64_t vectors, const PrefetchRows& sums) {
  const int64_t row = block.row + block.rows, calls = prefetch_calls_of_gradients<Op>(p, block.rows, vectors);
  return {{rows_to_prefetch<T>(p.q, batch, head, row, block.rows, p.seqlen_q, p.head_dim), calls},
          {rows_to_prefetch<T>(p.grad_out, batch, head, row, block.rows, p.seqlen_q, p.head_dim_v), calls},
          {sums, calls}};
}

// To be prefetched where there is a bias: rows of it of the next block, and the block's own of its gradient, or of
// `sums`, if any, to which a head's gradients are added.
template <class T, class Op, class C = typename Op::Compute>
inline PrefetchStreams biases_to_prefetch(const Backward& p, const BlockPlan& block, int64_t batch, int64_t head,
                                          int64_t key, int64_t keys, int64_t vectors, bool bias_grad, const C* sums) {
  const int64_t element = bias_bytes<T>(p);
  const auto rows_of = [&](const void* data, int64_t size, int64_t entry, int64_t step, int64_t rows) -> PrefetchRows {
    return {static_cast<const char*>(data) + entry * size, step * size, rows, keys * size};
  };
  const int64_t row = block.row + block.rows, calls = prefetch_calls_of_gradients<Op>(p, block.rows, vectors);
  const int64_t entry = block.row * p.seqlen_k + key;
  PrefetchRows biases, grads;
  if (has_bias_rows(p))
    biases = bias_to_prefetch<T>(p, batch, head, row, min64(block.rows, p.seqlen_q - row), key, keys);
  if (bias_grad && sums != nullptr) grads = rows_of(sums, sizeof(C), entry, p.seqlen_k, block.rows);
  else if (bias_grad)
    grads = rows_of(p.dbias.data, element, (batch * p.heads_q + head) * p.seqlen_q * p.seqlen_k + entry, p.seqlen_k,
                    block.rows);
  return {{biases, calls}, {grads, calls}, {}};
}

// P and dS of one block of queries against the tile of keys in scratch, by GradientTile.
template <class Op, bool kBias>
inline void gradients_in_registers(const BackwardScratch<Op>& scratch, const ScoreParams<typename Op::Compute>& score,
                                   const BandWalk<typename Op::Compute>& walk, const BlockPlan& block, int64_t depth,
                                   int64_t depth_v, RowTerms<typename Op::Compute> terms,
                                   Rows<typename Op::Scalar> q_rows, Rows<typename Op::Scalar> grad_rows,
                                   const LaneBits* mask, bool bias_grad, PrefetchStreams* next) {
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
            segment.partial,
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

// S of a segment, and dP if it is wanted, to memory.
template <class Op>
inline void products_to_memory(const Backward& p, const BackwardScratch<Op>& scratch, const Segment& segment,
                               int64_t row, bool need_ds, ReadableRows<typename Op::Scalar> q_rows,
                               ReadableRows<typename Op::Scalar> grad_rows) {
  using C = typename Op::Compute;
  const int64_t lane = segment.first * Simd<C>::kLanes, at = row * kTile<C> + lane;
  const int64_t vectors = segment.last - segment.first;
  const auto product = [&](ReadableRows<typename Op::Scalar> rows, int64_t columns, const typename Op::Scalar* tile,
                           C* target) {
    const int64_t depth = (columns + Op::kPack - 1) / Op::kPack;
    if constexpr (Tiles<Op>::kHas)
      if (scratch.tiles)
        return Tiles<Op>::scores(segment.rows, vectors, depth, rows, row, tile + lane, scratch.tail, target + at,
                                 [] {});
    gemm<typename Op::Product>(segment.rows, vectors, depth,
                               {rows.data + row * rows.step, rows.step, tile + lane, kTile<C>},
                               {target + at, kTile<C>, Epilogue::kStore, nullptr});
  };
  product(q_rows, p.head_dim, scratch.k_tile, scratch.scores);
  if (need_ds) product(grad_rows, p.head_dim_v, scratch.v_tile, scratch.grad_scores);
}

// The scores of one block of queries against the tile of keys in scratch: fills scratch.scores with P and
// scratch.grad_scores with dS for the block's segments (and scratch.bias with d(bias), if bias_grad).
template <class T, class Op>
inline void score_block(const Backward& p, const BackwardScratch<Op>& scratch,
                        const ScoreParams<typename Op::Compute>& score, const BandWalk<typename Op::Compute>& walk,
                        const BlockPlan& block, int64_t batch, int64_t head, int64_t key, int64_t keys,
                        RowTerms<typename Op::Compute> terms, bool need_ds, bool bias_grad, const LaneBits* mask,
                        ReadableRows<typename Op::Scalar> q_rows, ReadableRows<typename Op::Scalar> grad_rows) {
  using C = typename Op::Compute;
  if (score.has_bias) bias_tile<C, T>(p, 2, batch, head, block.row, block.rows, key, keys, scratch.bias);
  if (score.dropout) dropout_tile<C>(p, 2, batch, head, block.row, block.rows, key, keys, scratch.keep);
  for (int64_t s = 0; s < block.segments; ++s) {
    const Segment& segment = block.segment[s];
    const int64_t row = segment.row - block.row, at = row * kTile<C>;
    products_to_memory(p, scratch, segment, row, need_ds, q_rows, grad_rows);
    differentiate_scores<Op>(score, walk, segment, terms, scratch.bias + at, bias_grad, bits_from(mask, row),
                             score.dropout ? scratch.keep + at : nullptr, scratch.scores + at,
                             scratch.grad_scores + at);
  }
}

// scratch <- K^T and V^T of a tile of keys, with the scale, as far as it belongs there, in K^T.
template <class T, class Op>
inline void load_key_tile(const Backward& p, const BackwardScratch<Op>& scratch,
                          const ScoreParams<typename Op::Compute>& score, int64_t batch, int64_t head, int64_t key,
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

// The rows of K of a tile that dQ sums over, of the query head that comes first of those that share them, without what
// lies in keys that none of their queries attends to: 0 times infinity or NaN would be NaN.
template <class T, class Op>
inline Rows<typename Op::Scalar> without_unattended_keys(const Backward& p, const BackwardScratch<Op>& scratch,
                                                         int64_t batch, int64_t head, int64_t key, int64_t keys,
                                                         Rows<typename Op::Scalar> k_rows) {
  const int64_t group = p.heads_q / p.heads_k;
  const bool by_band_alone = p.ranges.data == nullptr && (p.bias.data == nullptr || p.bias_dtype != DType::kBool);
  const Range reached = p.band.reached(p.seqlen_q, {0, p.seqlen_k});
  if (by_band_alone && key >= reached.begin && key + keys <= reached.end) return k_rows;
  RowBits cleared{{bits_between({0, keys})}};
  cleared = rows_of_non_numbers<T, typename Op::Compute>(p.k, batch, head / group, key, p.head_dim, cleared);
  if (!cleared.any()) return k_rows;
  cleared.words[0] &= ~attended_keys(p, batch, head / group * group, group, key, keys);
  return cleared.any() ? with_zeros<Op>(k_rows, keys, p.head_dim, cleared, scratch.k_rows) : k_rows;
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
        const int64_t index = p.relative ? p.seqlen_q - 1 - i + key + lane : i * p.seqlen_k + key + lane,
                      of_head = (batch * p.heads_q + head) * p.seqlen_q * p.seqlen_k;
        const auto value = S::load(tile + (i - block.row) * kTile<C> + lane);
        if (sums != nullptr) S::store_as(sums + index, S::load_as(sums + index, keys - lane) + value, keys - lane);
        else with_bias_grad<T>(p, [&](auto* dbias) { S::store_as(dbias + of_head + index, value, keys - lane); });
      }
  }
}

// Writes rows of a dQ buffer, scaled, to the output, which may be the buffer.
template <class T, class C>
inline void store_query_grad(const Backward& p, int64_t batch, int64_t head, int64_t row, int64_t rows, const C* source,
                             int64_t step) {
  using S = Simd<C>;
  const auto scale = S::set1(static_cast<C>(p.softmax_scale));
  const int64_t columns = p.head_dim;
  for (int64_t i = 0; i < rows; ++i, source += step) {
    T* target = at<T>(p.dq, batch, head, row + i);
    int64_t d = 0;
    for (; columns - d >= 2 * S::kLanes; d += 2 * S::kLanes)
      S::store_two_as(target + d, S::load(source + d) * scale, S::load(source + d + S::kLanes) * scale);
    for (; d < columns; d += S::kLanes) S::store_as(target + d, S::load(source + d) * scale, columns - d);
  }
}

// Takes dQ's rows of a tile of keys that is the only one.
template <class T, class C>
struct ScaledRows {
  using S = Simd<C>;
  T* rows;
  int64_t step, columns;
  C scale;

  template <int kRows, int kVectors>
  [[gnu::always_inline]] inline void take(typename S::V (&sum)[kRows][kVectors], int64_t row, int64_t vector) const {
    const auto factor = S::set1(scale);
    T* target = rows + row * step + vector * S::kLanes;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r, target += step) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] *= factor;
      store_row(sum[r], target, columns - vector * S::kLanes);
    }
  }
};

#if defined(__AVX512BF16__)
// P and dS of a segment in the two forms that the bfloat16 products read: pairs of rows, and dS also as single rows.
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

// P and dS of a segment of the fast path from products in memory, in the forms of pack_segment. `factor`: what the
// products aren't scaled by yet; `mask`: may be null.
inline void gradients_of_products(const Segment& segment, const BandWalk<float>& walk, float factor,
                                  RowTerms<float> terms, const LaneBits* mask, bool need_ds, const float* scores,
                                  const float* grad_scores, PairDot::Scalar* p_pairs, PairDot::Scalar* ds_pairs,
                                  PairDot::Scalar* ds_rows) {
  using S = Simd<float>;
  using V = S::V;
  constexpr int64_t kStep = kTile<float>;
  const Exponential<PairDot, true, Precision::kProbability> exponential(factor);
  const Range live = walk.live_lanes(segment.row);
  for (int64_t v = segment.first; v < segment.last; ++v) {
    const bool partial = segment.partial && !LaneMask<float>::all(live, v, segment.rows);
    LaneMask<float> band(live, v);
    for (int64_t i = 0; i < segment.rows; i += 2) {
      const bool single = i + 1 == segment.rows;
      V p[2] = {S::zero(), S::zero()}, ds[2] = {S::zero(), S::zero()};
      for (int64_t half = 0; half < (single ? 1 : 2); ++half) {
        const int64_t row = i + half, at = row * kStep + v * S::kLanes;
        p[half] = exponential(S::load(scores + at), S::set1(terms.shift[row]));
        if (terms.norm != nullptr) p[half] *= S::set1(terms.norm[row]);
        if (need_ds) ds[half] = p[half] * (S::load(grad_scores + at) - S::set1(terms.delta[row]));
        // Where query and key don't meet, anything may be NaN.
        if (mask != nullptr) {
          p[half] = S::select(mask[row] >> (v * S::kLanes), p[half], S::zero());
          ds[half] = S::select(mask[row] >> (v * S::kLanes), ds[half], S::zero());
        }
        if (partial) {
          p[half] = band.select(p[half], S::zero());
          ds[half] = band.select(ds[half], S::zero());
          band.advance();
        }
      }
      const int64_t at = i * kStep + v * S::kLanes, pair = i / 2 * kStep + v * S::kLanes;
      store_probabilities<PairDot>(p[0], p[1], p_pairs + pair);
      if (!need_ds) continue;
      store_probabilities<PairDot>(ds[0], ds[1], ds_pairs + pair);
      PairDot::Scalar* target = ds_rows + at / 2;
      store_rows(ds[0], ds[1], target, single ? nullptr : target + kStep / 2);
    }
  }
}
#endif

}  // namespace
}  // namespace attnkern::cpu
