/* Tokens of a choice become text, cut at stop strings; usage and timings are summed up. Refuses to know where tokens come
 * from and who reads the text. */

#include <string.h>
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "router/generate_int.h"

#define QUEUE_HIGH                                                                                 \
    ((size_t)256 << 10) /* bytes on the client's stream that stop the making of text */
#define PIECE_BYTES ((size_t)64 << 10) /* text of one piece, about */

static void get_token(struct gen_choice *ch, struct bt_sampled *out)
{
    const char *at = ch->pending.data + ch->pending_at;
    struct gen_packed p;

    memcpy(&p, at, sizeof p);
    *out = (struct bt_sampled){.token = p.token, .logprob = p.logprob, .n_top = p.n_top};
    memcpy(out->top, at + sizeof p, p.n_top * sizeof out->top[0]);
    ch->pending_at += sizeof p + p.n_top * sizeof out->top[0];
    if (ch->pending_at == ch->pending.len) {
        bt_buf_clear(&ch->pending);
        ch->pending_at = 0;
    }
}

static bool reserve_scratch(struct bt_router *r, size_t n)
{
    if (n <= r->cap_scratch) {
        return true;
    }
    size_t cap = n + n / 2 + 16;
    struct bt_sampled *grown = bt_realloc(r->scratch, cap * sizeof *grown);

    if (grown == NULL) {
        return false;
    }
    r->scratch = grown;
    r->cap_scratch = cap;
    return true;
}

/* The choice is complete: what the core knows of it is kept, the rest of its tokens does not count. */
static void stop_here(struct gen_choice *ch)
{
    if (ch->seq != 0) {
        bt_gen_keep_info(ch, bt_rt_seq_info(ch->g->r->core, ch->seq));
        bt_gen_cancel_seq(ch);
    }
    bt_buf_clear(&ch->pending);
    ch->pending_at = 0;
    ch->ended = true;
    ch->finish = 1;
}

/* Moves pending tokens into g->text and scratch; *n: how many. */
static bool make_text(struct gen_choice *ch, size_t *n)
{
    struct bt_gen *g = ch->g;

    while (ch->pending.len > 0 && g->text.len < PIECE_BYTES) {
        if (!reserve_scratch(g->r, *n + 1)) {
            return false;
        }
        struct bt_sampled *s = &g->r->scratch[*n];

        get_token(ch, s);
        ++*n;
        if (ch->ended && ch->finish == 1 && ch->pending.len == 0) {
            break; /* EOS or a stop id: counted, not shown */
        }
        bt_buf_clear(&g->raw);
        enum bt_status st = bt_detok_push(&ch->detok, s->token, &g->raw);

        if (st == BT_ERR_NOMEM ||
            bt_stop_feed(&ch->stop, g->raw.data, g->raw.len, &g->text) != BT_OK) {
            return false;
        }
        if (ch->stop.hit >= 0) {
            stop_here(ch);
            return true;
        }
    }
    if (ch->ended && ch->pending.len == 0) {
        bt_buf_clear(&g->raw);
        if (bt_detok_finish(&ch->detok, &g->raw) != BT_OK ||
            bt_stop_feed(&ch->stop, g->raw.data, g->raw.len, &g->text) != BT_OK ||
            bt_stop_finish(&ch->stop, &g->text) != BT_OK) {
            return false;
        }
    }
    return true;
}

static void count_finished(struct gen_choice *ch)
{
    struct bt_router_metrics *m = &ch->g->r->metrics;
    const struct bt_rt_seq_info *i = &ch->info;
    double s = (double)BT_NS_PER_S;

    m->finished[ch->finish == 1 ? BT_FINISHED_STOP : BT_FINISHED_LENGTH]++;
    m->prompt_tokens += ch->prompt->n;
    m->cached_tokens += i->prefill.cached_tokens;
    if (i->has_prefill) {
        bt_prom_hist_observe(&m->queue,
                             (double)(i->t_dispatch - ch->g->t_start + i->prefill.queue_ns) / s);
        bt_prom_hist_observe(&m->prefill, (double)i->prefill.prefill_ns / s);
    }
    if (i->has_decode && i->decode.transferred_tokens > 0) {
        bt_prom_hist_observe(&m->transfer, (double)i->decode.transfer_ns / s);
    }
}

