// Rotary embedding, and writes to cache slots.
#include "rows.h"

namespace phyai {
namespace {

struct Heads {  // [batch, token, head, dim], the last dim dense
  int64_t data, batch, token, head;
};

struct Angles {  // cos or sin [batch, token, dim]
  int64_t data, batch, token;
};

struct Slots {  // [slot, head, dim]
  int64_t data, slot, head;
};

struct RopeArgs {
  Heads x;
  Angles cos, sin;
  int64_t out;  // contiguous
  int64_t batch, tokens, heads, dim, dtype, threads;
};

struct RopeWriteArgs {
  Heads q, k, v;
  Angles cos, sin;
  Slots k_cache, v_cache;
  int64_t out, slots, num_slots;
  int64_t batch, tokens, heads, kv_heads, dim, dtype, threads;
};

struct WriteArgs {
  int64_t cache, cache_row, values, value_row, row_bytes;  // strides in bytes
  int64_t slots, num_slots, rows, threads;
};

// out = x cos + (-x_high, x_low) sin; both products and the sum are rounded to T.
template <typename T>
void rotate(const T* x, const T* cos, const T* sin, T* out, int64_t dim) {
  const int64_t half = dim / 2;
  sweep(half, [&](int64_t i, auto part) {
    const Vec low = part.get(x + i), high = part.get(x + half + i);
    const Vec a = round_fast(x, low * part.get(cos + i));
    const Vec b = round_fast(x, high * part.get(sin + i));
    const Vec c = round_fast(x, high * part.get(cos + half + i));
    const Vec d = round_fast(x, low * part.get(sin + half + i));
    part.put(out + i, a - b);
    part.put(out + half + i, c + d);
  });
}

template <typename T>
const T* token(const Heads& h, int64_t b, int64_t t) {
  return at<const T>(h.data) + b * h.batch + t * h.token;
}

template <typename T>
const T* token(const Angles& a, int64_t b, int64_t t) {
  return at<const T>(a.data) + b * a.batch + t * a.token;
}

template <typename T>
void rope(const RopeArgs& a) {
  const int threads = team(a.threads, a.batch * a.tokens * a.heads * a.dim);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < a.batch * a.tokens; ++r) {
    const int64_t b = r / a.tokens, t = r % a.tokens;
    const T* x = token<T>(a.x, b, t);
    const T *cos = token<T>(a.cos, b, t), *sin = token<T>(a.sin, b, t);
    T* out = at<T>(a.out) + r * a.heads * a.dim;
    for (int64_t h = 0; h < a.heads; ++h) {
      rotate(x + h * a.x.head, cos, sin, out + h * a.dim, a.dim);
    }
  }
}

template <typename T>
void rope_write(const RopeWriteArgs& a) {
  const int threads = team(a.threads, a.batch * a.tokens * (a.heads + 2 * a.kv_heads) * a.dim);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < a.batch * a.tokens; ++r) {
    const int64_t b = r / a.tokens, t = r % a.tokens, slot = at<const int64_t>(a.slots)[r];
    const T *cos = token<T>(a.cos, b, t), *sin = token<T>(a.sin, b, t);
    const T* q = token<T>(a.q, b, t);
    T* out = at<T>(a.out) + r * a.heads * a.dim;
    for (int64_t h = 0; h < a.heads; ++h) {
      rotate(q + h * a.q.head, cos, sin, out + h * a.dim, a.dim);
    }
    T* k_slot = at<T>(a.k_cache.data) + slot * a.k_cache.slot;
    T* v_slot = at<T>(a.v_cache.data) + slot * a.v_cache.slot;
    for (int64_t h = 0; h < a.kv_heads; ++h) {
      rotate(token<T>(a.k, b, t) + h * a.k.head, cos, sin, k_slot + h * a.k_cache.head, a.dim);
      std::memcpy(v_slot + h * a.v_cache.head, token<T>(a.v, b, t) + h * a.v.head,
                  size_t(a.dim) * sizeof(T));
    }
  }
}

bool inside(int64_t slots, int64_t rows, int64_t num_slots) {
  bool good = true;
  for (int64_t r = 0; r < rows; ++r) {
    good &= uint64_t(at<const int64_t>(slots)[r]) < uint64_t(num_slots);
  }
  return good;
}

}  // namespace
}  // namespace phyai

PHYAI_API int phyai_rope(const phyai::RopeArgs* args) {
  using namespace phyai;
  with_type(args->dtype, [&](auto x) { rope<type_of<decltype(x)>>(*args); });
  return 0;
}

// 0, or 1 with nothing written when a slot is out of range.
PHYAI_API int phyai_rope_write(const phyai::RopeWriteArgs* args) {
  using namespace phyai;
  if (!inside(args->slots, args->batch * args->tokens, args->num_slots)) return 1;
  with_type(args->dtype, [&](auto x) { rope_write<type_of<decltype(x)>>(*args); });
  return 0;
}

// 0, or 1 with nothing written when a slot is out of range.
PHYAI_API int phyai_kv_write(const phyai::WriteArgs* args) {
  using namespace phyai;
  const WriteArgs& a = *args;
  if (!inside(a.slots, a.rows, a.num_slots)) return 1;
  const int threads = team(a.threads, a.rows * a.row_bytes / 8);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < a.rows; ++r) {
    std::memcpy(at<char>(a.cache) + at<const int64_t>(a.slots)[r] * a.cache_row,
                at<const char>(a.values) + r * a.value_row, size_t(a.row_bytes));
  }
  return 0;
}
