// The CPU kernels called directly, every instruction set of this machine, against a naive double loop: edge shapes and
// random ones. Meant for sanitizers (`make sanitize`): every buffer is allocated to the byte, so that a read or
// write beside a tensor is seen. How exact the kernels are is the Python tests' business; here the bounds are wide.
//
// Usage: test_kernels [seed]: of the random shapes; without one the same in every run
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "common/params.h"
#include "common/philox.h"
#include "cpu/kernels.h"

namespace {

using namespace attnkern;

constexpr double kInf = std::numeric_limits<double>::infinity();

size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return 8;
    case DType::kFloat32: return 4;
    case DType::kBool: return 1;
    default: return 2;
  }
}

const char* name_of(DType dtype) {
  const char* names[] = {"float32", "float64", "bfloat16", "float16", "bool"};
  return names[static_cast<int>(dtype)];
}

// ---------------------------------------------------------------------------------------------------- tensors

enum class Layout { kContiguous, kRowsOutside, kPaddedRows, kStridedColumns, kShifted, kCount };
const char* const kLayoutNames[] = {"contiguous", "(B, L, H, D)", "padded rows", "strided columns", "shifted"};

// A 4-D tensor whose storage ends with its last element. A broadcast dimension has size 1 and stride 0.
struct Tensor {
  DType dtype = DType::kFloat32;
  int64_t size[4] = {0, 0, 0, 0};
  View view;
  std::unique_ptr<unsigned char[]> storage;
  int64_t elements = 0, first = 0;

  Tensor() = default;
  Tensor(DType dtype_, std::vector<int64_t> shape, Layout layout = Layout::kContiguous) : dtype(dtype_) {
    std::copy(shape.begin(), shape.end(), size);
    const int64_t column = layout == Layout::kStridedColumns ? 2 : 1;
    const int64_t row = size[3] * column + (layout == Layout::kPaddedRows ? 3 : 0);
    if (layout == Layout::kRowsOutside) {
      set_strides(size[2] * size[1] * row, row, size[1] * row, column);
    } else {
      set_strides(size[1] * size[2] * row, size[2] * row, row, column);
    }
    elements = 1;
    for (int n = 0; n < 4; ++n) elements = size[n] == 0 ? 0 : elements;
    for (int n = 0; n < 4 && elements > 0; ++n) elements += (size[n] - 1) * view.stride[n];
    // Shifted: aligned to the element only, as a slice of a larger tensor is.
    first = layout == Layout::kShifted ? 1 : 0;
    storage.reset(new unsigned char[bytes()]);
    std::memset(storage.get(), 0xff, bytes());  // NaN: what isn't written is seen
    view.data = storage.get() + first * size_of(dtype);
  }

  size_t bytes() const { return (first + elements) * size_of(dtype); }
  void clear() {
    if (storage != nullptr) std::memset(storage.get(), 0, bytes());
  }

