#ifndef BT_KERNELS_EMU_BLOCK_INT_H
#define BT_KERNELS_EMU_BLOCK_INT_H

/* The execution model of CUDA on one CPU thread: a launch runs block after block, the threads of a block as fibers that
 * change places at barriers and warp operations. Breaking the model's rules aborts with the kernel's name, block and
 * thread:
 *  - a barrier or warp operation that not all threads of the block or warp reach, or lanes that meet in different ones;
 *  - shared memory: an access outside of what the launch asked for, a read of what no thread of the block has written, and
 *    two threads meeting at one place between two barriers, one of them writing; touching what a copy in flight writes, and
 *    ending before it is there;
 *  - more threads, blocks or shared memory than any device has. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "kernels/cuda/emulation/emu_runtime_int.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EMU_THREADS_MAX 1024U
#define EMU_WARP        32U
#define EMU_SHARED_MAX  (227U * 1024U) /* of any device; what the emulated one has: emu_device */

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
/* Puts it into the stream; arg, at most EMU_ARG_MAX bytes, is copied, and the kernel gets the copy. */
#define EMU_ARG_MAX 1024U
cudaError_t emu_queue_call(cudaStream_t s, void (*call)(void *arg), const void *arg,
                           size_t arg_bytes);
cudaError_t emu_queue(cudaStream_t s, const struct emu_launch *l, const void *arg,
                      size_t arg_bytes);

struct emu_fibers;
/* NULL: no memory. Used by one CPU thread at a time. */
struct emu_fibers *emu_fibers_create(void);
void emu_fibers_destroy(struct emu_fibers *f);
/* The fibers of a stream. */
struct emu_fibers *emu_stream_fibers(cudaStream_t s);

void emu_barrier(void);
/* All lanes of the warp come to these, or the emulation says who did not. */
enum emu_warp_op {
    EMU_SYNC,
    EMU_SHUFFLE,
    EMU_VOTE,
    EMU_LOAD,
    EMU_LOAD_TRANSPOSED,
    EMU_MULTIPLY_BF16,
    EMU_MULTIPLY_F16
};
/* What lanes wrote to shared memory before, others may touch after. */
void emu_warp_sync(void);
/* The value of lane ^ mask. */
uint32_t emu_shuffle_xor(uint32_t value, uint32_t mask);
/* Whether any lane says yes. */
bool emu_vote_any(bool yes);
/* ldmatrix of four 8 x 8 matrices of 16 bits: row: shared memory, row lane % 8 of matrix lane / 8. */
void emu_load_matrices(const void *row, bool transposed, uint32_t out[4]);
/* mma.m16n8k16: c += a b. */
void emu_multiply(const uint32_t a[4], const uint32_t b[2], float c[4], bool bf16);
/* A copy of 16 bytes into shared memory (cp.async): begun; ends a group of them; until all groups but the last n are there. */
void emu_copy_begin(void *to, const uint32_t words[4]);
void emu_copy_commit(void);
void emu_copy_wait(uint32_t n_left);
/* An access of the running thread to shared memory. */
void emu_shared_read(const void *p, size_t bytes);
void emu_shared_write(const void *p, size_t bytes);
/* An addition by several threads, in any order: to what was written before the last barrier, and to be read after the next one. */
void emu_shared_add(uint32_t *p, uint32_t v);

#ifdef __cplusplus
}
#endif

#endif
