/* The fake cluster of the router's tests. */

#include "tests/unit/router/fake_cluster.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/clock.h"
#include "base/mem.h"
#include "router/generate.h"
#include "router/inference_grpc.h"
#include "router/openai_http.h"
#include "router/session_io.h"
#include "tests/check.h"

/* ---- vocabulary ---- */

static struct bt_tokenizer *make_tokenizer(void)
{
    static struct bt_tok_str tokens[FAKE_VOCAB];
    static float scores[FAKE_VOCAB];
    static int32_t types[FAKE_VOCAB];
    static char names[FAKE_VOCAB][8];
    static const char *const special[] = {"<unk>", "<s>", "</s>"};
    struct bt_tokenizer *t = NULL;
    struct bt_err err = {0};

    for (uint32_t i = 0; i < FAKE_VOCAB; i++) {
        if (i < 3) {
            snprintf(names[i], sizeof names[i], "%s", special[i]);
            types[i] = i == 0 ? BT_TOK_GGUF_UNKNOWN : BT_TOK_GGUF_CONTROL;
        } else if (i < 259) {
            snprintf(names[i], sizeof names[i], "<0x%02X>", i - 3);
            types[i] = BT_TOK_GGUF_BYTE;
        } else {
            snprintf(names[i], sizeof names[i], "%c", (char)('a' + (i - 259)));
            types[i] = BT_TOK_GGUF_NORMAL;
        }
        tokens[i] = (struct bt_tok_str){names[i], strlen(names[i])};
    }
    struct bt_tok_gguf g = {.model = "llama",
                            .tokens = tokens,
                            .scores = scores,
                            .types = types,
                            .n_tokens = FAKE_VOCAB,
                            .bos = FAKE_BOS,
                            .eos = FAKE_EOS,
                            .unk = 0,
                            .pad = BT_TOK_NONE,
                            .add_bos = true};

    if (bt_tokenizer_from_gguf("fake", &g, &t, &err) != BT_OK) {
        fprintf(stderr, "fake tokenizer: %s\n", err.msg);
        exit(1);
    }
    return t;
}

/* ---- what nodes answer ---- */

/* Prompts that end in 'y' get bytes of long characters, in 'z' an EOS as the fourth token. */
static const unsigned char long_text[] = "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\xff!";

static struct bt_sampled token_at(const struct fake_job *j, uint32_t index, uint32_t *finish)
{
    struct bt_sampled s = {.token = FAKE_LETTER('a' + (j->sum + index * 7 + j->choice * 3) % 26)};

    *finish = 0;
    if (j->last_prompt == FAKE_LETTER('y')) {
        s.token = FAKE_BYTE(long_text[index % (sizeof long_text - 1)]);
    } else if (j->last_prompt == FAKE_LETTER('z') && index == 3) {
        s.token = FAKE_EOS;
        *finish = 1;
    }
    s.logprob = -(float)(index + 1) / 8;
    s.n_top = j->n_top;
    for (uint32_t i = 0; i < s.n_top; i++) {
        s.top[i] =
            (struct bt_top_logprob){i == 0 ? s.token : FAKE_LETTER('a' + i), s.logprob - (float)i};
    }
    if (*finish == 0 && index + 1 == j->max_tokens) {
        *finish = 2;
    }
    return s;
}

static void send_message(struct fake_node *n, const struct bt_from_daemon *m)
{
    bt_buf_clear(&n->c->buf);
    CHECK_EQ(bt_from_daemon_encode(m, &n->c->buf), BT_OK);
    if (n->call != NULL) {
        (void)bt_grpc_send(n->call, n->c->buf.data, n->c->buf.len);
    }
}

/* false: the node is dead now. */
static bool send_tokens(struct fake_node *n, struct fake_job *j, uint32_t count, bool stats)
{
    struct bt_sampled list[64];
    struct bt_sampled *plp = NULL;
    uint32_t finish = 0, k = 0;
    struct bt_msg_output o = {
        .ticket = j->ticket, .index = j->index, .has_logprobs = j->logprobs, .tokens = list};

    while (k < count && finish == 0) {
        list[k++] = token_at(j, j->index++, &finish);
    }
    o.n_tokens = k;
    o.finish = finish;
    o.has_stats = stats || finish != 0;
    o.stats = n->role == BT_ROLE_PREFILL
                  ? (struct bt_msg_leg_stats){.queue_ns = 1000000,
                                              .prefill_ns = 2000000,
                                              .prefill_tokens = j->n_tokens}
                  : (struct bt_msg_leg_stats){.transfer_ns = 3000000,
                                              .transferred_tokens = j->n_prompt,
                                              .transferred_bytes = 100};
    if (j->prompt_logprobs) {
        plp = calloc(j->n_prompt, sizeof *plp);
        for (uint32_t i = 1; i < j->n_prompt; i++) {
            plp[i - 1] = (struct bt_sampled){.token = j->prompt[i], .logprob = -(float)i};
        }
        o.prompt_first = 1;
        o.n_prompt_logprobs = j->n_prompt - 1;
        o.prompt_logprobs = plp;
    }
    send_message(n, &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_OUTPUTS, .outputs = {1, &o}});
    free(plp);
    n->n_tokens_sent += k;
    if (finish != 0 || n->role == BT_ROLE_PREFILL) {
        free(j->prompt);
        j->prompt = NULL;
        j->used = false;
    }
    if (n->die_after != 0 && n->n_tokens_sent >= n->die_after) {
        fake_node_stop(n);
        return false;
    }
    return true;
}