  void set_strides(int64_t a, int64_t b, int64_t c, int64_t d) {
    const int64_t stride[4] = {a, b, c, d};
    for (int n = 0; n < 4; ++n) view.stride[n] = size[n] == 1 ? 0 : stride[n];
  }
  void* at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const int64_t index[4] = {b, h, i, j};
    int64_t offset = first;
    for (int n = 0; n < 4; ++n) offset += (size[n] == 1 ? 0 : index[n]) * view.stride[n];
    return storage.get() + offset * static_cast<int64_t>(size_of(dtype));
  }
  double* row(int64_t b, int64_t h, int64_t i) { return static_cast<double*>(at(b, h, i, 0)); }
  double get(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const void* from = at(b, h, i, j);
    if (dtype == DType::kFloat64) return *static_cast<const double*>(from);
    if (dtype == DType::kFloat32) return *static_cast<const float*>(from);
    if (dtype == DType::kBool) return *static_cast<const bool*>(from);
    uint16_t half;
    std::memcpy(&half, from, 2);
    if (dtype == DType::kBFloat16) {
      const uint32_t bits = uint32_t{half} << 16;
      float value;
      std::memcpy(&value, &bits, 4);
      return value;
    }
    const int exponent = half >> 10 & 31, mantissa = half & 1023;
    const double magnitude = exponent == 31 ? (mantissa ? std::nan("") : kInf)
                             : exponent     ? std::ldexp(1024 + mantissa, exponent - 25)
                                            : std::ldexp(mantissa, -24);
    return half & 0x8000 ? -magnitude : magnitude;
  }
  // `value` must be representable: the tests write multiples of 1/32 of small magnitude, and -inf.
  void set(int64_t b, int64_t h, int64_t i, int64_t j, double value) {
    void* to = at(b, h, i, j);
    const float narrow = static_cast<float>(value);
    uint32_t bits;
    std::memcpy(&bits, &narrow, 4);
    uint16_t half = static_cast<uint16_t>(bits >> 16);
    switch (dtype) {
      case DType::kFloat64: *static_cast<double*>(to) = value; return;
      case DType::kFloat32: *static_cast<float*>(to) = narrow; return;
      case DType::kBool: *static_cast<bool*>(to) = value != 0; return;
      case DType::kBFloat16: break;
      case DType::kFloat16: {
        const uint32_t magnitude = bits & 0x7fffffff;
        half = static_cast<uint16_t>(bits >> 16 & 0x8000);
        if (magnitude == 0x7f800000) half |= 0x7c00;
        else if (magnitude != 0) half |= static_cast<uint16_t>((magnitude - (112u << 23)) >> 13);
      }
    }
    std::memcpy(to, &half, 2);
  }
  // All elements, contiguous: what the naive loops read.
  std::vector<double> dense() const {
    std::vector<double> values;
    each([&](int64_t b, int64_t h, int64_t i, int64_t j) { values.push_back(get(b, h, i, j)); });
    return values;
  }
  void each(const std::function<void(int64_t, int64_t, int64_t, int64_t)>& visit) const {
    for (int64_t b = 0; b < size[0]; ++b)
      for (int64_t h = 0; h < size[1]; ++h)
        for (int64_t i = 0; i < size[2]; ++i)
          for (int64_t j = 0; j < size[3]; ++j) visit(b, h, i, j);
  }
};

// ------------------------------------------------------------------------------------------------------ cases

enum class Bias { kNone, kBool, kFloat, kFloat32 };  // kFloat: of q's dtype

struct Case {
  int64_t batch = 1, heads_q = 1, heads_k = 1, heads_v = 1, seqlen_q = 1, seqlen_k = 1, head_dim = 1, head_dim_v = 1;
  DType dtype = DType::kFloat32;
  Band band;
  Bias bias = Bias::kNone;
  int64_t bias_size[4] = {1, 1, 0, 0};
  bool bias_transposed = false;  // keys outside, queries inside
  bool bias_islands = false;     // queries and keys of the same third of their sequence: whole blocks are excluded
  double scale = 0.25, softcap = 0, dropout_p = 0;
  int64_t seeds = 1, threads = 3;
  Layout layout = Layout::kContiguous;
  bool lse_gradient = false;

  std::string text() const {
    char line[512];
    std::snprintf(line, sizeof line,
                  "%s B=%ld H=%ld/%ld/%ld L=%ld S=%ld E=%ld Ev=%ld band=(%ld, %ld, %ld) bias=%d(%ld,%ld,%ld,%ld)%s%s "
                  "scale=%g softcap=%g p=%g seeds=%ld threads=%ld %s%s",
                  name_of(dtype), long(batch), long(heads_q), long(heads_k), long(heads_v), long(seqlen_q),
                  long(seqlen_k), long(head_dim), long(head_dim_v), long(band.left), long(band.right),
                  long(band.offset), int(bias), long(bias_size[0]), long(bias_size[1]), long(bias_size[2]),
                  long(bias_size[3]), bias_transposed ? "^T" : "", bias_islands ? " islands" : "", scale, softcap,
                  dropout_p, long(seeds), long(threads), kLayoutNames[static_cast<int>(layout)],
                  lse_gradient ? " grad_lse" : "");
    return line;
  }
};

uint32_t dropout_half(uint64_t seed, uint64_t batch_head, int64_t i, int64_t j) {
  uint32_t c[4] = {static_cast<uint32_t>(j / 32 * 4 + j % 8 / 2), static_cast<uint32_t>(i),
                   static_cast<uint32_t>(batch_head), static_cast<uint32_t>(batch_head >> 32)};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{philox::kMultiplier0} * c[0], b = uint64_t{philox::kMultiplier1} * c[2];
    const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ key[0], static_cast<uint32_t>(b),
                              static_cast<uint32_t>(a >> 32) ^ c[3] ^ key[1], static_cast<uint32_t>(a)};
    std::copy(next, next + 4, c);
    key[0] += philox::kWeyl0;
    key[1] += philox::kWeyl1;
  }
  return c[j / 8 % 4] >> (16 * (j % 2)) & 0xffff;
}

