// Forward pass, tiled with an online softmax (Milakov & Gimelshein 2018; Dao et al., FlashAttention, 2022).
//
// A task owns a tile of up to kTile queries of one head. The queries lie along the vector lanes and scores are held
// transposed, S^T[key][query]:
//
//     S^T = K Q^T          A = K rows as they lie in memory, broadcast;  B = Q^T, transposed once per task
//     P^T = exp(S^T - m)   running maximum m, sum l and rescaling are all vertical: no sum across lanes anywhere
//     O += P V             A = P^T where S^T was, broadcast;  B = V rows as they lie in memory, columns along the lanes
//
// so K and V are neither packed nor transposed, and O comes out as the user has it. (Rows that lie apart are copied:
// copies() in ForwardCall.) Where that would leave more lanes idle than the queries do, the second product is
// O^T += V^T P^T instead, with lanes as in the first (sums_by_rows). Each block's sums begin at 0 and are then added to
// the rescaled total (one fma): the order of summation that loses least.
#pragma once

#include "odd_queries.h"
#include "tasks.h"

namespace attnkern::cpu {
namespace {

// 1 / l, and the log-sum-exp where m was. A row that no key was left for: 0, so that its output is exactly 0, whatever
// V holds, and lse -inf, or the sink. NaN in the sum stays NaN.
template <class Op, bool kFastPath>
inline void finish_sums(const Forward& p, const ForwardScratch<Op>& scratch, int64_t batch, int64_t head,
                        int64_t vectors) {
  using C = typename Op::Compute;
  using S = Simd<C>;
  using V = typename S::V;
  const V sink = S::set1(sink_of<C>(p, batch, head)), log2e = S::set1(kLog2E<C>);
  for (int64_t lane = 0; lane < vectors * S::kLanes; lane += S::kLanes) {
    V sum = S::load(scratch.sum + lane), largest = S::load(scratch.largest + lane);
    V share = S::set1(C(1)), to_natural = S::set1(kFastPath ? C(1) / kLog2E<C> : C(1));
    if (p.sinks.data != nullptr) {
      largest *= to_natural;
      const V m = S::max(largest, sink), shift = m == S::set1(-kInfinity<C>) ? S::zero() : m;
      share = S::exp2((largest - shift) * log2e);
      sum = S::fma(sum, share, S::exp2((sink - shift) * log2e));
      largest = m, to_natural = S::set1(C(1));
    }
    const auto dead = sum == S::zero();
    S::store(scratch.inverse + lane, dead ? S::zero() : share / sum);
    if (p.lse == nullptr) continue;
    S::store(scratch.largest + lane, dead ? S::set1(-kInfinity<C>) : S::fma(largest, to_natural, S::log(sum)));
  }
}

// How often rows can be prefetched while the scores of a block are computed: after so many steps each time.
template <class Op>
inline int64_t prefetch_calls_of_scores(const Forward& p, int64_t rows, int64_t vectors, int64_t depth, int64_t steps) {
  if constexpr (Tiles<Op>::kHas)
    if (Tiles<Op>::uses(p)) return Tiles<Op>::calls(rows, vectors, depth);
  return max64(1, prefetch_calls<kTileRows * kTileVectors, kTileVectors>(rows, vectors, depth, steps));
}

// To be prefetched then: of the next block K and V and the mask or bias.
template <class T>
inline PrefetchStreams keys_to_prefetch(const Forward& p, const BlockPlan& block, int64_t batch, int64_t head,
                                        int64_t query, int64_t queries, bool keys, bool bias, int64_t calls) {
  const int64_t row = block.row + block.rows;
  const auto rows_of = [&](const View& view, int64_t heads, int64_t columns) {
    return together_to_prefetch<T>(KeyRows(view, p.pages), batch, head / (p.heads_q / heads), row, block.rows,
                                   p.seqlen_k, columns);
  };
  PrefetchStreams prefetch;
  if (keys) {
    prefetch.first = {rows_of(p.k, p.heads_k, p.head_dim), calls};
    prefetch.second = {rows_of(p.v, p.heads_v, p.head_dim_v), calls};
  }
  if (bias)
    prefetch.third = {bias_to_prefetch<T>(p, batch, head, query, queries, row, min64(block.rows, p.seqlen_k - row)),
                      calls};
  return prefetch;
}

// A step of the softmax for a block in pairs: its maxima, times `factor`, join the running ones, from which its
// probabilities are shifted. Whether all of them are small.
template <class Op, bool kFastPath>
inline bool shift_to_maximum(const ForwardScratch<Op>& scratch, int64_t vectors, typename Op::Compute factor) {
  using C = typename Op::Compute;
  using S = Simd<C>;
  using V = typename S::V;
  auto small = S::zero() == S::zero();
  for (int64_t lane = 0; lane < vectors * S::kLanes; lane += S::kLanes) {
    const V old = S::load(scratch.largest + lane);
    const V m = S::max(S::load(scratch.block_largest + lane) * S::set1(factor), old);
    small &= (S::max(m, -m) < S::set1(kLargeScore)) | (m == S::set1(-kInfinity<C>));
    S::store(scratch.shift + lane, -new_maximum(scratch, lane, old, m, kFastPath ? C(1) : kLog2E<C>));
    S::store(scratch.block_sum + lane, S::zero());  // a sum of its own for each block: long rows lose less
  }
  return S::all(small);
}

// What the task of the next head begins with. The machine's own prefetching ends where the rows of a head do.
struct NextHead {
  PrefetchRows q, k, v;

