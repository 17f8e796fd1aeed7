/* Inference messages between plain structs and protobuf bytes. Owns presence and the shape of each
 * message; refuses to know what a parameter means: ranges are the router's business. */

#include "proto/inference.h"

#include <string.h>
#include "baton/v1/inference.pb-c.h"
#include "proto/pb_arena_int.h"

#define ENCODE_ARENA_MAX ((size_t)256 << 20)

typedef Baton__V1__SamplingParams pb_sampling;
typedef Baton__V1__GenerateRequest pb_request;
typedef Baton__V1__GenerateResponse pb_response;

static enum bt_status bad(struct bt_err *err, const char *what)
{
    return bt_err_set(err, BT_ERR_PROTOCOL, "not a %s message, or too large", what);
}

/* Text that may hold NUL. */
static ProtobufCBinaryData bytes(const char *s, size_t len)
{
    union {
        const char *in;
        uint8_t *out;
    } u = {.in = s != NULL ? s : ""};

    return (ProtobufCBinaryData){len > 0 ? len : strlen(u.in), u.out};
}

/* Ends in a NUL: pb_arena.c. */
static const char *chars(const ProtobufCBinaryData *b)
{
    return b->len > 0 ? (const char *)b->data : "";
}

static uint32_t *numbers(const uint32_t *v)
{
    union {
        const uint32_t *in;
        uint32_t *out;
    } u = {.in = v};

    return u.out;
}

extern const unsigned char bt_inference_descriptors[];
extern const size_t bt_inference_descriptors_bytes;

const uint8_t *bt_inf_descriptor(size_t *len)
{
    *len = bt_inference_descriptors_bytes;
    return bt_inference_descriptors;
}

/* Packs and drops the scratch memory; ok false: it ran out. */
static enum bt_status pack(bool ok, const ProtobufCMessage *m, struct bt_arena *a,
                           struct bt_buf *out)
{
    enum bt_status st = ok ? bt_pb_pack(m, out) : BT_ERR_NOMEM;

    bt_arena_fini(a);
    return st;
}

/* ---- GenerateRequest ---- */

static enum bt_status get_sampling(const pb_sampling *p, struct bt_arena *arena,
                                   struct bt_inf_sampling *s)
{
    s->has_temperature = p->opt_temperature_case != 0;
    s->temperature = p->temperature;
    s->has_top_p = p->opt_top_p_case != 0;
    s->top_p = p->top_p;
    s->has_top_k = p->opt_top_k_case != 0;
    s->top_k = p->top_k;
    s->has_min_p = p->opt_min_p_case != 0;
    s->min_p = p->min_p;
    s->has_repetition_penalty = p->opt_repetition_penalty_case != 0;
    s->repetition_penalty = p->repetition_penalty;
    s->has_presence_penalty = p->opt_presence_penalty_case != 0;
    s->presence_penalty = p->presence_penalty;
    s->has_frequency_penalty = p->opt_frequency_penalty_case != 0;
    s->frequency_penalty = p->frequency_penalty;
    s->has_seed = p->opt_seed_case != 0;
    s->seed = p->seed;
    s->has_max_tokens = p->opt_max_tokens_case != 0;
    s->max_tokens = p->max_tokens;
    s->has_n = p->opt_n_case != 0;
    s->n = p->n;
    s->min_tokens = p->min_tokens;
    s->ignore_eos = p->ignore_eos != 0;
    s->n_stop = p->n_stop;
    s->n_stop_token_ids = p->n_stop_token_ids;
    s->stop_token_ids = p->stop_token_ids;
    s->n_logit_bias = p->n_logit_bias;
    struct bt_inf_bias *bias = bt_arena_alloc(arena, p->n_logit_bias * sizeof *bias);

    const char **stop = bt_arena_alloc(arena, p->n_stop * sizeof *stop);
    size_t *stop_len = bt_arena_alloc(arena, p->n_stop * sizeof *stop_len);

