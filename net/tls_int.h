#ifndef BT_NET_TLS_INT_H
#define BT_NET_TLS_INT_H

/* Inside net/ only: TLS as a converter of bytes, without sockets. A context is shared by
 * connections of one server or channel; one thread. */

#include <stdbool.h>
#include <stddef.h>
#include "base/buf.h"
#include "base/status.h"

struct bt_tls_ctx;
struct bt_tls;

/* PEM files. err names the file and OpenSSL's reason. */
enum bt_status bt_tls_server_ctx(const char *cert, const char *key, struct bt_tls_ctx **out,
                                 struct bt_err *err) BT_NODISCARD;
/* ca: PEM file, NULL: the system's. Offers only h2. */
enum bt_status bt_tls_client_ctx(const char *ca, bool insecure, struct bt_tls_ctx **out,
                                 struct bt_err *err) BT_NODISCARD;
void bt_tls_ctx_destroy(struct bt_tls_ctx *c);

/* host: name to check and to send (client), NULL: server. NULL when memory is out. */
struct bt_tls *bt_tls_create(struct bt_tls_ctx *c, const char *host) BT_NODISCARD;
void bt_tls_destroy(struct bt_tls *t);

/* Takes bytes from the wire; appends what they decrypt to into plain. *eof: the peer said
 * close_notify. BT_ERR_PROTOCOL: handshake or record failed (bt_tls_error() says why). Handshake
 * answers wait in bt_tls_output(). */
enum bt_status bt_tls_feed(struct bt_tls *t, const char *data, size_t len, struct bt_buf *plain,
                           bool *eof) BT_NODISCARD;
bool bt_tls_ready(const struct bt_tls *t); /* handshake done */
bool bt_tls_is_h2(const struct bt_tls *t); /* ALPN chose h2 */
/* Encrypts; only when ready. */
enum bt_status bt_tls_write(struct bt_tls *t, const char *data, size_t len) BT_NODISCARD;
void bt_tls_close_notify(struct bt_tls *t);
/* Appends what must go to the wire. false: no memory. */
bool bt_tls_output(struct bt_tls *t, struct bt_buf *out) BT_NODISCARD;
const char *bt_tls_error(const struct bt_tls *t);

#endif
