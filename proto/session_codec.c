/* Session messages between plain structs and protobuf bytes. Owns the validation of everything that
 * comes over a session stream; refuses to know what any of it means. */

#include "proto/session.h"

#include <math.h>
#include "base/mem.h"
#include "base/utf8.h"
#include "baton/session/v1/session.pb-c.h"
#include "proto/pb_arena_int.h"

#define ENCODE_ARENA_MAX ((size_t)128 << 20)
/* Of speeds and times: what is beyond was not measured. */
#define MEASURED_MIN 1e-6
#define SPEED_MAX    1e12 /* tokens a second */
#define STEP_MAX     1e7  /* ms */
#define WAITING_MAX  (UINT64_C(1) << 40)

typedef Baton__Session__V1__FromDaemon pb_from_daemon;
typedef Baton__Session__V1__FromRouter pb_from_router;

const char *bt_role_name(enum bt_role r)
{
    return r == BT_ROLE_PREFILL ? "prefill" : r == BT_ROLE_DECODE ? "decode" : "both";
}

bool bt_role_parse(const char *name, enum bt_role *out)
{
    for (enum bt_role r = BT_ROLE_PREFILL; r <= BT_ROLE_BOTH; r++) {
        if (strcmp(name, bt_role_name(r)) == 0) {
            *out = r;
            return true;
        }
    }
    return false;
}

/* ---- decode ---- */

static enum bt_status bad(struct bt_err *err, const char *field, const char *what)
{
    return bt_err_set(err, BT_ERR_PROTOCOL, "session message: %s: %s", field, what);
}

static enum bt_status get_ticket(const ProtobufCBinaryData *b, struct bt_ticket *out,
                                 struct bt_err *err)
{
    if (b->len != BT_TICKET_BYTES) {
        return bad(err, "ticket", "must be 16 bytes");
    }
    memcpy(out->b, b->data, BT_TICKET_BYTES);
    return BT_OK;
}

static enum bt_status get_sampled(const Baton__Session__V1__SampledToken *p, struct bt_sampled *out,
                                  struct bt_err *err)
{
    if (p->n_top > BT_LOGPROBS_MAX) {
        return bad(err, "top", "more than 20 log-probabilities");
    }
    *out =
        (struct bt_sampled){.token = p->token, .logprob = p->logprob, .n_top = (uint32_t)p->n_top};
    for (size_t i = 0; i < p->n_top; i++) {
        out->top[i] = (struct bt_top_logprob){p->top[i]->token, p->top[i]->logprob};
    }
    return BT_OK;
}

static enum bt_status get_sampled_list(size_t n, Baton__Session__V1__SampledToken *const *list,
                                       struct bt_arena *arena, const struct bt_sampled **out,
                                       struct bt_err *err)
{
    size_t bytes;

    if (!bt_mul_size(n, sizeof(struct bt_sampled), &bytes)) {
        return BT_ERR_NOMEM;
    }
    struct bt_sampled *s = bt_arena_alloc(arena, bytes);

    if (s == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "session message: too large");
    }
    for (size_t i = 0; i < n; i++) {
        enum bt_status st = get_sampled(list[i], &s[i], err);

        if (st != BT_OK) {
            return st;
        }
    }
    *out = s;
    return BT_OK;
}

/* Names and descriptions end in logs, headers, metric labels and other people's messages. */
bool bt_trace_id_valid(const char *s)
{
    return strspn(s, "0123456789abcdef") >= BT_TRACE_ID_DIGITS &&
           strspn(s, "0") < BT_TRACE_ID_DIGITS;
}

static bool printable(const char *s)
{
    for (const char *c = s; *c != '\0'; c++) {
        if ((unsigned char)*c < 0x20 || *c == 0x7f) {
            return false;
        }
    }
    return bt_utf8_valid(s, strlen(s), NULL);
}

/* Empty: none. */
static enum bt_status get_token(const ProtobufCBinaryData *b, const char *field,
                                struct bt_gate_token *t, struct bt_err *err)
{
    *t = (struct bt_gate_token){{0}};
    if (b->len != 0 && b->len != sizeof t->b) {
        return bad(err, field, "must be 16 bytes, or empty");
    }
    if (b->len != 0) {
        memcpy(t->b, b->data, sizeof t->b);
    }
    return BT_OK;
}

static enum bt_status get_hello(const Baton__Session__V1__Hello *p, struct bt_msg_hello *h,
                                struct bt_err *err)
{
    if (!bt_role_parse(p->role, &h->role)) {
        return bad(err, "hello.role", "must be prefill, decode or both");
    }
    if (p->instance == 0) {
        return bad(err, "hello.instance", "must not be 0");
    }
    if (p->version_min > p->version_max) {
        return bad(err, "hello.version_min", "greater than version_max");
    }
    const char *const strings[][2] = {
        {"hello.name", p->name},
        {"hello.numerics", p->numerics},
        {"hello.kv_layout", p->kv_layout},
        {"hello.model_name", p->model_name},
        {"hello.transfer_address", p->transfer_address},
        {"hello.backend", p->backend},
    };

