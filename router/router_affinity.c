/* Which nodes have which beginnings of prompts in their prefix caches, so that a prompt goes where its
 * prefix is. Nodes tell what came and went with their load reports; until the next one, a node that was
 * given a prompt is taken to have it soon. A table of fixed size; what was not used for the longest in
 * its set makes room. The key of an entry holds the node's session, so what a lost one had is never
 * found again, nor what was told before a reset, nor one kind of model's blocks at nodes of another.
 * It refuses to know loads; a wrong guess costs time only. */

#include "base/assert.h"
#include "base/hash.h"
#include "base/mem.h"
#include "router/router_core_int.h"
#include "sched/prefix_hash.h"

/* 262,144 blocks of 64 tokens or more, over all nodes, in 6 MiB. */
#define SETS 65536u /* power of two */
#define WAYS 4u
/* A node that tells of its cache is believed to have what it was given for so long, if it does not
 * tell that it does. */
#define GUESS_NS (UINT64_C(30) * 1000000000)

struct entry {
    uint64_t key; /* 0: free */
    uint64_t used;
    uint64_t until; /* UINT64_MAX: the node says so, or never tells */
};

struct rt_affinity {
    uint64_t clock;
    struct entry sets[SETS][WAYS];
};

struct rt_affinity *bt_rt_affinity_create(void)
{
    return bt_calloc(1, sizeof(struct rt_affinity));
}

void bt_rt_affinity_destroy(struct rt_affinity *a)
{
    bt_free(a);
}

/* ---- prompts ---- */

static uint32_t block_tokens_of(const struct rt_node *n)
{
    return bt_prefix_block_tokens(n->hello.page_tokens != 0 ? n->hello.page_tokens : 1);
}

void bt_rt_affinity_prepare(struct bt_rt_core *c, struct rt_seq *s)
{
    uint64_t ident = s->ident != 0 ? s->ident : c->served;
    const struct rt_node *n = NULL;

    for (uint32_t i = 0; i < c->n_slots && n == NULL; i++) {
        n = c->nodes[i].session != 0 && c->nodes[i].ident == ident ? &c->nodes[i] : NULL;
    }
    if (n == NULL || s->block_tokens == block_tokens_of(n)) {
        return;
    }
    uint32_t size = block_tokens_of(n), count = s->n_prompt / size;
    uint64_t at = 0;

    s->n_chain = 0;
    s->block_tokens = size;
    count = count < RT_CHAIN_MAX ? count : RT_CHAIN_MAX;
    if (s->chain == NULL && count > 0) {
        s->chain = bt_slab_get(&c->chains);
        BT_ASSERT(s->chain != NULL);
    }
    for (uint32_t i = 0; i < count; i++) {
        s->chain[i] = at = bt_prefix_block_hash(at, s->tokens + (size_t)i * size, size);
        s->n_chain++;
    }
}

/* ---- the table ---- */

static uint64_t key_of(const struct rt_node *n, uint64_t block)
{
    uint64_t key = bt_hash64(&block, sizeof block, n->cache_key);

    return key != 0 ? key : 1;
}

/* Its entry, or the one to take for it. */
static struct entry *entry_of(struct rt_affinity *a, uint64_t key)
{
    struct entry *set = a->sets[key & (SETS - 1)];
    struct entry *best = &set[0];

    for (uint32_t i = 0; i < WAYS; i++) {
        if (set[i].key == key) {
            return &set[i];
        }
        best = set[i].used < best->used ? &set[i] : best;
    }
    return best;
}

static void put(struct rt_affinity *a, const struct rt_node *n, uint64_t block, uint64_t until)
{
    uint64_t key = key_of(n, block);
    struct entry *e = entry_of(a, key);

    if (e->key == key && e->until > until) {
        until = e->until;
    }
    *e = (struct entry){key, ++a->clock, until};
}

/* ---- what nodes tell ---- */

void bt_rt_affinity_new_node(struct bt_rt_core *c, struct rt_node *n)
{
    n->cache_key = bt_hash64(&n->hello.instance, sizeof n->hello.instance, ++c->n_cache_keys);
}

void bt_rt_affinity_told(struct bt_rt_core *c, struct rt_node *n,
                         const struct bt_msg_prefix_blocks *b)
{
    if (!b->told) {
        return;
    }
    n->caches = n->tells_cache = true;
    if (b->reset) {
        bt_rt_affinity_new_node(c, n);
    }
    for (size_t i = 0; i < b->n_removed; i++) {
        uint64_t key = key_of(n, b->removed[i]);
        struct entry *e = entry_of(c->affinity, key);

        if (e->key == key) {
            *e = (struct entry){0};
        }
    }
    for (size_t i = 0; i < b->n_added; i++) {
        put(c->affinity, n, b->added[i], UINT64_MAX);
    }
}

/* ---- what they will have ---- */

static uint64_t until(const struct rt_node *n, uint64_t now)
{
    return n->tells_cache ? now + GUESS_NS : UINT64_MAX;
}

void bt_rt_affinity_note(struct rt_affinity *a, uint64_t now, const struct rt_node *n,
                         const struct rt_seq *s)
{
    for (uint32_t i = s->n_chain; i > 0; i--) { /* the first is used last: it goes last */
        put(a, n, s->chain[i - 1], until(n, now));
    }
}

void bt_rt_affinity_note_more(struct rt_affinity *a, uint64_t now, const struct rt_node *n,
                              const struct rt_seq *s)
{
    uint64_t at = s->n_chain > 0 ? s->chain[s->n_chain - 1] : 0;
    uint32_t size = s->block_tokens;

    for (uint32_t i = s->n_chain; size > 0 && i < s->n_tokens / size && i < RT_CHAIN_MAX; i++) {
        at = bt_prefix_block_hash(at, s->tokens + (size_t)i * size, size);
        put(a, n, at, until(n, now));
    }
}

uint32_t bt_rt_affinity_tokens(struct rt_affinity *a, uint64_t now, const struct rt_node *n,
                               const struct rt_seq *s)
{
    uint32_t i = 0;

    while (i < s->n_chain) {
        uint64_t key = key_of(n, s->chain[i]);
        const struct entry *e = entry_of(a, key);

        if (e->key != key || e->until < now) {
            break;
        }
        i++;
    }
    return i * s->block_tokens;
}
