// Linear layers with int8 weights and int8 inputs on vector registers: pairs of int16 into int32.
//
// Panel: [k / 2][kPanel][2]. A slice is widened to int16 in the first cache before the rows pass.
// The sums of one block of k are exact; scales of weight and row come on in fp32.
#include "gemm_int8.h"

namespace phyai {
namespace {

constexpr int kPanel = 2 * kWidth;
constexpr int kDepth = 12288 / kPanel;  // a widened slice is 24 KB; whole blocks
constexpr int kLine = kDepth / 2 + 16;  // pairs of a row of x of one slice; see gemm_vector_tiles.h
constexpr int kBlockPairs = kBlock / 2;
constexpr int kFetchStep = 16;  // pairs: a line of x
#if defined(__AVX512F__)
constexpr int kRows = 14;
#elif defined(__aarch64__)
constexpr int kRows = 12;
#else
constexpr int kRows = 6;
#endif

inline VecI load_pairs(const int16_t* p) {
  VecI v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline VecI load_pairs(const int8_t* p) {
#if defined(__AVX512BW__)
  return VecI(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)));
#elif PHYAI_AVX2
  return VecI(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)));
#else
  int16_t wide[2 * kWidth];
  for (int i = 0; i < 2 * kWidth; ++i) wide[i] = p[i];
  return load_pairs(wide);
#endif
}

// sums + a.low * b.low + a.high * b.high
inline VecI dot(VecI sums, VecI a, VecI b) {
#if defined(__AVX512VNNI__)
  return VecI(_mm512_dpwssd_epi32(__m512i(sums), __m512i(a), __m512i(b)));
#elif defined(__AVX512BW__)
  return sums + VecI(_mm512_madd_epi16(__m512i(a), __m512i(b)));
#elif PHYAI_AVX2 && defined(__AVXVNNI__)
  return VecI(_mm256_dpwssd_avx_epi32(__m256i(sums), __m256i(a), __m256i(b)));
#elif PHYAI_AVX2
  return sums + VecI(_mm256_madd_epi16(__m256i(a), __m256i(b)));
#else
  return sums + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// One slice for one tile of rows.
struct Slice {
  const int32_t* x;       // pairs, [rows, kLine]
  const float* scales;    // of the weight, [blocks, kPanel]
  const float* x_scales;  // of the rows; null before the last slice
  int pairs;
  float* sums;  // [rows, kPanel]
  bool fresh;   // the sums hold nothing yet
  Fetch next;
};

template <int R, typename W>
void tile(const Slice& s, const W* w) {
  const int32_t* x = s.x;
  Fetch next = s.next;
  const float* scales = s.scales;
  for (int first = 0; first < s.pairs; first += kBlockPairs, scales += kPanel) {
    const int end = std::min(first + kBlockPairs, s.pairs);
    VecI acc[R][2] = {};
    const auto step = [&](int p) {
      const VecI w0 = load_pairs(w + p * 2 * kPanel), w1 = load_pairs(w + p * 2 * kPanel + kPanel);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const VecI a = VecI{} + x[r * kLine + p];
        acc[r][0] = dot(acc[r][0], w0, a);
        acc[r][1] = dot(acc[r][1], w1, a);
      }
    };
    int p = first;  // each line of x that is read fetches the one of the tile below
    for (; p + kFetchStep <= end; p += kFetchStep) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) __builtin_prefetch(x + (R + r) * kLine + p);
      next.step();
      for (int i = p; i < p + kFetchStep; ++i) step(i);
    }
    for (; p < end; ++p) step(p);
    const bool fresh = s.fresh && first == 0, last = s.x_scales && end == s.pairs;
    const Vec low = load(scales), high = load(scales + kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      float* sums = s.sums + r * kPanel;
      Vec y0 = as_floats(acc[r][0]) * low, y1 = as_floats(acc[r][1]) * high;
      if (!fresh) y0 += load(sums), y1 += load(sums + kWidth);
      if (last) y0 *= s.x_scales[r], y1 *= s.x_scales[r];
      store(sums, y0);
      store(sums + kWidth, y1);
    }
  }
}

template <typename W, int R = kRows>
inline void tile_of(int rows, const Slice& s, const W* w) {
  if (rows == R) return tile<R, W>(s, w);
  if constexpr (R > 1) tile_of<W, R - 1>(rows, s, w);
}