    if (bias == NULL || stop == NULL || stop_len == NULL) {
        return BT_ERR_NOMEM;
    }
    for (size_t i = 0; i < p->n_stop; i++) {
        stop[i] = chars(&p->stop[i]);
        stop_len[i] = p->stop[i].len;
    }
    s->stop = stop;
    s->stop_len = stop_len;
    for (size_t i = 0; i < p->n_logit_bias; i++) {
        bias[i] = (struct bt_inf_bias){p->logit_bias[i]->key, p->logit_bias[i]->value};
    }
    s->logit_bias = bias;
    return BT_OK;
}

static enum bt_status get_messages(const Baton__V1__Chat *p, struct bt_arena *arena,
                                   struct bt_inf_generate *out)
{
    struct bt_inf_message *m = bt_arena_alloc(arena, p->n_messages * sizeof *m);

    if (m == NULL) {
        return BT_ERR_NOMEM;
    }
    for (size_t i = 0; i < p->n_messages; i++) {
        const Baton__V1__Message *from = p->messages[i];

        m[i] = (struct bt_inf_message){chars(&from->role), chars(&from->content), from->role.len,
                                       from->content.len};
    }
    out->n_messages = p->n_messages;
    out->messages = m;
    return BT_OK;
}

enum bt_status bt_inf_generate_decode(const void *data, size_t n, struct bt_arena *arena,
                                      struct bt_inf_generate *out, struct bt_err *err)
{
    ProtobufCAllocator pa = bt_pb_arena(arena);
    pb_request *m = baton__v1__generate_request__unpack(&pa, n, data);
    enum bt_status st = BT_OK;

    if (m == NULL) {
        return bad(err, "GenerateRequest");
    }
    *out = (struct bt_inf_generate){
        .request_id = m->request_id,
        .model = m->model,
        .has_logprobs = m->opt_logprobs_case != 0,
        .logprobs = m->logprobs,
        .timings = m->timings != 0,
        .priority = m->priority,
    };
    switch (m->input_case) {
    case BATON__V1__GENERATE_REQUEST__INPUT_TEXT:
        out->input = BT_INF_TEXT;
        out->text = chars(&m->text);
        out->text_len = m->text.len;
        break;
    case BATON__V1__GENERATE_REQUEST__INPUT_TOKEN_IDS:
        out->input = BT_INF_TOKEN_IDS;
        out->n_token_ids = m->token_ids->n_ids;
        out->token_ids = m->token_ids->ids;
        break;
    case BATON__V1__GENERATE_REQUEST__INPUT_CHAT:
        out->input = BT_INF_CHAT;
        st = get_messages(m->chat, arena, out);
        break;
    default:
        break;
    }
    if (st == BT_OK && m->sampling != NULL) {
        st = get_sampling(m->sampling, arena, &out->sampling);
    }
    return st == BT_OK ? BT_OK : bad(err, "GenerateRequest");
}

#define SET(p, field, name, s)                                                                     \
    if ((s)->has_##field) {                                                                        \
        (p)->opt_##field##_case = BATON__V1__SAMPLING_PARAMS__OPT_##name##_##name;                 \
        (p)->field = (s)->field;                                                                   \
    }

