#ifndef BT_SCHED_BATCH_H
#define BT_SCHED_BATCH_H

/* The batch scheduler: which sequences compute what in the next step, and which pages they hold. A
 * pure state machine: no compute, clock or I/O; all memory is allocated at create (page tables for
 * max_seqs sequences of tokens_max tokens are reserved, and take memory as they are used). One thread.
 *
 * A step: bt_batch_plan → (forward pass) → bt_batch_commit, bt_batch_sampled for every span with a
 * sampled token; or bt_batch_abandon when the pass was given up. Between plan and commit nothing
 * else may be called but bt_batch_cancel and the read-only calls.
 *
 * Rules:
 *  - Every running sequence decodes one token in every step, at most max_batch of them; more wait
 *    in READY, oldest first.
 *  - A prompt starts computing only when the pages of all its tokens (and of one more, unless it is
 *    held afterwards) can be leased, with one page left over for each decoding sequence. So a
 *    started prompt always completes.
 *  - The oldest prompt gets at least half of chunk_tokens in every step. The rest goes to much
 *    shorter ones (tokens left, rounded down to a power of two, are fewer), then to the oldest, then
 *    to the others: the shortest first, and of about the same length the oldest. While the oldest
 *    prompt waits for pages, at most BATCH_OVERTAKE_MAX younger ones may start before it.
 *  - A decoding sequence leases a page at a page boundary. None left: the newest sequence that
 *    decodes (or is READY) is preempted (one that outgrows the whole pool: itself): forgotten, its
 *    pages freed. Prompts, held and landing sequences never are.
 *  - In a group with a window, pages that no later token can see are freed after each step.
 *  - Prefix cache: a full page is entered in an index as soon as its KV is stored; a prompt that
 * starts, or lands, takes the pages that hold its first tokens by reference, of a group with a window
 * only those that will be seen. They are never written. Where a cached page goes on with all of the
 * next tokens that are wanted, or at least a quarter of a page, these are copied into the
 * sequence's own page (copy_from). At least one token of a
 * prompt is always computed, because its logits are needed. A prompt other than the oldest does not
 * start in a step that computes the next page that it could take, for another prompt. Indexed pages
 * without a holder are cached: they count as room, and the one unused for the longest is given up
 * first, a page always after those behind it.
 *  - A cancelled sequence keeps its pages and takes no part in any step; remove it. */

#include <stdbool.h>
#include <stdint.h>
#include "base/status.h"
#include "sched/pages.h"
#include "sched/prefix_index.h"

#define BT_BATCH_GROUPS_MAX 4
#define BT_BATCH_NO_PAGE    UINT32_MAX /* a table entry that holds no page */
#define BT_BATCH_NO_SLOT    UINT32_MAX
#define BATCH_OVERTAKE_MAX  16

struct bt_batch;

/* The class of a prompt with so many tokens left: their binary digits. Prompts of one class take turns by age, lower
 * classes go first. */
static inline unsigned bt_batch_rank(uint32_t tokens_left)
{
    unsigned digits = 0;

    for (; tokens_left > 0; tokens_left >>= 1) {
        digits++;
    }
    return digits;
}

struct bt_batch_opts {
    uint32_t page_tokens, chunk_tokens, max_batch, max_seqs; /* all >= 1 */
    uint32_t tokens_max;   /* the most tokens whose KV one sequence may store, >= 1 */
    uint32_t prefill_rows; /* logits rows that prompts may ask for in one step, >= 1 */
    uint32_t n_groups;
    bool prefix_cache; /* keep full pages for later prompts, where possible */
    struct {
        uint32_t window; /* tokens visible, the token itself included; 0: all */
        uint32_t n_pages;
    } groups[BT_BATCH_GROUPS_MAX];
};

enum bt_batch_state {
    BT_BATCH_FREE,
    BT_BATCH_WAITING,     /* a prompt without pages */
    BT_BATCH_PREFILL,     /* all pages leased, partly computed */
    BT_BATCH_HELD,        /* prompt computed, pages kept for someone else */
    BT_BATCH_LANDING,     /* pages leased, written from outside */
    BT_BATCH_QUARANTINED, /* was landing; a receive may still be in flight */
    BT_BATCH_READY,       /* waits for room among the decoding ones */
    BT_BATCH_DECODE,
    BT_BATCH_FINISHED,
    BT_BATCH_STATES,
};

