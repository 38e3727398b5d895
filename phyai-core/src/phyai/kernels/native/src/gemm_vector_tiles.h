// fp32 arithmetic on vector registers: some rows of x times one slice of a panel [k][kPanel].
#pragma once

#include "gemm_blocks.h"
#include "gemm_panels.h"

namespace phyai {
namespace vectors {

constexpr int kPanel = 2 * kWidth;
constexpr int kDepth = 6144 / kPanel;  // a widened slice is 24 KB
constexpr int kLine = kDepth + 16;      // a row of x of one slice; not a power of two: cache sets
constexpr int kFetchStep = 16;          // of k: a line of x
#if defined(__AVX512F__)
constexpr int kRows = 14;  // 28 of 32 registers hold sums
#elif defined(__aarch64__)
constexpr int kRows = 12;
#else
constexpr int kRows = 6;  // 12 of 16
#endif

// Widen: read bf16, leave fp32 at `wide` for the rows that follow.
enum class Read { kPlain, kWiden };

// sums [R, kPanel] (+)= x [R, kLine] times one slice of a panel.
template <int R, Read kRead, typename W>
void tile(const float* x, const W* w, float* wide, int depth, float* sums, bool fresh, Fetch next) {
  Vec acc[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    acc[r][0] = fresh ? Vec{} : load(sums + r * kPanel);
    acc[r][1] = fresh ? Vec{} : load(sums + r * kPanel + kWidth);
  }
  const auto step = [&](int k) {
    const Vec w0 = load(w + k * kPanel), w1 = load(w + k * kPanel + kWidth);
    if constexpr (kRead == Read::kWiden) {
      store(wide + k * kPanel, w0);
      store(wide + k * kPanel + kWidth, w1);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec a = splat(x[r * kLine + k]);
      acc[r][0] += a * w0;
      acc[r][1] += a * w1;
    }
  };
  int k = 0;  // each line of x that is read fetches the one of the tile below
  for (; k + kFetchStep <= depth; k += kFetchStep) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) __builtin_prefetch(x + (R + r) * kLine + k);
    next.step();
    for (int i = k; i < k + kFetchStep; ++i) step(i);
  }
  for (; k < depth; ++k) step(k);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    store(sums + r * kPanel, acc[r][0]);
    store(sums + r * kPanel + kWidth, acc[r][1]);
  }
}

template <Read kRead, typename W, int R = kRows>
inline void tile_of(int rows, const float* x, const W* w, float* wide, int depth, float* sums,
                    bool fresh, Fetch next) {
  if (rows == R) return tile<R, kRead, W>(x, w, wide, depth, sums, fresh, next);
  if constexpr (R > 1) tile_of<kRead, W, R - 1>(rows, x, w, wide, depth, sums, fresh, next);
}

// x of a call as [slice][m][kLine] fp32.
template <typename T>
struct WideRows {
  using Out = T;
  static constexpr int kPanel = vectors::kPanel, kDepth = vectors::kDepth;
  static constexpr int kMaxRows = 168, kMaxPanels = 128 / kPanel;

  static int64_t rows_unit(const Job&) { return 1; }
  static void start(const Job&) {}
  static void stop() {}

  static int64_t x_bytes(const Job& job) {
    return divide_up(job.weight.k, kDepth) * job.m * kLine * 4;
  }

  static const float* rows_at(const Job& job, const void* x, const Block& b) {
    return static_cast<const float*>(x) + (b.slice * job.m + b.first_row) * kLine;
  }

  static void place_rows(const Job& job, void* x, int64_t first, int64_t count) {
    for (int64_t r = first; r < first + count; ++r) {
      const T* from = static_cast<const T*>(job.x) + r * job.x_stride;
      for (int64_t k = 0; k < job.weight.k; k += kDepth) {
        float* to = static_cast<float*>(x) + (k / kDepth * job.m + r) * kLine;
        const int depth = std::min<int64_t>(kDepth, job.weight.k - k);
        int i = 0;
        for (; i + kWidth <= depth; i += kWidth) store(to + i, load(from + k + i));
        for (; i < depth; ++i) to[i] = scalar(from[k + i]);
      }
    }
  }
};

}  // namespace vectors
}  // namespace phyai
