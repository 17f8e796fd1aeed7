/* What is written of a request that is over: only reads. Times are milliseconds; those named ..._at_ms count from the
 * request's arrival, the others are durations. */

#include "router/request_line.h"

#include <stdio.h>
#include <string.h>
#include <time.h>
#include "base/clock.h"
#include "router/generate_int.h"
#include "router/request_log.h"

#define SEQUENCES_MAX 128u /* of one line; the number of the others is told */

static const char *const reason_names[] = {
    [0] = "unknown",
    [BT_ATTEMPT_REFUSED] = "refused",
    [BT_ATTEMPT_RETRY] = "lost",
    [BT_ATTEMPT_PREEMPTED] = "preempted",
    [BT_ATTEMPT_INVALID] = "invalid",
    [BT_ATTEMPT_INTERNAL] = "internal",
    [BT_ATTEMPT_DRAINING] = "draining",
};

/* ---- fields: each puts a comma in front of itself ---- */

static void put_name(struct bt_buf *b, const char *name)
{
    bt_buf_addf(b, ",\"%s\":", name);
}

static void put_text(struct bt_buf *b, const char *name, const char *value)
{
    put_name(b, name);
    if (value == NULL || value[0] == '\0') {
        bt_buf_adds(b, "null");
    } else {
        bt_buf_add_json_str(b, value, strlen(value));
    }
}

static void put_ms(struct bt_buf *b, const char *name, uint64_t ns)
{
    bt_buf_addf(b, ",\"%s\":%.3f", name, (double)ns / (double)BT_NS_PER_MS);
}

/* t: a time; 0: not reached. */
static void put_at(struct bt_buf *b, const char *name, uint64_t t, uint64_t t0)
{
    if (t == 0) {
        bt_buf_addf(b, ",\"%s\":null", name);
    } else {
        put_ms(b, name, t > t0 ? t - t0 : 0);
    }
}

static void put_u64(struct bt_buf *b, const char *name, uint64_t v)
{
    bt_buf_addf(b, ",\"%s\":%llu", name, (unsigned long long)v);
}

static void put_bool(struct bt_buf *b, const char *name, bool v)
{
    put_name(b, name);
    bt_buf_adds(b, v ? "true" : "false");
}

static void put_time(struct bt_buf *b)
{
    uint64_t ns = bt_clock_unix_ns();
    time_t s = (time_t)(ns / BT_NS_PER_S);
    struct tm tm;
    char text[32];

    gmtime_r(&s, &tm);
    strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &tm);
    bt_buf_addf(b, "{\"time\":\"%s.%03uZ\"", text, (unsigned)(ns % BT_NS_PER_S / BT_NS_PER_MS));
}

static void put_status(struct bt_buf *b, const char *finish, const struct bt_api_err *e)
{
    put_u64(b, "status", e == NULL ? 200 : (uint64_t)bt_api_http_status(e->code));
    put_text(b, "finish_reason", finish);
    put_text(b, "error", e != NULL ? e->msg : NULL);
}

/* ---- attempts and sequences ---- */

static void put_attempt(struct bt_buf *b, const struct bt_rt_attempt *a, uint64_t t0)
{
    const struct bt_msg_leg_stats *p = &a->prefill, *d = &a->decode;

    bt_buf_addf(b, "{\"first_index\":%u", a->first);
    put_text(b, "prefill", a->prefill_name);
    put_text(b, "decode", a->decode_name);
    put_bool(b, "local", a->local);
    put_at(b, "start_at_ms", a->t_start, t0);
    put_at(b, "prefilled_at_ms", a->t_prefilled, t0);
    put_at(b, "landed_at_ms", a->t_landed, t0);
    put_at(b, "end_at_ms", a->t_end, t0);
    if (a->has_prefill) {
        put_ms(b, "queue_ms", p->queue_ns);
        put_ms(b, "prefill_ms", p->prefill_ns);
        put_u64(b, "prefill_tokens", p->prefill_tokens);
        put_u64(b, "cached_tokens", p->cached_tokens);
        bt_buf_addf(b, ",\"prefill_batch\":%.1f,\"resent\":%s", p->batch,
                    p->resent ? "true" : "false");
    }
    if (a->has_decode) {
        put_ms(b, "grant_ms", d->grant_ns);
        put_ms(b, "transfer_ms", d->transfer_ns);
        put_ms(b, "transfer_tail_ms", d->transfer_tail_ns);
        put_u64(b, "transferred_tokens", d->transferred_tokens);
        put_u64(b, "transferred_bytes", d->transferred_bytes);
        if (d->batch > 0) {
            bt_buf_addf(b, ",\"decode_batch\":%.1f", d->batch);
        }
    }
    if (a->t_end != 0) {
        put_text(b, "reason", reason_names[a->reason]);
        put_text(b, "why", a->why);
    }
    bt_buf_addc(b, '}');
}

static void put_gaps(struct bt_buf *b, const struct bt_token_gaps *g)
{
    if (g == NULL || g->n == 0) {
        bt_buf_adds(b, ",\"itl_ms\":null");
        return;
    }
    bt_buf_addf(b, ",\"itl_ms\":{\"p50\":%.3f,\"p99\":%.3f,\"max\":%.3f}",
                (double)bt_token_gaps_quantile(g, 0.5) / 1e6,
                (double)bt_token_gaps_quantile(g, 0.99) / 1e6, (double)g->max_ns / 1e6);
}

