// Linear layers in fp32 arithmetic on vector registers.
//
// Panel: [k][kPanel] in the dtype of the weight. A bf16 panel is widened slice by slice into the
// first cache by the first rows that need it, and read from there by all others.
#include "gemm_blocks.h"
#include "gemm_panels.h"

namespace phyai {
namespace {

constexpr int kPanel = 2 * kWidth;
constexpr int kDepth = 6144 / kPanel;  // a widened slice is 24 KB
constexpr int kLine = kDepth + 16;  // a row of x of one slice; not a power of two: cache sets
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
void tile(const float* x, const W* w, float* wide, int depth, float* sums, bool fresh) {
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
  for (; k + 16 <= depth; k += 16) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) __builtin_prefetch(x + (R + r) * kLine + k);
    for (int i = k; i < k + 16; ++i) step(i);
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
                    bool fresh) {
  if (rows == R) return tile<R, kRead, W>(x, w, wide, depth, sums, fresh);
  if constexpr (R > 1) tile_of<kRead, W, R - 1>(rows, x, w, wide, depth, sums, fresh);
}

template <typename T>
struct VectorKernel : Panels<T, Plain<2 * kWidth>> {
  using Out = T;
  static constexpr int kPanel = phyai::kPanel, kDepth = phyai::kDepth, kStep = 1;
  static constexpr int kMaxRows = 168, kMaxPanels = 128 / kPanel;
  static constexpr int64_t kSpare = sizeof(T) < 4 ? kDepth * kPanel * 4 : 0;

  static int64_t rows_unit(const Job&) { return 1; }
  static void start(const Job&) {}
  static void stop() {}

  // x as [slice][m][kLine] fp32
  static int64_t x_bytes(const Job& job) {
    return divide_up(job.weight.k, kDepth) * job.m * kLine * 4;
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

  static const T* slice_at(const Job& job, int64_t panel, int64_t slice) {
    return VectorKernel::at(job.weight, panel) + slice * kDepth * kPanel;
  }

  static void multiply(const Job& job, const void* x, const Block& b, void* spare) {
    const T* w = slice_at(job, b.panel, b.slice);
    float* wide = static_cast<float*>(spare);
    const int depth = std::min<int64_t>(kDepth, job.weight.k - b.slice * kDepth);
    const float* rows = static_cast<const float*>(x) + (b.slice * job.m + b.first_row) * kLine;
    const char* next =
        b.next_panel < 0 ? nullptr : (const char*)slice_at(job, b.next_panel, b.next_slice);
    // tiles of nearly equal height: 50 rows are 5 x 6 + 4 x 5, not 8 x 6 + 2
    const int64_t tiles = divide_up(b.rows, kRows);
    const int64_t fetch = divide_up(kDepth * kPanel * sizeof(T), 64 * tiles);
    for (int64_t t = 0, r = 0; t < tiles; ++t) {
      const int height = b.rows / tiles + (t < b.rows % tiles);
      for (int64_t i = 0; next && i < fetch; ++i) {
        __builtin_prefetch(next + (t * fetch + i) * 64, 0, 2);
      }
      const float* row = rows + r * kLine;
      float* sums = b.sums + r * kPanel;
      if constexpr (sizeof(T) == 4) {
        tile_of<Read::kPlain>(height, row, w, nullptr, depth, sums, b.slice == 0);
      } else if (tiles == 1) {
        tile_of<Read::kPlain>(height, row, w, wide, depth, sums, b.slice == 0);
      } else if (t == 0) {
        tile_of<Read::kWiden>(height, row, w, wide, depth, sums, b.slice == 0);
      } else {
        tile_of<Read::kPlain>(height, row, (const float*)wide, wide, depth, sums, b.slice == 0);
      }
      r += height;
    }
  }
};

template <typename T>
int linear(const Job& job) {
  return run_blocks<VectorKernel<T>>(job);
}

template <typename T>
constexpr Family kFamily = {VectorKernel<T>::bytes, VectorKernel<T>::pack, VectorKernel<T>::unpack,
                            linear<T>};

}  // namespace

const Family& vector_family(int dtype) { return dtype == kBf16 ? kFamily<bf16> : kFamily<float>; }

}  // namespace phyai
