/* Encoding of the transfer room's own messages. Owns the byte layout and its checks; knows nothing of
 * connections, pages or who may say what when. */

#include "transfer/xfer_wire.h"
#include <string.h>

#define MAGIC 0x46585442u /* "BTXF" */

enum {
    AT_MAGIC = 0,       /* u32 */
    AT_KIND = 4,        /* u8 */
    AT_ZERO = 5,        /* u8 */
    AT_VERSION = 6,     /* u16 */
    AT_INSTANCE = 8,    /* u64 */
    AT_BYTES = 16,      /* u32 */
    AT_GROUP = 20,      /* u32 */
    AT_LAYER = 24,      /* u32 */
    AT_PAGE = 28,       /* u32 */
    AT_CHECK = 32,      /* u64 */
    AT_GENERATION = 40, /* u64 */
    AT_TICKET = 48,     /* 16 */
};
_Static_assert(AT_TICKET + BT_XFER_TICKET_BYTES == XFER_HEAD_BYTES,
               "the header ends with the ticket");
_Static_assert(BT_XFER_SHARE_MAX <= UINT32_MAX, "sizes travel as u32");

static void put32(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++) {
        p[i] = (uint8_t)(v >> (8 * i));
    }
}

static void put64(uint8_t *p, uint64_t v)
{
    put32(p, (uint32_t)v);
    put32(p + 4, (uint32_t)(v >> 32));
}

static void put16(uint8_t *p, uint32_t v)
{
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
}

static uint32_t get16(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8;
}

static uint32_t get32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static uint64_t get64(const uint8_t *p)
{
    return (uint64_t)get32(p) | (uint64_t)get32(p + 4) << 32;
}

void xfer_head_encode(const struct xfer_head *h, uint8_t out[XFER_HEAD_BYTES])
{
    memset(out, 0, XFER_HEAD_BYTES);
    put32(out + AT_MAGIC, MAGIC);
    out[AT_KIND] = (uint8_t)h->kind;
    put16(out + AT_VERSION, h->version);
    put64(out + AT_INSTANCE, h->instance);
    put32(out + AT_BYTES, (uint32_t)h->bytes);
    put64(out + AT_CHECK, h->check);
    if (h->kind == XFER_SHARE) {
        put32(out + AT_GROUP, h->group);
        put32(out + AT_LAYER, h->layer);
        put32(out + AT_PAGE, h->page);
        put64(out + AT_GENERATION, h->generation);
        memcpy(out + AT_TICKET, h->ticket, BT_XFER_TICKET_BYTES);
    }
}

static size_t payload_max(unsigned kind)
{
    switch (kind) {
    case XFER_HELLO:
        return XFER_HELLO_MAX;
    case XFER_TEST:
        return 1u << 20;
    case XFER_REFUSE:
        return XFER_REFUSE_MAX;
    case XFER_CTRL:
        return BT_XFER_CTRL_MAX;
    case XFER_SHARE:
        return BT_XFER_SHARE_MAX;
    default:
        return 0;
    }
}

bool xfer_head_decode(const uint8_t *p, size_t n, size_t payload_bytes, struct xfer_head *out)
{
    if (n != XFER_HEAD_BYTES || get32(p + AT_MAGIC) != MAGIC || p[AT_ZERO] != 0) {
        return false;
    }
    unsigned kind = p[AT_KIND];
    if (kind < XFER_HELLO || kind > XFER_SHARE) {
        return false;
    }
    memset(out, 0, sizeof(*out));
    out->kind = (enum xfer_kind)kind;
    out->version = get16(p + AT_VERSION);
    out->instance = get64(p + AT_INSTANCE);
    out->bytes = get32(p + AT_BYTES);
    out->check = get64(p + AT_CHECK);
    out->group = get32(p + AT_GROUP);
    out->layer = get32(p + AT_LAYER);
    out->page = get32(p + AT_PAGE);
    out->generation = get64(p + AT_GENERATION);
    memcpy(out->ticket, p + AT_TICKET, BT_XFER_TICKET_BYTES);
    if (out->bytes != payload_bytes || payload_bytes > payload_max(kind) || out->instance == 0) {
        return false;
    }
    return payload_bytes > 0 || payload_max(kind) == 0;
}

