/* Requests between front end and core: their start, their end, and the tokens that arrive. Owns a request's memory and
 * its sequences; refuses to know HTTP, gRPC, JSON, and which node runs what.
 *
 * Tokens wait in a compact buffer per choice until they become text (generate_text.c): after each round of the core's
 * actions, or later when the client's stream has room again. */

#include "router/generate_int.h"

#include <stdio.h>
#include <string.h>
#include "base/assert.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"

#define RETRY_NS     BT_NS_PER_S /* while no pair can serve */
#define RETRY_MIN_NS (100 * BT_NS_PER_MS)

/* ---- memory ---- */

void bt_gen_prompts_free(struct bt_gen_prompt *p, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        bt_free(p[i].ids);
        bt_free(p[i].text);
    }
    bt_free(p);
}

static void gen_free(struct bt_gen *g)
{
    for (uint32_t i = 0; i < g->n_choices; i++) {
        bt_buf_fini(&g->choices[i].pending);
        bt_free(g->choices[i].plp);
        bt_free(g->choices[i].attempts);
        bt_free(g->choices[i].gaps);
    }
    bt_gen_prompts_free(g->prompts, g->n_prompts);
    bt_params_fini(&g->params);
    bt_stop_set_destroy(g->stops);
    bt_buf_fini(&g->raw);
    bt_buf_fini(&g->text);
    bt_free(g->request_id);
    bt_free(g->traceparent);
    bt_free(g);
}

static void make_dirty(struct bt_gen *g)
{
    if (!g->is_dirty) {
        g->is_dirty = true;
        g->next_dirty = g->r->dirty;
        g->r->dirty = g;
    }
}

void bt_gen_cancel_seq(struct gen_choice *ch)
{
    struct bt_router *r = ch->g->r;

    if (ch->seq != 0) {
        bt_rt_seq_cancel(r->core, bt_net_loop_now(r->loop), ch->seq);
        ch->seq = 0;
    }
}

/* No callback after this; the memory goes when no action of the core can name it any more. */
void bt_gen_retire(struct bt_gen *g)
{
    struct bt_router *r = g->r;

    if (g->over) {
        return;
    }
    g->over = true;
    for (uint32_t i = 0; i < g->n_choices; i++) {
        bt_gen_cancel_seq(&g->choices[i]);
    }
    (void)bt_map_del(&r->by_request_id, g->request_id, strlen(g->request_id));
    *(g->prev != NULL ? &g->prev->next : &r->gens) = g->next;
    if (g->next != NULL) {
        g->next->prev = g->prev;
    }
    g->prev = NULL;
    g->next = r->garbage;
    r->garbage = g;
    r->n_gens--;
    bt_prom_hist_observe(&r->metrics.request,
                         (double)(bt_net_loop_now(r->loop) - g->t_arrival) / (double)BT_NS_PER_S);
    bt_router_kick(r);
}

void bt_gen_collect(struct bt_router *r)
{
    while (r->garbage != NULL) {
        struct bt_gen *g = r->garbage;

        BT_ASSERT(!g->is_dirty);
        r->garbage = g->next;
        gen_free(g);
    }
}

static void end_with_error(struct bt_gen *g, const struct bt_api_err *e)
{
    const struct bt_gen_events *ev = g->events;
    void *user = g->user;

    bt_gen_log(g, e);
    g->r->metrics
        .finished[e->code == BT_API_CANCELLED ? BT_FINISHED_CANCELLED : BT_FINISHED_ERROR] +=
        g->n_unfinished;
    bt_gen_retire(g);
    ev->on_end(user, g, e);
}

/* ---- start ---- */

static bool choice_init(struct bt_gen *g, uint32_t index)
{
    struct gen_choice *ch = &g->choices[index];

    ch->g = g;
    ch->index = index;
    ch->prompt = &g->prompts[index / g->params.n];
    bt_detok_init(&ch->detok, g->r->tok,
                  BT_DETOK_CONTINUE | (g->params.keep_special ? 0u : BT_DETOK_SKIP_SPECIAL));
    bt_stop_init(&ch->stop, g->stops);
    if (g->r->request_log != NULL && (ch->gaps = bt_calloc(1, sizeof *ch->gaps)) == NULL) {
        return false;
    }
    if (g->params.echo && g->params.sampling.logprobs && ch->prompt->n > 1) {
        ch->plp = bt_calloc(ch->prompt->n - 1, sizeof *ch->plp);
        return ch->plp != NULL;
    }
    return true;
}

