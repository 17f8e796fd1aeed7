#ifndef BT_BASE_HASH_H
#define BT_BASE_HASH_H

/* Hashing, random bytes, and an open-addressing map from byte keys to u64. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/status.h"

/* 64-bit hash of n bytes; same value on every machine and build (used in fingerprints). */
uint64_t bt_hash64(const void *p, size_t n, uint64_t seed);
/* Kernel randomness (getrandom); aborts if the kernel has none. */
void bt_random_bytes(void *p, size_t n);

/* Map from a byte string to a u64. Keys are borrowed unless copy_keys. One thread for writing. */
struct bt_map_slot {
    const char *key; /* NULL: free */
    uint32_t key_len;
    uint32_t hash;
    uint64_t value;
};
struct bt_map {
    struct bt_map_slot *slots;
    size_t n_slots; /* power of two or 0 */
    size_t count;
    bool copy_keys;
};
void bt_map_init(struct bt_map *m, bool copy_keys);
void bt_map_fini(struct bt_map *m);
/* Room for n entries: up to so many at once, puts of borrowed keys neither fail nor call the heap. */
enum bt_status bt_map_reserve(struct bt_map *m, size_t n) BT_NODISCARD;
bool bt_map_get(const struct bt_map *m, const void *key, size_t key_len, uint64_t *value);
/* Adds or replaces; a borrowed key is replaced too, so the last one given must live on.
 * BT_ERR_NOMEM leaves the map as it was. key_len < 4 GiB. */
enum bt_status bt_map_put(struct bt_map *m, const void *key, size_t key_len,
                          uint64_t value) BT_NODISCARD;
bool bt_map_del(struct bt_map *m, const void *key, size_t key_len);

#endif
