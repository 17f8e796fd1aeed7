/* Attempts: submits to both legs, tokens by index, and what follows when one fails. Owns the legs
 * and the tokens of a sequence; refuses to know how a pair is chosen. */

#include <stdio.h>
#include "base/assert.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/utf8.h"
#include "router/router_core_int.h"

#define BACKOFF_DOUBLINGS 5u
#define AVOID_REPORTER    2u
#define AVOID_OTHER       1u
#define RESENDS_MAX       2u /* that fail in a row: then the prefill node may be the one to blame */
#define ANSWERS           32.0 /* that the mean length of an answer looks back on, about */

/* ---- legs ---- */

static void hold(struct rt_node *n, struct rt_leg *l, uint64_t tokens)
{
    n->own_held += tokens;
    l->held += tokens;
}

static uint64_t short_part(const struct rt_leg *l)
{
    return l->charge < BT_ADM_SHORT ? l->charge : BT_ADM_SHORT;
}

/* A prompt to compute. */
static void charge(struct rt_node *n, struct rt_leg *l, uint64_t tokens)
{
    l->charge = tokens;
    n->own_tokens += tokens;
    n->fresh_tokens += tokens;
    n->own_prompts++;
    n->own_short += short_part(l);
}

/* It is computed, or given up. */
static void uncharge(struct rt_node *n, struct rt_leg *l)
{
    BT_ASSERT(n->own_tokens >= l->charge);
    if (l->charge > 0) {
        n->own_prompts--;
        n->own_short -= short_part(l);
        n->done_tokens -= n->done_tokens < l->charge ? n->done_tokens : l->charge;
    }
    n->own_tokens -= l->charge;
    l->charge = 0;
}

static void unhold(struct rt_node *n, struct rt_leg *l)
{
    BT_ASSERT(n->own_held >= l->held && n->own_pages >= l->pages);
    n->own_held -= l->held;
    n->own_pages -= l->pages;
    l->held = l->pages = 0;
}

/* work: tokens of the prompt that it computes; at least one of a prefill leg. A decode leg holds the prompt, too. */
static void leg_begin(struct bt_rt_core *c, struct rt_seq *s, enum bt_role role, struct rt_node *n,
                      uint64_t work)
{
    struct rt_leg *l = &s->leg[role];

    *l = (struct rt_leg){.session = n->session, .live = true};
    n->own_seqs++;
    bt_rt_affinity_note(c->affinity, s->t_progress, n, s);
    if (work > 0) {
        charge(n, l, work);
    }
    if (role == BT_ROLE_DECODE) {
        n->own_decodes++;
        hold(n, l, s->n_tokens);
    }
    l->pages =
        bt_rt_pages_of(n, role == BT_ROLE_DECODE ? bt_rt_expected_tokens(c, s) : s->n_tokens);
    n->own_pages += l->pages;
}

static void send_cancel(struct bt_rt_core *c, uint64_t session, const struct bt_ticket *t,
                        bool keep)
{
    struct bt_rt_action *a = bt_rt_act(c, BT_RT_SEND);

    a->session = session;
    a->send.kind = BT_FROM_ROUTER_CANCEL;
    a->send.cancel.ticket = *t;
    a->send.cancel.keep = keep;
}

void bt_rt_leg_end(struct bt_rt_core *c, struct rt_seq *s, enum bt_role role, bool cancel)
{
    struct rt_leg *l = &s->leg[role];

    if (!l->live) {
        return;
    }
    struct rt_node *n = bt_rt_node(c, l->session);

    l->live = false;
    if (n == NULL) {
        return;
    }
    BT_ASSERT(n->own_seqs > 0);
    n->own_seqs--;
    n->own_decodes -= role == BT_ROLE_DECODE;
    uncharge(n, l);
    unhold(n, l);
    c->n_freed++;
    if (cancel) {
        send_cancel(c, n->session, &s->head.ticket, false);
    }
}

void bt_rt_attempt_cancel(struct bt_rt_core *c, struct rt_seq *s)
{
    bt_rt_leg_end(c, s, BT_ROLE_PREFILL, true);
    bt_rt_leg_end(c, s, BT_ROLE_DECODE, true);
    bt_ticket_table_forget(&c->seqs, s);
}

/* ---- what a prefill node keeps ---- */

void bt_rt_kept_drop(struct bt_rt_core *c, struct rt_seq *s)
{
    if (bt_rt_node(c, s->kept.session) != NULL) {
        send_cancel(c, s->kept.session, &s->kept.ticket, false);
    }
    s->kept.session = 0;
}

