// Activations of a gated MLP, and of a product that still lacks its bias.
#include "rows.h"

namespace phyai {
namespace {

enum Activation { kGelu = 0, kSilu = 1 };

struct GatedArgs {
  int64_t x, x_row, out;  // x: rows of 2 * width, the gate first; out contiguous
  int64_t rows, width, dtype, activation, threads;
};

struct BiasArgs {
  int64_t x, x_row, bias, out;
  int64_t rows, width, dtype, bias_dtype, threads;
};

template <typename T, typename F>
void gated(const GatedArgs& g, F activation) {
  // an activation costs as much as some ten additions
  const int threads = team(g.threads, g.rows * g.width * 8);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < g.rows; ++r) {
    const T* gate = at<const T>(g.x) + r * g.x_row;
    const T* up = gate + g.width;
    T* out = at<T>(g.out) + r * g.width;
    sweep(g.width, [&](int64_t i, auto part) {
      part.put(out + i, round_fast(gate, activation(part.get(gate + i))) * part.get(up + i));
    });
  }
}

template <typename T, typename B>
void bias_gelu(const BiasArgs& g) {
  const int threads = team(g.threads, g.rows * g.width * 8);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < g.rows; ++r) {
    const T* x = at<const T>(g.x) + r * g.x_row;
    const B* bias = at<const B>(g.bias);
    T* out = at<T>(g.out) + r * g.width;
    sweep(g.width, [&](int64_t i, auto part) {
      const Vec b = round_to(x, part.get(bias + i));
      part.put(out + i, gelu_tanh(round_to(x, part.get(x + i) + b)));
    });
  }
}

}  // namespace
}  // namespace phyai

PHYAI_API int phyai_gated(const phyai::GatedArgs* args) {
  using namespace phyai;
  with_type(args->dtype, [&](auto x) {
    using T = type_of<decltype(x)>;
    if (args->activation == kGelu) gated<T>(*args, [](Vec v) { return gelu_tanh(v); });
    else gated<T>(*args, [](Vec v) { return silu(v); });
  });
  return 0;
}

PHYAI_API int phyai_bias_gelu(const phyai::BiasArgs* args) {
  using namespace phyai;
  with_type(args->dtype, [&](auto x) {
    with_type(args->bias_dtype, [&](auto bias) {
      bias_gelu<type_of<decltype(x)>, type_of<decltype(bias)>>(*args);
    });
  });
  return 0;
}