/* A sequence as the scheduler sees it; read-only for others. */
struct bt_batch_seq {
    uint64_t id; /* generation << 32 | slot; the holder of its pages */
    enum bt_batch_state state;
    bool hold, all_rows, cancelled;
    uint32_t n_tokens, n_tokens_max;          /* known tokens; the most whose KV it may store */
    uint32_t n_done;                          /* tokens whose KV is stored */
    uint32_t n_paged;                         /* absolute pages below n_paged have been leased */
    uint32_t first_page[BT_BATCH_GROUPS_MAX]; /* absolute pages below were freed, or never wanted */
    uint32_t *pages[BT_BATCH_GROUPS_MAX];     /* page id by absolute page; BT_BATCH_NO_PAGE outside
                                                 [first_page, n_paged) */
    uint32_t table_len;
    const uint32_t *tokens; /* ids of the known tokens; NULL: takes no part in the prefix cache */
    uint32_t n_shared;      /* absolute pages below were found in the cache */
    uint32_t n_copied;      /* first tokens of page n_shared that were found in other pages: */
    uint32_t copy_from[BT_BATCH_GROUPS_MAX]; /* page ids, to be copied before anything else happens
                                                to any page, in the order of plan.started */
    uint32_t n_entered; /* absolute pages below are in the index, or others of the same tokens */
    struct bt_prefix_pos at; /* in the index, behind page n_entered - 1 */
    uint64_t hash;           /* of the last whole block there (sched/prefix_hash.h) */
    uint32_t n_likely;       /* tokens that were in the cache at submit */
};

struct bt_batch_new {
    uint32_t n_tokens;     /* >= 1 */
    uint32_t n_tokens_max; /* tokens whose KV it may ever store, n_tokens .. opts.tokens_max */
    bool hold;             /* stop after the prompt, keep the pages */
    bool all_rows; /* every prompt token needs a logits row: nothing is taken from the cache */
    const uint32_t *tokens; /* ids of the tokens, more follow behind as they become known; borrowed
                               until the sequence is gone; NULL: no cache */
};

struct bt_batch_span {
    uint32_t slot, pos, n;
    bool decode;
    bool last; /* covers the sequence's last known token: its logits row gives the next one */
};

/* Valid until the next plan. n_spans 0: nothing to compute, no commit. */
struct bt_batch_plan {
    uint32_t n_spans, n_tokens, n_prefill_tokens;
    const struct bt_batch_span *spans;
    uint32_t n_started;      /* sequences whose first chunk is in this plan */
    const uint32_t *started; /* slots */
    uint32_t n_preempted;
    const uint64_t *preempted; /* ids, already forgotten */
};

struct bt_batch_load {
    uint32_t n_waiting, n_running, n_held,
        n_landing;           /* prefilling, ready and decoding ones run; finished ones are held */
    uint64_t waiting_tokens; /* prompt tokens still to be computed */
    bool pages_short;        /* in the last plan a prompt did not get its pages */
};

/* BT_ERR_NOMEM. Option values outside their ranges are bugs. */
enum bt_status bt_batch_create(const struct bt_batch_opts *opts,
                               struct bt_batch **out) BT_NODISCARD;
void bt_batch_destroy(struct bt_batch *b);

/* Tokens of a sequence that were in the prefix cache when it started or landed. */
uint32_t bt_batch_n_cached(const struct bt_batch *b, const struct bt_batch_seq *s);
/* Blocks that came into the prefix cache or left it since the last call, see
 * bt_prefix_index_changes(); none without a cache. */
const struct bt_prefix_change *bt_batch_cache_changes(struct bt_batch *b, uint32_t *n);
/* Tokens whose KV an empty pool holds. */
uint32_t bt_batch_capacity(const struct bt_batch *b);

/* n->n_tokens (and one more, unless held) <= bt_batch_capacity(), else bug. BT_ERR_BUSY: no slot
 * (or, land, no pages now). */
enum bt_status bt_batch_submit(struct bt_batch *b, const struct bt_batch_new *n,
                               uint32_t *slot) BT_NODISCARD;
/* n->hold, n->all_rows: not looked at. Pages below n_shared hold the right KV already, and with
 * n_copied the one behind them will: all that are wanted. */
enum bt_status bt_batch_land(struct bt_batch *b, const struct bt_batch_new *n,
                             uint32_t *slot) BT_NODISCARD;
/* The landed pages are full and one more token is known: LANDING → READY. */
void bt_batch_start(struct bt_batch *b, uint32_t slot);
void bt_batch_quarantine(struct bt_batch *b, uint32_t slot); /* LANDING only */
void bt_batch_cancel(struct bt_batch *b, uint32_t slot);
void bt_batch_remove(struct bt_batch *b, uint32_t slot);

void bt_batch_plan(struct bt_batch *b, struct bt_batch_plan *plan);
void bt_batch_commit(struct bt_batch *b);
void bt_batch_abandon(struct bt_batch *b);
/* After commit: the token after the sequence's last known one was sampled (its id stands in the
 * token list); finished: it ends the sequence. */
void bt_batch_sampled(struct bt_batch *b, uint32_t slot, bool finished);

/* First absolute page that a token at position pos (and so any later one) sees in the group. */
uint32_t bt_batch_first_visible(const struct bt_batch *b, uint32_t group, uint32_t pos);
/* The slot of an id, or BT_BATCH_NO_SLOT if it is stale or was never given. */
uint32_t bt_batch_find(const struct bt_batch *b, uint64_t id);
const struct bt_batch_seq *bt_batch_seq(const struct bt_batch *b, uint32_t slot);
const struct bt_pages *bt_batch_pages(const struct bt_batch *b, uint32_t group);
struct bt_batch_load bt_batch_load(const struct bt_batch *b);

#endif