/* Echo alone needs no node. */
static bool nothing_to_run(const struct bt_gen *g)
{
    const struct bt_params *p = &g->params;

    return p->has_max_tokens && p->sampling.max_tokens == 0 && !p->sampling.logprobs;
}

/* Refused by admission: the wait that e tells is the one to expect. */
static bool fail_exhausted(struct bt_gen *g, const struct bt_gen_prompt *p, enum bt_refusal why,
                           struct bt_api_err *e)
{
    struct bt_router *r = g->r;
    struct bt_rt_forecast f =
        bt_rt_forecast(r->core, bt_net_loop_now(r->loop), g->key, g->params.priority, p->n);
    uint64_t wait = bt_rt_core_ready(r->core) ? f.wait_ns : RETRY_NS;

    r->metrics.refused[why]++;
    if (why == BT_REFUSED_MAX_TTFT) {
        (void)bt_api_fail(e, BT_API_EXHAUSTED, NULL,
                          "the first token would come after %.3f s (%.3f s of them in the queue), "
                          "later than this router allows; try again later",
                          (double)(f.wait_ns + f.prefill_ns) / 1e9, (double)f.wait_ns / 1e9);
    } else {
        (void)bt_api_fail(e, BT_API_EXHAUSTED, NULL,
                          "too many requests are waiting; try again later");
    }
    e->retry_ns = wait > RETRY_MIN_NS ? wait : RETRY_MIN_NS;
    return false;
}

static bool choice_start(struct gen_choice *ch, struct bt_api_err *e)
{
    struct bt_gen *g = ch->g;
    struct bt_sampling sampling = g->params.sampling;

    if (nothing_to_run(g)) {
        ch->ended = true;
        ch->finish = 2;
        return true;
    }
    sampling.choice = ch->index % g->params.n;
    if (!g->params.has_max_tokens) {
        sampling.max_tokens = 0;
    } else if (sampling.max_tokens == 0) {
        sampling.max_tokens = 1; /* for the prompt's log-probabilities; the token is dropped */
    }
    struct bt_rt_seq_start s = {
        .request_id = g->request_id,
        .trace_id = bt_api_trace_id(g->traceparent),
        .tokens = ch->prompt->ids,
        .n_prompt = ch->prompt->n,
        .sampling = &sampling,
        .prompt_logprobs = ch->plp != NULL,
        .priority = g->params.priority,
        .key = g->key,
        .deadline = g->deadline,
        .user = ch,
    };
    enum bt_status st = bt_rt_seq_start(g->r->core, g->t_start, &s, &ch->seq);

    if (st == BT_ERR_BUSY || st == BT_ERR_TIMEOUT) {
        return fail_exhausted(g, ch->prompt,
                              st == BT_ERR_BUSY ? BT_REFUSED_QUEUE_FULL : BT_REFUSED_MAX_TTFT, e);
    }
    return st == BT_OK ? true : bt_api_fail(e, BT_API_INTERNAL, NULL, "out of memory");
}

static bool check_prompts(const struct bt_router *r, const struct bt_gen_start *s,
                          struct bt_api_err *e)
{
    uint32_t vocab = bt_tokenizer_vocab_size(r->tok);

    if (s->n_prompts == 0 || s->n_prompts > BT_PARAMS_PROMPTS_MAX) {
        return bt_api_fail(e, BT_API_INVALID, "prompt", "prompt: must be 1 to %u prompts",
                           BT_PARAMS_PROMPTS_MAX);
    }
    if (s->n_prompts * s->params->n > r->sequences_max) {
        return bt_api_fail(e, BT_API_INVALID, "n",
                           "%zu prompts with %u choices each: at most %u sequences in one request",
                           s->n_prompts, s->params->n, r->sequences_max);
    }
    for (size_t i = 0; i < s->n_prompts; i++) {
        const struct bt_gen_prompt *p = &s->prompts[i];

        if (p->n == 0) {
            return bt_api_fail(e, BT_API_INVALID, "prompt", "prompt: has no token");
        }
        if (p->n > BT_SESSION_TOKENS_MAX / 2) {
            return bt_api_fail(e, BT_API_INVALID, "prompt",
                               "prompt: %u tokens are more than any node takes", p->n);
        }
        for (uint32_t k = 0; k < p->n; k++) {
            if (p->ids[k] >= vocab) {
                return bt_api_fail(
                    e, BT_API_INVALID, "prompt",
                    "prompt: token id %u at position %u is outside the vocabulary of %u tokens",
                    p->ids[k], k, vocab);
            }
        }
    }
    return true;
}

