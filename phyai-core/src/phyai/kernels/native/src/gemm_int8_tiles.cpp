// Linear layers with int8 weights and int8 inputs on tile registers: 2 x 2 tiles of int32 sums.
//
// Panel: [k / 64][16 quads][16 columns][4], k padded with zeros to whole blocks.
// x: the scales of the rows, then [row tile][k / 64][height][64], padded with zeros likewise.
// The sums of one block of k leave the tiles by way of memory, and are scaled there.
#include "gemm_int8.h"
#include "gemm_tile_registers.h"

namespace phyai {

#if !PHYAI_TILES
const Family* int8_tile_family(int) { return nullptr; }
#else
namespace {

constexpr int kPanel = 16;
constexpr int kStep = 64;                 // k of one multiplication
constexpr int kWeights = kStep * kPanel;  // of one step of one panel
constexpr int kBlockSteps = kBlock / kStep;
constexpr int kSliceBlocks = 4;  // two panels and two row tiles fit the first cache
constexpr int kTileSums = 16 * kPanel;

// Two panels times two row tiles, one block of k.
struct Operands {
  const int8_t* x;
  int64_t x_next;  // from one row tile to the next
  const int8_t* w;
  int64_t w_next;  // from one panel to the next
  int64_t height;
  int32_t* sums;  // [row tile][panel][height, kPanel]
};

template <bool kTwoRows, bool kTwoPanels>
void multiply_block(const Operands& o) {
  PHYAI_TILE_ZERO(0);
  if constexpr (kTwoPanels) PHYAI_TILE_ZERO(1);
  if constexpr (kTwoRows) PHYAI_TILE_ZERO(2);
  if constexpr (kTwoRows && kTwoPanels) PHYAI_TILE_ZERO(3);
  for (int s = 0; s < kBlockSteps; ++s) {
    const int8_t* x = o.x + s * o.height * kStep;
    const int8_t* w = o.w + s * kWeights;
    PHYAI_TILE_LOAD(6, w, 64);
    PHYAI_TILE_LOAD(4, x, 64);
    PHYAI_TILE_MULTIPLY_INT8(0, 4, 6);
    if constexpr (kTwoPanels) {
      PHYAI_TILE_LOAD(7, w + o.w_next, 64);
      PHYAI_TILE_MULTIPLY_INT8(1, 4, 7);
    }
    if constexpr (kTwoRows) {
      PHYAI_TILE_LOAD(5, x + o.x_next, 64);
      PHYAI_TILE_MULTIPLY_INT8(2, 5, 6);
      if constexpr (kTwoPanels) PHYAI_TILE_MULTIPLY_INT8(3, 5, 7);
    }
  }
  PHYAI_TILE_STORE(0, o.sums, 64);
  if constexpr (kTwoPanels) PHYAI_TILE_STORE(1, o.sums + kTileSums, 64);
  if constexpr (kTwoRows) PHYAI_TILE_STORE(2, o.sums + 2 * kTileSums, 64);
  if constexpr (kTwoRows && kTwoPanels) PHYAI_TILE_STORE(3, o.sums + 3 * kTileSums, 64);
}

// to [height, kPanel] (+)= from * scales, and the whole times the scales of the rows at the end.
void add_scaled(const int32_t* from, const float* scales, const float* x_scales, int64_t height,
                bool fresh, float* to) {
  for (int64_t r = 0; r < height; ++r) {
    for (int j = 0; j < kPanel; j += kWidth) {
      VecI whole;
      std::memcpy(&whole, from + r * kPanel + j, sizeof whole);
      Vec y = as_floats(whole) * load(scales + j);
      if (!fresh) y += load(to + r * kPanel + j);
      if (x_scales) y *= x_scales[r];
      store(to + r * kPanel + j, y);
    }
  }
}

template <typename T>
struct Int8TileKernel : Int8Panels<Quads<phyai::kPanel, kBlock>> {
  using Out = T;
  using Base = Int8Panels<Quads<phyai::kPanel, kBlock>>;
  static constexpr int kPanel = phyai::kPanel, kDepth = kSliceBlocks * kBlock, kStep = 2;
  static constexpr int kMaxRows = 256, kMaxPanels = 16;
  static constexpr int64_t kSpare = 4 * kTileSums * 4;

