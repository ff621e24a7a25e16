// Head sizes from 257 to 512, every dtype, forward and decode: what a block of threads has of Q stays in shared memory,
// K and V pass by in chunks of 8 KiB, of which three are in flight or in use.
//
// An output of 16 x 512 floats is more than the registers of one warp, so four warps share a group of rows. They split
// the keys of a block for the scores, agree on the maximum of a row, hand each other the probabilities, and split the
// columns of V for the output. Rows are 64 (16-bit) or 32 (float32), a block of keys has 64.
//
// Why so: for 64 rows and 64 keys of 512, in cycles of a multiprocessor of sm_80 (1024 fused multiply-adds of 16 bits,
// or 128 bytes of shared memory), the products need 2 x 2048. A warp of 32 rows loads three fragments for four mma of
// Q K^T, 3072 cycles in all, and ten for 32 of P V, 1280. That makes 3072 + 2048. With grid blocks that share the
// columns of V, each with all scores, it would be 2 x (3072 + 1024); with warps that split the head dimension for the
// scores and add up partial products by shared memory 2048 + 2048 and 1024 for the exchange, and 8 KiB more than the
// 99 KiB which chips of compute capability 8.6, 8.9 and 12.0 have. float32 takes 3 x 4096 cycles for products in three
// parts and is never short of shared memory.
//
// Rows may be packed queries of the heads that share keys, and the keys be split over blocks of the grid (decode.cu):
// these tiles take 128 KiB of 16-bit keys and values in some 5200 cycles, 25 bytes a cycle, where memory brings 10
// (A100) to 15 (H100).
#include "cuda/forward_wide.cuh"
#include "cuda/packed.cuh"
#include "cuda/tf32.cuh"
#include "cuda/unattended.cuh"

