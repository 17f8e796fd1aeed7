#ifndef BT_KERNELS_EMU_BLOCK_INT_H
#define BT_KERNELS_EMU_BLOCK_INT_H

/* The execution model of CUDA on one CPU thread: a launch runs block after block, the threads of a block as fibers that
 * change places at barriers and warp operations. Breaking the model's rules aborts with the kernel's name, block and
 * thread:
 *  - a barrier or warp operation that not all threads of the block or warp reach;
 *  - shared memory: an access outside of what the launch asked for, a read of what no thread of the block has written, and
 *    two threads meeting at one place between two barriers, one of them writing;
 *  - more threads, blocks or shared memory than sm_80 has. */

#include <stddef.h>
#include <stdint.h>
#include "kernels/cuda/emulation/emu_runtime_int.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EMU_THREADS_MAX 1024U
#define EMU_WARP        32U
#define EMU_SHARED_MAX  (163U * 1024U)

struct emu_dim {
    unsigned x, y, z;
};

/* What a thread knows of itself. */
struct emu_self {
    struct emu_dim thread, block, block_size, grid;
    unsigned char *shared;
};

/* The thread that runs now; of this CPU thread. */
extern __thread struct emu_self *emu_self;

struct emu_launch {
    const char *kernel; /* its name, for messages */
    struct emu_dim grid, block;
    size_t shared_bytes;
    void (*thread)(void *arg); /* the kernel, called once for each thread */
    void *arg;
};
void emu_run(cudaStream_t s, const struct emu_launch *l);

struct emu_fibers;
/* NULL: no memory. Used by one CPU thread at a time. */
struct emu_fibers *emu_fibers_create(void);
void emu_fibers_destroy(struct emu_fibers *f);
/* The fibers of a stream. */
struct emu_fibers *emu_stream_fibers(cudaStream_t s);

void emu_barrier(void);
/* Gives value to the other lanes of the warp and returns the values of all 32, valid until the next call but one. */
const uint64_t *emu_exchange(uint64_t value);
/* An access of the running thread to shared memory. */
void emu_shared_read(const void *p, size_t bytes);
void emu_shared_write(const void *p, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