static void choice_flush(struct gen_choice *ch)
{
    struct bt_gen *g = ch->g;
    bool waits = ch->plp != NULL && ch->n_plp + 1 < ch->prompt->n && !ch->ended;

    while (!ch->finished && !waits && !g->paused && !g->over &&
           (ch->pending.len > 0 || ch->ended)) {
        size_t n = 0;
        uint64_t t0 = bt_clock_ns();

        bt_buf_clear(&g->text);
        if (!make_text(ch, &n)) {
            bt_gen_fail_memory(g);
            return;
        }
        g->detokenize_ns += bt_clock_ns() - t0;
        struct bt_gen_piece p = {
            .index = ch->index,
            .first = ch->n_out == 0 && !ch->finished,
            .text = g->text.data != NULL ? g->text.data : "",
            .len = g->text.len,
            .tokens = g->r->scratch,
            .n_tokens = n,
            .finish = ch->ended && ch->pending.len == 0 ? ch->finish : 0,
        };

        ch->n_out += (uint32_t)n;
        if (p.finish != 0) {
            ch->finished = true;
            count_finished(ch);
            p.last = --g->n_unfinished == 0;
        }
        g->paused = g->events->on_piece(g->user, g, &p) > QUEUE_HIGH;
    }
}

static void log_end(const struct bt_gen *g)
{
    struct bt_inf_usage u = bt_gen_usage(g);
    uint64_t ms = (bt_net_loop_now(g->r->loop) - g->t_arrival) / BT_NS_PER_MS;

    BT_LOG(BT_LOG_DEBUG, "router", g->request_id,
           "done in %llu ms: %u prompt tokens, %u answer tokens, %s -> %s", (unsigned long long)ms,
           u.prompt_tokens, u.completion_tokens, bt_gen_prefill_name(g), bt_gen_decode_name(g));
}

static void gen_flush(struct bt_gen *g)
{
    for (uint32_t i = 0; i < g->n_choices && !g->over && !g->paused; i++) {
        choice_flush(&g->choices[i]);
    }
    if (!g->over && g->n_unfinished == 0) {
        log_end(g);
        bt_gen_log(g, NULL);
        bt_gen_retire(g);
        g->events->on_end(g->user, g, NULL);
    }
}

void bt_gen_flush(struct bt_router *r)
{
    while (r->dirty != NULL) {
        struct bt_gen *g = r->dirty;

        r->dirty = g->next_dirty;
        g->is_dirty = false;
        gen_flush(g);
    }
}

/* ---- what front ends ask ---- */

const struct bt_params *bt_gen_params(const struct bt_gen *g)
{
    return &g->params;
}

const struct bt_gen_prompt *bt_gen_prompt(const struct bt_gen *g, uint32_t index)
{
    return g->choices[index].prompt;
}

const struct bt_sampled *bt_gen_prompt_logprobs(const struct bt_gen *g, uint32_t index)
{
    return g->choices[index].plp;
}

struct bt_inf_usage bt_gen_usage(const struct bt_gen *g)
{
    struct bt_inf_usage u = {0};

    for (uint32_t i = 0; i < g->n_choices; i++) {
        const struct gen_choice *ch = &g->choices[i];

        /* Each choice is a sequence of its own and counts as it ran: n = 2 reads the prompt twice. */
        u.prompt_tokens += ch->prompt->n;
        u.cached_tokens += ch->info.prefill.cached_tokens;
        u.completion_tokens += ch->n_out;
        u.transferred_tokens += ch->info.has_decode ? ch->info.decode.transferred_tokens : 0;
    }
    return u;
}

static void at_least(double *v, uint64_t ns)
{
    double ms = (double)ns / (double)BT_NS_PER_MS;

    *v = ms > *v ? ms : *v;
}

/* Times are those of the slowest choice, amounts are summed. */
struct bt_inf_timings bt_gen_timings(const struct bt_gen *g)
{
    struct bt_inf_timings t = {0};

    at_least(&t.tokenize_ms, g->tokenize_ns);
    at_least(&t.detokenize_ms, g->detokenize_ns);
    for (uint32_t i = 0; i < g->n_choices; i++) {
        const struct gen_choice *ch = &g->choices[i];
        const struct bt_rt_seq_info *f = &ch->info;

        if (f->t_dispatch != 0) {
            at_least(&t.queue_ms, f->t_dispatch - g->t_start + f->prefill.queue_ns);
        }
        at_least(&t.prefill_ms, f->prefill.prefill_ns);
        at_least(&t.first_token_ms, ch->t_first != 0 ? ch->t_first - g->t_arrival : 0);
        at_least(&t.decode_ms, ch->t_last - ch->t_first);
        t.prefill_tokens += f->prefill.prefill_tokens;
        t.local_prefills += f->attempt.local;
        t.decode_tokens += ch->n_received > 0 ? ch->n_received - 1 : 0;
        if (f->has_decode) {
            at_least(&t.transfer_ms, f->decode.transfer_ns);
            at_least(&t.transfer_tail_ms, f->decode.transfer_tail_ns);
            t.transferred_tokens += f->decode.transferred_tokens;
            t.transferred_bytes += f->decode.transferred_bytes;
        }
    }
    return t;
}

const char *bt_gen_prefill_name(const struct bt_gen *g)
{
    return g->choices[0].prefill_name;
}

const char *bt_gen_decode_name(const struct bt_gen *g)
{
    return g->choices[0].decode_name;
}
