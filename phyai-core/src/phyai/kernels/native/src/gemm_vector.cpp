// Linear layers in fp32 arithmetic on vector registers.
//
// Panel: [k][kPanel] in the dtype of the weight. A bf16 panel is widened slice by slice into the
// first cache by the first rows that need it, and read from there by all others.
#include "gemm_vector_tiles.h"

namespace phyai {
namespace {

using namespace vectors;

template <typename T>
struct VectorKernel : WideRows<T>, Panels<T, Plain<2 * kWidth>> {
  static constexpr int kPanel = vectors::kPanel, kDepth = vectors::kDepth, kStep = 1;
  static constexpr int64_t kSpare = sizeof(T) < 4 ? kDepth * kPanel * 4 : 0;

  static const T* slice_at(const Job& job, int64_t panel, int64_t slice) {
    return VectorKernel::at(job.weight, panel) + slice * kDepth * kPanel;
  }

  static void multiply(const Job& job, const void* x, const Block& b, void* spare) {
    const T* w = slice_at(job, b.panel, b.slice);
    float* wide = static_cast<float*>(spare);
    const int depth = std::min<int64_t>(kDepth, job.weight.k - b.slice * kDepth);
    const float* rows = VectorKernel::rows_at(job, x, b);
    const void* next = b.next_panel < 0 ? nullptr : slice_at(job, b.next_panel, b.next_slice);
    // tiles of nearly equal height: 50 rows are 5 x 6 + 4 x 5, not 8 x 6 + 2
    const int64_t tiles = divide_up(b.rows, kRows);
    for (int64_t t = 0, r = 0; t < tiles; ++t) {
      const int height = b.rows / tiles + (t < b.rows % tiles);
      const auto fetch =
          Fetch::share(next, kDepth * kPanel * sizeof(T), t, tiles, kDepth / kFetchStep);
      const float* row = rows + r * kLine;
      float* sums = b.sums + r * kPanel;
      if constexpr (sizeof(T) == 4) {
        tile_of<Read::kPlain>(height, row, w, nullptr, depth, sums, b.slice == 0, fetch);
      } else if (tiles == 1) {
        tile_of<Read::kPlain>(height, row, w, wide, depth, sums, b.slice == 0, fetch);
      } else if (t == 0) {
        tile_of<Read::kWiden>(height, row, w, wide, depth, sums, b.slice == 0, fetch);
      } else {
        tile_of<Read::kPlain>(height, row, (const float*)wide, wide, depth, sums, b.slice == 0,
                              fetch);
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
constexpr Family kFamily = family_of<VectorKernel<T>>(linear<T>);

}  // namespace

const Family& vector_family(int dtype) { return dtype == kBf16 ? kFamily<bf16> : kFamily<float>; }

}  // namespace phyai