static bool gen_create(struct bt_router *r, const struct bt_gen_start *s, struct bt_gen **out,
                       struct bt_api_err *e)
{
    uint32_t n = (uint32_t)s->n_prompts * s->params->n;
    struct bt_gen *g = bt_calloc(1, sizeof *g + n * sizeof g->choices[0]);
    struct bt_err err = {0};

    if (g == NULL) {
        bt_gen_prompts_free(s->prompts, s->n_prompts);
        bt_params_fini(s->params);
        return bt_api_fail(e, BT_API_INTERNAL, NULL, "out of memory");
    }
    *out = g;
    g->r = r;
    g->params = *s->params;
    *s->params = (struct bt_params){0};
    g->prompts = s->prompts;
    g->n_prompts = s->n_prompts;
    g->t_arrival = s->t_arrival;
    g->t_start = bt_net_loop_now(r->loop);
    g->tokenize_ns = s->tokenize_ns;
    g->deadline = s->deadline;
    g->key = s->key;
    g->events = s->events;
    g->user = s->user;
    g->n_choices = g->n_unfinished = n;
    if (r->request_timeout_ns != 0 && g->deadline > g->t_arrival + r->request_timeout_ns) {
        g->deadline = g->t_arrival + r->request_timeout_ns;
    }
    if (bt_stop_set_create((const char *const *)g->params.stop, g->params.stop_len,
                           g->params.n_stop, &g->stops, &err) != BT_OK) {
        return bt_api_fail(e, BT_API_INVALID, "stop", "stop: %s", err.msg);
    }
    g->request_id = bt_strdup(s->request_id);
    g->traceparent = s->traceparent != NULL ? bt_strdup(s->traceparent) : NULL;
    g->endpoint = s->endpoint;
    bool ok = g->request_id != NULL && (s->traceparent == NULL || g->traceparent != NULL);

    for (uint32_t i = 0; i < n && ok; i++) {
        ok = choice_init(g, i);
    }
    return ok ? true : bt_api_fail(e, BT_API_INTERNAL, NULL, "out of memory");
}

static bool gen_register(struct bt_gen *g, struct bt_api_err *e)
{
    struct bt_router *r = g->r;
    size_t len = strlen(g->request_id);

    if (bt_map_get(&r->by_request_id, g->request_id, len, NULL)) {
        return bt_api_fail(e, BT_API_INVALID, "request_id", "request_id \"%.200s\" is in use",
                           g->request_id);
    }
    if (g->n_choices > bt_rt_core_room(r->core) && !nothing_to_run(g)) {
        return fail_exhausted(g, g->prompts, BT_REFUSED_QUEUE_FULL, e);
    }
    if (bt_map_put(&r->by_request_id, g->request_id, len, (uint64_t)(uintptr_t)g) != BT_OK) {
        return bt_api_fail(e, BT_API_INTERNAL, NULL, "out of memory");
    }
    g->next = r->gens;
    if (g->next != NULL) {
        g->next->prev = g;
    }
    r->gens = g;
    r->n_gens++;
    return true;
}

bool bt_gen_start(struct bt_router *r, const struct bt_gen_start *s, struct bt_gen **out,
                  struct bt_api_err *e)
{
    struct bt_gen *g = NULL;

    if (!check_prompts(r, s, e)) {
        bt_gen_prompts_free(s->prompts, s->n_prompts);
        bt_params_fini(s->params);
        return false;
    }
    if (!gen_create(r, s, &g, e) || !gen_register(g, e)) {
        if (g != NULL) {
            gen_free(g);
        }
        return false;
    }
    for (uint32_t i = 0; i < g->n_choices; i++) {
        if (!choice_start(&g->choices[i], e)) {
            bt_gen_retire(g);
            return false;
        }
    }
    make_dirty(g);
    bt_router_kick(r);
    *out = g;
    return true;
}

