/* TLS over memory BIOs: bytes in, bytes out. It knows OpenSSL and nothing of sockets, HTTP or time.
 */

#include "net/tls_int.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <arpa/inet.h>

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#include "base/mem.h"

#define TLS_CHUNK 16384

struct bt_tls_ctx {
    SSL_CTX *ctx;
    bool insecure;
};

struct bt_tls {
    SSL *ssl;
    BIO *in, *out; /* owned by ssl */
    char why[200];
};

static const char *openssl_reason(char *buf, size_t n)
{
    unsigned long e = ERR_peek_last_error();

    if (e == 0) {
        (void)snprintf(buf, n, "no reason given");
    } else {
        ERR_error_string_n(e, buf, n);
    }
    ERR_clear_error();
    return buf;
}

static int alpn_select(SSL *ssl, const unsigned char **out, unsigned char *out_len,
                       const unsigned char *in, unsigned in_len, void *arg)
{
    static const unsigned char ours[] = "\x02h2\x08http/1.1";
    unsigned char *picked = NULL;

    (void)ssl;
    (void)arg;
    if (SSL_select_next_proto(&picked, out_len, ours, sizeof ours - 1, in, in_len) !=
        OPENSSL_NPN_NEGOTIATED) {
        return SSL_TLSEXT_ERR_NOACK; /* goes on as HTTP/1.1 */
    }
    *out = picked;
    return SSL_TLSEXT_ERR_OK;
}

static struct bt_tls_ctx *ctx_new(const SSL_METHOD *method)
{
    struct bt_tls_ctx *c = bt_calloc(1, sizeof *c);

    if (c == NULL) {
        return NULL;
    }
    c->ctx = SSL_CTX_new(method);
    if (c->ctx == NULL || SSL_CTX_set_min_proto_version(c->ctx, TLS1_2_VERSION) != 1) {
        bt_tls_ctx_destroy(c);
        return NULL;
    }
    (void)SSL_CTX_set_options(c->ctx, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION);
    (void)SSL_CTX_set_mode(c->ctx, SSL_MODE_RELEASE_BUFFERS);
    return c;
}

enum bt_status bt_tls_server_ctx(const char *cert, const char *key, struct bt_tls_ctx **out,
                                 struct bt_err *err)
{
    struct bt_tls_ctx *c = ctx_new(TLS_server_method());
    char why[200];

    if (c == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "tls: no memory");
    }
    if (SSL_CTX_use_certificate_chain_file(c->ctx, cert) != 1) {
        bt_tls_ctx_destroy(c);
        return bt_err_set(err, BT_ERR_IO, "certificate %s: %s", cert,
                          openssl_reason(why, sizeof why));
    }
    if (SSL_CTX_use_PrivateKey_file(c->ctx, key, SSL_FILETYPE_PEM) != 1 ||
        SSL_CTX_check_private_key(c->ctx) != 1) {
        bt_tls_ctx_destroy(c);
        return bt_err_set(err, BT_ERR_IO, "key %s: %s", key, openssl_reason(why, sizeof why));
    }
    SSL_CTX_set_alpn_select_cb(c->ctx, alpn_select, NULL);
    *out = c;
    return BT_OK;
}

enum bt_status bt_tls_client_ctx(const char *ca, bool insecure, struct bt_tls_ctx **out,
                                 struct bt_err *err)
{
    static const unsigned char h2[] = "\x02h2";
    struct bt_tls_ctx *c = ctx_new(TLS_client_method());
    char why[200];

    if (c == NULL || SSL_CTX_set_alpn_protos(c->ctx, h2, sizeof h2 - 1) != 0) {
        bt_tls_ctx_destroy(c);
        return bt_err_set(err, BT_ERR_NOMEM, "tls: no memory");
    }
    int ok = ca != NULL ? SSL_CTX_load_verify_locations(c->ctx, ca, NULL)
                        : SSL_CTX_set_default_verify_paths(c->ctx);
    if (ok != 1) {
        bt_tls_ctx_destroy(c);
        return bt_err_set(err, BT_ERR_IO, "ca file %s: %s", ca != NULL ? ca : "(system)",
                          openssl_reason(why, sizeof why));
    }
    c->insecure = insecure;
    SSL_CTX_set_verify(c->ctx, insecure ? SSL_VERIFY_NONE : SSL_VERIFY_PEER, NULL);
    *out = c;
    return BT_OK;
}

void bt_tls_ctx_destroy(struct bt_tls_ctx *c)
{
    if (c != NULL) {
        SSL_CTX_free(c->ctx);
        bt_free(c);
    }
}