    for (size_t i = 0; i < sizeof strings / sizeof strings[0]; i++) {
        if (!printable(strings[i][1])) {
            return bad(err, strings[i][0], "not UTF-8, or a control character in it");
        }
    }
    h->version_min = p->version_min;
    h->version_max = p->version_max;
    h->instance = p->instance;
    h->name = p->name;
    h->fingerprint = p->fingerprint;
    h->numerics = p->numerics;
    h->kv_layout = p->kv_layout;
    h->model_name = p->model_name;
    h->transfer_address = p->transfer_address;
    h->backend = p->backend;
    h->page_tokens = p->page_tokens;
    h->n_pages = p->n_pages;
    h->max_batch = p->max_batch;
    h->max_tokens = p->max_tokens;
    h->context = p->context;
    h->vocab = p->vocab;
    h->chunk_tokens = p->chunk_tokens;
    h->lease_ms = p->lease_ms;
    return get_token(&p->gate_token, "hello.gate_token", &h->gate_token, err);
}

/* What a node has measured. Nonsense counts as not measured, so that nobody need be careful when dividing by it. */
static double measured(double x, double max)
{
    return isfinite(x) && x >= MEASURED_MIN && x <= max ? x : 0;
}

static enum bt_status get_load(const Baton__Session__V1__Load *p, struct bt_arena *arena,
                               struct bt_msg_load *l, struct bt_err *err)
{
    if (p->n_transports > BT_SESSION_PEERS_MAX) {
        return bad(err, "load.transports", "too many");
    }
    struct bt_msg_transport *t = bt_arena_alloc(arena, p->n_transports * sizeof *t);

    if (t == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "session message: too large");
    }
    for (size_t i = 0; i < p->n_transports; i++) {
        if (!printable(p->transports[i]->description)) {
            return bad(err, "load.transports", "not UTF-8, or a control character in it");
        }
        t[i] = (struct bt_msg_transport){p->transports[i]->peer, p->transports[i]->description};
    }
    const Baton__Session__V1__PrefixBlocks *b = p->prefix_blocks;

    if (b != NULL && (b->n_added > BT_SESSION_BLOCKS_MAX || b->n_removed > BT_SESSION_BLOCKS_MAX)) {
        return bad(err, "load.prefix_blocks", "too many");
    }
    *l = (struct bt_msg_load){
        .waiting = p->waiting,
        .running = p->running,
        .held = p->held,
        .landing = p->landing,
        .waiting_tokens = p->waiting_tokens < WAITING_MAX ? p->waiting_tokens : WAITING_MAX,
        .pages_free = p->pages_free,
        .pages_cached = p->pages_cached,
        .pages_leased = p->pages_leased,
        .pages_quarantined = p->pages_quarantined,
        .transferred_tokens = p->transferred_tokens,
        .transferred_bytes = p->transferred_bytes,
        .transfer_failures = p->transfer_failures,
        .stale_messages = p->stale_messages,
        .local_prefills = p->local_prefills,
        .prefill_tokens_per_s = measured(p->prefill_tokens_per_s, SPEED_MAX),
        .decode_step_ms = measured(p->decode_step_ms, STEP_MAX),
        .pages_short = p->pages_short != 0,
        .n_transports = p->n_transports,
        .transports = t,
    };
    if (b != NULL) {
        l->prefix_blocks = (struct bt_msg_prefix_blocks){.told = true,
                                                         .reset = b->reset != 0,
                                                         .n_added = b->n_added,
                                                         .n_removed = b->n_removed,
                                                         .added = b->added,
                                                         .removed = b->removed};
    }
    return BT_OK;
}

static enum bt_status get_output(const Baton__Session__V1__Output *p, struct bt_arena *arena,
                                 struct bt_msg_output *o, struct bt_err *err)
{
    enum bt_status st = get_ticket(&p->ticket, &o->ticket, err);

    if (st != BT_OK) {
        return st;
    }
    if (p->finish > 2) {
        return bad(err, "output.finish", "unknown value");
    }
    if (p->n_tokens > BT_SESSION_TOKENS_MAX || p->index > BT_SESSION_TOKENS_MAX) {
        return bad(err, "output.tokens", "too many");
    }
    o->index = p->index;
    o->finish = p->finish;
    o->has_logprobs = p->has_logprobs != 0;
    o->n_tokens = p->n_tokens;
    o->n_prompt_logprobs = p->n_prompt_logprobs;
    o->prompt_first = p->prompt_first;
    o->has_stats = p->stats != NULL;
    if (p->stats != NULL) {
        o->stats = (struct bt_msg_leg_stats){
            .queue_ns = p->stats->queue_ns,
            .prefill_ns = p->stats->prefill_ns,
            .grant_ns = p->stats->grant_ns,
            .transfer_ns = p->stats->transfer_ns,
            .transfer_tail_ns = p->stats->transfer_tail_ns,
            .decode_ns = p->stats->decode_ns,
            .cached_tokens = p->stats->cached_tokens,
            .transferred_tokens = p->stats->transferred_tokens,
            .prefill_tokens = p->stats->prefill_tokens,
            .transferred_bytes = p->stats->transferred_bytes,
            .resent = p->stats->resent != 0,
            .batch = isfinite(p->stats->batch) && p->stats->batch > 0 ? p->stats->batch : 0,
        };
    }
    st = get_sampled_list(p->n_tokens, p->tokens, arena, &o->tokens, err);
    if (st != BT_OK) {
        return st;
    }
    return get_sampled_list(p->n_prompt_logprobs, p->prompt_logprobs, arena, &o->prompt_logprobs,
                            err);
}

