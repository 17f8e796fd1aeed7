/* Requests: when they come, leave, and what they must be answered. Each answer is compared with that
 * of an undisturbed run, which is a pure function of the request. */

#include "plan/sim_int.h"

#include <stdio.h>
#include <stdlib.h>
#include "base/assert.h"
#include "base/mem.h"

/* ---- an undisturbed run ---- */

/* Longest prompt and answer together, given that all nodes of a role are alike. */
static uint32_t context_of(const struct bt_sim *s, bool with_decode)
{
    uint32_t p = sim_engine_max_tokens(s, BT_ROLE_PREFILL);
    uint32_t d = sim_engine_max_tokens(s, BT_ROLE_DECODE);

    if (s->cfg.local == BT_RT_LOCAL_ALWAYS) {
        return d;
    }
    return with_decode && d < p ? d : p;
}

/* Adds what layers store for the token at position n, and takes away what leaves the window. */
static void add_position(const struct sim_config *c, const uint64_t *prefix, uint32_t n,
                         uint64_t *sum)
{
    for (uint32_t g = 0; g < c->n_groups; g++) {
        uint32_t w = c->window[g];

        for (uint32_t l = 0; l < c->n_layers[g]; l++) {
            *sum += sim_mix(sim_kv(prefix[n], g, l, n), n);
            if (w != 0 && n >= w) {
                *sum -= sim_mix(sim_kv(prefix[n - w], g, l, n - w), n - w);
            }
        }
    }
}

static void make_answer(struct bt_sim *s, struct sim_request *q, uint32_t class)
{
    const struct sim_config *c = &s->cfg;
    uint32_t room = context_of(s, true), finish = 0;
    uint32_t max = q->max_tokens != 0 ? q->max_tokens : room > q->n_prompt ? room - q->n_prompt : 1;
    uint64_t *prefix = sim_alloc((q->n_prompt + max) * sizeof *prefix);
    struct bt_sampled *answer = sim_alloc(max * sizeof *answer);
    uint64_t sum = 0;
    uint32_t i = 0;

    for (uint32_t n = 0; finish == 0; n++) {
        uint32_t token = n < q->n_prompt ? q->tokens[n] : answer[n - q->n_prompt].token;

        prefix[n] = sim_prefix(n > 0 ? prefix[n - 1] : 1, token);
        add_position(c, prefix, n, &sum);
        if (n + 1 >= q->n_prompt) {
            answer[i] = sim_sample(sum, class, q->seed, i);
            finish = sim_finish(c, answer[i].token, q->n_prompt, i, max);
            i++;
        }
    }
    q->answer[class].tokens = answer;
    q->answer[class].n = i;
    q->answer[class].finish = finish;
    bt_free(prefix);
}

static void make_answers(struct bt_sim *s, struct sim_request *q)
{
    q->classes = 0;
    for (uint32_t i = 0; i < s->n_procs; i++) {
        uint32_t class = s->cfg.classes[i];

        if ((q->classes & 1U << class) == 0) {
            q->classes |= 1U << class;
            make_answer(s, q, class);
        }
    }
}

static void free_answers(struct sim_request *q)
{
    for (uint32_t i = 0; i < SIM_CLASSES; i++) {
        bt_free(q->answer[i].tokens);
        q->answer[i].tokens = NULL;
    }
}

static bool fits(const struct bt_sim *s, const struct sim_request *q)
{
    uint32_t room = context_of(s, q->max_tokens != 1);

    return q->max_tokens == 0 ? q->n_prompt < room : q->n_prompt + q->max_tokens <= room;
}

/* ---- the life of a request ---- */

static void over(struct bt_sim *s, struct sim_request *q, enum sim_request_state state)
{
    q->state = state;
    q->t_over = s->now;
    s->n_open--;
    s->t_over = s->now;
}

static uint32_t number_of(const struct bt_sim *s, const struct sim_request *q)
{
    return (uint32_t)(q - s->requests);
}

static void on_leave(struct bt_sim *s, struct sim_event *e)
{
    struct sim_request *q = &s->requests[e->i];
    struct sim_router *r = s->procs[e->proc].router;

    if (q->state != REQ_RUNNING) {
        return;
    }
    sim_log(s, "request %u leaves after %u tokens", e->i, q->n_got);
    over(s, q, REQ_CANCELLED);
    s->result.n_cancelled++;
    bt_rt_seq_cancel(r->core, s->now, q->seq);
    sim_router_pump(s, r);
}

