/* The order of the waiting and the forecast of their wait. Owns flows, what each key was served, and
 * the pace of departures; refuses to know nodes, sequences and the clock. */

#include "router/router_admission.h"

#include <stddef.h>
#include "base/assert.h"
#include "base/clock.h"
#include "base/mem.h"

#define GONE_MAX 32u /* departures that the pace remembers; then older ones count half */
#define GONE_MIN 4u  /* fewer say nothing */

enum bt_status bt_adm_init(struct bt_adm *a, uint32_t n_keys, uint32_t items_max)
{
    *a = (struct bt_adm){.n_keys = n_keys > 0 ? n_keys : 1, .cap_flows = items_max};
    a->flows = bt_calloc(items_max, sizeof *a->flows);
    a->served = bt_calloc(a->n_keys, sizeof *a->served);
    if (a->flows == NULL || a->served == NULL) {
        bt_adm_fini(a);
        return BT_ERR_NOMEM;
    }
    return BT_OK;
}

void bt_adm_fini(struct bt_adm *a)
{
    bt_free(a->flows);
    bt_free(a->served);
    *a = (struct bt_adm){0};
}

static uint64_t at_most(uint64_t x, uint64_t max)
{
    return x < max ? x : max;
}

static struct bt_adm_flow *flow_find(struct bt_adm *a, const struct bt_adm_item *it)
{
    for (uint32_t i = 0; i < a->n_flows; i++) {
        if (a->flows[i].key == it->key && a->flows[i].priority == it->priority) {
            return &a->flows[i];
        }
    }
    return NULL;
}

/* ---- the queue ---- */

void bt_adm_add(struct bt_adm *a, struct bt_adm_item *it, uint32_t tokens, uint64_t now)
{
    struct bt_adm_flow *f = flow_find(a, it);

    BT_ASSERT(it->key < a->n_keys);
    if (f == NULL) {
        BT_ASSERT(a->n_flows < a->cap_flows);
        f = &a->flows[a->n_flows++];
        *f = (struct bt_adm_flow){.priority = it->priority, .key = it->key};
    }
    if (it->order == 0) {
        it->order = ++a->n_arrived;
    }
    it->tokens = tokens;
    it->since = now;
    /* New ones belong at the end, those that come back near the front. */
    struct bt_adm_item *after = f->last;

    if (after != NULL && after->order > it->order) {
        for (after = NULL; (after != NULL ? after->next : f->first)->order < it->order;) {
            after = after != NULL ? after->next : f->first;
        }
    }
    it->prev = after;
    it->next = after != NULL ? after->next : f->first;
    *(it->prev != NULL ? &it->prev->next : &f->first) = it;
    *(it->next != NULL ? &it->next->prev : &f->last) = it;
    f->n++;
    f->tokens += tokens;
    f->tokens_short += at_most(tokens, BT_ADM_SHORT);
    if (a->n++ == 0) {
        a->t_mark = now;
    }
}

void bt_adm_remove(struct bt_adm *a, struct bt_adm_item *it)
{
    struct bt_adm_flow *f = flow_find(a, it);

    BT_ASSERT(f != NULL && f->n > 0 && a->n > 0);
    if (f->at == it) {
        f->at = it->next;
    }
    *(it->prev != NULL ? &it->prev->next : &f->first) = it->next;
    *(it->next != NULL ? &it->next->prev : &f->last) = it->prev;
    it->prev = it->next = NULL;
    f->tokens -= it->tokens;
    f->tokens_short -= at_most(it->tokens, BT_ADM_SHORT);
    if (--f->n == 0) {
        *f = a->flows[--a->n_flows];
    }
    a->n--;
}

/* ---- turns ---- */

static uint64_t turn_of(const struct bt_adm *a, uint32_t key)
{
    return a->served[key] > a->turn ? a->served[key] : a->turn;
}

void bt_adm_goes(struct bt_adm *a, const struct bt_adm_item *it, uint64_t work, uint64_t now)
{
    a->turn = turn_of(a, it->key);
    a->served[it->key] = a->turn + work;
    if (now == it->since) {
        return; /* it did not have to wait */
    }
    a->busy_ns += now - a->t_mark;
    a->t_mark = now;
    if (++a->n_gone == GONE_MAX) {
        a->n_gone /= 2;
        a->busy_ns /= 2;
    }
}

