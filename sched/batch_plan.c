/* What the next step computes: one token for each decoding sequence, then prompt chunks under the
 * token budget. The rules stand in batch.h. Deterministic: it depends on nothing but the calls made
 * before. */

#include "sched/batch_int.h"

#include <limits.h>

#include "base/assert.h"

/* The newest sequence that decodes or is ready to; there is one. */
static uint32_t newest_growing(const struct bt_batch *b)
{
    for (uint32_t i = b->n_order; i-- > 0;) {
        enum bt_batch_state st = b->seqs[b->order[i]].state;

        if (st == BT_BATCH_DECODE || st == BT_BATCH_READY) {
            return b->order[i];
        }
    }
    BT_ASSERT(false);
    return BT_BATCH_NO_SLOT;
}

/* Leases what the next token of a decoding sequence needs, preempting the newest; false: that was
 * itself. */
static bool grow(struct bt_batch *b, uint32_t slot)
{
    struct bt_batch_seq *s = &b->seqs[slot];

    while (!bt_batch_lease_to(b, s, bt_batch_pages_for(b, s->n_tokens), 0)) {
        uint32_t victim = s->n_tokens > bt_batch_capacity(b) ? slot : newest_growing(b);

        b->preempted[b->n_preempted++] = b->seqs[victim].id;
        bt_batch_forget(b, victim);
        if (victim == slot) {
            return false;
        }
    }
    return true;
}

static void plan_decode(struct bt_batch *b)
{
    uint32_t n_decode = 0;

    for (uint32_t i = 0; i < b->n_order; i++) {
        n_decode += b->seqs[b->order[i]].state == BT_BATCH_DECODE;
    }
    for (uint32_t i = 0; i < b->n_order && n_decode < b->opts.max_batch; i++) {
        struct bt_batch_seq *s = &b->seqs[b->order[i]];

        if (s->state == BT_BATCH_READY && !s->cancelled) {
            bt_batch_move(s, BT_BATCH_DECODE);
            n_decode++;
        }
    }
    /* Oldest first: a victim is never older, so nothing that was planned is taken back. */
    for (uint32_t i = 0; i < b->n_order;) {
        uint32_t slot = b->order[i];
        struct bt_batch_seq *s = &b->seqs[slot];

        if (s->state != BT_BATCH_DECODE || s->cancelled) {
            i++;
        } else if (grow(b, slot)) {
            b->spans[b->n_spans++] = (struct bt_batch_span){
                .slot = slot, .pos = s->n_tokens - 1, .n = 1, .decode = true, .last = true};
            b->planned[slot] = b->n_spans;
            i++;
        }
    }
}

/* What is left of a step for prompts, and what stands in their way. */
struct room {
    uint32_t tokens, rows;
    uint32_t spare;    /* pages that starting a prompt must leave for the growing sequences */
    uint32_t head;     /* the oldest prompt */
    bool head_blocked; /* it waits for pages */
    bool pages_out;    /* a waiting prompt did not get its pages: none starts after it */
};

static bool is_prompt(const struct bt_batch_seq *s)
{
    return (s->state == BT_BATCH_WAITING || s->state == BT_BATCH_PREFILL) && !s->cancelled;
}

static uint32_t tokens_left(const struct bt_batch *b, uint32_t slot)
{
    const struct bt_batch_seq *s = &b->seqs[slot];
    uint32_t planned = b->planned[slot] != 0 ? b->spans[b->planned[slot] - 1].n : 0;

    return s->n_tokens - (s->state == BT_BATCH_WAITING ? s->n_likely : s->n_done) - planned;
}

/* Gives a started prompt more tokens of this step: up to max_tokens, needing up to max_rows logits
 * rows. */
static void give(struct bt_batch *b, uint32_t slot, uint32_t max_tokens, uint32_t max_rows,
                 struct room *room)
{
    struct bt_batch_seq *s = &b->seqs[slot];
    uint32_t left = tokens_left(b, slot);
    uint32_t n = left < max_tokens ? left : max_tokens;

    if (s->all_rows) {
        n = n < max_rows ? n : max_rows;
    } else if (n > 0 && n == left && max_rows == 0) {
        n--; /* no row for its logits: its end waits for the next step */
    }
    if (n == 0) {
        return;
    }
    if (b->planned[slot] == 0) {
        b->spans[b->n_spans++] = (struct bt_batch_span){.slot = slot, .pos = s->n_done};
        b->planned[slot] = b->n_spans;
    }
    struct bt_batch_span *span = &b->spans[b->planned[slot] - 1];

    span->n += n;
    span->last = n == left;
    room->tokens -= n;
    room->rows -= s->all_rows ? n : span->last;
}

/* A waiting prompt starts if its pages can be leased. */
static bool admit(struct bt_batch *b, uint32_t slot, uint32_t spare)
{
    struct bt_batch_seq *s = &b->seqs[slot];
    uint32_t n_tokens = s->n_tokens + (!s->hold && s->n_tokens < s->n_tokens_max);

    if (s->state == BT_BATCH_PREFILL) {
        return true;
    }
    if (!s->all_rows) {
        bt_batch_cache_take(b, s, s->n_tokens - 1);
    }
    if (!bt_batch_lease_to(b, s, bt_batch_pages_for(b, n_tokens), spare)) {
        bt_batch_cache_untake(b, s);
        return false;
    }
    s->n_done = bt_batch_n_cached(b, s);
    bt_batch_move(s, BT_BATCH_PREFILL);
    b->started[b->n_started++] = slot;
    return true;
}

