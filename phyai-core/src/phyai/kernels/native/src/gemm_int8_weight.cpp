// Linear layers in fp32 arithmetic over int8 weights: value * scale in fp32.
//
// Panel: [k][kPanel]; a slice is widened into the first cache before the rows pass.
#include "gemm_int8.h"
#include "gemm_vector_tiles.h"

namespace phyai {
namespace {

using namespace vectors;

inline Vec load_wide(const int8_t* p) {
#if defined(__AVX512F__)  // the masked form: GCC warns of the other one
  const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  return as_floats(VecI(_mm512_maskz_cvtepi8_epi32(0xffff, bytes)));
#elif PHYAI_AVX2
  return Vec(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))));
#else
  typedef int8_t VecB __attribute__((vector_size(kWidth)));
  VecB b;
  std::memcpy(&b, p, sizeof b);
  return as_floats(__builtin_convertvector(b, VecI));
#endif
}

template <typename T>
struct WeightKernel : WideRows<T>, Int8Panels<Plain<2 * kWidth>> {
  static constexpr int kPanel = vectors::kPanel, kDepth = vectors::kDepth, kStep = 1;
  static constexpr int64_t kSpare = kDepth * kPanel * 4;

  static const int8_t* slice_at(const Job& job, int64_t panel, int64_t slice) {
    return at(job.weight, panel) + slice * kDepth * kPanel;
  }

  static void widen(const Packed& w, const Block& b, int depth, float* wide) {
    const int8_t* from = at(w, b.panel) + b.slice * kDepth * kPanel;
    const float* scales = scales_at(w, b.panel);
    for (int k = 0; k < depth;) {
      const int64_t block = (b.slice * kDepth + k) / kBlock;
      const int end = std::min<int64_t>(depth, (block + 1) * kBlock - b.slice * kDepth);
      const Vec low = load(scales + block * kPanel), high = load(scales + block * kPanel + kWidth);
      for (; k < end; ++k) {
        store(wide + k * kPanel, load_wide(from + k * kPanel) * low);
        store(wide + k * kPanel + kWidth, load_wide(from + k * kPanel + kWidth) * high);
      }
    }
  }

  static void multiply(const Job& job, const void* x, const Block& b, void* spare) {
    float* wide = static_cast<float*>(spare);
    const int depth = std::min<int64_t>(kDepth, job.weight.k - b.slice * kDepth);
    widen(job.weight, b, depth, wide);
    const float* rows = WeightKernel::rows_at(job, x, b);
    const int8_t* next = b.next_panel < 0 ? nullptr : slice_at(job, b.next_panel, b.next_slice);
    const int64_t tiles = divide_up(b.rows, kRows);
    for (int64_t t = 0, r = 0; t < tiles; ++t) {
      const int height = b.rows / tiles + (t < b.rows % tiles);
      const auto fetch = Fetch::share(next, kDepth * kPanel, t, tiles, kDepth / kFetchStep);
      tile_of<Read::kPlain>(height, rows + r * kLine, (const float*)wide, wide, depth,
                            b.sums + r * kPanel, b.slice == 0, fetch);
      r += height;
    }
  }
};

template <typename T>
int linear(const Job& job) {
  return run_blocks<WeightKernel<T>>(job);
}

template <typename T>
constexpr Family kFamily = family_of<WeightKernel<T>>(linear<T>);

}  // namespace

const Family& int8_weight_family(int dtype) {
  return dtype == kBf16 ? kFamily<bf16> : kFamily<float>;
}

}  // namespace phyai