// A case's tensors, the kernels' results and the naive ones.
class Run {
 public:
  Run(const Case& c, uint64_t seed) : c_(c), random_(seed) {
    const auto tensor = [&](int64_t h, int64_t rows, int64_t columns) {
      return Tensor(c.dtype, {c.batch, h, rows, columns}, c.layout);
    };
    q_ = tensor(c.heads_q, c.seqlen_q, c.head_dim);
    k_ = tensor(c.heads_k, c.seqlen_k, c.head_dim);
    v_ = tensor(c.heads_v, c.seqlen_k, c.head_dim_v);
    grad_out_ = tensor(c.heads_q, c.seqlen_q, c.head_dim_v);
    for (Tensor* x : {&q_, &k_, &v_, &grad_out_}) fill(*x);
    // What the kernels write has unit column stride.
    const Layout written = c.layout == Layout::kStridedColumns ? Layout::kPaddedRows : c.layout;
    out_ = Tensor(c.dtype, {c.batch, c.heads_q, c.seqlen_q, c.head_dim_v}, written);
    dq_ = Tensor(c.dtype, {c.batch, c.heads_q, c.seqlen_q, c.head_dim}, written);
    dk_ = Tensor(c.dtype, {c.batch, c.heads_k, c.seqlen_k, c.head_dim}, written);
    dv_ = Tensor(c.dtype, {c.batch, c.heads_v, c.seqlen_k, c.head_dim_v}, written);
    const DType lse_dtype = c.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    lse_ = Tensor(lse_dtype, {c.batch, c.heads_q, c.seqlen_q, 1});
    grad_lse_ = Tensor(lse_dtype, {c.batch, c.heads_q, c.seqlen_q, 1});
    fill(grad_lse_);
    if (c.bias != Bias::kNone) {
      const DType dtype = c.bias == Bias::kBool ? DType::kBool : c.bias == Bias::kFloat ? c.dtype : DType::kFloat32;
      std::vector<int64_t> shape(c.bias_size, c.bias_size + 4);
      if (c.bias_transposed) std::swap(shape[2], shape[3]);
      bias_ = Tensor(dtype, shape);
      if (c.bias_transposed) {
        std::swap(bias_.size[2], bias_.size[3]);
        std::swap(bias_.view.stride[2], bias_.view.stride[3]);
      }
      bias_.each([&](int64_t b, int64_t h, int64_t i, int64_t j) {
        const bool apart = c.bias_islands && i * 3 / bias_.size[2] != j * 3 / bias_.size[3];
        const bool masked = apart || random_() % 4 == 0;
        bias_.set(b, h, i, j, dtype == DType::kBool ? !masked : masked ? -kInf : value());
      });
      dbias_ = Tensor(dtype, {c.bias_size[0], c.bias_size[1], c.bias_size[2], c.bias_size[3]});
    }
    for (int64_t n = 0; n < c.seeds; ++n) seeds_.push_back(static_cast<int64_t>(random_() >> 1));
  }

  // Empty if the kernels agree with the naive loops.
  std::string check(const cpu::Kernels& kernels) {
    const cpu::Runtime runtime{c_.threads, [](int64_t workers, void (*work)(void*, int64_t), void* context) {
                                 std::vector<std::thread> threads;
                                 for (int64_t n = 1; n < workers; ++n) threads.emplace_back(work, context, n);
                                 if (workers > 0) work(context, 0);
                                 for (auto& thread : threads) thread.join();
                               }};
    Forward forward{};
    describe(forward);
    forward.out = out_.view;
    forward.lse = lse_.storage.get();
    kernels.forward(forward, runtime);
    Backward backward{};
    describe(backward);
    backward.grad_out = grad_out_.view;
    backward.out = out_.view;
    backward.lse = lse_.storage.get();
    backward.grad_lse = c_.lse_gradient ? grad_lse_.storage.get() : nullptr;
    backward.dq = dq_.view;
    backward.dk = dk_.view;
    backward.dv = dv_.view;
    if (c_.bias != Bias::kNone && c_.bias != Bias::kBool) backward.dbias = dbias_.view;
    if (has_no_score(backward))  // then the operators fill them with zeros
      for (Tensor* gradient : {&dq_, &dk_, &dv_, &dbias_}) gradient->clear();
    kernels.backward(backward, runtime);
    naive();
    std::string failed;
    compare("out", out_, exact_out_, failed);
    compare("lse", lse_, exact_lse_, failed);
    compare("dq", dq_, exact_dq_, failed);
    compare("dk", dk_, exact_dk_, failed);
    compare("dv", dv_, exact_dv_, failed);
    if (backward.dbias.data != nullptr) compare("dbias", dbias_, exact_dbias_, failed);
    return failed;
  }