static void on_ask(struct bt_sim *s, struct sim_event *e)
{
    struct sim_request *q = &s->requests[e->i];
    struct sim_router *r = s->procs[e->proc].router;
    struct bt_sampling sampling = {
        .temperature = 1,
        .top_p = 1,
        .repetition_penalty = 1,
        .seed = q->seed,
        .max_tokens = q->max_tokens,
        .logprobs = q->logprobs,
    };
    struct bt_rt_seq_start start = {
        .request_id = q->id,
        .tokens = q->tokens,
        .n_prompt = q->n_prompt,
        .sampling = &sampling,
        .prompt_logprobs = q->prompt_logprobs,
        .priority = q->priority,
        .deadline = q->t_deadline != 0 ? q->t_deadline : UINT64_MAX,
        .user = q,
    };

    sim_log(s, "request %u at %p: prompt %u, max_tokens %u", e->i, e->proc, q->n_prompt,
            q->max_tokens);
    q->state = REQ_RUNNING;
    q->t_ask = s->now;
    snprintf(q->id, sizeof q->id, "q%u", e->i);
    enum bt_status st = bt_rt_seq_start(r->core, s->now, &start, &q->seq);

    if (st != BT_OK) {
        sim_logs(s, st == BT_ERR_TIMEOUT ? "its first token would be late" : "the queue is full",
                 "request %u is refused: %s", e->i);
        over(s, q, REQ_DONE);
        s->result.n_refused++;
        if (s->cfg.must_finish || q->probe) {
            sim_fail(s, "request %u is refused without need", e->i);
        }
    } else if (q->t_cancel != 0) {
        sim_post(s, q->t_cancel, e->proc, on_leave)->i = e->i;
    }
    sim_router_pump(s, r);
}

static void on_arrive(struct bt_sim *s, struct sim_event *e)
{
    struct sim_request *q = &s->requests[e->i];
    uint32_t tries = 0;

    while (!s->procs[q->router].alive && tries++ < s->cfg.n_routers) {
        q->router = (q->router + 1) % s->cfg.n_routers;
    }
    if (!s->procs[q->router].alive) {
        sim_post(s, s->now + 300 * SIM_MS, SIM_WORLD, on_arrive)->i = e->i;
        return;
    }
    q->state = REQ_ASKED;
    sim_post(s, s->now + sim_latency(s), q->router, on_ask)->i = e->i;
}

/* A token of the prompts' common beginnings. */
static uint32_t text_token(const struct bt_sim *s, uint32_t text, uint32_t i)
{
    return (uint32_t)(sim_mix(s->opts.seed, (uint64_t)text << 32 | i) % SIM_VOCAB);
}

/* The next token of the conversation that a request began. */
static uint32_t history_token(const struct sim_request *q, uint32_t i)
{
    return i < q->n_prompt ? q->tokens[i] : q->answer[0].tokens[i - q->n_prompt].token;
}

/* Some prompts begin with one of a few texts, some repeat a request before them, or go on after its
 * answer; the rest of each is its own. */
static void make_prompt(struct bt_sim *s, struct sim_request *q)
{
    const struct sim_config *c = &s->cfg;
    uint32_t i = 0, at = number_of(s, q);

    if (at > 0 && sim_chance(s, c->alike_ppm / 2)) {
        const struct sim_request *h = &s->requests[sim_below(s, at)];
        uint32_t n = h->answer[0].tokens != NULL ? h->n_prompt + h->answer[0].n : h->n_prompt;

        q->n_prompt = sim_chance(s, 300000) ? h->n_prompt : q->n_prompt;
        q->tokens = sim_alloc(q->n_prompt * sizeof *q->tokens);
        for (; i < q->n_prompt && i < n; i++) {
            q->tokens[i] = history_token(h, i);
        }
    } else {
        bool alike = sim_chance(s, c->alike_ppm);
        uint32_t text = sim_below(s, c->n_texts), n = sim_below(s, c->prompt_max + 1);

        q->tokens = sim_alloc(q->n_prompt * sizeof *q->tokens);
        for (; alike && i < q->n_prompt && i < n; i++) {
            q->tokens[i] = text_token(s, text, i);
        }
    }
    for (; i < q->n_prompt; i++) {
        q->tokens[i] = sim_below(s, SIM_VOCAB);
    }
}

