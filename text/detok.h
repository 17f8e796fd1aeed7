#ifndef BT_TEXT_DETOK_H
#define BT_TEXT_DETOK_H

/* Streaming detokenizer: ids in, text out as soon as it is certain. One per answer (choice); a
 * plain value of bounded size without heap, copyable. One thread; the tokenizer must outlive it.
 * All text pushed out, finish included, is what bt_tokenizer_decode gives for the same ids, and
 * every piece is whole characters. Bytes that form no character become U+FFFD: one for each maximal
 * broken sequence in byte-level vocabularies, one for each byte in vocabularies with byte fallback
 * (a valid character next to broken bytes stays). */

#include <stdbool.h>
#include <stdint.h>
#include "base/buf.h"
#include "base/status.h"
#include "text/tokenizer.h"

struct bt_detok {
    const struct bt_tokenizer *t;
    unsigned flags;      /* enum bt_detok_flags */
    uint32_t strip_left; /* leading characters still to drop */
    bool started;        /* a token was pushed */
    uint8_t n_held;      /* start of a character whose end has not come */
    char held[4];
};

void bt_detok_init(struct bt_detok *d, const struct bt_tokenizer *t, unsigned flags);
/* Appends to out the text that id makes certain, perhaps none. BT_ERR_INVALID: id is outside the
 * vocabulary, nothing changed, the stream may go on. BT_ERR_NOMEM: out is cut. */
enum bt_status bt_detok_push(struct bt_detok *d, uint32_t id, struct bt_buf *out) BT_NODISCARD;
/* Appends what was held back: U+FFFD for a character that never ended. d is as after init. */
enum bt_status bt_detok_finish(struct bt_detok *d, struct bt_buf *out) BT_NODISCARD;

#endif