 private:
  double value() { return (static_cast<int>(random_() % 65) - 32) / 32.0; }
  void fill(Tensor& x) {
    x.each([&](int64_t b, int64_t h, int64_t i, int64_t j) { x.set(b, h, i, j, value()); });
  }

  void describe(Attention& p) const {
    p.dtype = c_.dtype;
    p.batch = c_.batch;
    p.heads_q = c_.heads_q;
    p.heads_k = c_.heads_k;
    p.heads_v = c_.heads_v;
    p.seqlen_q = c_.seqlen_q;
    p.seqlen_k = c_.seqlen_k;
    p.head_dim = c_.head_dim;
    p.head_dim_v = c_.head_dim_v;
    p.q = q_.view;
    p.k = k_.view;
    p.v = v_.view;
    if (c_.bias != Bias::kNone) p.bias = bias_.view;
    p.bias_dtype = bias_.dtype;
    std::copy(c_.bias_size, c_.bias_size + 4, p.bias_size);
    p.softmax_scale = c_.scale;
    p.softcap = c_.softcap;
    p.band = c_.band;
    p.dropout_p = c_.dropout_p;
    p.seeds = seeds_.data();
    p.seed_count = c_.seeds;
  }

  // The definition: softmax(cap(scale q k^T) + bias, within the band) v and its gradients, one score at a time.
  void naive() {
    const int64_t heads = c_.heads_q, keys = c_.seqlen_k, dim = c_.head_dim, dim_v = c_.head_dim_v;
    for (auto [exact, like] : {std::pair{&exact_out_, &out_},
                               {&exact_lse_, &lse_},
                               {&exact_dq_, &dq_},
                               {&exact_dk_, &dk_},
                               {&exact_dv_, &dv_},
                               {&exact_dbias_, &dbias_}}) {
      *exact = Tensor(DType::kFloat64, {like->size[0], like->size[1], like->size[2], like->size[3]});
      std::fill_n(exact->row(0, 0, 0), exact->elements, 0.0);
    }
    const std::vector<double> q_all = q_.dense(), k_all = k_.dense(), v_all = v_.dense(), go_all = grad_out_.dense();
    std::vector<double> p(keys), cap_slope(keys), kept(keys), dp(keys);
    for (int64_t row = 0; row < c_.batch * heads * c_.seqlen_q; ++row) {
      const int64_t i = row % c_.seqlen_q, h = row / c_.seqlen_q % heads, b = row / c_.seqlen_q / heads;
      const int64_t hk = h / (heads / c_.heads_k), hv = h / (heads / c_.heads_v), group = c_.batch / c_.seeds;
      const double* q = q_all.data() + row * dim;
      const double* grad_out = go_all.data() + row * dim_v;
      const double* k = k_all.data() + (b * c_.heads_k + hk) * keys * dim;
      const double* v = v_all.data() + (b * c_.heads_v + hv) * keys * dim_v;
      double maximum = -kInf, sum = 0;
      for (int64_t j = 0; j < keys; ++j) {
        double x = 0;
        for (int64_t d = 0; d < dim; ++d) x += q[d] * k[j * dim + d];
        x *= c_.scale;
        largest_score_ = std::max(largest_score_, std::abs(x));
        cap_slope[j] = 1;
        if (c_.softcap > 0) {
          const double t = std::tanh(x / c_.softcap);
          x = c_.softcap * t;
          cap_slope[j] = 1 - t * t;
        }
        if (c_.bias == Bias::kBool && bias_.get(b, h, i, j) == 0) x = -kInf;
        if (c_.bias == Bias::kFloat || c_.bias == Bias::kFloat32) x += bias_.get(b, h, i, j);
        const int64_t distance = j - i - c_.band.offset;
        if (distance < -c_.band.left || distance > c_.band.right) x = -kInf;
        kept[j] = 1;
        if (c_.dropout_p > 0) {
          const uint32_t half = dropout_half(seeds_[b / group], b % group * heads + h, i, j);
          kept[j] = half >= std::lround(c_.dropout_p * 65536) && c_.dropout_p < 1 ? 1 / (1 - c_.dropout_p) : 0;
        }
        p[j] = x;
        maximum = std::max(maximum, x);
      }
      for (int64_t j = 0; j < keys; ++j) sum += maximum == -kInf ? 0 : std::exp(p[j] - maximum);
      const double lse = sum > 0 ? maximum + std::log(sum) : -kInf;
      *exact_lse_.row(b, h, i) = lse;
      double delta = c_.lse_gradient ? -grad_lse_.get(b, h, i, 0) : 0;
      for (int64_t j = 0; j < keys; ++j) {
        p[j] = lse == -kInf ? 0 : std::exp(p[j] - lse);
        dp[j] = 0;
        double* out = exact_out_.row(b, h, i);
        double* dv = exact_dv_.row(b, hv, j);
        for (int64_t d = 0; d < dim_v; ++d) {
          out[d] += p[j] * kept[j] * v[j * dim_v + d];
          dv[d] += p[j] * kept[j] * grad_out[d];
          dp[j] += kept[j] * grad_out[d] * v[j * dim_v + d];
        }
        delta += p[j] * dp[j];
      }
      for (int64_t j = 0; j < keys; ++j) {
        const double ds = p[j] * (dp[j] - delta), dx = ds * cap_slope[j] * c_.scale;
        // The two may cancel, as with a single key. What rounded them doesn't: delta is made of the rounded output.
        const double whole = p[j] * (std::abs(dp[j]) + std::abs(delta));
        largest_ds_ = std::max(largest_ds_, whole);
        if (c_.bias != Bias::kNone) *static_cast<double*>(exact_dbias_.at(b, h, i, j)) += ds;
        double* dq = exact_dq_.row(b, h, i);
        double* dk = exact_dk_.row(b, hk, j);
        for (int64_t d = 0; d < dim; ++d) {
          dq[d] += dx * k[j * dim + d];
          dk[d] += dx * q[d];
          const double factor = std::max(std::abs(q[d]), std::abs(k[j * dim + d]));
          largest_dx_ = std::max(largest_dx_, whole * cap_slope[j] * std::abs(c_.scale) * factor);
        }
      }
    }
  }

