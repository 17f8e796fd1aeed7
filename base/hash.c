/* A fast 64-bit hash by folded 64x64 multiplications, kernel randomness, and the byte-key map:
 * linear probing, deletion by shifting back, so there are no tombstones. The hash is not
 * cryptographic: where a collision would do harm (prefix cache), the holder compares the content as
 * well. */

#include "base/hash.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>
#include "base/assert.h"
#include "base/mem.h"

#define K0 UINT64_C(0x9E3779B97F4A7C15)
#define K1 UINT64_C(0xD6E8FEB86659FD93)
#define K2 UINT64_C(0xA0761D6478BD642F)

#define SLOTS_MIN ((size_t)16)

static uint64_t load_le(const unsigned char *p, size_t n)
{
    uint64_t v = 0;
    for (size_t i = 0; i < n; i++) {
        v |= (uint64_t)p[i] << (8 * i);
    }
    return v;
}

static uint64_t load_le64(const unsigned char *p)
{
    uint64_t v;
    memcpy(&v, p, sizeof(v));
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    v = __builtin_bswap64(v);
#endif
    return v;
}

/* Folds the 128-bit product; the addends keep a zero factor from erasing the other operand. */
static uint64_t fold(uint64_t a, uint64_t b)
{
    unsigned __int128 r = (unsigned __int128)a * b;
    return (uint64_t)r ^ (uint64_t)(r >> 64) ^ (a + (b << 1));
}

uint64_t bt_hash64(const void *p, size_t n, uint64_t seed)
{
    const unsigned char *s = p;
    uint64_t h = fold(seed ^ K0, (uint64_t)n ^ K1);
    size_t left = n;

    while (left >= 16) {
        h = fold(load_le64(s) ^ K1, load_le64(s + 8) ^ h);
        s += 16;
        left -= 16;
    }
    if (left >= 8) {
        h = fold(load_le64(s) ^ K2, h);
        s += 8;
        left -= 8;
    }
    if (left > 0) {
        h = fold(load_le(s, left) ^ K0, h);
    }
    return fold(h ^ K2, K1);
}

void bt_random_bytes(void *p, size_t n)
{
    unsigned char *s = p;
    while (n > 0) {
        ssize_t r = getrandom(s, n, 0);
        if (r < 0) {
            BT_ASSERT(errno == EINTR);
            continue;
        }
        s += r;
        n -= (size_t)r;
    }
}

void bt_map_init(struct bt_map *m, bool copy_keys)
{
    *m = (struct bt_map){.copy_keys = copy_keys};
}

static void key_release(const struct bt_map *m, struct bt_map_slot *s)
{
    if (m->copy_keys) {
        char *own;
        memcpy(&own, &s->key, sizeof(own)); /* ours since put: the const is for the readers */
        bt_free(own);
    }
}

void bt_map_fini(struct bt_map *m)
{
    for (size_t i = 0; i < m->n_slots; i++) {
        if (m->slots[i].key != NULL) {
            key_release(m, &m->slots[i]);
        }
    }
    bt_free(m->slots);
    *m = (struct bt_map){.copy_keys = m->copy_keys};
}

static uint32_t key_hash(const void *key, size_t key_len)
{
    uint64_t h = bt_hash64(key, key_len, 0);
    return (uint32_t)(h >> 32);
}

/* The slot that holds the key, or the free one where it would go. n_slots > 0 and never full. */
static size_t find(const struct bt_map *m, const void *key, size_t key_len, uint32_t hash)
{
    size_t mask = m->n_slots - 1;
    size_t i = hash & mask;
    for (;; i = (i + 1) & mask) {
        const struct bt_map_slot *s = &m->slots[i];
        if (s->key == NULL) {
            return i;
        }
        if (s->hash == hash && s->key_len == key_len &&
            (key_len == 0 || memcmp(s->key, key, key_len) == 0)) {
            return i;
        }
    }
}