  PrefetchStreams streams(int64_t calls) const { return {{k, calls}, {v, calls}, {q, calls}}; }
};

template <class T, class Op, bool kFastPath>
void forward_tile(const Forward& p, const ForwardScratch<Op>& scratch, PackedCache<typename Op::Scalar>* cache,
                  int64_t copies, int64_t batch, int64_t head, int64_t query, int64_t queries, bool prefetches,
                  const NextHead* next_head) {
  using C = typename Op::Compute;
  using S = Simd<C>;
  using Scalar = typename Op::Scalar;
  const ScoreParams<C> score(p);
  const int64_t head_k = head / (p.heads_q / p.heads_k), head_v = head / (p.heads_q / p.heads_v);
  const KeyRows k_rows(p.k, p.pages), v_rows(p.v, p.pages);
  const int64_t vectors = (queries + S::kLanes - 1) / S::kLanes;
  const int64_t depth = (p.head_dim + Op::kPack - 1) / Op::kPack;

  transpose_tile<Op>(operand_rows<Op, T>(p.q, batch, head, query, queries, p.head_dim, scratch.rows), queries, depth,
                     score.template operand_factor<Op>(), scratch.query_tile);
  const typename Tiles<Op>::Setup tiles(scratch.tiles);
  for (int64_t v = 0; v < vectors; ++v) {
    S::store(scratch.largest + v * S::kLanes, S::set1(-kInfinity<C>));
    S::store(scratch.sum + v * S::kLanes, S::zero());
  }

  Result<T, Op> out(p.out, p.seqlen_q, p.head_dim_v, scratch.out, scratch.tiles);
  out.begin(batch, head, query, queries);
  bool opening = true;
  const auto accumulate = [&](const BlockPlan& block, C* probabilities, bool rescale, bool last) {
    if (add_by_unit(out, scratch.tiles, v_rows, p.heads_v, batch, head_v, block, vectors, p.seqlen_k, p.head_dim_v,
                    scratch.rows, cache, reinterpret_cast<Scalar*>(probabilities), scratch.correction))
      return;
    Rows<Scalar> values;
    if (kConverts<T, Op> || Op::kPack == 2 || copies > 0)
      values = packed_rows<T, Op>(v_rows, p.heads_v, batch, head_v, block.row, block.rows, p.seqlen_k, p.head_dim_v,
                                  scratch.rows, scratch.tiles ? nullptr : cache);
    else
      values =
          operand_rows<Op, T>(v_rows, batch, head_v, block.row, block.rows, p.head_dim_v, scratch.rows, out.by_rows());
    values = attended_rows<T, Op>(values, v_rows, batch, head_v, block, p.head_dim_v, scratch.rows);
    const bool stores = last && out.by_rows();
    if (stores) finish_sums<Op, kFastPath>(p, scratch, batch, head, vectors);
    out.add(block, reinterpret_cast<Scalar*>(probabilities), values, p.band, rescale ? scratch.correction : nullptr,
            stores ? scratch.inverse : nullptr);
  };

  // Probabilities that are rounded to bfloat16 lose least if the largest is 1: scores in pairs wait for their block's
  // maximum in memory, and become probabilities while the next block's products run.
  const bool waits = Op::kPack == 2 && !score.capped();
  const C factor = kFastPath ? score.template product_factor<Op>() : C(1);
  PairProbabilities<Op, kFastPath> probabilities;
  C* scores = scratch.scores;
  BlockPlan plans[2], *block = plans, *waiting = nullptr;
  const auto finish_waiting = [&](bool last) {
    if (waiting == nullptr) return;
    probabilities.finish(*waiting);
    for (int64_t lane = 0; lane < vectors * S::kLanes; lane += S::kLanes)
      S::store(scratch.sum + lane, S::load(scratch.sum + lane) + S::load(scratch.block_sum + lane));
    accumulate(*waiting, probabilities.scores, true, last);
  };
  const VisitedKeys visited(p, batch, head, 1, query, queries, {0, p.seqlen_k});
  BandWalk<C> walk(p.band, query, queries, visited.first(), most_rows<Op>(scratch.tiles), visited.second());
  const bool prefetches_bias = p.bias.data != nullptr && has_bias_rows(p);
  while (walk.next(*block)) {
    if (block->segments == 0 ||
        (score.has_bias && excludes_all<T>(p, batch, head, query, queries, block->row, block->rows)))
      continue;
    const LaneBits* mask = nullptr;
    if ((score.has_mask || !visited.shares(block->row, block->rows)) &&
        !apply_mask<C>(p, walk, 3, batch, head, query, queries, scratch.mask, *block, mask))
      continue;
    ReadableRows<Scalar> keys;
    if (kConverts<T, Op> || copies == 2)
      keys = {packed_rows<T, Op>(k_rows, p.heads_k, batch, head_k, block->row, block->rows, p.seqlen_k, p.head_dim,
                                 scratch.rows, cache == nullptr ? nullptr : cache + 1)};
    else
      keys = rows_of_scores<T, Op>(k_rows, batch, head_k, *block, p.seqlen_k, p.head_dim, scratch.rows, scratch.tiles);
    PrefetchStreams prefetch, *next = nullptr;
    const auto calls = [&] {
      return prefetch_calls_of_scores<Op>(p, block->rows, vectors, depth, probabilities.pace(block->rows, depth));
    };
    if (prefetches || prefetches_bias) {
      prefetch = keys_to_prefetch<T>(p, *block, batch, head, query, queries, prefetches, prefetches_bias, calls());
      next = &prefetch;
    } else if (next_head != nullptr && walk.done()) {
      prefetch = next_head->streams(calls());
      next = &prefetch;
    }
    if (waits) {
      if (score.has_bias)
        bias_tile<C, T>(p, 3, batch, head, block->row, block->rows, query, queries,
                        scratch.tiles ? scratch.bias : scores);
      store_scores<Op, kFastPath>(scratch, score, walk, *block, vectors, depth, keys, mask, scores, next,
                                  &probabilities);
      finish_waiting(false);
      if (score.dropout) dropout_tile<C>(p, 3, batch, head, block->row, block->rows, query, queries, scratch.keep);
      const bool small = shift_to_maximum<Op, kFastPath>(scratch, vectors, factor);
      const bool scaled = kFastPath && !small;
      if (scaled) scale_scores<C>(*block, factor, scores);
      probabilities = {scaled ? C(1) : factor, scratch.shift, score.dropout ? scratch.keep : nullptr, scores,
                       scratch.block_sum};
      probabilities.begin(*block);
      waiting = block;
      block = block == plans ? plans + 1 : plans;
      scores = scratch.scores + (scores == scratch.scores ? kBlock<Op> * kTile<C> : 0);
      continue;
    }
    bool rescale = true;
    if constexpr (kFastPath)
      rescale = probabilities_in_registers(scratch, score, walk, *block, vectors, depth, keys, mask, next, opening);
    else
      probabilities_through_memory<T, Op>(p, scratch, score, walk, *block, batch, head, query, queries, depth, keys,
                                          mask, next);
    accumulate(*block, scratch.scores, rescale, walk.done());
  }
  finish_waiting(true);

  if (!out.stored()) {  // the last block was left out, or the lanes are queries
    finish_sums<Op, kFastPath>(p, scratch, batch, head, vectors);
    out.end(scratch.inverse);
  }
  if (p.lse != nullptr)
    std::memcpy(static_cast<C*>(p.lse) + lse_index(p, batch, head, query), scratch.largest,
                static_cast<size_t>(queries) * sizeof(C));
}

// Whether products of a dtype are made of pairs.
inline bool in_pairs([[maybe_unused]] DType dtype) {
#if defined(__AVX512BF16__)
  return dtype == DType::kBFloat16;
#else
  return false;
#endif
}

// Up to so many keys tiles of so many queries are faster than decoding, with AVX-512 (as measured): up to half a vector
// of queries leaves decoding more, and keys that aren't converted or are multiplied in pairs leave it less. Up to eight
// of float32 are decoded, since their backward pass is: it shows which order of summation the forward pass had.
inline int64_t keys_of_tiles(int64_t queries, DType dtype) {
  const bool pairs = in_pairs(dtype);
  if (queries <= 4 || (queries <= 8 && dtype == DType::kFloat32)) return 0;
  if (queries <= 8) return pairs ? 11 * queries - 23 : 4 * queries - 12;
  return pairs ? 45 * (queries - 6) : dtype == DType::kFloat32 ? 30 * (queries - 7) : 10 * (queries - 6);
}

// Calls with few query rows of one key head go another way (decode.h), which sums a product's terms in another order:
// up to kDecodeRows of any kind, and more where heads share them. Not so where a head's own queries fill the lanes as
// well, or meet so few keys that a task's beginning and end count. (As measured.) `backward`: whether the
// backward pass does; its tiles are transposed twice, and take more queries of 16 bits to pay.
inline constexpr int64_t kDecodeRows = 16, kDecodeQueries = 12, kDecodeKeysPerQuery = 16;
inline bool decodes(const Attention& p, bool backward = false) {
  if (p.heads_k != p.heads_v || p.heads_k == 0) return false;
  const int64_t group = p.heads_q / p.heads_k, queries = p.seqlen_q;
  const Range visited = p.band.visited(0, queries, {0, p.seqlen_k});
  const int64_t keys = visited.end - visited.begin;
  if (group * queries > kDecodeRows)
    return shares_rows(group, queries) && queries <= kDecodeQueries && keys >= kDecodeKeysPerQuery * queries;
  const bool halves = p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16;
  if (kVectorBytes == 64 && (p.dtype == DType::kFloat32 || (halves && !backward)))
    return keys > keys_of_tiles(queries, p.dtype);
  // Keys of 16 bits are converted for each tile: that takes more queries to pay. What comes from memory is read faster
  // in decoding's order.
  const int64_t lanes = p.dtype == DType::kFloat64 ? Simd<double>::kLanes : Simd<float>::kLanes;
  const int64_t bytes = p.batch * p.heads_k * keys * (p.head_dim + p.head_dim_v) * bytes_of(p.dtype);
  const bool near = kVectorBytes < 64 && p.dtype == DType::kFloat32 && bytes < kFarBytes;
  return 8 * queries <= 5 * lanes || keys > (halves ? 3 * queries - 8 : near ? 24 * queries : 8 * queries);
}

// Calls with few keys go a third way (few_keys.h), but for ranges, bits and pages. With more queries a tile of them is
// faster: with AVX-512 where they meet so many scores, the sooner in pairs of bfloat16 (as measured), unless rows lie
// apart, which that way prefetches; and where there is a bias and the backward pass isn't one of few queries
// (few_queries.h), which would have to sum up P again.
inline constexpr int64_t kFewKeys = 8, kQueriesOfFewKeys = 16;
inline bool has_few_keys(const Attention& p) {
  const bool pairs = in_pairs(p.dtype);
  const int64_t queries = pairs ? 6 : 12, scores = pairs ? 42 : 80;
  constexpr int64_t kBiased = kVectorBytes == 64 ? kQueriesOfFewKeys : kVectorBytes == 32 ? 12 : 8;
  if (kVectorBytes == 64 && p.seqlen_q > queries && p.seqlen_q * p.seqlen_k >= scores && !lie_apart(p.k, p.head_dim))
    return false;
  if (p.bias.data != nullptr && p.seqlen_q > kBiased) return false;
  return p.seqlen_k <= kFewKeys && p.seqlen_q <= kQueriesOfFewKeys && !p.bits && p.ranges.data == nullptr &&
         p.pages.table == nullptr && reads_in_place(p.q, p.head_dim) && reads_in_place(p.k, p.head_dim) &&
         reads_in_place(p.v, p.head_dim_v);
}

// How a head's queries are cut into tasks: `vectors` of them, which may reach beyond the last query, into `tiles`.
struct ForwardCut {
  int64_t tiles, vectors;
  template <class C>
  int64_t begin_of(int64_t tile) const {
    return vectors * tile / tiles * Simd<C>::kLanes;
  }
};
// Whole tiles; where a thread gets few of them, as many even ones as end soonest: the threads' rounds, times what a
// tile takes. A narrow one takes more for each vector. Uneven tasks, half as much as the longest on average, come
// longest first, and fill the gaps.
template <class C>
inline ForwardCut cut_forward(int64_t heads, int64_t rows, int64_t threads, bool uneven) {
  constexpr int64_t kLanes = Simd<C>::kLanes, kRounds = 8;
  const int64_t whole = (rows + kTile<C> - 1) / kTile<C>, vectors = (rows + kLanes - 1) / kLanes;
  ForwardCut best{whole, whole * (kTile<C> / kLanes)};
  if (threads == 1 || heads * whole == 0 || heads * whole >= kRounds * threads) return best;
  const int64_t fewest = (heads * whole + threads - 1) / threads;
  double least = 0;
  for (int64_t rounds = fewest; rounds < fewest + kRounds; ++rounds) {
    const int64_t tiles = min64(vectors, max64(whole, rounds * threads / heads));
    const auto time_of = [](double tile_rows) { return 8 * tile_rows + kTile<C>; };
    const double longest = time_of(static_cast<double>((vectors + tiles - 1) / tiles * kLanes));
    const double tile = time_of(static_cast<double>(rows) / static_cast<double>(tiles));
    const double time = uneven ? std::max(longest, 0.5 * static_cast<double>(rounds + 1) * tile)
                               : static_cast<double>(rounds - 1) * tile + longest;
    if (least == 0 || time < least) best = {tiles, vectors}, least = time;
  }
  return best;
}

// A forward pass as one phase of tasks, of a tile of queries each.
template <class T, class Op>
class ForwardCall {
  using C = typename Op::Compute;

