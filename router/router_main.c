/* baton-router: front end and brain. Options, wiring, draining, exit codes. */

#include <errno.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include "base/assert.h"
#include "base/clock.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/notify.h"
#include "base/options.h"
#include "net/grpc.h"
#include "net/http.h"
#include "router/admin_grpc.h"
#include "router/generate.h"
#include "router/inference_grpc.h"
#include "router/openai_http.h"
#include "router/request_log.h"
#include "router/router_int.h"
#include "router/router_model.h"
#include "router/session_io.h"

#define GRPC_BYTES_MAX   ((size_t)32 << 20)
#define DRAIN_POLL_NS    (20 * BT_NS_PER_MS)
#define DRAIN_LINGER_NS  (BT_NS_PER_S / 2) /* idle clients may read the goodbye so long */
#define LOCAL_TOKENS_MAX 1000000000u
#define DRAIN_CUT_NS     (2 * BT_NS_PER_S) /* from the errors that end what still runs to the end */
#define BUCKETS_TTFT     "0.001,0.0025,0.005,0.01,0.025,0.05,0.1,0.25,0.5,1,2.5,5,10,30,60"
#define BUCKETS_ITL      "0.0005,0.001,0.0025,0.005,0.01,0.025,0.05,0.1,0.25,0.5,1,2.5,5"
#define BUCKETS_REQUEST  "0.01,0.025,0.05,0.1,0.25,0.5,1,2.5,5,10,30,60,120,300,600"

struct config {
    char *listen, *sessions, *model, *model_name, *api_key_file, *admin_key_file, *local_prefill,
        *tls_cert, *tls_key, *name, *request_log;
    char *buckets_ttft, *buckets_itl, *buckets_request;
    uint32_t queue_max, seqs_max, nodes_max, attempts, connections;
    uint64_t max_ttft, queue_timeout, no_node_grace, migrate_grace, progress_timeout, heartbeat,
        lease, request_timeout, drain_timeout;
    uint64_t body_bytes, idle_timeout, write_timeout;
};

#define ROW(name, type, field, dflt, min, max, arg, help)                                          \
    {name, type, offsetof(struct config, field), dflt, min, max, NULL, arg, help}

