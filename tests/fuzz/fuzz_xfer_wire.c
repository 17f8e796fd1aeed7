/* Any bytes as messages of the transfer room: the pure parsers, then a live connection (loopback, no thread) in one of
 * its states, with an open landing, that gets them as if its peer had sent them. Nothing may be written outside the
 * landing's page; the room must take any of it and still stop cleanly.
 *
 * Input: byte 0: bit 0 the side that hears it, bits 1..3 the rounds run before; then messages: payload length (u16 LE),
 * header (64 bytes), payload. */

#include <stdlib.h>
#include <string.h>
#include "base/log.h"
#include "transfer/xfer_int.h"
#include "transfer/xfer_loop.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

#define SHARE        32
#define NS_PER_ROUND 1000000

struct rig {
    struct bt_xfer_hub *hub;
    struct bt_xfer *d, *p;
    uint64_t now;
    uint8_t page[3 * SHARE]; /* the middle one is the landing's */
};

static void parse(const uint8_t *data, size_t n)
{
    struct xfer_head h;
    struct xfer_hello hello;
    char text[32];
    uint8_t again[XFER_HEAD_BYTES];
    xfer_text_clean(data, n, text, sizeof(text));
    if (xfer_hello_decode(data, n, &hello)) {
        uint8_t out[XFER_HELLO_MAX];
        if (xfer_hello_encode(&hello, out) != n || memcmp(out, data, n) != 0) {
            abort();
        }
    }
    if (n >= XFER_HEAD_BYTES && xfer_head_decode(data, XFER_HEAD_BYTES, n - XFER_HEAD_BYTES, &h)) {
        xfer_head_encode(&h, again);
    }
}

static void rounds(struct rig *r, unsigned n)
{
    for (unsigned i = 0; i < n; i++) {
        r->now += NS_PER_ROUND;
        bt_xfer_step(r->p, r->now);
        bt_xfer_step(r->d, r->now);
    }
}

static bool rig_start(struct rig *r)
{
    uint64_t peer;
    memset(r, 0, sizeof(*r));
    struct bt_xfer_opts o = {.manual = true,
                             .instance = 2,
                             .token = {"0123456789abcde"},
                             .listen = "loop:d",
                             .fingerprint = "m",
                             .layout = "k"};
    if (bt_xfer_hub_create(NULL, &r->hub) != BT_OK) {
        return false;
    }
    o.hub = r->hub;
    o.test_page_bytes = 64;
    if (bt_xfer_create(&o, &r->d, NULL) != BT_OK) {
        return false;
    }
    o.listen = NULL;
    o.instance = 1;
    return bt_xfer_create(&o, &r->p, NULL) == BT_OK &&
           bt_xfer_connect(r->p, "loop:d", 2, &o.token, &peer) == BT_OK;
}

static void open_landing(struct rig *r)
{
    static const uint32_t ids[2] = {0, BT_XFER_NO_PAGE};
    struct xfer_peer *q = TAILQ_FIRST(&r->d->peers);
    struct bt_xfer_landing l = {.ticket = "0123456789abcde", .generation = 7, .n_groups = 1};
    l.peer = q != NULL ? q->id : 1;
    l.group[0] = (struct bt_xfer_land_group){.base = r->page + SHARE,
                                             .layer_stride = SHARE,
                                             .page_stride = SHARE,
                                             .page_layer_bytes = SHARE,
                                             .n_layers = 1,
                                             .first_page = 5,
                                             .n_pages = 2,
                                             .page_ids = ids};
    if (bt_xfer_land_open(r->d, &l) == BT_OK) {
        rounds(r, 1);
    }
}

/* One message at the peer of x, if it has one. */
static void hear(struct bt_xfer *x, const uint8_t *head, const uint8_t *payload, size_t n)
{
    struct xfer_peer *q = TAILQ_FIRST(&x->peers);
    struct xfer_op *op = NULL;
    uint8_t *copy = malloc(n + 1); /* exact size, so that a sanitizer sees the end */
    if (q != NULL && copy != NULL) {
        memcpy(copy, payload, n);
        (void)xfer_frame(x, q, head, XFER_HEAD_BYTES, copy, n, &op);
    }
    free(copy);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct rig r;
    bt_log_setup(BT_LOG_ERROR, BT_LOG_TEXT);
    parse(data, n);
    if (n == 0 || !rig_start(&r)) {
        return 0;
    }
    rounds(&r, data[0] >> 1 & 7);
    open_landing(&r);
    for (size_t at = 1; at + 2 + XFER_HEAD_BYTES <= n;) {
        size_t len = data[at] | (size_t)data[at + 1] << 8;
        const uint8_t *head = data + at + 2;
        at += 2 + XFER_HEAD_BYTES;
        len = len <= n - at ? len : n - at;
        hear((data[0] & 1) != 0 ? r.p : r.d, head, data + at, len);
        at += len;
        rounds(&r, 1);
    }
    for (size_t i = 0; i < SHARE; i++) {
        if (r.page[i] != 0 || r.page[2 * SHARE + i] != 0) {
            abort();
        }
    }
    bt_xfer_destroy(r.p);
    bt_xfer_destroy(r.d);
    bt_xfer_hub_destroy(r.hub);
    return 0;
}