namespace attnkern::cuda {
namespace {

constexpr int kParts = 4, kGroups = 2, kWarps = kParts * kGroups, kThreads = kWarps * 32;
constexpr int kKeys = 64, kPartKeys = kKeys / kParts;
constexpr int kHalf = 256;  // columns of V in one chunk

template <typename T>
struct Wide {
  static constexpr bool kFloat = std::is_same_v<T, float>;
  static constexpr int kRowTiles = kFloat ? 1 : 2;
  static constexpr int kRows = kGroups * 16 * kRowTiles;
  static constexpr int kChunkBytes = 8 * 1024, kStages = 3;
  static constexpr int kKeyColumns = kChunkBytes / kKeys / static_cast<int>(sizeof(T));  // of a chunk of K
  static constexpr int kValueRows = kChunkBytes / kHalf / static_cast<int>(sizeof(T));   // of a chunk of V
  static constexpr int kQBytes = kRows * kWideHead * static_cast<int>(sizeof(T));
  static constexpr int kProbabilityBytes = kRows * kKeys * static_cast<int>(sizeof(T));
  static constexpr int kSharedBytes = kQBytes + kStages * kChunkBytes + kProbabilityBytes + kRows * (kParts * 4 + 32);
  static_assert(kSharedBytes <= 99 * 1024);
  // The output of a warp: in each half of V's columns every fourth run of 16 (16-bit) or 32 columns.
  static constexpr int kRun = kFloat ? 32 : 16, kRuns = kHalf / kParts / kRun, kRunTiles = kRun / 8;
  using Output = float[kRowTiles][2 * kRuns * kRunTiles][4];
  using Scores = float[kRowTiles][2][4];  // of a part of the keys
  using Queries = TileOf<T, kWideHead>;
  using Keys = TileOf<T, kKeyColumns>;
  using Values = TileOf<T, kHalf>;
  using Probabilities = TileOf<T, kKeys>;
};

// Of every row in shared memory its keys, and behind those of all its bias, which leaves room for a word of
// AttendedByWarps.
template <typename T>
__device__ __forceinline__ void store_packed_row(uint32_t packed_rows, int row, const PackedRow& x) {
  const OwnKeys& keys = x.keys;
  ptx::store_shared(packed_rows + row * 16, make_uint4(keys.begin[0], keys.end[0], keys.begin[1], keys.end[1]));
  const uint64_t bias = static_cast<uint64_t>(x.bias);
  ptx::store_shared(packed_rows + (Wide<T>::kRows + row) * 16,
                    make_uint4(static_cast<uint32_t>(bias), static_cast<uint32_t>(bias >> 32), 0, 0));
}
template <typename T>
__device__ __forceinline__ AttendedByWarps<kWarps, 16> attended_by_warps(uint32_t packed_rows) {
  static_assert(kWarps * 4 <= Wide<T>::kRows);
  return {packed_rows + Wide<T>::kRows * 16 + 8};
}
__device__ __forceinline__ OwnKeys load_own_keys(uint32_t packed_rows, int row) {
  const uint4 x = ptx::load_shared(packed_rows + row * 16);
  return {{static_cast<int>(x.x), static_cast<int>(x.z)}, {static_cast<int>(x.y), static_cast<int>(x.w)}};
}
template <typename T>
__device__ __forceinline__ PackedRow load_packed_row(uint32_t packed_rows, int row) {
  const float2 bias = ptx::load_shared_pair(packed_rows + (Wide<T>::kRows + row) * 16);
  const uint64_t low = __float_as_uint(bias.x), high = __float_as_uint(bias.y);
  return {load_own_keys(packed_rows, row), static_cast<int64_t>(high << 32 | low)};
}

// Probabilities -> shared memory, as left operands of P V.
template <typename T>
__device__ __forceinline__ void store_probabilities(uint32_t tile, int row, int part, const float (&s)[2][4]) {
  using Chunks = typename Wide<T>::Probabilities;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + half * 8 + lane / 4;
      const float even = s[n][2 * half], odd = s[n][2 * half + 1];
      if constexpr (Wide<T>::kFloat) {  // the order of keys that tf32.cuh explains
        ptx::store_shared(Chunks::address(tile, r, part * 4 + n * 2) + lane % 4 * 4, __float_as_uint(even));
        ptx::store_shared(Chunks::address(tile, r, part * 4 + n * 2 + 1) + lane % 4 * 4, __float_as_uint(odd));
      } else {
        ptx::store_shared(Chunks::address(tile, r, part * 2 + n) + lane % 4 * 4, ptx::pack<T>(even, odd));
      }
    }
  }
}

// The blocks of keys of a split, one after the other: those of its share that a row attends to.
template <typename T>
struct Blocks {
  const SplitParams& p;
  PackedBlocks<kKeys> reached;
  uint32_t packed_rows;  // of all rows, in shared memory
  int number, end;

  __device__ __forceinline__ bool done() const { return number >= end; }
  __device__ __forceinline__ int first() const { return reached.block(number) * kKeys; }
  // From the block `number` on.
  __device__ __forceinline__ void find() {
    if (p.score.ranges == nullptr) return;
    for (; number < end; ++number) {
      const int block = reached.block(number);
      bool own = false;
      for (int row = threadIdx.x % 32; row < Wide<T>::kRows; row += 32) {
        own |= reaches<kKeys>(load_own_keys(packed_rows, row), block);
      }
      if (__any_sync(0xffffffffu, own)) return;
    }
  }
  __device__ __forceinline__ void advance() {
    ++number;
    find();
  }
};

// The chunks of K and V in the order of use: of a block of keys those of K, then for each half of V's columns those of
// V. kStages of them are in flight or in use.
template <typename T, class Table>
struct Chunks {
  using Config = Wide<T>;

  const SplitParams& p;
  uint32_t stages;
  Table table;
  const T *k, *v;
  Blocks<T> blocks;  // of the next copy
  int seqlen_k;
  int of_keys, of_block;  // chunks of a block of keys, of K and in all
  int load_chunk = 0, load_slot = 0, slot = 0;