static const struct bt_opt options[] = {
    ROW("listen", BT_OPT_STR, listen, "127.0.0.1:8000", 0, 0, "HOST:PORT",
        "Address for clients: gRPC and OpenAI-compatible HTTP on one port. Port 0 picks a free one "
        "and logs it."),
    ROW("sessions", BT_OPT_STR, sessions, "127.0.0.1:7001", 0, 0, "HOST:PORT",
        "Address that the daemons dial. Keep it inside the cluster: whoever reaches it can join."),
    ROW("model", BT_OPT_STR, model, NULL, 0, 0, "DIR_OR_GGUF",
        "Model directory or .gguf file; only the tokenizer and the chat template are read."),
    ROW("model-name", BT_OPT_STR, model_name, NULL, 0, 0, "NAME",
        "Name of the model for clients (default: the base name of --model)."),
    ROW("api-key-file", BT_OPT_STR, api_key_file, NULL, 0, 0, "FILE",
        "File with one API key a line, optionally followed by a name. Without it no key is asked "
        "for."),
    ROW("admin-key-file", BT_OPT_STR, admin_key_file, NULL, 0, 0, "FILE",
        "The same for keys that administer: baton drain, baton role. Without it that is done from "
        "this machine only; API keys never do it."),
    ROW("local-prefill", BT_OPT_STR, local_prefill, "never", 0, 0, "never|auto|always|TOKENS",
        "Whose prompts a decode node computes itself: nobody's; those with which that is quicker, "
        "as "
        "far as measured; everybody's (prefill nodes are not needed then); those with at most so "
        "many "
        "tokens that the node has not cached."),
    ROW("name", BT_OPT_STR, name, "router", 0, 0, "NAME",
        "Name of this router in the daemons' logs."),
    ROW("tls-cert", BT_OPT_STR, tls_cert, NULL, 0, 0, "FILE",
        "PEM certificate chain: clients must use TLS then."),
    ROW("tls-key", BT_OPT_STR, tls_key, NULL, 0, 0, "FILE", "PEM private key of --tls-cert."),
    ROW("request-log", BT_OPT_STR, request_log, NULL, 0, 0, "FILE",
        "Appends one line of JSON for each finished request: where its time went, on which nodes, "
        "why "
        "it ended; no text of it. SIGHUP opens the file anew. `baton trace` draws it."),
    ROW("queue-max", BT_OPT_U32, queue_max, "1024", 1, 1e6, "N",
        "Sequences that may wait for a node; more are refused (429, RESOURCE_EXHAUSTED)."),
    ROW("seqs-max", BT_OPT_U32, seqs_max, "16384", 1, 1e6, "N",
        "Sequences known at once, running ones included."),
    ROW("nodes-max", BT_OPT_U32, nodes_max, "1024", 2, 65536, "N",
        "Daemons with a session at once."),
    ROW("max-ttft", BT_OPT_DURATION, max_ttft, "0", 0, 3600e9, "MS",
        "A request whose first token is predicted to come later is refused (429, "
        "RESOURCE_EXHAUSTED, with the wait to expect): at once, or while it waits, if others take "
        "longer than was predicted. In ms; 0: never."),
    ROW("queue-timeout", BT_OPT_DURATION, queue_timeout, "30s", 0, 3600e9, "MS",
        "Longest wait for room on a node before a request is refused, in ms."),
    ROW("no-node-grace", BT_OPT_DURATION, no_node_grace, "1s", 0, 3600e9, "MS",
        "The same while no pair of nodes is connected, for requests that have not begun, in ms."),
    ROW("migrate-grace", BT_OPT_DURATION, migrate_grace, "10s", 0, 3600e9, "MS",
        "The same for requests that have begun and lost their nodes, in ms."),
    ROW("progress-timeout", BT_OPT_DURATION, progress_timeout, "5min", 0, 86400e9, "MS",
        "An attempt without a new token for so long (and four times what its prompt should take) "
        "is given up and tried elsewhere, in ms; 0: never."),
    ROW("attempts", BT_OPT_U32, attempts, "6", 1, 100, "N",
        "Attempts in a row without a new token before a request fails."),
    ROW("heartbeat", BT_OPT_DURATION, heartbeat, "250ms", 1e6, 60e9, "MS",
        "Pause between heartbeats to nodes, in ms."),
    ROW("lease", BT_OPT_DURATION, lease, "3s", 1e7, 600e9, "MS",
        "Silence after which a node counts as lost, in ms."),
    ROW("request-timeout", BT_OPT_DURATION, request_timeout, "0", 0, 86400e9, "MS",
        "Longest time of a request (408, DEADLINE_EXCEEDED), in ms; 0: none."),
    ROW("drain-timeout", BT_OPT_DURATION, drain_timeout, "30s", 0, 86400e9, "MS",
        "After SIGTERM running requests get so long to end, in ms."),
    ROW("body-bytes-max", BT_OPT_SIZE, body_bytes, "32MiB", 1024, 1e9, "SIZE",
        "Longest request body over HTTP (413)."),
    ROW("connections-max", BT_OPT_U32, connections, "4096", 1, 1e6, "N",
        "Client connections at once."),
    ROW("idle-timeout", BT_OPT_DURATION, idle_timeout, "5min", 1e9, 86400e9, "MS",
        "A client connection without a request is closed after, in ms."),
    ROW("write-timeout", BT_OPT_DURATION, write_timeout, "60s", 1e8, 3600e9, "MS",
        "A client that takes nothing of its answer for so long is cut off, in ms."),
    ROW("buckets-ttft", BT_OPT_STR, buckets_ttft, BUCKETS_TTFT, 0, 0, "LIST",
        "Histogram buckets of first-token, queue, prefill and transfer times, in seconds."),
    ROW("buckets-itl", BT_OPT_STR, buckets_itl, BUCKETS_ITL, 0, 0, "LIST",
        "Histogram buckets of inter-token latencies, in seconds."),
    ROW("buckets-request", BT_OPT_STR, buckets_request, BUCKETS_REQUEST, 0, 0, "LIST",
        "Histogram buckets of whole requests, in seconds."),
};

static const struct bt_prog prog = {
    .name = "baton-router",
    .summary = "Front end of a Baton cluster: takes requests over gRPC and OpenAI-compatible HTTP, "
               "places them on pairs of\n"
               "prefill and decode nodes, and streams the answers.",
    .epilogue = "Example:\n"
                "  baton-router --model ./SmolLM2-135M-Instruct.gguf --listen 127.0.0.1:8000 "
                "--sessions 127.0.0.1:7001\n",
    .opts = options,
    .n_opts = sizeof options / sizeof options[0],
};

