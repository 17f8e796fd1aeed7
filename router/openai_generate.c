/* HTTP requests with a body: reads it, prepares it (long ones on the libuv pool), runs it, streams or sums up the answer.
 * Owns the call from its headers to the end of its stream. */

#include <stdio.h>
#include <string.h>
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "router/openai_call_int.h"
#include "router/generate.h"
#include "router/openai_request.h"
#include "router/openai_write.h"
#include "router/request_line.h"

#define POOL_BYTES ((size_t)4 << 10) /* longer bodies are parsed and tokenized on the pool */
#define ID_MAX     200
#define BODIES_MAX ((size_t)512 << 20) /* bytes of all bodies being read */
#define JSON       "application/json"

struct call {
    struct bt_router *r;
    struct bt_http_stream *s; /* NULL: gone */
    enum bt_openai_kind kind;
    uint32_t key;
    struct bt_buf body;
    size_t body_bytes; /* counted in the router's sum */
    char request_id[ID_MAX + 1];
    char id[ID_MAX + 16]; /* of the answer */
    uint64_t t_arrival, prepare_ns;
    /* prepared, perhaps on the pool */
    bool working, prepared;
    struct bt_prompt_env env;
    struct bt_openai_request q;
    struct bt_openai_tokens t;
    struct bt_api_err err;
    struct bt_buf answer; /* of /tokenize and /detokenize */
    /* running */
    struct bt_gen *gen;
    struct bt_openai_head head;
    struct bt_openai_choice *choices;
    uint32_t n_choices;
    bool responded;
    struct bt_buf out;
    struct bt_buf opening; /* of each event: the same for all of an answer */
};

static void uncount_body(struct call *c)
{
    c->r->body_bytes -= c->body_bytes;
    c->r->parsed_bytes += c->body_bytes;
    c->body_bytes = 0;
}

static void call_free(struct call *c)
{
    uncount_body(c);
    for (uint32_t i = 0; i < c->n_choices; i++) {
        bt_openai_choice_fini(&c->choices[i]);
    }
    bt_free(c->choices);
    bt_openai_request_free(&c->q);
    bt_openai_tokens_free(&c->t);
    bt_buf_fini(&c->body);
    bt_buf_fini(&c->answer);
    bt_buf_fini(&c->out);
    bt_buf_fini(&c->opening);
    bt_free(c);
}

/* ---- headers ---- */

static const char *request_header(const struct call *c, const char *name)
{
    const struct bt_http_request *req = bt_http_stream_request(c->s);

    return bt_http_header_find(req->headers, req->n_headers, name);
}

/* Those of every answer of this call; returns how many. */
static size_t common_headers(const struct call *c, struct bt_http_header h[4])
{
    const char *trace = request_header(c, "traceparent");
    size_t n = 0;

    h[n++] = (struct bt_http_header){"x-request-id", c->request_id};
    if (trace != NULL) {
        h[n++] = (struct bt_http_header){"traceparent", trace};
    }
    if (c->gen != NULL && bt_gen_prefill_name(c->gen)[0] != '\0') {
        h[n++] = (struct bt_http_header){"x-baton-prefill", bt_gen_prefill_name(c->gen)};
    }
    if (c->gen != NULL && bt_gen_decode_name(c->gen)[0] != '\0') {
        h[n++] = (struct bt_http_header){"x-baton-decode", bt_gen_decode_name(c->gen)};
    }
    return n;
}

static void reply_error(struct call *c, const struct bt_api_err *e)
{
    struct bt_http_header h[4];
    size_t n = common_headers(c, h);

    bt_openai_reply_error(c->s, e, h, n);
    c->responded = true;
}

static void reply_json(struct call *c, struct bt_buf *b)
{
    struct bt_http_header h[4];
    size_t n = common_headers(c, h);
    struct bt_api_err e = {0};

    if (b->failed) {
        (void)bt_api_fail(&e, BT_API_INTERNAL, NULL, "out of memory");
        reply_error(c, &e);
        return;
    }
    bt_http_reply(c->s, 200, JSON, b->data, b->len, h, n);
    c->responded = true;
}

/* ---- answers ---- */

static void respond_stream(struct call *c)
{
    struct bt_http_header h[8] = {{"content-type", "text/event-stream"},
                                  {"cache-control", "no-cache"}};
    size_t n = 2 + common_headers(c, h + 2);

    bt_http_respond(c->s, 200, h, n);
    c->responded = true;
}