  void compare(const char* name, const Tensor& actual, const Tensor& exact, std::string& failed) const {
    const bool wide = c_.dtype == DType::kFloat64 && actual.dtype == DType::kFloat64;  // not a float32 bias's gradient
    const double units[] = {1e-5, wide ? 1e-11 : 1e-5, 2e-2, 3e-3};
    double terms = 1;  // a broadcast bias's gradient is a sum of that many, each with its own rounding
    const int64_t full[4] = {c_.batch, c_.heads_q, c_.seqlen_q, c_.seqlen_k};
    for (int n = 0; n < 4 && &actual == &dbias_; ++n)
      terms *= static_cast<double>(full[n] / std::max<int64_t>(1, actual.size[n]));
    // A score's rounding moves a weight by as much, relative to the weight.
    const double of_scores = (wide ? 1e-15 : 5e-7) * largest_score_;
    const double unit = (units[static_cast<int>(c_.dtype)] + of_scores) * std::sqrt(std::max(1.0, terms));
    double largest = 1;
    if (&actual == &dbias_) largest = std::max(largest, largest_ds_);
    if (&actual == &dq_ || &actual == &dk_) largest = std::max(largest, largest_dx_);
    exact.each([&](int64_t b, int64_t h, int64_t i, int64_t j) {
      const double x = std::abs(exact.get(b, h, i, j));
      if (x < kInf) largest = std::max(largest, x);
    });
    exact.each([&](int64_t b, int64_t h, int64_t i, int64_t j) {
      const double got = actual.get(b, h, i, j), wanted = exact.get(b, h, i, j);
      if (got == wanted || std::abs(got - wanted) <= unit * largest || failed.size() > 200) return;
      char line[160];
      std::snprintf(line, sizeof line, "  %s[%ld, %ld, %ld, %ld] = %g, expected %g\n", name, long(b), long(h), long(i),
                    long(j), got, wanted);
      failed += line;
    });
  }

