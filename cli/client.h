#ifndef BT_CLI_CLIENT_H
#define BT_CLI_CLIENT_H

/* A client of baton.v1.Inference for programs that wait: each call runs the loop until it has
 * ended. One thread. */

#include <stdbool.h>
#include <stdint.h>
#include "base/options.h"
#include "base/status.h"
#include "proto/inference.h"

struct bt_client;

/* Options that every client command has; the rows for an option table of `type` with a member
 * `conn` of this type. */
struct bt_client_cfg {
    char *server, *api_key, *tls_ca;
    bool tls;
};
#define BT_CLIENT_ROWS(type)                                                                         \
    {"server", BT_OPT_STR,  offsetof(type, conn.server), "127.0.0.1:8000", 0, 0,                     \
     NULL,     "HOST:PORT", "The router to talk to."},                                               \
        {"api-key", BT_OPT_STR, offsetof(type, conn.api_key),                                        \
         NULL,      0,          0,                                                                   \
         NULL,      "KEY",      "Key to present, where the router asks for one."},                   \
        {"tls", BT_OPT_BOOL, offsetof(type, conn.tls), NULL, 0, 0, NULL, NULL, "Connect with TLS."}, \
    {                                                                                                \
        "tls-ca", BT_OPT_STR, offsetof(type, conn.tls_ca), NULL, 0, 0, NULL, "FILE",                 \
            "Certificates to trust (PEM); default: the system's."                                    \
    }

enum bt_status bt_client_create(const struct bt_client_cfg *cfg, struct bt_client **out,
                                struct bt_err *err) BT_NODISCARD;
void bt_client_destroy(struct bt_client *c);
/* The key that calls present from now on, instead of the options'; NULL: none. */
void bt_client_present(struct bt_client *c, const char *key);

/* One request, one answer, appended to `reply`. The error text names status and server. timeout_ns
 * 0: none. */
enum bt_status bt_client_unary(struct bt_client *c, const char *path, const struct bt_buf *request,
                               struct bt_buf *reply, uint64_t timeout_ns,
                               struct bt_err *err) BT_NODISCARD;

/* Called for each message of the stream; m is borrowed for the call. */
typedef void bt_client_delta_fn(void *arg, const struct bt_inf_generated *m);
/* BT_ERR_CANCELLED: Ctrl-C ended it. */
enum bt_status bt_client_generate(struct bt_client *c, const struct bt_inf_generate *req,
                                  bt_client_delta_fn *on_delta, void *arg,
                                  struct bt_err *err) BT_NODISCARD;

/* From now on SIGINT is noticed here: it ends a running generate, or makes the next call of this
 * function true once. */
enum bt_status bt_client_catch_interrupt(struct bt_client *c) BT_NODISCARD;
bool bt_client_interrupted(struct bt_client *c);
/* Runs the loop for so long, so that signals and connections are served. */
void bt_client_idle(struct bt_client *c, uint64_t ns);

/* One line per phase, on standard error: where each millisecond went. */
void bt_client_print_timings(const struct bt_inf_timings *t, const struct bt_inf_usage *u);

#endif
