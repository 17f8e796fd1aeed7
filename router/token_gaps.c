/* Times between tokens in logarithmic buckets, eight an octave. Knows no clock. */

#include "router/token_gaps.h"

static unsigned bucket_of(uint64_t ns)
{
    if (ns < UINT64_C(1) << BT_GAPS_LOW) {
        return 0;
    }
    if (ns >= UINT64_C(1) << BT_GAPS_HIGH) {
        return BT_GAPS_BUCKETS - 1;
    }
    unsigned octave = 63u - (unsigned)__builtin_clzll(ns);

    return (octave - BT_GAPS_LOW) * 8 + (unsigned)(ns >> (octave - 3) & 7);
}

void bt_token_gaps_add(struct bt_token_gaps *g, uint64_t ns, uint32_t n)
{
    if (n == 0) {
        return;
    }
    g->n += n;
    g->counts[bucket_of(ns)] += n;
    g->max_ns = ns > g->max_ns ? ns : g->max_ns;
}

uint64_t bt_token_gaps_quantile(const struct bt_token_gaps *g, double q)
{
    uint64_t want = (uint64_t)(q * (double)g->n), seen = 0;
    unsigned i = 0;

    if (g->n == 0) {
        return 0;
    }
    want = want < g->n ? want + 1 : g->n;
    while (i + 1 < BT_GAPS_BUCKETS && (seen += g->counts[i]) < want) {
        i++;
    }
    /* The middle of the bucket. */
    uint64_t base = UINT64_C(1) << (BT_GAPS_LOW + i / 8);
    uint64_t middle = base + base / 16 * (2 * (i % 8) + 1);

    return middle < g->max_ns ? middle : g->max_ns;
}
