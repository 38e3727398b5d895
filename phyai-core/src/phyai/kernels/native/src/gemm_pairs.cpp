// Linear layers in bf16 on vector registers: the CPU multiplies pairs of bf16 and adds in fp32.
//
// Panel: [k / 2][kPanel][2], k padded with a zero to an even number.
// PHYAI_PAIRS_EMULATED: the instruction in plain vector code, to test the rest on any CPU.
#include "gemm_blocks.h"
#include "gemm_panels.h"

#if defined(__AVX512BF16__) && !defined(PHYAI_PAIRS_EMULATED)
#include <immintrin.h>
#define PHYAI_PAIRS 1
#elif defined(PHYAI_PAIRS_EMULATED)
#define PHYAI_PAIRS 1
#else
#define PHYAI_PAIRS 0
#endif

namespace phyai {

#if !PHYAI_PAIRS
const Family* pair_family() { return nullptr; }
#else
namespace {

constexpr int kPanel = 2 * kWidth;
constexpr int kPairs = 6144 / kPanel;  // of a slice: 24 KB of a panel
constexpr int kLine = kPairs + 16;     // a row of x of one slice
constexpr int kRows = kWidth == 16 ? 14 : 4;

using Order = Paired<kPanel, 2>;

inline VecU load_pairs(const bf16* p) {
  VecU v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// sums + a.low * b.low + a.high * b.high
inline Vec dot(Vec sums, VecU a, VecU b) {
#if defined(PHYAI_PAIRS_EMULATED)
  const VecU high = VecU{} + 0xffff0000u;
  const auto wide = [](VecU bits) {
    Vec v;
    std::memcpy(&v, &bits, sizeof v);
    return v;
  };
  return sums + wide(a << 16) * wide(b << 16) + wide(a & high) * wide(b & high);
#else
  return (Vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
#endif
}

// sums [R, kPanel] (+)= x [R, kLine pairs] times one slice of a panel.
template <int R>
void tile(const uint32_t* x, const bf16* w, int pairs, float* sums, bool fresh) {
  Vec acc[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    acc[r][0] = fresh ? Vec{} : load(sums + r * kPanel);
    acc[r][1] = fresh ? Vec{} : load(sums + r * kPanel + kWidth);
  }
  for (int p = 0; p < pairs; ++p) {
    const VecU w0 = load_pairs(w + p * 2 * kPanel), w1 = load_pairs(w + p * 2 * kPanel + kPanel);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const VecU a = VecU{} + x[r * kLine + p];
      acc[r][0] = dot(acc[r][0], w0, a);
      acc[r][1] = dot(acc[r][1], w1, a);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    store(sums + r * kPanel, acc[r][0]);
    store(sums + r * kPanel + kWidth, acc[r][1]);
  }
}

template <int R = kRows>
inline void tile_of(int rows, const uint32_t* x, const bf16* w, int pairs, float* sums,
                    bool fresh) {
  if (rows == R) return tile<R>(x, w, pairs, sums, fresh);
  if constexpr (R > 1) tile_of<R - 1>(rows, x, w, pairs, sums, fresh);
}

struct PairKernel : Panels<bf16, Order> {
  using Out = bf16;
  static constexpr int kPanel = phyai::kPanel, kDepth = 2 * kPairs, kStep = 1;
  static constexpr int kMaxRows = 168, kMaxPanels = 128 / kPanel;
  static constexpr int64_t kSpare = 0;

  static int64_t rows_unit(const Job&) { return 1; }
  static void start(const Job&) {}
  static void stop() {}

  // x as [slice][m][kLine] pairs
  static int64_t x_bytes(const Job& job) {
    return divide_up(job.weight.k, kDepth) * job.m * kLine * 4;
  }

  static void place_rows(const Job& job, void* x, int64_t first, int64_t count) {
    for (int64_t r = first; r < first + count; ++r) {
      const bf16* from = static_cast<const bf16*>(job.x) + r * job.x_stride;
      for (int64_t k = 0; k < job.weight.k; k += kDepth) {
        uint32_t* to = static_cast<uint32_t*>(x) + (k / kDepth * job.m + r) * kLine;
        const int64_t depth = std::min<int64_t>(kDepth, job.weight.k - k);
        if (depth % 2) to[depth / 2] = 0;  // the half that has no partner
        std::memcpy(to, from + k, depth * 2);
      }
    }
  }

  static const bf16* slice_at(const Job& job, int64_t panel, int64_t slice) {
    return at(job.weight, panel) + slice * kDepth * kPanel;
  }

  static void multiply(const Job& job, const void* x, const Block& b, void*) {
    const bf16* w = slice_at(job, b.panel, b.slice);
    const int pairs = divide_up(std::min<int64_t>(kDepth, job.weight.k - b.slice * kDepth), 2);
    const uint32_t* rows =
        static_cast<const uint32_t*>(x) + (b.slice * job.m + b.first_row) * kLine;
    const bf16* next = b.next_panel < 0 ? nullptr : slice_at(job, b.next_panel, b.next_slice);
    const int64_t tiles = divide_up(b.rows, kRows);
    const int64_t fetch = divide_up(kDepth * kPanel / 32, tiles);
    for (int64_t t = 0, r = 0; t < tiles; ++t) {
      const int height = b.rows / tiles + (t < b.rows % tiles);
      for (int64_t i = 0; next && i < fetch; ++i) {
        __builtin_prefetch(next + (t * fetch + i) * 32, 0, 2);
      }
      tile_of(height, rows + r * kLine, w, pairs, b.sums + r * kPanel, b.slice == 0);
      r += height;
    }
  }
};

int linear(const Job& job) { return run_blocks<PairKernel>(job); }

constexpr Family kPairFamily = family_of<PairKernel>(linear);

}  // namespace

const Family* pair_family() { return &kPairFamily; }
#endif

}  // namespace phyai
