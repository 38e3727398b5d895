// Walks along one row: whole vectors first, then what is left of it.
#pragma once

#include <algorithm>
#include <type_traits>

#include "simd.h"

namespace phyai {

constexpr int64_t kThreadElements = 8192;  // below that much work a second thread does not pay

inline int team(int64_t threads, int64_t elements) {
  return int(std::max<int64_t>(1, std::min(threads, elements / kThreadElements)));
}

// As round_to, for what was computed from bf16 alone: a NaN of such has no low bits to carry over.
inline Vec round_fast(const float*, Vec v) { return v; }

inline Vec round_fast(const bf16*, Vec v) {
  VecU u;
  std::memcpy(&u, &v, sizeof u);
  u = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
  std::memcpy(&v, &u, sizeof v);
  return v;
}

struct Whole {
  template <typename T>
  Vec get(const T* p) const { return load(p); }
  template <typename T>
  void put(T* p, Vec v) const { store(p, v); }
  Vec keep(Vec v) const { return v; }
};

struct Rest {
  int n;
  template <typename T>
  Vec get(const T* p) const { return load_part(p, n); }
  template <typename T>
  void put(T* p, Vec v) const { store_part(p, v, n); }
  Vec keep(Vec v) const {  // zero in the lanes behind the end
    alignas(64) float tmp[kWidth];
    store(tmp, v);
    return load_part(tmp, n);
  }
};

// Calls body(i, Whole) for whole vectors and body(i, Rest) once for the end of a row of n.
template <typename Body>
inline void sweep(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) body(i, Whole{});
  if (i < n) body(i, Rest{int(n - i)});
}

// Calls body with a null pointer of the type that the dtype code names.
template <typename Body>
inline void with_type(int64_t dtype, Body body) {
  if (dtype == kBf16) body(static_cast<const bf16*>(nullptr));
  else body(static_cast<const float*>(nullptr));
}

template <typename T>
inline T* at(int64_t address) { return reinterpret_cast<T*>(static_cast<intptr_t>(address)); }

// The type behind a pointer from with_type.
template <typename P>
using type_of = std::remove_const_t<std::remove_pointer_t<P>>;

}  // namespace phyai