void bt_rt_kept_check(struct bt_rt_core *c, uint64_t now, struct rt_seq *s)
{
    const struct rt_node *p = bt_rt_node(c, s->kept.session);

    if (s->kept.session == 0) {
        return;
    }
    uint64_t lease =
        p != NULL && p->hello.lease_ms != 0 ? p->hello.lease_ms * BT_NS_PER_MS : c->opts.lease_ns;

    if (p == NULL || !bt_rt_usable(p, BT_ROLE_PREFILL) || now - s->kept.since > lease) {
        bt_rt_kept_drop(c, s);
    }
}

/* Only the decode side failed, before the decode node had begun: the prefill node keeps what it has computed, or goes on
 * computing it. told: it has said so itself. */
static void keep_prefill(struct bt_rt_core *c, uint64_t now, struct rt_seq *s, bool told)
{
    const struct rt_node *p = bt_rt_node(c, s->leg[BT_ROLE_PREFILL].session);
    bool refused = s->reason == BT_ATTEMPT_REFUSED || s->reason == BT_ATTEMPT_DRAINING;

    if (p == NULL || !s->leg[BT_ROLE_PREFILL].live || s->decode_began || bt_rt_wants_prompt(s) ||
        s->reason == BT_ATTEMPT_INVALID || s->reason == BT_ATTEMPT_INTERNAL) {
        return;
    }
    s->resends += !refused;
    s->kept.session = p->session;
    s->kept.ticket = s->head.ticket;
    s->kept.since = now;
    s->kept.computed = s->prefill_answered;
    if (!told) {
        send_cancel(c, p->session, &s->head.ticket, true);
    }
    bt_rt_leg_end(c, s, BT_ROLE_PREFILL, false);
    if (p->draining || s->resends > RESENDS_MAX) {
        bt_rt_kept_drop(c, s);
    }
}

/* ---- start ---- */

static struct bt_msg_submit *send_submit(struct bt_rt_core *c, const struct rt_seq *s,
                                         enum bt_role leg, const struct rt_node *to,
                                         const struct rt_node *peer, bool computes)
{
    struct bt_rt_action *a = bt_rt_act(c, BT_RT_SEND);

    a->session = to->session;
    a->send.kind = BT_FROM_ROUTER_SUBMIT;
    a->send.submit = (struct bt_msg_submit){
        .ticket = s->head.ticket,
        .leg = leg,
        .request_id = s->request_id,
        .trace_id = s->trace_id,
        /* of a complete answer the last token is produced again */
        .n_tokens = s->n_tokens - (s->finish != 0),
        .tokens = s->tokens,
        .n_prompt = s->n_prompt,
        .sampling = s->sampling,
        .prompt_logprobs = bt_rt_wants_prompt(s) && computes,
        .peer_instance = peer != NULL ? peer->hello.instance : 0,
        .peer_address = peer != NULL ? peer->hello.transfer_address : "",
    };
    if (peer != NULL && leg == BT_ROLE_PREFILL) {
        a->send.submit.peer_gate_token = peer->hello.gate_token;
    }
    return &a->send.submit;
}

/* Prefill leg: a node that keeps the prompt gets it as what replaces the last attempt. */
static void submit_prefill(struct bt_rt_core *c, struct rt_seq *s, const struct rt_pair *pair)
{
    struct rt_node *p = pair->prefill;
    bool again = s->kept.session != 0 && s->kept.session == p->session;

    if (!again) {
        bt_rt_kept_drop(c, s);
    }
    leg_begin(c, s, BT_ROLE_PREFILL, p, again && s->kept.computed ? 1 : s->n_tokens - p->credit);
    struct bt_msg_submit *m = send_submit(c, s, BT_ROLE_PREFILL, p, pair->decode, true);

    m->has_replaces = again;
    m->replaces = s->kept.ticket;
    s->kept.session = 0;
}

static void submit_legs(struct bt_rt_core *c, struct rt_seq *s, const struct rt_pair *pair,
                        bool local)
{
    struct rt_node *d = pair->decode;

    if (local) {
        bt_rt_kept_drop(c, s);
    } else {
        submit_prefill(c, s, pair);
    }
    if (d != NULL) {
        leg_begin(c, s, BT_ROLE_DECODE, d, local ? s->n_tokens - d->credit : 0);
        (void)send_submit(c, s, BT_ROLE_DECODE, d, local ? NULL : pair->prefill, local);
    }
}