static void put_sequence(struct bt_buf *b, const struct gen_choice *ch)
{
    const struct bt_gen *g = ch->g;
    const struct bt_rt_seq_info *f = &ch->info;
    uint64_t t0 = g->t_arrival;
    const struct bt_msg_leg_stats none = {0}, *d = f->has_decode ? &f->decode : &none;

    bt_buf_addf(b, "{\"index\":%u", ch->index);
    put_text(b, "finish_reason", !ch->finished ? NULL : ch->finish == 1 ? "stop" : "length");
    put_text(b, "prefill", ch->prefill_name);
    put_text(b, "decode", ch->decode_name);
    put_bool(b, "local", f->attempt.local);
    put_u64(b, "prompt_tokens", ch->prompt->n);
    put_u64(b, "completion_tokens", ch->n_out);
    put_u64(b, "cached_tokens", f->prefill.cached_tokens);
    put_u64(b, "transferred_tokens", d->transferred_tokens);
    put_u64(b, "transferred_bytes", d->transferred_bytes);
    put_ms(b, "queue_ms",
           f->t_dispatch != 0 ? f->t_dispatch - g->t_start + f->prefill.queue_ns : 0);
    put_ms(b, "prefill_ms", f->prefill.prefill_ns);
    put_ms(b, "grant_ms", d->grant_ns);
    put_ms(b, "transfer_ms", d->transfer_ns);
    put_ms(b, "transfer_tail_ms", d->transfer_tail_ns);
    put_at(b, "first_token_at_ms", ch->t_first, t0);
    put_at(b, "last_token_at_ms", ch->t_last, t0);
    put_ms(b, "decode_ms", ch->t_last - ch->t_first);
    put_gaps(b, ch->gaps);
    put_u64(b, "n_attempts", f->n_attempts);
    bt_buf_adds(b, ",\"attempts\":[");
    for (uint32_t i = 0; i < f->n_ended; i++) {
        put_attempt(b, &f->ended[i], t0);
        bt_buf_adds(b, ",");
    }
    if (f->n_attempts > 0 && f->attempt.t_end == 0) {
        put_attempt(b, &f->attempt, t0);
    } else if (f->n_ended > 0) {
        b->len--; /* the last comma: no attempt runs */
    }
    bt_buf_adds(b, "]}");
}

/* ---- lines ---- */

static void put_request(struct bt_buf *b, const struct bt_gen *g, const struct bt_api_err *e)
{
    const struct gen_choice *first = &g->choices[0];
    struct bt_inf_usage u = bt_gen_usage(g);
    struct bt_inf_timings t = bt_gen_timings(g);

    put_time(b);
    put_text(b, "request_id", g->request_id);
    put_text(b, "traceparent", g->traceparent);
    put_text(b, "key", bt_router_key_name(g->r, g->key));
    put_text(b, "endpoint", g->endpoint);
    put_text(b, "model", g->r->model_name);
    put_status(b, e != NULL ? NULL : first->finish == 1 ? "stop" : "length", e);
    put_u64(b, "prompt_tokens", u.prompt_tokens);
    put_u64(b, "completion_tokens", u.completion_tokens);
    put_u64(b, "cached_tokens", u.cached_tokens);
    put_u64(b, "transferred_tokens", u.transferred_tokens);
    put_u64(b, "transferred_bytes", t.transferred_bytes);
    put_ms(b, "duration_ms", bt_net_loop_now(g->r->loop) - g->t_arrival);
    put_at(b, "start_at_ms", g->t_start, g->t_arrival);
    put_ms(b, "tokenize_ms", g->tokenize_ns);
    put_ms(b, "detokenize_ms", g->detokenize_ns);
    put_u64(b, "n_sequences", g->n_choices);
    bt_buf_adds(b, ",\"sequences\":[");
    for (uint32_t i = 0; i < g->n_choices && i < SEQUENCES_MAX; i++) {
        bt_buf_adds(b, i > 0 ? "," : "");
        put_sequence(b, &g->choices[i]);
    }
    bt_buf_adds(b, "]}\n");
}

static void add_line(struct bt_router *r, struct bt_buf *b)
{
    bt_request_log_add(r->request_log, b);
    bt_buf_fini(b);
}

void bt_gen_log(struct bt_gen *g, const struct bt_api_err *e)
{
    struct bt_buf b = {0};

    if (g->r->request_log == NULL) {
        return;
    }
    for (uint32_t i = 0; i < g->n_choices; i++) {
        struct gen_choice *ch = &g->choices[i];

        if (ch->seq != 0) {
            bt_gen_keep_info(ch, bt_rt_seq_info(g->r->core, ch->seq));
        }
    }
    put_request(&b, g, e);
    add_line(g->r, &b);
}

void bt_request_refused_log(struct bt_router *r, const struct bt_request_refused *q)
{
    struct bt_buf b = {0};

    if (r->request_log == NULL) {
        return;
    }
    put_time(&b);
    put_text(&b, "request_id", q->request_id);
    put_text(&b, "traceparent", q->traceparent);
    put_text(&b, "key", bt_router_key_name(r, q->key));
    put_text(&b, "endpoint", q->endpoint);
    put_text(&b, "model", r->model_name);
    put_status(&b, NULL, q->err);
    put_u64(&b, "prompt_tokens", 0);
    put_u64(&b, "completion_tokens", 0);
    put_ms(&b, "duration_ms", bt_net_loop_now(r->loop) - q->t_arrival);
    bt_buf_adds(&b, ",\"sequences\":[]}\n");
    add_line(r, &b);
}