struct program {
    struct config cfg;
    struct bt_router router;
    struct bt_router_model model;
    struct bt_http_server *http;
    struct bt_net_signal *sigterm, *sigint, *sighup;
    struct bt_timer drain_timer;
    uint64_t drain_end, linger_end;
    bool http_draining, cut;
};

/* ---- draining ---- */

static void stop_when_drained(void *arg)
{
    struct program *p = arg;

    bt_log_info("router", "drained");
    bt_net_loop_stop(p->router.loop);
}

/* New requests are refused and health says so while running ones end; then the connections are told to go. */
static void on_drain_poll(struct bt_timer *t, void *arg)
{
    struct program *p = arg;
    uint64_t now = bt_net_loop_now(p->router.loop);

    if (now >= p->drain_end && p->cut) {
        bt_net_loop_stop(p->router.loop);
        return;
    }
    if (now >= p->drain_end) {
        struct bt_api_err e = {0};

        bt_log_warn("router", "%u requests still run after the drain timeout: they end now",
                    p->router.n_gens);
        (void)bt_api_fail(
            &e, BT_API_UNAVAILABLE, NULL,
            "the router is shutting down; another one, or this one later, will serve it");
        bt_gen_end_all(&p->router, &e);
        p->cut = true;
        p->drain_end = now + DRAIN_CUT_NS;
    }
    if (!p->http_draining && p->router.n_gens == 0) {
        p->http_draining = true;
        p->linger_end = now + DRAIN_LINGER_NS;
        bt_http_server_drain(p->http, stop_when_drained, p);
    } else if (p->http_draining && now >= p->linger_end && bt_http_server_streams(p->http) == 0) {
        stop_when_drained(p);
        return;
    }
    bt_timer_start(p->router.loop, t, DRAIN_POLL_NS, on_drain_poll, p);
}

static void on_signal(void *arg, int signum)
{
    struct program *p = arg;

    if (p->router.draining) {
        bt_log_info("router", "second signal %d: stopping now", signum);
        bt_net_loop_stop(p->router.loop);
        return;
    }
    bt_log_info("router", "draining: %u requests run", p->router.n_gens);
    bt_notify("STOPPING=1");
    bt_router_drain(&p->router);
    p->drain_end = bt_net_loop_now(p->router.loop) + p->cfg.drain_timeout;
    on_drain_poll(&p->drain_timer, p);
}

static void on_hup(void *arg, int signum)
{
    struct program *p = arg;

    (void)signum;
    if (p->router.request_log != NULL) {
        bt_request_log_reopen(p->router.request_log);
    } else {
        bt_log_info("router", "SIGHUP: there is no --request-log to open anew");
    }
}

/* ---- start ---- */

static enum bt_status start_request_log(struct program *p, struct bt_err *err)
{
    struct bt_router *r = &p->router;
    enum bt_status st = bt_request_log_open(r->loop, p->cfg.request_log, 0, &r->request_log, err);

    if (st != BT_OK) {
        bt_err_prefix(err, "--request-log");
    }
    return st;
}

static enum bt_status parse_local(const char *text, struct bt_rt_opts *o, struct bt_err *err)
{
    static const char *const words[] = {[BT_RT_LOCAL_NEVER] = "never",
                                        [BT_RT_LOCAL_AUTO] = "auto",
                                        [BT_RT_LOCAL_ALWAYS] = "always"};
    char *end = NULL;

    for (unsigned i = 0; i < sizeof words / sizeof words[0]; i++) {
        if (strcmp(text, words[i]) == 0) {
            o->local_prefill = (enum bt_rt_local)i;
            return BT_OK;
        }
    }
    errno = 0;
    unsigned long n = strtoul(text, &end, 10);

    if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0 || n > LOCAL_TOKENS_MAX) {
        return bt_err_set(
            err, BT_ERR_INVALID,
            "--local-prefill %s: not never, auto, always or a number of tokens up to %u", text,
            LOCAL_TOKENS_MAX);
    }
    o->local_prefill = n > 0 ? BT_RT_LOCAL_TOKENS : BT_RT_LOCAL_NEVER;
    o->local_tokens = (uint32_t)n;
    return BT_OK;
}

static enum bt_status check_config(struct program *p, struct bt_err *err)
{
    struct bt_rt_opts o = {0};
    const struct config *c = &p->cfg;

