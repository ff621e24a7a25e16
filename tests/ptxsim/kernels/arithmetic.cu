// Arithmetic as nvcc compiles it: the mathematical library, division, conversions, bits, packed halves. Each kernel
// takes `count` elements of x and y and writes row after row of `count` results; test_arithmetic.py says what each row
// is.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace {

template <typename T>
struct Rows {
  T* out;
  int count, i, row = 0;
  __device__ void operator()(T value) { out[row++ * count + i] = value; }
};

__device__ int element() { return blockIdx.x * blockDim.x + threadIdx.x; }

}  // namespace

extern "C" __global__ void float_library(const float* x, const float* y, float* out, int count) {
  const int i = element();
  if (i >= count) return;
  const float a = x[i], b = y[i];
  Rows<float> put{out, count, i};
  put(expf(a)), put(logf(fabsf(a))), put(sinf(a)), put(cosf(a)), put(tanhf(a)), put(erff(a)), put(powf(fabsf(a), b));
  put(exp2f(a)), put(log2f(fabsf(a))), put(expm1f(a)), put(log1pf(fabsf(a))), put(cbrtf(a)), put(atan2f(a, b));
  put(rsqrtf(fabsf(a))), put(__fdividef(a, b)), put(static_cast<float>(exp(static_cast<double>(a))));
}

extern "C" __global__ void float_exact(const float* x, const float* y, float* out, int count) {
  const int i = element();
  if (i >= count) return;
  const float a = x[i], b = y[i];
  Rows<float> put{out, count, i};
  put(a / b), put(sqrtf(fabsf(a))), put(fmaf(a, b, 1.f)), put(__fadd_rz(a, b)), put(__fmul_ru(a, b));
  put(__fmaf_rd(a, b, 1.f)), put(__frcp_rn(a)), put(__fdiv_rz(a, b)), put(__fsub_rd(a, b)), put(fmodf(a, b));
  put(floorf(a)), put(rintf(a)), put(truncf(a)), put(__saturatef(a)), put(fminf(a, b)), put(fmaxf(a, b));
  put(static_cast<float>(static_cast<double>(a) / static_cast<double>(b)));
  put(static_cast<float>(static_cast<int64_t>(a * 1048576.f))), put(__half2float(__float2half(a)));
  put(__bfloat162float(__float2bfloat16(a))), put(static_cast<float>(a < b) + 2 * signbit(a));
}

extern "C" __global__ void integer(const int* x, const int* y, int64_t* out, int count) {
  const int i = element();
  if (i >= count) return;
  const int a = x[i], b = y[i];
  const unsigned ua = a, ub = b;
  const int64_t la = (static_cast<int64_t>(a) << 20) ^ b, lb = b | 1;
  const uint64_t ula = la, ulb = lb;
  Rows<int64_t> put{out, count, i};
  put(a / (b | 1)), put(a % (b | 1)), put(ua / (ub | 1)), put(ua % (ub | 1)), put(la / lb), put(la % lb);
  put(ula / ulb), put(ula % ulb), put(a / 7), put(ua % 10), put(la / 1000003);
  put(__mulhi(a, b)), put(__umulhi(ua, ub)), put(__mul64hi(la, lb)), put(__umul64hi(ula, ulb));
  put(static_cast<int64_t>(static_cast<__int128>(la) * lb >> 64));
  put(static_cast<int64_t>((static_cast<unsigned __int128>(ula) * ulb + ula) >> 40));
  put(__popc(a)), put(__popcll(la)), put(__clz(a)), put(__clzll(la)), put(__ffs(a)), put(__ffsll(la));
  put(__brev(ua)), put(__brevll(ula)), put(__byte_perm(ua, ub, 0x5410)), put(__byte_perm(ua, ub, ub & 0x7777));
  put(__funnelshift_l(ua, ub, ub)), put(__funnelshift_r(ua, ub, 5)), put(__funnelshift_lc(ua, ub, ub));
  put(__sad(a, b, ua)), put(__dp4a(a, b, 5)), put(__dp4a(ua, ub, 5u)), put(__dp2a_hi(a, b, 5));
  put((a & b) | (~a & 0x55) ^ (b << 3)), put(a >> 3), put(ua >> 3), put(la >> 33), put(ula << 7);
  put(static_cast<int16_t>(a) * static_cast<int16_t>(b)), put(static_cast<int8_t>(a)), put(static_cast<uint8_t>(b));
  put(a > b ? la : lb), put(__mul24(a, b)), put(min(a, b)), put(max(ua, ub)), put(abs(a));
  put(__float_as_int(static_cast<float>(la))), put(__double_as_longlong(static_cast<double>(ula)));
}

template <typename Pair>
__device__ void packed(Rows<Pair>& put, Pair a, Pair b) {
  put(__hadd2(a, b)), put(__hsub2(a, b)), put(__hmul2(a, b)), put(__hfma2(a, b, a)), put(__hfma2_relu(a, b, a));
  put(__hmax2(a, b)), put(__hmin2(a, b)), put(__hmax2_nan(a, b)), put(__hneg2(a)), put(__habs2(a)), put(__hgtu2(a, b));
}

extern "C" __global__ void half_pairs(const __half2* x, const __half2* y, __half2* out, int count) {
  const int i = element();
  if (i >= count) return;
  Rows<__half2> put{out, count, i};
  packed(put, x[i], y[i]);
}

extern "C" __global__ void bfloat16_pairs(const __nv_bfloat162* x, const __nv_bfloat162* y, __nv_bfloat162* out,
                                          int count) {
  const int i = element();
  if (i >= count) return;
  Rows<__nv_bfloat162> put{out, count, i};
  packed(put, x[i], y[i]);
}