/* HELLO payload: u64 expect, u32 min, u32 max, u32 fingerprint bytes, u32 layout bytes, the token, the two strings. */
#define HELLO_FIXED 40
_Static_assert(HELLO_FIXED + 2 * (BT_XFER_NAME_MAX - 1) <= XFER_HELLO_MAX, "a hello fits");

size_t xfer_hello_encode(const struct xfer_hello *h, uint8_t out[XFER_HELLO_MAX])
{
    size_t nf = strnlen(h->fingerprint, BT_XFER_NAME_MAX - 1);
    size_t nl = strnlen(h->layout, BT_XFER_NAME_MAX - 1);
    put64(out, h->expect);
    put32(out + 8, h->version_min);
    put32(out + 12, h->version_max);
    put32(out + 16, (uint32_t)nf);
    put32(out + 20, (uint32_t)nl);
    memcpy(out + 24, h->token.b, sizeof(h->token.b));
    memcpy(out + HELLO_FIXED, h->fingerprint, nf);
    memcpy(out + HELLO_FIXED + nf, h->layout, nl);
    return HELLO_FIXED + nf + nl;
}

bool xfer_hello_decode(const uint8_t *p, size_t n, struct xfer_hello *out)
{
    if (n < HELLO_FIXED) {
        return false;
    }
    memset(out, 0, sizeof(*out));
    out->expect = get64(p);
    out->version_min = get32(p + 8);
    out->version_max = get32(p + 12);
    memcpy(out->token.b, p + 24, sizeof(out->token.b));
    size_t nf = get32(p + 16);
    size_t nl = get32(p + 20);
    if (nf >= BT_XFER_NAME_MAX || nl >= BT_XFER_NAME_MAX || HELLO_FIXED + nf + nl != n) {
        return false;
    }
    if (memchr(p + HELLO_FIXED, 0, nf + nl) != NULL) {
        return false;
    }
    memcpy(out->fingerprint, p + HELLO_FIXED, nf);
    memcpy(out->layout, p + HELLO_FIXED + nf, nl);
    return true;
}

/* ---- knock and answer ---- */

#define KNOCK_MAGIC  0x4b585442u /* "BTXK" */
#define ANSWER_MAGIC 0x41585442u /* "BTXA" */

enum {
    KNOCK_AT_VERSION = 4,      /* u16; magic and version stay where they are for ever */
    KNOCK_AT_N_IPS = 6,        /* u8 */
    KNOCK_AT_ZERO = 7,         /* u8 */
    KNOCK_AT_INSTANCE = 8,     /* u64 */
    KNOCK_AT_EXPECT = 16,      /* u64 */
    KNOCK_AT_MIN = 24,         /* u32 */
    KNOCK_AT_MAX = 28,         /* u32 */
    KNOCK_AT_TOKEN = 32,       /* 16 */
    KNOCK_AT_FINGERPRINT = 48, /* text, filled up with zeros */
    KNOCK_AT_LAYOUT = KNOCK_AT_FINGERPRINT + BT_XFER_NAME_MAX,
    KNOCK_AT_IPS = KNOCK_AT_LAYOUT + BT_XFER_NAME_MAX,

    ANSWER_AT_VERDICT = 6, /* u8 */
    ANSWER_AT_N_IPS = 7,   /* u8 */
    ANSWER_AT_PORT = 8,    /* u16 */
    ANSWER_AT_ZERO = 10,   /* 14 */
    ANSWER_AT_TEXT = 24,
    ANSWER_AT_IPS = ANSWER_AT_TEXT + XFER_ANSWER_TEXT,
    IP_BYTES = 20, /* family, 3 zeros, 16 */
};
_Static_assert(KNOCK_AT_IPS + IP_BYTES * XFER_IPS_MAX == XFER_KNOCK_BYTES, "the knock's size");
_Static_assert(ANSWER_AT_IPS + IP_BYTES * XFER_IPS_MAX == XFER_ANSWER_BYTES, "the answer's size");