  __device__ __forceinline__ Chunks(const SplitParams& args, uint32_t memory, Table pages, const T* keys,
                                    const T* values, const Blocks<T>& from)
      : p(args), stages(memory), table(pages), k(keys), v(values), blocks(from), seqlen_k(args.score.seqlen_k) {
    of_keys = (p.k.width + Config::kKeyColumns - 1) / Config::kKeyColumns;
    const int halves = (p.v.width + kHalf - 1) / kHalf;
    of_block = of_keys + halves * (kKeys / Config::kValueRows);
  }

  // Starts the next copy.
  __device__ __forceinline__ void load() {
    if (!blocks.done()) {
      const int load_first = blocks.first();
      const uint32_t tile = stages + load_slot * Config::kChunkBytes;
      if (load_chunk < of_keys) {
        const int column = load_chunk * Config::kKeyColumns;
        Rows rows = p.k;
        rows.width -= column;
        load_keys<T, Config::kKeyColumns, kKeys, kThreads, false>(table, tile, rows, k + column * rows.stride[3],
                                                                  load_first, seqlen_k);
      } else {
        const int n = load_chunk - of_keys, row = n * Config::kValueRows % kKeys;
        const int column = n * Config::kValueRows / kKeys * kHalf;
        Rows rows = p.v;
        rows.width -= column;
        load_keys<T, kHalf, Config::kValueRows, kThreads, false>(table, tile, rows, v + column * rows.stride[3],
                                                                 load_first + row, seqlen_k);
      }
      load_slot = load_slot == Config::kStages - 1 ? 0 : load_slot + 1;
      if (++load_chunk == of_block) load_chunk = 0, blocks.advance();
    }
    ptx::cp_async_commit();  // an empty group too: counting them stays the same to the end
  }

  // The next chunk is there, everybody is done with the one before it, and its place is filled again.
  __device__ __forceinline__ uint32_t next() {
    ptx::cp_async_wait<Config::kStages - 2>();
    __syncthreads();
    load();
    const uint32_t tile = stages + slot * Config::kChunkBytes;
    slot = slot == Config::kStages - 1 ? 0 : slot + 1;
    return tile;
  }
};

// The packed rows of Q, by single elements where 16 bytes can't be read at a time. Zeros up to a whole chunk of K's.
template <typename T>
__device__ __forceinline__ void load_packed_queries(const SplitParams& p, uint32_t q_tile, int q_chunks, int batch,
                                                    int first_head, int first_row, int row_end) {
  constexpr int kRows = Wide<T>::kRows;
  using Queries = typename Wide<T>::Queries;
  for (int i = threadIdx.x; i < kRows * q_chunks; i += kThreads) {
    const int row = i / q_chunks, chunk = i % q_chunks, r = first_row + row, column = chunk * kPerChunk<T>;
    const bool live = r < row_end;
    const T* source =
        head_of<T>(p.q, batch, first_head + (live ? r % p.pack : 0)) + (live ? r / p.pack : 0) * p.q.stride[2];
    const uint32_t target = Queries::address(q_tile, row, chunk);
    if (p.q.vector) {
      const bool inside = live && column < p.q.width;
      ptx::cp_async<16>(target, inside ? source + column : source, inside ? 16 : 0);
    } else {
      ptx::store_shared(target, gather_chunk(source, p.q.stride[3], column, live ? p.q.width : 0));
    }
  }
}

