/* The random numbers of sampling. No state: whoever asks for (seed, choice, index) gets the same
 * number, on any node. */

#include "engine/philox.h"

#define ROUNDS 10
#define MUL_0  0xD2511F53U
#define MUL_1  0xCD9E8D57U
#define WEYL_0 0x9E3779B9U
#define WEYL_1 0xBB67AE85U

void bt_philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];

    for (int r = 0; r < ROUNDS; r++) {
        uint64_t p0 = (uint64_t)MUL_0 * c0;
        uint64_t p1 = (uint64_t)MUL_1 * c2;

        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += WEYL_0;
        k1 += WEYL_1;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

uint64_t bt_philox_bits(uint64_t seed, uint32_t choice, uint32_t index)
{
    const uint32_t counter[4] = {index, choice, 0, 0};
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t r[4];

    bt_philox4x32(counter, key, r);
    return ((uint64_t)r[0] << 32 | r[1]) >> 11;
}