bool bt_rt_resolve(struct bt_rt_core *c, struct rt_seq *s)
{
    uint64_t ident = s->ident != 0 ? s->ident : c->served;
    uint32_t context =
        s->info.max_tokens != 0 ? 0 : bt_rt_context_of(c, ident, bt_rt_wants_decode(s));
    uint64_t want = (uint64_t)s->n_prompt + s->sampling.max_tokens;

    if (s->info.max_tokens != 0 || context == 0) {
        return true;
    }
    if (s->sampling.max_tokens == 0 ? s->n_prompt >= context : want > context) {
        const char *text =
            s->sampling.max_tokens == 0
                ? bt_rt_say(c,
                            "the prompt has %u tokens; the context holds %u, the answer included",
                            s->n_prompt, context)
                : bt_rt_say(c,
                            "prompt (%u tokens) and max_tokens (%u) together exceed the context of "
                            "%u tokens",
                            s->n_prompt, s->sampling.max_tokens, context);

        bt_rt_seq_end(c, s, BT_RT_INVALID, 0, text);
        return false;
    }
    if (s->sampling.max_tokens == 0) {
        s->sampling.max_tokens = context - s->n_prompt;
    }
    return true;
}

bool bt_rt_too_long(const struct bt_rt_core *c, uint32_t n_prompt, uint32_t max_tokens)
{
    uint32_t context = bt_rt_context_of(c, c->served, max_tokens != 1);

    return context != 0 &&
           (max_tokens == 0 ? n_prompt >= context : (uint64_t)n_prompt + max_tokens > context);
}

enum rt_dispatch bt_rt_attempt_start(struct bt_rt_core *c, uint64_t now, struct rt_seq *s)
{
    struct rt_pair pair;
    struct bt_ticket t;

    if (!bt_rt_resolve(c, s)) {
        return RT_ENDED;
    }
    bt_rt_affinity_prepare(c, s);
    enum rt_dispatch d = bt_rt_place(c, now, s, &pair);

    if (d != RT_DISPATCHED) {
        return d;
    }
    bool local = pair.prefill == pair.decode;

    if (!local && bt_rt_too_late_at(c, now, s, pair.prefill)) {
        bt_rt_end_late(c, now, s);
        return RT_ENDED;
    }
    bt_rt_next_ticket(c, &t);
    if (!bt_ticket_table_rename(&c->seqs, s, &t)) {
        return RT_NO_ROOM; /* the same random ticket twice: another at the next tick */
    }
    s->ident = pair.prefill->ident;
    s->t_progress = now;
    s->decode_began = s->prefill_answered = false;
    s->gap_n = s->gap_finish = 0;
    s->info.max_tokens = s->sampling.max_tokens;
    s->info.has_decode = false;
    s->info.t_dispatch = s->info.n_attempts == 0 ? now : s->info.t_dispatch;
    snprintf(s->prefill_name, sizeof s->prefill_name, "%s",
             pair.prefill->hello.name); /* local: the same */
    snprintf(s->decode_name, sizeof s->decode_name, "%s",
             pair.decode != NULL ? pair.decode->hello.name : "");
    s->info.attempt =
        (struct bt_rt_attempt){.t_start = now, .first = bt_rt_produced(s), .local = local};
    memcpy(s->info.attempt.prefill_name, s->prefill_name, sizeof s->prefill_name);
    memcpy(s->info.attempt.decode_name, s->decode_name, sizeof s->decode_name);
    s->leg[BT_ROLE_PREFILL] = s->leg[BT_ROLE_DECODE] = (struct rt_leg){0};
    submit_legs(c, s, &pair, local);
    if (!local) {
        bt_rt_mix_note(c, now, s->leg[BT_ROLE_PREFILL].charge);
    }
    c->stats.attempts++;
    c->stats.local += local;
    c->stats.pairs += !local && pair.decode != NULL;
    c->stats.migrated += s->info.n_attempts > 0 && s->reason != BT_ATTEMPT_REFUSED;
    /* Nobody pays for what a node lost. */
    bt_adm_goes(&c->adm, &s->turn, s->info.n_attempts == 0 ? s->n_tokens : 0, now);
    s->info.n_attempts++;
    bt_rt_seq_run(c, s);
    return RT_DISPATCHED;
}

/* ---- failure ---- */

