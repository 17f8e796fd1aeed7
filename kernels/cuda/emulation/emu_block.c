/* Fibers for the threads of a block, and their barriers. Owns the stacks and the block's shared memory; knows nothing of
 * kernels. */

#include "kernels/cuda/emulation/emu_fibers_int.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "base/assert.h"
#include "base/mem.h"

#ifdef EMU_ASAN
#include <sanitizer/common_interface_defs.h>
#define STACK_BYTES ((size_t)256 << 10)
#else
#define STACK_BYTES ((size_t)64 << 10)
#endif

__thread struct emu_self *emu_self;
__thread struct emu_fibers *emu_now;

/* Saves the callee's registers and stack pointer in *from, and goes on at to. */
void emu_switch(void **from, void *to);
void emu_begin(void);

#if defined(__x86_64__)
__asm__(".text\n"
        ".globl emu_switch\n"
        ".type emu_switch, @function\n"
        "emu_switch:\n"
        "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n    pushq %r13\n    pushq %r14\n    pushq "
        "%r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    popq %r15\n    popq %r14\n    popq %r13\n    popq %r12\n    popq %rbx\n    popq %rbp\n"
        "    ret\n"
        ".size emu_switch, .-emu_switch\n");

static void *first_stack(uint8_t *stack)
{
    /* Six registers, the address to return to, and one word for the alignment of a function's entry. */
    void **sp = (void **)(void *)(stack + STACK_BYTES) - 8;

    memset(sp, 0, 8 * sizeof(*sp));
    sp[6] = (void *)(uintptr_t)emu_begin;
    return sp;
}
#elif defined(__aarch64__)
__asm__(".text\n"
        ".globl emu_switch\n"
        ".type emu_switch, %function\n"
        "emu_switch:\n"
        "    sub sp, sp, #160\n"
        "    stp x19, x20, [sp]\n    stp x21, x22, [sp, #16]\n    stp x23, x24, [sp, #32]\n"
        "    stp x25, x26, [sp, #48]\n    stp x27, x28, [sp, #64]\n    stp x29, x30, [sp, #80]\n"
        "    stp d8, d9, [sp, #96]\n    stp d10, d11, [sp, #112]\n    stp d12, d13, [sp, #128]\n"
        "    stp d14, d15, [sp, #144]\n"
        "    mov x9, sp\n    str x9, [x0]\n    mov sp, x1\n"
        "    ldp x19, x20, [sp]\n    ldp x21, x22, [sp, #16]\n    ldp x23, x24, [sp, #32]\n"
        "    ldp x25, x26, [sp, #48]\n    ldp x27, x28, [sp, #64]\n    ldp x29, x30, [sp, #80]\n"
        "    ldp d8, d9, [sp, #96]\n    ldp d10, d11, [sp, #112]\n    ldp d12, d13, [sp, #128]\n"
        "    ldp d14, d15, [sp, #144]\n"
        "    add sp, sp, #160\n    ret\n"
        ".size emu_switch, .-emu_switch\n");

static void *first_stack(uint8_t *stack)
{
    void **sp = (void **)(void *)(stack + STACK_BYTES) - 20;

    memset(sp, 0, 20 * sizeof(*sp));
    sp[11] = (void *)(uintptr_t)emu_begin; /* x30 */
    return sp;
}
#else
#error "the CUDA emulation changes stacks on x86-64 and AArch64 only"
#endif

void emu_broken(uint32_t thread, const char *text)
{
    const struct emu_self *s = &emu_now->threads[thread].self;

    fprintf(stderr, "cuda emulation: %s, block (%u, %u, %u), thread (%u, %u, %u): %s\n",
            emu_now->launch->kernel, s->block.x, s->block.y, s->block.z, s->thread.x, s->thread.y,
            s->thread.z, text);
    abort();
}

static void to_scheduler(struct emu_fiber *f, bool ended)
{
#ifdef EMU_ASAN
    __sanitizer_start_switch_fiber(ended ? NULL : &f->fake, emu_now->main_stack,
                                   emu_now->main_stack_bytes);
#else
    (void)ended;
#endif
    emu_switch(&f->sp, emu_now->scheduler);
#ifdef EMU_ASAN
    __sanitizer_finish_switch_fiber(f->fake, &emu_now->main_stack, &emu_now->main_stack_bytes);
#endif
}

void emu_give_way(void)
{
    to_scheduler(&emu_now->threads[emu_now->running], false);
}

void emu_begin(void)
{
    struct emu_fiber *f = &emu_now->threads[emu_now->running];

#ifdef EMU_ASAN
    __sanitizer_finish_switch_fiber(NULL, &emu_now->main_stack, &emu_now->main_stack_bytes);
#endif
    emu_now->launch->thread(emu_now->launch->arg);
    if (f->n_copies > 0) {
        emu_broken(emu_now->running, "ends while copies into shared memory are in flight");
    }
    f->state = EMU_ENDED;
    to_scheduler(f, true);
    abort(); /* an ended fiber is not resumed */
}