void bt_gen_cancel(struct bt_gen *g)
{
    struct bt_api_err e = {0};

    if (!g->over) {
        (void)bt_api_fail(&e, BT_API_CANCELLED, NULL, "the client went away");
        bt_gen_log(g, &e);
        g->r->metrics.finished[BT_FINISHED_CANCELLED] += g->n_unfinished;
        bt_gen_retire(g);
    }
}

void bt_gen_cancel_all(struct bt_router *r)
{
    while (r->gens != NULL) {
        bt_gen_cancel(r->gens);
    }
    for (struct bt_gen *g = r->dirty; g != NULL; g = g->next_dirty) {
        g->is_dirty = false;
    }
    r->dirty = NULL;
    bt_gen_collect(r);
}

void bt_gen_resume(struct bt_gen *g)
{
    if (g->paused && !g->over) {
        g->paused = false;
        make_dirty(g);
        bt_router_kick(g->r);
    }
}

bool bt_gen_abort(struct bt_router *r, const char *request_id)
{
    struct bt_api_err e = {0};
    uint64_t address = 0;

    if (!bt_map_get(&r->by_request_id, request_id, strlen(request_id), &address)) {
        return false;
    }
    (void)bt_api_fail(&e, BT_API_CANCELLED, NULL, "the request was aborted");
    end_with_error((struct bt_gen *)(uintptr_t)address, &e);
    return true;
}

void bt_gen_end_all(struct bt_router *r, const struct bt_api_err *e)
{
    while (r->gens != NULL) {
        end_with_error(r->gens, e);
    }
}

/* ---- tokens in ---- */

static bool put_token(struct bt_buf *b, const struct bt_sampled *s)
{
    struct gen_packed p = {s->token, s->logprob, s->n_top};

    return bt_buf_add(b, &p, sizeof p) && bt_buf_add(b, s->top, s->n_top * sizeof s->top[0]);
}

static bool drops_tokens(const struct bt_gen *g)
{
    return g->params.has_max_tokens && g->params.sampling.max_tokens == 0;
}

void bt_gen_keep_info(struct gen_choice *ch, const struct bt_rt_seq_info *info)
{
    if (info == NULL) {
        return;
    }
    if (info->n_ended > 0 && ch->attempts == NULL) {
        ch->attempts = bt_alloc(BT_RT_ATTEMPTS_MAX * sizeof *ch->attempts);
    }
    ch->info = *info;
    ch->info.n_ended = ch->attempts != NULL ? info->n_ended : 0;
    ch->info.ended = ch->attempts;
    if (ch->info.n_ended > 0) {
        memcpy(ch->attempts, info->ended, info->n_ended * sizeof *ch->attempts);
    }
    snprintf(ch->prefill_name, sizeof ch->prefill_name, "%s", info->prefill_name);
    snprintf(ch->decode_name, sizeof ch->decode_name, "%s", info->decode_name);
}

void bt_gen_fail_memory(struct bt_gen *g)
{
    struct bt_api_err e = {0};

    bt_log_error("router", "out of memory: request %s ends", g->request_id);
    (void)bt_api_fail(&e, BT_API_INTERNAL, NULL, "out of memory");
    end_with_error(g, &e);
}

/* The choice that an action names, unless its request is over. */
static struct gen_choice *choice_of(const struct bt_rt_action *a)
{
    struct gen_choice *ch = a->user;

    return ch->seq == a->seq && !ch->g->over ? ch : NULL;
}

