// Linear layers in bf16 on tile registers: 2 x 2 tiles of sums, 16 columns and up to 16 rows each.
//
// Panel: [k / 32][16 pairs][16 columns][2], k padded with zeros to a multiple of 32.
// x: [row tile][k / 32][height][32], rows padded with zeros to whole tiles.
#include "gemm_blocks.h"
#include "gemm_panels.h"
#include "gemm_tile_registers.h"

namespace phyai {

#if !PHYAI_TILES
const Family* tile_family() { return nullptr; }
#else
namespace {

constexpr int kPanel = 16;
constexpr int kStep = 32;             // k of one multiplication
constexpr int kWeights = 16 * 2 * kPanel;  // of one step of one panel
constexpr int kSteps = 8;  // of a slice: two panels and two row tiles fit the first cache

struct TileKernel : Panels<bf16, Paired<16, 32>> {
  using Out = bf16;
  static constexpr int kPanel = phyai::kPanel, kDepth = kSteps * phyai::kStep, kStep = 2;
  static constexpr int kMaxRows = 256, kMaxPanels = 16;
  static constexpr int64_t kSpare = 0;

  static int64_t steps(const Packed& w) { return divide_up(w.k, phyai::kStep); }

  // The height of the row tiles, all equal: time goes with it. 50 rows are 4 x 13, not 4 x 16.
  static int64_t rows_unit(const Job& job) { return divide_up(job.m, divide_up(job.m, 16)); }

  static int64_t x_bytes(const Job& job) {
    return round_up(job.m, rows_unit(job)) * steps(job.weight) * phyai::kStep * 2;
  }

  static void place_rows(const Job& job, void* x, int64_t first, int64_t count) {
    const int64_t height = rows_unit(job), k = job.weight.k;
    const int64_t padded = steps(job.weight) * phyai::kStep;
    bf16* to = static_cast<bf16*>(x) + first * padded;
    for (int64_t r = 0; r < height; ++r) {
      const bf16* from = static_cast<const bf16*>(job.x) + (first + r) * job.x_stride;
      for (int64_t s = 0; s < padded; s += phyai::kStep) {
        bf16* line = to + s * height + r * phyai::kStep;
        const int64_t real = r < count ? std::min<int64_t>(phyai::kStep, k - s) : 0;
        std::memcpy(line, from + s, real * 2);
        std::memset(line + real, 0, (phyai::kStep - real) * 2);
      }
    }
  }

  static void start(const Job& job) {
    TileConfig config{};
    config.palette = 1;
    for (int t = 0; t < 8; ++t) {
      config.row_bytes[t] = 64;
      config.rows[t] = t < 6 ? rows_unit(job) : 16;  // 0 .. 3 sums, 4 5 rows of x, 6 7 panels
    }
    PHYAI_TILE_CONFIGURE(config);
  }

  static void stop() { PHYAI_TILE_RELEASE(); }

  static const bf16* slice_at(const Job& job, int64_t panel, int64_t slice) {
    return at(job.weight, panel) + slice * kSteps * kWeights;
  }

  struct Operands {
    const bf16* x;
    int64_t x_next;  // from one row tile to the next, in elements
    const bf16* w;
    int64_t w_next;  // from one panel to the next
    float* sums;
    int64_t sums_next;  // likewise
    int64_t height;
    int steps;
    bool fresh;
    const bf16* fetch;  // what comes next: `lines` per step and panel; null: nothing
    int64_t lines;
  };

  template <bool kTwoRows, bool kTwoPanels>
  static void tiles(const Operands& o) {
    float *c0 = o.sums, *c1 = o.sums + o.sums_next;
    const int64_t down = o.height * kPanel;
    if (o.fresh) {
      PHYAI_TILE_ZERO(0);
      if constexpr (kTwoPanels) PHYAI_TILE_ZERO(1);
      if constexpr (kTwoRows) PHYAI_TILE_ZERO(2);
      if constexpr (kTwoRows && kTwoPanels) PHYAI_TILE_ZERO(3);
    } else {
      PHYAI_TILE_LOAD(0, c0, 64);
      if constexpr (kTwoPanels) PHYAI_TILE_LOAD(1, c1, 64);
      if constexpr (kTwoRows) PHYAI_TILE_LOAD(2, c0 + down, 64);
      if constexpr (kTwoRows && kTwoPanels) PHYAI_TILE_LOAD(3, c1 + down, 64);
    }
    for (int s = 0; s < o.steps; ++s) {
      const bf16* x = o.x + s * o.height * phyai::kStep;
      const bf16* w = o.w + s * kWeights;
      PHYAI_TILE_LOAD(6, w, 64);
      PHYAI_TILE_LOAD(4, x, 64);
      PHYAI_TILE_MULTIPLY(0, 4, 6);
      if constexpr (kTwoPanels) {
        PHYAI_TILE_LOAD(7, w + o.w_next, 64);
        PHYAI_TILE_MULTIPLY(1, 4, 7);
      }
      if constexpr (kTwoRows) {
        PHYAI_TILE_LOAD(5, x + o.x_next, 64);
        PHYAI_TILE_MULTIPLY(2, 5, 6);
        if constexpr (kTwoPanels) PHYAI_TILE_MULTIPLY(3, 5, 7);
      }
      for (int64_t i = 0; o.fetch && i < o.lines; ++i) {
        const bf16* line = o.fetch + (s * o.lines + i) * 32;
        __builtin_prefetch(line, 0, 2);
        __builtin_prefetch(line + o.w_next, 0, 2);
      }
    }
    PHYAI_TILE_STORE(0, c0, 64);
    if constexpr (kTwoPanels) PHYAI_TILE_STORE(1, c1, 64);
    if constexpr (kTwoRows) PHYAI_TILE_STORE(2, c0 + down, 64);
    if constexpr (kTwoRows && kTwoPanels) PHYAI_TILE_STORE(3, c1 + down, 64);
  }

  static void multiply(const Job& job, const void* x, const Block& b, void*) {
    const int64_t all = steps(job.weight), height = rows_unit(job);
    const int64_t row_tiles = b.height / height, pairs = divide_up(row_tiles, 2);
    Operands o;
    o.x_next = all * height * phyai::kStep;
    o.w = slice_at(job, b.panel, b.slice);
    o.w_next = all * kWeights;
    o.sums_next = b.height * kPanel;
    o.height = height;
    o.steps = std::min<int64_t>(kSteps, all - b.slice * kSteps);
    o.fresh = b.slice == 0;
    o.lines = divide_up(kWeights / 32, pairs);
    const bf16* next = b.next_panel < 0 ? nullptr : slice_at(job, b.next_panel, b.next_slice);
    const bf16* first = static_cast<const bf16*>(x) + b.first_row / height * o.x_next +
                        b.slice * kSteps * height * phyai::kStep;
    for (int64_t t = 0; t < row_tiles; t += 2) {
      o.x = first + t * o.x_next;
      o.sums = b.sums + t * height * kPanel;
      o.fetch = next ? next + t / 2 * o.lines * o.steps * 32 : nullptr;
      const bool two = t + 1 < row_tiles;
      if (b.panels == 2) {
        two ? tiles<true, true>(o) : tiles<false, true>(o);
      } else {
        two ? tiles<true, false>(o) : tiles<false, false>(o);
      }
    }
  }
};

int linear(const Job& job) { return run_blocks<TileKernel>(job); }

constexpr Family kTiles = family_of<TileKernel>(linear);

}  // namespace

const Family* tile_family() { return tiles_allowed() ? &kTiles : nullptr; }
#endif

}  // namespace phyai
