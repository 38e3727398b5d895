// C interface of the linear layers: pack once, then multiply.
#include "gemm.h"

#include <cstdlib>
#include <memory>

namespace phyai {

void* scratch(size_t bytes) {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<void, Free> memory;
  thread_local size_t size = 0;
  if (bytes > size) {
    memory.reset();  // before the next one is taken
    const size_t wanted = (bytes + 4095) / 4096 * 4096;
    memory.reset(std::aligned_alloc(4096, wanted));
    size = memory ? wanted : 0;
  }
  return memory.get();
}

namespace {

enum Kind { kVectors = 0, kTiles = 1, kPairs = 2 };

Kind bf16_kind() { return tile_family() ? kTiles : pair_family() ? kPairs : kVectors; }

const Family& family(const Packed& w) {
  if (w.format == kInt8Weight) return int8_weight_family(w.dtype);
  if (w.format == kInt8Both) {
    const Family* tiles = int8_tile_family(w.dtype);
    return tiles ? *tiles : int8_pair_family(w.dtype);
  }
  const Kind kind = w.dtype == kBf16 ? bf16_kind() : kVectors;
  return kind == kTiles ? *tile_family() : kind == kPairs ? *pair_family() : vector_family(w.dtype);
}

}  // namespace
}  // namespace phyai

// How bf16 is multiplied: 0 vectors, 1 tiles, 2 pairs. Fixed for the life of the process: it
// decides the layout of packed weights, also of int8 ones.
PHYAI_API int phyai_gemm_kind() { return phyai::bf16_kind(); }

PHYAI_API int64_t phyai_gemm_bytes(const phyai::Packed* weight) {
  return phyai::family(*weight).bytes(*weight);
}

// values [count, k], rows `stride` elements apart, go to rows `first` .. of the packed weight;
// scales [count, ceil(k / 128)] or null. The rows are whole panels, see Rows.
PHYAI_API void phyai_gemm_pack(const phyai::Packed* to, void* values, int64_t stride,
                               float* scales, int64_t first, int64_t count, int threads) {
  phyai::family(*to).pack(*to, phyai::Rows{first, count, values, stride, scales}, threads);
}

// The way back, into the same places.
PHYAI_API void phyai_gemm_unpack(const phyai::Packed* from, void* values, int64_t stride,
                                 float* scales, int64_t first, int64_t count, int threads) {
  phyai::family(*from).unpack(*from, phyai::Rows{first, count, values, stride, scales}, threads);
}

// Returns 0, or 1 when there was no memory for the work space.
PHYAI_API int phyai_linear(const phyai::Packed* weight, const void* x, int64_t x_stride, int64_t m,
                           const void* bias, void* out, int epilogue, int threads) {
  return phyai::family(*weight).linear(
      phyai::Job{*weight, x, x_stride, m, bias, out, epilogue, threads});
}