static void avoid(struct rt_seq *s, const struct rt_node *n, uint32_t weight)
{
    uint32_t at = 0;

    if (n == NULL) {
        return;
    }
    while (at < s->n_avoid && s->avoid[at].instance != n->hello.instance) {
        at++;
    }
    if (at == RT_AVOID_MAX) {
        at = s->info.n_attempts % RT_AVOID_MAX;
    } else if (at == s->n_avoid) {
        s->n_avoid++;
        s->avoid[at].weight = 0;
    }
    s->avoid[at].instance = n->hello.instance;
    s->avoid[at].weight += weight;
}

/* A prefill node also reports what its decode node did: it keeps the prompt, then. If it does not, both are avoided a
 * little. One that is gone needs no blame. */
static void blame(struct bt_rt_core *c, struct rt_seq *s, enum bt_role role)
{
    struct rt_node *p = bt_rt_node(c, s->leg[BT_ROLE_PREFILL].session);
    struct rt_node *d = bt_rt_node(c, s->leg[BT_ROLE_DECODE].session);

    s->prefer = 0;
    if (role == BT_ROLE_DECODE || s->told_kept) {
        avoid(s, d, AVOID_REPORTER);
        if (s->resends >= RESENDS_MAX) {
            avoid(s, p, AVOID_REPORTER);
        }
        s->prefer = p != NULL && s->prefill_answered ? p->hello.instance : 0;
    } else if (p != NULL && s->reason != BT_ATTEMPT_DRAINING) {
        avoid(s, p, d == NULL ? AVOID_REPORTER : AVOID_OTHER);
        avoid(s, d, AVOID_OTHER);
    }
}

/* For those who look at the request later. */
static void remember(struct bt_rt_core *c, struct rt_seq *s, uint64_t now)
{
    struct bt_rt_attempt *a = &s->info.attempt;

    if (s->ended == NULL) {
        s->ended = bt_slab_get(&c->histories);
        BT_ASSERT(s->ended != NULL);
    }
    a->t_end = now;
    a->reason = s->reason;
    memcpy(a->why, s->why, sizeof a->why);
    s->info.n_ended += s->info.n_ended < BT_RT_ATTEMPTS_MAX;
    s->ended[s->info.n_ended - 1] = *a;
    s->info.ended = s->ended;
}

static uint64_t backoff(const struct bt_rt_core *c, uint32_t n)
{
    return n == 0 ? 0
                  : c->opts.backoff_ns << (n - 1 < BACKOFF_DOUBLINGS ? n - 1 : BACKOFF_DOUBLINGS);
}

static void again(struct bt_rt_core *c, uint64_t now, struct rt_seq *s)
{
    bool refused = s->reason == BT_ATTEMPT_REFUSED;
    bool moved = s->reason == BT_ATTEMPT_DRAINING && s->drains < c->opts.attempts_max;

    if (refused) {
        s->refusals++; /* bounded by the time in the queue */
    } else if (moved) {
        s->drains++; /* nothing failed; bounded all the same */
        s->t_wait = now;
    } else {
        s->failures++;
        s->t_wait = now;
    }
    if (s->failures >= c->opts.attempts_max) {
        bt_rt_seq_end(c, s, BT_RT_UNAVAILABLE, 0,
                      bt_rt_say(c, "%u attempts failed in a row, the last one: %s; try again later",
                                s->failures, s->why));
        return;
    }
    s->refused = refused;
    s->not_before = now + (refused ? backoff(c, s->refusals)
                           : moved ? 0
                                   : backoff(c, s->failures - 1));
    bt_rt_seq_wait(c, now, s);
}

const char *bt_rt_phase(struct bt_rt_core *c, const struct rt_seq *s)
{
    if (s->decode_began) {
        return bt_rt_say(c, "in decode, after %u tokens", bt_rt_produced(s));
    }
    return s->prefill_answered ? "in the transfer" : "in prefill";
}

/* Both are for people; the phase is short, and stays whole. */
static void set_why(struct rt_seq *s, const char *text, const char *phase)
{
    size_t room = sizeof s->why - strlen(phase) - sizeof " ()";
    size_t len = strnlen(text, room + 1);

    len = len > room ? bt_utf8_complete_len(text, room) : len;
    snprintf(s->why, sizeof s->why, "%.*s (%s)", (int)len, text, phase);
}

void bt_rt_attempt_failed(struct bt_rt_core *c, uint64_t now, struct rt_seq *s, enum bt_role role,
                          enum bt_attempt_reason reason, const char *text)
{
    uint32_t n_freed = c->n_freed;

