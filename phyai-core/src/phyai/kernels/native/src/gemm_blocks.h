// The walk over blocks that all kernels share.
//
// A task is some panels times some rows. It goes through k in slices: the rows of x of one slice
// stay in the second cache while all panels of the task pass, one panel's slice stays in the first
// cache while all rows pass. The sums of a task are fp32 and thread-private until the epilogue.
//
// A kernel K names:
//   Out, kPanel (columns), kDepth (k of a slice), kMaxRows, kMaxPanels (of a task, even),
//   kStep (panels multiplied together), kSpare (bytes for a thread's own use),
//   rows_unit(job): rows come in multiples of it, at most kMaxUnit; sums hold whole units,
//   x_bytes(job), place_rows(job, x, first, count): bring one unit of rows into the kernel's form,
//   start(job): once per thread and part of the rows, stop(): once per thread,
//   multiply(job, x, Block, spare): one slice of kStep panels, all rows of the task.
#pragma once

#include <omp.h>

#include "gemm_epilogue.h"

namespace phyai {

constexpr int64_t kMaxBytes = 14 << 20;  // of x in a kernel's form; sums take up to 2 MB more
constexpr int kMaxUnit = 16;

struct Block {
  int64_t first_row, rows;  // rows: real ones
  int64_t panel;            // of the weight
  int panels;               // 1 .. kStep
  int64_t slice;            // index of the k slice
  float* sums;              // [panels, height, kPanel]
  int64_t height;           // rows, rounded up to whole units
  int64_t next_panel;       // what comes after this block, to be fetched early; -1: nothing
  int64_t next_slice;
};

// Memory that is read soon, brought near bit by bit while a tile is computed.
struct Fetch {
  const char* at;
  int lines;  // of the cache, at each of the tile's steps

  // The share of one of `tiles` tiles with so many steps each; next: null for nothing.
  static Fetch share(const void* next, int64_t bytes, int64_t tile, int64_t tiles, int64_t steps) {
    const int64_t lines = divide_up(bytes, 64 * tiles * steps);
    const int64_t start = tile * steps * lines * 64;
    return {static_cast<const char*>(next) + start, next && start < bytes ? int(lines) : 0};
  }

  void step() {
    for (int i = 0; i < lines; ++i) __builtin_prefetch(at + i * 64, 0, 2);
    at += lines * 64;
  }
};

struct Tasks {
  int64_t panels, panels_each, groups;
  int64_t rows_each, row_blocks;
};

// Equal shares, and at least four tasks per thread where there are enough panels.
template <typename K>
Tasks split(const Job& job) {
  Tasks t;
  const int64_t unit = K::rows_unit(job);
  t.rows_each = round_up(divide_up(job.m, divide_up(job.m, K::kMaxRows)), unit);
  t.row_blocks = divide_up(job.m, t.rows_each);
  t.panels = panel_count(job.weight, K::kPanel);
  const int64_t wanted = divide_up(4 * job.threads, t.row_blocks);
  const int64_t share = round_up(divide_up(t.panels, wanted), 2);
  t.panels_each = std::min<int64_t>(share, K::kMaxPanels);
  t.groups = divide_up(t.panels, t.panels_each);
  return t;
}

template <typename K>
void run_task(const Job& job, const Tasks& t, int64_t task, const void* x, float* sums,
              void* spare) {
  const int64_t first_row = task % t.row_blocks * t.rows_each;
  const int64_t rows = std::min(t.rows_each, job.m - first_row);
  const int64_t height = round_up(rows, K::rows_unit(job));
  const int64_t first = task / t.row_blocks * t.panels_each;
  const int64_t last = std::min(first + t.panels_each, t.panels);
  const int64_t slices = divide_up(job.weight.k, K::kDepth);
  for (int64_t slice = 0; slice < slices; ++slice) {
    for (int64_t p = first; p < last; p += K::kStep) {
      const bool wraps = p + K::kStep >= last;
      const bool ends = wraps && slice + 1 == slices;
      K::multiply(job, x,
                  Block{first_row, rows, p, int(std::min<int64_t>(K::kStep, last - p)), slice,
                        sums + (p - first) * height * K::kPanel, height,
                        ends ? -1 : wraps ? first : p + K::kStep, wraps ? slice + 1 : slice},
                  spare);
    }
  }
  finish<typename K::Out>(job, K::kPanel, first, last - first, sums, height, first_row, rows);
}

// Some rows of a call, as a call.
template <typename T>
Job part_of(Job job, int64_t first, int64_t rows) {
  const int64_t width = job.epilogue >= kGeluMul ? job.weight.n / 2 : job.weight.n;
  job.x = static_cast<const T*>(job.x) + first * job.x_stride;
  job.out = static_cast<T*>(job.out) + first * width;
  job.m = std::min(rows, job.m - first);
  return job;
}

// As many rows as the memory for x allows, in equal parts. More parts read the weight again.
template <typename K>
int64_t rows_at_once(const Job& job) {
  const int64_t parts = std::min(divide_up(K::x_bytes(job), kMaxBytes), job.m);
  return divide_up(job.m, parts);
}

template <typename K>
int run_blocks(Job job) {
  if (job.m == 0) return 0;
  // below about a million products one thread is done before the others are awake
  if (job.m * job.weight.n * job.weight.k < 1000000) job.threads = 1;
  const int64_t rows = rows_at_once<K>(job);
  const size_t x_bytes = round_up(K::x_bytes(part_of<typename K::Out>(job, 0, rows)), 64);
  const int64_t sum_rows = std::min<int64_t>(rows, K::kMaxRows) + kMaxUnit;
  const size_t sum_bytes = K::kMaxPanels * sum_rows * K::kPanel * 4;
  const size_t own_bytes = sum_bytes + round_up(K::kSpare, 64);
  char* memory = static_cast<char*>(scratch(x_bytes + own_bytes * job.threads));
  if (!memory) return 1;
#pragma omp parallel num_threads(job.threads) if (job.threads > 1)
  {
    char* own = memory + x_bytes + own_bytes * omp_get_thread_num();
    for (int64_t first = 0; first < job.m; first += rows) {
      const Job part = part_of<typename K::Out>(job, first, rows);
      const Tasks t = split<K>(part);
      const int64_t unit = K::rows_unit(part);
      K::start(part);
      if (first > 0) {
#pragma omp barrier  // nobody reads the rows before any more
      }
#pragma omp for schedule(dynamic, 4)
      for (int64_t r = 0; r < part.m; r += unit) {
        K::place_rows(part, memory, r, std::min(unit, part.m - r));
      }
#pragma omp for schedule(dynamic, 1) nowait
      for (int64_t task = 0; task < t.groups * t.row_blocks; ++task) {
        run_task<K>(part, t, task, memory, reinterpret_cast<float*>(own), own + sum_bytes);
      }
    }
    K::stop();
  }
  return 0;
}

}  // namespace phyai