/* Sends c->out as events; out of memory: the stream is cut, nothing looks complete. */
static size_t send_events(struct call *c)
{
    if (c->out.failed) {
        bt_http_reset(c->s, BT_HTTP_INTERNAL);
        return 0;
    }
    return bt_http_write(c->s, c->out.data, c->out.len);
}

static void open_event(struct call *c)
{
    struct bt_buf *b = &c->opening;

    if (b->len == 0 || b->failed) {
        bt_buf_clear(b);
        bt_buf_adds(b, "data: ");
        bt_openai_open(b, &c->head);
    }
    c->out.failed = c->out.failed || b->failed;
    bt_buf_add(&c->out, b->data, b->failed ? 0 : b->len);
}

static void put_chunk(struct call *c, const struct bt_gen_piece *p, struct bt_openai_choice *ch)
{
    const struct bt_params *params = bt_gen_params(c->gen);
    bool timings = p->last && params->timings;
    struct bt_inf_usage u = {0};
    struct bt_inf_timings t = {0};

    if (c->q.continuous_usage) {
        u = bt_gen_usage(c->gen);
    }
    if (timings) {
        t = bt_gen_timings(c->gen);
    }
    if (c->head.chat && p->first) {
        open_event(c);
        bt_openai_put_role(&c->out, p->index);
        bt_openai_close(&c->out, c->q.continuous_usage ? &u : NULL, c->q.include_usage, NULL);
        bt_buf_adds(&c->out, "\n\n");
    }
    open_event(c);
    bt_openai_put_choice(&c->out, &c->head, ch, p->index, params->sampling.logprobs);
    bt_openai_close(&c->out, c->q.continuous_usage ? &u : NULL, c->q.include_usage,
                    timings ? &t : NULL);
    bt_buf_adds(&c->out, "\n\n");
}

static size_t on_piece(void *user, struct bt_gen *g, const struct bt_gen_piece *p)
{
    struct call *c = user;
    struct bt_openai_choice *ch = &c->choices[p->index];

    if (c->q.stream) {
        bt_openai_choice_clear(ch);
    }
    if (p->first && bt_gen_params(g)->echo) {
        bt_openai_choice_echo(ch, &c->head, g, p->index);
    }
    bt_openai_choice_add(ch, &c->head, g, p);
    if (!c->q.stream) {
        return 0;
    }
    if (!c->responded) {
        respond_stream(c);
    }
    bt_buf_clear(&c->out);
    put_chunk(c, p, ch);
    return send_events(c);
}

static void finish_stream(struct call *c, struct bt_gen *g)
{
    struct bt_inf_usage u = bt_gen_usage(g);
    struct bt_inf_timings t = bt_gen_timings(g);

    bt_buf_clear(&c->out);
    if (c->q.include_usage) {
        open_event(c);
        bt_openai_close(&c->out, &u, false, bt_gen_params(g)->timings ? &t : NULL);
        bt_buf_adds(&c->out, "\n\n");
    }
    bt_buf_adds(&c->out, "data: [DONE]\n\n");
    (void)send_events(c);
    if (!c->out.failed) {
        bt_http_end(c->s);
    }
}

static void finish_whole(struct call *c, struct bt_gen *g)
{
    struct bt_inf_usage u = bt_gen_usage(g);
    struct bt_inf_timings t = bt_gen_timings(g);
    const struct bt_params *params = bt_gen_params(g);

    bt_buf_clear(&c->out);
    bt_openai_open(&c->out, &c->head);
    for (uint32_t i = 0; i < c->n_choices; i++) {
        bt_buf_adds(&c->out, i > 0 ? "," : "");
        bt_openai_put_choice(&c->out, &c->head, &c->choices[i], i, params->sampling.logprobs);
        c->out.failed = c->out.failed || c->choices[i].text.failed;
    }
    bt_openai_close(&c->out, &u, false, params->timings ? &t : NULL);
    reply_json(c, &c->out);
}

static void on_end(void *user, struct bt_gen *g, const struct bt_api_err *e)
{
    struct call *c = user;

    if (e == NULL && c->q.stream) {
        finish_stream(c, g);
    } else if (e == NULL) {
        finish_whole(c, g);
    } else if (!c->responded) {
        reply_error(c, e);
    } else {
        bt_buf_clear(&c->out);
        bt_buf_adds(&c->out, "data: ");
        bt_openai_put_error(&c->out, e);
        bt_buf_adds(&c->out, "\n\n");
        (void)send_events(c);
        bt_http_end(c->s);
    }
    c->gen = NULL;
}

/* ---- start ---- */