// score += Q K^T of one chunk of K, number n.
template <typename T>
__device__ __forceinline__ void add_scores(typename Wide<T>::Scores& score, const SplitParams& p, uint32_t q_tile,
                                           int warp_row, int n, uint32_t k_tile, int part,
                                           [[maybe_unused]] const FragmentLane& at) {
  using Config = Wide<T>;
  using Queries = typename Config::Queries;
  using Keys = typename Config::Keys;
  constexpr int kRowTiles = Config::kRowTiles;
  if constexpr (Config::kFloat) {
    const auto add = [&](auto exact) {
      constexpr bool kExact = decltype(exact)::value;
      rows_by_rows_tf32<kExact, Queries, Keys, Config::kKeyColumns / 8>(score, q_tile, warp_row, n * 8, k_tile,
                                                                        part * kPartKeys, 0);
    };
    if (p.exact) {
      add(std::true_type{});
    } else {
      add(std::false_type{});
    }
  } else {
#pragma unroll
    for (int d = 0; d < Config::kKeyColumns / 16; ++d) {
      uint32_t key[4];
      ptx::ldmatrix(key, Keys::address(k_tile, part * kPartKeys + at.key_below, 2 * d + at.key_beside));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        uint32_t query[4];
        ptx::ldmatrix(query, Queries::address(q_tile, warp_row + m * 16 + at.below, n * 8 + 2 * d + at.beside));
        ptx::mma_m16n8k16<T>(score[m][0], query, key[0], key[1]);
        ptx::mma_m16n8k16<T>(score[m][1], query, key[2], key[3]);
      }
    }
  }
}

// Raw products -> scores, and the maximum of this part of every row -> row_values.
template <typename T>
__device__ __forceinline__ void finish_scores(const SplitParams& p, uint32_t packed_rows, int warp_row, int part,
                                              int col, typename Wide<T>::Scores& score, float* row_values) {
  constexpr int kRows = Wide<T>::kRows, kRowTiles = Wide<T>::kRowTiles;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    PackedRow rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows[half] = load_packed_row<T>(packed_rows, warp_row + m * 16 + half * 8 + lane / 4);
    }
    finish_packed<T>(p.score, rows, score[m], col);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = fmaxf(fmaxf(score[m][0][2 * half], score[m][0][2 * half + 1]),
                            fmaxf(score[m][1][2 * half], score[m][1][2 * half + 1]));
      largest = quad_max(largest);
      if (lane % 4 == 0) row_values[part * kRows + warp_row + m * 16 + half * 8 + lane / 4] = largest;
    }
  }
}

// The next chunk of V, rows of the block's keys from `row` on, without those that aren't attended to.
template <typename T, class Table>
__device__ __forceinline__ uint32_t next_values(Chunks<T, Table>& chunks, int row, uint32_t attended) {
  const uint32_t v_tile = chunks.next();
  clear_unattended<typename Wide<T>::Values, Wide<T>::kValueRows / 8, kWarps>(v_tile, attended >> row / 8);
  return v_tile;
}