    BT_ASSERT(s->state == SEQ_RUNNING);
    set_why(s, text, bt_rt_phase(c, s));
    s->has_reason = true;
    s->reason = reason;
    remember(c, s, now);
    blame(c, s, role);
    if (role == BT_ROLE_DECODE || s->told_kept) {
        keep_prefill(c, now, s, s->told_kept);
    }
    s->told_kept = false;
    bt_rt_leg_end(c, s, role, false);
    bt_rt_attempt_cancel(c, s);
    if (reason == BT_ATTEMPT_REFUSED) {
        c->n_freed = n_freed; /* there was no room, so there is none now */
    }
    bt_rt_log(c, BT_LOG_DEBUG,
              bt_rt_say(c, "%s: attempt %u ended after %u tokens: %s", s->request_id,
                        s->info.n_attempts, bt_rt_produced(s), s->why));
    if (reason == BT_ATTEMPT_INVALID) {
        bt_rt_seq_end(c, s, BT_RT_INVALID, 0, bt_rt_say(c, "%s", s->why));
    } else if (reason == BT_ATTEMPT_INTERNAL) {
        bt_rt_seq_end(c, s, BT_RT_INTERNAL, 0,
                      bt_rt_say(c, "%s; that node's log has more", s->why));
    } else {
        again(c, now, s);
    }
}

void bt_rt_attempt_check(struct bt_rt_core *c, uint64_t now, struct rt_seq *s)
{
    const struct rt_node *p = bt_rt_node(c, s->leg[BT_ROLE_PREFILL].session);
    uint64_t allowed = c->opts.progress_ns;

    if (allowed == 0 || s->finish != 0) {
        return;
    }
    if (s->info.attempt.local) {
        p = bt_rt_node(c, s->leg[BT_ROLE_DECODE].session);
    }
    if (!s->prefill_answered && p != NULL) {
        allowed += (uint64_t)(4e9 * (double)s->n_tokens / bt_rt_prefill_speed(c, p));
    }
    if (now - s->t_progress <= allowed) {
        return;
    }
    enum bt_role role =
        !s->leg[BT_ROLE_PREFILL].live || (s->prefill_answered && s->leg[BT_ROLE_DECODE].live)
            ? BT_ROLE_DECODE
            : BT_ROLE_PREFILL;
    const char *name = role == BT_ROLE_DECODE ? s->decode_name : s->prefill_name;
    const char *text = bt_rt_say(c, "%s node %s: nothing came for %llu ms", bt_role_name(role),
                                 name, (unsigned long long)((now - s->t_progress) / 1000000));

    bt_rt_leg_end(c, s, role, true); /* it does not know that its attempt has ended */
    bt_rt_attempt_failed(c, now, s, role, BT_ATTEMPT_RETRY, text);
}

/* ---- tokens ---- */

void bt_rt_attempt_finish(struct bt_rt_core *c, struct rt_seq *s)
{
    const struct rt_node *d = bt_rt_node(c, s->leg[BT_ROLE_DECODE].session);

    if (d != NULL && s->decode_began) {
        bt_rt_affinity_note_more(c->affinity, s->t_progress, d, s);
    }
    bt_rt_leg_end(c, s, BT_ROLE_DECODE,
                  !s->decode_began); /* else it waits for pages that will not come */
    c->answer_mean += (bt_rt_produced(s) - c->answer_mean) / ANSWERS;
    bt_rt_leg_end(c, s, BT_ROLE_PREFILL, !s->decode_began);
    bt_rt_seq_end(c, s, BT_RT_FINISHED, s->finish, NULL);
}

/* Takes tokens that follow directly. false: too many. */
static bool accept(struct bt_rt_core *c, struct rt_seq *s, const struct bt_sampled *list, size_t n)
{
    struct rt_node *d = bt_rt_node(c, s->leg[BT_ROLE_DECODE].session);

    if (n == 0) {
        return true;
    }
    if (n > s->sampling.max_tokens - bt_rt_produced(s)) {
        return false;
    }
    struct bt_rt_action *a = bt_rt_act(c, BT_RT_TOKENS);

    a->seq = s->head.id;
    a->user = s->user;
    a->tokens.index = bt_rt_produced(s);
    a->tokens.n = n;
    a->tokens.list = list;
    for (size_t i = 0; i < n; i++) {
        s->tokens[s->n_tokens++] = list[i].token;
    }
    if (d != NULL && s->leg[BT_ROLE_DECODE].live) {
        struct rt_leg *l = &s->leg[BT_ROLE_DECODE];
        uint32_t pages = bt_rt_pages_of(d, s->n_tokens);
        uint32_t more = pages > l->pages ? pages - l->pages : 0;

        hold(d, l, n);
        l->pages += more;
        d->own_pages += more;
    }
    bt_adm_charge(&c->adm, s->turn.key, n);
    s->failures = s->refusals = s->drains = s->resends = 0;
    return true;
}

