// Backward pass: one sweep that recomputes P from the saved log-sum-exp, five products, no atomics.
//
// A task owns the keys of one KV group and walks them in tiles of kTile keys, which lie along the vector lanes (the
// forward pass with queries and keys exchanged). For each block of queries:
//
//     S  = Q K^T    dP = dO V^T               A = rows of Q, dO as they lie in memory;  B = K^T, V^T of the tile
//     P  = exp(S - lse)    dS = P * (dP - delta)
//     dV += P^T dO    dK += dS^T Q            A = P, dS (unit rows);  B = rows of dO, Q, lanes over the head dimension
//     dQ   += dS K                            A = dS;  B = rows of K, lanes over the head dimension
//
// with delta = rowsum(dO * O) - dLSE. dK and dV stay in the tile's own accumulators, dQ accumulates in float32 over the
// tiles in their order: the result does not depend on the number of threads' timing. Where there are fewer KV groups
// than threads, tiles are tasks, which take turns at dQ in that order (query_gradient.h).
#pragma once

#include "query_gradient.h"
#include "sinks.h"

namespace attnkern::cpu {
namespace {

// The queries of a task that shares a tile of keys with others, which have the queries before and behind. Sums of dK
// and dV then meet in `sums`, those of each head of the group in turn; null: there is no other task.
template <class C>
struct Piece {
  Range rows;
  bool first = true, last = true;
  C* sums = nullptr;
  Progress* before = nullptr;  // of the task that has the sums before; null: there is none
  int64_t awaited = 0;         // when it has had them
};

// Whether queries come from far away: rows of Q and dO, and the sums of dQ, that every tile reads.
template <class T, class C>
inline bool prefetches_queries(const Backward& p, const Wanted& wanted) {
  const int64_t given_bytes = (p.head_dim + p.head_dim_v) * static_cast<int64_t>(sizeof(T));
  const int64_t sums_bytes = wanted.dq ? p.head_dim * static_cast<int64_t>(sizeof(C)) : 0;
  return p.seqlen_q * (given_bytes + sums_bytes) >= (is_window(p.band) ? kFarBytes / 4 : kFarBytes);
}

// The rows of K of a tile that dQ sums over, for query head `head` and those that share them.
template <class T, class Op>
inline Rows<typename Op::Scalar> key_rows_of_sums(const Backward& p, const BackwardScratch<Op>& scratch, int64_t batch,
                                                  int64_t head, int64_t key, int64_t keys) {
  const int64_t head_k = head / (p.heads_q / p.heads_k);
  Rows<typename Op::Scalar> rows;
  if constexpr (Op::kPack == 1) {
    rows = copies_rows<T, typename Op::Compute>(p, p.k, p.head_dim, p.seqlen_q)
               ? packed_rows<T, Op>(p.k, p.heads_k, batch, head_k, key, keys, p.seqlen_k, p.head_dim, scratch.k_rows,
                                    nullptr)
               : operand_rows<Op, T>(p.k, batch, head_k, key, keys, p.head_dim, scratch.k_rows, true);
  } else {
    const int64_t step = round_up(p.head_dim, Simd<typename Op::Compute>::kLanes);
    interleave_rows(at<T>(p.k, batch, head_k, key), p.k.stride[2], p.k.stride[3], keys, p.head_dim, scratch.k_rows,
                    step);
    rows = {scratch.k_rows, step};
    if (scratch.tiles)  // whole pieces of keys
      for (int64_t pair = (keys + 1) / 2; pair < kTile<typename Op::Compute> / 2; ++pair)
        std::memset(scratch.k_rows + pair * step, 0, static_cast<size_t>(step) * sizeof(typename Op::Scalar));
  }
  return without_unattended_keys<T, Op>(p, scratch, batch, head, key, keys, rows);
}

// Rows of Q and dO of a block of queries.
template <class T, class Op>
struct QueryRows {
  using Scalar = typename Op::Scalar;
  const Backward& p;
  int64_t batch, head;
  const BlockPlan& block;
  PackedCache<Scalar>* cache;  // of the head's Q, and behind it of its dO; may be null

