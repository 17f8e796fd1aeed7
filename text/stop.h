#ifndef BT_TEXT_STOP_H
#define BT_TEXT_STOP_H

/* Stop strings over streamed text. A set holds the strings, immutable and shared by the choices of
 * a request; a matcher is the state of one choice. Text goes in by pieces of any size; what comes
 * out is the text that can no longer be part of a stop string, and after a stop the text in front
 * of it. How the text was cut into pieces does not matter: the stop that ends first wins, of those
 * that end together the longest. Time per byte: the number of strings, amortised. One thread per
 * matcher. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"
#include "base/status.h"

#define BT_STOP_STRINGS_MAX 16
#define BT_STOP_BYTES_MAX   4096 /* of one string */

struct bt_stop_set;

/* strings: n pointers to lens[i] bytes, copied. n = 0 is legal (nothing ever stops).
 * BT_ERR_INVALID: too many, one empty or too long. */
enum bt_status bt_stop_set_create(const char *const *strings, const size_t *lens, size_t n,
                                  struct bt_stop_set **out, struct bt_err *err) BT_NODISCARD;
void bt_stop_set_destroy(struct bt_stop_set *s);

/* A plain value; the set must outlive it. */
struct bt_stop {
    const struct bt_stop_set *set;
    uint32_t matched[BT_STOP_STRINGS_MAX]; /* length of the prefix of each string that the text now
                                              ends with */
    uint32_t n_held;                       /* bytes held back: the longest of these */
    uint32_t held_of; /* the string whose first n_held bytes are the held ones */
    int32_t hit;      /* the string that completed, -1: none yet */
};

void bt_stop_init(struct bt_stop *m, const struct bt_stop_set *s);
/* Feeds text; appends to out what may be shown. After a stop (m->hit >= 0) nothing more comes out,
 * ever. BT_ERR_NOMEM: out is cut. */
enum bt_status bt_stop_feed(struct bt_stop *m, const char *text, size_t len,
                            struct bt_buf *out) BT_NODISCARD;
/* The text has ended: appends what was held back, unless a stop completed. */
enum bt_status bt_stop_finish(struct bt_stop *m, struct bt_buf *out) BT_NODISCARD;

#endif
