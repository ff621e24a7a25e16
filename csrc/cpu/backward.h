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
// than threads, the tiles are dealt out to several tasks with a dQ of their own, summed at the end in a fixed order.
#pragma once

#include "bias_gradient.h"
#include "sinks.h"

namespace attnkern::cpu {
namespace {

// Where a head's dQ is summed: in the output itself, or in a buffer of the compute type with rows of whole vectors. Or
// in both: an output of 16-bit elements has room for the float32 sums of half of its rows.
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
  PrefetchRows to_prefetch(int64_t head, int64_t i, int64_t rows, int64_t columns) const {
    constexpr int64_t kBytes = sizeof(C);
    if (data == nullptr) return {};
    return {reinterpret_cast<const char*>(row(head, i)), step * kBytes, rows, columns * kBytes};
  }
};

// The queries of a step, where several tasks share a KV group: after each step their parts of dQ are added up, so that
// these need no memory that grows with the length. Meanwhile the sums of dK and dV are kept, those of each tile of keys
// and head of the group in turn; null: there is one step.
template <class C>
struct Step {
  Range rows;
  bool first = true, last = true;
  C* sums = nullptr;
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
    rows = operand_rows<Op, T>(p.k, batch, head_k, key, keys, p.head_dim, scratch.k_rows, true);
  } else {
    const int64_t step = round_up(p.head_dim, Simd<typename Op::Compute>::kLanes);
    interleave_rows(at<T>(p.k, batch, head_k, key), p.k.stride[2], p.k.stride[3], keys, p.head_dim, scratch.k_rows,
                    step);
    rows = {scratch.k_rows, step};
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

  // Copied: converted, or in pairs as products that sum over the queries read them.
  Rows<Scalar> packed_q(Scalar* space) const {
    return packed_rows<T, Op>(p.q, p.heads_q, batch, head, block.row, block.rows, p.seqlen_q, p.head_dim, space, cache);
  }
  Rows<Scalar> packed_grad(Scalar* space) const {
    return packed_rows<T, Op>(p.grad_out, p.heads_q, batch, head, block.row, block.rows, p.seqlen_q, p.head_dim_v,
                              space, cache == nullptr ? nullptr : cache + 1);
  }
  // For the products of the scores; padded to whole vectors if they are read by vectors later.
  Rows<Scalar> q(Scalar* space, bool padded) const {
    if constexpr (kConverts<T, Op>) return packed_q(space);
    else return operand_rows<Op, T>(p.q, batch, head, block.row, block.rows, p.head_dim, space, padded);
  }
  Rows<Scalar> grad(Scalar* space, bool padded) const {
    if constexpr (kConverts<T, Op>) return packed_grad(space);
    else return operand_rows<Op, T>(p.grad_out, batch, head, block.row, block.rows, p.head_dim_v, space, padded);
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

// dQ += dS K for a block and a tile of `keys` keys, whose rows are k_rows.
template <class Op>
inline void add_query_grad(const QueryGrad<typename Op::Compute>& dq, int64_t head, const BlockPlan& block,
                           int64_t keys, int64_t columns, const GradientFactors<Op>& factors,
                           Rows<typename Op::Scalar> k_rows) {
  constexpr int64_t kLanes = Simd<typename Op::Compute>::kLanes;
  for (int64_t s = 0; s < block.segments; ++s) {
    const Segment& segment = block.segment[s];
    const int64_t row = segment.row - block.row, lane = segment.first * kLanes;
    // Lanes past the last key hold garbage: sum over real keys only.
    const int64_t live = min64(segment.last * kLanes, keys) - lane;
    if constexpr (Op::kPack == 2) {
      if (live % 2 != 0)  // the odd key's partner is a zero row of K, but dS must be finite there
        for (int64_t i = row; i < row + segment.rows; ++i)
          reinterpret_cast<uint16_t*>(factors.ds_rows + i * factors.ds_step)[lane + live] = 0;
    }
    for (int64_t i = segment.row, last = i + segment.rows; i < last;) {
      const int64_t end = i < dq.split ? min64(last, dq.split) : last;
      gemm<typename Op::Product>(end - i, columns, (live + Op::kPack - 1) / Op::kPack,
                                 {factors.ds_rows + (i - block.row) * factors.ds_step + lane / Op::kPack,
                                  factors.ds_step, k_rows.data + lane / Op::kPack * k_rows.step, k_rows.step},
                                 {dq.row(head, i), dq.step, Epilogue::kAdd, nullptr});
      i = end;
    }
  }
}

// All keys of tiles first, first + stride, ... for the query heads [head, head + heads) of one batch entry.
template <class T, class Op>
void backward_heads(const Backward& p, const BackwardScratch<Op>& scratch, int64_t batch, int64_t head, int64_t heads,
                    int64_t first_tile, int64_t tile_stride, RowTerms<typename Op::Compute> terms,
                    const VisitingQueries<typename Op::Compute>& visiting, QueryGrad<typename Op::Compute> dq,
                    bool bias_grad, typename Op::Compute* bias_grads, PackedCache<typename Op::Scalar>* cache,
                    const Step<typename Op::Compute>& now) {
  using C = typename Op::Compute;
  using S = Simd<C>;
  using Scalar = typename Op::Scalar;
  const ScoreParams<C> score(p);
  const Wanted wanted(p);
  const int64_t group_k = p.heads_q / p.heads_k, group_v = p.heads_q / p.heads_v;
  const int64_t columns = (p.head_dim + S::kLanes - 1) / S::kLanes;
  const int64_t depth = (p.head_dim + Op::kPack - 1) / Op::kPack, depth_v = (p.head_dim_v + Op::kPack - 1) / Op::kPack;
  // With a bias, computing both products in registers pays off for pairs only.
  const bool biased = Op::kPack == 2 && score.has_bias && !score.capped() && !score.dropout;
  const bool prefetches_bias =
      biased && !p.relative && p.seqlen_q * p.seqlen_k * static_cast<int64_t>(sizeof(C)) >= kFarBytes;
  const bool prefetches = score.fast_path() && prefetches_queries<T, C>(p, wanted);
  C scale[kTile<C>], ones[kTile<C>];  // of dK: dS is the gradient of scores that already are scaled
  for (C& lane : scale) lane = score.signed_scale;
  for (C& lane : ones) lane = C(1);
  Result<T, Op> dk(p.dk, p.seqlen_k, p.head_dim, scratch.dk), dv(p.dv, p.seqlen_k, p.head_dim_v, scratch.dv);
  const bool need_ds = wanted.dq || wanted.dk || bias_grad;
  // Excluded blocks are left out, unless the bias's gradient is stored: it would have to be set to 0 there.
  const bool leaves_out = score.has_bias && !(bias_grad && bias_grads == nullptr);

  for (int64_t key = first_tile * kTile<C>; key < p.seqlen_k; key += tile_stride * kTile<C>) {
    const int64_t keys = min64(kTile<C>, p.seqlen_k - key);
    const int64_t vectors = (keys + S::kLanes - 1) / S::kLanes;
    Rows<Scalar> k_rows{};
    const int64_t dk_sums = kTile<C> * round_up(p.head_dim, S::kLanes),
                  dv_sums = kTile<C> * round_up(p.head_dim_v, S::kLanes);
    C* kept =
        now.sums + (now.sums == nullptr ? 0 : key / kTile<C> * (heads / group_k * dk_sums + heads / group_v * dv_sums));
    for (int64_t h = head; h < head + heads; ++h) {
      const int64_t head_k = h / group_k, head_v = h / group_v;
      if (h == head || h % group_k == 0) {
        load_key_tile<T, Op>(p, scratch, score, batch, head_k, key, keys);
        if (wanted.dq) k_rows = key_rows_of_sums<T, Op>(p, scratch, batch, h, key, keys);
        dk.begin(batch, head_k, key, keys);
        if (now.sums != nullptr) dk.go_on(kept, now.first), kept += dk_sums;
      }
      if (h == head || h % group_v == 0) {
        load_value_tile<T, Op>(p, scratch, batch, head_v, key, keys);
        dv.begin(batch, head_v, key, keys);
        if (now.sums != nullptr) dv.go_on(kept, now.first), kept += dv_sums;
      }

      const Range met = visiting.of(batch, h, key / kTile<C>);
      const Range within{max64(met.begin, now.rows.begin), min64(met.end, now.rows.end)};
      BandWalk<C> walk(p.band.transposed(), key, keys, within, kBlock<Op>);
      BlockPlan block;
      while (walk.next(block)) {
        if (block.segments == 0 || (leaves_out && excludes_all<T>(p, batch, h, block.row, block.rows, key, keys)))
          continue;
        const LaneBits* mask = nullptr;
        if ((score.has_mask || score.has_ranges) &&
            !apply_mask<C>(p, walk, 2, batch, h, key, keys, scratch.mask, block, mask))
          continue;
        const QueryRows<T, Op> queries{p, batch, h, block, cache == nullptr ? nullptr : cache + 2 * (h - head)};
        const auto q_rows = queries.q(scratch.q_rows, dk.by_rows());
        const auto grad_rows = queries.grad(scratch.grad_rows, dv.by_rows());
        const RowTerms<C> row_terms = terms.from((batch * p.heads_q + h) * p.seqlen_q);
        PrefetchStreams prefetch;
        if (prefetches)
          prefetch = queries_to_prefetch<T, Op>(p, block, batch, h, vectors,
                                                dq.to_prefetch(h - head, block.row, block.rows, p.head_dim));
        const int64_t bias_head = p.bias_size[1] == p.heads_q ? h - head : 0;
        const int64_t bias_entries = p.relative ? distances(p) : p.seqlen_q * p.seqlen_k;
        C* const bias_sums = bias_grads == nullptr ? nullptr : bias_grads + bias_head * bias_entries;
        const auto by_tiles = [&]<bool kBias>() {
          gradients_in_registers<Op, kBias>(scratch, score, walk, block, depth, need_ds ? depth_v : 0, row_terms,
                                            q_rows, grad_rows, mask, bias_grad,
                                            prefetches || prefetches_bias ? &prefetch : nullptr);
        };
        if (score.fast_path()) {
          by_tiles.template operator()<false>();
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
        if constexpr (Op::kPack == 2) {
          if (wanted.dk) q_sum = queries.packed_q(scratch.q_pairs);
          if (wanted.dv) grad_sum = queries.packed_grad(scratch.grad_pairs);
        }
        const bool last = walk.done() && now.sums == nullptr;
        if (wanted.dv) {
          grad_sum = attended_rows<T, Op>(grad_sum, p.grad_out, batch, h, block, p.head_dim_v,
                                          Op::kPack == 2 ? scratch.grad_pairs : scratch.grad_rows);
          dv.add(block, factors.probabilities, grad_sum, p.band.transposed(), nullptr,
                 last && (h + 1) % group_v == 0 ? ones : nullptr);
        }
        if (wanted.dk) {
          q_sum = attended_rows<T, Op>(q_sum, p.q, batch, h, block, p.head_dim,
                                       Op::kPack == 2 ? scratch.q_pairs : scratch.q_rows);
          dk.add(block, factors.ds, q_sum, p.band.transposed(), nullptr,
                 last && (h + 1) % group_k == 0 ? scale : nullptr);
        }
        if (wanted.dq) add_query_grad(dq, h - head, block, keys, columns, factors, k_rows);
      }

      if (wanted.dk && now.last && (h + 1) % group_k == 0) dk.end(scale);
      if (wanted.dv && now.last && (h + 1) % group_v == 0) dv.end(ones);
    }
  }
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

// Zeros for the gradient of a bias that has an entry per score.
template <class T>
void clear_bias_grad(const Backward& p, const Runtime& runtime) {
  const int64_t bytes = p.seqlen_q * p.seqlen_k * bias_bytes<T>(p);
  run_tasks(p, runtime, p.batch * p.heads_q, 0, [&](int64_t head, void*, int64_t) {
    std::memset(static_cast<char*>(p.dbias.data) + head * bytes, 0, static_cast<size_t>(bytes));
  });
}

// The KV groups whose key tiles several tasks share: `count` of them from `first` on, in `chunks` tasks each.
struct SplitGroups {
  int64_t first, count, kv_group, chunks;
};

// Adds up what the tasks of split groups made of dQ in some rows, `step` apart, and writes it to the output.
template <class T, class C>
void add_query_parts(const Backward& p, const Runtime& runtime, C* parts, const SplitGroups& split, int64_t step,
                     Range within) {
  using S = Simd<C>;
  constexpr int64_t kRows = 32;  // of a task
  const int64_t all = within.end - within.begin, head_step = all * step, pieces = (all + kRows - 1) / kRows;
  run_tasks(p, runtime, split.count * split.kv_group * pieces, 0, [&](int64_t task, void*, int64_t) {
    const int64_t piece = task % pieces, h = task / pieces % split.kv_group, index = task / pieces / split.kv_group;
    const int64_t row = piece * kRows, rows = min64(kRows, all - row);
    C* first = parts + (index * split.chunks * split.kv_group + h) * head_step + row * step;
    for (int64_t chunk = 1; chunk < split.chunks; ++chunk)
      for (int64_t i = 0; i < rows * step; i += S::kLanes)
        S::store(first + i, S::load(first + i) + S::load(first + chunk * split.kv_group * head_step + i));
    const int64_t head = (split.first + index) * split.kv_group + h;
    store_query_grad<T>(p, head / p.heads_q, head % p.heads_q, within.begin + row, rows, first, step);
  });
}

// Where tasks sum dQ. Whole KV groups: in the output, if it has room for the sums; else in a worker's scratch, or, if
// they are too large to stay there, in a buffer for each worker and, as far as they fit, the output. Tasks that share a
// KV group have parts of their own, unless there is but one; these go step by step.
template <class T, class C>
class QueryGradSums {
 public:
  QueryGradSums(const Backward& p, const Runtime& runtime, const SplitGroups& split)
      : p_(p),
        split_(split),
        wanted_(p.dq.data != nullptr),
        direct_(std::is_same_v<T, C> && p.head_dim % Simd<C>::kLanes == 0),
        split_direct_(direct_ && split.chunks == 1),
        step_(round_up(p.head_dim, Simd<C>::kLanes)),
        head_step_(p.seqlen_q * step_),
        sums_(wanted_ && !direct_ && split.first > 0 ? split.kv_group * head_step_ : 0),
        large_(sums_ > kScratchSums),
        rows_in_output_(large_ && sizeof(T) == 2 && sizeof(C) == 4 && step_ == p.head_dim && p.dq.stride[1] % 2 == 0 &&
                                p.dq.stride[2] == p.head_dim
                            ? p.seqlen_q / 2
                            : 0),
        large_step_(head_step_ - rows_in_output_ * step_),
        step_rows_(has_parts() ? min64(p.seqlen_q, max64(256, most_part_rows() / 64 * 64)) : p.seqlen_q),
        large_sums_(large_ ? min64(runtime.num_threads, split.first) * split.kv_group * large_step_ : 0),
        parts_(has_parts() ? split.count * split.chunks * split.kv_group * step_rows_ * step_ : 0) {}

  int64_t scratch_bytes() const { return large_ ? 0 : sums_ * static_cast<int64_t>(sizeof(C)); }
  // The queries of a step.
  int64_t step_rows() const { return step_rows_; }

  // Zeros, for the task's rows of its heads from `head` on. `scratch`: the worker's, of scratch_bytes().
  QueryGrad<C> begin(int64_t task, Range rows, int64_t batch, int64_t head, void* scratch, int64_t worker) const {
    const int64_t kv_group = split_.kv_group;
    QueryGrad<C> dq{nullptr, step_, head_step_};
    if (!wanted_ || p_.head_dim == 0) return dq;
    C* output = reinterpret_cast<C*>(at<T>(p_.dq, batch, head));
    if (in_place(task)) dq = {output, p_.dq.stride[2], p_.dq.stride[1]};
    else if (!is_whole(task)) {
      dq.head_step = (rows.end - rows.begin) * step_;
      dq.data = parts_.data() + (task - split_.first) * kv_group * dq.head_step - rows.begin * step_;
    } else if (!large_) dq.data = static_cast<C*>(scratch);
    else
      dq = {large_sums_.data() + worker * kv_group * large_step_,
            step_,
            large_step_,
            rows_in_output_,
            output,
            p_.dq.stride[1] / 2};
    for (int64_t h = 0; h < kv_group; ++h)
      for (int64_t i = rows.begin; i < rows.end; ++i)
        std::memset(dq.row(h, i), 0, static_cast<size_t>(in_place(task) ? p_.head_dim : step_) * sizeof(C));
    return dq;
  }
  // Writes the output, unless it takes the sums of other tasks, too.
  void end(int64_t task, int64_t batch, int64_t head, const QueryGrad<C>& dq) const {
    if (!wanted_ || !(is_whole(task) || in_place(task))) return;
    for (int64_t h = 0; h < split_.kv_group; ++h) {
      // In this order, since the sums lie in the output: a row is shorter than its sums, so no unread sum is
      // overwritten.
      store_query_grad<T>(p_, batch, head + h, 0, dq.split, dq.row(h, 0), dq.step);
      store_query_grad<T>(p_, batch, head + h, dq.split, p_.seqlen_q - dq.split, dq.row(h, dq.split), dq.step);
    }
  }
  // The output of split groups in the rows of a step that all tasks have ended.
  void add_parts(const Runtime& runtime, Range rows) const {
    if (has_parts()) add_query_parts<T>(p_, runtime, parts_.data(), split_, step_, rows);
  }

 private:
  static constexpr int64_t kScratchSums = 1 << 18;
  // All parts take 16 MiB, or a task's as much as a core's cache holds.
  static constexpr int64_t kStepSums = 1 << 14, kAllSums = 1 << 22;

  bool is_whole(int64_t task) const { return task < split_.first; }
  bool in_place(int64_t task) const { return is_whole(task) ? direct_ : split_direct_; }
  bool has_parts() const { return wanted_ && split_.count > 0 && !split_direct_; }
  int64_t most_part_rows() const {
    return max64(kStepSums, kAllSums / max64(1, split_.count * split_.chunks)) / max64(1, split_.kv_group * step_);
  }

  const Backward& p_;
  const SplitGroups split_;
  bool wanted_, direct_, split_direct_;
  int64_t step_, head_step_, sums_;  // sums_: of a worker, if they aren't in the output
  bool large_;
  int64_t rows_in_output_, large_step_;  // the rows of a head whose sums it has room for: if they lie together
  int64_t step_rows_;
  const Buffer<C> large_sums_, parts_;
};

// d(table) from the sums of all tasks, `size` for each: those of whole groups, then those of the split ones.
template <class T, class C>
void add_tables(const Backward& p, const C* sums, int64_t size, const SplitGroups& split) {
  const int64_t entries = distances(p), tables = p.bias_size[0] * p.bias_size[1], groups = split.first + split.count;
  const Buffer<C> total(tables * entries);
  std::memset(total.data(), 0, static_cast<size_t>(tables * entries) * sizeof(C));
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t batch = group * split.kv_group / p.heads_q, head = group * split.kv_group % p.heads_q;
    const int64_t table = (p.bias_size[0] == 1 ? 0 : batch) * p.bias_size[1] + (p.bias_size[1] == 1 ? 0 : head);
    C* const target = total.data() + table * entries;
    for (int64_t part = 0; part < (group < split.first ? 1 : split.chunks); ++part, sums += size)
      for (int64_t i = 0; i < size; ++i) target[i] += sums[i];
  }
  with_bias_grad<T>(p, [&]<class Bias>(Bias* dbias) {
    for (int64_t i = 0; i < tables * entries; ++i) dbias[i] = from_compute<Bias>(total.data()[i]);
  });
}

template <class T, class Op>
void backward(const Backward& p, const Runtime& runtime, const SinksGradient<typename Op::Compute>& sinks) {
  using C = typename Op::Compute;
  const Wanted wanted(p);
  const int64_t all_heads = p.batch * p.heads_q;
  if (all_heads == 0) return;  // the caller has filled the gradients with zeros
  const int64_t all_rows = all_heads * p.seqlen_q;
  const Buffer<C> shift(all_rows), delta(all_rows);
  const Buffer<C> norm(needs_norm<T>(p, static_cast<const C*>(p.lse), all_rows) ? all_rows : 0);
  const RowTerms<C> terms{shift.data(), delta.data(), norm.data()};
  const BackwardScratch<Op> sizes(nullptr, p);
  const int64_t kv_group = heads_of_kv_group(p), kv_groups = all_heads / kv_group;
  const int64_t tiles = max64(1, (p.seqlen_k + kTile<C> - 1) / kTile<C>);
  const bool bias_has_compute_type = p.bias_dtype == DType::kFloat32 ? std::is_same_v<C, float> : std::is_same_v<T, C>;
  const BiasGradPlan<C> bias_plan(p, runtime.num_threads, bias_has_compute_type);
  const bool bias_apart = bias_plan.way == bias_plan.kApart;
  const bool bias_sums = bias_plan.way == bias_plan.kAdded;
  const bool by_task = bias_plan.way == bias_plan.kByTask;
  const bool sweeps = wanted.dq || wanted.dk || wanted.dv || by_task;
  // Whole KV groups as long as every thread gets one; the remaining groups are split by key tiles.
  const int64_t left = tiles == 1 || bias_sums ? 0 : kv_groups % runtime.num_threads, whole = kv_groups - left;
  const int64_t chunks = left == 0 ? 1 : min64(tiles, (runtime.num_threads + left - 1) / left);

  // A task that has a whole KV group computes its row terms itself; those of split groups are computed first.
  const auto terms_of = [&](const BackwardScratch<Op>& scratch, int64_t batch, int64_t head, int64_t row,
                            int64_t rows) {
    make_terms<T>(p, scratch, batch, head, row, rows, terms);
    sinks.add(batch, head, row, rows, terms.delta);
  };
  const bool terms_first = bias_apart || !sweeps;  // of all heads
  const int64_t pieces = task_pieces(p.seqlen_q), first_head = terms_first ? 0 : whole * kv_group;
  const int64_t terms_bytes = norm.data() == nullptr ? 0 : sizes.bytes;
  run_tasks(p, runtime, (all_heads - first_head) * pieces, terms_bytes, [&](int64_t task, void* memory, int64_t) {
    const BackwardScratch<Op> scratch(memory, p);
    const int64_t head = first_head + task / pieces, row = task % pieces * kTaskRows;
    terms_of(scratch, head / p.heads_q, head % p.heads_q, row, min64(kTaskRows, p.seqlen_q - row));
  });
  if (bias_apart) backward_bias<T, Op>(p, runtime, terms);
  if (bias_plan.way == bias_plan.kStored &&
      (p.band.left < kUnbounded || p.band.right < kUnbounded || p.ranges.data != nullptr))
    clear_bias_grad<T>(p, runtime);  // the tiles leave out what lies outside the band and the ranges
  if (!sweeps) return;

  const VisitingQueries<C> visiting(p);
  const SplitGroups split{whole, left, kv_group, chunks};
  const QueryGradSums<T, C> query_grads(p, runtime, split);
  const int64_t step_rows = query_grads.step_rows();
  const int64_t kept_of_tile =
      kTile<C> * (kv_group / (p.heads_q / p.heads_k) * round_up(p.head_dim, Simd<C>::kLanes) +
                  kv_group / (p.heads_q / p.heads_v) * round_up(p.head_dim_v, Simd<C>::kLanes));
  const Buffer<C> kept(step_rows < p.seqlen_q ? left * tiles * kept_of_tile : 0);
  Step<C> now{{0, step_rows}, true, step_rows == p.seqlen_q};

  const int64_t tasks = bias_sums ? bias_plan.groups * bias_plan.tasks : whole + left * chunks;
  const Buffer<C> bias_grads(by_task || (bias_sums && !bias_plan.in_output()) ? tasks * bias_plan.size : 0);
  // Of q and of grad_out, where the queries are walked more than once.
  const int64_t copies = tiles > 1 && (kConverts<T, Op> || Op::kPack == 2) ? 2 * kv_group : 0;
  const int64_t widest = round_up(max64(p.head_dim, p.head_dim_v), Simd<C>::kLanes);
  const PackedCaches<typename Op::Scalar> caches(min64(runtime.num_threads, tasks), copies,
                                                 (p.seqlen_q + Op::kPack - 1) / Op::kPack, widest);
  const int64_t scratch_bytes = sizes.bytes + caches.bytes() + query_grads.scratch_bytes();
  const auto body = [&](int64_t task, void* memory, int64_t worker, C* grads_of_bias) {
    const BackwardScratch<Op> scratch(memory, p);
    char* cache_memory = static_cast<char*>(memory) + sizes.bytes;
    const bool is_whole = task < whole;
    const int64_t index = is_whole ? task : whole + (task - whole) / chunks,
                  chunk = is_whole ? 0 : (task - whole) % chunks;
    const int64_t batch = index * kv_group / p.heads_q, head = index * kv_group % p.heads_q;
    Step<C> of_task{{0, p.seqlen_q}};
    if (!is_whole) of_task = now;
    if (!is_whole && kept.data() != nullptr) of_task.sums = kept.data() + (index - whole) * tiles * kept_of_tile;
    if (is_whole && !bias_apart)
      for (int64_t h = head; h < head + kv_group; ++h) terms_of(scratch, batch, h, 0, p.seqlen_q);
    const QueryGrad<C> dq = query_grads.begin(task, of_task.rows, batch, head, cache_memory + caches.bytes(), worker);
    backward_heads<T, Op>(p, scratch, batch, head, kv_group, chunk, is_whole ? 1 : chunks, terms, visiting, dq,
                          bias_sums || by_task || bias_plan.way == bias_plan.kStored, grads_of_bias,
                          caches.of(worker, cache_memory), of_task);
    query_grads.end(task, batch, head, dq);
  };
  const auto run = [&](int64_t task, void* memory, int64_t worker) {
    if (by_task) {
      C* const grads = bias_grads.data() + task * bias_plan.size;
      if (now.first) std::memset(grads, 0, static_cast<size_t>(bias_plan.size) * sizeof(C));
      return body(task, memory, worker, grads);
    }
    if (!bias_sums) return body(task, memory, worker, nullptr);
    const int64_t group = task / bias_plan.tasks, part = task % bias_plan.tasks;
    C* grads = bias_plan.in_output() ? static_cast<C*>(p.dbias.data) + group * bias_plan.size
                                     : bias_grads.data() + task * bias_plan.size;
    std::memset(grads, 0, static_cast<size_t>(bias_plan.size) * sizeof(C));
    const int64_t end = bias_plan.members * (part + 1) / bias_plan.tasks;
    for (int64_t member = bias_plan.members * part / bias_plan.tasks; member < end; ++member)
      body(bias_plan.kv_group(group, member), memory, worker, grads);
  };
  run_tasks(p, runtime, tasks, scratch_bytes, run);
  query_grads.add_parts(runtime, now.rows);
  while (!now.last) {
    now.rows = {now.rows.end, min64(p.seqlen_q, now.rows.end + step_rows)};
    now.first = false, now.last = now.rows.end == p.seqlen_q;
    run_tasks(p, runtime, left * chunks, scratch_bytes,
              [&](int64_t task, void* memory, int64_t worker) { run(whole + task, memory, worker); });
    query_grads.add_parts(runtime, now.rows);
  }
  if (by_task) add_tables<T>(p, bias_grads.data(), bias_plan.size, split);
  else if (bias_grads.data() != nullptr) add_bias_grads<T>(p, runtime, bias_plan, bias_grads.data());
}

}  // namespace
}  // namespace attnkern::cpu
