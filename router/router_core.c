/* The action queue and the life of sequences: start, wait, end. Owns their memory; refuses to know
 * of sockets, text, HTTP and the clock. */

#include "router/router_core_int.h"

#include <stddef.h>
#include <stdio.h>
#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/utf8.h"

#define SCRATCH_MAX   ((size_t)256 << 20)
#define SCAN_MAX      256u  /* waiting sequences looked at in one pump */
#define ANSWER_TOKENS 128.0 /* of an answer, before the first one was seen */

/* ---- life ---- */

static bool slabs_init(struct bt_rt_core *c)
{
    uint32_t n = c->opts.seqs_max;

    return bt_slab_init(&c->tokens, "token ids", BT_SESSION_TOKENS_MAX * sizeof(uint32_t), n) ==
               BT_OK &&
           bt_slab_init(&c->biases, "biases", BT_LOGIT_BIAS_MAX * sizeof(struct bt_logit_bias),
                        n) == BT_OK &&
           bt_slab_init(&c->chains, "prompt blocks", RT_CHAIN_MAX * sizeof(uint64_t), n) == BT_OK &&
           bt_slab_init(&c->gaps, "token gaps", RT_GAP_MAX * sizeof(struct bt_sampled), n) ==
               BT_OK &&
           bt_slab_init(&c->histories, "ended attempts",
                        BT_RT_ATTEMPTS_MAX * sizeof(struct bt_rt_attempt), n) == BT_OK;
}

enum bt_status bt_rt_core_create(const struct bt_rt_opts *opts, struct bt_rt_core **out)
{
    struct bt_rt_core *c = bt_calloc(1, sizeof *c);

    if (c == NULL) {
        return BT_ERR_NOMEM;
    }
    c->opts = *opts;
    bt_arena_init(&c->scratch, SCRATCH_MAX);
    c->nodes = bt_calloc(opts->nodes_max, sizeof *c->nodes);
    c->node_generation = bt_calloc(opts->nodes_max, sizeof *c->node_generation);
    c->affinity = bt_rt_affinity_create();
    if (c->nodes == NULL || c->node_generation == NULL || c->affinity == NULL || !slabs_init(c) ||
        bt_adm_init(&c->adm, opts->n_keys, opts->seqs_max) != BT_OK ||
        bt_ticket_table_init(&c->seqs, sizeof(struct rt_seq), opts->seqs_max, 0) != BT_OK) {
        bt_rt_core_destroy(c);
        return BT_ERR_NOMEM;
    }
    c->answer_mean = ANSWER_TOKENS;
    *out = c;
    return BT_OK;
}

static void seq_free(struct bt_rt_core *c, struct rt_seq *s)
{
    bt_slab_put(&c->tokens, s->tokens);
    bt_slab_put(&c->biases, s->bias);
    bt_slab_put(&c->gaps, s->gap);
    bt_slab_put(&c->histories, s->ended);
    bt_slab_put(&c->chains, s->chain);
    bt_ticket_table_remove(&c->seqs, s);
}

static void list_free(struct bt_rt_core *c, struct rt_list *l)
{
    while (l->first != NULL) {
        struct rt_seq *s = l->first;

        l->first = s->next;
        seq_free(c, s);
    }
    l->last = NULL;
}

static void drained(struct bt_rt_core *c)
{
    c->n_actions = c->head_action = 0;
    list_free(c, &c->over);
    for (size_t i = 0; i < c->n_trash; i++) {
        bt_free(c->trash[i]);
    }
    c->n_trash = 0;
    bt_arena_rewind(&c->scratch);
}

void bt_rt_core_destroy(struct bt_rt_core *c)
{
    if (c == NULL) {
        return;
    }
    drained(c);
    list_free(c, &c->waiting);
    list_free(c, &c->running);
    bt_rt_nodes_fini(c);
    bt_adm_fini(&c->adm);
    bt_ticket_table_fini(&c->seqs);
    bt_slab_fini(&c->tokens);
    bt_slab_fini(&c->biases);
    bt_slab_fini(&c->chains);
    bt_slab_fini(&c->gaps);
    bt_slab_fini(&c->histories);
    bt_arena_fini(&c->scratch);
    bt_free(c->trash);
    bt_free(c->actions);
    bt_rt_affinity_destroy(c->affinity);
    bt_free(c->node_generation);
    bt_free(c->nodes);
    bt_free(c);
}

/* ---- actions ---- */

struct bt_rt_action *bt_rt_act(struct bt_rt_core *c, enum bt_rt_action_kind kind)
{
    c->actions = bt_grow(c->actions, c->n_actions, &c->cap_actions, sizeof *c->actions);
    struct bt_rt_action *a = &c->actions[c->n_actions++];

    memset(a, 0, sizeof *a);
    a->kind = kind;
    return a;
}

