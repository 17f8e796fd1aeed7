/* baton.v1.Inference over gRPC. Owns each call from its request to its status; refuses to know how an answer is made. */

#include "router/inference_grpc.h"

#include <stdio.h>
#include <string.h>
#include "base/clock.h"
#include "base/mem.h"
#include "base/utf8.h"
#include "net/grpc.h"
#include "proto/inference.h"
#include "router/cluster_view.h"
#include "router/generate.h"
#include "router/prompt.h"
#include "router/request_line.h"
#include "router/router_int.h"

#define POOL_BYTES    ((size_t)4 << 10) /* longer requests are tokenized on the pool */
#define REQUEST_ARENA ((size_t)512 << 20)
#define ID_MAX        200
#define MESSAGES_MAX  65536u

enum kind { GENERATE, TOKENIZE, DETOKENIZE };

struct rpc {
    struct bt_router *r;
    struct bt_grpc_call *call; /* NULL: gone */
    enum kind kind;
    uint32_t key;
    struct bt_arena arena; /* holds the request */
    union {
        struct bt_inf_generate generate;
        struct bt_inf_tokenize tokenize;
        struct bt_inf_detokenize detokenize;
    } m;
    uint64_t t_arrival, prepare_ns;
    bool working, prepared;
    struct bt_prompt_env env;
    struct bt_gen_prompt *prompt;
    struct bt_buf answer; /* encoded reply of the tokenizer calls; scratch of Generate */
    struct bt_api_err err;
    char request_id[ID_MAX + 1];
    struct bt_gen *gen;
};

/* ---- ends ---- */

static void fail(struct bt_grpc_call *call, const struct bt_api_err *e)
{
    enum bt_grpc_status st = (enum bt_grpc_status)bt_api_grpc_status(e->code);

    if (e->retry_ns != 0) {
        bt_grpc_fail_retry(call, st, e->retry_ns, "%s", e->msg);
    } else {
        bt_grpc_fail(call, st, "%s", e->msg);
    }
}

static bool refuse_key(struct bt_router *r, struct bt_grpc_call *call)
{
    struct bt_api_err e = {0};

    (void)bt_api_fail(&e, BT_API_UNAUTHENTICATED, NULL, "a missing or wrong API key");
    bt_router_count_refusal(r, &e);
    fail(call, &e);
    return false;
}

static bool key_ok(struct bt_router *r, struct bt_grpc_call *call, uint32_t *key)
{
    return bt_router_key_find(r, bt_grpc_metadata(call, "authorization"), key) ||
           refuse_key(r, call);
}

static void rpc_free(struct rpc *c)
{
    bt_arena_fini(&c->arena);
    bt_gen_prompts_free(c->prompt, c->prompt != NULL ? 1 : 0);
    bt_buf_fini(&c->answer);
    bt_free(c);
}

static void on_close(struct bt_grpc_call *call, void *user, const struct bt_grpc_end *end)
{
    struct rpc *c = user;

    (void)call;
    (void)end;
    c->call = NULL;
    if (c->gen != NULL) {
        bt_gen_cancel(c->gen);
        c->gen = NULL;
    }
    if (!c->working) {
        rpc_free(c);
    }
}

/* ---- answers of Generate ---- */

/* Text of a token for log-probabilities: whole characters only, the field is a string. */
static struct bt_inf_logprob logprob_of(const struct rpc *c, struct bt_arena *a, uint32_t id,
                                        float logprob)
{
    struct bt_buf b = {0};
    size_t n = 0;
    const char *s = bt_tokenizer_token_text(c->r->tok, id, &n);
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        unsigned len = bt_utf8_decode(s + i, n - i, &cp);

        bt_buf_add(&b, len > 0 ? s + i : "\xef\xbf\xbd", len > 0 ? len : 3);
        i += len > 0 ? len : 1;
    }
    char *text = b.failed ? NULL : bt_arena_alloc(a, b.len + 1);

    if (text != NULL) {
        memcpy(text, b.len > 0 ? b.data : "", b.len);
        text[b.len] = '\0';
    }
    struct bt_inf_logprob out = {id, text, logprob, b.len};

    bt_buf_fini(&b);
    return out;
}