static bool put_sampling(const struct bt_inf_sampling *s, pb_sampling *p, struct bt_arena *a)
{
    SET(p, temperature, TEMPERATURE, s)
    SET(p, top_p, TOP_P, s)
    SET(p, top_k, TOP_K, s)
    SET(p, min_p, MIN_P, s)
    SET(p, repetition_penalty, REPETITION_PENALTY, s)
    SET(p, presence_penalty, PRESENCE_PENALTY, s)
    SET(p, frequency_penalty, FREQUENCY_PENALTY, s)
    SET(p, seed, SEED, s)
    SET(p, max_tokens, MAX_TOKENS, s)
    SET(p, n, N, s)
    p->min_tokens = s->min_tokens;
    p->ignore_eos = s->ignore_eos;
    p->n_stop_token_ids = s->n_stop_token_ids;
    p->stop_token_ids = numbers(s->stop_token_ids);
    p->n_stop = s->n_stop;
    p->stop = bt_arena_alloc(a, s->n_stop * sizeof *p->stop);
    p->n_logit_bias = s->n_logit_bias;
    p->logit_bias = bt_arena_alloc(a, s->n_logit_bias * sizeof *p->logit_bias);
    Baton__V1__SamplingParams__LogitBiasEntry *e = bt_arena_alloc(a, s->n_logit_bias * sizeof *e);

    if (p->stop == NULL || p->logit_bias == NULL || e == NULL) {
        return false;
    }
    for (size_t i = 0; i < s->n_stop; i++) {
        p->stop[i] = bytes(s->stop[i], s->stop_len != NULL ? s->stop_len[i] : 0);
    }
    for (size_t i = 0; i < s->n_logit_bias; i++) {
        baton__v1__sampling_params__logit_bias_entry__init(&e[i]);
        e[i].key = s->logit_bias[i].token;
        e[i].value = s->logit_bias[i].bias;
        p->logit_bias[i] = &e[i];
    }
    return true;
}

static bool put_messages(const struct bt_inf_generate *m, Baton__V1__Chat *chat, struct bt_arena *a)
{
    Baton__V1__Message *list = bt_arena_alloc(a, m->n_messages * sizeof *list);

    chat->n_messages = m->n_messages;
    chat->messages = bt_arena_alloc(a, m->n_messages * sizeof *chat->messages);
    if (list == NULL || chat->messages == NULL) {
        return false;
    }
    for (size_t i = 0; i < m->n_messages; i++) {
        baton__v1__message__init(&list[i]);
        list[i].role = bytes(m->messages[i].role, m->messages[i].role_len);
        list[i].content = bytes(m->messages[i].content, m->messages[i].content_len);
        chat->messages[i] = &list[i];
    }
    return true;
}

enum bt_status bt_inf_generate_encode(const struct bt_inf_generate *m, struct bt_buf *out)
{
    struct bt_arena a;
    pb_request w = BATON__V1__GENERATE_REQUEST__INIT;
    pb_sampling sampling = BATON__V1__SAMPLING_PARAMS__INIT;
    Baton__V1__TokenIds ids = BATON__V1__TOKEN_IDS__INIT;
    Baton__V1__Chat chat = BATON__V1__CHAT__INIT;

    bt_arena_init(&a, ENCODE_ARENA_MAX);
    bool ok = put_sampling(&m->sampling, &sampling, &a);

    w.request_id = bt_pb_text(m->request_id);
    w.model = bt_pb_text(m->model);
    w.sampling = &sampling;
    w.timings = m->timings;
    w.priority = m->priority;
    if (m->has_logprobs) {
        w.opt_logprobs_case = BATON__V1__GENERATE_REQUEST__OPT_LOGPROBS_LOGPROBS;
        w.logprobs = m->logprobs;
    }
    switch (m->input) {
    case BT_INF_NO_INPUT:
        break;
    case BT_INF_TEXT:
        w.input_case = BATON__V1__GENERATE_REQUEST__INPUT_TEXT;
        w.text = bytes(m->text, m->text_len);
        break;
    case BT_INF_TOKEN_IDS:
        w.input_case = BATON__V1__GENERATE_REQUEST__INPUT_TOKEN_IDS;
        ids.n_ids = m->n_token_ids;
        ids.ids = numbers(m->token_ids);
        w.token_ids = &ids;
        break;
    case BT_INF_CHAT:
        w.input_case = BATON__V1__GENERATE_REQUEST__INPUT_CHAT;
        ok = ok && put_messages(m, &chat, &a);
        w.chat = &chat;
        break;
    }
    return pack(ok, &w.base, &a, out);
}

/* ---- GenerateResponse ---- */