static void on_tick(struct bt_timer *t, void *arg)
{
    struct fake_node *n = arg;

    for (uint32_t i = 0; i < FAKE_JOBS && !n->hold; i++) {
        if (n->jobs[i].used &&
            !send_tokens(n, &n->jobs[i], n->per_tick != 0 ? n->per_tick : 1, true)) {
            return;
        }
    }
    bt_timer_start(n->c->loop, t, BT_NS_PER_MS, on_tick, n);
}

static void on_submit(struct fake_node *n, const struct bt_msg_submit *s)
{
    struct fake_job *j = n->jobs;

    n->n_submits++;
    if (n->refuse > 0) {
        n->refuse--;
        send_message(
            n, &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_ATTEMPT_END,
                                        .attempt_end = {s->ticket, BT_ATTEMPT_REFUSED, "full"}});
        return;
    }
    while (j->used) {
        j++;
    }
    *j = (struct fake_job){.used = true,
                           .ticket = s->ticket,
                           .index = (uint32_t)s->n_tokens - s->n_prompt,
                           .n_prompt = s->n_prompt,
                           .n_tokens = (uint32_t)s->n_tokens,
                           .last_prompt = s->tokens[s->n_prompt - 1],
                           .choice = s->sampling.choice,
                           .max_tokens = s->sampling.max_tokens,
                           .logprobs = s->sampling.logprobs,
                           .n_top = s->sampling.n_top,
                           .prompt_logprobs = s->prompt_logprobs,
                           .peer = s->peer_instance};
    j->prompt = malloc(s->n_prompt * sizeof *j->prompt);
    memcpy(j->prompt, s->tokens, s->n_prompt * sizeof *j->prompt);
    for (uint32_t i = 0; i < s->n_prompt; i++) {
        j->sum += s->tokens[i];
    }
    if (n->role == BT_ROLE_PREFILL && !n->hold) {
        (void)send_tokens(n, j, 1, true);
    }
}

static void on_message(struct bt_grpc_call *call, void *user, const uint8_t *data, size_t len)
{
    struct fake_node *n = user;
    struct bt_from_router m;
    struct bt_err err = {0};

    (void)call;
    bt_arena_reset(&n->c->arena);
    CHECK_EQ(bt_from_router_decode(data, len, &n->c->arena, &m, &err), BT_OK);
    switch (m.kind) {
    case BT_FROM_ROUTER_WELCOME:
        n->up = m.welcome.version == 1;
        send_message(
            n, &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_LOAD, .load = {.pages_free = 100}});
        break;
    case BT_FROM_ROUTER_SUBMIT:
        on_submit(n, &m.submit);
        break;
    case BT_FROM_ROUTER_CANCEL:
        n->n_cancels++;
        for (uint32_t i = 0; i < FAKE_JOBS; i++) {
            if (n->jobs[i].used && bt_ticket_equal(&n->jobs[i].ticket, &m.cancel.ticket)) {
                free(n->jobs[i].prompt);
                n->jobs[i].used = false;
            }
        }
        break;
    case BT_FROM_ROUTER_PEERS:
        n->n_peers = (uint32_t)m.peers.n;
        break;
    case BT_FROM_ROUTER_DRAIN:
    case BT_FROM_ROUTER_SET_ROLE:
        break;
    case BT_FROM_ROUTER_HEARTBEAT:
        send_message(
            n, &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_LOAD, .load = {.pages_free = 100}});
        break;
    }
}

static void on_close(struct bt_grpc_call *call, void *user, const struct bt_grpc_end *end)
{
    struct fake_node *n = user;

    (void)call;
    (void)end;
    n->call = NULL;
    n->up = false;
}

struct fake_node *fake_node_add(struct fake_cluster *c, enum bt_role role)
{
    static const struct bt_grpc_events events = {.on_message = on_message, .on_close = on_close};
    struct fake_node *n = &c->nodes[c->n_nodes++];
    char name[8];
    struct bt_err err = {0};