static enum bt_status get_outputs(const Baton__Session__V1__Outputs *p, struct bt_arena *arena,
                                  struct bt_from_daemon *out, struct bt_err *err)
{
    struct bt_msg_output *o = bt_arena_zalloc(arena, p->n_outputs * sizeof *o);

    if (o == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "session message: too large");
    }
    for (size_t i = 0; i < p->n_outputs; i++) {
        enum bt_status st = get_output(p->outputs[i], arena, &o[i], err);

        if (st != BT_OK) {
            return st;
        }
    }
    out->outputs.n = p->n_outputs;
    out->outputs.outputs = o;
    return BT_OK;
}

static enum bt_status get_attempt_end(const Baton__Session__V1__AttemptEnd *p,
                                      struct bt_msg_attempt_end *a, struct bt_err *err)
{
    if (p->reason < BT_ATTEMPT_REFUSED || p->reason > BT_ATTEMPT_DRAINING) {
        return bad(err, "attempt_end.reason", "unknown value");
    }
    a->reason = (enum bt_attempt_reason)p->reason;
    a->text = p->text;
    a->kept = p->kept != 0;
    return get_ticket(&p->ticket, &a->ticket, err);
}

static enum bt_status get_role_state(const Baton__Session__V1__RoleState *p,
                                     struct bt_msg_role_state *out, struct bt_err *err)
{
    out->leaving = BT_ROLE_BOTH;
    if (!bt_role_parse(p->role, &out->role)) {
        return bad(err, "role_state.role", "must be prefill, decode or both");
    }
    if (p->leaving[0] != '\0' &&
        (!bt_role_parse(p->leaving, &out->leaving) || bt_role_has(out->role, out->leaving))) {
        return bad(err, "role_state.leaving", "must be the role that the node has not");
    }
    return BT_OK;
}

enum bt_status bt_from_daemon_decode(const void *data, size_t n, struct bt_arena *arena,
                                     struct bt_from_daemon *out, struct bt_err *err)
{
    ProtobufCAllocator pa = bt_pb_arena(arena);
    pb_from_daemon *m =
        n > BT_SESSION_MSG_MAX ? NULL : baton__session__v1__from_daemon__unpack(&pa, n, data);

    if (m == NULL) {
        return bad(err, "bytes", "not a FromDaemon message, or too large");
    }
    *out = (struct bt_from_daemon){.kind = BT_FROM_DAEMON_DRAINING};
    switch (m->m_case) {
    case BATON__SESSION__V1__FROM_DAEMON__M_HELLO:
        out->kind = BT_FROM_DAEMON_HELLO;
        return get_hello(m->hello, &out->hello, err);
    case BATON__SESSION__V1__FROM_DAEMON__M_LOAD:
        out->kind = BT_FROM_DAEMON_LOAD;
        return get_load(m->load, arena, &out->load, err);
    case BATON__SESSION__V1__FROM_DAEMON__M_OUTPUTS:
        out->kind = BT_FROM_DAEMON_OUTPUTS;
        return get_outputs(m->outputs, arena, out, err);
    case BATON__SESSION__V1__FROM_DAEMON__M_ATTEMPT_END:
        out->kind = BT_FROM_DAEMON_ATTEMPT_END;
        return get_attempt_end(m->attempt_end, &out->attempt_end, err);
    case BATON__SESSION__V1__FROM_DAEMON__M_PEER_STATE:
        out->kind = BT_FROM_DAEMON_PEER_STATE;
        out->peer_state = (struct bt_msg_peer_state){
            m->peer_state->instance, m->peer_state->reachable != 0, m->peer_state->text};
        return BT_OK;
    case BATON__SESSION__V1__FROM_DAEMON__M_ROLE_STATE:
        out->kind = BT_FROM_DAEMON_ROLE_STATE;
        return get_role_state(m->role_state, &out->role_state, err);
    case BATON__SESSION__V1__FROM_DAEMON__M_DRAINING:
        return BT_OK;
    default:
        return bad(err, "m", "no known message in it");
    }
}

static bool in_range(float v, float lo, float hi)
{
    return v >= lo && v <= hi; /* false for NaN */
}

static enum bt_status check_sampling(const struct bt_sampling *s, struct bt_err *err)
{
    if (!in_range(s->temperature, 0.0f, 1e6f)) {
        return bad(err, "sampling.temperature", "out of range");
    }
    if (!in_range(s->top_p, 0.0f, 1.0f) || s->top_p == 0.0f) {
        return bad(err, "sampling.top_p", "out of range");
    }
    if (!in_range(s->min_p, 0.0f, 1.0f)) {
        return bad(err, "sampling.min_p", "out of range");
    }
    if (!in_range(s->repetition_penalty, 1e-6f, 1e6f)) {
        return bad(err, "sampling.repetition_penalty", "out of range");
    }
    if (!isfinite(s->presence_penalty) || !isfinite(s->frequency_penalty)) {
        return bad(err, "sampling.presence_penalty", "not finite");
    }
    if (s->max_tokens == 0) {
        return bad(err, "sampling.max_tokens", "must not be 0");
    }
    if (s->n_top > BT_LOGPROBS_MAX) {
        return bad(err, "sampling.n_top", "more than 20");
    }
    return BT_OK;
}