  Case c_;
  std::mt19937_64 random_;
  Tensor q_, k_, v_, bias_, grad_out_, grad_lse_, out_, lse_, dq_, dk_, dv_, dbias_;
  Tensor exact_out_, exact_lse_, exact_dq_, exact_dk_, exact_dv_, exact_dbias_;
  std::vector<int64_t> seeds_;
  double largest_ds_ = 0, largest_dx_ = 0;  // of terms before they are subtracted from each other
  double largest_score_ = 0;
};

std::vector<Case> edge_cases(DType dtype) {
  std::vector<Case> cases;
  const auto add = [&](const std::function<void(Case&)>& change) {
    Case c;
    c.dtype = dtype;
    c.batch = 2;
    c.heads_q = c.heads_k = c.heads_v = 2;
    c.seqlen_q = 33;
    c.seqlen_k = 47;
    c.head_dim = c.head_dim_v = 16;
    change(c);
    if (c.bias != Bias::kNone && c.bias_size[2] == 0) {
      c.bias_size[2] = c.seqlen_q;
      c.bias_size[3] = c.seqlen_k;
    }
    cases.push_back(c);
  };
  add([](Case&) {});
  for (int64_t dim : {1, 3, 17, 31, 64, 65, 257}) {
    add([&](Case& c) { c.head_dim = c.head_dim_v = dim; });
    add([&](Case& c) { c.head_dim = dim, c.head_dim_v = 5, c.seqlen_q = 3; });
  }
  for (int64_t length : {1, 2, 15, 16, 63, 64, 65, 97, 130, 200}) {
    add([&](Case& c) { c.seqlen_q = c.seqlen_k = length, c.band.right = 0; });
    add([&](Case& c) { c.seqlen_q = 1, c.seqlen_k = length, c.batch = 1; });
    add([&](Case& c) { c.seqlen_q = length, c.seqlen_k = 1; });
    add([&](Case& c) { c.seqlen_q = 5, c.seqlen_k = length, c.band = {kUnbounded, 0, length - 5}; });
    add([&](Case& c) { c.seqlen_q = length, c.seqlen_k = 70, c.band = {3, 5, 0}, c.softcap = 2; });
  }
  add([](Case& c) { c.batch = 0; });
  add([](Case& c) { c.heads_q = c.heads_k = c.heads_v = 0; });
  add([](Case& c) { c.seqlen_q = 0; });
  add([](Case& c) { c.seqlen_k = 0; });
  add([](Case& c) { c.head_dim = 0; });
  add([](Case& c) { c.head_dim_v = 0; });
  add([](Case& c) { c.scale = 0; });
  add([](Case& c) { c.scale = -0.5; });
  for (double scale : {1e-3, 60.0, -60.0, 400.0, -2000.0}) {  // scores that lie apart by up to thousands
    add([&](Case& c) { c.scale = scale, c.seqlen_k = 150; });
    add([&](Case& c) { c.scale = scale, c.seqlen_q = c.seqlen_k = 130, c.band.right = 0; });
    add([&](Case& c) { c.scale = scale, c.seqlen_q = 97, c.seqlen_k = 1, c.head_dim = 64; });
    add([&](Case& c) { c.scale = scale, c.seqlen_k = 129, c.bias = Bias::kFloat32, c.lse_gradient = true; });
    add([&](Case& c) { c.scale = scale, c.seqlen_k = 129, c.bias = Bias::kBool, c.bias_size[1] = 2; });
    add([&](Case& c) { c.scale = scale, c.seqlen_q = 40, c.seqlen_k = 129, c.dropout_p = 0.5; });
    add([&](Case& c) { c.scale = scale, c.softcap = 30, c.seqlen_k = 129; });
    for (int64_t queries : {1, 2, 8, 16})  // few queries, whose keys fill vectors
      add([&](Case& c) { c.scale = scale, c.seqlen_q = queries, c.seqlen_k = 320, c.head_dim = c.head_dim_v = 64; });
  }
  add([](Case& c) { c.band = {0, 0, 40}; });
  add([](Case& c) { c.band = {kUnbounded, 0, -20}; });     // the first rows meet no key
  add([](Case& c) { c.band = {kUnbounded, 0, -10000}; });  // no row does
  add([](Case& c) { c.heads_q = 6, c.heads_k = 3, c.heads_v = 2; });
  add([](Case& c) { c.heads_q = 4, c.heads_k = c.heads_v = 1, c.seqlen_q = 1, c.threads = 8; });
  for (Bias bias : {Bias::kNone, Bias::kBool, Bias::kFloat, Bias::kFloat32})  // keys and values in turns
    for (int64_t group : {1, 2})
      add([&](Case& c) {
        c.seqlen_q = 1, c.seqlen_k = 600, c.head_dim = c.head_dim_v = 64, c.heads_q = 2 * group, c.bias = bias;
        c.bias_size[1] = c.heads_q;
      });
  // An odd last key, whose partner in a pair doesn't exist.
  add([](Case& c) { c.seqlen_q = 9, c.seqlen_k = 17, c.dropout_p = 0.5; });
  // Queries, or keys and values, that are fetched before they are needed: a head has some MiB of them.
  add([](Case& c) { c.batch = 1, c.seqlen_q = 1100, c.seqlen_k = 20, c.head_dim = 520, c.head_dim_v = 512; });
  add([](Case& c) { c.batch = 1, c.seqlen_q = 20, c.seqlen_k = 1100, c.head_dim = 520, c.head_dim_v = 512; });
  for (Bias bias : {Bias::kBool, Bias::kFloat32})  // a bias, likewise
    add([&](Case& c) {
      c.batch = c.heads_q = c.heads_k = c.heads_v = 1, c.seqlen_q = c.seqlen_k = 1030, c.head_dim = c.head_dim_v = 4,
      c.bias = bias;
    });
  for (Bias bias : {Bias::kBool, Bias::kFloat, Bias::kFloat32})  // blocks that a mask excludes altogether
    for (int64_t heads : {1, 2})
      for (bool transposed : {false, true}) {
        const auto masked = [&](Case& c) {
          c.bias = bias, c.bias_size[1] = heads, c.bias_transposed = transposed, c.bias_islands = true;
        };
        add([&](Case& c) { masked(c), c.batch = 1, c.seqlen_q = c.seqlen_k = 330, c.head_dim = c.head_dim_v = 4; });
        add([&](Case& c) { masked(c), c.batch = 1, c.seqlen_q = 3, c.seqlen_k = 1300, c.band = {1250, 0, 1290}; });
        add([&](Case& c) { masked(c), c.seqlen_q = 1, c.seqlen_k = 1300, c.head_dim = c.head_dim_v = 64; });
      }
  for (int layout = 0; layout < static_cast<int>(Layout::kCount); ++layout) {
    add([&](Case& c) { c.layout = static_cast<Layout>(layout), c.head_dim = 24, c.band.right = 0; });
    add([&](Case& c) { c.layout = static_cast<Layout>(layout), c.seqlen_q = 2, c.head_dim_v = 9; });
    add([&](Case& c) { c.layout = static_cast<Layout>(layout), c.head_dim = 63, c.head_dim_v = 52, c.seqlen_k = 108; });
  }
  for (Bias bias : {Bias::kBool, Bias::kFloat, Bias::kFloat32}) {
    for (int broadcast = 0; broadcast < 16; ++broadcast)
      add([&](Case& c) {
        c.bias = bias, c.head_dim = 8, c.seqlen_q = broadcast % 3 == 0 ? 2 : 33;
        const int64_t full[4] = {c.batch, c.heads_q, c.seqlen_q, c.seqlen_k};
        for (int n = 0; n < 4; ++n) c.bias_size[n] = broadcast >> n & 1 ? full[n] : 1;
      });
    add([&](Case& c) { c.bias = bias, c.bias_transposed = true, c.band = {10, 3, 0}, c.softcap = 3; });
  }
  for (double p : {0.1, 0.5, 1.0}) {
    add([&](Case& c) { c.dropout_p = p, c.seeds = 2, c.seqlen_q = 70, c.seqlen_k = 101; });
    add([&](Case& c) { c.dropout_p = p, c.seqlen_q = 1, c.bias = Bias::kBool, c.lse_gradient = true; });
  }
  return cases;
}