static bool fill_logprobs(const struct rpc *c, struct bt_arena *a, const struct bt_gen_piece *p,
                          struct bt_inf_generated *m)
{
    struct bt_inf_logprobs *list = bt_arena_alloc(a, p->n_tokens * sizeof *list);

    for (size_t i = 0; list != NULL && i < p->n_tokens; i++) {
        const struct bt_sampled *s = &p->tokens[i];
        struct bt_inf_logprob *top = bt_arena_alloc(a, s->n_top * sizeof *top);

        if (top == NULL) {
            return false;
        }
        for (uint32_t k = 0; k < s->n_top; k++) {
            top[k] = logprob_of(c, a, s->top[k].token, s->top[k].logprob);
        }
        list[i] = (struct bt_inf_logprobs){logprob_of(c, a, s->token, s->logprob), s->n_top, top};
    }
    m->n_logprobs = list != NULL ? p->n_tokens : 0;
    m->logprobs = list;
    return list != NULL;
}

static bool encode_piece(struct rpc *c, struct bt_gen *g, const struct bt_gen_piece *p)
{
    static const char *const finish[] = {"", "stop", "length"};
    const struct bt_params *params = bt_gen_params(g);
    struct bt_arena a;
    bool ok = true;

    bt_arena_init(&a, REQUEST_ARENA);
    uint32_t *ids = bt_arena_alloc(&a, p->n_tokens * sizeof *ids);
    struct bt_inf_generated m = {.index = p->index,
                                 .text = p->len > 0 ? p->text : "",
                                 .text_len = p->len,
                                 .n_token_ids = p->n_tokens,
                                 .token_ids = ids,
                                 .finish_reason = finish[p->finish]};

    for (size_t i = 0; ids != NULL && i < p->n_tokens; i++) {
        ids[i] = p->tokens[i].token;
    }
    if (params->sampling.logprobs) {
        ok = fill_logprobs(c, &a, p, &m);
    }
    if (p->last) {
        m.has_usage = true;
        m.usage = bt_gen_usage(g);
        m.has_timings = params->timings;
        m.timings = bt_gen_timings(g);
    }
    bt_buf_clear(&c->answer);
    ok = ok && ids != NULL && bt_inf_generated_encode(&m, &c->answer) == BT_OK;
    bt_arena_fini(&a);
    return ok;
}

static size_t on_piece(void *user, struct bt_gen *g, const struct bt_gen_piece *p)
{
    struct rpc *c = user;

    if (!encode_piece(c, g, p)) {
        bt_grpc_fail(c->call, BT_GRPC_RESOURCE_EXHAUSTED, "out of memory");
        return 0; /* on_close cancels the rest */
    }
    return bt_grpc_send(c->call, c->answer.data != NULL ? c->answer.data : "", c->answer.len);
}

static void on_end(void *user, struct bt_gen *g, const struct bt_api_err *e)
{
    struct rpc *c = user;
    const char *trace = bt_grpc_metadata(c->call, "traceparent");
    struct bt_http_header h[] = {{"x-baton-prefill", bt_gen_prefill_name(g)},
                                 {"x-baton-decode", bt_gen_decode_name(g)},
                                 {"traceparent", trace}};

    c->gen = NULL;
    if (e != NULL) {
        fail(c->call, e);
    } else {
        bt_grpc_finish(c->call, BT_GRPC_OK, NULL, h, trace != NULL ? 3 : 2);
    }
}

static void on_writable(struct bt_grpc_call *call, void *user)
{
    struct rpc *c = user;

    (void)call;
    if (c->gen != NULL) {
        bt_gen_resume(c->gen);
    }
}

/* ---- preparing ---- */

