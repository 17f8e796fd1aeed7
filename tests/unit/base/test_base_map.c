/* Hash, random bytes, and the map against a plain array as the model. */

#include "base/hash.h"
#include "base/mem.h"
#include "tests/check.h"

static void test_hash(void)
{
    /* Fingerprints are compared between machines: these values may never change. */
    CHECK(bt_hash64("", 0, 0) == bt_hash64(NULL, 0, 0));
    CHECK(bt_hash64("a", 1, 0) != bt_hash64("a", 1, 1));
    CHECK(bt_hash64("a", 1, 0) != bt_hash64("a\0", 2, 0));
    CHECK(bt_hash64("baton", 5, 0) == UINT64_C(0x3E7D972A3A9A5C9A));
    CHECK(bt_hash64("0123456789abcdefghijklmnopqrstuvwxyz", 36, 7) == UINT64_C(0xED8E236AAE01DA67));

    /* One flipped bit changes about half of the result, at every length and place. */
    unsigned char s[40] = {0};
    double worst_low = 64, worst_high = 0;
    for (size_t n = 1; n <= sizeof(s); n++) {
        uint64_t h = bt_hash64(s, n, 0);
        unsigned bits = 0;
        for (size_t i = 0; i < n * 8; i++) {
            s[i / 8] ^= (unsigned char)(1u << i % 8);
            bits += (unsigned)__builtin_popcountll(h ^ bt_hash64(s, n, 0));
            s[i / 8] ^= (unsigned char)(1u << i % 8);
        }
        double mean = bits / (double)(n * 8);
        worst_low = mean < worst_low ? mean : worst_low;
        worst_high = mean > worst_high ? mean : worst_high;
    }
    CHECK(worst_low > 24 && worst_high < 40);

    unsigned char a[64] = {0}, b[64] = {0};
    bt_random_bytes(a, sizeof(a));
    bt_random_bytes(b, sizeof(b));
    CHECK(memcmp(a, b, sizeof(a)) != 0);
    bt_random_bytes(a, 0);
}

static void test_edges(void)
{
    struct bt_map m;
    uint64_t v = 5;
    bt_map_init(&m, true);
    CHECK(!bt_map_get(&m, "a", 1, &v));
    CHECK(!bt_map_del(&m, "a", 1));
    CHECK_EQ(bt_map_put(&m, NULL, 0, 1), BT_OK); /* the empty key is a key */
    CHECK_EQ(bt_map_put(&m, "a\0b", 3, 2), BT_OK);
    CHECK_EQ(bt_map_put(&m, "a\0c", 3, 3), BT_OK);
    CHECK(bt_map_get(&m, "", 0, &v) && v == 1);
    CHECK(bt_map_get(&m, "a\0b", 3, &v) && v == 2);
    CHECK(bt_map_get(&m, "a\0c", 3, NULL));
    CHECK(!bt_map_get(&m, "a", 1, &v));
    CHECK_EQ(bt_map_put(&m, "a\0b", 3, UINT64_MAX), BT_OK);
    CHECK(bt_map_get(&m, "a\0b", 3, &v) && v == UINT64_MAX);
    CHECK_EQ(m.count, 3);
    CHECK(bt_map_del(&m, "", 0));
    CHECK(!bt_map_del(&m, "", 0));
    CHECK_EQ(m.count, 2);
    bt_map_fini(&m);
    CHECK(!bt_map_get(&m, "a", 1, &v));
    bt_map_fini(&m);

    char key[] = "key", same[] = "key";
    bt_map_init(&m, false);
    CHECK_EQ(bt_map_put(&m, key, 3, 1), BT_OK);
    CHECK_EQ(bt_map_put(&m, same, 3, 2), BT_OK);
    memset(key, 'x', 3); /* the last key given is the one borrowed */
    CHECK(bt_map_get(&m, "key", 3, &v) && v == 2);
    bt_map_fini(&m);
}

#define N_KEYS 3000u

static void test_model(bool copy)
{
    static char keys[N_KEYS][8];
    static uint64_t want[N_KEYS];
    static bool present[N_KEYS];
    struct bt_map m;
    size_t count = 0;
    unsigned bad = 0;
    uint64_t rng = 12345;

    memset(present, 0, sizeof(present));
    for (unsigned i = 0; i < N_KEYS; i++) {
        (void)snprintf(keys[i], sizeof(keys[i]), "k%u", i);
    }
    bt_map_init(&m, copy);
    for (unsigned step = 0; step < 60000; step++) {
        rng = rng * UINT64_C(6364136223846793005) + 1;
        unsigned i = (unsigned)(rng >> 33) % N_KEYS;
        size_t len = strlen(keys[i]);
        if ((rng >> 20 & 3) < 2) {
            bad += bt_map_put(&m, keys[i], len, step) != BT_OK;
            count += !present[i];
            present[i] = true;
            want[i] = step;
        } else {
            bad += bt_map_del(&m, keys[i], len) != present[i];
            count -= present[i];
            present[i] = false;
        }
        bad += m.count != count;
        if (step % 5000 == 0 || step == 59999) {
            for (unsigned k = 0; k < N_KEYS; k++) {
                uint64_t v = 0;
                bool got = bt_map_get(&m, keys[k], strlen(keys[k]), &v);
                bad += got != present[k] || (got && v != want[k]);
            }
        }
    }
    CHECK_EQ(bad, 0);
    for (unsigned k = 0; k < N_KEYS; k++) {
        (void)bt_map_del(&m, keys[k], strlen(keys[k]));
    }
    CHECK_EQ(m.count, 0);
    bt_map_fini(&m);
}

/* Every allocation of a growing map fails once: nothing changes, and the next try works. */
static void test_nomem(void)
{
    size_t before = bt_test_live_bytes();
    struct bt_map m;
    unsigned bad = 0;
    bt_map_init(&m, true);
    for (uint32_t i = 0; i < 200; i++) {
        for (uint64_t nth = 0;; nth++) {
            size_t count = m.count;
            bt_test_fail_alloc(nth);
            enum bt_status st = bt_map_put(&m, &i, sizeof(i), i);
            bool fired = bt_test_fail_alloc_off();
            bad += st != (fired ? BT_ERR_NOMEM : BT_OK);
            bad += m.count != count + (fired ? 0 : 1);
            for (uint32_t k = 0; k < m.count; k++) {
                uint64_t v;
                bad += !bt_map_get(&m, &k, sizeof(k), &v) || v != k;
            }
            if (!fired) {
                break;
            }
        }
    }
    CHECK_EQ(bad, 0);
    bt_map_fini(&m);
    CHECK_EQ(bt_test_live_bytes(), before);
}

int main(void)
{
    test_hash();
    test_edges();
    test_model(true);
    test_model(false);
    test_nomem();
    return bt_test_done();
}
