// The tile registers of x86 (AMX; bf16, int8) as a thin layer: real ones, or arrays that behave the
// same.
//
// PHYAI_AMX_EMULATED: the arrays, so that packing and blocking can be tested on any CPU.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(PHYAI_AMX_EMULATED)
#define PHYAI_TILES 1
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define PHYAI_TILES 1
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#define PHYAI_TILES 0
#endif

#if PHYAI_TILES

namespace phyai {

// The 64 bytes that configure the registers: rows and bytes per row of each.
struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

#if defined(PHYAI_AMX_EMULATED)

struct EmulatedTiles {
  TileConfig config;
  alignas(64) char data[8][16][64];

  void zero(int t) { std::memset(data[t], 0, sizeof data[t]); }

  void load(int t, const void* p, int64_t stride) {
    for (int r = 0; r < config.rows[t]; ++r) {
      std::memcpy(data[t][r], static_cast<const char*>(p) + r * stride, config.row_bytes[t]);
    }
  }

  void store(int t, void* p, int64_t stride) const {
    for (int r = 0; r < config.rows[t]; ++r) {
      std::memcpy(static_cast<char*>(p) + r * stride, data[t][r], config.row_bytes[t]);
    }
  }

  float pair(int t, int row, int column, int half) const {
    uint16_t bits;
    std::memcpy(&bits, data[t][row] + 4 * column + 2 * half, 2);
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }

  // c += a b; b holds pairs of k side by side
  void multiply(int c, int a, int b) {
    for (int m = 0; m < config.rows[c]; ++m) {
      for (int n = 0; n < config.row_bytes[c] / 4; ++n) {
        float sum;
        std::memcpy(&sum, data[c][m] + 4 * n, 4);
        for (int k = 0; k < config.row_bytes[a] / 4; ++k) {
          sum += pair(a, m, k, 0) * pair(b, k, n, 0) + pair(a, m, k, 1) * pair(b, k, n, 1);
        }
        std::memcpy(data[c][m] + 4 * n, &sum, 4);
      }
    }
  }

  // c += a b in int32; b holds four signed k side by side
  void multiply_int8(int c, int a, int b) {
    for (int m = 0; m < config.rows[c]; ++m) {
      for (int n = 0; n < config.row_bytes[c] / 4; ++n) {
        int32_t sum;
        std::memcpy(&sum, data[c][m] + 4 * n, 4);
        for (int k = 0; k < config.row_bytes[a]; ++k) {
          sum += int8_t(data[a][m][k]) * int8_t(data[b][k / 4][4 * n + k % 4]);
        }
        std::memcpy(data[c][m] + 4 * n, &sum, 4);
      }
    }
  }
};

inline thread_local EmulatedTiles emulated;

#define PHYAI_TILE_CONFIGURE(config_) (phyai::emulated.config = (config_))
#define PHYAI_TILE_RELEASE() ((void)0)
#define PHYAI_TILE_ZERO(t) phyai::emulated.zero(t)
#define PHYAI_TILE_LOAD(t, p, stride) phyai::emulated.load(t, p, stride)
#define PHYAI_TILE_STORE(t, p, stride) phyai::emulated.store(t, p, stride)
#define PHYAI_TILE_MULTIPLY(c, a, b) phyai::emulated.multiply(c, a, b)
#define PHYAI_TILE_MULTIPLY_INT8(c, a, b) phyai::emulated.multiply_int8(c, a, b)

inline bool tiles_allowed() { return true; }

#else

// The intrinsics do not tell the compiler which memory they read: nothing may be pending before.
#define PHYAI_TILE_CONFIGURE(config_)     \
  do {                                    \
    __asm__ volatile("" : : : "memory");  \
    _tile_loadconfig(&(config_));         \
  } while (0)
#define PHYAI_TILE_RELEASE() _tile_release()
#define PHYAI_TILE_ZERO(t) _tile_zero(t)
#define PHYAI_TILE_LOAD(t, p, stride) _tile_loadd(t, p, stride)
#define PHYAI_TILE_STORE(t, p, stride) _tile_stored(t, p, stride)
#define PHYAI_TILE_MULTIPLY(c, a, b) _tile_dpbf16ps(c, a, b)
#define PHYAI_TILE_MULTIPLY_INT8(c, a, b) _tile_dpbssd(c, a, b)

// The CPU has them, the system saves them, and lets this process use them: asked once.
inline bool tiles_allowed() {
  static const bool allowed = [] {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const unsigned wanted = 1u << 22 | 1u << 24 | 1u << 25;  // bf16 tiles, tiles, int8 tiles
    if ((d & wanted) != wanted) return false;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & 1u << 27)) return false;  // xgetbv may be used
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & 0x60000) != 0x60000) return false;
    constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  }();
  return allowed;
}

#endif
}  // namespace phyai
#endif