static bool prepare_chat(struct rpc *c)
{
    const struct bt_inf_generate *m = &c->m.generate;
    struct bt_chat_msg *list = bt_arena_alloc(&c->arena, m->n_messages * sizeof *list);

    if (m->n_messages == 0 || m->n_messages > MESSAGES_MAX) {
        return bt_api_fail(&c->err, BT_API_INVALID, "chat", "chat: must have 1 to %u messages",
                           MESSAGES_MAX);
    }
    if (list == NULL) {
        return bt_api_fail(&c->err, BT_API_INTERNAL, NULL, "out of memory");
    }
    for (size_t i = 0; i < m->n_messages; i++) {
        list[i] = (struct bt_chat_msg){m->messages[i].role, m->messages[i].role_len,
                                       m->messages[i].content, m->messages[i].content_len};
    }
    return bt_prompt_from_chat(&c->env,
                               &(struct bt_prompt_chat){.messages = list,
                                                        .n_messages = m->n_messages,
                                                        .add_generation_prompt = true},
                               c->prompt, &c->err);
}

static bool prepare_generate(struct rpc *c)
{
    const struct bt_inf_generate *m = &c->m.generate;

    c->prompt = bt_calloc(1, sizeof *c->prompt);
    if (c->prompt == NULL) {
        return bt_api_fail(&c->err, BT_API_INTERNAL, NULL, "out of memory");
    }
    switch (m->input) {
    case BT_INF_NO_INPUT:
        return bt_api_fail(&c->err, BT_API_INVALID, "input",
                           "input: none of text, token_ids and chat is set");
    case BT_INF_TEXT:
        return bt_prompt_from_text(&c->env, m->text, m->text_len, true, c->prompt, &c->err);
    case BT_INF_TOKEN_IDS:
        c->prompt->ids = bt_alloc(m->n_token_ids * sizeof *c->prompt->ids);
        if (c->prompt->ids == NULL || m->n_token_ids > UINT32_MAX) {
            return bt_api_fail(&c->err, BT_API_INTERNAL, NULL, "out of memory");
        }
        if (m->n_token_ids > 0) {
            memcpy(c->prompt->ids, m->token_ids, m->n_token_ids * sizeof *c->prompt->ids);
        }
        c->prompt->n = (uint32_t)m->n_token_ids;
        return true;
    case BT_INF_CHAT:
        return prepare_chat(c);
    }
    return false;
}

static bool prepare_tokenize(struct rpc *c)
{
    const struct bt_inf_tokenize *m = &c->m.tokenize;
    unsigned flags = (m->add_special_tokens ? BT_TOK_ADD_SPECIAL : 0u) |
                     (m->parse_special ? BT_TOK_PARSE_SPECIAL : 0u);
    struct bt_ids ids = {0};
    struct bt_err err = {0};
    bool ok = bt_tokenizer_encode(c->env.tok, m->text, m->text_len, flags, &ids, &err) == BT_OK;

    if (!ok) {
        (void)bt_api_fail(&c->err, BT_API_INVALID, "text", "text: %s", err.msg);
    } else if (bt_inf_ids_encode(&(struct bt_inf_ids){ids.len, ids.v}, &c->answer) != BT_OK) {
        ok = bt_api_fail(&c->err, BT_API_INTERNAL, NULL, "out of memory");
    }
    bt_ids_fini(&ids);
    return ok;
}

static bool prepare_detokenize(struct rpc *c)
{
    const struct bt_inf_detokenize *m = &c->m.detokenize;
    struct bt_buf text = {0};
    struct bt_err err = {0};
    bool ok = bt_tokenizer_decode(c->env.tok, m->ids, m->n_ids,
                                  m->skip_special_tokens ? BT_DETOK_SKIP_SPECIAL : 0, &text,
                                  &err) == BT_OK;

    if (!ok) {
        (void)bt_api_fail(&c->err, BT_API_INVALID, "ids", "ids: %s", err.msg);
    } else if (bt_inf_text_encode(text.data, text.len, &c->answer) != BT_OK) {
        ok = bt_api_fail(&c->err, BT_API_INTERNAL, NULL, "out of memory");
    }
    bt_buf_fini(&text);
    return ok;
}