static const char *endpoint(const struct call *c)
{
    return c->kind == BT_OPENAI_CHAT ? "/v1/chat/completions" : "/v1/completions";
}

static const struct bt_gen_events gen_events = {.on_piece = on_piece, .on_end = on_end};

static bool start_generation(struct call *c, struct bt_api_err *e)
{
    struct bt_openai_request *q = &c->q;
    struct bt_router *r = c->r;

    if (!bt_router_admit(r, q->model, e) ||
        !bt_params_check(&q->params, bt_tokenizer_vocab_size(r->tok), e)) {
        return false;
    }
    c->n_choices = (uint32_t)q->n_prompts * q->params.n;
    c->choices = bt_calloc(c->n_choices, sizeof *c->choices);
    if (c->choices == NULL) {
        c->n_choices = 0;
        return bt_api_fail(e, BT_API_INTERNAL, NULL, "out of memory");
    }
    snprintf(c->id, sizeof c->id, "%s-%s", q->chat ? "chatcmpl" : "cmpl", c->request_id);
    c->head = (struct bt_openai_head){.chat = q->chat,
                                      .stream = q->stream,
                                      .id = c->id,
                                      .model = r->model_name,
                                      .created = bt_clock_unix_ns() / BT_NS_PER_S,
                                      .tok = r->tok};
    struct bt_gen_start s = {
        .request_id = c->request_id,
        .endpoint = endpoint(c),
        .traceparent = request_header(c, "traceparent"),
        .params = &q->params,
        .prompts = q->prompts,
        .n_prompts = q->n_prompts,
        .t_arrival = c->t_arrival,
        .tokenize_ns = c->prepare_ns,
        .deadline = UINT64_MAX,
        .key = c->key,
        .events = &gen_events,
        .user = c,
    };

    q->prompts = NULL;
    q->n_prompts = 0;
    return bt_gen_start(r, &s, &c->gen, e);
}

/* Chats and prompts become ids; the tokenizer's endpoints their whole answer. */
static bool prepare_text(struct call *c)
{
    struct bt_ids ids = {0};
    struct bt_err err = {0};
    unsigned flags = (c->t.add_special ? BT_TOK_ADD_SPECIAL : 0u) |
                     (c->t.parse_special ? BT_TOK_PARSE_SPECIAL : 0u);

    if (bt_tokenizer_encode(c->env.tok, c->t.text, c->t.text_len, flags, &ids, &err) != BT_OK) {
        bt_ids_fini(&ids);
        return bt_api_fail(&c->err, BT_API_INVALID, "prompt", "prompt: %s", err.msg);
    }
    bt_buf_adds(&c->answer, "{\"tokens\":[");
    for (size_t i = 0; i < ids.len; i++) {
        bt_buf_addf(&c->answer, "%s%u", i > 0 ? "," : "", ids.v[i]);
    }
    bt_buf_addf(&c->answer, "],\"count\":%zu}", ids.len);
    bt_ids_fini(&ids);
    return true;
}

static bool prepare_ids(struct call *c)
{
    struct bt_buf text = {0};
    struct bt_err err = {0};
    bool ok =
        bt_tokenizer_decode(c->env.tok, c->t.ids, c->t.n_ids,
                            c->t.skip_special ? BT_DETOK_SKIP_SPECIAL : 0, &text, &err) == BT_OK;

    if (ok) {
        bt_buf_adds(&c->answer, "{\"prompt\":");
        bt_buf_add_json_str(&c->answer, text.data != NULL ? text.data : "", text.len);
        bt_buf_adds(&c->answer, ",\"text\":");
        bt_buf_add_json_str(&c->answer, text.data != NULL ? text.data : "", text.len);
        bt_buf_addc(&c->answer, '}');
    }
    bt_buf_fini(&text);
    return ok ? true : bt_api_fail(&c->err, BT_API_INVALID, "tokens", "tokens: %s", err.msg);
}

/* Pure but for the call: runs on the pool or here. */
static void prepare(void *arg)
{
    struct call *c = arg;
    uint64_t t0 = bt_clock_ns();
    const char *body = c->body.data != NULL ? c->body.data : "";

    switch (c->kind) {
    case BT_OPENAI_COMPLETION:
    case BT_OPENAI_CHAT:
        c->prepared =
            bt_openai_parse(body, c->body.len, c->kind == BT_OPENAI_CHAT, &c->q, &c->err) &&
            bt_openai_tokenize(&c->q, &c->env, &c->err);
        break;
    case BT_OPENAI_TOKENIZE:
        c->prepared =
            bt_openai_parse_tokenize(body, c->body.len, &c->t, &c->err) && prepare_text(c);
        break;
    case BT_OPENAI_DETOKENIZE:
        c->prepared =
            bt_openai_parse_detokenize(body, c->body.len, &c->t, &c->err) && prepare_ids(c);
        break;
    }
    bt_buf_fini(&c->body);
    c->prepare_ns = bt_clock_ns() - t0;
}