 public:
  // Cut for so many threads; `workers`: how many run tasks, of this call or of others beside it.
  ForwardCall(const Forward& p, int64_t threads, int64_t workers)
      : p_(p),
        odd_(odd_queries<Op>(p)),
        queries_(p.seqlen_q - odd_),
        heads_(p.batch * p.heads_q),
        // A causal mask makes the first tasks the longest.
        uneven_((p.band.left < kUnbounded) != (p.band.right < kUnbounded)),
        in_order_(heads_ < threads && uneven_),
        window_(is_window(p.band)),
        fast_path_(ScoreParams<C>(p).fast_path()),
        cut_(cut_forward<C>(heads_, queries_, threads, uneven_)),
        workers_(workers),
        prefetches_heads_(prefetches_heads()),
        prefetches_(p.seqlen_k * (p.head_dim + p.head_dim_v) * static_cast<int64_t>(sizeof(T)) >= far()),
        sizes_(nullptr, p),
        odd_bytes_(odd_ == 0 ? 0 : odd_scratch<Op>(nullptr, p, odd_).bytes),
        copies_(copies()),
        caches_(workers, copies_, cached_rows<Op>(p.seqlen_k, sizes_.tiles) / Op::kPack,
                round_up(copies_ == 2 ? max64(p.head_dim, p.head_dim_v) : p.head_dim_v, Simd<C>::kLanes),
                window_ && Op::kPack == 1) {}

