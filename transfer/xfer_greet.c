/* The greeting: who we are, whether the two fit (token, instance, version, model, layout), and the test page that must
 * arrive undamaged before a connection counts as up. Owns that conversation; the rest of a peer's life is
 * xfer_peer.c. */

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "base/log.h"
#include "base/mem.h"
#include "transfer/xfer_int.h"

struct xfer_hello xfer_greet_own(const struct bt_xfer *x, const struct xfer_peer *p)
{
    struct xfer_hello h = {.expect = p->expect,
                           .token = p->token,
                           .version_min = XFER_VERSION_MIN,
                           .version_max = XFER_VERSION_MAX};
    memcpy(h.fingerprint, x->fingerprint, sizeof(h.fingerprint));
    memcpy(h.layout, x->layout, sizeof(h.layout));
    return h;
}

void xfer_dialled(struct bt_xfer *x, struct xfer_peer *p)
{
    struct xfer_hello h = xfer_greet_own(x, p);
    uint8_t *buf = bt_alloc(XFER_HELLO_MAX);
    if (buf == NULL) {
        p->broken = BT_ERR_NOMEM;
        return;
    }
    xfer_peer_send(x, p, XFER_HELLO, buf, xfer_hello_encode(&h, buf));
}

static void send_test_page(struct bt_xfer *x, struct xfer_peer *p)
{
    size_t n = x->o.test_page_bytes;
    uint8_t *page = bt_alloc(n);
    if (page == NULL) {
        p->broken = BT_ERR_NOMEM;
        return;
    }
    xfer_test_fill(page, n, x->o.instance);
    struct xfer_head h = {.kind = XFER_TEST, .check = bt_hash64(page, n, 0) | 1};
    xfer_send_message(x, p, &h, page, page, n);
}

static void refuse(struct bt_xfer *x, struct xfer_peer *p, const char *why)
{
    char *text = bt_strdup(why);
    bt_log_warn("xfer", "connection of %016" PRIx64 " (%s) refused: %s", p->instance, p->address,
                why);
    x->st.fail_refused++;
    p->state = PEER_REFUSED;
    p->born_ns = x->now_ns;
    if (text == NULL) {
        p->broken = BT_ERR_NOMEM;
        return;
    }
    xfer_peer_send(x, p, XFER_REFUSE, text, strlen(text));
}

/* The new connection of an instance replaces the old one, whose death has not shown yet. */
static void replace_older(struct bt_xfer *x, struct xfer_peer *p)
{
    struct xfer_peer *q;
    TAILQ_FOREACH(q, &x->peers, link)
    {
        if (q != p && q->incoming && q->instance == p->instance && q->state == PEER_UP) {
            xfer_peer_down(x, q, BT_ERR_PEER_LOST,
                           "replaced by a newer connection of the same instance");
        }
    }
}

enum xfer_verdict xfer_greet_judge(const struct bt_xfer *x, const struct xfer_hello *hello,
                                   char *why, size_t cap)
{
    why[0] = 0;
    if (hello->expect != 0 && hello->expect != x->o.instance) {
        snprintf(why, cap, "instance differs: %016" PRIx64 " wanted, another one is here",
                 hello->expect);
        return XFER_NO_INSTANCE;
    }
    if (!bt_gate_token_equal(&hello->token, &x->o.token)) {
        snprintf(why, cap, "the gate token is wrong: this node's routers tell it to prefill nodes");
        return XFER_NO_TOKEN;
    }
    if (hello->version_min > XFER_VERSION_MAX || hello->version_max < XFER_VERSION_MIN) {
        snprintf(why, cap, "no transfer protocol version in common: %u to %u there, %d to %d here",
                 hello->version_min, hello->version_max, XFER_VERSION_MIN, XFER_VERSION_MAX);
        return XFER_NO_VERSION;
    }
    if (strcmp(hello->fingerprint, x->fingerprint) != 0) {
        snprintf(why, cap, "model fingerprint differs: \"%.80s\" there, \"%.80s\" here",
                 hello->fingerprint, x->fingerprint);
        return XFER_NO_MODEL;
    }
    if (strcmp(hello->layout, x->layout) != 0) {
        snprintf(why, cap, "KV layout differs: \"%.90s\" there, \"%.90s\" here", hello->layout,
                 x->layout);
        return XFER_NO_MODEL;
    }
    return XFER_ENTER;
}

void xfer_greet_hello(struct bt_xfer *x, struct xfer_peer *p, const struct xfer_head *h,
                      const uint8_t *data)
{
    struct xfer_hello hello;
    char why[XFER_REFUSE_MAX];
    if (p->state != PEER_GREETED || !xfer_hello_decode(data, h->bytes, &hello)) {
        x->st.drop_malformed++;
        xfer_broken(x, p, BT_ERR_PROTOCOL);
        return;
    }
    p->instance = h->instance;
    if (xfer_greet_judge(x, &hello, why, sizeof(why)) != XFER_ENTER) {
        refuse(x, p, why);
        return;
    }
    p->version = hello.version_max < XFER_VERSION_MAX ? hello.version_max : XFER_VERSION_MAX;
    p->state = PEER_TESTING;
    xfer_peer_send(x, p, XFER_WELCOME, NULL, 0);
}

void xfer_greet_welcome(struct bt_xfer *x, struct xfer_peer *p, const struct xfer_head *h)
{
    char why[160];
    struct xfer_transport t;
    if (p->state != PEER_DIALING || h->version < XFER_VERSION_MIN ||
        h->version > XFER_VERSION_MAX) {
        x->st.drop_malformed++;
        xfer_broken(x, p, BT_ERR_PROTOCOL);
        return;
    }
    p->instance = h->instance;
    if (p->expect != 0 && p->expect != h->instance) {
        snprintf(why, sizeof(why),
                 "instance differs: %016" PRIx64 " wanted, %016" PRIx64 " is there", p->expect,
                 h->instance);
        xfer_peer_down(x, p, BT_ERR_PROTOCOL, why);
        return;
    }
    p->version = h->version;
    p->state = PEER_TESTING;
    x->ops->describe(x, p, &t);
    p->want_rndv = t.rndv;
    p->want_rndv_device = t.rndv_device;
    if (x->o.proto != BT_XFER_PROTO_AUTO) {
        p->want_rndv = p->want_rndv_device = x->o.proto == BT_XFER_PROTO_RNDV;
    }
    send_test_page(x, p);
}

/* The whole test page is here. */
void xfer_greet_page(struct bt_xfer *x, struct xfer_peer *p, const struct xfer_head *h,
                     const uint8_t *page)
{
    if (p->state != PEER_TESTING) {
        return;
    }
    if ((bt_hash64(page, h->bytes, 0) | 1) != h->check ||
        !xfer_test_verify(page, h->bytes, p->instance)) {
        refuse(x, p, "the test page arrived damaged");
        return;
    }
    replace_older(x, p);
    xfer_peer_send(x, p, XFER_READY, NULL, 0);
    xfer_peer_up(x, p);
}

void xfer_greet_refused(struct bt_xfer *x, struct xfer_peer *p, const struct xfer_head *h,
                        const uint8_t *data)
{
    char text[200];
    if (p->incoming) {
        x->st.drop_malformed++;
        return;
    }
    xfer_text_clean(data, h->bytes, text, sizeof(text));
    xfer_peer_down(x, p, BT_ERR_PROTOCOL, text);
}
