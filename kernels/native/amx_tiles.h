// The eight tile registers of a thread: each 16 rows of 64 bytes.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace pe {

constexpr int64_t TILE_ROWS = 16;
constexpr int64_t TILE_BYTES = 64;  // of a row

// Gives the thread its tiles while it lives. Whoever switches threads saves 8 KiB for one that has them.
class Tiles {
  public:
    Tiles() {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } config;
        asm volatile("ldtilecfg %0" ::"m"(config));  // GCC 12's own tells the compiler of the first eight bytes alone
    }
    ~Tiles() { asm volatile("tilerelease"); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// Between what is written to memory and tiles that are loaded from there, or stored and read: compilers do not know that
// these instructions touch memory.
static inline void order_tiles_and_memory() { asm volatile("" ::: "memory"); }

}  // namespace pe