Case random_case(DType dtype, std::mt19937_64& random) {
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  const auto one_in = [&](int64_t n) { return below(n) == 0; };
  const auto length = [&] { return one_in(3) ? 1 + below(9) : 1 + below(180); };
  Case c;
  c.dtype = dtype;
  c.batch = 1 + below(3);
  c.heads_k = 1 + below(2);
  c.heads_v = one_in(4) ? 1 : c.heads_k;
  c.heads_q = c.heads_k * (1 + below(3));
  c.seqlen_q = length();
  c.seqlen_k = length();
  c.head_dim = 1 + below(72);
  c.head_dim_v = one_in(3) ? 1 + below(72) : c.head_dim;
  const double scales[] = {-1.0 / 8, 0, 1.0 / 64, 20, -80, 300};
  c.scale = one_in(2) ? scales[below(6)] : 1.0 / 4;
  c.softcap = one_in(3) ? 1.5 : 0;
  if (one_in(2)) c.band.right = below(20);
  if (one_in(3)) c.band.left = below(20);
  if (one_in(3)) c.band.offset = below(2 * c.seqlen_k) - c.seqlen_q;
  c.bias = static_cast<Bias>(below(4));
  const int64_t full[4] = {c.batch, c.heads_q, c.seqlen_q, c.seqlen_k};
  for (int n = 0; n < 4; ++n) c.bias_size[n] = one_in(3) ? 1 : full[n];
  c.bias_transposed = one_in(3);
  c.bias_islands = one_in(3);
  if (one_in(3)) c.dropout_p = 0.25;
  c.seeds = one_in(2) ? c.batch : 1;
  c.threads = 1 + below(5);
  c.layout = static_cast<Layout>(below(static_cast<int64_t>(Layout::kCount)));
  c.lse_gradient = one_in(2);
  return c;
}