bool bt_rt_core_next(struct bt_rt_core *c, struct bt_rt_action *out)
{
    while (c->head_action < c->n_actions) {
        *out = c->actions[c->head_action++];
        if (out->kind != RT_DROPPED) {
            return true;
        }
    }
    drained(c);
    return false;
}

/* Who left is not told any more what was queued before. */
static void drop_actions(struct bt_rt_core *c, uint64_t seq)
{
    for (size_t i = c->head_action; i < c->n_actions; i++) {
        if (c->actions[i].seq == seq) {
            c->actions[i].kind = RT_DROPPED;
        }
    }
}

bool bt_rt_core_pending(const struct bt_rt_core *c)
{
    return c->head_action < c->n_actions;
}

const char *bt_rt_say(struct bt_rt_core *c, const char *fmt, ...)
{
    char text[640];
    va_list ap;

    va_start(ap, fmt);
    int n = vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    size_t len = n < 0 ? 0 : (size_t)n < sizeof text ? (size_t)n : sizeof text - 1;
    const char *s = bt_arena_strndup(&c->scratch, text, len);

    return s != NULL ? s : "out of memory";
}

void bt_rt_log(struct bt_rt_core *c, int level, const char *text)
{
    struct bt_rt_action *a = bt_rt_act(c, BT_RT_LOG);

    a->level = level;
    a->text = text;
}

void bt_rt_trash(struct bt_rt_core *c, void *p)
{
    if (p == NULL) {
        return;
    }
    c->trash = bt_grow(c->trash, c->n_trash, &c->cap_trash, sizeof *c->trash);
    c->trash[c->n_trash++] = p;
}

/* ---- lists ---- */

static struct rt_list *list_of(struct bt_rt_core *c, enum rt_seq_state state)
{
    return state == SEQ_WAITING ? &c->waiting : state == SEQ_RUNNING ? &c->running : &c->over;
}

static void list_remove(struct rt_list *l, struct rt_seq *s)
{
    *(s->prev != NULL ? &s->prev->next : &l->first) = s->next;
    *(s->next != NULL ? &s->next->prev : &l->last) = s->prev;
    s->prev = s->next = NULL;
}

static void list_append(struct rt_list *l, struct rt_seq *s)
{
    s->prev = l->last;
    s->next = NULL;
    *(s->prev != NULL ? &s->prev->next : &l->first) = s;
    l->last = s;
}

static const uint8_t legal_next[] = {
    [SEQ_WAITING] = 1u << SEQ_RUNNING | 1u << SEQ_OVER,
    [SEQ_RUNNING] = 1u << SEQ_WAITING | 1u << SEQ_OVER,
    [SEQ_OVER] = 0,
};

static void seq_move(struct bt_rt_core *c, struct rt_seq *s, enum rt_seq_state next)
{
    BT_ASSERT((legal_next[s->state] & 1u << next) != 0);
    list_remove(list_of(c, s->state), s);
    if (s->state == SEQ_WAITING) {
        bt_adm_remove(&c->adm, &s->turn);
    }
    c->stats.waiting -= s->state == SEQ_WAITING;
    c->stats.running -= s->state == SEQ_RUNNING;
    s->state = next;
    c->stats.waiting += next == SEQ_WAITING;
    c->stats.running += next == SEQ_RUNNING;
    list_append(list_of(c, next), s);
}

void bt_rt_seq_wait(struct bt_rt_core *c, uint64_t now, struct rt_seq *s)
{
    seq_move(c, s, SEQ_WAITING);
    bt_adm_add(&c->adm, &s->turn, s->n_tokens, now);
}

void bt_rt_seq_run(struct bt_rt_core *c, struct rt_seq *s)
{
    seq_move(c, s, SEQ_RUNNING);
}

static void seq_over(struct bt_rt_core *c, struct rt_seq *s)
{
    bt_ticket_table_forget(&c->seqs, s);
    seq_move(c, s, SEQ_OVER);
}

void bt_rt_seq_end(struct bt_rt_core *c, struct rt_seq *s, enum bt_rt_end_kind kind,
                   uint32_t finish, const char *text)
{
    bt_rt_attempt_cancel(c, s);
    bt_rt_kept_drop(c, s);
    struct bt_rt_action *a = bt_rt_act(c, BT_RT_END);

    a->seq = s->head.id;
    a->user = s->user;
    a->end = (struct bt_rt_end){kind, finish, text};
    seq_over(c, s);
}

/* ---- sequences ---- */

void bt_rt_next_ticket(struct bt_rt_core *c, struct bt_ticket *t)
{
    for (unsigned i = 0; i < 2; i++) {
        uint64_t z = c->opts.seed[i] + ++c->n_tickets * UINT64_C(0x9e3779b97f4a7c15);

        z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
        z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
        z ^= z >> 31;
        memcpy(t->b + 8 * i, &z, sizeof z);
    }
}

