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
    // Tiles 0, 1 and 4 have `upper` rows, and 2, 3 and 5 `lower`, at least 1: of sums, and of a left side that is not whole.
    explicit Tiles(int64_t upper = TILE_ROWS, int64_t lower = TILE_ROWS) {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } config;
        config.rows[0] = config.rows[1] = config.rows[4] = static_cast<uint8_t>(upper);
        config.rows[2] = config.rows[3] = config.rows[5] = static_cast<uint8_t>(lower);
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