static enum bt_status get_sampling(const Baton__Session__V1__Sampling *p, struct bt_arena *arena,
                                   struct bt_sampling *s, struct bt_err *err)
{
    if (p->n_stop_ids > BT_STOP_IDS_MAX) {
        return bad(err, "sampling.stop_ids", "more than 64");
    }
    if (p->n_bias_tokens > BT_LOGIT_BIAS_MAX || p->n_bias_tokens != p->n_bias_values) {
        return bad(err, "sampling.bias_tokens", "more than 1024, or not as many as bias_values");
    }
    struct bt_logit_bias *bias = bt_arena_alloc(arena, p->n_bias_tokens * sizeof *bias);

    if (bias == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "session message: too large");
    }
    for (size_t i = 0; i < p->n_bias_tokens; i++) {
        if (!isfinite(p->bias_values[i])) {
            return bad(err, "sampling.bias_values", "not finite");
        }
        bias[i] = (struct bt_logit_bias){p->bias_tokens[i], p->bias_values[i]};
    }
    *s = (struct bt_sampling){
        .temperature = p->temperature,
        .top_p = p->top_p,
        .top_k = p->top_k,
        .min_p = p->min_p,
        .repetition_penalty = p->repetition_penalty,
        .presence_penalty = p->presence_penalty,
        .frequency_penalty = p->frequency_penalty,
        .seed = p->seed,
        .choice = p->choice,
        .max_tokens = p->max_tokens,
        .min_tokens = p->min_tokens,
        .ignore_eos = p->ignore_eos != 0,
        .logprobs = p->logprobs != 0,
        .n_top = p->n_top,
        .n_stop_ids = (uint32_t)p->n_stop_ids,
        .n_bias = (uint32_t)p->n_bias_tokens,
        .bias = bias,
    };
    for (size_t i = 0; i < p->n_stop_ids; i++) {
        s->stop_ids[i] = p->stop_ids[i];
    }
    return check_sampling(s, err);
}

static enum bt_status get_submit(const Baton__Session__V1__Submit *p, struct bt_arena *arena,
                                 struct bt_msg_submit *s, struct bt_err *err)
{
    if (p->n_tokens == 0 || p->n_tokens > BT_SESSION_TOKENS_MAX) {
        return bad(err, "submit.tokens", "none, or too many");
    }
    if (p->n_prompt == 0 || p->n_prompt > p->n_tokens) {
        return bad(err, "submit.n_prompt", "must be 1 to the number of tokens");
    }
    if (p->sampling == NULL) {
        return bad(err, "submit.sampling", "missing");
    }
    s->request_id = p->request_id;
    s->n_tokens = p->n_tokens;
    s->tokens = p->tokens;
    s->n_prompt = p->n_prompt;
    s->prompt_logprobs = p->prompt_logprobs != 0;
    s->peer_instance = p->peer_instance;
    s->peer_address = p->peer_address;
    if (p->leg > BT_LEGS) {
        return bad(err, "submit.leg", "must be 0, 1 or 2");
    }
    s->leg = p->leg == 0 ? BT_ROLE_BOTH : (enum bt_role)(p->leg - 1);
    enum bt_status st = get_ticket(&p->ticket, &s->ticket, err);

    if (st == BT_OK) {
        st = get_sampling(p->sampling, arena, &s->sampling, err);
    }
    if (st == BT_OK && p->replaces.len > 0) {
        s->has_replaces = true;
        st = get_ticket(&p->replaces, &s->replaces, err);
    }
    if (st == BT_OK && p->trace_id[0] != '\0' &&
        (!bt_trace_id_valid(p->trace_id) || strlen(p->trace_id) != BT_TRACE_ID_DIGITS)) {
        st = bad(err, "submit.trace_id", "must be 32 hex digits, not all 0, or empty");
    }
    s->trace_id = p->trace_id;
    if (st == BT_OK) {
        st = get_token(&p->peer_gate_token, "submit.peer_gate_token", &s->peer_gate_token, err);
    }
    if (st == BT_OK && s->n_tokens - s->n_prompt >= s->sampling.max_tokens) {
        st = bad(err, "submit.tokens", "max_tokens are already there");
    }
    return st;
}

static enum bt_status get_peers(const Baton__Session__V1__Peers *p, struct bt_arena *arena,
                                struct bt_from_router *out, struct bt_err *err)
{
    if (p->n_peers > BT_SESSION_PEERS_MAX) {
        return bad(err, "peers", "too many");
    }
    struct bt_msg_peer *peers = bt_arena_alloc(arena, p->n_peers * sizeof *peers);

    if (peers == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "session message: too large");
    }
    for (size_t i = 0; i < p->n_peers; i++) {
        if (p->peers[i]->instance == 0) {
            return bad(err, "peers.instance", "must not be 0");
        }
        peers[i] = (struct bt_msg_peer){.instance = p->peers[i]->instance,
                                        .address = p->peers[i]->address,
                                        .name = p->peers[i]->name};
        enum bt_status st =
            get_token(&p->peers[i]->gate_token, "peers.gate_token", &peers[i].gate_token, err);

        if (st != BT_OK) {
            return st;
        }
    }
    out->peers.n = p->n_peers;
    out->peers.peers = peers;
    return BT_OK;
}