static void prepare(void *arg)
{
    struct rpc *c = arg;
    uint64_t t0 = bt_clock_ns();

    c->prepared = c->kind == GENERATE   ? prepare_generate(c)
                  : c->kind == TOKENIZE ? prepare_tokenize(c)
                                        : prepare_detokenize(c);
    c->prepare_ns = bt_clock_ns() - t0;
}

/* ---- Generate ---- */

static bool take_params(const struct bt_inf_generate *m, struct bt_params *p, struct bt_api_err *e)
{
    const struct bt_inf_sampling *s = &m->sampling;
    struct bt_sampling *o = &p->sampling;

    o->temperature = s->has_temperature ? s->temperature : o->temperature;
    o->top_p = s->has_top_p ? s->top_p : o->top_p;
    o->top_k = s->has_top_k ? s->top_k : o->top_k;
    o->min_p = s->has_min_p ? s->min_p : o->min_p;
    o->repetition_penalty =
        s->has_repetition_penalty ? s->repetition_penalty : o->repetition_penalty;
    o->presence_penalty = s->has_presence_penalty ? s->presence_penalty : o->presence_penalty;
    o->frequency_penalty = s->has_frequency_penalty ? s->frequency_penalty : o->frequency_penalty;
    o->seed = s->seed;
    p->has_seed = s->has_seed;
    o->max_tokens = s->max_tokens;
    p->has_max_tokens = s->has_max_tokens;
    o->min_tokens = s->min_tokens;
    o->ignore_eos = s->ignore_eos;
    p->n = s->has_n ? s->n : 1;
    o->logprobs = m->has_logprobs;
    o->n_top = m->logprobs;
    p->timings = m->timings;
    p->priority = m->priority;
    for (size_t i = 0; i < s->n_stop; i++) {
        if (!bt_params_add_stop(p, s->stop[i], s->stop_len[i], e)) {
            return false;
        }
    }
    for (size_t i = 0; i < s->n_stop_token_ids; i++) {
        if (!bt_params_add_stop_id(p, s->stop_token_ids[i], e)) {
            return false;
        }
    }
    for (size_t i = 0; i < s->n_logit_bias; i++) {
        if (!bt_params_add_bias(p, s->logit_bias[i].token, (double)s->logit_bias[i].bias, e)) {
            return false;
        }
    }
    return true;
}

static bool take_request_id(struct rpc *c)
{
    const char *id = c->m.generate.request_id;

    if (id[0] == '\0') {
        char made[25];

        bt_router_new_id(made);
        snprintf(c->request_id, sizeof c->request_id, "%s", made);
        return true;
    }
    if (strlen(id) > ID_MAX) {
        return bt_api_fail(&c->err, BT_API_INVALID, "request_id",
                           "request_id: longer than %d bytes", ID_MAX);
    }
    snprintf(c->request_id, sizeof c->request_id, "%s", id);
    return true;
}

static bool start_generation(struct rpc *c)
{
    static const struct bt_gen_events events = {.on_piece = on_piece, .on_end = on_end};
    struct bt_params params;

    bt_params_init(&params);
    if (!take_request_id(c) || !take_params(&c->m.generate, &params, &c->err) ||
        !bt_params_check(&params, bt_tokenizer_vocab_size(c->r->tok), &c->err)) {
        bt_params_fini(&params);
        return false;
    }
    struct bt_gen_start s = {
        .request_id = c->request_id,
        .endpoint = BT_INF_GENERATE,
        .traceparent = bt_grpc_metadata(c->call, "traceparent"),
        .params = &params,
        .prompts = c->prompt,
        .n_prompts = 1,
        .t_arrival = c->t_arrival,
        .tokenize_ns = c->prepare_ns,
        .deadline = bt_grpc_deadline_ns(c->call),
        .key = c->key,
        .events = &events,
        .user = c,
    };

    c->prompt = NULL;
    return bt_gen_start(c->r, &s, &c->gen, &c->err);
}