void bt_adm_charge(struct bt_adm *a, uint32_t key, uint64_t work)
{
    a->served[key] = turn_of(a, key) + work;
}

void bt_adm_pause(struct bt_adm *a, uint64_t now)
{
    a->t_mark = now;
}

void bt_adm_rewind(struct bt_adm *a)
{
    for (uint32_t i = 0; i < a->n_flows; i++) {
        a->flows[i].at = a->flows[i].first;
    }
}

static bool goes_before(const struct bt_adm *a, const struct bt_adm_flow *f,
                        const struct bt_adm_flow *g)
{
    uint64_t x = turn_of(a, f->key), y = turn_of(a, g->key);

    if (f->priority != g->priority) {
        return f->priority > g->priority;
    }
    return x != y ? x < y : f->at->order < g->at->order;
}

struct bt_adm_item *bt_adm_next(struct bt_adm *a)
{
    struct bt_adm_flow *best = NULL;

    for (uint32_t i = 0; i < a->n_flows; i++) {
        struct bt_adm_flow *f = &a->flows[i];

        if (f->at != NULL && (best == NULL || goes_before(a, f, best))) {
            best = f;
        }
    }
    if (best == NULL) {
        return NULL;
    }
    struct bt_adm_item *it = best->at;

    best->at = it->next;
    return it;
}

/* ---- forecast ---- */

/* Those that have their turn before a newcomer. Of another key with the same priority: about as much
 * as of its own. */
static void ahead_of(const struct bt_adm *a, uint32_t key, int32_t priority, uint32_t tokens,
                     uint64_t *n, uint64_t *work)
{
    bool is_short = tokens <= BT_ADM_SHORT;
    uint64_t own_n = 0, own_work = 0;

    *n = *work = 0;
    for (uint32_t i = 0; i < a->n_flows; i++) {
        const struct bt_adm_flow *f = &a->flows[i];

        if (f->key == key && f->priority == priority) {
            own_n = f->n;
            own_work = is_short ? f->tokens_short : f->tokens;
        }
    }
    for (uint32_t i = 0; i < a->n_flows; i++) {
        const struct bt_adm_flow *f = &a->flows[i];
        uint64_t f_work = is_short ? f->tokens_short : f->tokens;

        if (f->priority > priority) {
            *n += f->n;
            *work += f_work;
        } else if (f->priority == priority) {
            *n += f->key == key ? own_n : at_most(f->n, own_n + 1);
            *work += f->key == key ? own_work : at_most(f_work, own_work + tokens);
        }
    }
}

uint64_t bt_adm_ahead(const struct bt_adm *a, uint32_t key, int32_t priority, uint32_t tokens)
{
    uint64_t n, work;

    ahead_of(a, key, priority, tokens, &n, &work);
    return n;
}

uint64_t bt_adm_wait_ns(const struct bt_adm *a, uint64_t now, uint32_t key, int32_t priority,
                        uint32_t tokens, const struct bt_adm_nodes *nodes)
{
    uint64_t n, work, wait = nodes->least_ns;

    ahead_of(a, key, priority, tokens, &n, &work);
    if (work > 0 && nodes->tokens_per_s > 0) {
        double ns = (nodes->tokens + (double)work) / nodes->tokens_per_s * 1e9;

        wait = ns > (double)wait ? (uint64_t)ns : wait;
    }
    /* Prompts are not all that one waits for: so many steps at the pace of late. */
    uint64_t steps = n + (nodes->full ? 1 : 0);
    uint64_t busy = a->busy_ns + (a->n > 0 ? now - a->t_mark : 0);
    uint64_t pace = a->n_gone >= GONE_MIN ? busy / a->n_gone * steps : steps > 0 ? busy : 0;

    pace = nodes->decode_ns > pace ? nodes->decode_ns : pace;
    return pace > wait ? pace : wait;
}