static void make_request(struct bt_sim *s, struct sim_request *q)
{
    const struct sim_config *c = &s->cfg;

    q->router = sim_below(s, c->n_routers);
    q->t_arrive = s->now + sim_between(s, 0, c->arrive_ns);
    q->n_prompt = (uint32_t)sim_between(s, 1, c->prompt_max);
    q->max_tokens = (uint32_t)sim_between(s, 1, c->answer_max);
    if (sim_chance(s, 50000)) {
        q->max_tokens = sim_below(s, 2);
    } else if (sim_chance(s, 20000)) {
        q->max_tokens = c->context;
    }
    q->priority = (int32_t)sim_below(s, 3) - 1;
    q->logprobs = sim_chance(s, 300000);
    q->prompt_logprobs = sim_chance(s, 100000);
    q->seed = sim_random(s);
    make_prompt(s, q);
    q->logprob_next = 1;
    if (sim_chance(s, c->cancel_ppm)) {
        if (sim_chance(s, 500000)) {
            q->t_cancel = q->t_arrive + sim_between(s, 0, 1000) * sim_between(s, 0, 1000) * 1000;
        } else {
            q->cancel_after = (uint32_t)sim_between(s, 1, 8);
        }
    }
    if (sim_chance(s, c->deadline_ppm)) {
        q->t_deadline = q->t_arrive + sim_between(s, 10, 3000) * SIM_MS;
    }
    make_answers(s, q);
    s->n_open++;
}

void sim_clients_start(struct bt_sim *s)
{
    s->n_requests = s->cfg.n_requests;
    s->result.n_requests = s->n_requests;
    s->requests = sim_alloc((s->n_requests + SIM_ROUTERS_MAX) * sizeof *s->requests);
    for (uint32_t i = 0; i < s->n_requests; i++) {
        make_request(s, &s->requests[i]);
        sim_post(s, s->requests[i].t_arrive, SIM_WORLD, on_arrive)->i = i;
    }
}

/* A short request after everything settled: it must be served. */
void sim_client_probe(struct bt_sim *s, uint32_t router)
{
    uint32_t i = s->n_requests++;
    struct sim_request *q = &s->requests[i];

    make_request(s, q);
    free_answers(q);
    q->router = router;
    q->t_arrive = s->now;
    q->n_prompt = 1;
    q->max_tokens = 3;
    q->t_cancel = q->t_deadline = 0;
    q->cancel_after = 0;
    q->probe = true;
    make_answers(s, q);
    q->state = REQ_ASKED;
    sim_post(s, s->now, router, on_ask)->i = i;
}

void sim_clients_fini(struct bt_sim *s)
{
    for (uint32_t i = 0; i < s->n_requests; i++) {
        bt_free(s->requests[i].tokens);
        free_answers(&s->requests[i]);
    }
    bt_free(s->requests);
}

void sim_clients_lost(struct bt_sim *s, uint32_t router)
{
    for (uint32_t i = 0; i < s->n_requests; i++) {
        struct sim_request *q = &s->requests[i];

        if (q->router == router && (q->state == REQ_RUNNING || q->state == REQ_ASKED)) {
            over(s, q, REQ_LOST);
            s->result.n_lost++;
        }
    }
}

/* The queue is in order: nothing overtakes what came earlier with the same or a higher priority, and
 * could run as well. */
void sim_client_submitted(struct bt_sim *s, struct sim_router *r, const struct bt_msg_submit *m)
{
    uint32_t i = (uint32_t)strtoul(m->request_id + 1, NULL, 10);
    struct sim_request *q = &s->requests[i];

    /* One token needs no decode node, so it may pass those that wait for one. The submit has the number in force: without
     * max_tokens a prompt of all but one token of the context gets one, too (seed 111887). */
    for (uint32_t k = 0; !q->dispatched && m->sampling.max_tokens != 1 && k < s->n_requests; k++) {
        const struct sim_request *o = &s->requests[k];

        if (o->state == REQ_RUNNING && o->router == r->proc && !o->dispatched &&
            o->t_ask < q->t_ask && o->priority >= q->priority && fits(s, o)) {
            sim_fail(s, "request %u overtakes request %u", i, k);
        }
    }
    q->dispatched = true;
}

/* ---- answers ---- */

static struct sim_request *request_of(struct bt_sim *s, struct sim_router *r,
                                      const struct bt_rt_action *a, const char *what)
{
    struct sim_request *q = a->user;

    if (q->state != REQ_RUNNING || q->router != r->proc || q->seq != a->seq) {
        sim_fail(s, "router %s: %s for request %u, which is over", s->procs[r->proc].name, what,
                 number_of(s, q));
        return NULL;
    }
    return q;
}

static void leave_now(struct bt_sim *s, struct sim_router *r, struct sim_request *q)
{
    over(s, q, REQ_CANCELLED);
    s->result.n_cancelled++;
    sim_log(s, "request %u leaves at token %u", number_of(s, q), q->n_got);
    bt_rt_seq_cancel(r->core, s->now, q->seq);
}