static void refuse(struct rpc *c)
{
    const char *id = c->request_id[0] != '\0' ? c->request_id : c->m.generate.request_id;

    bt_router_count_refusal(c->r, &c->err);
    if (c->kind == GENERATE) {
        bt_request_refused_log(c->r, &(struct bt_request_refused){
                                         .request_id = id,
                                         .endpoint = BT_INF_GENERATE,
                                         .key = c->key,
                                         .traceparent = bt_grpc_metadata(c->call, "traceparent"),
                                         .t_arrival = c->t_arrival,
                                         .err = &c->err});
    }
    fail(c->call, &c->err);
}

static void go_on(void *arg)
{
    struct rpc *c = arg;

    c->working = false;
    if (c->call == NULL) {
        rpc_free(c);
        return;
    }
    if (c->prepared && c->kind != GENERATE) {
        bt_grpc_reply(c->call, c->answer.data != NULL ? c->answer.data : "", c->answer.len);
    } else if (!c->prepared || !start_generation(c)) {
        refuse(c);
    }
    bt_arena_reset(&c->arena); /* what goes on was copied */
}

static void on_message(struct bt_grpc_call *call, void *user, const uint8_t *data, size_t len)
{
    struct rpc *c = user;
    struct bt_err err = {0};
    const char *model = "";
    enum bt_status st;

    (void)call;
    if (c->kind == GENERATE) {
        st = bt_inf_generate_decode(data, len, &c->arena, &c->m.generate, &err);
        model = st == BT_OK ? c->m.generate.model : "";
    } else if (c->kind == TOKENIZE) {
        st = bt_inf_tokenize_decode(data, len, &c->arena, &c->m.tokenize, &err);
        model = st == BT_OK ? c->m.tokenize.model : "";
    } else {
        st = bt_inf_detokenize_decode(data, len, &c->arena, &c->m.detokenize, &err);
        model = st == BT_OK ? c->m.detokenize.model : "";
    }
    if (st != BT_OK) {
        (void)bt_api_fail(&c->err, BT_API_INVALID, NULL, "%s", err.msg);
    }
    if (st != BT_OK || !bt_router_admit(c->r, model, &c->err)) {
        refuse(c);
        return;
    }
    if (len > POOL_BYTES) {
        c->working = true;
        if (bt_net_work(c->r->loop, prepare, go_on, c) == BT_OK) {
            return;
        }
    }
    prepare(c);
    go_on(c);
}

static void begin(struct bt_grpc_call *call, struct bt_router *r, enum kind kind)
{
    static const struct bt_grpc_events events = {
        .on_message = on_message, .on_writable = on_writable, .on_close = on_close};

    uint32_t key;

    if (!key_ok(r, call, &key)) {
        return;
    }
    struct rpc *c = bt_calloc(1, sizeof *c);

    if (c == NULL) {
        bt_grpc_fail(call, BT_GRPC_RESOURCE_EXHAUSTED, "out of memory");
        return;
    }
    c->r = r;
    c->call = call;
    c->key = key;
    c->kind = kind;
    c->t_arrival = bt_net_loop_now(r->loop);
    c->env = (struct bt_prompt_env){r->tok, r->tmpl, r->bos, r->eos,
                                    (int64_t)(bt_clock_unix_ns() / BT_NS_PER_S)};
    bt_arena_init(&c->arena, REQUEST_ARENA);
    bt_grpc_bind(call, &events, c);
}

static void on_generate(struct bt_grpc_call *call, void *arg)
{
    begin(call, arg, GENERATE);
}

static void on_tokenize(struct bt_grpc_call *call, void *arg)
{
    begin(call, arg, TOKENIZE);
}

static void on_detokenize(struct bt_grpc_call *call, void *arg)
{
    begin(call, arg, DETOKENIZE);
}

/* ---- calls that answer at once; user is the router ---- */