  // Whether rows are copied for the products of the scores: converted, or since they lie apart, for which there is a
  // cache then.
  bool copies() const { return Op::kPack == 1 && (kConverts<T, Op> || cache != nullptr); }
  // Copied: converted, or since they lie apart, or in pairs as products that sum over the queries read them.
  Rows<Scalar> packed_q(Scalar* space) const {
    return packed_rows<T, Op>(p.q, p.heads_q, batch, head, block.row, block.rows, p.seqlen_q, p.head_dim, space, cache);
  }
  Rows<Scalar> packed_grad(Scalar* space) const {
    return packed_rows<T, Op>(p.grad_out, p.heads_q, batch, head, block.row, block.rows, p.seqlen_q, p.head_dim_v,
                              space, cache == nullptr ? nullptr : cache + 1);
  }
  // For the products of the scores; padded to whole vectors if they are read by vectors later, or by tiles.
  ReadableRows<Scalar> q(Scalar* space, bool padded) const {
    if (copies()) return {packed_q(space)};
    return rows_of_scores<T, Op>(p.q, batch, head, block, p.seqlen_q, p.head_dim, space, padded);
  }
  ReadableRows<Scalar> grad(Scalar* space, bool padded) const {
    if (copies()) return {packed_grad(space)};
    return rows_of_scores<T, Op>(p.grad_out, batch, head, block, p.seqlen_q, p.head_dim_v, space, padded);
  }
};

// P and dS of a block as the products of the gradients read them. Rows of dS lie ds_step apart.
template <class Op>
struct GradientFactors {
  using Scalar = typename Op::Scalar;
  const Scalar *probabilities, *ds;
  Scalar* ds_rows;
  int64_t ds_step;