static struct bt_inf_logprob get_logprob(const Baton__V1__TokenLogprob *p)
{
    return p == NULL ? (struct bt_inf_logprob){.text = ""}
                     : (struct bt_inf_logprob){p->id, chars(&p->text), p->logprob, p->text.len};
}

static bool get_logprobs(const pb_response *m, struct bt_arena *arena, struct bt_inf_generated *out)
{
    struct bt_inf_logprobs *list = bt_arena_alloc(arena, m->n_logprobs * sizeof *list);

    if (list == NULL) {
        return false;
    }
    for (size_t i = 0; i < m->n_logprobs; i++) {
        const Baton__V1__TokenLogprobs *p = m->logprobs[i];
        struct bt_inf_logprob *top = bt_arena_alloc(arena, p->n_top * sizeof *top);

        if (top == NULL) {
            return false;
        }
        for (size_t k = 0; k < p->n_top; k++) {
            top[k] = get_logprob(p->top[k]);
        }
        list[i] = (struct bt_inf_logprobs){get_logprob(p->chosen), p->n_top, top};
    }
    out->n_logprobs = m->n_logprobs;
    out->logprobs = list;
    return true;
}

static struct bt_inf_timings get_timings(const Baton__V1__Timings *p)
{
    return (struct bt_inf_timings){
        .tokenize_ms = p->tokenize_ms,
        .queue_ms = p->queue_ms,
        .prefill_ms = p->prefill_ms,
        .first_token_ms = p->first_token_ms,
        .transfer_ms = p->transfer_ms,
        .transfer_tail_ms = p->transfer_tail_ms,
        .decode_ms = p->decode_ms,
        .detokenize_ms = p->detokenize_ms,
        .prefill_tokens = p->prefill_tokens,
        .decode_tokens = p->decode_tokens,
        .transferred_tokens = p->transferred_tokens,
        .transferred_bytes = p->transferred_bytes,
        .local_prefills = p->local_prefills,
    };
}

enum bt_status bt_inf_generated_decode(const void *data, size_t n, struct bt_arena *arena,
                                       struct bt_inf_generated *out, struct bt_err *err)
{
    ProtobufCAllocator pa = bt_pb_arena(arena);
    pb_response *m = baton__v1__generate_response__unpack(&pa, n, data);

    if (m == NULL) {
        return bad(err, "GenerateResponse");
    }
    *out = (struct bt_inf_generated){.index = m->index,
                                     .text = chars(&m->text),
                                     .text_len = m->text.len,
                                     .n_token_ids = m->n_token_ids,
                                     .token_ids = m->token_ids,
                                     .finish_reason = m->finish_reason};
    if (m->usage != NULL) {
        out->has_usage = true;
        out->usage = (struct bt_inf_usage){m->usage->prompt_tokens, m->usage->completion_tokens,
                                           m->usage->cached_tokens, m->usage->transferred_tokens};
    }
    if (m->timings != NULL) {
        out->has_timings = true;
        out->timings = get_timings(m->timings);
    }
    return get_logprobs(m, arena, out) ? BT_OK : bad(err, "GenerateResponse");
}

static void put_logprob(const struct bt_inf_logprob *l, Baton__V1__TokenLogprob *p)
{
    baton__v1__token_logprob__init(p);
    p->id = l->id;
    p->text = bytes(l->text, l->text_len);
    p->logprob = l->logprob;
}

