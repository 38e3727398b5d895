// Linear layers y = x W^T over weights packed once: the shared terms of all kernels.
//
// A weight [n, k] is stored as panels: some rows of W (columns of y) side by side, k inside.
// A kernel (vectors, pairs, tiles) says how one panel is laid out and multiplies blocks;
// gemm_blocks.h walks over the blocks; gemm_epilogue.h turns sums into outputs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "simd.h"

namespace phyai {

// epilogue codes of the C interface; the last two read gate and up from an interleaved weight
enum Epilogue { kNone = 0, kGelu = 1, kGeluMul = 2, kSiluMul = 3 };

// what a packed weight holds: values of its dtype, or int8 with a scale for each kBlock of a row;
// kInt8Both: the layer rounds x to int8 too, row by row
enum Format { kPlain = 0, kInt8Weight = 1, kInt8Both = 2 };

// A packed weight as the C interface names it.
struct Packed {
  void* data;
  int64_t n, k;        // neither is 0: the caller refuses empty weights
  int32_t dtype;       // of x and the output
  int32_t interleave;  // panels alternate between the first half of the rows and the second
  int32_t format;
};

// Some rows of a weight as the caller has them: whole panels, but for the end of W or of a half.
struct Rows {
  int64_t first, count;
  void* values;    // of row `first`
  int64_t stride;  // in elements
  float* scales;   // [count, blocks of k] of an int8 format
};

// One call: x [m, k] with a row stride in elements, bias [n] or null, out contiguous.
struct Job {
  Packed weight;
  const void* x;
  int64_t x_stride, m;
  const void* bias;
  void* out;
  int epilogue, threads;
};

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

// Which rows of W a panel holds.
struct Columns {
  int64_t start;
  int count;  // below the width of a panel at the end of W, or of a half
};

inline int64_t panel_count(const Packed& w, int width) {
  return w.interleave ? 2 * divide_up(w.n / 2, width) : divide_up(w.n, width);
}

inline Columns columns_of(const Packed& w, int width, int64_t panel) {
  const int64_t rows = w.interleave ? w.n / 2 : w.n;
  const int64_t first = (w.interleave ? panel / 2 : panel) * width;
  const int64_t base = w.interleave && panel % 2 ? rows : 0;
  return {base + first, int(std::min<int64_t>(width, rows - first))};
}

// Aligned memory that grows and stays, one per calling thread; null when there is none to get.
void* scratch(size_t bytes);

// Each kernel family in a file of its own; `linear` returns 0, or 1 when memory ran out.
struct Family {
  int64_t (*bytes)(const Packed&);
  void (*pack)(const Packed&, const Rows&, int threads);
  void (*unpack)(const Packed&, const Rows&, int threads);
  int (*linear)(const Job&);
};

template <typename Kernel>
constexpr Family family_of(int (*linear)(const Job&)) {
  return {Kernel::bytes, Kernel::pack, Kernel::unpack, linear};
}

const Family& vector_family(int dtype);
const Family* pair_family();  // bf16 by an instruction for pairs; null when this CPU has none
const Family* tile_family();  // bf16 on tile registers; null when this process may not use them
const Family& int8_weight_family(int dtype);
const Family& int8_pair_family(int dtype);
const Family* int8_tile_family(int dtype);  // null exactly when tile_family() is

}  // namespace phyai
