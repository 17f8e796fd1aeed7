/* Which nodes were given which beginnings of prompts, so that a prompt goes where its prefix is
 * likely cached. A table of fixed size; what was not used for the longest in its set makes room.
 * Instances are part of the key: what a lost one had is never found again. It refuses to know loads
 * and what a node really keeps: a wrong guess costs time only. */

#include "base/hash.h"
#include "base/mem.h"
#include "router/router_core_int.h"

#define SETS         16384u /* power of two */
#define WAYS         4u
#define BLOCK_TOKENS 64u   /* shorter beginnings are not worth a detour */
#define BLOCKS_MAX   4096u /* of one prompt */

struct entry {
    uint64_t key; /* 0: free */
    uint64_t used;
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

static uint64_t next_block(uint64_t chain, const uint32_t *tokens)
{
    return bt_hash64(tokens, BLOCK_TOKENS * sizeof *tokens, chain);
}

bool bt_rt_affinity_chain(const uint32_t *tokens, uint32_t n_tokens, uint64_t **chain, uint32_t *n)
{
    uint32_t n_blocks = n_tokens / BLOCK_TOKENS < BLOCKS_MAX ? n_tokens / BLOCK_TOKENS : BLOCKS_MAX;
    uint64_t at = 0;

    *n = 0;
    *chain = NULL;
    if (n_blocks == 0) {
        return true;
    }
    *chain = bt_alloc(n_blocks * sizeof **chain);
    if (*chain == NULL) {
        return false;
    }
    for (; *n < n_blocks; (*n)++) {
        (*chain)[*n] = at = next_block(at, tokens + (size_t)*n * BLOCK_TOKENS);
    }
    return true;
}

static uint64_t key_of(uint64_t chain, uint64_t instance)
{
    uint64_t key = bt_hash64(&chain, sizeof chain, instance);

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

static void note(struct rt_affinity *a, uint64_t chain, uint64_t instance)
{
    uint64_t key = key_of(chain, instance);

    *entry_of(a, key) = (struct entry){key, ++a->clock};
}

void bt_rt_affinity_note(struct rt_affinity *a, uint64_t instance, const uint64_t *chain,
                         uint32_t n)
{
    for (uint32_t i = n; i > 0; i--) { /* the first is used last: it goes last */
        note(a, chain[i - 1], instance);
    }
}

void bt_rt_affinity_note_more(struct rt_affinity *a, uint64_t instance, const struct rt_seq *s)
{
    uint64_t at = s->n_chain > 0 ? s->chain[s->n_chain - 1] : 0;

    for (uint32_t i = s->n_chain; i < s->n_tokens / BLOCK_TOKENS && i < BLOCKS_MAX; i++) {
        at = next_block(at, s->tokens + (size_t)i * BLOCK_TOKENS);
        note(a, at, instance);
    }
}

uint32_t bt_rt_affinity_tokens(struct rt_affinity *a, uint64_t instance, const uint64_t *chain,
                               uint32_t n)
{
    uint32_t i = 0;

    while (i < n) {
        uint64_t key = key_of(chain[i], instance);

        if (entry_of(a, key)->key != key) {
            break;
        }
        i++;
    }
    return i * BLOCK_TOKENS;
}