enum bt_status bt_from_router_decode(const void *data, size_t n, struct bt_arena *arena,
                                     struct bt_from_router *out, struct bt_err *err)
{
    ProtobufCAllocator pa = bt_pb_arena(arena);
    pb_from_router *m =
        n > BT_SESSION_MSG_MAX ? NULL : baton__session__v1__from_router__unpack(&pa, n, data);

    if (m == NULL) {
        return bad(err, "bytes", "not a FromRouter message, or too large");
    }
    *out = (struct bt_from_router){.kind = BT_FROM_ROUTER_HEARTBEAT};
    switch (m->m_case) {
    case BATON__SESSION__V1__FROM_ROUTER__M_WELCOME:
        out->kind = BT_FROM_ROUTER_WELCOME;
        out->welcome = (struct bt_msg_welcome){m->welcome->version, m->welcome->reason,
                                               m->welcome->instance, m->welcome->name};
        return BT_OK;
    case BATON__SESSION__V1__FROM_ROUTER__M_SUBMIT:
        out->kind = BT_FROM_ROUTER_SUBMIT;
        return get_submit(m->submit, arena, &out->submit, err);
    case BATON__SESSION__V1__FROM_ROUTER__M_CANCEL:
        out->kind = BT_FROM_ROUTER_CANCEL;
        out->cancel.keep = m->cancel->keep != 0;
        return get_ticket(&m->cancel->ticket, &out->cancel.ticket, err);
    case BATON__SESSION__V1__FROM_ROUTER__M_PEERS:
        out->kind = BT_FROM_ROUTER_PEERS;
        return get_peers(m->peers, arena, out, err);
    case BATON__SESSION__V1__FROM_ROUTER__M_HEARTBEAT:
        return BT_OK;
    case BATON__SESSION__V1__FROM_ROUTER__M_DRAIN:
        out->kind = BT_FROM_ROUTER_DRAIN;
        return BT_OK;
    case BATON__SESSION__V1__FROM_ROUTER__M_SET_ROLE:
        out->kind = BT_FROM_ROUTER_SET_ROLE;
        return bt_role_parse(m->set_role->role, &out->set_role)
                   ? BT_OK
                   : bad(err, "set_role.role", "must be prefill, decode or both");
    default:
        return bad(err, "m", "no known message in it");
    }
}

/* ---- encode: a protobuf-c tree in a scratch arena, then packed ---- */

/* protobuf-c wants void *; it only reads it. */
static ProtobufCBinaryData bytes(const uint8_t *p, size_t n)
{
    union {
        const uint8_t *in;
        uint8_t *out;
    } u = {.in = p};

    return (ProtobufCBinaryData){n, u.out};
}

static ProtobufCBinaryData ticket(const struct bt_ticket *t)
{
    return bytes(t->b, sizeof t->b);
}

static ProtobufCBinaryData token(const struct bt_gate_token *t)
{
    return bytes(t->b, bt_gate_token_is_set(t) ? sizeof t->b : 0);
}

static Baton__Session__V1__SampledToken **put_sampled(const struct bt_sampled *s, size_t n,
                                                      bool logprobs, struct bt_arena *a)
{
    Baton__Session__V1__SampledToken **list = bt_arena_alloc(a, n * sizeof *list);

    for (size_t i = 0; list != NULL && i < n; i++) {
        Baton__Session__V1__SampledToken *p = bt_arena_alloc(a, sizeof *p);

        if (p == NULL) {
            return NULL;
        }
        baton__session__v1__sampled_token__init(p);
        list[i] = p;
        p->token = s[i].token;
        if (!logprobs) {
            continue;
        }
        p->logprob = s[i].logprob;
        p->n_top = s[i].n_top;
        p->top = bt_arena_alloc(a, s[i].n_top * sizeof *p->top);
        Baton__Session__V1__Logprob *top = bt_arena_alloc(a, s[i].n_top * sizeof *top);

        if (p->top == NULL || top == NULL) {
            return NULL;
        }
        for (uint32_t j = 0; j < s[i].n_top; j++) {
            baton__session__v1__logprob__init(&top[j]);
            top[j].token = s[i].top[j].token;
            top[j].logprob = s[i].top[j].logprob;
            p->top[j] = &top[j];
        }
    }
    return list;
}

