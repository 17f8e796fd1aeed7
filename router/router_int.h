#ifndef BT_ROUTER_ROUTER_INT_H
#define BT_ROUTER_ROUTER_INT_H

/* Inside router/ only: what the front ends, the sessions and the generator share. Loop thread. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/hash.h"
#include "net/loop.h"
#include "router/api.h"
#include "router/metrics.h"
#include "router/router_core.h"
#include "text/template.h"
#include "text/tokenizer.h"

struct bt_sessions;
struct bt_gen;
struct bt_grpc_server;
struct bt_request_log;

struct bt_router_key {
    char *key;
    size_t len;
    char *name; /* may be told: never the key itself */
};

struct bt_router_keys {
    struct bt_router_key *list;
    size_t n;
};

struct bt_router {
    struct bt_net_loop *loop;
    struct bt_rt_core *core;
    struct bt_sessions *sessions;
    struct bt_grpc_server *grpc; /* front end; told about health */
    const struct bt_tokenizer *tok;
    const struct bt_template *tmpl; /* NULL: no chat template */
    const char *bos, *eos;          /* texts for the template; may be NULL */
    const char *model_name;
    const char *local_prefill; /* the option, as given */
    uint64_t instance, started_unix;
    uint64_t request_timeout_ns;      /* 0: none */
    uint32_t sequences_max;           /* of one request: as many as may wait */
    struct bt_router_keys keys;       /* of clients; none: nobody is asked for one */
    struct bt_router_keys admin_keys; /* of those who run the cluster */
    bool draining;
    size_t body_bytes; /* of requests that are being read */
    /* Of requests that were taken apart since memory was last given back to the system. */
    size_t parsed_bytes;
    uint64_t t_trim;
    bool trimming;
    struct bt_router_metrics metrics;
    struct bt_request_log *request_log; /* NULL: none is kept */
    /* generate.c */
    struct bt_map by_request_id; /* request id → address of its struct bt_gen */
    struct bt_gen *gens, *dirty, *garbage;
    uint32_t n_gens;
    struct bt_sampled *scratch; /* tokens of one piece */
    size_t cap_scratch;
    /* router_io.c */
    struct bt_task pump_task;
    struct bt_timer tick;
    bool pumping;
};

/* ---- router_io.c ---- */

/* Creates the core and starts the tick. The fields above generate.c's are set by the caller before. */
enum bt_status bt_router_start(struct bt_router *r, const struct bt_rt_opts *opts) BT_NODISCARD;
void bt_router_stop(struct bt_router *r);
/* Carries out what the core decided; from a session's callback. */
void bt_router_pump(struct bt_router *r);
/* The same, soon: for calls that must not call back. */
void bt_router_kick(struct bt_router *r);
/* Tells grpc.health.v1 whether requests can be served; once grpc is there, and after each change. */
void bt_router_tell_health(struct bt_router *r);
/* From here on new requests are refused. */
void bt_router_drain(struct bt_router *r);
/* ---- router_keys.c ---- */

/* Adds the keys of a file. One key a line, what follows a blank is its name (else "key-N", by its place in the file); empty lines and
 * such that begin with # are skipped. option: as which errors name the file. BT_ERR_IO, BT_ERR_INVALID (no key, a line or
 * file too long), BT_ERR_NOMEM. At start; blocks. */
enum bt_status bt_router_keys_load(struct bt_router_keys *k, const char *option, const char *path,
                                   struct bt_err *err) BT_NODISCARD;
/* BT_ERR_INVALID: a key stands in both files, and would make its clients administrators. */
enum bt_status bt_router_keys_check(const struct bt_router *r, struct bt_err *err) BT_NODISCARD;
void bt_router_keys_free(struct bt_router_keys *k);
/* Checks "Bearer KEY" (NULL: absent) of a client, and which one it is: its position in the file. Without keys always
 * true, and 0. */
bool bt_router_key_find(const struct bt_router *r, const char *authorization, uint32_t *key);
/* The same for who wants to see the nodes only: a client, or an administrator. */
bool bt_router_may_look(const struct bt_router *r, const char *authorization);
/* And for baton.v1.Admin: where there are admin keys, who has one, from anywhere; else who is on this machine. peer:
 * "HOST:PORT". False: *e says what to do. */
bool bt_router_may_administer(const struct bt_router *r, const char *authorization,
                              const char *peer, struct bt_api_err *e);
/* Name of the key at that position, lives as long as the router; NULL: none is asked for. */
const char *bt_router_key_name(const struct bt_router *r, uint32_t key);
/* Model, draining. */
bool bt_router_admit(const struct bt_router *r, const char *model, struct bt_api_err *e);
void bt_router_count_refusal(struct bt_router *r, const struct bt_api_err *e);
/* 24 hex digits and NUL. */
void bt_router_new_id(char out[25]);

#endif
