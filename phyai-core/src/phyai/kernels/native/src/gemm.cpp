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

const Family& family(int dtype) {
  const Kind kind = dtype == kBf16 ? bf16_kind() : kVectors;
  return kind == kTiles ? *tile_family() : kind == kPairs ? *pair_family() : vector_family(dtype);
}

}  // namespace
}  // namespace phyai

// How bf16 is multiplied: 0 vectors, 1 tiles, 2 pairs. Fixed for the life of the process: it
// decides the layout of packed weights.
PHYAI_API int phyai_gemm_kind() { return phyai::bf16_kind(); }

PHYAI_API int64_t phyai_gemm_bytes(const phyai::Packed* weight) {
  return phyai::family(weight->dtype).bytes(*weight);
}

// weight [n, k], rows `stride` elements apart.
PHYAI_API void phyai_gemm_pack(const phyai::Packed* to, const void* weight, int64_t stride,
                               int threads) {
  phyai::family(to->dtype).pack(*to, weight, stride, threads);
}

// weight [n, k], contiguous.
PHYAI_API void phyai_gemm_unpack(const phyai::Packed* from, void* weight, int threads) {
  phyai::family(from->dtype).unpack(*from, weight, threads);
}

// Returns 0, or 1 when there was no memory for the work space.
PHYAI_API int phyai_linear(const phyai::Packed* weight, const void* x, int64_t x_stride, int64_t m,
                           const void* bias, void* out, int epilogue, int threads) {
  return phyai::family(weight->dtype)
      .linear(phyai::Job{*weight, x, x_stride, m, bias, out, epilogue, threads});
}