// out += P V, chunk by chunk, of this warp's runs of columns.
template <typename T, class Table>
__device__ __forceinline__ void add_values(typename Wide<T>::Output& out, const SplitParams& p,
                                           Chunks<T, Table>& chunks, uint32_t attended, uint32_t probabilities,
                                           int warp_row, int part, const FragmentLane& at) {
  using Config = Wide<T>;
  using Values = typename Config::Values;
  using Probabilities = typename Config::Probabilities;
  constexpr int kRowTiles = Config::kRowTiles, kRun = Config::kRun, kRuns = Config::kRuns;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half * kHalf >= p.v.width) continue;
    // Of these columns, in runs.
    const auto live = [&](int run) { return half * kHalf + (run * kParts + part) * kRun < p.v.width; };
    if constexpr (Config::kFloat) {
      const auto add = [&](auto exact) {
        constexpr bool kExact = decltype(exact)::value;
        for (int group = 0; group < kKeys; group += 32) {  // what the tensor cores may add up
          float fresh[kRuns][1][4][4] = {}, small[kRuns][1][4][4] = {};
          for (int row = group; row < group + 32; row += Config::kValueRows) {
            const uint32_t v_tile = next_values(chunks, row, attended);
            uint32_t x[4];
            ptx::ldmatrix(x, Probabilities::address(probabilities, warp_row + at.below, row / 4 + at.beside));
            Tf32<kExact, 4> probability[1];
#pragma unroll
            for (int i = 0; i < 4; ++i) probability[0].set(i, x[i]);
#pragma unroll
            for (int run = 0; run < kRuns; ++run) {
              if (live(run)) {
                columns_tf32<kExact, Values>(fresh[run], small[run], probability, v_tile, 0, (run * kParts + part) * 8);
              }
            }
          }
#pragma unroll
          for (int run = 0; run < kRuns; ++run) {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                out[0][(half * kRuns + run) * 4 + n][e] += fresh[run][0][n][e] + (kExact ? small[run][0][n][e] : 0.f);
              }
            }
          }
        }
      };
      if (p.exact) {
        add(std::true_type{});
      } else {
        add(std::false_type{});
      }
    } else {
      for (int row = 0; row < kKeys; row += Config::kValueRows) {
        const uint32_t v_tile = next_values(chunks, row, attended);
        uint32_t probability[kRowTiles][4];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          ptx::ldmatrix(probability[m],
                        Probabilities::address(probabilities, warp_row + m * 16 + at.below, row / 8 + at.beside));
        }
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
          if (!live(run)) continue;
          uint32_t value[4];
          ptx::ldmatrix<true>(value, Values::address(v_tile, at.below, (run * kParts + part) * 2 + at.beside));
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            const int n = (half * kRuns + run) * 2;
            ptx::mma_m16n8k16<T>(out[m][n], probability[m], value[0], value[1]);
            ptx::mma_m16n8k16<T>(out[m][n + 1], probability[m], value[2], value[3]);
          }
        }
      }
    }
  }
}

// The output, normalised, and the log-sum-exp: of a split, or whole.
template <typename T>
__device__ __forceinline__ void store_output(const SplitParams& p, const typename Wide<T>::Output& out,
                                             const RowState (&state)[Wide<T>::kRowTiles], float* row_values,
                                             int warp_row, int part, int split, int batch, int first_head,
                                             int first_row, int row_end) {
  using Config = Wide<T>;
  constexpr int kRows = Config::kRows, kRowTiles = Config::kRowTiles;
  constexpr int kRun = Config::kRun, kRuns = Config::kRuns, kRunTiles = Config::kRunTiles;
  const int lane = threadIdx.x % 32, seqlen_q = p.score.seqlen_q;
  // The sums of the parts of a row.
  __syncthreads();
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(state[m].sum[half]);
      if (lane % 4 == 0) row_values[part * kRows + warp_row + m * 16 + half * 8 + lane / 4] = sum;
    }
  }
  __syncthreads();
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int tile_row = warp_row + m * 16 + half * 8 + lane / 4, r = first_row + tile_row;
      if (r >= row_end) continue;
      float sum = 0.f;
#pragma unroll
      for (int other = 0; other < kParts; ++other) sum += row_values[other * kRows + tile_row];
      const int head = first_head + r % p.pack, query = r / p.pack;
      const int64_t at = (static_cast<int64_t>(batch) * p.score.heads + head) * seqlen_q + query;
      if (p.splits == 1) sum += sink_term<false>(p.score, at / seqlen_q, state[m].max[half]);
      float inverse = inverse_of(sum);
      if (p.score.seeds != nullptr) inverse *= p.score.dropout_scale;
      if (part == 0 && lane % 4 == 0) {
        if (p.splits > 1) {
          p.part_lse[at * p.splits + split] = exact_log_sum_exp(state[m].max[half], sum);
        } else if (p.lse != nullptr) {
          p.lse[at] = log_sum_exp_with_sink<float, false>(p.score, at / seqlen_q, state[m].max[half], sum);
        }
      }
      float* partial = p.part_out + (at * p.splits + split) * p.v.width;
      T* target = const_cast<T*>(head_of<T>(p.out, batch, head)) + query * p.out.stride[2];