template <typename T>
struct Int8PairKernel : Int8Panels<Paired<2 * kWidth, 2>> {
  using Out = T;
  static constexpr int kPanel = phyai::kPanel, kDepth = phyai::kDepth, kStep = 1;
  static constexpr int kMaxRows = 168, kMaxPanels = 128 / kPanel;
  static constexpr int64_t kSpare = kDepth * kPanel * 2;

  static int64_t rows_unit(const Job&) { return 1; }
  static void start(const Job&) {}
  static void stop() {}

  // the scales of the rows, then x as [slice][m][kLine] pairs
  static int64_t scale_bytes(const Job& job) { return round_up(job.m * 4, 64); }

  static int64_t x_bytes(const Job& job) {
    return scale_bytes(job) + divide_up(job.weight.k, kDepth) * job.m * kLine * 4;
  }

  static void place_rows(const Job& job, void* x, int64_t first, int64_t count) {
    float* scales = static_cast<float*>(x);
    char* values = static_cast<char*>(x) + scale_bytes(job);
    for (int64_t r = first; r < first + count; ++r) {
      const T* from = static_cast<const T*>(job.x) + r * job.x_stride;
      const RowScale by = row_scale(from, job.weight.k);
      scales[r] = by.scale;
      for (int64_t k = 0; k < job.weight.k; k += kDepth) {
        int32_t* line = reinterpret_cast<int32_t*>(values) + (k / kDepth * job.m + r) * kLine;
        int16_t* to = reinterpret_cast<int16_t*>(line);
        const int64_t depth = std::min<int64_t>(kDepth, job.weight.k - k);
        round_row(from + k, depth, by.inverse, to);
        if (depth % 2) std::memset(to + depth, 0, 2);  // the half that has no partner
      }
    }
  }

  static const int8_t* slice_at(const Job& job, int64_t panel, int64_t slice) {
    return Int8PairKernel::at(job.weight, panel) + slice * kDepth * kPanel;
  }

  static void widen(const int8_t* from, int pairs, int16_t* to) {
    for (int i = 0; i < pairs * 2 * kPanel; i += 2 * kWidth) {
      const VecI wide = load_pairs(from + i);
      std::memcpy(to + i, &wide, sizeof wide);
    }
  }

  static void multiply(const Job& job, const void* x, const Block& b, void* spare) {
    const int8_t* w = slice_at(job, b.panel, b.slice);
    const int64_t depth = std::min<int64_t>(kDepth, job.weight.k - b.slice * kDepth);
    const bool last = (b.slice + 1) * kDepth >= job.weight.k;
    const char* values = static_cast<const char*>(x) + scale_bytes(job);
    Slice s;
    s.x = reinterpret_cast<const int32_t*>(values) + (b.slice * job.m + b.first_row) * kLine;
    s.scales = Int8PairKernel::scales_at(job.weight, b.panel) +
               b.slice * (kDepth / kBlock) * kPanel;
    s.x_scales = last ? static_cast<const float*>(x) + b.first_row : nullptr;
    s.pairs = int(divide_up(depth, 2));
    s.sums = b.sums;
    s.fresh = b.slice == 0;
    const int64_t tiles = divide_up(b.rows, kRows);
    int16_t* wide = static_cast<int16_t*>(spare);
    if (tiles > 1) widen(w, s.pairs, wide);
    const int8_t* next = b.next_panel < 0 ? nullptr : slice_at(job, b.next_panel, b.next_slice);
    for (int64_t t = 0; t < tiles; ++t) {
      const int height = b.rows / tiles + (t < b.rows % tiles);
      s.next = Fetch::share(next, kDepth * kPanel, t, tiles, kDepth / 2 / kFetchStep);
      tiles > 1 ? tile_of(height, s, (const int16_t*)wide) : tile_of(height, s, w);
      s.x += height * kLine;
      s.sums += height * kPanel;
      if (last) s.x_scales += height;
    }
  }
};

template <typename T>
int linear(const Job& job) {
  return run_blocks<Int8PairKernel<T>>(job);
}

template <typename T>
constexpr Family kFamily = family_of<Int8PairKernel<T>>(linear<T>);

}  // namespace

const Family& int8_pair_family(int dtype) {
  return dtype == kBf16 ? kFamily<bf16> : kFamily<float>;
}

}  // namespace phyai