/* Keeps tokens that others must come in front of. */
static bool buffer_gap(struct bt_rt_core *c, struct rt_seq *s, const struct bt_msg_output *o)
{
    if (s->gap == NULL) {
        s->gap = bt_slab_get(&c->gaps);
        BT_ASSERT(s->gap != NULL);
    }
    if (s->gap_n == 0) {
        s->gap_first = o->index;
    }
    if (o->index != s->gap_first + s->gap_n || o->n_tokens > RT_GAP_MAX - s->gap_n) {
        return false;
    }
    memcpy(s->gap + s->gap_n, o->tokens, o->n_tokens * sizeof *s->gap);
    s->gap_n += (uint32_t)o->n_tokens;
    s->gap_finish = o->finish;
    return true;
}

/* Where these tokens, of which the first has that index, differ from those taken before; n: nowhere. */
static size_t first_difference(const struct rt_seq *s, uint32_t index,
                               const struct bt_sampled *list, size_t n)
{
    uint32_t at = bt_rt_produced(s);

    for (size_t i = 0; i < n && index + i < at; i++) {
        if (s->tokens[s->n_prompt + index + i] != list[i].token) {
            return i;
        }
    }
    return n;
}

static bool take_gap(struct bt_rt_core *c, struct rt_seq *s, uint32_t *finish)
{
    uint32_t at = bt_rt_produced(s);

    if (s->gap_n == 0 || s->gap_first > at) {
        return true;
    }
    uint32_t known = at - s->gap_first < s->gap_n ? at - s->gap_first : s->gap_n;
    uint32_t n = s->gap_n - known;

    if (first_difference(s, s->gap_first, s->gap, s->gap_n) < s->gap_n) {
        return false;
    }
    /* The action outlives the buffer, which may be filled again. */
    struct bt_sampled *copy = bt_arena_alloc(&c->scratch, n * sizeof *copy);

    if (copy == NULL) {
        return false;
    }
    memcpy(copy, s->gap + known, n * sizeof *copy);
    s->gap_n = 0;
    *finish = s->gap_finish;
    return accept(c, s, copy, n);
}

/* The part of an output that is new. *finish: set if the answer is complete with it. */
static bool take_tokens(struct bt_rt_core *c, struct rt_seq *s, const struct bt_msg_output *o,
                        uint32_t *finish)
{
    uint32_t at = bt_rt_produced(s);

    if (o->n_tokens == 0) {
        return o->finish == 0;
    }
    if (o->index > at) {
        return buffer_gap(c, s, o);
    }
    size_t known = at - o->index;

    if (known < o->n_tokens) {
        if (!accept(c, s, o->tokens + known, o->n_tokens - known)) {
            return false;
        }
        *finish = o->finish;
    } else if (known == o->n_tokens) {
        *finish = o->finish; /* the second copy of the last token */
    }
    return *finish != 0 || take_gap(c, s, finish);
}

static void take_prompt_logprobs(struct bt_rt_core *c, struct rt_seq *s,
                                 const struct bt_msg_output *o)
{
    uint32_t first = o->prompt_first;

    if (!s->prompt_logprobs || first > s->prompt_next || s->prompt_next >= s->n_prompt) {
        return;
    }
    size_t known = s->prompt_next - first;
    size_t room = s->n_prompt - s->prompt_next;

    if (known >= o->n_prompt_logprobs) {
        return;
    }
    size_t n = o->n_prompt_logprobs - known;
    struct bt_rt_action *a = bt_rt_act(c, BT_RT_PROMPT_LOGPROBS);

    a->seq = s->head.id;
    a->user = s->user;
    a->prompt_logprobs.first = s->prompt_next;
    a->prompt_logprobs.n = n < room ? n : room;
    a->prompt_logprobs.list = o->prompt_logprobs + known;
    s->prompt_next += (uint32_t)a->prompt_logprobs.n;
}

/* A node says how many tokens its model knows; 0: it does not. */
static bool in_vocabulary(const struct rt_node *n, const struct bt_msg_output *o)
{
    uint32_t vocab = n->hello.vocab != 0 ? n->hello.vocab : UINT32_MAX;

    for (size_t i = 0; i < o->n_tokens; i++) {
        if (o->tokens[i].token >= vocab) {
            return false;
        }
    }
    return true;
}

