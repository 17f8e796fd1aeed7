/* gRPC calls for a program that waits. Owns a loop of its own and one channel. */

#include "cli/client.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "base/clock.h"
#include "base/mem.h"
#include "cli/cli.h"
#include "net/grpc.h"
#include "net/loop.h"

#define REPLY_ARENA ((size_t)256 << 20)

struct bt_client {
    struct bt_net_loop *loop;
    struct bt_grpc_channel *channel;
    struct bt_net_signal *sigint;
    struct bt_arena arena;
    char auth[512];
    char server[256];
    bool tls;
    /* the running call */
    struct bt_grpc_call *call;
    bool done, interrupted, by_user;
    struct bt_grpc_end end;
    char message[400];
    struct bt_buf *reply;
    bt_client_delta_fn *on_delta;
    void *arg;
    enum bt_status status;
};

enum bt_status bt_client_create(const struct bt_client_cfg *cfg, struct bt_client **out,
                                struct bt_err *err)
{
    struct bt_client *c = bt_calloc(1, sizeof *c);

    if (c == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory");
    }
    bt_arena_init(&c->arena, REPLY_ARENA);
    snprintf(c->server, sizeof c->server, "%s", cfg->server);
    c->tls = cfg->tls;
    bt_client_present(c, cfg->api_key);
    enum bt_status st = bt_net_loop_create(&c->loop);

    if (st == BT_OK) {
        st = bt_grpc_channel_create(c->loop,
                                    &(struct bt_grpc_channel_opts){.address = cfg->server,
                                                                   .tls = cfg->tls,
                                                                   .tls_ca = cfg->tls_ca},
                                    &c->channel, err);
    }
    if (st != BT_OK) {
        bt_client_destroy(c);
        return st;
    }
    *out = c;
    return BT_OK;
}

void bt_client_present(struct bt_client *c, const char *key)
{
    c->auth[0] = '\0';
    if (key != NULL) {
        snprintf(c->auth, sizeof c->auth, "Bearer %s", key);
    }
}

void bt_client_destroy(struct bt_client *c)
{
    if (c == NULL) {
        return;
    }
    bt_net_signal_stop(c->sigint);
    bt_grpc_channel_destroy(c->channel);
    if (c->loop != NULL) {
        bt_net_loop_destroy(c->loop);
    }
    bt_arena_fini(&c->arena);
    bt_free(c);
}

/* ---- interrupt ---- */

static void on_sigint(void *arg, int signum)
{
    struct bt_client *c = arg;

    (void)signum;
    c->interrupted = true;
    if (c->call != NULL && !c->done) {
        c->by_user = true;
        bt_grpc_cancel(c->call);
    }
}

enum bt_status bt_client_catch_interrupt(struct bt_client *c)
{
    return bt_net_signal_start(c->loop, SIGINT, on_sigint, c, &c->sigint);
}

bool bt_client_interrupted(struct bt_client *c)
{
    bool was = c->interrupted;

    c->interrupted = false;
    return was;
}

void bt_client_idle(struct bt_client *c, uint64_t ns)
{
    bt_net_loop_step(c->loop, ns);
}

/* ---- calls ---- */

static void on_message(struct bt_grpc_call *call, void *user, const uint8_t *data, size_t len)
{
    struct bt_client *c = user;
    struct bt_err err = {0};
    struct bt_inf_generated m;

    if (c->on_delta == NULL) {
        if (!bt_buf_add(c->reply, data, len)) {
            c->status = BT_ERR_NOMEM;
        }
        return;
    }
    bt_arena_reset(&c->arena);
    c->status = bt_inf_generated_decode(data, len, &c->arena, &m, &err);
    if (c->status != BT_OK) {
        bt_grpc_cancel(call);
        return;
    }
    c->on_delta(c->arg, &m);
}

static void on_close(struct bt_grpc_call *call, void *user, const struct bt_grpc_end *end)
{
    struct bt_client *c = user;

    (void)call;
    c->call = NULL;
    c->done = true;
    c->end = *end;
    snprintf(c->message, sizeof c->message, "%s", end->message);
}

/* What helps against the usual reasons of a failed connection. */
static const char *advice(const struct bt_client *c)
{
    if (strstr(c->message, "refused") != NULL) {
        return " (is a cluster running there? `baton up` starts one, --server names another)";
    }
    return strstr(c->message, "certificate") != NULL ? " (--tls-ca FILE trusts more)" : "";
}