static bool put_logprobs(const struct bt_inf_generated *m, pb_response *w, struct bt_arena *a)
{
    Baton__V1__TokenLogprobs *list = bt_arena_alloc(a, m->n_logprobs * sizeof *list);

    w->n_logprobs = m->n_logprobs;
    w->logprobs = bt_arena_alloc(a, m->n_logprobs * sizeof *w->logprobs);
    if (list == NULL || w->logprobs == NULL) {
        return false;
    }
    for (size_t i = 0; i < m->n_logprobs; i++) {
        const struct bt_inf_logprobs *l = &m->logprobs[i];
        Baton__V1__TokenLogprob *t = bt_arena_alloc(a, (l->n_top + 1) * sizeof *t);

        baton__v1__token_logprobs__init(&list[i]);
        list[i].n_top = l->n_top;
        list[i].top = bt_arena_alloc(a, l->n_top * sizeof *list[i].top);
        if (t == NULL || list[i].top == NULL) {
            return false;
        }
        put_logprob(&l->chosen, &t[l->n_top]);
        list[i].chosen = &t[l->n_top];
        for (size_t k = 0; k < l->n_top; k++) {
            put_logprob(&l->top[k], &t[k]);
            list[i].top[k] = &t[k];
        }
        w->logprobs[i] = &list[i];
    }
    return true;
}

static void put_timings(const struct bt_inf_timings *t, Baton__V1__Timings *p)
{
    p->tokenize_ms = t->tokenize_ms;
    p->queue_ms = t->queue_ms;
    p->prefill_ms = t->prefill_ms;
    p->first_token_ms = t->first_token_ms;
    p->transfer_ms = t->transfer_ms;
    p->transfer_tail_ms = t->transfer_tail_ms;
    p->decode_ms = t->decode_ms;
    p->detokenize_ms = t->detokenize_ms;
    p->prefill_tokens = t->prefill_tokens;
    p->decode_tokens = t->decode_tokens;
    p->transferred_tokens = t->transferred_tokens;
    p->transferred_bytes = t->transferred_bytes;
    p->local_prefills = t->local_prefills;
}

enum bt_status bt_inf_generated_encode(const struct bt_inf_generated *m, struct bt_buf *out)
{
    struct bt_arena a;
    pb_response w = BATON__V1__GENERATE_RESPONSE__INIT;
    Baton__V1__Usage usage = BATON__V1__USAGE__INIT;
    Baton__V1__Timings timings = BATON__V1__TIMINGS__INIT;

    bt_arena_init(&a, ENCODE_ARENA_MAX);
    w.index = m->index;
    w.text = bytes(m->text, m->text_len);
    w.n_token_ids = m->n_token_ids;
    w.token_ids = numbers(m->token_ids);
    w.finish_reason = bt_pb_text(m->finish_reason);
    if (m->has_usage) {
        usage.prompt_tokens = m->usage.prompt_tokens;
        usage.completion_tokens = m->usage.completion_tokens;
        usage.cached_tokens = m->usage.cached_tokens;
        usage.transferred_tokens = m->usage.transferred_tokens;
        w.usage = &usage;
    }
    if (m->has_timings) {
        put_timings(&m->timings, &timings);
        w.timings = &timings;
    }
    return pack(put_logprobs(m, &w, &a), &w.base, &a, out);
}

/* ---- the small ones ---- */

enum bt_status bt_inf_tokenize_encode(const struct bt_inf_tokenize *m, struct bt_buf *out)
{
    Baton__V1__TokenizeRequest w = BATON__V1__TOKENIZE_REQUEST__INIT;

    w.model = bt_pb_text(m->model);
    w.text = bytes(m->text, m->text_len);
    w.add_special_tokens = m->add_special_tokens;
    w.parse_special = m->parse_special;
    return bt_pb_pack(&w.base, out);
}

enum bt_status bt_inf_tokenize_decode(const void *data, size_t n, struct bt_arena *arena,
                                      struct bt_inf_tokenize *out, struct bt_err *err)
{
    ProtobufCAllocator pa = bt_pb_arena(arena);
    Baton__V1__TokenizeRequest *m = baton__v1__tokenize_request__unpack(&pa, n, data);

    if (m == NULL) {
        return bad(err, "TokenizeRequest");
    }
    *out = (struct bt_inf_tokenize){m->model, chars(&m->text), m->text.len,
                                    m->add_special_tokens != 0, m->parse_special != 0};
    return BT_OK;
}