/* One more token: the next one of an answer that agrees with all tokens before. */
static bool take_token(struct bt_sim *s, struct sim_request *q, const struct bt_sampled *t)
{
    for (uint32_t c = 0; c < SIM_CLASSES; c++) {
        if ((q->classes & 1U << c) != 0 &&
            (q->n_got >= q->answer[c].n || q->answer[c].tokens[q->n_got].token != t->token ||
             (q->logprobs && q->answer[c].tokens[q->n_got].logprob != t->logprob))) {
            q->classes &= ~(1U << c);
        }
    }
    if (q->classes == 0) {
        sim_fail(s, "request %u: token %u is wrong: %u", number_of(s, q), q->n_got, t->token);
        return false;
    }
    q->n_got++;
    return true;
}

void sim_client_tokens(struct bt_sim *s, struct sim_router *r, const struct bt_rt_action *a)
{
    struct sim_request *q = request_of(s, r, a, "tokens");

    if (q == NULL) {
        return;
    }
    sim_log(s, "request %u gets %u tokens from %u", number_of(s, q), a->tokens.n, a->tokens.index);
    if (a->tokens.index != q->n_got || a->tokens.n == 0) {
        sim_fail(s, "request %u: %zu tokens at %u after %u", number_of(s, q), a->tokens.n,
                 a->tokens.index, q->n_got);
        return;
    }
    for (size_t i = 0; i < a->tokens.n; i++) {
        if (!take_token(s, q, &a->tokens.list[i])) {
            return;
        }
    }
    s->result.n_tokens += a->tokens.n;
    if (q->cancel_after != 0 && q->n_got >= q->cancel_after) {
        leave_now(s, r, q);
    }
}

void sim_client_prompt(struct bt_sim *s, struct sim_router *r, const struct bt_rt_action *a)
{
    struct sim_request *q = request_of(s, r, a, "prompt log-probabilities");

    if (q == NULL) {
        return;
    }
    if (!q->prompt_logprobs || a->prompt_logprobs.first != q->logprob_next ||
        a->prompt_logprobs.n > q->n_prompt - q->logprob_next) {
        sim_fail(s, "request %u: prompt log-probabilities from %u, not %u", number_of(s, q),
                 a->prompt_logprobs.first, q->logprob_next);
        return;
    }
    for (size_t i = 0; i < a->prompt_logprobs.n; i++) {
        if (a->prompt_logprobs.list[i].token != q->tokens[q->logprob_next++]) {
            sim_fail(s, "request %u: a prompt log-probability of another token", number_of(s, q));
            return;
        }
    }
}

static void check_finished(struct bt_sim *s, const struct sim_request *q, uint32_t finish)
{
    bool complete = false;

    for (uint32_t c = 0; c < SIM_CLASSES; c++) {
        complete = complete || ((q->classes & 1U << c) != 0 && q->n_got == q->answer[c].n &&
                                finish == q->answer[c].finish);
    }
    if (!complete) {
        sim_fail(s, "request %u finished (%u) with %u tokens: too few, or another reason",
                 number_of(s, q), finish, q->n_got);
    } else if (q->prompt_logprobs && q->logprob_next != (q->n_prompt > 1 ? q->n_prompt : 1)) {
        sim_fail(s, "request %u finished without all of its prompt's log-probabilities",
                 number_of(s, q));
    } else if (!fits(s, q)) {
        sim_fail(s, "request %u finished, but does not fit the context", number_of(s, q));
    }
}

void sim_client_end(struct bt_sim *s, struct sim_router *r, const struct bt_rt_action *a)
{
    struct sim_request *q = request_of(s, r, a, "the end");

    if (q == NULL) {
        return;
    }
    sim_logs(s, a->end.text, "request %u ends, kind %u, finish %u: %s", number_of(s, q),
             a->end.kind, a->end.finish);
    over(s, q, REQ_DONE);
    q->end = a->end.kind;
    if (a->end.kind == BT_RT_FINISHED) {
        s->result.n_finished++;
        if (s->now - q->t_arrive > s->result.longest_ns) {
            s->result.longest_ns = s->now - q->t_arrive;
        }
        check_finished(s, q, a->end.finish);
        return;
    }
    s->result.n_refused++;
    bool right = a->end.kind == BT_RT_INVALID    ? !fits(s, q)
                 : a->end.kind == BT_RT_LATE     ? s->cfg.max_ttft_ns != 0 && q->n_got == 0
                 : a->end.kind == BT_RT_DEADLINE ? q->t_deadline != 0 && s->now >= q->t_deadline
                                                 : a->end.kind != BT_RT_INTERNAL;

    if (!right || ((s->cfg.must_finish || q->probe) && fits(s, q))) {
        sim_fail(s, "request %u ends with kind %u: %s", number_of(s, q), a->end.kind, a->end.text);
    }
}