static void resume(uint32_t t)
{
    struct emu_fiber *f = &emu_now->threads[t];

    emu_now->running = t;
    emu_self = &f->self;
    if (f->state == EMU_FRESH) {
        f->sp = first_stack(emu_now->stacks + t * STACK_BYTES);
        f->fake = NULL;
    }
    f->state = EMU_READY;
#ifdef EMU_ASAN
    __sanitizer_start_switch_fiber(&emu_now->main_fake, emu_now->stacks + t * STACK_BYTES,
                                   STACK_BYTES);
#endif
    emu_switch(&emu_now->scheduler, f->sp);
#ifdef EMU_ASAN
    __sanitizer_finish_switch_fiber(emu_now->main_fake, NULL, NULL);
#endif
}

static bool may_run(uint32_t t)
{
    const struct emu_fiber *f = &emu_now->threads[t];

    switch (f->state) {
    case EMU_FRESH:
    case EMU_READY:
        return true;
    case EMU_AT_BARRIER:
        return f->phase != emu_now->phase;
    case EMU_AT_WARP:
        return f->phase != emu_now->warps[t / EMU_WARP].phase;
    case EMU_ENDED:
    default:
        return false;
    }
}

/* Lets the threads of a warp run until none can. */
static bool run_warp(uint32_t first, uint32_t end)
{
    bool any = false;

    for (bool again = true; again;) {
        again = false;
        for (uint32_t t = first; t < end; t++) {
            if (may_run(t)) {
                resume(t);
                again = true;
            }
        }
        any = any || again;
    }
    return any;
}

static void run_block(struct emu_dim block)
{
    uint32_t n = emu_now->n_threads;
    struct emu_dim size = emu_now->launch->block;

    for (uint32_t t = 0; t < n; t++) {
        emu_now->threads[t].state = EMU_FRESH;
        emu_now->threads[t].group = emu_now->threads[t].n_copies = 0;
        emu_now->threads[t].self =
            (struct emu_self){.thread = {t % size.x, t / size.x % size.y, t / size.x / size.y},
                              .block = block,
                              .block_size = size,
                              .grid = emu_now->launch->grid,
                              .shared = emu_now->shared};
    }
    for (uint32_t w = 0; w < (n + EMU_WARP - 1) / EMU_WARP; w++) {
        emu_now->warps[w].arrived = 0;
    }
    emu_now->arrived = 0;
    emu_now->block_phase = ++emu_now->phase;
    for (bool any = true; any;) {
        any = false;
        for (uint32_t t = 0; t < n; t += EMU_WARP) {
            any = run_warp(t, n - t < EMU_WARP ? n : t + EMU_WARP) || any;
        }
    }
    for (uint32_t t = 0; t < n; t++) {
        if (emu_now->threads[t].state != EMU_ENDED) {
            emu_broken(t, emu_now->threads[t].state == EMU_AT_BARRIER
                              ? "waits at a barrier that not all threads of the block reach"
                              : "waits in a warp operation that not all lanes reach");
        }
    }
}

void emu_run(cudaStream_t s, const struct emu_launch *l)
{
    struct emu_fibers *before = emu_now, *f = emu_stream_fibers(s);
    size_t n = (size_t)l->block.x * l->block.y * l->block.z;

    BT_ASSERT(before == NULL);
    emu_now = f;
    f->launch = l;
    if (n == 0 || n > EMU_THREADS_MAX || l->grid.x == 0 || l->grid.y == 0 || l->grid.z == 0 ||
        l->grid.x > INT32_MAX || l->grid.y > 65535 || l->grid.z > 65535 ||
        l->shared_bytes > EMU_SHARED_MAX) {
        fprintf(stderr, "cuda emulation: %s: a grid, block or shared memory that no device has\n",
                l->kernel);
        abort();
    }
    f->n_threads = (uint32_t)n;
    for (unsigned z = 0; z < l->grid.z; z++) {
        for (unsigned y = 0; y < l->grid.y; y++) {
            for (unsigned x = 0; x < l->grid.x; x++) {
                run_block((struct emu_dim){x, y, z});
            }
        }
    }
    emu_now = NULL;
    emu_self = NULL;
}

void emu_barrier(void)
{
    struct emu_fiber *f = &emu_now->threads[emu_now->running];

    if (++emu_now->arrived == emu_now->n_threads) {
        emu_now->arrived = 0;
        emu_now->phase++;
        return;
    }
    f->phase = emu_now->phase;
    f->state = EMU_AT_BARRIER;
    to_scheduler(f, false);
}

struct emu_fibers *emu_fibers_create(void)
{
    struct emu_fibers *f = bt_calloc(1, sizeof(*f));

    if (f == NULL) {
        return NULL;
    }
    f->stacks = mmap(NULL, EMU_THREADS_MAX * STACK_BYTES, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    f->stacks = f->stacks == MAP_FAILED ? NULL : f->stacks;
    f->shared = bt_alloc_aligned(256, EMU_SHARED_MAX);
    f->granules = bt_calloc(EMU_SHARED_MAX / EMU_GRANULE, sizeof(*f->granules));
    if (f->stacks == NULL || f->shared == NULL || f->granules == NULL) {
        emu_fibers_destroy(f);
        return NULL;
    }
    return f;
}

void emu_fibers_destroy(struct emu_fibers *f)
{
    if (f == NULL) {
        return;
    }
    if (f->stacks != NULL) {
        (void)munmap(f->stacks, EMU_THREADS_MAX * STACK_BYTES); /* a whole mapping of ours */
    }
    bt_free(f->shared);
    bt_free(f->granules);
    bt_free(f);
}