uint32_t bt_rt_core_room(const struct bt_rt_core *c)
{
    uint32_t waiting = c->stats.waiting, slots = c->seqs.n_slots - c->seqs.count;
    uint32_t room = c->opts.queue_max > waiting ? c->opts.queue_max - waiting : 0;

    return room < slots ? room : slots;
}

static void seq_copy(struct bt_rt_core *c, struct rt_seq *s, const struct bt_rt_seq_start *in)
{
    size_t id_bytes = strnlen(in->request_id, sizeof s->request_id);

    s->tokens = bt_slab_get(&c->tokens);
    BT_ASSERT(s->tokens != NULL); /* one for each sequence, as of the other slabs */
    id_bytes = id_bytes < sizeof s->request_id
                   ? id_bytes
                   : bt_utf8_complete_len(in->request_id, sizeof s->request_id - 1);
    memcpy(s->request_id, in->request_id, id_bytes); /* the rest is zero */
    snprintf(s->trace_id, sizeof s->trace_id, "%s", in->trace_id != NULL ? in->trace_id : "");
    memcpy(s->tokens, in->tokens, (size_t)in->n_prompt * sizeof *s->tokens);
    s->n_tokens = s->n_prompt = in->n_prompt;
    s->sampling = *in->sampling;
    if (in->sampling->n_bias > 0) {
        s->bias = bt_slab_get(&c->biases);
        BT_ASSERT(s->bias != NULL);
        memcpy(s->bias, in->sampling->bias, in->sampling->n_bias * sizeof *s->bias);
    }
    s->sampling.bias = s->bias;
    s->prompt_logprobs = in->prompt_logprobs;
    s->prompt_next = 1;
    s->turn.priority = in->priority;
    s->turn.key = in->key;
    s->deadline = in->deadline;
    s->user = in->user;
    s->info.prefill_name = s->prefill_name;
    s->info.decode_name = s->decode_name;
}

/* What can never run is not refused but waits to be told so. */
static bool comes_too_late(const struct bt_rt_core *c, uint64_t now,
                           const struct bt_rt_seq_start *in)
{
    if (c->opts.max_ttft_ns == 0 || bt_rt_too_long(c, in->n_prompt, in->sampling->max_tokens)) {
        return false;
    }
    struct bt_rt_forecast f = bt_rt_forecast(c, now, in->key, in->priority, in->n_prompt);

    return !f.uncertain && f.wait_ns + f.margin_ns + f.prefill_ns > c->opts.max_ttft_ns;
}

enum bt_status bt_rt_seq_start(struct bt_rt_core *c, uint64_t now, const struct bt_rt_seq_start *in,
                               uint64_t *seq)
{
    struct bt_ticket t;

    BT_ASSERT(in->n_prompt > 0 && in->n_prompt <= BT_SESSION_TOKENS_MAX &&
              in->sampling->n_bias <= BT_LOGIT_BIAS_MAX);
    if (bt_rt_core_room(c) == 0) {
        return BT_ERR_BUSY;
    }
    if (comes_too_late(c, now, in)) {
        return BT_ERR_TIMEOUT;
    }
    bt_rt_next_ticket(c, &t);
    struct rt_seq *s = bt_ticket_table_add(&c->seqs, &t);

    if (s == NULL) {
        return BT_ERR_NOMEM;
    }
    seq_copy(c, s, in);
    struct bt_rt_forecast f = bt_rt_forecast_work(c, now, in->key, in->priority, in->n_prompt);

    s->expect_ns = f.uncertain || !c->ready ? 0 : f.wait_ns + f.prefill_ns;
    s->t_wait = s->t_start = now;
    list_append(&c->waiting, s);
    bt_adm_add(&c->adm, &s->turn, s->n_tokens, now);
    c->stats.waiting++;
    *seq = s->head.id;
    if (bt_rt_resolve(c, s)) {
        bt_rt_pump(c, now);
    }
    return BT_OK;
}

void bt_rt_seq_cancel(struct bt_rt_core *c, uint64_t now, uint64_t seq)
{
    struct rt_seq *s = bt_ticket_table_by_id(&c->seqs, seq);

    if (s == NULL) {
        return;
    }
    drop_actions(c, seq);
    if (s->state == SEQ_OVER) {
        return;
    }
    bt_rt_attempt_cancel(c, s);
    bt_rt_kept_drop(c, s);
    seq_over(c, s);
    bt_rt_pump(c, now);
}

const struct bt_rt_seq_info *bt_rt_seq_info(const struct bt_rt_core *c, uint64_t seq)
{
    struct rt_seq *s = bt_ticket_table_by_id(&c->seqs, seq);

    return s == NULL ? NULL : &s->info;
}

