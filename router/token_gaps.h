#ifndef BT_ROUTER_TOKEN_GAPS_H
#define BT_ROUTER_TOKEN_GAPS_H

/* The times between the tokens of one answer, summed up in a fixed size: buckets of a twelfth of their value from
 * 16 µs to 67 s. One thread. */

#include <stdint.h>

#define BT_GAPS_LOW     14u /* log2 ns */
#define BT_GAPS_HIGH    36u
#define BT_GAPS_BUCKETS ((BT_GAPS_HIGH - BT_GAPS_LOW) * 8u)

/* Zero-initialised is empty. */
struct bt_token_gaps {
    uint64_t n, max_ns;
    uint32_t counts[BT_GAPS_BUCKETS];
};

/* n gaps of that length. */
void bt_token_gaps_add(struct bt_token_gaps *g, uint64_t ns, uint32_t n);
/* The gap below which a part q (0 to 1) of them is, within 7 %; 0 if empty. Never above max_ns. */
uint64_t bt_token_gaps_quantile(const struct bt_token_gaps *g, double q);

#endif