static bool put_output(const struct bt_msg_output *o, Baton__Session__V1__Output *p,
                       struct bt_arena *a)
{
    baton__session__v1__output__init(p);
    p->ticket = ticket(&o->ticket);
    p->index = o->index;
    p->finish = o->finish;
    p->has_logprobs = o->has_logprobs;
    p->prompt_first = o->prompt_first;
    p->n_tokens = o->n_tokens;
    p->tokens = put_sampled(o->tokens, o->n_tokens, o->has_logprobs, a);
    p->n_prompt_logprobs = o->n_prompt_logprobs;
    p->prompt_logprobs = put_sampled(o->prompt_logprobs, o->n_prompt_logprobs, true, a);
    if (o->has_stats) {
        Baton__Session__V1__LegStats *s = bt_arena_alloc(a, sizeof *s);

        if (s == NULL) {
            return false;
        }
        baton__session__v1__leg_stats__init(s);
        s->queue_ns = o->stats.queue_ns;
        s->prefill_ns = o->stats.prefill_ns;
        s->grant_ns = o->stats.grant_ns;
        s->cached_tokens = o->stats.cached_tokens;
        s->transfer_ns = o->stats.transfer_ns;
        s->transfer_tail_ns = o->stats.transfer_tail_ns;
        s->decode_ns = o->stats.decode_ns;
        s->transferred_tokens = o->stats.transferred_tokens;
        s->transferred_bytes = o->stats.transferred_bytes;
        s->prefill_tokens = o->stats.prefill_tokens;
        s->batch = o->stats.batch;
        s->resent = o->stats.resent;
        p->stats = s;
    }
    return p->tokens != NULL && p->prompt_logprobs != NULL;
}

static bool put_outputs(const struct bt_from_daemon *m, Baton__Session__V1__Outputs *p,
                        struct bt_arena *a)
{
    Baton__Session__V1__Output *o = bt_arena_alloc(a, m->outputs.n * sizeof *o);

    p->outputs = bt_arena_alloc(a, m->outputs.n * sizeof *p->outputs);
    p->n_outputs = m->outputs.n;
    if (o == NULL || p->outputs == NULL) {
        return false;
    }
    for (size_t i = 0; i < m->outputs.n; i++) {
        p->outputs[i] = &o[i];
        if (!put_output(&m->outputs.outputs[i], &o[i], a)) {
            return false;
        }
    }
    return true;
}

static void put_hello(const struct bt_msg_hello *h, Baton__Session__V1__Hello *p)
{
    p->version_min = h->version_min;
    p->version_max = h->version_max;
    p->role = bt_pb_text(bt_role_name(h->role));
    p->instance = h->instance;
    p->name = bt_pb_text(h->name);
    p->fingerprint = h->fingerprint;
    p->numerics = bt_pb_text(h->numerics);
    p->kv_layout = bt_pb_text(h->kv_layout);
    p->model_name = bt_pb_text(h->model_name);
    p->transfer_address = bt_pb_text(h->transfer_address);
    p->backend = bt_pb_text(h->backend);
    p->page_tokens = h->page_tokens;
    p->n_pages = h->n_pages;
    p->max_batch = h->max_batch;
    p->max_tokens = h->max_tokens;
    p->context = h->context;
    p->vocab = h->vocab;
    p->chunk_tokens = h->chunk_tokens;
    p->lease_ms = h->lease_ms;
    p->gate_token = token(&h->gate_token);
}

static bool put_prefix_blocks(const struct bt_msg_prefix_blocks *b, Baton__Session__V1__Load *p,
                              struct bt_arena *a)
{
    Baton__Session__V1__PrefixBlocks *m = bt_arena_alloc(a, sizeof *m);
    uint64_t *list = bt_arena_alloc(a, (b->n_added + b->n_removed) * sizeof *list);

    if (m == NULL || list == NULL) {
        return false;
    }
    baton__session__v1__prefix_blocks__init(m);
    m->reset = b->reset;
    m->n_added = b->n_added;
    m->added = list;
    m->n_removed = b->n_removed;
    m->removed = list + b->n_added;
    if (b->n_added > 0) {
        memcpy(m->added, b->added, b->n_added * sizeof *list);
    }
    if (b->n_removed > 0) {
        memcpy(m->removed, b->removed, b->n_removed * sizeof *list);
    }
    p->prefix_blocks = m;
    return true;
}

static bool put_load(const struct bt_msg_load *l, Baton__Session__V1__Load *p, struct bt_arena *a)
{
    Baton__Session__V1__PeerTransport *t = bt_arena_alloc(a, l->n_transports * sizeof *t);

    p->transports = bt_arena_alloc(a, l->n_transports * sizeof *p->transports);
    if (t == NULL || p->transports == NULL ||
        (l->prefix_blocks.told && !put_prefix_blocks(&l->prefix_blocks, p, a))) {
        return false;
    }
    p->waiting = l->waiting;
    p->running = l->running;
    p->held = l->held;
    p->landing = l->landing;
    p->waiting_tokens = l->waiting_tokens;
    p->pages_free = l->pages_free;
    p->pages_cached = l->pages_cached;
    p->pages_leased = l->pages_leased;
    p->pages_quarantined = l->pages_quarantined;
    p->transferred_tokens = l->transferred_tokens;
    p->transferred_bytes = l->transferred_bytes;
    p->transfer_failures = l->transfer_failures;
    p->stale_messages = l->stale_messages;
    p->local_prefills = l->local_prefills;
    p->prefill_tokens_per_s = l->prefill_tokens_per_s;
    p->decode_step_ms = l->decode_step_ms;
    p->pages_short = l->pages_short;
    p->n_transports = l->n_transports;
    for (size_t i = 0; i < l->n_transports; i++) {
        baton__session__v1__peer_transport__init(&t[i]);
        t[i].peer = l->transports[i].peer;
        t[i].description = bt_pb_text(l->transports[i].description);
        p->transports[i] = &t[i];
    }
    return true;
}