const struct bt_rt_stats *bt_rt_core_stats(const struct bt_rt_core *c)
{
    return &c->stats;
}

/* ---- dispatch ---- */

/* Whether its pause is over: by time, or because a node has got room since it was refused. */
static bool may_try(struct bt_rt_core *c, const struct rt_seq *s, uint64_t now)
{
    if (s->not_before <= now) {
        return true;
    }
    if (!s->refused || c->n_freed == 0) {
        return false;
    }
    c->n_freed--;
    return true;
}

static struct rt_seq *seq_of_turn(struct bt_adm_item *it)
{
    return (struct rt_seq *)(void *)((char *)it - offsetof(struct rt_seq, turn));
}

/* In order of turns (router_admission.h). A sequence that finds no room keeps those behind it from
 * overtaking on the same resource. */
void bt_rt_pump(struct bt_rt_core *c, uint64_t now)
{
    struct bt_adm_item *it;
    bool decode_full = false, long_full = false, short_full = false;

    if (!c->ready) {
        bt_adm_pause(&c->adm, now);
    }
    bt_adm_rewind(&c->adm);
    for (unsigned n = 0; n < SCAN_MAX && !short_full && (it = bt_adm_next(&c->adm)) != NULL; n++) {
        struct rt_seq *s = seq_of_turn(it);

        bt_rt_kept_check(c, now, s);
        bool is_short = it->tokens <= BT_ADM_SHORT || s->kept.session != 0;

        if ((decode_full && bt_rt_wants_decode(s)) || (long_full && !is_short) ||
            !may_try(c, s, now)) {
            continue;
        }
        enum rt_dispatch d = bt_rt_attempt_start(c, now, s);

        decode_full = decode_full || d == RT_NO_ROOM;
        long_full = long_full || d == RT_QUEUED;
        short_full = d == RT_QUEUED && is_short; /* then nobody finds room */
    }
    c->n_freed = 0;
}

/* Ends it if it has waited too long for what there is. */
static void check_waiting(struct bt_rt_core *c, struct rt_seq *s, uint64_t now)
{
    struct rt_pair pair;
    const char *last = s->has_reason ? s->why : "";
    uint64_t waited = now - s->t_wait;

    if (now >= s->deadline) {
        bt_rt_seq_end(c, s, BT_RT_DEADLINE, 0,
                      bt_rt_say(c, "the deadline passed while the request waited for a node%s%s",
                                last[0] != '\0' ? "; " : "", last));
        return;
    }
    if (c->ready && (s->ident == 0 || s->ident == c->served)
            ? false
            : bt_rt_place(c, now, s, &pair) == RT_NO_PAIR) {
        uint64_t since = s->t_wait > c->t_unready ? s->t_wait : c->t_unready;
        bool begun = s->info.n_attempts > 0;

        if (now - since > (begun ? c->opts.migrate_ns : c->opts.grace_ns) ||
            waited > c->opts.queue_ns) {
            bt_rt_seq_end(c, s, BT_RT_UNAVAILABLE, 0,
                          bt_rt_say(c, "%s%s%s; try again later",
                                    bt_rt_no_pair_text(c, bt_rt_wants_decode(s)),
                                    last[0] != '\0' ? "; " : "", last));
        }
        return;
    }
    if (bt_rt_too_late(c, now, s)) {
        bt_rt_end_late(c, now, s);
        return;
    }
    if (waited > c->opts.queue_ns) {
        bt_rt_seq_end(c, s, BT_RT_EXHAUSTED, 0,
                      bt_rt_say(c, "no node had room within %llu ms%s%s; try again later",
                                (unsigned long long)(c->opts.queue_ns / 1000000),
                                last[0] != '\0' ? "; " : "", last));
    }
}

void bt_rt_on_tick(struct bt_rt_core *c, uint64_t now)
{
    struct rt_seq *next;

    bt_rt_nodes_tick(c, now);
    for (struct rt_seq *s = c->running.first; s != NULL; s = next) {
        next = s->next;
        if (s->finish != 0 && now >= s->finish_at && !bt_rt_wants_prompt(s)) {
            bt_rt_attempt_finish(c, s);
        } else if (now >= s->deadline) {
            bt_rt_seq_end(c, s, BT_RT_DEADLINE, 0,
                          bt_rt_say(c, "the deadline passed %s, on %s", bt_rt_phase(c, s),
                                    s->decode_began ? s->decode_name : s->prefill_name));
        } else {
            bt_rt_attempt_check(c, now, s);
        }
    }
    bt_rt_pump(c, now);
    for (struct rt_seq *s = c->waiting.first; s != NULL; s = next) {
        next = s->next;
        check_waiting(c, s, now);
    }
}
