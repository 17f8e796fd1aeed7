#ifndef BT_KERNELS_EMU_FIBERS_INT_H
#define BT_KERNELS_EMU_FIBERS_INT_H

/* What the files of the emulated execution model share: a stream's fibers, the state of its warps and of shared memory. */

#include <stdbool.h>
#include "kernels/cuda/emulation/emu_block_int.h"

#define EMU_GRANULE    4U /* bytes of shared memory that are watched together: no type is smaller */
#define EMU_LANE_WORDS 10U
#define EMU_COPIES_MAX 128U /* of a thread, in flight at once */

enum emu_state { EMU_FRESH, EMU_READY, EMU_AT_BARRIER, EMU_AT_WARP, EMU_ENDED };

/* A copy into shared memory that the thread has not waited for. */
struct emu_copy {
    void *to;
    uint32_t group, words[4];
};

struct emu_fiber {
    struct emu_self self;
    void *sp;
    enum emu_state state;
    uint64_t phase;           /* of the barrier or warp that it waits for */
    void *fake;               /* AddressSanitizer's */
    uint32_t group, n_copies; /* the group that commit will end; copies of it and of earlier ones */
    struct emu_copy copies[EMU_COPIES_MAX];
};

/* The lanes of a warp meet in an operation: what each gave, and what the last one to come found for each. */
struct emu_meeting {
    uint32_t in[EMU_WARP][EMU_LANE_WORDS], out[EMU_WARP][4];
};

struct emu_warp {
    uint64_t phase;
    uint64_t syncs; /* emu_warp_sync's */
    uint32_t arrived;
    enum emu_warp_op op; /* of those who have arrived */
    struct emu_meeting meetings[2];
};

/* Who touched a granule of shared memory, and between which barriers: of the block, and of the thread's warp. */
struct emu_granule {
    uint64_t written, read; /* the block's phase; 0: never */
    uint64_t written_syncs, read_syncs;
    uint32_t writer,
        reader; /* or EMU_SEVERAL: who adds; readers, of one warp if read_warp is one */
    uint32_t read_warp;
    uint32_t copier; /* 1 + the thread whose copy into it is in flight; 0: none */
};
#define EMU_SEVERAL UINT32_MAX

struct emu_fibers {
    uint8_t *stacks; /* [EMU_THREADS_MAX] of STACK_BYTES */
    struct emu_fiber threads[EMU_THREADS_MAX];
    struct emu_warp warps[EMU_THREADS_MAX / EMU_WARP];
    unsigned char *shared;
    struct emu_granule *granules;
    const struct emu_launch *launch;
    uint32_t n_threads, running;
    uint64_t phase; /* never 0; goes on from block to block, so that granules need no clearing */
    uint64_t block_phase; /* the phase in which this block began */
    uint32_t arrived;
    void *scheduler; /* its stack pointer */
    const void *main_stack;
    size_t main_stack_bytes;
    void *main_fake;
};

/* The fibers that run on this CPU thread. */
extern __thread struct emu_fibers *emu_now;

__attribute__((noreturn)) void emu_broken(uint32_t thread, const char *text);
/* Lets others run; the running thread's state says what it waits for. */
void emu_give_way(void);

#endif