  int64_t phases() const { return 1; }
  int64_t tasks(int64_t) const { return heads_ * cut_.tiles; }
  int64_t scratch_bytes(int64_t) const { return tile_bytes() + caches_.bytes(); }
  // One for each head, so that a worker packs values of few.
  int64_t queues(int64_t) const { return in_order_ ? heads_ : 0; }
  int64_t queue_end(int64_t, int64_t queue) const { return (queue + 1) * cut_.tiles; }
  void run(int64_t, int64_t task, void* memory, int64_t worker) const {
    const ForwardScratch<Op> scratch(memory, p_);
    // Last tiles first: under a causal mask they are the longest. First tiles first under a window: keys that no tile
    // has met come last, so that they are prefetched, and packed, behind those that are there.
    const int64_t head = task / cut_.tiles, at = task % cut_.tiles, tile = window_ ? at : cut_.tiles - 1 - at;
    const int64_t query = cut_.begin_of<C>(tile), end = min64(cut_.begin_of<C>(tile + 1), queries_);
    const auto run = fast_path_ ? forward_tile<T, Op, true> : forward_tile<T, Op, false>;
    const bool prefetches = prefetches_heads_ && at == cut_.tiles - 1 && head + 1 < heads_;
    const NextHead next_head = prefetches ? begin_of_head(head + 1) : NextHead();
    const auto cache = caches_.of(worker, static_cast<char*>(memory) + tile_bytes());
    const int64_t batch = head / p_.heads_q, of_batch = head % p_.heads_q;
    run(p_, scratch, cache, copies_, batch, of_batch, query, end - query, prefetches_,
        prefetches ? &next_head : nullptr);
    if (odd_ > 0 && tile == cut_.tiles - 1 && !OddQueries<T, Op>(p_, memory, batch, of_batch, queries_).attend())
      run(p_, scratch, cache, copies_, batch, of_batch, queries_, odd_, false, nullptr);
  }
  // To be called before a worker's scratch is used for this call, at first and whenever others have used it.
  void forget(int64_t worker) const { caches_.forget(worker); }
  void end() const {}