static bool all_zero(const uint8_t *p, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (p[i] != 0) {
            return false;
        }
    }
    return true;
}

static void put_ips(uint8_t *p, const struct xfer_ip *ips, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        p[i * IP_BYTES] = ips[i].family;
        memcpy(p + i * IP_BYTES + 4, ips[i].b, sizeof(ips[i].b));
    }
}

static bool get_ips(const uint8_t *p, uint32_t n, struct xfer_ip *ips)
{
    for (uint32_t i = 0; i < n; i++) {
        const uint8_t *q = p + i * IP_BYTES;
        if ((q[0] != 4 && q[0] != 6) || !all_zero(q + 1, 3) ||
            (q[0] == 4 && !all_zero(q + 8, 12))) {
            return false;
        }
        ips[i].family = q[0];
        memcpy(ips[i].b, q + 4, sizeof(ips[i].b));
    }
    return all_zero(p + n * IP_BYTES, (XFER_IPS_MAX - n) * (size_t)IP_BYTES);
}

/* A text that ends inside its field and has only zeros behind. */
static bool get_name(const uint8_t *p, size_t cap, char *out)
{
    const uint8_t *end = memchr(p, 0, cap);
    if (end == NULL || !all_zero(end, cap - (size_t)(end - p))) {
        return false;
    }
    memcpy(out, p, cap);
    return true;
}

void xfer_knock_encode(const struct xfer_knock *k, uint8_t out[XFER_KNOCK_BYTES])
{
    memset(out, 0, XFER_KNOCK_BYTES);
    put32(out, KNOCK_MAGIC);
    put16(out + KNOCK_AT_VERSION, XFER_KNOCK_VERSION);
    out[KNOCK_AT_N_IPS] = (uint8_t)k->n_ips;
    put64(out + KNOCK_AT_INSTANCE, k->instance);
    put64(out + KNOCK_AT_EXPECT, k->hello.expect);
    put32(out + KNOCK_AT_MIN, k->hello.version_min);
    put32(out + KNOCK_AT_MAX, k->hello.version_max);
    memcpy(out + KNOCK_AT_TOKEN, k->hello.token.b, sizeof(k->hello.token.b));
    memcpy(out + KNOCK_AT_FINGERPRINT, k->hello.fingerprint,
           strnlen(k->hello.fingerprint, BT_XFER_NAME_MAX - 1));
    memcpy(out + KNOCK_AT_LAYOUT, k->hello.layout, strnlen(k->hello.layout, BT_XFER_NAME_MAX - 1));
    put_ips(out + KNOCK_AT_IPS, k->ips, k->n_ips);
}

enum xfer_knock_look xfer_knock_decode(const uint8_t *p, size_t n, struct xfer_knock *out)
{
    uint8_t magic[4];
    put32(magic, KNOCK_MAGIC);
    if (memcmp(p, magic, n < sizeof(magic) ? n : sizeof(magic)) != 0) {
        return XFER_KNOCK_WRONG;
    }
    if (n >= KNOCK_AT_VERSION + 2 && get16(p + KNOCK_AT_VERSION) != XFER_KNOCK_VERSION) {
        return XFER_KNOCK_VERSION_OTHER;
    }
    if (n < XFER_KNOCK_BYTES) {
        return XFER_KNOCK_MORE;
    }
    memset(out, 0, sizeof(*out));
    out->instance = get64(p + KNOCK_AT_INSTANCE);
    out->hello.expect = get64(p + KNOCK_AT_EXPECT);
    out->hello.version_min = get32(p + KNOCK_AT_MIN);
    out->hello.version_max = get32(p + KNOCK_AT_MAX);
    memcpy(out->hello.token.b, p + KNOCK_AT_TOKEN, sizeof(out->hello.token.b));
    out->n_ips = p[KNOCK_AT_N_IPS];
    bool right = p[KNOCK_AT_ZERO] == 0 && out->instance != 0 && out->hello.expect != 0 &&
                 out->n_ips <= XFER_IPS_MAX &&
                 get_name(p + KNOCK_AT_FINGERPRINT, BT_XFER_NAME_MAX, out->hello.fingerprint) &&
                 get_name(p + KNOCK_AT_LAYOUT, BT_XFER_NAME_MAX, out->hello.layout) &&
                 get_ips(p + KNOCK_AT_IPS, out->n_ips, out->ips);
    return right ? XFER_KNOCK_WHOLE : XFER_KNOCK_WRONG;
}

