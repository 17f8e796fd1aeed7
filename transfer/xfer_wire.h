#ifndef BT_TRANSFER_XFER_WIRE_H
#define BT_TRANSFER_XFER_WIRE_H

/* The messages between two transfer rooms. Each is one active message: a header of exactly XFER_HEAD_BYTES
 * (little-endian, padding zero) and a payload. Pure functions; any thread.
 *
 *   HELLO    P -> D  payload: the instance wanted and its token, version range, fingerprint, layout
 *   WELCOME  D -> P  version: now send the test page
 *   TEST     P -> D  payload: the test page; check is its hash
 *   READY    D -> P  test page was right: the connection is up
 *   REFUSE   D -> P  payload: the reason in words; P closes
 *   PING     both    nothing: proof of life
 *   CTRL     both    payload: the caller's bytes
 *   SHARE    P -> D  payload: one page's part in one layer
 *
 * Every header carries the sender's instance.
 *
 * Before any of them, on a plain TCP connection that UCX does not hear (transfer/xfer_gate.h):
 *
 *   KNOCK    P -> D  who I am, whom I want, what I have, from where UCX may come: XFER_KNOCK_BYTES
 *   ANSWER   D -> P  where UCX listens here, or why not: XFER_ANSWER_BYTES; then D closes */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/status.h"
#include "transfer/xfer.h"

#define XFER_HEAD_BYTES  64
#define XFER_VERSION_MIN 2 /* 1 had no token */
#define XFER_VERSION_MAX 2
#define XFER_HELLO_MAX   (64 + 2 * BT_XFER_NAME_MAX)
#define XFER_REFUSE_MAX  1024

#define XFER_KNOCK_VERSION 2 /* 1 had no token */
#define XFER_IPS_MAX       32
#define XFER_KNOCK_BYTES   (560 + 20 * XFER_IPS_MAX)
#define XFER_ANSWER_BYTES  (256 + 20 * XFER_IPS_MAX)
#define XFER_ANSWER_TEXT   232 /* with the NUL */

enum xfer_kind {
    XFER_HELLO = 1,
    XFER_WELCOME,
    XFER_TEST,
    XFER_READY,
    XFER_REFUSE,
    XFER_PING,
    XFER_CTRL,
    XFER_SHARE,
};

struct xfer_head {
    enum xfer_kind kind;
    uint32_t version;  /* WELCOME: the version chosen; else 0 */
    uint64_t instance; /* the sender's */
    uint64_t bytes;    /* of the payload */
    uint64_t check;    /* bt_hash64 of the payload, 0: not computed */
    /* SHARE only, else zero */
    uint32_t group, layer, page;
    uint64_t generation;
    uint8_t ticket[BT_XFER_TICKET_BYTES];
};

struct xfer_hello {
    uint64_t expect;            /* instance wanted at the other end, 0: any */
    struct bt_gate_token token; /* the other end's: the proof of belonging here */
    uint32_t version_min, version_max;
    char fingerprint[BT_XFER_NAME_MAX];
    char layout[BT_XFER_NAME_MAX];
};

void xfer_head_encode(const struct xfer_head *h, uint8_t out[XFER_HEAD_BYTES]);
/* payload_bytes: what the transport says; must equal the header's. False: malformed. */
bool xfer_head_decode(const uint8_t *p, size_t n, size_t payload_bytes,
                      struct xfer_head *out) BT_NODISCARD;

/* Returns the length; the strings must be shorter than BT_XFER_NAME_MAX. */
size_t xfer_hello_encode(const struct xfer_hello *h, uint8_t out[XFER_HELLO_MAX]);
bool xfer_hello_decode(const uint8_t *p, size_t n, struct xfer_hello *out) BT_NODISCARD;

/* An address without a port. The bytes behind those of family 4 are zero. */
struct xfer_ip {
    uint8_t family; /* 4 or 6 */
    uint8_t b[16];
};

struct xfer_knock {
    uint64_t instance;
    struct xfer_hello hello; /* expect is not 0 */
    uint32_t n_ips;
    struct xfer_ip ips[XFER_IPS_MAX];
};

enum xfer_verdict {
    XFER_ENTER = 1,
    XFER_NO_VERSION,
    XFER_NO_INSTANCE,
    XFER_NO_MODEL, /* or layout */
    XFER_NO_ROOM,
    XFER_NO_TOKEN,
};

struct xfer_answer {
    enum xfer_verdict verdict;
    uint16_t port; /* of UCX, on the host that was dialled; 0 unless XFER_ENTER */
    uint32_t n_ips;
    struct xfer_ip ips[XFER_IPS_MAX];
    char text[XFER_ANSWER_TEXT]; /* why not; printable */
};

enum xfer_knock_look {
    XFER_KNOCK_MORE, /* so far it may become one */
    XFER_KNOCK_WHOLE,
    XFER_KNOCK_VERSION_OTHER, /* of a version that is not spoken here */
    XFER_KNOCK_WRONG,
};

void xfer_knock_encode(const struct xfer_knock *k, uint8_t out[XFER_KNOCK_BYTES]);
/* The first n <= XFER_KNOCK_BYTES bytes of a connection. out is set when it is WHOLE. */
enum xfer_knock_look xfer_knock_decode(const uint8_t *p, size_t n, struct xfer_knock *out);
void xfer_answer_encode(const struct xfer_answer *a, uint8_t out[XFER_ANSWER_BYTES]);
/* False: malformed. Of another version it has verdict XFER_NO_VERSION. */
bool xfer_answer_decode(const uint8_t p[XFER_ANSWER_BYTES], struct xfer_answer *out) BT_NODISCARD;

/* Fills text (cap > 0) with printable characters only, cut to fit. */
void xfer_text_clean(const uint8_t *p, size_t n, char *text, size_t cap);

/* The test page: every byte depends on its position and the seed. */
void xfer_test_fill(uint8_t *p, size_t n, uint64_t seed);
bool xfer_test_verify(const uint8_t *p, size_t n, uint64_t seed);

#endif
