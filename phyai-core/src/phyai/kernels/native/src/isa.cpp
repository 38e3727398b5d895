// What this library was compiled for.
#include "simd.h"

PHYAI_API const char* phyai_isa() {
#if defined(PHYAI_AMX_EMULATED)
  return "amx-emulated";
#elif defined(PHYAI_PAIRS_EMULATED)
  return "pairs-emulated";
#elif defined(__AMX_BF16__) && defined(__AMX_INT8__)
  return "amx";
#elif defined(__AVX512BF16__)
  return "avx512-bf16";
#elif defined(__AVX512F__)
  return "avx512";
#elif defined(__AVX2__)
  return "avx2";
#else
  return "generic";
#endif
}