void xfer_answer_encode(const struct xfer_answer *a, uint8_t out[XFER_ANSWER_BYTES])
{
    memset(out, 0, XFER_ANSWER_BYTES);
    put32(out, ANSWER_MAGIC);
    put16(out + KNOCK_AT_VERSION, XFER_KNOCK_VERSION);
    out[ANSWER_AT_VERDICT] = (uint8_t)a->verdict;
    out[ANSWER_AT_N_IPS] = (uint8_t)a->n_ips;
    put16(out + ANSWER_AT_PORT, a->port);
    memcpy(out + ANSWER_AT_TEXT, a->text, strnlen(a->text, XFER_ANSWER_TEXT - 1));
    put_ips(out + ANSWER_AT_IPS, a->ips, a->n_ips);
}

bool xfer_answer_decode(const uint8_t p[XFER_ANSWER_BYTES], struct xfer_answer *out)
{
    memset(out, 0, sizeof(*out));
    if (get32(p) != ANSWER_MAGIC) {
        return false;
    }
    if (get16(p + KNOCK_AT_VERSION) != XFER_KNOCK_VERSION) {
        out->verdict = XFER_NO_VERSION;
        memcpy(out->text, "the other end speaks another version",
               sizeof("the other end speaks another version"));
        return true;
    }
    unsigned verdict = p[ANSWER_AT_VERDICT];
    out->n_ips = p[ANSWER_AT_N_IPS];
    out->port = (uint16_t)get16(p + ANSWER_AT_PORT);
    if (verdict < XFER_ENTER || verdict > XFER_NO_TOKEN || out->n_ips > XFER_IPS_MAX ||
        (verdict == XFER_ENTER) != (out->port != 0) || !all_zero(p + ANSWER_AT_ZERO, 14)) {
        return false;
    }
    out->verdict = (enum xfer_verdict)verdict;
    const uint8_t *text = p + ANSWER_AT_TEXT;
    xfer_text_clean(text, strnlen((const char *)text, XFER_ANSWER_TEXT), out->text,
                    sizeof(out->text));
    return get_ips(p + ANSWER_AT_IPS, out->n_ips, out->ips);
}

/* ---- text and the test page ---- */

void xfer_text_clean(const uint8_t *p, size_t n, char *text, size_t cap)
{
    size_t len = n < cap - 1 ? n : cap - 1;
    for (size_t i = 0; i < len; i++) {
        text[i] = p[i] >= 0x20 && p[i] < 0x7f ? (char)p[i] : '?';
    }
    text[len] = 0;
}

/* A 64-bit mix of position and seed; the last bytes of an odd length use its low part. */
static uint64_t test_word(uint64_t i, uint64_t seed)
{
    uint64_t z = seed + (i + 1) * UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

void xfer_test_fill(uint8_t *p, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++) {
        p[i] = (uint8_t)(test_word(i / 8, seed) >> (8 * (i % 8)));
    }
}

bool xfer_test_verify(const uint8_t *p, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++) {
        if (p[i] != (uint8_t)(test_word(i / 8, seed) >> (8 * (i % 8)))) {
            return false;
        }
    }
    return true;
}