/* The sequence whose current attempt has a live leg on this node, or NULL. An attempt never has both legs on one
 * node: that is one leg which computes. */
static struct rt_seq *seq_of(struct bt_rt_core *c, const struct rt_node *n,
                             const struct bt_ticket *t, enum bt_role *role)
{
    struct rt_seq *s = bt_ticket_table_by_ticket(&c->seqs, t);

    for (*role = BT_ROLE_PREFILL; s != NULL && s->state == SEQ_RUNNING && *role < BT_LEGS;
         (*role)++) {
        if (s->leg[*role].live && s->leg[*role].session == n->session) {
            return s;
        }
    }
    return NULL;
}

static void take_stats(struct bt_rt_core *c, struct rt_seq *s, enum bt_role role,
                       const struct bt_msg_output *o)
{
    if (!o->has_stats) {
        return;
    }
    if (role == BT_ROLE_DECODE) {
        s->info.has_decode = true;
        s->info.decode = s->info.attempt.decode = o->stats;
        s->info.attempt.has_decode = true;
    }
    if (role == BT_ROLE_DECODE && !s->info.attempt.local) {
        return;
    }
    c->stats.resent += o->stats.resent && !s->prefill_answered;
    s->info.attempt.has_prefill = true;
    s->info.attempt.prefill = o->stats;
    if (!s->info.has_prefill) {
        s->info.has_prefill = true;
        s->info.prefill = o->stats;
    }
}

/* Of one index there is one token, whoever computes it: a node that has another one than was taken before is told of as an
 * error, once. */
static bool agrees(struct bt_rt_core *c, struct rt_seq *s, struct rt_node *n,
                   const struct bt_msg_output *o)
{
    enum bt_role role = n->hello.role;
    enum bt_role other = role == BT_ROLE_DECODE ? BT_ROLE_PREFILL : BT_ROLE_DECODE;
    size_t i = first_difference(s, o->index, o->tokens, o->n_tokens);

    if (i == o->n_tokens) {
        return true;
    }
    c->stats.token_mismatches++;
    bt_rt_log(c, n->disagreed ? BT_LOG_DEBUG : BT_LOG_ERROR,
              bt_rt_say(c,
                        "%s: %s node %s has token %u at index %zu, %s node %s had %u: one of them, "
                        "or what is between them, is broken",
                        s->request_id, bt_role_name(role), n->hello.name, o->tokens[i].token,
                        o->index + i, bt_role_name(other),
                        other == BT_ROLE_DECODE ? s->decode_name : s->prefill_name,
                        s->tokens[s->n_prompt + o->index + i]));
    n->disagreed = true;
    return false;
}

/* What a node sends of an attempt cannot be used: it is told to stop, and another attempt begins. */
static void output_failed(struct bt_rt_core *c, uint64_t now, struct rt_seq *s, enum bt_role role,
                          const char *text)
{
    bt_rt_leg_end(c, s, role, true);
    bt_rt_attempt_failed(c, now, s, role, BT_ATTEMPT_RETRY, text);
}

/* A decode node that began with another token than the one taken goes on with a wrong answer; which of the two nodes is
 * wrong cannot be known. */
static void disagreement(struct bt_rt_core *c, uint64_t now, struct rt_seq *s, enum bt_role role)
{
    struct rt_node *p = bt_rt_node(c, s->leg[BT_ROLE_PREFILL].session);

    if (role == BT_ROLE_DECODE) {
        avoid(s, p, AVOID_OTHER);
    }
    output_failed(c, now, s, role,
                  bt_rt_say(c, "%s node %s has another token than the one that was sent",
                            bt_role_name(role),
                            role == BT_ROLE_DECODE ? s->decode_name : s->prefill_name));
}

/* Dropped; told once in a while. */
static void stale(struct bt_rt_core *c, uint64_t now, const struct rt_node *n)
{
    uint32_t n_held;

    c->stats.stale++;
    if (bt_log_may(&c->stale_told, now, &n_held)) {
        bt_rt_log(c, BT_LOG_INFO,
                  bt_rt_say(c,
                            "%s node %s: a message for a ticket that is over or unknown is "
                            "dropped (%u more before it); harmless after a cancel or a retry",
                            bt_role_name(n->hello.role), n->hello.name, n_held));
    }
}