void bt_gen_on_tokens(struct bt_router *r, const struct bt_rt_action *a)
{
    struct gen_choice *ch = choice_of(a);
    uint64_t now = bt_net_loop_now(r->loop);

    if (ch == NULL) {
        return;
    }
    if (ch->t_first == 0) {
        ch->t_first = now;
        bt_prom_hist_observe(&r->metrics.ttft,
                             (double)(now - ch->g->t_arrival) / (double)BT_NS_PER_S);
    }
    uint64_t gap = ch->t_last == 0 ? 0 : (now - ch->t_last) / a->tokens.n;
    size_t n_gaps = ch->t_last == 0 ? a->tokens.n - 1 : a->tokens.n;

    for (size_t i = 0; i < n_gaps; i++) {
        bt_prom_hist_observe(&r->metrics.itl, (double)gap / (double)BT_NS_PER_S);
    }
    if (ch->gaps != NULL) {
        bt_token_gaps_add(ch->gaps, gap, (uint32_t)n_gaps);
    }
    ch->t_last = now;
    ch->n_received += (uint32_t)a->tokens.n;
    r->metrics.generated_tokens += a->tokens.n;
    if (!ch->begun) {
        ch->begun = true;
        bt_gen_keep_info(ch, bt_rt_seq_info(r->core, ch->seq));
    }
    for (size_t i = 0; i < a->tokens.n && !drops_tokens(ch->g); i++) {
        if (!put_token(&ch->pending, &a->tokens.list[i])) {
            bt_gen_fail_memory(ch->g);
            return;
        }
    }
    make_dirty(ch->g);
}

void bt_gen_on_prompt_logprobs(struct bt_router *r, const struct bt_rt_action *a)
{
    struct gen_choice *ch = choice_of(a);

    (void)r;
    if (ch == NULL || ch->plp == NULL) {
        return;
    }
    BT_ASSERT(a->prompt_logprobs.first == ch->n_plp + 1 &&
              ch->n_plp + a->prompt_logprobs.n < ch->prompt->n);
    memcpy(ch->plp + ch->n_plp, a->prompt_logprobs.list, a->prompt_logprobs.n * sizeof *ch->plp);
    ch->n_plp += (uint32_t)a->prompt_logprobs.n;
    make_dirty(ch->g);
}

static void api_error_of(const struct gen_choice *ch, const struct bt_rt_end *end,
                         struct bt_api_err *e)
{
    static const enum bt_api_code code[] = {
        [BT_RT_INVALID] = BT_API_INVALID,   [BT_RT_EXHAUSTED] = BT_API_EXHAUSTED,
        [BT_RT_LATE] = BT_API_EXHAUSTED,    [BT_RT_UNAVAILABLE] = BT_API_UNAVAILABLE,
        [BT_RT_INTERNAL] = BT_API_INTERNAL, [BT_RT_DEADLINE] = BT_API_DEADLINE,
    };

    (void)bt_api_fail(e, code[end->kind], NULL, "%s", end->text);
    if (end->kind == BT_RT_EXHAUSTED || end->kind == BT_RT_LATE) {
        const struct bt_router *r = ch->g->r;
        uint64_t wait = bt_rt_forecast(r->core, bt_net_loop_now(r->loop), ch->g->key,
                                       ch->g->params.priority, ch->prompt->n)
                            .wait_ns;

        e->retry_ns = wait > RETRY_MIN_NS ? wait : RETRY_MIN_NS;
    } else if (end->kind == BT_RT_UNAVAILABLE) {
        e->retry_ns = RETRY_NS;
    }
}

void bt_gen_on_seq_end(struct bt_router *r, const struct bt_rt_action *a)
{
    struct gen_choice *ch = choice_of(a);
    struct bt_api_err e = {0};

    if (ch == NULL) {
        return;
    }
    bt_gen_keep_info(ch, bt_rt_seq_info(r->core, ch->seq));
    ch->seq = 0;
    if (a->end.kind == BT_RT_FINISHED) {
        ch->ended = true;
        ch->finish = drops_tokens(ch->g) ? 2 : a->end.finish;
        make_dirty(ch->g);
        return;
    }
    api_error_of(ch, &a->end, &e);
    if (a->end.kind == BT_RT_EXHAUSTED) {
        r->metrics.refused[BT_REFUSED_QUEUE_TIMEOUT]++;
    } else if (a->end.kind == BT_RT_LATE) {
        r->metrics.refused[BT_REFUSED_MAX_TTFT]++;
    } else if (a->end.kind == BT_RT_UNAVAILABLE && ch->info.n_attempts == 0) {
        r->metrics.refused[BT_REFUSED_NO_NODE]++;
    } else if (a->end.kind == BT_RT_INVALID) {
        r->metrics.refused[BT_REFUSED_INVALID]++;
    }
    if (e.code == BT_API_INVALID && strstr(e.msg, "max_tokens") != NULL) {
        snprintf(e.param, sizeof e.param, "max_tokens");
    }
    end_with_error(ch->g, &e);
}