static bool set_peer_name(SSL *ssl, const char *host)
{
    struct in6_addr any;

    if (inet_pton(AF_INET, host, &any) == 1 || inet_pton(AF_INET6, host, &any) == 1) {
        return X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), host) == 1;
    }
    return SSL_set1_host(ssl, host) == 1 && SSL_set_tlsext_host_name(ssl, host) == 1;
}

struct bt_tls *bt_tls_create(struct bt_tls_ctx *c, const char *host)
{
    struct bt_tls *t = bt_calloc(1, sizeof *t);

    if (t == NULL) {
        return NULL;
    }
    t->ssl = SSL_new(c->ctx);
    t->in = BIO_new(BIO_s_mem());
    t->out = BIO_new(BIO_s_mem());
    if (t->ssl == NULL || t->in == NULL || t->out == NULL) {
        BIO_free(t->in);
        BIO_free(t->out);
        goto err;
    }
    SSL_set_bio(t->ssl, t->in, t->out);
    if (host != NULL) {
        if (!c->insecure && !set_peer_name(t->ssl, host)) {
            goto err;
        }
        SSL_set_connect_state(t->ssl);
        (void)SSL_do_handshake(
            t->ssl); /* only writes the first message; failures show up in the feed */
        ERR_clear_error();
    } else {
        SSL_set_accept_state(t->ssl);
    }
    return t;
err:
    SSL_free(t->ssl);
    bt_free(t);
    return NULL;
}

void bt_tls_destroy(struct bt_tls *t)
{
    if (t != NULL) {
        SSL_free(t->ssl);
        bt_free(t);
    }
}

static enum bt_status fail(struct bt_tls *t)
{
    long verify = SSL_get_verify_result(t->ssl);

    if (verify != X509_V_OK) {
        (void)snprintf(t->why, sizeof t->why, "certificate: %s",
                       X509_verify_cert_error_string(verify));
        ERR_clear_error();
    } else {
        (void)openssl_reason(t->why, sizeof t->why);
    }
    return BT_ERR_PROTOCOL;
}

enum bt_status bt_tls_feed(struct bt_tls *t, const char *data, size_t len, struct bt_buf *plain,
                           bool *eof)
{
    *eof = false;
    if (len > INT_MAX || BIO_write(t->in, data, (int)len) != (int)len) {
        (void)snprintf(t->why, sizeof t->why, "no memory");
        return BT_ERR_NOMEM;
    }
    for (;;) {
        if (!bt_buf_reserve(plain, TLS_CHUNK)) {
            (void)snprintf(t->why, sizeof t->why, "no memory");
            return BT_ERR_NOMEM;
        }
        int n = SSL_read(t->ssl, plain->data + plain->len, TLS_CHUNK);
        if (n > 0) {
            plain->len += (size_t)n;
            plain->data[plain->len] = '\0';
            continue;
        }
        int e = SSL_get_error(t->ssl, n);
        if (e == SSL_ERROR_WANT_READ || e == SSL_ERROR_WANT_WRITE) {
            return BT_OK;
        }
        if (e == SSL_ERROR_ZERO_RETURN) {
            *eof = true;
            return BT_OK;
        }
        return fail(t);
    }
}

bool bt_tls_ready(const struct bt_tls *t)
{
    return SSL_is_init_finished(t->ssl) == 1;
}

bool bt_tls_is_h2(const struct bt_tls *t)
{
    const unsigned char *p = NULL;
    unsigned n = 0;

    SSL_get0_alpn_selected(t->ssl, &p, &n);
    return n == 2 && memcmp(p, "h2", 2) == 0;
}

enum bt_status bt_tls_write(struct bt_tls *t, const char *data, size_t len)
{
    while (len > 0) {
        int part = len > TLS_CHUNK ? TLS_CHUNK : (int)len;
        int n = SSL_write(t->ssl, data, part);
        if (n <= 0) {
            return fail(t); /* a memory BIO takes everything: this is no "would block" */
        }
        data += n;
        len -= (size_t)n;
    }
    return BT_OK;
}

void bt_tls_close_notify(struct bt_tls *t)
{
    if (bt_tls_ready(t)) {
        (void)SSL_shutdown(t->ssl); /* only queues the alert */
        ERR_clear_error();
    }
}

bool bt_tls_output(struct bt_tls *t, struct bt_buf *out)
{
    size_t n = BIO_ctrl_pending(t->out);

    if (n == 0) {
        return true;
    }
    if (!bt_buf_reserve(out, n)) {
        return false;
    }
    int got = BIO_read(t->out, out->data + out->len, (int)n);
    if (got > 0) {
        out->len += (size_t)got;
        out->data[out->len] = '\0';
    }
    return true;
}

const char *bt_tls_error(const struct bt_tls *t)
{
    return t->why;
}
