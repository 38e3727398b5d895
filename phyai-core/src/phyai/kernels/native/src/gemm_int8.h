// Weights in int8 with a fp32 scale for each kBlock of a row, and inputs rounded to int8 by row.
//
// Layout: the panels of values, then the scales [panel][block of k][kPanel].
#pragma once

#include "gemm_blocks.h"
#include "gemm_panels.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace phyai {

constexpr int kBlock = 128;  // of k, for one scale

template <typename Order>
struct Int8Panels : Panels<int8_t, Order> {
  using Values = Panels<int8_t, Order>;
  static constexpr int kPanel = Order::kPanel;

  static int64_t blocks(const Packed& w) { return divide_up(w.k, kBlock); }

  static int64_t bytes(const Packed& w) {
    return round_up(Values::bytes(w), 64) + panel_count(w, kPanel) * blocks(w) * kPanel * 4;
  }

  static float* scales_at(const Packed& w, int64_t panel) {
    char* all = static_cast<char*>(w.data) + round_up(Values::bytes(w), 64);
    return reinterpret_cast<float*>(all) + panel * blocks(w) * kPanel;
  }

  static void pack(const Packed& w, const Rows& rows, int threads) {
    Values::pack(w, rows, threads);
    for_panels(w, kPanel, rows, threads, [&](int64_t p, Columns columns, int64_t row) {
      const float* from = rows.scales + row * blocks(w);
      float* to = scales_at(w, p);
      for (int64_t b = 0; b < blocks(w); ++b) {
        for (int j = 0; j < kPanel; ++j) {
          to[b * kPanel + j] = j < columns.count ? from[j * blocks(w) + b] : 0;
        }
      }
    });
  }

  static void unpack(const Packed& w, const Rows& rows, int threads) {
    Values::unpack(w, rows, threads);
    for_panels(w, kPanel, rows, threads, [&](int64_t p, Columns columns, int64_t row) {
      const float* from = scales_at(w, p);
      float* to = rows.scales + row * blocks(w);
      for (int64_t b = 0; b < blocks(w); ++b) {
        for (int j = 0; j < columns.count; ++j) to[j * blocks(w) + b] = from[b * kPanel + j];
      }
    });
  }
};

inline Vec as_floats(VecI v) { return __builtin_convertvector(v, Vec); }

// To the nearest whole number, ties to even, of what a product in fp32 has been rounded to: no
// fused operation may come between.
inline VecI nearest(Vec v) {
#if defined(__AVX512F__)
  return VecI(_mm512_maskz_cvtps_epi32(0xffff, __m512(v)));  // GCC warns of the unmasked one
#elif PHYAI_AVX2
  return VecI(_mm256_cvtps_epi32(__m256(v)));
#else
  VecI whole;
  for (int i = 0; i < kWidth; ++i) whole[i] = int32_t(std::nearbyint(v[i]));
  return whole;
#endif
}

inline VecU magnitude_bits(Vec v) {
  VecU bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits & 0x7fffffffu;
}

// max |x| of a row; NaN when there is one in it: as bits it is the largest of all.
template <typename T>
float largest(const T* x, int64_t k) {
  VecU most{};
  const auto take = [&](Vec v) {
    const VecU bits = magnitude_bits(v);
    most = bits > most ? bits : most;
  };
  int64_t i = 0;
  for (; i + kWidth <= k; i += kWidth) take(load(x + i));
  if (i < k) take(load_part(x + i, int(k - i)));
  uint32_t found = 0;
  for (int j = 0; j < kWidth; ++j) found = std::max<uint32_t>(found, most[j]);
  float value;
  std::memcpy(&value, &found, sizeof value);
  return value;
}

struct RowScale {
  float scale, inverse;
};

// scale = max |x| / 127, inverse = 1 / scale. A row with NaN or inf gets that scale and values of
// zero: its results are NaN.
template <typename T>
RowScale row_scale(const T* x, int64_t k) {
  const float most = largest(x, k), tiny = 0x1p-100f;
  const float scale = (most < tiny ? tiny : most) / 127.0f;
  return {scale, std::isfinite(scale) ? 1.0f / scale : 0.0f};
}

// `count` values of a row as int8 or int16, each x * inverse to the nearest, within 127.
template <typename T, typename Q>
void round_row(const T* x, int64_t count, float inverse, Q* to) {
  typedef Q VecQ __attribute__((vector_size(kWidth * sizeof(Q))));
  const auto rounded = [&](Vec v) {
    VecI whole = nearest(v * inverse);
    whole = whole > 127 ? VecI{} + 127 : whole;
    whole = whole < -127 ? VecI{} - 127 : whole;
    return __builtin_convertvector(whole, VecQ);
  };
  if (inverse == 0.0f) {
    std::memset(to, 0, count * sizeof(Q));
    return;
  }
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const VecQ q = rounded(load(x + i));
    std::memcpy(to + i, &q, sizeof q);
  }
  if (i < count) {
    const VecQ q = rounded(load_part(x + i, int(count - i)));
    std::memcpy(to + i, &q, (count - i) * sizeof(Q));
  }
}

}  // namespace phyai