enum bt_status bt_inf_ids_encode(const struct bt_inf_ids *m, struct bt_buf *out)
{
    Baton__V1__TokenizeResponse w = BATON__V1__TOKENIZE_RESPONSE__INIT;

    w.n_ids = m->n_ids;
    w.ids = numbers(m->ids);
    return bt_pb_pack(&w.base, out);
}

enum bt_status bt_inf_ids_decode(const void *data, size_t n, struct bt_arena *arena,
                                 struct bt_inf_ids *out, struct bt_err *err)
{
    ProtobufCAllocator pa = bt_pb_arena(arena);
    Baton__V1__TokenizeResponse *m = baton__v1__tokenize_response__unpack(&pa, n, data);

    if (m == NULL) {
        return bad(err, "TokenizeResponse");
    }
    *out = (struct bt_inf_ids){m->n_ids, m->ids};
    return BT_OK;
}

enum bt_status bt_inf_detokenize_encode(const struct bt_inf_detokenize *m, struct bt_buf *out)
{
    Baton__V1__DetokenizeRequest w = BATON__V1__DETOKENIZE_REQUEST__INIT;

    w.model = bt_pb_text(m->model);
    w.n_ids = m->n_ids;
    w.ids = numbers(m->ids);
    w.skip_special_tokens = m->skip_special_tokens;
    return bt_pb_pack(&w.base, out);
}

enum bt_status bt_inf_detokenize_decode(const void *data, size_t n, struct bt_arena *arena,
                                        struct bt_inf_detokenize *out, struct bt_err *err)
{
    ProtobufCAllocator pa = bt_pb_arena(arena);
    Baton__V1__DetokenizeRequest *m = baton__v1__detokenize_request__unpack(&pa, n, data);

    if (m == NULL) {
        return bad(err, "DetokenizeRequest");
    }
    *out = (struct bt_inf_detokenize){m->model, m->n_ids, m->ids, m->skip_special_tokens != 0};
    return BT_OK;
}

enum bt_status bt_inf_text_encode(const char *s, size_t len, struct bt_buf *out)
{
    Baton__V1__DetokenizeResponse w = BATON__V1__DETOKENIZE_RESPONSE__INIT;

    w.text = bytes(s, len);
    return bt_pb_pack(&w.base, out);
}

enum bt_status bt_inf_text_decode(const void *data, size_t n, struct bt_arena *arena,
                                  const char **out, size_t *len, struct bt_err *err)
{
    ProtobufCAllocator pa = bt_pb_arena(arena);
    Baton__V1__DetokenizeResponse *m = baton__v1__detokenize_response__unpack(&pa, n, data);

    if (m == NULL) {
        return bad(err, "DetokenizeResponse");
    }
    *out = chars(&m->text);
    *len = m->text.len;
    return BT_OK;
}

enum bt_status bt_inf_abort_encode(const char *request_id, struct bt_buf *out)
{
    Baton__V1__AbortRequest w = BATON__V1__ABORT_REQUEST__INIT;

    w.request_id = bt_pb_text(request_id);
    return bt_pb_pack(&w.base, out);
}

enum bt_status bt_inf_abort_decode(const void *data, size_t n, struct bt_arena *arena,
                                   const char **request_id, struct bt_err *err)
{
    ProtobufCAllocator pa = bt_pb_arena(arena);
    Baton__V1__AbortRequest *m = baton__v1__abort_request__unpack(&pa, n, data);

    if (m == NULL) {
        return bad(err, "AbortRequest");
    }
    *request_id = m->request_id;
    return BT_OK;
}

enum bt_status bt_inf_aborted_encode(bool found, struct bt_buf *out)
{
    Baton__V1__AbortResponse w = BATON__V1__ABORT_RESPONSE__INIT;

    w.found = found;
    return bt_pb_pack(&w.base, out);
}