  // The height of the row tiles, all equal: time goes with it. 50 rows are 4 x 13, not 4 x 16.
  static int64_t rows_unit(const Job& job) { return divide_up(job.m, divide_up(job.m, 16)); }

  static int64_t padded_rows(const Job& job) { return round_up(job.m, rows_unit(job)); }
  static int64_t scale_bytes(const Job& job) { return round_up(padded_rows(job) * 4, 64); }

  static int64_t x_bytes(const Job& job) {
    return scale_bytes(job) + padded_rows(job) * Base::depth(job.weight);
  }

  static void place_rows(const Job& job, void* x, int64_t first, int64_t count) {
    const int64_t height = rows_unit(job), k = job.weight.k, depth = Base::depth(job.weight);
    float* scales = static_cast<float*>(x) + first;
    int8_t* to = static_cast<int8_t*>(x) + scale_bytes(job) + first * depth;
    for (int64_t r = 0; r < height; ++r) {
      const bool real = r < count;
      const T* from = static_cast<const T*>(job.x) + (real ? first + r : 0) * job.x_stride;
      const RowScale by = real ? row_scale(from, k) : RowScale{0, 0};
      scales[r] = by.scale;
      for (int64_t s = 0; s < depth; s += phyai::kStep) {
        int8_t* line = to + s * height + r * phyai::kStep;
        const int64_t left = std::min<int64_t>(phyai::kStep, std::max<int64_t>(k - s, 0));
        round_row(from + s, left, by.inverse, line);
        std::memset(line + left, 0, phyai::kStep - left);
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

  static void multiply(const Job& job, const void* x, const Block& b, void* spare) {
    const int64_t height = rows_unit(job), depth = Base::depth(job.weight);
    const int64_t all = Base::blocks(job.weight), row_tiles = b.height / height;
    const int64_t first = b.slice * kSliceBlocks, end = std::min(first + kSliceBlocks, all);
    const int8_t* values = static_cast<const int8_t*>(x) + scale_bytes(job);
    const float* row_scales = static_cast<const float*>(x) + b.first_row;
    Operands o;
    o.x_next = height * depth;
    o.w_next = depth * kPanel;
    o.height = height;
    o.sums = static_cast<int32_t*>(spare);
    for (int64_t t = 0; t < row_tiles; t += 2) {
      const bool two = t + 1 < row_tiles;
      for (int64_t block = first; block < end; ++block) {
        o.x = values + (b.first_row + t * height) * depth + block * kBlock * height;
        o.w = Base::at(job.weight, b.panel) + block * kBlock * kPanel;
        if (b.panels == 2) {
          two ? multiply_block<true, true>(o) : multiply_block<false, true>(o);
        } else {
          two ? multiply_block<true, false>(o) : multiply_block<false, false>(o);
        }
        for (int i = 0; i < (two ? 4 : 2); ++i) {
          if (i % 2 >= b.panels) continue;
          const float* scales = Base::scales_at(job.weight, b.panel + i % 2) + block * kPanel;
          const int64_t row = (t + i / 2) * height;
          add_scaled(o.sums + i * kTileSums, scales, block + 1 == all ? row_scales + row : nullptr,
                     height, block == 0, b.sums + (i % 2 * b.height + row) * kPanel);
        }
      }
    }
    fetch(job, b);
  }

  // What comes next, on its way while the next rows are multiplied.
  static void fetch(const Job& job, const Block& b) {
    if (b.next_panel < 0) return;
    const int64_t depth = Base::depth(job.weight);
    const int8_t* next = Base::at(job.weight, b.next_panel) + b.next_slice * kDepth * kPanel;
    for (int64_t i = 0; i < kDepth * kPanel; i += 64) {
      __builtin_prefetch(next + i, 0, 2);
      __builtin_prefetch(next + depth * kPanel + i, 0, 2);
    }
  }
};

template <typename T>
int linear(const Job& job) {
  return run_blocks<Int8TileKernel<T>>(job);
}

template <typename T>
constexpr Family kFamily = family_of<Int8TileKernel<T>>(linear<T>);

}  // namespace

const Family* int8_tile_family(int dtype) {
  if (!tiles_allowed()) return nullptr;
  return dtype == kBf16 ? &kFamily<bf16> : &kFamily<float>;
}
#endif

}  // namespace phyai