 private:
  int64_t tile_bytes() const { return max64(sizes_.bytes, odd_bytes_); }
  // Few tiles hardly bring keys and values nearer, nor do those of a window, which meet keys that none has met before.
  int64_t far() const { return cut_.tiles <= 4 || window_ ? kFarBytes / 4 : kFarBytes; }
  // Many heads of few tiles, from memory. To the first-level cache, of rows that lie apart short ones of one tile that
  // don't all begin in the same lines of it: others would drive out of it what is read now.
  bool prefetches_heads() const {
    constexpr int64_t kTiles = 4, kShortRow = 256, kBytes = sizeof(T);
    if (p_.pages.table != nullptr || in_order_ || cut_.tiles > kTiles) return false;
    if (kPrefetchTo == 3) {
      const auto crowded = [&](const View& view, int64_t columns) {
        return collide<T>(view, columns) ||
               (lie_apart(view, columns) && (cut_.tiles > 1 || columns * kBytes > kShortRow));
      };
      if (crowded(p_.k, p_.head_dim) || crowded(p_.v, p_.head_dim_v)) return false;
    }
    const int64_t entry =
        p_.seqlen_q * p_.heads_q * p_.head_dim + p_.seqlen_k * (p_.heads_k * p_.head_dim + p_.heads_v * p_.head_dim_v);
    return entries_of_call(p_) * entry * kBytes >= (kBytes == 2 ? 6 : 3) * kFarBytes / 4 * workers_;
  }
  NextHead begin_of_head(int64_t head) const {
    const int64_t batch = head / p_.heads_q, at = head % p_.heads_q, group_k = p_.heads_q / p_.heads_k,
                  group_v = p_.heads_q / p_.heads_v, tile = window_ ? 0 : cut_.tiles - 1;
    const auto rows_of = [&](const View& view, int64_t h, int64_t row, int64_t rows, int64_t length, int64_t columns) {
      return rows_to_prefetch<T>(view, batch, h, row, rows, length, columns);
    };
    NextHead next{rows_of(p_.q, at, cut_.begin_of<C>(tile), kTile<C>, p_.seqlen_q, p_.head_dim), {}, {}};
    if (at % group_k == 0) next.k = rows_of(p_.k, at / group_k, 0, kBlock<Op>, p_.seqlen_k, p_.head_dim);
    if (at % group_v == 0) next.v = rows_of(p_.v, at / group_v, 0, kBlock<Op>, p_.seqlen_k, p_.head_dim_v);
    return next;
  }
  // What is copied once for all tiles of a head: 1, values, in pairs; 2, keys, too, converted or gathered. And rows
  // that lie apart, of which a tile reads the values for every few queries, the keys for every few vectors of them.
  int64_t copies() const {
    constexpr int64_t kTilesForCrowds = 3, kTilesForRows = 8;
    if (cut_.tiles <= 1) return 0;
    if (Op::kPack == 2) return 1;
    if (kConverts<T, Op> || p_.pages.table != nullptr) return 2;
    if (!lie_apart(p_.v, p_.head_dim_v)) return 0;
    if (window_) return crowds<T>(p_.v, p_.head_dim_v) ? 2 : 0;
    if (cut_.tiles < (crowds<T>(p_.v, p_.head_dim_v) ? kTilesForCrowds : kTilesForRows)) return 0;
    return cut_.tiles >= kTilesForRows && lie_apart(p_.k, p_.head_dim) ? 2 : 1;
  }

  const Forward& p_;
  const int64_t odd_, queries_, heads_;  // queries_: of the tiles
  const bool uneven_, in_order_, window_, fast_path_;
  const ForwardCut cut_;
  const int64_t workers_;
  const bool prefetches_heads_, prefetches_;
  const ForwardScratch<Op> sizes_;
  const int64_t odd_bytes_, copies_;
  const PackedCaches<typename Op::Scalar> caches_;
};

template <class T, class Op>
void forward(const Forward& p, const Runtime& runtime) {
  run_phase(p, runtime, ForwardCall<T, Op>(p, runtime.num_threads, runtime.num_threads), 0);
}

}  // namespace
}  // namespace attnkern::cpu