enum bt_status bt_inf_aborted_decode(const void *data, size_t n, struct bt_arena *arena,
                                     bool *found, struct bt_err *err)
{
    ProtobufCAllocator pa = bt_pb_arena(arena);
    Baton__V1__AbortResponse *m = baton__v1__abort_response__unpack(&pa, n, data);

    if (m == NULL) {
        return bad(err, "AbortResponse");
    }
    *found = m->found != 0;
    return BT_OK;
}

enum bt_status bt_inf_models_encode(const struct bt_inf_models *m, struct bt_buf *out)
{
    struct bt_arena a;
    Baton__V1__ListModelsResponse w = BATON__V1__LIST_MODELS_RESPONSE__INIT;

    bt_arena_init(&a, ENCODE_ARENA_MAX);
    Baton__V1__Model *list = bt_arena_alloc(&a, m->n_models * sizeof *list);

    w.models = bt_arena_alloc(&a, m->n_models * sizeof *w.models);
    w.n_models = m->n_models;
    bool ok = list != NULL && w.models != NULL;

    for (size_t i = 0; ok && i < m->n_models; i++) {
        baton__v1__model__init(&list[i]);
        list[i].id = bt_pb_text(m->models[i].id);
        list[i].context = m->models[i].context;
        w.models[i] = &list[i];
    }
    return pack(ok, &w.base, &a, out);
}

enum bt_status bt_inf_models_decode(const void *data, size_t n, struct bt_arena *arena,
                                    struct bt_inf_models *out, struct bt_err *err)
{
    ProtobufCAllocator pa = bt_pb_arena(arena);
    Baton__V1__ListModelsResponse *m = baton__v1__list_models_response__unpack(&pa, n, data);
    struct bt_inf_model *list =
        m == NULL ? NULL : bt_arena_alloc(arena, m->n_models * sizeof *list);

    if (list == NULL) {
        return bad(err, "ListModelsResponse");
    }
    for (size_t i = 0; i < m->n_models; i++) {
        list[i] = (struct bt_inf_model){m->models[i]->id, m->models[i]->context};
    }
    *out = (struct bt_inf_models){m->n_models, list};
    return BT_OK;
}

/* ---- GetClusterResponse ---- */

static bool put_node(const struct bt_inf_node *n, Baton__V1__Node *p, struct bt_arena *a)
{
    Baton__V1__Transport *list = bt_arena_alloc(a, n->n_transports * sizeof *list);

    baton__v1__node__init(p);
    p->transports = bt_arena_alloc(a, n->n_transports * sizeof *p->transports);
    if (list == NULL || p->transports == NULL) {
        return false;
    }
    p->name = bt_pb_text(n->name);
    p->role = bytes(n->role, 0);
    p->instance = bt_pb_text(n->instance);
    p->state = bt_pb_text(n->state);
    p->backend = bt_pb_text(n->backend);
    p->numerics = bt_pb_text(n->numerics);
    p->transfer_address = bt_pb_text(n->transfer_address);
    p->kv_layout = bt_pb_text(n->kv_layout);
    p->fingerprint = bt_pb_text(n->fingerprint);
    p->page_tokens = n->page_tokens;
    p->pages_free = n->pages_free;
    p->pages_cached = n->pages_cached;
    p->pages_leased = n->pages_leased;
    p->pages_quarantined = n->pages_quarantined;
    p->waiting = n->waiting;
    p->running = n->running;
    p->prefill_tokens_per_s = n->prefill_tokens_per_s;
    p->decode_step_ms = n->decode_step_ms;
    p->transferred_bytes_total = n->transferred_bytes_total;
    p->local_prefills_total = n->local_prefills_total;
    p->n_transports = n->n_transports;
    for (size_t i = 0; i < n->n_transports; i++) {
        baton__v1__transport__init(&list[i]);
        list[i].peer = bt_pb_text(n->transports[i].peer);
        list[i].description = bt_pb_text(n->transports[i].description);
        p->transports[i] = &list[i];
    }
    return true;
}

