// From the fp32 sums of a block to the output: bias, one rounding, activation, product with up.
//
// Rounding points: sum + bias in fp32 is rounded, the activation of that is rounded, then its
// product with up.
#pragma once

#include "gemm.h"

namespace phyai {

template <int kEpilogue>
inline Vec activate(Vec v) {
  if constexpr (kEpilogue == kGelu || kEpilogue == kGeluMul) return gelu_tanh(v);
  if constexpr (kEpilogue == kSiluMul) return silu(v);
  return v;
}

// One row of one panel: `sums` [width], `up` likewise for the gated epilogues; `count` are real.
template <typename T, int kEpilogue>
inline void finish_row(const float* sums, const float* up, const T* bias, const T* bias_up, T* out,
                       int count) {
  for (int j = 0; j < count; j += kWidth) {
    const int left = count - j;
    const auto rounded = [&](const float* from, const T* add) {
      Vec v = load(from + j);
      if (add) v += left < kWidth ? load_part(add + j, left) : load(add + j);
      return round_to(out, v);
    };
    Vec y = activate<kEpilogue>(rounded(sums, bias));
    if constexpr (kEpilogue >= kGeluMul) y = round_to(out, y) * rounded(up, bias_up);
    if (left < kWidth) {
      store_part(out + j, y, left);
    } else {
      store(out + j, y);
    }
  }
}

// All rows of one panel (or of a gate panel and its up panel, one after the other in `sums`).
template <typename T, int kEpilogue>
void finish_panel(const Job& job, int width, int64_t panel, const float* sums, int64_t height,
                  int64_t first_row, int64_t rows) {
  constexpr bool kGated = kEpilogue >= kGeluMul;
  const Columns columns = columns_of(job.weight, width, panel);
  const int64_t ldo = kGated ? job.weight.n / 2 : job.weight.n;
  const T* bias = job.bias ? static_cast<const T*>(job.bias) + columns.start : nullptr;
  const T* bias_up = kGated && bias ? bias + job.weight.n / 2 : nullptr;
  T* out = static_cast<T*>(job.out) + first_row * ldo + columns.start;
  for (int64_t r = 0; r < rows; ++r) {
    finish_row<T, kEpilogue>(sums + r * width, sums + (height + r) * width, bias, bias_up,
                             out + r * ldo, columns.count);
  }
}

// The panels of one task: `sums` [panels, height, width], of which the first `rows` count.
template <typename T>
void finish(const Job& job, int width, int64_t panel, int64_t panels, const float* sums,
            int64_t height, int64_t first_row, int64_t rows) {
  const bool gated = job.epilogue >= kGeluMul;
  for (int64_t p = 0; p < panels; p += gated ? 2 : 1) {
    const float* from = sums + p * height * width;
    switch (job.epilogue) {
      case kGelu:
        finish_panel<T, kGelu>(job, width, panel + p, from, height, first_row, rows);
        break;
      case kGeluMul:
        finish_panel<T, kGeluMul>(job, width, panel + p, from, height, first_row, rows);
        break;
      case kSiluMul:
        finish_panel<T, kSiluMul>(job, width, panel + p, from, height, first_row, rows);
        break;
      default:
        finish_panel<T, kNone>(job, width, panel + p, from, height, first_row, rows);
    }
  }
}

}  // namespace phyai
