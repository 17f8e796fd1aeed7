#ifndef BT_CLI_STATUS_DRAW_H
#define BT_CLI_STATUS_DRAW_H

#include <stdint.h>
#include "base/buf.h"
#include "proto/inference.h"

/* Totals of an earlier answer; zero-initialised: there was none. */
struct bt_status_sample {
    char router[20]; /* instance; "" none */
    uint64_t t_ns, requests, prompt_tokens, generated_tokens, transferred_bytes;
};
void bt_status_sample_take(struct bt_status_sample *s, const struct bt_inf_cluster *c,
                           uint64_t now_ns);

/* The whole cluster, every detail, for any width: what `baton status` prints once. */
void bt_status_table(const struct bt_inf_cluster *c, struct bt_buf *out);

/* The cluster for a screen: rates since `before`, pages as bars, transports. No line is wider than `width` (20 or
 * more) columns and there are at most `height` (3 or more) of them; what does not fit is left out, least important
 * first, and counted. */
void bt_status_screen(const struct bt_inf_cluster *c, const struct bt_status_sample *before,
                      const struct bt_status_sample *now, int width, int height,
                      struct bt_buf *out);

#endif