    *n = (struct fake_node){.c = c, .role = role, .instance = c->n_nodes};
    CHECK_EQ(bt_grpc_channel_create(c->loop, &(struct bt_grpc_channel_opts){.address = c->sessions},
                                    &n->channel, &err),
             BT_OK);
    CHECK_EQ(bt_grpc_call_start(n->channel, &(struct bt_grpc_start){.path = BT_SESSION_METHOD},
                                &events, n, &n->call),
             BT_OK);
    snprintf(name, sizeof name, "%c%u", role == BT_ROLE_PREFILL ? 'p' : 'd', c->n_nodes);
    send_message(n, &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_HELLO,
                                             .hello = {.version_min = 1,
                                                       .version_max = 1,
                                                       .role = role,
                                                       .instance = n->instance,
                                                       .name = name,
                                                       .fingerprint = 5,
                                                       .numerics = "fake",
                                                       .kv_layout = "none",
                                                       .model_name = "m",
                                                       .transfer_address = "127.0.0.1:1",
                                                       .backend = "fake",
                                                       .page_tokens = 16,
                                                       .n_pages = 1000,
                                                       .max_batch = 64,
                                                       .max_tokens = 4096,
                                                       .context = 4096,
                                                       .vocab = FAKE_VOCAB}});
    if (role == BT_ROLE_DECODE) {
        bt_timer_start(c->loop, &n->timer, BT_NS_PER_MS, on_tick, n);
    }
    return n;
}

void fake_node_stop(struct fake_node *n)
{
    bt_timer_stop(n->c->loop, &n->timer);
    bt_grpc_channel_destroy(n->channel);
    n->channel = NULL;
    for (uint32_t i = 0; i < FAKE_JOBS; i++) {
        if (n->jobs[i].used) {
            free(n->jobs[i].prompt);
            n->jobs[i].used = false;
        }
    }
}

/* ---- life ---- */

void fake_start(struct fake_cluster *c, uint32_t n_prefill, uint32_t n_decode)
{
    struct bt_rt_opts opts = {.instance = 1,
                              .name = "router",
                              .seed = {1, 2},
                              .seqs_max = 256,
                              .queue_max = 16,
                              .nodes_max = 8,
                              .attempts_max = 4,
                              .queue_ns = BT_NS_PER_S,
                              .grace_ns = 100 * BT_NS_PER_MS,
                              .migrate_ns = BT_NS_PER_S,
                              .lease_ns = 3 * BT_NS_PER_S,
                              .heartbeat_ns = 50 * BT_NS_PER_MS,
                              .backoff_ns = 5 * BT_NS_PER_MS};
    struct bt_router *r = &c->router;
    struct bt_err err = {0};

    memset(c, 0, sizeof *c);
    bt_arena_init(&c->arena, 64 << 20);
    CHECK_EQ(bt_net_loop_create(&c->loop), BT_OK);
    c->tok = make_tokenizer();
    r->loop = c->loop;
    r->tok = c->tok;
    r->model_name = "fake";
    r->local_prefill = "never";
    CHECK_EQ(bt_router_metrics_init(&r->metrics, "0.01,0.1,1", "0.01,0.1", "0.1,1", &err), BT_OK);
    CHECK_EQ(bt_router_start(r, &opts), BT_OK);
    CHECK_EQ(bt_grpc_server_create(c->loop, NULL, &r->grpc), BT_OK);
    CHECK_EQ(bt_inference_grpc_add(r->grpc, r), BT_OK);
    CHECK_EQ(bt_http_server_create(c->loop,
                                   &(struct bt_http_server_opts){.listen = "127.0.0.1:0",
                                                                 .on_request = bt_openai_on_request,
                                                                 .error_body = bt_openai_error_body,
                                                                 .arg = r,
                                                                 .body_bytes_max = 1 << 20},
                                   &c->http, &err),
             BT_OK);
    bt_grpc_server_attach(r->grpc, c->http);
    CHECK_EQ(bt_sessions_create(r, "127.0.0.1:0", &r->sessions, &err), BT_OK);
    snprintf(c->address, sizeof c->address, "%s", bt_http_server_address(c->http));
    snprintf(c->sessions, sizeof c->sessions, "%s", bt_sessions_address(r->sessions));
    CHECK_EQ(bt_grpc_channel_create(c->loop, &(struct bt_grpc_channel_opts){.address = c->address},
                                    &c->client, &err),
             BT_OK);
    for (uint32_t i = 0; i < n_prefill; i++) {
        fake_node_add(c, BT_ROLE_PREFILL);
    }
    for (uint32_t i = 0; i < n_decode; i++) {
        fake_node_add(c, BT_ROLE_DECODE);
    }
    for (uint32_t i = 0; i < c->n_nodes; i++) {
        FAKE_UNTIL(c, c->nodes[i].up);
    }
    if (n_prefill > 0 && n_decode > 0) {
        FAKE_UNTIL(c, bt_rt_core_ready(r->core));
    }
}

