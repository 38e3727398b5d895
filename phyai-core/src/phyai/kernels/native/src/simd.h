// Vectors of fp32, the two storage types, and the few functions kernels need of them.
//
// Written with the vector extension of GCC and Clang, so one source serves AVX2, AVX-512 and NEON:
// kWidth follows the instruction set of the compile.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

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

inline Vec splat(float x) { return Vec{} + x; }

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Vec load(const bf16* p) {
  VecH h;
  std::memcpy(&h, p, sizeof h);
  const VecU wide = __builtin_convertvector(h, VecU) << 16;
  Vec v;
  std::memcpy(&v, &wide, sizeof v);
  return v;
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

// Round to nearest, ties to even; NaN stays NaN.
inline VecU bf16_bits(Vec v) {
  VecU u;
  std::memcpy(&u, &v, sizeof u);
  const VecU rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const VecU nan = (VecU)(v != v);
  return (rounded & ~nan) | (nan & 0x7fc0u);
}

inline void store(bf16* p, Vec v) {
  const VecH h = __builtin_convertvector(bf16_bits(v), VecH);
  std::memcpy(p, &h, sizeof h);
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

// exp(x), relative error below 2e-7; 0 below -87.3, inf above 88.7, NaN stays NaN.
inline Vec exp(Vec x) {
  const Vec clamped = min(max(x, splat(-87.336f)), splat(88.7228f));
  const Vec scaled = clamped * 1.44269504088896341f;
  const VecI whole = __builtin_convertvector(scaled + select(scaled > 0, splat(0.5f), splat(-0.5f)), VecI);
  const Vec n = __builtin_convertvector(whole, Vec);
  Vec r = clamped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const VecI half = whole >> 1;  // 2^whole in two factors: 2^128 has no exponent of its own
  VecI e1 = (half + 127) << 23, e2 = (whole - half + 127) << 23;
  Vec f1, f2;
  std::memcpy(&f1, &e1, sizeof f1);
  std::memcpy(&f2, &e2, sizeof f2);
  const Vec y = p * f1 * f2;
  const Vec low = select(x < -87.336f, splat(0.0f), y);
  const Vec high = select(x > 88.7228f, splat(INFINITY), low);
  return select(x != x, x, high);
}

// tanh(x) = 1 - 2 / (exp(2 x) + 1); near 0 a polynomial keeps the relative error small.
inline Vec tanh(Vec x) {
  const Vec far = 1.0f - 2.0f / (exp(2.0f * x) + 1.0f);
  const Vec s = x * x;
  Vec p = splat(-5.70498872745e-3f);
  p = p * s + 2.06390887954e-2f;
  p = p * s - 5.37397155531e-2f;
  p = p * s + 1.33314422036e-1f;
  p = p * s - 3.33332819422e-1f;
  const Vec near = p * s * x + x;
  const Vec small = select(x < 0, -x, x);
  return select(small < 0.625f, near, far);
}

inline Vec gelu_tanh(Vec x) {
  const Vec inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1.0f + tanh(inner));
}

inline Vec silu(Vec x) { return x / (1.0f + exp(-x)); }

}  // namespace phyai

#define PHYAI_API extern "C" __attribute__((visibility("default")))