enum bt_status bt_from_daemon_encode(const struct bt_from_daemon *m, struct bt_buf *out)
{
    struct bt_arena a;
    pb_from_daemon w = BATON__SESSION__V1__FROM_DAEMON__INIT;
    Baton__Session__V1__Hello hello = BATON__SESSION__V1__HELLO__INIT;
    Baton__Session__V1__Load load = BATON__SESSION__V1__LOAD__INIT;
    Baton__Session__V1__Outputs outputs = BATON__SESSION__V1__OUTPUTS__INIT;
    Baton__Session__V1__AttemptEnd end = BATON__SESSION__V1__ATTEMPT_END__INIT;
    Baton__Session__V1__PeerState peer = BATON__SESSION__V1__PEER_STATE__INIT;
    Baton__Session__V1__Draining draining = BATON__SESSION__V1__DRAINING__INIT;
    Baton__Session__V1__RoleState role = BATON__SESSION__V1__ROLE_STATE__INIT;
    bool ok = true;

    bt_arena_init(&a, ENCODE_ARENA_MAX);
    switch (m->kind) {
    case BT_FROM_DAEMON_HELLO:
        put_hello(&m->hello, &hello);
        w.m_case = BATON__SESSION__V1__FROM_DAEMON__M_HELLO;
        w.hello = &hello;
        break;
    case BT_FROM_DAEMON_LOAD:
        ok = put_load(&m->load, &load, &a);
        w.m_case = BATON__SESSION__V1__FROM_DAEMON__M_LOAD;
        w.load = &load;
        break;
    case BT_FROM_DAEMON_OUTPUTS:
        ok = put_outputs(m, &outputs, &a);
        w.m_case = BATON__SESSION__V1__FROM_DAEMON__M_OUTPUTS;
        w.outputs = &outputs;
        break;
    case BT_FROM_DAEMON_ATTEMPT_END:
        end.ticket = ticket(&m->attempt_end.ticket);
        end.reason = m->attempt_end.reason;
        end.text = bt_pb_text(m->attempt_end.text);
        end.kept = m->attempt_end.kept;
        w.m_case = BATON__SESSION__V1__FROM_DAEMON__M_ATTEMPT_END;
        w.attempt_end = &end;
        break;
    case BT_FROM_DAEMON_PEER_STATE:
        peer.instance = m->peer_state.instance;
        peer.reachable = m->peer_state.reachable;
        peer.text = bt_pb_text(m->peer_state.text);
        w.m_case = BATON__SESSION__V1__FROM_DAEMON__M_PEER_STATE;
        w.peer_state = &peer;
        break;
    case BT_FROM_DAEMON_ROLE_STATE:
        role.role = bt_pb_text(bt_role_name(m->role_state.role));
        role.leaving = m->role_state.leaving != BT_ROLE_BOTH
                           ? bt_pb_text(bt_role_name(m->role_state.leaving))
                           : role.leaving;
        w.m_case = BATON__SESSION__V1__FROM_DAEMON__M_ROLE_STATE;
        w.role_state = &role;
        break;
    case BT_FROM_DAEMON_DRAINING:
        w.m_case = BATON__SESSION__V1__FROM_DAEMON__M_DRAINING;
        w.draining = &draining;
        break;
    }
    enum bt_status st = ok ? bt_pb_pack(&w.base, out) : BT_ERR_NOMEM;

    bt_arena_fini(&a);
    return st;
}

static bool put_sampling(const struct bt_sampling *s, Baton__Session__V1__Sampling *p,
                         struct bt_arena *a)
{
    p->temperature = s->temperature;
    p->top_p = s->top_p;
    p->top_k = s->top_k;
    p->min_p = s->min_p;
    p->repetition_penalty = s->repetition_penalty;
    p->presence_penalty = s->presence_penalty;
    p->frequency_penalty = s->frequency_penalty;
    p->seed = s->seed;
    p->choice = s->choice;
    p->max_tokens = s->max_tokens;
    p->min_tokens = s->min_tokens;
    p->ignore_eos = s->ignore_eos;
    p->logprobs = s->logprobs;
    p->n_top = s->n_top;
    p->n_stop_ids = s->n_stop_ids;
    p->stop_ids = bt_arena_alloc(a, s->n_stop_ids * sizeof *p->stop_ids);
    p->n_bias_tokens = p->n_bias_values = s->n_bias;
    p->bias_tokens = bt_arena_alloc(a, s->n_bias * sizeof *p->bias_tokens);
    p->bias_values = bt_arena_alloc(a, s->n_bias * sizeof *p->bias_values);
    if (p->stop_ids == NULL || p->bias_tokens == NULL || p->bias_values == NULL) {
        return false;
    }
    for (uint32_t i = 0; i < s->n_stop_ids; i++) {
        p->stop_ids[i] = s->stop_ids[i];
    }
    for (uint32_t i = 0; i < s->n_bias; i++) {
        p->bias_tokens[i] = s->bias[i].token;
        p->bias_values[i] = s->bias[i].bias;
    }
    return true;
}

static bool put_submit(const struct bt_msg_submit *s, Baton__Session__V1__Submit *p,
                       struct bt_arena *a)
{
    Baton__Session__V1__Sampling *sampling = bt_arena_alloc(a, sizeof *sampling);