/* Among the prompts without a share so far and below that rank, the oldest of the lowest rank. */
static uint32_t next_prompt(const struct bt_batch *b, const struct room *room, unsigned below)
{
    bool may_start =
        !room->pages_out && (!room->head_blocked || b->n_overtakes < BATCH_OVERTAKE_MAX);
    uint32_t best = BT_BATCH_NO_SLOT;

    for (uint32_t i = 0; i < b->n_order; i++) {
        uint32_t slot = b->order[i];
        const struct bt_batch_seq *s = &b->seqs[slot];

        if (slot == room->head || !is_prompt(s) || b->planned[slot] != 0 ||
            (s->state == BT_BATCH_WAITING && !may_start)) {
            continue;
        }
        unsigned rank = bt_batch_rank(tokens_left(b, slot));

        if (rank < below) {
            below = rank;
            best = slot;
        }
    }
    return best;
}

/* Shares what is left among the prompts below that rank, but for the oldest prompt. What is being
 * computed for another one is not computed twice. */
static void plan_below(struct bt_batch *b, struct room *room, unsigned below)
{
    while (room->tokens > 0 && room->rows > 0) {
        uint32_t slot = next_prompt(b, room, below);

        if (slot == BT_BATCH_NO_SLOT) {
            return;
        }
        bool waiting = b->seqs[slot].state == BT_BATCH_WAITING;

        if (waiting && bt_batch_cache_soon(b, &b->seqs[slot])) {
            b->planned[slot] = BATCH_WAITS;
            continue;
        }
        if (!admit(b, slot, room->spare)) {
            room->pages_out = true;
            continue;
        }
        b->n_overtakes += waiting && room->head_blocked;
        give(b, slot, room->tokens, room->rows, room);
    }
}

static void plan_prompts(struct bt_batch *b)
{
    struct room room = {.tokens = b->opts.chunk_tokens,
                        .rows = b->opts.prefill_rows,
                        .spare = bt_batch_n_growing(b),
                        .head = BT_BATCH_NO_SLOT};

    for (uint32_t i = 0; i < b->n_order && room.head == BT_BATCH_NO_SLOT; i++) {
        if (is_prompt(&b->seqs[b->order[i]])) {
            room.head = b->order[i];
        }
    }
    if (room.head == BT_BATCH_NO_SLOT) {
        return;
    }
    if (b->head_id != b->seqs[room.head].id) {
        b->head_id = b->seqs[room.head].id;
        b->n_overtakes = 0;
    }
    unsigned rank = bt_batch_rank(tokens_left(b, room.head));

    room.head_blocked = !admit(b, room.head, room.spare);
    if (!room.head_blocked) {
        give(b, room.head, (room.tokens + 1) / 2, (room.rows + 1) / 2, &room);
    }
    plan_below(b, &room, rank);
    if (!room.head_blocked) {
        give(b, room.head, room.tokens, room.rows, &room);
    }
    plan_below(b, &room, UINT_MAX);
    b->pages_short = room.head_blocked || room.pages_out;
}

void bt_batch_plan(struct bt_batch *b, struct bt_batch_plan *plan)
{
    BT_ASSERT(!b->in_step);
    b->n_spans = 0;
    b->n_started = 0;
    b->n_preempted = 0;
    b->pages_short = false;
    for (uint32_t i = 0; i < b->opts.max_seqs; i++) {
        b->planned[i] = 0;
    }
    plan_decode(b);
    uint32_t n_decode = b->n_spans;

    plan_prompts(b);
    *plan = (struct bt_batch_plan){.n_spans = b->n_spans,
                                   .spans = b->spans,
                                   .n_started = b->n_started,
                                   .started = b->started,
                                   .n_preempted = b->n_preempted,
                                   .preempted = b->preempted};
    for (uint32_t i = 0; i < b->n_spans; i++) {
        plan->n_tokens += b->spans[i].n;
    }
    plan->n_prefill_tokens = plan->n_tokens - n_decode;
    b->in_step = b->n_spans > 0;
}

void bt_batch_commit(struct bt_batch *b)
{
    BT_ASSERT(b->in_step);
    b->in_step = false;
    for (uint32_t i = 0; i < b->n_spans; i++) {
        struct bt_batch_seq *s = &b->seqs[b->spans[i].slot];

        s->n_done = b->spans[i].pos + b->spans[i].n;
        bt_batch_cache_enter(b, s);
        bt_batch_leave_window(b, s);
    }
}

void bt_batch_abandon(struct bt_batch *b)
{
    BT_ASSERT(b->in_step);
    b->in_step = false;
}

void bt_batch_sampled(struct bt_batch *b, uint32_t slot, bool finished)
{
    struct bt_batch_seq *s = &b->seqs[slot];

    BT_ASSERT(!b->in_step && s->n_done == s->n_tokens);
    if (finished) {
        bt_batch_move(s, BT_BATCH_FINISHED);
    } else if (s->hold) {
        bt_batch_move(s, BT_BATCH_HELD);
    } else {
        s->n_tokens++;
        if (s->state == BT_BATCH_PREFILL) {
            bt_batch_move(s, BT_BATCH_READY);
        } else {
            BT_ASSERT(s->state == BT_BATCH_DECODE);
        }
    }
}