bool bt_map_get(const struct bt_map *m, const void *key, size_t key_len, uint64_t *value)
{
    if (m->count == 0) {
        return false;
    }
    const struct bt_map_slot *s = &m->slots[find(m, key, key_len, key_hash(key, key_len))];
    if (s->key == NULL) {
        return false;
    }
    if (value != NULL) {
        *value = s->value;
    }
    return true;
}

/* n: a power of two, more than there are. */
static enum bt_status resize(struct bt_map *m, size_t n)
{
    struct bt_map_slot *slots = bt_calloc(n, sizeof(*slots));
    if (slots == NULL) {
        return BT_ERR_NOMEM;
    }
    for (size_t i = 0; i < m->n_slots; i++) {
        if (m->slots[i].key == NULL) {
            continue;
        }
        size_t k = m->slots[i].hash & (n - 1);
        while (slots[k].key != NULL) {
            k = (k + 1) & (n - 1);
        }
        slots[k] = m->slots[i];
    }
    bt_free(m->slots);
    m->slots = slots;
    m->n_slots = n;
    return BT_OK;
}

static enum bt_status grow(struct bt_map *m)
{
    size_t n = m->n_slots == 0 ? SLOTS_MIN : m->n_slots;
    if (m->n_slots != 0 && !bt_mul_size(n, 2, &n)) {
        return BT_ERR_NOMEM;
    }
    return resize(m, n);
}

enum bt_status bt_map_reserve(struct bt_map *m, size_t n)
{
    size_t slots = SLOTS_MIN;
    while (slots / 4 * 3 < n) {
        if (!bt_mul_size(slots, 2, &slots)) {
            return BT_ERR_NOMEM;
        }
    }
    return slots <= m->n_slots ? BT_OK : resize(m, slots);
}

enum bt_status bt_map_put(struct bt_map *m, const void *key, size_t key_len, uint64_t value)
{
    BT_ASSERT(key_len <= UINT32_MAX);
    uint32_t hash = key_hash(key, key_len);

    if (m->n_slots > 0) {
        struct bt_map_slot *s = &m->slots[find(m, key, key_len, hash)];
        if (s->key != NULL) {
            if (!m->copy_keys) {
                s->key = key_len > 0 ? key : "";
            }
            s->value = value;
            return BT_OK;
        }
    }
    if ((m->count + 1) > m->n_slots / 4 * 3 && grow(m) != BT_OK) {
        return BT_ERR_NOMEM;
    }
    const char *own = key_len > 0 ? key : "";
    if (m->copy_keys) {
        char *copy = bt_alloc(key_len);
        if (copy == NULL) {
            return BT_ERR_NOMEM;
        }
        if (key_len > 0) {
            memcpy(copy, key, key_len);
        }
        own = copy;
    }
    struct bt_map_slot *s = &m->slots[find(m, key, key_len, hash)];
    *s = (struct bt_map_slot){
        .key = own, .key_len = (uint32_t)key_len, .hash = hash, .value = value};
    m->count++;
    return BT_OK;
}

bool bt_map_del(struct bt_map *m, const void *key, size_t key_len)
{
    if (m->count == 0) {
        return false;
    }
    size_t mask = m->n_slots - 1;
    size_t hole = find(m, key, key_len, key_hash(key, key_len));
    if (m->slots[hole].key == NULL) {
        return false;
    }
    key_release(m, &m->slots[hole]);
    /* Pull later entries of the run into the hole if their home lies at or before it. */
    for (size_t i = (hole + 1) & mask; m->slots[i].key != NULL; i = (i + 1) & mask) {
        size_t home = m->slots[i].hash & mask;
        if (((i - home) & mask) >= ((i - hole) & mask)) {
            m->slots[hole] = m->slots[i];
            hole = i;
        }
    }
    m->slots[hole] = (struct bt_map_slot){0};
    m->count--;
    return true;
}