void bt_rt_on_output(struct bt_rt_core *c, uint64_t now, struct rt_node *n,
                     const struct bt_msg_output *o)
{
    enum bt_role role;
    struct rt_seq *s = seq_of(c, n, &o->ticket, &role);
    uint32_t finish = 0;

    if (s == NULL) {
        stale(c, now, n);
        return;
    }
    uint32_t produced = bt_rt_produced(s);
    uint32_t prompt_next = s->prompt_next;

    take_stats(c, s, role, o);
    take_prompt_logprobs(c, s, o);
    n->caches = n->caches || (o->has_stats && o->stats.cached_tokens > 0);
    if ((role == BT_ROLE_PREFILL || s->info.attempt.local) && o->n_tokens > 0) {
        s->info.attempt.t_prefilled = s->prefill_answered ? s->info.attempt.t_prefilled : now;
        s->prefill_answered = true;
        uncharge(n, &s->leg[role]);
    }
    if (role == BT_ROLE_DECODE && (!s->info.attempt.local || s->prefill_answered)) {
        if (!s->decode_began && o->has_stats) {
            bt_rt_local_learn(c, &o->stats);
        }
        s->info.attempt.t_landed = s->decode_began ? s->info.attempt.t_landed : now;
        s->decode_began = true;
    }
    if (o->n_tokens > 0 && bt_rt_produced(s) == 0 && s->info.n_attempts == 1) {
        bt_rt_first_token(c, now, s);
    }
    bool useful = agrees(c, s, n, o);

    /* A prefill node's copy that comes after the decode node has begun changes nothing any more. */
    if (!useful && s->finish == 0 && (role == BT_ROLE_DECODE || !s->decode_began)) {
        disagreement(c, now, s, role);
        return;
    }
    if (useful && s->finish == 0 && (!in_vocabulary(n, o) || !take_tokens(c, s, o, &finish))) {
        output_failed(c, now, s, role,
                      "tokens came out of order, too many, or outside the vocabulary");
        return;
    }
    if (bt_rt_produced(s) > produced || s->prompt_next > prompt_next) {
        s->t_progress = now;
    }
    if (s->finish == 0 && finish == 0 && bt_rt_produced(s) == s->sampling.max_tokens) {
        finish = 2;
    }
    if (finish != 0) {
        s->finish = finish;
        s->finish_at = now + RT_STATS_NS;
    }
    if (s->finish != 0) {
        if (finish != 0) {
            bt_rt_leg_end(c, s, role, false);
        }
        if (s->prefill_answered || (!s->leg[BT_ROLE_PREFILL].live && !bt_rt_wants_prompt(s))) {
            bt_rt_attempt_finish(c, s);
        }
    } else if (s->decode_began && s->prefill_answered) {
        bt_rt_leg_end(c, s, BT_ROLE_PREFILL, false); /* its part is done */
    }
}

void bt_rt_leg_lost(struct bt_rt_core *c, uint64_t now, struct rt_seq *s, enum bt_role role,
                    enum bt_attempt_reason reason, const char *text)
{
    bool done = role == BT_ROLE_PREFILL ? s->decode_began || s->finish != 0 : s->finish != 0;

    if (!done || (role == BT_ROLE_PREFILL && bt_rt_wants_prompt(s))) {
        bt_rt_attempt_failed(c, now, s, role, reason, text);
        return;
    }
    bt_rt_leg_end(c, s, role, s->told_kept); /* nobody wants what it keeps */
    s->told_kept = false;
    if (s->finish != 0 && !bt_rt_wants_prompt(s)) {
        bt_rt_attempt_finish(c, s);
    }
}

void bt_rt_on_attempt_end(struct bt_rt_core *c, uint64_t now, struct rt_node *n,
                          const struct bt_msg_attempt_end *m)
{
    enum bt_role role;
    struct rt_seq *s = seq_of(c, n, &m->ticket, &role);

    if (s == NULL) {
        stale(c, now, n);
        return;
    }
    const struct rt_leg *other = &s->leg[BT_ROLE_DECODE];
    const struct rt_node *d =
        role == BT_ROLE_PREFILL && other->live ? bt_rt_node(c, other->session) : NULL;

    s->told_kept = m->kept && role == BT_ROLE_PREFILL;
    bt_rt_leg_lost(c, now, s, role, m->reason,
                   bt_rt_say(c, "%s node %s%s%s: %s", bt_role_name(role), n->hello.name,
                             d != NULL ? ", for decode node " : "", d != NULL ? d->hello.name : "",
                             m->text));
}
