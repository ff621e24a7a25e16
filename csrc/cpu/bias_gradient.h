// The gradient of a bias: in a sweep of its own, or from the sums that the backward pass's tasks have made.
#pragma once

#include "row_terms.h"

namespace attnkern::cpu {
namespace {

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
    BackwardScratch<Op> scratch(memory, p);
    scratch.tiles = false;
    C* sum = reinterpret_cast<C*>(static_cast<char*>(memory) + scratch_bytes);  // [query][lane]
    for (int64_t i = 0; i < sums; ++i) sum[i] = C(0);
    const ScoreParams<C> score(p);
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
            const LaneBits* mask = nullptr;
            if (score.has_ranges && !apply_mask<C>(p, walk, 2, batch, head, key, keys, scratch.mask, block, mask))
              continue;
            const auto q_rows =
                operand_rows<Op, T>(p.q, batch, head, block.row, block.rows, p.head_dim, scratch.q_rows);
            const auto grad_rows =
                operand_rows<Op, T>(p.grad_out, batch, head, block.row, block.rows, p.head_dim_v, scratch.grad_rows);
            score_block<T, Op>(p, scratch, score, walk, block, batch, head, key, keys,
                               terms.from((batch * p.heads_q + head) * p.seqlen_q), true, true, mask, {q_rows},
                               {grad_rows});
            for (int64_t s = 0; s < block.segments; ++s) {
              const Segment& segment = block.segment[s];
              for (int64_t i = segment.row; i < segment.row + segment.rows; ++i)
                for (int64_t v = segment.first; v < segment.last; ++v) {
                  C* total = sum + (per_query ? i - queries.begin : 0) * kTile<C> + v * S::kLanes;
                  auto ds = S::load(scratch.bias + (i - block.row) * kTile<C> + v * S::kLanes);
                  if ((v + 1) * S::kLanes > keys)  // lanes past the last key hold garbage
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

// d(bias) from the sums of the tasks, group after group.
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

}  // namespace
}  // namespace attnkern::cpu
