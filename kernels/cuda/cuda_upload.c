/* What the host gives along with a call, on its way to the device: a ring in pinned memory, copied piece by piece into its
 * twin. The stream orders copies and kernels on the device; the host waits only when it comes round to memory that a copy
 * may still read. */

#include "kernels/cuda/cuda_int.h"

#include <string.h>

#define ALIGN ((size_t)256)

enum bt_status cuda_upload_init(struct cuda_ctx *c, struct bt_err *err)
{
    struct cuda_upload *u = &c->up;
    enum bt_status st =
        cuda_status(cudaMallocHost((void **)&u->host, 2 * CUDA_RING_HALF), "pinned memory", err);

    if (st == BT_OK) {
        st = cuda_status(cudaMalloc((void **)&u->dev, 2 * CUDA_RING_HALF), "device memory", err);
    }
    for (int i = 0; i < 2 && st == BT_OK; i++) {
        st = cuda_status(cudaEventCreateWithFlags(&u->passed[i], cudaEventDisableTiming), "event",
                         err);
    }
    return st;
}

void cuda_upload_fini(struct cuda_ctx *c)
{
    struct cuda_upload *u = &c->up;

    for (int i = 0; i < 2; i++) {
        if (u->passed[i] != NULL) {
            (void)cuda_ok(c, cudaEventDestroy(u->passed[i]), "event");
        }
    }
    (void)cuda_ok(c, cudaFreeHost(u->host), "pinned memory");
    (void)cuda_ok(c, cudaFree(u->dev), "device memory");
}

/* What was sent from there, if it is the same still. */
static void *sent_before(struct cuda_upload *u, const void *host, size_t bytes)
{
    for (uint32_t i = 0; i < CUDA_SENT_MAX; i++) {
        if (u->sent[i].from == host && u->sent[i].bytes == bytes &&
            u->sent[i].at / CUDA_RING_HALF == u->half && /* the other half is written next */
            memcmp(u->host + u->sent[i].at, host, bytes) == 0) {
            return u->dev + u->sent[i].at;
        }
    }
    return NULL;
}

/* Enters a half of the ring: what lay there is forgotten, and copies out of it have ended. */
static void enter(struct cuda_ctx *c, size_t half)
{
    struct cuda_upload *u = &c->up;

    u->half = half;
    u->at = half * CUDA_RING_HALF;
    if (u->pending[half]) {
        (void)cuda_ok(c, cudaEventSynchronize(u->passed[half]), "upload");
        u->pending[half] = false;
    }
    for (uint32_t i = 0; i < CUDA_SENT_MAX; i++) {
        if (u->sent[i].at / CUDA_RING_HALF == half) {
            u->sent[i].bytes = 0;
        }
    }
}

void *cuda_send(struct cuda_ctx *c, const void *host, size_t bytes)
{
    return cuda_send_as(c, host, CUDA_SEND_SELF, host, bytes);
}

void *cuda_send_as(struct cuda_ctx *c, const void *key, uint32_t tag, const void *host,
                   size_t bytes)
{
    struct cuda_upload *u = &c->up;

    BT_ASSERT(bytes > 0 && bytes <= CUDA_SEND_MAX);
    if (c->step.mode != CUDA_STEP_OFF) {
        return cuda_step_send(c, key, tag, host, bytes);
    }
    void *before = sent_before(u, host, bytes);
    if (before != NULL) {
        return before;
    }
    (void)cuda_begin(c);
    if (u->at + bytes > (u->half + 1) * CUDA_RING_HALF) {
        size_t left = u->half;
        u->pending[left] = cuda_ok(c, cudaEventRecord(u->passed[left], c->stream), "upload");
        enter(c, 1 - left);
    }
    size_t at = u->at;
    memcpy(u->host + at, host, bytes);
    (void)cuda_ok(
        c, cudaMemcpyAsync(u->dev + at, u->host + at, bytes, cudaMemcpyHostToDevice, c->stream),
        "upload");
    u->sent[u->next].from = host;
    u->sent[u->next].at = at;
    u->sent[u->next].bytes = bytes;
    u->next = (u->next + 1) % CUDA_SENT_MAX;
    u->at = (at + bytes + ALIGN - 1) / ALIGN * ALIGN;
    return u->dev + at;
}
