// Vectors of fp32, the two storage types, and the few functions kernels need of them.
//
// Written with the vector extension of GCC and Clang, so one source serves AVX2, AVX-512 and NEON:
// kWidth follows the instruction set of the compile.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) && !defined(__AVX512F__)
#define PHYAI_AVX2 1
#include <immintrin.h>
#else
#define PHYAI_AVX2 0
#endif

namespace phyai {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef int32_t VecI __attribute__((vector_size(kWidth * 4)));
typedef uint32_t VecU __attribute__((vector_size(kWidth * 4)));
typedef uint16_t VecH __attribute__((vector_size(kWidth * 2)));

struct bf16 {
  uint16_t bits;
};

// dtype codes of the C interface
enum Dtype { kFloat = 0, kBf16 = 1 };

// x - 0 is x, also for -0, so that no addition is left; x + 0 would be one.
inline Vec splat(float x) { return x - Vec{}; }

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Vec load(const bf16* p) {
#if PHYAI_AVX2  // the compilers widen 16-bit lanes in halves
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return Vec(_mm256_slli_epi32(wide, 16));
#else
  VecH h;
  std::memcpy(&h, p, sizeof h);
  const VecU wide = __builtin_convertvector(h, VecU) << 16;
  Vec v;
  std::memcpy(&v, &wide, sizeof v);
  return v;
#endif
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

// Round to nearest, ties to even; NaN stays NaN.
inline VecU bf16_bits(Vec v) {
  VecU u;
  std::memcpy(&u, &v, sizeof u);
  const VecU rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return v != v ? VecU{} + 0x7fc0u : rounded;
}

inline void store(bf16* p, Vec v) {
#if PHYAI_AVX2
  const __m256i wide = __m256i(bf16_bits(v)), packed = _mm256_packus_epi32(wide, wide);
  const __m256i joined = _mm256_permute4x64_epi64(packed, 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(joined));
#else
  const VecH h = __builtin_convertvector(bf16_bits(v), VecH);
  std::memcpy(p, &h, sizeof h);
#endif
}

inline float scalar(float x) { return x; }

inline float scalar(bf16 x) {
  const uint32_t u = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &u, sizeof f);
  return f;
}

inline void store_scalar(float* p, float x) { *p = x; }

inline void store_scalar(bf16* p, float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  p->bits = x != x ? uint16_t(0x7fc0) : uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// The value as it would be after one store and load: the rounding points of the references.
inline Vec round_to(const float*, Vec v) { return v; }

inline Vec round_to(const bf16*, Vec v) {
  const VecU u = bf16_bits(v) << 16;
  Vec r;
  std::memcpy(&r, &u, sizeof r);
  return r;
}

// The first n < kWidth entries, the others zero; for the ends of rows.
template <typename T>
inline Vec load_part(const T* p, int n) {
  alignas(64) float tmp[kWidth] = {};
  for (int i = 0; i < n; ++i) tmp[i] = scalar(p[i]);
  return load(tmp);
}

template <typename T>
inline void store_part(T* p, Vec v, int n) {
  alignas(64) float tmp[kWidth];
  store(tmp, v);
  for (int i = 0; i < n; ++i) store_scalar(p + i, tmp[i]);
}

inline float sum(Vec v) {
  float total = 0;
  for (int i = 0; i < kWidth; ++i) total += v[i];
  return total;
}

inline Vec select(VecI mask, Vec yes, Vec no) { return mask ? yes : no; }
inline Vec max(Vec a, Vec b) { return select(a > b, a, b); }
inline Vec min(Vec a, Vec b) { return select(a < b, a, b); }

// exp(x) for -87 <= x <= 87, relative error below 2e-7; NaN stays NaN. No branch, no conversion.
inline Vec exp_bounded(Vec x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: a sum with it holds its integer in the low bits
  const Vec whole = x * 1.44269504088896341f + magic;
  const Vec n = whole - magic;
  Vec r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  VecU bits;
  std::memcpy(&bits, &whole, sizeof bits);
  bits = (bits << 23) + (127u << 23);
  Vec power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

// tanh(|x|) = 1 - 2 / (exp(2 |x|) + 1), absolute error below 1e-7; the sign is that of x.
inline Vec tanh_absolute(Vec x) {
  VecU bits;
  std::memcpy(&bits, &x, sizeof bits);
  const VecU sign = bits & 0x80000000u;
  bits ^= sign;
  Vec a;
  std::memcpy(&a, &bits, sizeof a);
  const Vec y = 1.0f - 2.0f / (exp_bounded(select(a > 20.0f, splat(40.0f), 2.0f * a)) + 1.0f);
  std::memcpy(&bits, &y, sizeof bits);
  bits |= sign;
  Vec signed_y;
  std::memcpy(&signed_y, &bits, sizeof signed_y);
  return signed_y;
}

inline Vec gelu_tanh(Vec x) {
  const Vec inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1.0f + tanh_absolute(inner));
}

// x / (1 + exp(-x)); beyond -87 that is 0 (NaN for -inf), beyond 87 it is x.
inline Vec silu(Vec x) {
  const VecI low = x < -87.0f;
  const Vec power = exp_bounded(select(low, splat(0), select(x > 87.0f, splat(-87.0f), -x)));
  return select(low, x * 0.0f, x / (1.0f + power));
}

}  // namespace phyai

#define PHYAI_API extern "C" __attribute__((visibility("default")))