    p->ticket = ticket(&s->ticket);
    p->request_id = bt_pb_text(s->request_id);
    p->n_prompt = s->n_prompt;
    p->prompt_logprobs = s->prompt_logprobs;
    p->peer_instance = s->peer_instance;
    p->peer_address = bt_pb_text(s->peer_address);
    if (s->has_replaces) {
        p->replaces = ticket(&s->replaces);
    }
    p->peer_gate_token = token(&s->peer_gate_token);
    p->trace_id = bt_pb_text(s->trace_id);
    p->leg = s->leg == BT_ROLE_BOTH ? 0 : (uint32_t)s->leg + 1;
    p->n_tokens = s->n_tokens;
    p->tokens = bt_arena_alloc(a, s->n_tokens * sizeof *p->tokens);
    if (sampling == NULL || p->tokens == NULL) {
        return false;
    }
    if (s->n_tokens > 0) {
        memcpy(p->tokens, s->tokens, s->n_tokens * sizeof *p->tokens);
    }
    baton__session__v1__sampling__init(sampling);
    p->sampling = sampling;
    return put_sampling(&s->sampling, sampling, a);
}

static bool put_peers(const struct bt_from_router *m, Baton__Session__V1__Peers *p,
                      struct bt_arena *a)
{
    Baton__Session__V1__Peer *list = bt_arena_alloc(a, m->peers.n * sizeof *list);

    p->peers = bt_arena_alloc(a, m->peers.n * sizeof *p->peers);
    p->n_peers = m->peers.n;
    if (list == NULL || p->peers == NULL) {
        return false;
    }
    for (size_t i = 0; i < m->peers.n; i++) {
        baton__session__v1__peer__init(&list[i]);
        list[i].instance = m->peers.peers[i].instance;
        list[i].address = bt_pb_text(m->peers.peers[i].address);
        list[i].name = bt_pb_text(m->peers.peers[i].name);
        list[i].gate_token = token(&m->peers.peers[i].gate_token);
        p->peers[i] = &list[i];
    }
    return true;
}

enum bt_status bt_from_router_encode(const struct bt_from_router *m, struct bt_buf *out)
{
    struct bt_arena a;
    pb_from_router w = BATON__SESSION__V1__FROM_ROUTER__INIT;
    Baton__Session__V1__Welcome welcome = BATON__SESSION__V1__WELCOME__INIT;
    Baton__Session__V1__Submit submit = BATON__SESSION__V1__SUBMIT__INIT;
    Baton__Session__V1__Cancel cancel = BATON__SESSION__V1__CANCEL__INIT;
    Baton__Session__V1__Peers peers = BATON__SESSION__V1__PEERS__INIT;
    Baton__Session__V1__Heartbeat heartbeat = BATON__SESSION__V1__HEARTBEAT__INIT;
    Baton__Session__V1__Drain drain = BATON__SESSION__V1__DRAIN__INIT;
    Baton__Session__V1__SetRole set_role = BATON__SESSION__V1__SET_ROLE__INIT;
    bool ok = true;

    bt_arena_init(&a, ENCODE_ARENA_MAX);
    switch (m->kind) {
    case BT_FROM_ROUTER_WELCOME:
        welcome.version = m->welcome.version;
        welcome.reason = bt_pb_text(m->welcome.reason);
        welcome.instance = m->welcome.instance;
        welcome.name = bt_pb_text(m->welcome.name);
        w.m_case = BATON__SESSION__V1__FROM_ROUTER__M_WELCOME;
        w.welcome = &welcome;
        break;
    case BT_FROM_ROUTER_SUBMIT:
        ok = put_submit(&m->submit, &submit, &a);
        w.m_case = BATON__SESSION__V1__FROM_ROUTER__M_SUBMIT;
        w.submit = &submit;
        break;
    case BT_FROM_ROUTER_CANCEL:
        cancel.ticket = ticket(&m->cancel.ticket);
        cancel.keep = m->cancel.keep;
        w.m_case = BATON__SESSION__V1__FROM_ROUTER__M_CANCEL;
        w.cancel = &cancel;
        break;
    case BT_FROM_ROUTER_PEERS:
        ok = put_peers(m, &peers, &a);
        w.m_case = BATON__SESSION__V1__FROM_ROUTER__M_PEERS;
        w.peers = &peers;
        break;
    case BT_FROM_ROUTER_HEARTBEAT:
        w.m_case = BATON__SESSION__V1__FROM_ROUTER__M_HEARTBEAT;
        w.heartbeat = &heartbeat;
        break;
    case BT_FROM_ROUTER_DRAIN:
        w.m_case = BATON__SESSION__V1__FROM_ROUTER__M_DRAIN;
        w.drain = &drain;
        break;
    case BT_FROM_ROUTER_SET_ROLE:
        set_role.role = bt_pb_text(bt_role_name(m->set_role));
        w.m_case = BATON__SESSION__V1__FROM_ROUTER__M_SET_ROLE;
        w.set_role = &set_role;
        break;
    }
    enum bt_status st = ok ? bt_pb_pack(&w.base, out) : BT_ERR_NOMEM;

    bt_arena_fini(&a);
    return st;
}
