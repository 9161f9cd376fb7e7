// Memory that a thread keeps between calls, so that no call allocates once the largest has been seen.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace pe {

// At least `bytes` of uninitialised memory, 64-byte aligned, the calling thread's own until it asks for the same `slot`
// again. Slots: 0, inside a part of a linear; 1, the caller of `pe_linear`.
static inline uint8_t* thread_scratch(int64_t bytes, int slot = 0) {
    struct Block {
        uint8_t* memory = nullptr;
        int64_t size = 0;
        ~Block() { std::free(memory); }
    };
    static thread_local Block blocks[2];
    Block& block = blocks[slot];
    if (block.size < bytes) {
        std::free(block.memory);
        block.size = (bytes + 4095) / 4096 * 4096;
        block.memory = static_cast<uint8_t*>(std::aligned_alloc(64, static_cast<size_t>(block.size)));
        if (block.memory == nullptr) std::abort();  // as the kernel would: a few megabytes are not there
    }
    return block.memory;
}

}  // namespace pe