#pragma unroll
      for (int run = 0; run < 2 * kRuns; ++run) {
        const int column = run / kRuns * kHalf + (run % kRuns * kParts + part) * kRun;
        // Two elements at a time: neighbours.
#pragma unroll
        for (int pair = 0; pair < kRunTiles; ++pair) {
          int d;
          float two[2];
          if constexpr (Config::kFloat) {
            d = column + lane % 4 * 8 + pair * 2;  // in order, columns 8t + j of the tiles j, then 8t + 4 + j
#pragma unroll
            for (int n = 0; n < 2; ++n) two[n] = out[m][run * 4 + (pair * 2 + n) % 4][half * 2 + pair / 2] * inverse;
          } else {
            d = column + pair * 8 + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < 2; ++n) two[n] = out[m][run * 2 + pair][half * 2 + n] * inverse;
          }
          if (p.splits > 1) {
            if (d < p.v.width) partial[d] = two[0];
            if (d + 1 < p.v.width) partial[d + 1] = two[1];
          } else if (p.out.vector && d < p.v.width) {  // then the width is even
            if constexpr (Config::kFloat) {
              *reinterpret_cast<float2*>(target + d) = make_float2(two[0], two[1]);
            } else {
              *reinterpret_cast<uint32_t*>(target + d) = ptx::pack<T>(two[0], two[1]);
            }
          } else {
            if (d < p.v.width) target[d] = static_cast<T>(two[0]);
            if (d + 1 < p.v.width) target[d + 1] = static_cast<T>(two[1]);
          }
        }
      }
    }
  }
}

