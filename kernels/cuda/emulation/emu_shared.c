/* The watch over a block's shared memory: who reads and writes what between two barriers, and copies into it that go on
 * while their thread does other things. A copy is made when its thread waits for it; until then the place is nobody's. */

#include "kernels/cuda/emulation/emu_fibers_int.h"

#include <string.h>

static struct emu_granule *granules_of(const void *p, size_t bytes, size_t *n)
{
    size_t at = (size_t)((const unsigned char *)p - emu_now->shared);

    if ((const unsigned char *)p < emu_now->shared || at + bytes > emu_now->launch->shared_bytes) {
        emu_broken(emu_now->running, "touches shared memory that the launch did not ask for");
    }
    if (at % bytes != 0) {
        emu_broken(emu_now->running,
                   "touches shared memory at an address that its type may not have");
    }
    *n = bytes / EMU_GRANULE;
    return emu_now->granules + at / EMU_GRANULE;
}

static void check_still(const struct emu_granule *g)
{
    if (g->copier != 0) {
        emu_broken(emu_now->running, "touches shared memory that a copy in flight writes");
    }
}

/* Whether the running thread's warp has met since `syncs` of that warp. */
static bool met_since(uint32_t warp, uint64_t syncs)
{
    return warp == emu_now->running / EMU_WARP && emu_now->warps[warp].syncs != syncs;
}

static bool writes_meet(const struct emu_granule *g)
{
    return g->written == emu_now->phase && g->writer != emu_now->running &&
           !met_since(g->writer / EMU_WARP, g->written_syncs);
}

static bool reads_meet(const struct emu_granule *g)
{
    return g->read == emu_now->phase && g->reader != emu_now->running &&
           !met_since(g->read_warp, g->read_syncs);
}

static void note_read(struct emu_granule *g)
{
    uint32_t warp = emu_now->running / EMU_WARP;

    if (reads_meet(g)) {
        g->read_warp = g->read_warp == warp ? warp : EMU_SEVERAL;
        g->reader = EMU_SEVERAL;
    } else if (g->read != emu_now->phase || g->reader != EMU_SEVERAL || g->read_warp == warp) {
        g->read_warp = warp;
        g->reader = emu_now->running;
    }
    g->read = emu_now->phase;
    g->read_syncs = emu_now->warps[warp].syncs;
}

void emu_shared_read(const void *p, size_t bytes)
{
    size_t n;
    struct emu_granule *g = granules_of(p, bytes, &n);

    for (size_t i = 0; i < n; i++) {
        check_still(&g[i]);
        if (g[i].written < emu_now->block_phase) {
            emu_broken(emu_now->running, "reads shared memory that no thread has written");
        }
        if (writes_meet(&g[i])) {
            emu_broken(emu_now->running,
                       "reads what another thread writes before the next barrier");
        }
        note_read(&g[i]);
    }
}

void emu_shared_write(const void *p, size_t bytes)
{
    size_t n;
    struct emu_granule *g = granules_of(p, bytes, &n);

    for (size_t i = 0; i < n; i++) {
        check_still(&g[i]);
        if (writes_meet(&g[i])) {
            emu_broken(emu_now->running,
                       "writes what another thread writes before the next barrier");
        }
        if (reads_meet(&g[i])) {
            emu_broken(emu_now->running,
                       "writes what another thread reads before the next barrier");
        }
        g[i].writer = emu_now->running;
        g[i].written = emu_now->phase;
        g[i].written_syncs = emu_now->warps[emu_now->running / EMU_WARP].syncs;
    }
}

void emu_shared_add(uint32_t *p, uint32_t v)
{
    size_t n;
    struct emu_granule *g = granules_of(p, sizeof(*p), &n);

    check_still(g);
    if (g->written < emu_now->block_phase) {
        emu_broken(emu_now->running, "adds to shared memory that no thread has written");
    }
    if ((g->written == emu_now->phase && g->writer != EMU_SEVERAL) || reads_meet(g)) {
        emu_broken(emu_now->running,
                   "adds to what a thread reads or writes before the next barrier");
    }
    g->writer = EMU_SEVERAL;
    g->written = emu_now->phase;
    *p += v;
}

void emu_copy_begin(void *to, const uint32_t words[4])
{
    struct emu_fiber *f = &emu_now->threads[emu_now->running];
    size_t n;
    struct emu_granule *g = granules_of(to, 16, &n);

    if (f->n_copies == EMU_COPIES_MAX) {
        emu_broken(emu_now->running, "has more copies in flight than the emulation can hold");
    }
    emu_shared_write(to, 16);
    for (size_t i = 0; i < n; i++) {
        g[i].copier = emu_now->running + 1;
    }
    struct emu_copy *c = &f->copies[f->n_copies++];
    c->to = to;
    c->group = f->group;
    memcpy(c->words, words, sizeof(c->words));
}

void emu_copy_commit(void)
{
    emu_now->threads[emu_now->running].group++;
}

void emu_copy_wait(uint32_t n_left)
{
    struct emu_fiber *f = &emu_now->threads[emu_now->running];
    uint32_t kept = 0;

    for (uint32_t i = 0; i < f->n_copies; i++) {
        struct emu_copy *c = &f->copies[i];
        if (c->group + n_left >= f->group) {
            f->copies[kept++] = *c;
            continue;
        }
        size_t n;
        struct emu_granule *g = granules_of(c->to, sizeof(c->words), &n);
        for (size_t j = 0; j < n; j++) {
            g[j].copier = 0;
        }
        emu_shared_write(c->to, sizeof(c->words));
        memcpy(c->to, c->words, sizeof(c->words));
    }
    f->n_copies = kept;
}
