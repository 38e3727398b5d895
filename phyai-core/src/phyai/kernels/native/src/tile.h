// The micro-kernel of attention: a few rows of fp32 times one packed panel of columns.
#pragma once

#include <array>
#include <utility>

#include "simd.h"

namespace phyai {

// Rows whose accumulators, for a panel of two vectors, fill the vector registers.
#if defined(__AVX512F__)
constexpr int kTileRows = 12;
#elif defined(__AVX__)
constexpr int kTileRows = 6;
#else
constexpr int kTileRows = 8;
#endif

constexpr int kPanel = 2 * kWidth;

// Width of the panel at column j of n: two vectors, or one at the end if that holds the rest.
inline int panel_width(int64_t n, int64_t j) { return n - j > kWidth ? kPanel : kWidth; }

inline int64_t padded(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// c[i][j] (+)= sum over l < depth of a[i][l] * panel[l][j]
using Tile = void (*)(const float* a, int64_t lda, const float* panel, int64_t depth, float* c,
                      int64_t ldc, bool add);

template <int kRows, int kVecs>
void tile(const float* a, int64_t lda, const float* panel, int64_t depth, float* c, int64_t ldc,
          bool add) {
  Vec acc[kRows][kVecs];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < kVecs; ++j) acc[i][j] = add ? load(c + i * ldc + j * kWidth) : splat(0);
  }
  for (int64_t l = 0; l < depth; ++l) {
    Vec b[kVecs];
#pragma GCC unroll 2
    for (int j = 0; j < kVecs; ++j) b[j] = load(panel + (l * kVecs + j) * kWidth);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Vec x = splat(a[i * lda + l]);
#pragma GCC unroll 2
      for (int j = 0; j < kVecs; ++j) acc[i][j] += x * b[j];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < kVecs; ++j) store(c + i * ldc + j * kWidth, acc[i][j]);
  }
}

template <int kVecs, int... kRows>
constexpr std::array<Tile, kTileRows> tiles_of(std::integer_sequence<int, kRows...>) {
  return {tile<kRows + 1, kVecs>...};
}

// The tile of a number of rows (1 .. kTileRows) and a panel width.
inline Tile find_tile(int64_t rows, int width) {
  constexpr auto kRows = std::make_integer_sequence<int, kTileRows>{};
  static constexpr std::array<Tile, kTileRows> kNarrow = tiles_of<1>(kRows);
  static constexpr std::array<Tile, kTileRows> kWide = tiles_of<2>(kRows);
  return (width == kWidth ? kNarrow : kWide)[size_t(rows - 1)];
}

}  // namespace phyai