// Registers of a thread, in the loop: the output, 64 for each row tile, and scores of a part of the keys, 8 for each.
// Shared memory: Q; three chunks; the probabilities; of every row what is about its scores, and a value of each part.
template <typename T, bool kPages>
__global__ void __launch_bounds__(kThreads, 1)
    forward_wide_kernel(const __grid_constant__ ParamsOf<SplitParams, kPages> p) {
  using Config = Wide<T>;
  constexpr int kRows = Config::kRows, kRowTiles = Config::kRowTiles;
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t q_tile = ptx::shared_address(shared), stages = q_tile + Config::kQBytes;
  const uint32_t probabilities = stages + Config::kStages * Config::kChunkBytes;
  // Of every row, what is about its scores; and a value of each part.
  const uint32_t packed_rows = probabilities + Config::kProbabilityBytes;
  float* row_values = reinterpret_cast<float*>(shared + (packed_rows - q_tile) + kRows * 32);  // [part][row]

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int part = warp % kParts, warp_row = warp / kParts * 16 * kRowTiles;
  const int split = blockIdx.x % p.splits, block = blockIdx.x / p.splits;
  const int packs = p.score.heads / p.pack, batch_packs = p.batch * packs;
  const int row_block = p.heads_first ? p.row_blocks - 1 - block / batch_packs : block % p.row_blocks;
  const int batch_pack = p.heads_first ? block % batch_packs : block / p.row_blocks;
  const int batch = batch_pack / packs, first_head = batch_pack % packs * p.pack;
  const int first_row = row_block * kRows, row_end = p.score.seqlen_q * p.pack;  // of packed rows
  const auto table = table_of(p, batch);
  const T* k = keys_of<T>(p.k, table, batch, first_head / p.group_k);
  const T* v = keys_of<T>(p.v, table, batch, first_head / p.group_v);

  if (threadIdx.x < kRows) {
    const int r = min(first_row + static_cast<int>(threadIdx.x), row_end - 1);
    store_packed_row<T>(packed_rows, threadIdx.x, packed_row(p.score, batch, first_head + r % p.pack, r / p.pack));
  }
  if (p.score.ranges != nullptr) __syncthreads();  // the rows' keys say which blocks are visited

  // The keys that some row reaches, in whole blocks, dealt out evenly to the splits, as in decode.cu.
  const auto reached = packed_blocks<kKeys, kRows>(p.score, batch, first_head, p.pack, first_row, row_end);
  const int each = (reached.count + p.splits - 1) / p.splits;
  Blocks<T> blocks{p, reached, packed_rows, min(split * each, reached.count), min((split + 1) * each, reached.count)};
  if (p.splits > 1 && blocks.done()) {
    leave_nothing<kRows>(p, split, batch, first_head, first_row, row_end);
    return;
  }
  blocks.find();

  Chunks<T, std::remove_const_t<decltype(table)>> chunks(p, stages, table, k, v, blocks);
  load_packed_queries<T>(p, q_tile, chunks.of_keys * 8, batch, first_head, first_row, row_end);
#pragma unroll
  for (int n = 0; n < Config::kStages - 1; ++n) chunks.load();

  HeadScore head_scores{};
  if (p.score.seeds != nullptr) head_scores = head_score(p.score, batch, first_head);

  const FragmentLane at;
  const auto of_warps = attended_by_warps<T>(packed_rows);
  typename Config::Output out = {};
  RowState state[kRowTiles];
  for (; !blocks.done(); blocks.advance()) {
    const int first = blocks.first();
    typename Config::Scores score = {};
    for (int n = 0; n < chunks.of_keys; ++n) {
      const uint32_t k_tile = chunks.next();
      add_scores<T>(score, p, q_tile, warp_row, n, k_tile, part, at);
    }

    const int col = first + part * kPartKeys + lane % 4 * 2;
    finish_scores<T>(p, packed_rows, warp_row, part, col, score, row_values);
    uint32_t attended = 0;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) attended |= attended_columns(score[m]) << part * (kPartKeys / 8);
    of_warps.tell(attended, warp);
    __syncthreads();
    attended = of_warps.all();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      float factor[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = state[m].max[half];
#pragma unroll
        for (int other = 0; other < kParts; ++other) {
          largest = fmaxf(largest, row_values[other * kRows + warp_row + m * 16 + half * 8 + lane / 4]);
        }
        weigh<false>(p.score, score[m], state[m], half, largest, factor[half]);
      }
      if (p.score.seeds != nullptr) {
        drop_probabilities(p.score, head_scores, score[m], first_row + warp_row + m * 16 + lane / 4, col);
      }
      store_probabilities<T>(probabilities, warp_row + m * 16, part, score[m]);
#pragma unroll
      for (int n = 0; n < 2 * Config::kRuns * Config::kRunTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[m][n][e] *= factor[e / 2];
      }
    }

    add_values<T>(out, p, chunks, attended, probabilities, warp_row, part, at);
  }
  ptx::cp_async_wait<0>();

  store_output<T>(p, out, state, row_values, warp_row, part, split, batch, first_head, first_row, row_end);
}

template <typename T>
int launch(const Attention& p, const SplitParams& params, void* stream) {
  const int64_t blocks = int64_t{params.row_blocks} * params.batch * (params.score.heads / params.pack) * params.splits;
  return by_pages(params, p.pages, [&](const auto& given, auto in_pages) {
    return launch_kernel(forward_wide_kernel<T, in_pages>, blocks, kThreads, Wide<T>::kSharedBytes, given, stream);
  });
}

}  // namespace

WideTile wide_tile(DType dtype) {
  using Float = Wide<float>;
  using Half = Wide<__half>;
  const bool is_float = dtype == DType::kFloat32;
  return {is_float ? Float::kRows : Half::kRows, kKeys, kThreads, is_float ? Float::kSharedBytes : Half::kSharedBytes};
}

int launch_wide(const Attention& p, const SplitParams& params, void* stream) {
  return by_dtype(p.dtype, [&](auto element) { return launch<decltype(element)>(p, params, stream); });
}

}  // namespace attnkern::cuda
