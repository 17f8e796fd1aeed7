/* The emulated runtime: memory, copies, streams and events of a device that is this machine. */

#include "kernels/cuda/emulation/emu_runtime_int.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include "base/mem.h"
#include "base/options.h"
#include "kernels/cuda/emulation/emu_block_int.h"

#define HEADER   4096U              /* before each block of device memory: its size */
#define MAP_MIN  ((size_t)64 << 20) /* from here on straight from the kernel, and lazily */
#define ZERO_MIN ((size_t)1 << 20)  /* from here on zeros are made by giving pages back */
#define PATTERN  0xa5

struct emu_stream {
    struct emu_fibers *fibers;
};

struct emu_event {
    cudaStream_t stream;
};

struct block {
    size_t bytes;
};

struct emu_fibers *emu_stream_fibers(cudaStream_t s)
{
    return s->fibers;
}

cudaError_t cudaGetDeviceCount(int *n)
{
    *n = 1;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    return device == 0 ? cudaSuccess : cudaErrorInvalidDevice;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device)
{
    *p = (struct cudaDeviceProp){.major = 8, .minor = 0, .concurrentManagedAccess = 1};
    (void)snprintf(p->name, sizeof(p->name), "emulated"); /* fits */
    return cudaSetDevice(device);
}

const char *cudaGetErrorString(cudaError_t e)
{
    switch (e) {
    case cudaSuccess:
        return "no error";
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorInvalidDevice:
        return "invalid device ordinal";
    case cudaErrorInvalidValue:
    default:
        return "invalid argument";
    }
}

cudaError_t cudaGetLastError(void)
{
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **p, size_t bytes)
{
    size_t all;
    uint8_t *b = NULL;

    *p = NULL;
    if (!bt_add_size(bytes, HEADER, &all)) {
        return cudaErrorMemoryAllocation;
    }
    if (all < MAP_MIN) {
        b = bt_alloc_aligned(HEADER, all);
    } else {
        b = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                 0);
        b = b == MAP_FAILED ? NULL : b;
    }
    if (b == NULL) {
        return cudaErrorMemoryAllocation;
    }
    if (all < MAP_MIN) {
        memset(b, PATTERN, all);
    }
    ((struct block *)(void *)b)->bytes = all;
    *p = b + HEADER;
    return cudaSuccess;
}

cudaError_t cudaFree(void *p)
{
    if (p == NULL) {
        return cudaSuccess;
    }
    struct block *b = (struct block *)(void *)((uint8_t *)p - HEADER);

    if (b->bytes < MAP_MIN) {
        bt_free(b);
    } else {
        (void)munmap(b, b->bytes); /* a whole mapping of ours */
    }
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **p, size_t bytes)
{
    return cudaMalloc(p, bytes);
}

cudaError_t cudaFreeHost(void *p)
{
    return cudaFree(p);
}

cudaError_t cudaMallocManaged(void **p, size_t bytes, unsigned flags)
{
    return flags == cudaMemAttachGlobal ? cudaMalloc(p, bytes) : cudaErrorInvalidValue;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t s)
{
    (void)kind;
    (void)s;
    memcpy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t s)
{
    uint8_t *at = p;
    size_t head = (HEADER - (uintptr_t)p % HEADER) % HEADER;

    (void)s;
    /* A large KV pool costs memory where it is used only. */
    if (value == 0 && bytes >= ZERO_MIN &&
        madvise(at + head, (bytes - head) / HEADER * HEADER, MADV_DONTNEED) == 0) {
        memset(at, 0, head);
        size_t done = head + (bytes - head) / HEADER * HEADER;
        memset(at + done, 0, bytes - done);
        return cudaSuccess;
    }
    memset(p, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags)
{
    struct emu_stream *made = bt_calloc(1, sizeof(*made));

    (void)flags;
    *s = made;
    if (made == NULL) {
        return cudaErrorMemoryAllocation;
    }
    made->fibers = emu_fibers_create();
    if (made->fibers == NULL) {
        bt_free(made);
        *s = NULL;
        return cudaErrorMemoryAllocation;
    }
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    emu_fibers_destroy(s->fibers);
    bt_free(s);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    return s != NULL ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags)
{
    (void)flags;
    *e = bt_calloc(1, sizeof(**e));
    return *e != NULL ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    bt_free(e);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    e->stream = s;
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    return e != NULL ? cudaSuccess : cudaErrorInvalidValue;
}