void fake_stop(struct fake_cluster *c)
{
    for (uint32_t i = 0; i < c->n_nodes; i++) {
        fake_node_stop(&c->nodes[i]);
    }
    bt_grpc_channel_destroy(c->client);
    bt_http_server_close(c->http);
    bt_grpc_server_destroy(c->router.grpc);
    c->router.grpc = NULL;
    bt_sessions_destroy(c->router.sessions);
    bt_router_stop(&c->router);
    bt_net_loop_destroy(c->loop);
    bt_tokenizer_destroy(c->tok);
    bt_template_destroy(c->tmpl);
    bt_buf_fini(&c->buf);
    bt_arena_fini(&c->arena);
    CHECK_EQ(bt_test_live_bytes(), 0);
}

int fake_failures(void)
{
    return bt_test_failures;
}

void fake_step(struct fake_cluster *c)
{
    bt_net_loop_step(c->loop, BT_NS_PER_MS);
}

/* ---- HTTP ---- */

void fake_http_open(struct fake_cluster *c, struct fake_http *h, const char *method,
                    const char *path, const char *headers, const char *body)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct bt_buf b = {0};
    size_t at = 0;

    *h = (struct fake_http){.fd = socket(AF_INET, SOCK_STREAM, 0)};
    a.sin_port = htons(bt_http_server_port(c->http));
    CHECK_EQ(connect(h->fd, (struct sockaddr *)&a, sizeof a), 0);
    CHECK(fcntl(h->fd, F_SETFL, O_NONBLOCK) == 0);
    bt_buf_addf(&b, "%s %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\n%s", method, path,
                headers != NULL ? headers : "");
    if (body != NULL) {
        bt_buf_addf(&b, "content-length: %zu\r\n", strlen(body));
    }
    bt_buf_adds(&b, "\r\n");
    bt_buf_adds(&b, body != NULL ? body : "");
    while (at < b.len) {
        ssize_t n = send(h->fd, b.data + at, b.len - at, MSG_NOSIGNAL);

        at += n > 0 ? (size_t)n : 0;
        fake_step(c);
    }
    bt_buf_fini(&b);
}

void fake_http_poll(struct fake_http *h)
{
    char buf[65536];
    ssize_t n;

    while ((n = recv(h->fd, buf, sizeof buf, 0)) > 0) {
        bt_buf_add(&h->in, buf, (size_t)n);
    }
    h->closed = h->closed || n == 0;
}

void fake_http_close(struct fake_http *h)
{
    (void)close(h->fd);
    bt_buf_fini(&h->in);
}

/* Joins the chunks of a chunked body, if it is one. */
static void take_body(const char *head, const char *body, size_t len, struct bt_buf *out)
{
    if (strstr(head, "transfer-encoding: chunked") == NULL) {
        bt_buf_add(out, body, len);
        return;
    }
    for (size_t at = 0; at < len;) {
        char *end = NULL;
        size_t n = strtoul(body + at, &end, 16);

        at = (size_t)(end - body) + 2;
        if (n == 0 || at + n > len) {
            break;
        }
        bt_buf_add(out, body + at, n);
        at += n + 2;
    }
}

int fake_http_call(struct fake_cluster *c, const char *method, const char *path,
                   const char *headers, const char *body, struct bt_buf *answer, char *head,
                   size_t head_cap)
{
    struct fake_http h;
    char first[4096] = "";

    fake_http_open(c, &h, method, path, headers, body);
    for (uint64_t end = bt_clock_ns() + 10 * BT_NS_PER_S; !h.closed && bt_clock_ns() < end;) {
        fake_step(c);
        fake_http_poll(&h);
    }
    CHECK(h.closed);
    const char *split = h.in.data != NULL ? strstr(h.in.data, "\r\n\r\n") : NULL;
    int status = split != NULL ? (int)strtol(h.in.data + 9, NULL, 10) : -1;

    bt_buf_clear(answer);
    if (split != NULL) {
        snprintf(first, sizeof first, "%.*s", (int)(split - h.in.data), h.in.data);
        take_body(first, split + 4, h.in.len - (size_t)(split + 4 - h.in.data), answer);
    }
    if (head != NULL) {
        snprintf(head, head_cap, "%s", first);
    }
    bt_buf_adds(answer, "");
    fake_http_close(&h);
    return status;
}

int fake_post(struct fake_cluster *c, const char *path, const char *body, struct bt_buf *answer)
{
    return fake_http_call(c, "POST", path, NULL, body, answer, NULL, 0);
}

int fake_get(struct fake_cluster *c, const char *path, struct bt_buf *answer)
{
    return fake_http_call(c, "GET", path, NULL, NULL, answer, NULL, 0);
}
