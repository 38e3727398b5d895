// Packing: rows of a weight into panels and back, for any order of values inside a panel.
#pragma once

#include "gemm.h"

namespace phyai {

// Order of a panel [k][width].
template <int kWidthOfPanel>
struct Plain {
  static constexpr int kPanel = kWidthOfPanel, kMultiple = 1;
  static int64_t place(int column, int64_t k) { return k * kPanel + column; }
};

// Order [k / 2][width][2]: both values of a pair side by side; k is padded with zeros.
template <int kWidthOfPanel, int kPadded>
struct Paired {
  static constexpr int kPanel = kWidthOfPanel, kMultiple = kPadded;
  static int64_t place(int column, int64_t k) { return (k / 2 * kPanel + column) * 2 + k % 2; }
};

// Order [k / 4][width][4].
template <int kWidthOfPanel, int kPadded>
struct Quads {
  static constexpr int kPanel = kWidthOfPanel, kMultiple = kPadded;
  static int64_t place(int column, int64_t k) { return (k / 4 * kPanel + column) * 4 + k % 4; }
};

// Calls each(panel, columns, row) for the panels of some rows; `row` counts from their first one.
template <typename Each>
void for_panels(const Packed& w, int width, const Rows& rows, int threads, const Each& each) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t p = 0; p < panel_count(w, width); ++p) {
    const Columns columns = columns_of(w, width, p);
    const int64_t row = columns.start - rows.first;
    if (row >= 0 && row < rows.count) each(p, columns, row);
  }
}

template <typename T, typename Order>
struct Panels {
  static constexpr int kPanel = Order::kPanel;

  static int64_t depth(const Packed& w) { return round_up(w.k, Order::kMultiple); }

  static T* at(const Packed& w, int64_t panel) {
    return static_cast<T*>(w.data) + panel * depth(w) * kPanel;
  }

  static int64_t bytes(const Packed& w) {
    return panel_count(w, kPanel) * depth(w) * kPanel * int64_t(sizeof(T));
  }

  static void pack(const Packed& w, const Rows& rows, int threads) {
    for_panels(w, kPanel, rows, threads, [&](int64_t p, Columns columns, int64_t row) {
      const T* from = static_cast<const T*>(rows.values) + row * rows.stride;
      T* to = at(w, p);
      for (int64_t k = 0; k < depth(w); ++k) {
        for (int j = 0; j < kPanel; ++j) {
          to[Order::place(j, k)] = j < columns.count && k < w.k ? from[j * rows.stride + k] : T{};
        }
      }
    });
  }

  static void unpack(const Packed& w, const Rows& rows, int threads) {
    for_panels(w, kPanel, rows, threads, [&](int64_t p, Columns columns, int64_t row) {
      const T* from = at(w, p);
      T* to = static_cast<T*>(rows.values) + row * rows.stride;
      for (int64_t k = 0; k < w.k; ++k) {
        for (int j = 0; j < columns.count; ++j) {
          to[j * rows.stride + k] = from[Order::place(j, k)];
        }
      }
    });
  }
};

}  // namespace phyai
