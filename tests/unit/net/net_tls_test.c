/* gRPC and HTTP through TLS, client and server ours: ALPN, certificate checks, plain text on a TLS
 * port. */

#include "net/grpc.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include "base/clock.h"
#include "base/mem.h"
#include "echo_service.h"
#include "net/loop.h"
#include "tests/check.h"

static char cert_path[64], key_path[64];

/* A self-signed certificate for 127.0.0.1, valid for an hour. */
static bool make_certificate(void)
{
    EVP_PKEY *key = EVP_EC_gen("P-256");
    X509 *x = X509_new();
    bool ok = false;

    if (key != NULL && x != NULL) {
        X509_NAME *name = X509_get_subject_name(x);
        X509_EXTENSION *san = X509V3_EXT_conf_nid(NULL, NULL, NID_subject_alt_name, "IP:127.0.0.1");
        ASN1_INTEGER_set(X509_get_serialNumber(x), 1);
        X509_set_version(x, 2);
        X509_gmtime_adj(X509_getm_notBefore(x), -60);
        X509_gmtime_adj(X509_getm_notAfter(x), 3600);
        X509_set_pubkey(x, key);
        X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, (const unsigned char *)"test", -1, -1,
                                   0);
        X509_set_issuer_name(x, name);
        X509_add_ext(x, san, -1);
        X509_EXTENSION_free(san);
        (void)snprintf(cert_path, sizeof cert_path, "/tmp/bt_cert_%d.pem", (int)getpid());
        (void)snprintf(key_path, sizeof key_path, "/tmp/bt_key_%d.pem", (int)getpid());
        FILE *c = fopen(cert_path, "w"), *k = fopen(key_path, "w");
        ok = c != NULL && k != NULL && X509_sign(x, key, EVP_sha256()) > 0 &&
             PEM_write_X509(c, x) == 1 &&
             PEM_write_PrivateKey(k, key, NULL, NULL, 0, NULL, NULL) == 1;
        if (c != NULL) {
            fclose(c);
        }
        if (k != NULL) {
            fclose(k);
        }
    }
    X509_free(x);
    EVP_PKEY_free(key);
    return ok;
}

struct client {
    uint64_t bytes;
    int closes;
    enum bt_grpc_status status;
    char message[256];
};

static void on_message(struct bt_grpc_call *c, void *user, const uint8_t *data, size_t len)
{
    struct client *k = user;

    (void)c;
    (void)data;
    k->bytes += len;
}

static void on_close(struct bt_grpc_call *c, void *user, const struct bt_grpc_end *end)
{
    struct client *k = user;

    (void)c;
    k->closes++;
    k->status = end->status;
    (void)snprintf(k->message, sizeof k->message, "%s", end->message);
}

static void call(struct bt_net_loop *l, const struct bt_grpc_channel_opts *co, const char *path,
                 struct client *k)
{
    static const struct bt_grpc_events events = {.on_message = on_message, .on_close = on_close};
    struct bt_grpc_start s = {.path = path, .timeout_ns = 10 * BT_NS_PER_S};
    struct bt_grpc_channel *ch = NULL;
    struct bt_grpc_call *c = NULL;
    struct bt_err err;

    memset(k, 0, sizeof *k);
    CHECK_EQ(bt_grpc_channel_create(l, co, &ch, &err), BT_OK);
    CHECK_EQ(bt_grpc_call_start(ch, &s, &events, k, &c), BT_OK);
    (void)bt_grpc_send(c, "1", 1);
    bt_grpc_half_close(c);
    while (k->closes == 0) {
        bt_net_loop_step(l, 50 * BT_NS_PER_MS);
    }
    bt_grpc_channel_destroy(ch);
}

int main(void)
{
    struct bt_net_loop *l = NULL;
    struct bt_grpc_server *g = NULL;
    struct bt_http_server *sv = NULL;
    struct echo_stats stats = {0};
    struct bt_err err = {.msg = ""};
    struct client k;

    if (!make_certificate()) {
        printf("skipped: cannot make a certificate\n");
        return BT_TEST_SKIP;
    }
    struct bt_http_server_opts o = {.listen = "127.0.0.1:0",
                                    .tls_cert = cert_path,
                                    .tls_key = key_path,
                                    .on_request = echo_on_request,
                                    .arg = &stats};
    CHECK_EQ(bt_net_loop_create(&l), BT_OK);
    CHECK_EQ(bt_grpc_server_create(l, NULL, &g), BT_OK);
    CHECK_EQ(bt_grpc_server_add(g, echo_methods, echo_n_methods, &stats), BT_OK);
    CHECK_EQ(bt_http_server_create(l, &o, &sv, &err), BT_OK);
    bt_grpc_server_attach(g, sv);
    struct bt_grpc_channel_opts co = {
        .address = bt_http_server_address(sv), .tls = true, .tls_ca = cert_path};
    call(l, &co, "/baton.test.Echo/Unary", &k);
    CHECK_EQ(k.status, BT_GRPC_OK);
    CHECK_EQ(k.bytes, 1);
    call(l, &co, "/baton.test.Echo/Flood", &k);
    CHECK_EQ(k.status, BT_GRPC_OK);
    CHECK_EQ(k.bytes, 64 << 20);
    co.tls_ca = NULL; /* not signed by anyone the system knows */
    call(l, &co, "/baton.test.Echo/Unary", &k);
    CHECK_EQ(k.status, BT_GRPC_UNAVAILABLE);
    CHECK(strstr(k.message, "certificate") != NULL);
    co.tls_insecure = true;
    call(l, &co, "/baton.test.Echo/Unary", &k);
    CHECK_EQ(k.status, BT_GRPC_OK);
    co.tls = false; /* plain text to a TLS port */
    call(l, &co, "/baton.test.Echo/Unary", &k);
    CHECK_EQ(k.status, BT_GRPC_UNAVAILABLE);
    bt_http_server_close(sv);
    bt_grpc_server_destroy(g);
    bt_net_loop_destroy(l);
    unlink(cert_path);
    unlink(key_path);
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