    if (c->model == NULL) {
        return bt_err_set(err, BT_ERR_INVALID, "--model DIR_OR_GGUF is missing");
    }
    if (parse_local(c->local_prefill, &o, err) != BT_OK) {
        return BT_ERR_INVALID;
    }
    if ((c->tls_cert == NULL) != (c->tls_key == NULL)) {
        return bt_err_set(err, BT_ERR_INVALID, "--tls-cert and --tls-key: only together");
    }
    if (bt_opt_check_lease(c->lease, c->heartbeat, err) != BT_OK) {
        return BT_ERR_INVALID;
    }
    return bt_router_metrics_init(&p->router.metrics, c->buckets_ttft, c->buckets_itl,
                                  c->buckets_request, err);
}

static enum bt_status start_front(struct program *p, struct bt_err *err)
{
    struct bt_grpc_server_opts grpc = {.message_bytes_max = GRPC_BYTES_MAX};
    struct bt_http_server_opts http = {
        .listen = p->cfg.listen,
        .tls_cert = p->cfg.tls_cert,
        .tls_key = p->cfg.tls_key,
        .on_request = bt_openai_on_request,
        .error_body = bt_openai_error_body,
        .arg = &p->router,
        .body_bytes_max = p->cfg.body_bytes,
        .connections_max = p->cfg.connections,
        .idle_timeout_ns = p->cfg.idle_timeout,
        .write_timeout_ns = p->cfg.write_timeout,
    };
    enum bt_status st = bt_grpc_server_create(p->router.loop, &grpc, &p->router.grpc);

    if (st == BT_OK) {
        st = bt_inference_grpc_add(p->router.grpc, &p->router);
    }
    if (st == BT_OK) {
        st = bt_admin_grpc_add(p->router.grpc, &p->router);
    }
    if (st != BT_OK) {
        return bt_err_set(err, st, "out of memory");
    }
    st = bt_http_server_create(p->router.loop, &http, &p->http, err);
    if (st != BT_OK) {
        bt_err_prefix(err, "--listen");
        return st;
    }
    bt_grpc_server_attach(p->router.grpc, p->http);
    bt_router_tell_health(&p->router);
    return BT_OK;
}

static enum bt_status start_core(struct program *p)
{
    struct bt_router *r = &p->router;
    const struct config *c = &p->cfg;
    struct bt_rt_opts opts = {
        .name = c->name,
        .seqs_max = c->seqs_max,
        .queue_max = c->queue_max,
        .nodes_max = c->nodes_max,
        .attempts_max = c->attempts,
        .max_ttft_ns = c->max_ttft,
        .queue_ns = c->queue_timeout,
        .grace_ns = c->no_node_grace,
        .migrate_ns = c->migrate_grace,
        .progress_ns = c->progress_timeout,
        .lease_ns = c->lease,
        .heartbeat_ns = c->heartbeat,
        .backoff_ns = 20 * BT_NS_PER_MS,
    };
    struct bt_err none = {0};
    enum bt_status st = parse_local(c->local_prefill, &opts, &none);

    BT_ASSERT(st == BT_OK); /* checked at start */

    bt_random_bytes(opts.seed, sizeof opts.seed);
    bt_random_bytes(&r->instance, sizeof r->instance);
    opts.instance = r->instance;
    r->tok = p->model.tok;
    r->tmpl = p->model.tmpl.tmpl;
    r->bos = p->model.tmpl.bos_token;
    r->eos = p->model.tmpl.eos_token;
    r->model_name = c->model_name != NULL ? c->model_name : p->model.name;
    r->started_unix = bt_clock_unix_ns() / BT_NS_PER_S;
    r->request_timeout_ns = c->request_timeout;
    r->local_prefill = c->local_prefill;
    return bt_router_start(r, &opts);
}

static enum bt_status start(struct program *p, struct bt_err *err)
{
    enum bt_status st = check_config(p, err);

