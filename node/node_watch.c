/* Tells the log what counters say of messages that were dropped: their senders hear nothing or little, and nobody should
 * have to look at metrics to learn that something is forged. Owns what was told last; drops nothing itself. */

#include "node/node_int.h"

static void tell(struct watched *w, uint64_t now, uint64_t total, enum bt_log_level level,
                 const char *what)
{
    uint32_t n_held;

    if (total == w->told || !bt_log_may(&w->limit, now, &n_held)) {
        return;
    }
    BT_LOG(level, "transfer", NULL, "%llu messages dropped: %s",
           (unsigned long long)(total - w->told), what);
    w->told = total;
}

void bt_node_watch(struct bt_node *n, uint64_t now)
{
    struct bt_xfer_stats x;
    struct bt_msg_load legs = {0};

    bt_xfer_stats(n->xfer, &x);
    bt_node_legs_load(n, &legs);
    tell(&n->p->late, now, x.drop_unknown + x.drop_generation + legs.stale_messages, BT_LOG_INFO,
         "their ticket or generation is over or unknown; harmless after a cancel or a retry");
    tell(&n->p->forged, now, x.drop_peer + x.drop_range + x.drop_malformed + x.drop_checksum,
         BT_LOG_WARN, "of the wrong connection, out of range, malformed or damaged");
}
