#ifndef BT_ENGINE_PHILOX_H
#define BT_ENGINE_PHILOX_H

/* Philox4x32-10, a counter-based generator (Salmon, Moraes, Dror, Shaw: "Parallel random numbers:
 * as easy as 1, 2, 3"): a pure function from counter and key to four random words. */

#include <stdint.h>

void bt_philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

/* 53 bits: the random number of one sampled token. */
uint64_t bt_philox_bits(uint64_t seed, uint32_t choice, uint32_t index);

#endif