  // `packed`: pairs have been made of them.
  GradientFactors(const BackwardScratch<Op>& scratch, [[maybe_unused]] const BlockPlan& block,
                  [[maybe_unused]] bool packed) {
    constexpr int64_t kStep = kTile<typename Op::Compute>;
    if constexpr (Op::kPack == 1) {
      probabilities = scratch.scores;
      ds = ds_rows = scratch.grad_scores;
    } else {
#if defined(__AVX512BF16__)
      for (int64_t s = 0; s < block.segments && !packed; ++s) {
        const int64_t at = (block.segment[s].row - block.row) * kStep;
        pack_segment(block.segment[s], scratch.scores + at, scratch.grad_scores + at, scratch.p_pairs + at / 2,
                     scratch.ds_pairs + at / 2, scratch.ds_rows + at / 2);
      }
#endif
      probabilities = scratch.p_pairs;
      ds = scratch.ds_pairs;
      ds_rows = scratch.ds_rows;
    }
    ds_step = kStep / Op::kPack;
  }
};

// dQ += dS K for a block of head `head`, number `member` of its KV group, and the tile of `keys` keys from `key` on,
// whose rows are k_rows.
template <class T, class Op>
inline void add_query_grad(const Backward& p, const QueryGrad<typename Op::Compute>& dq, int64_t batch, int64_t head,
                           int64_t member, const BlockPlan& block, int64_t key, int64_t keys, int64_t columns,
                           const GradientFactors<Op>& factors, Rows<typename Op::Scalar> k_rows) {
  using C = typename Op::Compute;
  const Epilogue epilogue = dq.first_stores && key == 0 ? Epilogue::kStore : Epilogue::kAdd;
  // At an edge of the band so many rows meet no more keys than they attend to.
  constexpr int64_t kLanes = Simd<C>::kLanes, kEdgeRows = kGroup / 2;
  for (int64_t s = 0; s < block.segments; ++s) {
    const Segment& segment = block.segment[s];
    const int64_t row = segment.row - block.row;
    // Lanes past the last key hold garbage: sum over real keys only.
    const Range lanes{segment.first * kLanes, min64(segment.last * kLanes, keys)};
    if constexpr (Op::kPack == 2) {
      if (lanes.end % 2 != 0)  // the odd key's partner is a zero row of K, but dS must be finite there
        for (int64_t i = row; i < row + segment.rows; ++i)
          reinterpret_cast<uint16_t*>(factors.ds_rows + i * factors.ds_step)[lanes.end] = 0;
    }
    for (int64_t i = segment.row, last = i + segment.rows; i < last;) {
      const int64_t most = segment.partial ? min64(last, i + kEdgeRows) : last;
      const int64_t end = i < dq.split ? min64(most, dq.split) : most;
      const Range live = p.band.visited(i, end - i, {key + lanes.begin, key + lanes.end});
      // In pairs. (Rows that meet nothing have a range that may lie anywhere.)
      const int64_t first = (live.begin - key) / Op::kPack, behind = (live.end - key + Op::kPack - 1) / Op::kPack;
      const auto multiply = [&](const auto& target) {
        gemm<typename Op::Product>(end - i, columns, live.end > live.begin ? behind - first : 0,
                                   {factors.ds_rows + (i - block.row) * factors.ds_step + first, factors.ds_step,
                                    k_rows.data + first * k_rows.step, k_rows.step},
                                   target);
      };
      if (dq.at_once)
        multiply(
            ScaledRows<T, C>{at<T>(p.dq, batch, head, i), p.dq.stride[2], p.head_dim, static_cast<C>(p.softmax_scale)});
      else multiply(Target<C>{dq.row(member, i), dq.step, epilogue, nullptr});
      i = end;
    }
  }
}

// Stores what a tile of keys has met of all queries, or adds what it has met of a piece to `kept`, which is moved on.
template <class T, class Op>
inline void end_keys(Result<T, Op>& result, bool wanted, int64_t columns, const typename Op::Compute* factor,
                     const Piece<typename Op::Compute>& piece, typename Op::Compute*& kept) {
  using C = typename Op::Compute;
  if (!wanted) return;
  if (kept != nullptr) {
    if (piece.before != nullptr) wait_until(*piece.before, piece.awaited);
    result.join(kept, piece.first, piece.last);
    kept += kTile<C> * round_up(columns, Simd<C>::kLanes);
  }
  if (piece.last) result.end(factor);
}

// The keys of_keys, which begin with a tile, for the query heads [head, head + heads) of one batch entry. `turns`: at
// dQ, where other tasks add to it; else null. next_head: rows of the next task, to be prefetched meanwhile; may be
// null.
template <class T, class Op>
void backward_heads(const Backward& p, const BackwardScratch<Op>& scratch, int64_t batch, int64_t head, int64_t heads,
                    Range of_keys, RowTerms<typename Op::Compute> terms,
                    const VisitingQueries<typename Op::Compute>& visiting, QueryGrad<typename Op::Compute> dq,
                    Turns<T, typename Op::Compute>* turns, bool bias_grad, typename Op::Compute* bias_grads,
                    PackedCache<typename Op::Scalar>* cache, const Piece<typename Op::Compute>& piece,
                    PrefetchByLine<PrefetchSeries>* next_head) {
  using C = typename Op::Compute;
  using S = Simd<C>;
  using Scalar = typename Op::Scalar;
  const ScoreParams<C> score(p);
  const Wanted wanted(p);
  const int64_t group_k = p.heads_q / p.heads_k, group_v = p.heads_q / p.heads_v;
  const int64_t columns = (p.head_dim + S::kLanes - 1) / S::kLanes;
  const int64_t depth = (p.head_dim + Op::kPack - 1) / Op::kPack, depth_v = (p.head_dim_v + Op::kPack - 1) / Op::kPack;
  // With a bias, computing both products in registers pays off for pairs only.
  const bool biased = Op::kPack == 2 && score.has_bias && !score.capped() && !score.dropout && !scratch.tiles;
  const bool prefetches_bias =
      biased && !p.relative && p.seqlen_q * p.seqlen_k * static_cast<int64_t>(sizeof(C)) >= kFarBytes;
  const bool prefetches = score.fast_path() && prefetches_queries<T, C>(p, wanted);
  C scale[kTile<C>], ones[kTile<C>];  // of dK: dS is the gradient of scores that already are scaled
  for (C& lane : scale) lane = score.signed_scale;
  for (C& lane : ones) lane = C(1);
  Result<T, Op> dk(p.dk, p.seqlen_k, p.head_dim, scratch.dk, scratch.tiles);
  Result<T, Op> dv(p.dv, p.seqlen_k, p.head_dim_v, scratch.dv, scratch.tiles);
  const typename Tiles<Op>::Setup tiles(scratch.tiles);
  const bool need_ds = wanted.dq || wanted.dk || bias_grad;
  // Excluded blocks are left out, unless the bias's gradient is stored: it would have to be set to 0 there.
  const bool leaves_out = score.has_bias && !(bias_grad && bias_grads == nullptr);

  for (int64_t key = of_keys.begin; key < of_keys.end; key += kTile<C>) {
    const int64_t keys = min64(kTile<C>, p.seqlen_k - key);
    const int64_t vectors = (keys + S::kLanes - 1) / S::kLanes;
    Rows<Scalar> k_rows{};
    bool keys_loaded = false, values_loaded = false;
    bool numbers = true;  // no key holds an infinity or NaN
    C* kept = piece.sums;
    for (int64_t h = head; h < head + heads; ++h) {
      const int64_t head_k = h / group_k, head_v = h / group_v;
      if (h == head || h % group_k == 0) dk.begin(batch, head_k, key, keys), keys_loaded = false;
      if (h == head || h % group_v == 0) dv.begin(batch, head_v, key, keys), values_loaded = false;
      const Range within = visiting.of(batch, h, key / kTile<C>, piece.rows);
      if (within.end > within.begin && !keys_loaded) {
        load_key_tile<T, Op>(p, scratch, score, batch, head_k, key, keys);
        if (wanted.dq) k_rows = key_rows_of_sums<T, Op>(p, scratch, batch, head_k * group_k, key, keys);
        if (wanted.dq && scratch.tiles)
          numbers = !rows_of_non_numbers<T, C>(p.k, batch, head_k, key, p.head_dim, {{bits_between({0, keys})}}).any();
        keys_loaded = true;
      }
      if (within.end > within.begin && !values_loaded) {
        load_value_tile<T, Op>(p, scratch, batch, head_v, key, keys);
        values_loaded = true;
      }
      if (turns != nullptr) turns->begin(h - head);
      BandWalk<C> walk(p.band.transposed(), key, keys, within, most_rows<Op>(scratch.tiles));
      BlockPlan block;
      while (walk.next(block)) {
        if (block.segments == 0 || (leaves_out && excludes_all<T>(p, batch, h, block.row, block.rows, key, keys)))
          continue;
        const LaneBits* mask = nullptr;
        if ((score.has_mask || score.has_ranges) &&
            !apply_mask<C>(p, walk, 2, batch, h, key, keys, scratch.mask, block, mask))
          continue;
        PackedCache<Scalar>* const of_head = cache == nullptr ? nullptr : cache + 2 * (h - head);
        // For the matrix unit the cache holds pieces of rows.
        const QueryRows<T, Op> queries{p, batch, h, block, scratch.tiles ? nullptr : of_head};
        const auto q_rows = queries.q(scratch.q_rows, Op::kPack == 1 ? dk.by_rows() : scratch.tiles);
        const auto grad_rows = queries.grad(scratch.grad_rows, Op::kPack == 1 ? dv.by_rows() : scratch.tiles);
        const RowTerms<C> row_terms = terms.from((batch * p.heads_q + h) * p.seqlen_q);
        PrefetchStreams prefetch;
        if (prefetches)
          prefetch = queries_to_prefetch<T, Op>(p, block, batch, h, vectors,
                                                dq.to_prefetch(h - head, block.row, block.rows, p.head_dim));
        else if (next_head != nullptr) prefetch.first = *next_head;
        const int64_t bias_head = p.bias_size[1] == p.heads_q ? h - head : 0;
        const int64_t bias_entries = p.relative ? distances(p) : p.seqlen_q * p.seqlen_k;
        C* const bias_sums = bias_grads == nullptr ? nullptr : bias_grads + bias_head * bias_entries;
        const auto by_tiles = [&]<bool kBias>() {
          gradients_in_registers<Op, kBias>(scratch, score, walk, block, depth, need_ds ? depth_v : 0, row_terms,
                                            q_rows, grad_rows, mask, bias_grad,
                                            prefetches || prefetches_bias || next_head ? &prefetch : nullptr);
        };
        if (score.fast_path() && scratch.tiles) {
          if constexpr (Tiles<Op>::kHas)
            for (int64_t s = 0; s < block.segments; ++s) {
              const Segment& segment = block.segment[s];
              const int64_t row = segment.row - block.row, at = row * kTile<C>;
              products_to_memory(p, scratch, segment, row, need_ds, q_rows, grad_rows);
              gradients_of_products(segment, walk, score.template product_factor<Op>(), row_terms.from(segment.row),
                                    bits_from(mask, row), need_ds, scratch.scores + at, scratch.grad_scores + at,
                                    scratch.p_pairs + at / 2, scratch.ds_pairs + at / 2, scratch.ds_rows + at / 2);
            }
        } else if (score.fast_path()) {
          by_tiles.template operator()<false>();
          if (next_head != nullptr) *next_head = prefetch.first;
        } else if (biased) {
          if constexpr (Op::kPack == 2) {
            bias_tile<C, T>(p, 2, batch, h, block.row, block.rows, key, keys, scratch.bias);
            if (prefetches_bias)
              prefetch = biases_to_prefetch<T, Op>(p, block, batch, h, key, keys, vectors, bias_grad, bias_sums);
            by_tiles.template operator()<true>();
          }
        } else {
          score_block<T, Op>(p, scratch, score, walk, block, batch, h, key, keys, row_terms, need_ds, bias_grad, mask,
                             q_rows, grad_rows);
        }
        if (bias_grad) store_bias_grad<T>(p, block, batch, h, key, keys, scratch.bias, bias_sums);

        const GradientFactors<Op> factors(scratch, block, score.fast_path() || biased);
        // The rows of Q and dO once more, as operand A of dV and dK, which sum over the queries.
        Rows<Scalar> q_sum = q_rows, grad_sum = grad_rows;
        const bool dv_done =
            wanted.dv && add_by_unit(dv, scratch.tiles, p.grad_out, p.heads_q, batch, h, block, vectors, p.seqlen_q,
                                     p.head_dim_v, scratch.grad_pairs, of_head == nullptr ? nullptr : of_head + 1,
                                     scratch.p_pairs, static_cast<const C*>(nullptr));
        const bool dk_done = wanted.dk && add_by_unit(dk, scratch.tiles, p.q, p.heads_q, batch, h, block, vectors,
                                                      p.seqlen_q, p.head_dim, scratch.q_pairs, of_head,
                                                      scratch.ds_pairs, static_cast<const C*>(nullptr));
        if constexpr (Op::kPack == 2) {
          if (wanted.dk && !dk_done) q_sum = queries.packed_q(scratch.q_pairs);
          if (wanted.dv && !dv_done) grad_sum = queries.packed_grad(scratch.grad_pairs);
        }
        const bool last = walk.done() && piece.sums == nullptr;
        if (wanted.dv && !dv_done) {
          grad_sum = attended_rows<T, Op>(grad_sum, p.grad_out, batch, h, block, p.head_dim_v,
                                          Op::kPack == 2 ? scratch.grad_pairs : scratch.grad_rows);
          dv.add(block, factors.probabilities, grad_sum, p.band.transposed(), nullptr,
                 last && (h + 1) % group_v == 0 ? ones : nullptr);
        }
        if (wanted.dk && !dk_done) {
          q_sum = attended_rows<T, Op>(q_sum, p.q, batch, h, block, p.head_dim,
                                       Op::kPack == 2 ? scratch.q_pairs : scratch.q_rows);
          dk.add(block, factors.ds, q_sum, p.band.transposed(), nullptr,
                 last && (h + 1) % group_k == 0 ? scale : nullptr);
        }
        if (wanted.dq) {
          const int64_t end = block.row + block.rows;
          if (turns != nullptr) turns->open(end);
          bool done = false;
          if constexpr (Tiles<Op>::kHas)
            if (scratch.tiles && numbers) {
              Tiles<Op>::complete_rows(block, keys, factors.ds_rows);
              for (int64_t row = block.row; row < end;) {
                const int64_t rows_end = row < dq.split ? min64(end, dq.split) : end;
                Tiles<Op>::add_lanes(rows_end - row, columns, keys,
                                     factors.ds_rows + (row - block.row) * factors.ds_step, k_rows,
                                     dq.row(h - head, row), dq.step);
                row = rows_end;
              }
              done = true;
            }
          if (!done) add_query_grad<T>(p, dq, batch, h, h - head, block, key, keys, columns, factors, k_rows);
          if (turns != nullptr) turns->pass(end);
        }
      }
      if (turns != nullptr) turns->end();

      if ((h + 1) % group_k == 0) end_keys(dk, wanted.dk, p.head_dim, scale, piece, kept);
      if ((h + 1) % group_v == 0) end_keys(dv, wanted.dv, p.head_dim_v, ones, piece, kept);
    }
  }
}

}  // namespace
}  // namespace attnkern::cpu