    if (st == BT_OK && p->cfg.api_key_file != NULL) {
        st = bt_router_keys_load(&p->router.keys, "--api-key-file", p->cfg.api_key_file, err);
    }
    if (st == BT_OK && p->cfg.admin_key_file != NULL) {
        st = bt_router_keys_load(&p->router.admin_keys, "--admin-key-file", p->cfg.admin_key_file,
                                 err);
    }
    if (st == BT_OK) {
        st = bt_router_keys_check(&p->router, err);
    }
    if (st == BT_OK) {
        st = bt_router_model_load(p->cfg.model, &p->model, err);
    }
    if (st == BT_OK && (bt_net_loop_create(&p->router.loop) != BT_OK || start_core(p) != BT_OK)) {
        st = bt_err_set(err, BT_ERR_NOMEM,
                        "out of memory, or of address space: %u sequences (--seqs-max) reserve "
                        "%u MiB each",
                        (unsigned)p->cfg.seqs_max,
                        (unsigned)(BT_SESSION_TOKENS_MAX * sizeof(uint32_t) >> 20));
    }
    if (st == BT_OK && p->cfg.request_log != NULL) {
        st = start_request_log(p, err);
    }
    if (st == BT_OK) {
        st = start_front(p, err);
    }
    if (st == BT_OK) {
        st = bt_sessions_create(&p->router, p->cfg.sessions, &p->router.sessions, err);
        if (st != BT_OK) {
            bt_err_prefix(err, "--sessions");
        }
    }
    if (st == BT_OK &&
        (bt_net_signal_start(p->router.loop, SIGTERM, on_signal, p, &p->sigterm) != BT_OK ||
         bt_net_signal_start(p->router.loop, SIGINT, on_signal, p, &p->sigint) != BT_OK ||
         bt_net_signal_start(p->router.loop, SIGHUP, on_hup, p, &p->sighup) != BT_OK)) {
        st = bt_err_set(err, BT_ERR_NOMEM, "out of memory");
    }
    return st;
}

static void stop(struct program *p)
{
    struct bt_router *r = &p->router;

    if (r->loop != NULL) {
        bt_timer_stop(r->loop, &p->drain_timer);
        bt_net_signal_stop(p->sigterm);
        bt_net_signal_stop(p->sigint);
        bt_net_signal_stop(p->sighup);
        bt_http_server_close(p->http);
        bt_grpc_server_destroy(r->grpc);
        r->grpc = NULL;
        bt_sessions_destroy(r->sessions);
        if (r->core != NULL) {
            bt_router_stop(r);
        }
        bt_request_log_close(r->request_log);
        bt_net_loop_destroy(r->loop);
    }
    bt_router_model_fini(&p->model);
    bt_router_keys_free(&r->keys);
    bt_router_keys_free(&r->admin_keys);
    bt_opt_free(&prog, &p->cfg);
}

/* Every client and daemon is a descriptor. */
static void raise_descriptors(uint32_t connections)
{
    struct rlimit l;

    if (getrlimit(RLIMIT_NOFILE, &l) != 0 || l.rlim_cur >= l.rlim_max) {
        return;
    }
    rlim_t want = (rlim_t)connections * 2 + 4096;

    l.rlim_cur = l.rlim_max == RLIM_INFINITY || want < l.rlim_max ? want : l.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &l) != 0) {
        bt_log_warn("router", "cannot raise the limit of open files: %s", strerror(errno));
    }
}

int main(int argc, char **argv)
{
    static struct program p;
    struct bt_opt_result res;
    struct bt_err err = {0};

    if (bt_opt_parse(&prog, argc, argv, &p.cfg, &res, &err) != BT_OK) {
        fprintf(stderr, "baton-router: %s\n", err.msg);
        return 2;
    }
    if (res.exit_now) {
        bt_opt_free(&prog, &p.cfg);
        return 0;
    }
    bt_log_thread("loop");
    bt_mem_return_large();
    raise_descriptors(p.cfg.connections);
    json_object_seed(0);
    enum bt_status st = start(&p, &err);

    if (st != BT_OK) {
        fprintf(stderr, "baton-router: %s\n", err.msg);
        stop(&p);
        return st == BT_ERR_INVALID ? 2 : 1;
    }
    bt_log_info("router", "model %s: %u tokens%s", p.router.model_name,
                bt_tokenizer_vocab_size(p.router.tok),
                p.router.tmpl != NULL ? ", chat template" : ", no chat template");
    bt_log_info("router", "listening on %s://%s", p.cfg.tls_cert != NULL ? "https" : "http",
                bt_http_server_address(p.http));
    bt_log_info("router", "sessions on %s", bt_sessions_address(p.router.sessions));
    bt_log_info("router", "ready");
    bt_notify("READY=1");
    bt_net_loop_run(p.router.loop);
    stop(&p);
    return 0;
}