static enum bt_status run_call(struct bt_client *c, const char *path, const struct bt_buf *request,
                               uint64_t timeout_ns, struct bt_err *err)
{
    static const struct bt_grpc_events events = {.on_message = on_message, .on_close = on_close};
    struct bt_http_header auth = {"authorization", c->auth};

    c->done = c->by_user = false;
    c->status = BT_OK;
    enum bt_status st =
        bt_grpc_call_start(c->channel,
                           &(struct bt_grpc_start){.path = path,
                                                   .timeout_ns = timeout_ns,
                                                   .metadata = &auth,
                                                   .n_metadata = c->auth[0] != '\0'},
                           &events, c, &c->call);

    if (st != BT_OK) {
        return bt_err_set(err, st, "cannot start a call to %s", c->server);
    }
    (void)bt_grpc_send(c->call, request->data, request->len);
    bt_grpc_half_close(c->call);
    while (!c->done) {
        bt_net_loop_step(c->loop, BT_NS_PER_S);
    }
    if (c->by_user) {
        return bt_err_set(err, BT_ERR_CANCELLED, "stopped");
    }
    if (c->status != BT_OK) {
        return bt_err_set(err, c->status, "%s sent something else than an answer", c->server);
    }
    if (c->end.status == BT_GRPC_UNAVAILABLE && strncmp(c->message, "connect to ", 11) == 0) {
        return bt_err_set(err, BT_ERR_PEER_LOST, "cannot %s%s", c->message, advice(c));
    }
    if (c->end.status != BT_GRPC_OK) {
        return bt_err_set(
            err, c->end.status == BT_GRPC_UNAVAILABLE ? BT_ERR_PEER_LOST : BT_ERR_INVALID,
            "%s: %s (%s)%s", c->server, c->message, bt_grpc_status_name(c->end.status),
            !c->tls && strstr(c->message, "closed by the server") != NULL ? " (does it want --tls?)"
                                                                          : "");
    }
    return BT_OK;
}

enum bt_status bt_client_unary(struct bt_client *c, const char *path, const struct bt_buf *request,
                               struct bt_buf *reply, uint64_t timeout_ns, struct bt_err *err)
{
    c->on_delta = NULL;
    c->reply = reply;
    return run_call(c, path, request, timeout_ns, err);
}

enum bt_status bt_client_generate(struct bt_client *c, const struct bt_inf_generate *req,
                                  bt_client_delta_fn *on_delta, void *arg, struct bt_err *err)
{
    struct bt_buf b = {0};

    if (bt_inf_generate_encode(req, &b) != BT_OK) {
        bt_buf_fini(&b);
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory");
    }
    c->on_delta = on_delta;
    c->arg = arg;
    enum bt_status st = run_call(c, BT_INF_GENERATE, &b, 0, err);

    bt_buf_fini(&b);
    return st;
}

/* ---- timings ---- */

/* ", 27.1 tokens/s"; empty where there is nothing to divide. */
static const char *rate(char out[48], uint32_t tokens, double ms)
{
    out[0] = '\0';
    if (tokens > 0 && ms > 0) {
        snprintf(out, 48, ", %.1f tokens/s", tokens * 1000.0 / ms);
    }
    return out;
}

void bt_client_print_timings(const struct bt_inf_timings *t, const struct bt_inf_usage *u)
{
    const char *dim = bt_cli_style(STDERR_FILENO, BT_CLI_DIM);
    const char *off = bt_cli_style(STDERR_FILENO, BT_CLI_PLAIN);
    char read_rate[48], write_rate[48];
    const struct {
        const char *name;
        double ms;
        const char *what, *more;
    } rows[] = {
        {"tokenize", t->tokenize_ms, "text to tokens, in the router", ""},
        {"queue", t->queue_ms, "waiting for the prefill node", ""},
        {"prefill", t->prefill_ms, "reading the prompt",
         rate(read_rate, t->prefill_tokens, t->prefill_ms)},
        {"first token", t->first_token_ms, "from arrival to the first token (TTFT)", ""},
        {"transfer", t->transfer_ms, "first to last KV page on the wire, hidden under prefill", ""},
        {"transfer tail", t->transfer_tail_ms, "what was left of it after prefill", ""},
        {"decode", t->decode_ms, "writing the answer",
         rate(write_rate, t->decode_tokens, t->decode_ms)},
        {"detokenize", t->detokenize_ms, "tokens to text, in the router", ""},
    };

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        fprintf(stderr, "%s%14s %9.2f ms  %s%s%s\n", dim, rows[i].name, rows[i].ms, rows[i].what,
                rows[i].more, off);
    }
    char cached[48] = "";

    if (u->cached_tokens > 0) {
        snprintf(cached, sizeof cached, " (%u of them cached)", u->cached_tokens);
    }
    fprintf(stderr,
            "%s%14s %u prompt%s + %u answer; %u tokens (%.2f MiB of KV) moved from prefill to "
            "decode%s\n",
            dim, "tokens", u->prompt_tokens, cached, u->completion_tokens, u->transferred_tokens,
            (double)t->transferred_bytes / (1024.0 * 1024.0), off);
}