static void log_refusal(const struct call *c)
{
    if (c->kind == BT_OPENAI_COMPLETION || c->kind == BT_OPENAI_CHAT) {
        bt_request_refused_log(
            c->r, &(struct bt_request_refused){.request_id = c->request_id,
                                               .endpoint = endpoint(c),
                                               .key = c->key,
                                               .traceparent = request_header(c, "traceparent"),
                                               .t_arrival = c->t_arrival,
                                               .err = &c->err});
    }
}

static void go_on(void *arg)
{
    struct call *c = arg;

    c->working = false;
    uncount_body(c);
    if (c->s == NULL) {
        call_free(c);
        return;
    }
    if (c->prepared && (c->kind == BT_OPENAI_TOKENIZE || c->kind == BT_OPENAI_DETOKENIZE)) {
        reply_json(c, &c->answer);
    } else if (!c->prepared || !start_generation(c, &c->err)) {
        bt_router_count_refusal(c->r, &c->err);
        log_refusal(c);
        reply_error(c, &c->err);
    }
}

/* ---- stream ---- */

static void on_data(struct bt_http_stream *s, void *user, const char *data, size_t len)
{
    struct call *c = user;
    struct bt_api_err e = {0};

    if (c->responded) {
        return;
    }
    if (c->r->body_bytes + len > BODIES_MAX) {
        (void)bt_api_fail(&e, BT_API_EXHAUSTED, NULL,
                          "too much request data at once; try again later");
        e.retry_ns = BT_NS_PER_S;
        reply_error(c, &e);
        return;
    }
    c->r->body_bytes += len;
    c->body_bytes += len;
    if (!bt_buf_add(&c->body, data, len)) {
        bt_http_reset(s, BT_HTTP_INTERNAL);
    }
}

static void on_body_end(struct bt_http_stream *s, void *user)
{
    struct call *c = user;

    (void)s;
    if (c->responded) {
        return;
    }
    if (c->body.len > POOL_BYTES) {
        c->working = true;
        if (bt_net_work(c->r->loop, prepare, go_on, c) == BT_OK) {
            return;
        }
    }
    prepare(c);
    go_on(c);
}

static void on_writable(struct bt_http_stream *s, void *user)
{
    struct call *c = user;

    (void)s;
    if (c->gen != NULL) {
        bt_gen_resume(c->gen);
    }
}

static void on_close(struct bt_http_stream *s, void *user, enum bt_http_close why)
{
    struct call *c = user;

    (void)s;
    (void)why;
    c->s = NULL;
    if (c->gen != NULL) {
        bt_gen_cancel(c->gen);
        c->gen = NULL;
    }
    if (!c->working) {
        call_free(c);
    }
}

static bool plain_text(const char *s)
{
    size_t n = strlen(s);

    for (size_t i = 0; i < n; i++) {
        if ((unsigned char)s[i] < 0x21 || (unsigned char)s[i] > 0x7e) {
            return false;
        }
    }
    return n > 0 && n <= ID_MAX;
}

void bt_openai_call_begin(struct bt_router *r, struct bt_http_stream *s, enum bt_openai_kind kind,
                          uint32_t key)
{
    static const struct bt_http_events events = {.on_data = on_data,
                                                 .on_end = on_body_end,
                                                 .on_writable = on_writable,
                                                 .on_close = on_close};
    struct call *c = bt_calloc(1, sizeof *c);

    if (c == NULL) {
        bt_http_reset(s, BT_HTTP_INTERNAL);
        return;
    }
    c->r = r;
    c->s = s;
    c->kind = kind;
    c->key = key;
    c->t_arrival = bt_net_loop_now(r->loop);
    c->env = (struct bt_prompt_env){r->tok, r->tmpl, r->bos, r->eos,
                                    (int64_t)(bt_clock_unix_ns() / BT_NS_PER_S)};
    const char *id = request_header(c, "x-request-id");

    if (id != NULL && plain_text(id)) {
        snprintf(c->request_id, sizeof c->request_id, "%s", id);
    } else {
        char made[25];

        bt_router_new_id(made);
        snprintf(c->request_id, sizeof c->request_id, "%s", made);
    }
    bt_http_bind(s, &events, c);
}