static void reply_encoded(struct bt_grpc_call *call, enum bt_status st, struct bt_buf *b)
{
    if (st == BT_OK) {
        bt_grpc_reply(call, b->data != NULL ? b->data : "", b->len);
    } else {
        bt_grpc_fail(call, BT_GRPC_RESOURCE_EXHAUSTED, "out of memory");
    }
    bt_buf_fini(b);
}

static void abort_message(struct bt_grpc_call *call, void *user, const uint8_t *data, size_t len)
{
    struct bt_arena a;
    struct bt_buf b = {0};
    struct bt_err err = {0};
    const char *id = "";

    bt_arena_init(&a, REQUEST_ARENA);
    if (bt_inf_abort_decode(data, len, &a, &id, &err) != BT_OK) {
        bt_grpc_fail(call, BT_GRPC_INVALID_ARGUMENT, "%s", err.msg);
    } else if (id[0] == '\0') {
        bt_grpc_fail(call, BT_GRPC_INVALID_ARGUMENT, "request_id: is empty");
    } else {
        reply_encoded(call, bt_inf_aborted_encode(bt_gen_abort(user, id), &b), &b);
    }
    bt_arena_fini(&a);
}

static void models_message(struct bt_grpc_call *call, void *user, const uint8_t *data, size_t len)
{
    struct bt_router *r = user;
    struct bt_inf_model m = {r->model_name, bt_rt_core_context(r->core)};
    struct bt_buf b = {0};

    (void)data;
    (void)len;
    reply_encoded(call, bt_inf_models_encode(&(struct bt_inf_models){1, &m}, &b), &b);
}

static void cluster_message(struct bt_grpc_call *call, void *user, const uint8_t *data, size_t len)
{
    struct bt_arena a;
    struct bt_buf b = {0};
    struct bt_inf_cluster c;

    (void)data;
    (void)len;
    bt_arena_init(&a, REQUEST_ARENA);
    enum bt_status st = bt_cluster_status(user, &a, &c);

    reply_encoded(call, st == BT_OK ? bt_inf_cluster_encode(&c, &b) : st, &b);
    bt_arena_fini(&a);
}

static void on_abort(struct bt_grpc_call *call, void *arg)
{
    static const struct bt_grpc_events events = {.on_message = abort_message};

    uint32_t key;

    if (key_ok(arg, call, &key)) {
        bt_grpc_bind(call, &events, arg);
    }
}

static void on_list_models(struct bt_grpc_call *call, void *arg)
{
    static const struct bt_grpc_events events = {.on_message = models_message};

    uint32_t key;

    if (key_ok(arg, call, &key)) {
        bt_grpc_bind(call, &events, arg);
    }
}

static void on_get_cluster(struct bt_grpc_call *call, void *arg)
{
    static const struct bt_grpc_events events = {.on_message = cluster_message};

    if (bt_router_may_look(arg, bt_grpc_metadata(call, "authorization")) || refuse_key(arg, call)) {
        bt_grpc_bind(call, &events, arg);
    }
}

static const struct bt_grpc_method methods[] = {
    {BT_INF_GENERATE, BT_GRPC_SERVER_STREAM, on_generate},
    {BT_INF_ABORT, BT_GRPC_UNARY, on_abort},
    {BT_INF_TOKENIZE, BT_GRPC_UNARY, on_tokenize},
    {BT_INF_DETOKENIZE, BT_GRPC_UNARY, on_detokenize},
    {BT_INF_LIST_MODELS, BT_GRPC_UNARY, on_list_models},
    {BT_INF_GET_CLUSTER, BT_GRPC_UNARY, on_get_cluster},
};

enum bt_status bt_inference_grpc_add(struct bt_grpc_server *g, struct bt_router *r)
{
    size_t len = 0;
    const uint8_t *descriptor = bt_inf_descriptor(&len);
    enum bt_status st = bt_grpc_server_add(g, methods, sizeof methods / sizeof methods[0], r);

    return st == BT_OK ? bt_grpc_reflection_add(g, descriptor, len) : st;
}