enum bt_status bt_inf_cluster_encode(const struct bt_inf_cluster *m, struct bt_buf *out)
{
    struct bt_arena a;
    Baton__V1__GetClusterResponse w = BATON__V1__GET_CLUSTER_RESPONSE__INIT;

    bt_arena_init(&a, ENCODE_ARENA_MAX);
    Baton__V1__Node *list = bt_arena_alloc(&a, m->n_nodes * sizeof *list);

    w.model = bt_pb_text(m->model);
    w.router_instance = bt_pb_text(m->router_instance);
    w.local_prefill = bt_pb_text(m->local_prefill);
    w.requests_running = m->requests_running;
    w.requests_waiting = m->requests_waiting;
    w.requests_total = m->requests_total;
    w.prompt_tokens_total = m->prompt_tokens_total;
    w.generated_tokens_total = m->generated_tokens_total;
    w.n_nodes = m->n_nodes;
    w.nodes = bt_arena_alloc(&a, m->n_nodes * sizeof *w.nodes);
    bool ok = list != NULL && w.nodes != NULL;

    for (size_t i = 0; ok && i < m->n_nodes; i++) {
        ok = put_node(&m->nodes[i], &list[i], &a);
        w.nodes[i] = &list[i];
    }
    return pack(ok, &w.base, &a, out);
}

static bool get_node(const Baton__V1__Node *p, struct bt_arena *arena, struct bt_inf_node *n)
{
    struct bt_inf_transport *t = bt_arena_alloc(arena, p->n_transports * sizeof *t);

    if (t == NULL) {
        return false;
    }
    for (size_t i = 0; i < p->n_transports; i++) {
        t[i] = (struct bt_inf_transport){p->transports[i]->peer, p->transports[i]->description};
    }
    *n = (struct bt_inf_node){
        .name = p->name,
        .role = chars(&p->role),
        .instance = p->instance,
        .state = p->state,
        .backend = p->backend,
        .numerics = p->numerics,
        .transfer_address = p->transfer_address,
        .kv_layout = p->kv_layout,
        .fingerprint = p->fingerprint,
        .page_tokens = p->page_tokens,
        .pages_free = p->pages_free,
        .pages_cached = p->pages_cached,
        .pages_leased = p->pages_leased,
        .pages_quarantined = p->pages_quarantined,
        .waiting = p->waiting,
        .running = p->running,
        .prefill_tokens_per_s = p->prefill_tokens_per_s,
        .decode_step_ms = p->decode_step_ms,
        .transferred_bytes_total = p->transferred_bytes_total,
        .local_prefills_total = p->local_prefills_total,
        .n_transports = p->n_transports,
        .transports = t,
    };
    return true;
}

enum bt_status bt_inf_cluster_decode(const void *data, size_t n, struct bt_arena *arena,
                                     struct bt_inf_cluster *out, struct bt_err *err)
{
    ProtobufCAllocator pa = bt_pb_arena(arena);
    Baton__V1__GetClusterResponse *m = baton__v1__get_cluster_response__unpack(&pa, n, data);
    struct bt_inf_node *nodes =
        m == NULL ? NULL : bt_arena_alloc(arena, m->n_nodes * sizeof *nodes);

    if (nodes == NULL) {
        return bad(err, "GetClusterResponse");
    }
    for (size_t i = 0; i < m->n_nodes; i++) {
        if (!get_node(m->nodes[i], arena, &nodes[i])) {
            return bad(err, "GetClusterResponse");
        }
    }
    *out = (struct bt_inf_cluster){
        .model = m->model,
        .router_instance = m->router_instance,
        .local_prefill = m->local_prefill,
        .n_nodes = m->n_nodes,
        .nodes = nodes,
        .requests_running = m->requests_running,
        .requests_waiting = m->requests_waiting,
        .requests_total = m->requests_total,
        .prompt_tokens_total = m->prompt_tokens_total,
        .generated_tokens_total = m->generated_tokens_total,
    };
    return BT_OK;
}
