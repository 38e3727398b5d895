// Norms over the last dim, alone or behind a residual sum, with weights or a modulation.
//
// out = n(s) * (offset + scale) + shift, where s = x, x + y or x + gate * y, and n divides by the
// root mean square or subtracts the mean and divides by the deviation. Without an output only s.
#include "rows.h"

namespace phyai {
namespace {

struct NormArgs {
  int64_t x, x_row;
  int64_t y, y_row;                    // 0: none
  int64_t gate, gate_batch, gate_token;    // 0: none
  int64_t scale, scale_batch, scale_token;
  int64_t shift, shift_batch, shift_token;  // 0: none
  int64_t sum, out;                    // contiguous; out 0: only the sum is wanted
  int64_t rows, tokens, width;         // row r is token r % tokens of batch r / tokens
  int64_t dtype, gate_dtype, affine_dtype, centred, threads;
  double eps, offset;
};

// s = x + y or x + gate * y; every step is rounded to T.
template <typename T, typename G>
void add(const T* x, const T* y, const G* gate, T* sum, int64_t width) {
  sweep(width, [&](int64_t i, auto part) {
    Vec v = part.get(y + i);
    if (gate) v = round_fast(x, round_to(x, part.get(gate + i)) * v);
    part.put(sum + i, part.get(x + i) + v);
  });
}

template <typename T>
float mean(const T* s, int64_t width) {
  Vec even = splat(0), odd = splat(0);
  int64_t i = 0;
  for (; i + 2 * kWidth <= width; i += 2 * kWidth) {
    even += load(s + i);
    odd += load(s + i + kWidth);
  }
  sweep(width - i, [&](int64_t j, auto part) { even += part.get(s + i + j); });
  return sum(even + odd) / float(width);
}

template <typename T>
float mean_square(const T* s, float centre, int64_t width) {
  Vec even = splat(0), odd = splat(0);
  int64_t i = 0;
  for (; i + 2 * kWidth <= width; i += 2 * kWidth) {
    const Vec a = load(s + i) - centre, b = load(s + i + kWidth) - centre;
    even += a * a;
    odd += b * b;
  }
  sweep(width - i, [&](int64_t j, auto part) {
    const Vec a = part.keep(part.get(s + i + j) - centre);
    even += a * a;
  });
  return sum(even + odd) / float(width);
}

template <typename T, typename A>
void normalise(const T* s, const A* scale, const A* shift, T* out, const NormArgs& n) {
  const float centre = n.centred ? mean(s, n.width) : 0;
  const float inverse = 1 / std::sqrt(mean_square(s, centre, n.width) + float(n.eps));
  const float offset = float(n.offset);
  sweep(n.width, [&](int64_t i, auto part) {
    Vec v = (part.get(s + i) - centre) * inverse * (offset + part.get(scale + i));
    if (shift) v += part.get(shift + i);
    part.put(out + i, v);
  });
}

template <typename T, typename G, typename A>
void run(const NormArgs& n) {
  const int threads = team(n.threads, n.rows * n.width);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < n.rows; ++r) {
    const int64_t b = r / n.tokens, t = r % n.tokens;
    const T* s = at<const T>(n.x) + r * n.x_row;
    if (n.y) {
      const G* gate = n.gate ? at<const G>(n.gate) + b * n.gate_batch + t * n.gate_token : nullptr;
      T* total = at<T>(n.sum) + r * n.width;
      add(s, at<const T>(n.y) + r * n.y_row, gate, total, n.width);
      s = total;
    }
    if (!n.out) continue;
    const A* scale = at<const A>(n.scale) + b * n.scale_batch + t * n.scale_token;
    const A* shift = nullptr;
    if (n.shift) shift = at<const A>(n.shift) + b * n.shift_batch + t * n.shift_token;
    normalise(s, scale, shift, at<T>(n.out) + r * n.width, n);
  }
}

}  // namespace
}  // namespace phyai

PHYAI_API int phyai_norm(const phyai::NormArgs* args) {
  using namespace phyai;
  with_type(args->dtype, [&](auto x) {
    with_type(args->gate_dtype, [&](auto gate) {
      with_type(args->affine_dtype, [&](auto affine) {
        run<type_of<decltype(x)>, type_of<decltype(gate)>, type_of<decltype(affine)>>(*args);
      });
    });
  });
  return 0;
}