constexpr size_t kCurrentSize = 1024;

// Runs in a process of its own, since the choice of the kernels is made once; `current` names the case to the parent,
// should a sanitizer end it. Returns the number of failures, or -1 if the instruction set was refused.
int test_isa(const char* isa, uint64_t seed, char* current) {
  setenv("ATTNKERN_CPU_ISA", isa, 1);
  const char* error = nullptr;
  const cpu::Kernels* kernels = cpu::select_kernels(&error);
  if (kernels == nullptr) return std::strstr(error, "ATTNKERN_CPU_ISA") != nullptr ? -1 : 1;
  if (std::strcmp(kernels->name, isa) != 0) return 1;
  int failures = 0;
  int64_t count = 0;
  std::mt19937_64 random(seed);
  for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
    std::vector<Case> cases = edge_cases(dtype);
    for (int n = 0; n < 40; ++n) cases.push_back(random_case(dtype, random));
    for (const Case& c : cases) {
      std::snprintf(current, kCurrentSize, "%s %s", isa, c.text().c_str());
      const std::string failed = Run(c, seed).check(*kernels);
      ++count;
      if (failed.empty()) continue;
      ++failures;
      std::printf("FAILED %s %s (seed %lu)\n%s", isa, c.text().c_str(), (unsigned long)seed, failed.c_str());
    }
  }
  std::printf("%-10s  %ld cases, %d failures\n", isa, long(count), failures);
  return failures;
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  constexpr int kRefused = 77, kFailed = 78;
  char* const current =
      static_cast<char*>(mmap(nullptr, kCurrentSize, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  int failures = 0, tested = 0;
  for (const char* isa : {"no such set", "amx", "zen5", "avx512bf16", "avx512", "avx2", "neon", "generic"}) {
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
      const int failed = test_isa(isa, seed, current);
      std::exit(failed < 0 ? kRefused : failed != 0 ? kFailed : 0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    if (code == kRefused) {
      std::printf("%-10s  refused\n", isa);
      continue;
    }
    ++tested;
    failures += code != 0;
    if (code != 0 && code != kFailed) std::printf("DIED %s (seed %lu)\n", current, (unsigned long)seed);
  }
  std::printf("%d instruction sets tested, %d failed (seed %lu)\n", tested, failures, (unsigned long)seed);
  return failures == 0 && tested > 0 ? 0 : 1;
}
