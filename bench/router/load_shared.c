/* The answer and the way of its tokens. Knows no socket. */

#include "bench/router/load_shared.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/mem.h"
#include "router/router_model.h"

static const char sample[] = "The relay runs as a team: one reads the question, another writes the "
                             "answer, and what the first has learned is "
                             "handed over while it still reads. A word takes a few milliseconds, "
                             "an answer a few seconds, and whoever waits sees "
                             "the words come one by one, like the ticking of a clock that never "
                             "skips a beat. Nothing is lost on the way, and "
                             "nothing arrives twice";

void bench_shared_init(struct bench_shared *b, const char *model, uint32_t n_streams,
                       uint32_t max_tokens)
{
    struct bt_router_model m;
    struct bt_ids ids = {0};
    struct bt_err err = {0};

    *b = (struct bench_shared){
        .n_streams = n_streams, .max_tokens = max_tokens, .prompt_tokens = 32};
    if (bt_router_model_load(model, &m, &err) != BT_OK ||
        bt_tokenizer_encode(m.tok, sample, sizeof sample - 1, 0, &ids, &err) != BT_OK) {
        fprintf(stderr, "bench-router: %s\n", err.msg);
        exit(1);
    }
    b->vocab = bt_tokenizer_vocab_size(m.tok);
    for (uint32_t i = 0; i < BENCH_TEXT_TOKENS; i++) {
        size_t n = 0;
        const char *s;

        /* The first word of a text may look different in its middle. */
        b->ids[i] = ids.v[1 + i % (ids.len - 1)];
        s = bt_tokenizer_token_text(m.tok, b->ids[i], &n);
        if (n == 0 || n >= sizeof b->texts[i] || memchr(s, '"', n) != NULL ||
            memchr(s, '\\', n) != NULL) {
            fprintf(stderr, "bench-router: this vocabulary does not fit the sample text\n");
            exit(1);
        }
        memcpy(b->texts[i], s, n);
        b->lens[i] = (uint32_t)n;
    }
    bt_ids_fini(&ids);
    bt_router_model_fini(&m);
    b->sent = bt_calloc((size_t)n_streams * max_tokens, sizeof *b->sent);
    if (b->sent == NULL) {
        fprintf(stderr, "bench-router: out of memory\n");
        exit(1);
    }
}

void bench_shared_fini(struct bench_shared *b)
{
    bt_free(b->sent);
}

size_t bench_body(const struct bench_shared *b, uint32_t slot, char *out, size_t cap)
{
    int n = snprintf(
        out, cap,
        "{\"model\":\"m\",%s,\"max_tokens\":%u,\"seed\":%u,\"stream\":true,\"temperature\":0,"
        "\"ignore_eos\":true}",
        b->chat
            ? "\"messages\":[{\"role\":\"user\",\"content\":\"Tell me how a relay runs, in some "
              "detail, and what becomes of the baton.\"}]"
            : "\"prompt\":\"Tell me how a relay runs, in some detail, and what becomes of the "
              "baton.\"",
        b->max_tokens, slot);

    return n > 0 && (size_t)n < cap ? (size_t)n : 0;
}

void bench_received(struct bench_shared *b, struct bench_reader *r, size_t n, uint64_t now)
{
    uint64_t seen = 0;

    r->bytes += (uint32_t)n;
    while (r->index < b->max_tokens && r->bytes >= b->lens[r->index % BENCH_TEXT_TOKENS]) {
        uint64_t sent = atomic_load_explicit(&b->sent[(size_t)r->slot * b->max_tokens + r->index],
                                             memory_order_relaxed);

        r->bytes -= b->lens[r->index % BENCH_TEXT_TOKENS];
        if (r->index == 0 && atomic_load_explicit(&b->measuring, memory_order_relaxed)) {
            bt_token_gaps_add(&b->first, now - r->t_ask, 1);
            b->n_within += now - r->t_ask <= b->limit_ns;
            b->n_nearly += now - r->t_ask <= b->limit_ns + b->limit_ns / 10;
        }
        /* The first token is sent by both legs: it tells nothing. */
        if (r->index > 0 && sent != 0 && now > sent &&
            atomic_load_explicit(&b->measuring, memory_order_relaxed)) {
            bt_token_gaps_add(&b->way, now - sent, 1);
        }
        r->index++;
        seen++;
    }
    atomic_fetch_add_explicit(&b->n_tokens, seen, memory_order_relaxed);
    atomic_fetch_add_explicit(&b->n_events, 1, memory_order_relaxed);
}
