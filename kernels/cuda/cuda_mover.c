/* Copies between device memory and slots of pinned host memory, on a stream of their own: KV pages on their way to the wire and
 * from it, while the context's stream computes. One event for each slot tells when its last copy is done. Shares with the
 * context the device's number and nothing else, for it is used by another thread. */

#include "kernels/cuda/cuda_int.h"

#include <inttypes.h>
#include "base/log.h"
#include "base/mem.h"

struct mover {
    struct bt_k_mover base;
    uint32_t device, n_slots;
    size_t slot_bytes;
    cudaStream_t stream;
    cudaEvent_t *moved; /* [n_slots] */
    uint8_t *slots;     /* [n_slots][slot_bytes], pinned */
    bool faulty;        /* told already */
};

static struct mover *mover_of(struct bt_k_mover *m)
{
    return (struct mover *)(void *)m;
}

static bool ok(struct mover *m, cudaError_t e, const char *what)
{
    if (e != cudaSuccess && !m->faulty) {
        bt_log_error("kernels",
                     "cuda device %" PRIu32 " failed: %s: %s (%s); nothing is copied any more",
                     m->device, what, cudaGetErrorString(e), cudaGetErrorName(e));
        m->faulty = true;
    }
    return e == cudaSuccess;
}

static void enter(struct mover *m)
{
    (void)ok(m, cudaSetDevice((int)m->device), "device");
}

void cuda_mover_destroy(struct bt_k_mover *mover)
{
    struct mover *m = mover_of(mover);

    enter(m);
    if (m->stream != NULL) {
        (void)ok(m, cudaStreamSynchronize(m->stream), "end of copies");
    }
    for (uint32_t i = 0; m->moved != NULL && i < m->n_slots; i++) {
        if (m->moved[i] != NULL) {
            (void)ok(m, cudaEventDestroy(m->moved[i]), "end of copies");
        }
    }
    if (m->stream != NULL) {
        (void)ok(m, cudaStreamDestroy(m->stream), "end of copies");
    }
    (void)ok(m, cudaFreeHost(m->slots), "pinned memory");
    bt_free(m->moved);
    bt_free(m);
}

static enum bt_status prepare(struct mover *m, struct bt_err *err)
{
    size_t bytes;

    m->moved = bt_calloc(m->n_slots, sizeof(*m->moved));
    if (m->moved == NULL || !bt_mul_size(m->n_slots, m->slot_bytes, &bytes)) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory for copies of KV pages");
    }
    enum bt_status st =
        cuda_status(cudaMallocHost((void **)&m->slots, bytes), "pinned memory", err);
    if (st == BT_OK) {
        st = cuda_status(cudaStreamCreateWithFlags(&m->stream, cudaStreamNonBlocking), "stream",
                         err);
    }
    for (uint32_t i = 0; i < m->n_slots && st == BT_OK; i++) {
        st = cuda_status(cudaEventCreateWithFlags(&m->moved[i], cudaEventDisableTiming), "event",
                         err);
    }
    return st;
}

enum bt_status cuda_mover_create(struct bt_kctx *k, size_t slot_bytes, uint32_t n_slots,
                                 struct bt_k_mover **out, struct bt_err *err)
{
    struct mover *m = bt_calloc(1, sizeof(*m));

    if (m == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory for copies of KV pages");
    }
    m->base.ops = k->ops;
    m->device = cuda_of(k)->device;
    m->n_slots = n_slots;
    m->slot_bytes = slot_bytes;
    cuda_enter(cuda_of(k));
    enum bt_status st = prepare(m, err);
    if (st != BT_OK) {
        cuda_mover_destroy(&m->base);
        return st;
    }
    *out = &m->base;
    return BT_OK;
}

void cuda_mover_enter(struct bt_k_mover *mover)
{
    enter(mover_of(mover));
}

uint8_t *cuda_mover_slot(struct bt_k_mover *mover, uint32_t slot)
{
    return mover_of(mover)->slots + slot * mover_of(mover)->slot_bytes;
}

enum bt_status cuda_mover_start(struct bt_k_mover *mover, uint32_t slot, void *dev, size_t bytes,
                                bool to_device)
{
    struct mover *m = mover_of(mover);
    uint8_t *host = cuda_mover_slot(mover, slot);
    void *to = to_device ? dev : host;
    const void *from = to_device ? host : dev;

    BT_ASSERT(slot < m->n_slots && bytes <= m->slot_bytes);
    enter(m);
    bool fine =
        ok(m,
           cudaMemcpyAsync(to, from, bytes,
                           to_device ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost, m->stream),
           "copy of a KV page") &&
        ok(m, cudaEventRecord(m->moved[slot], m->stream), "copy of a KV page");
    return fine ? BT_OK : BT_ERR_DEVICE;
}

enum bt_status cuda_mover_done(struct bt_k_mover *mover, uint32_t slot, bool wait)
{
    struct mover *m = mover_of(mover);

    enter(m);
    cudaError_t e = wait ? cudaEventSynchronize(m->moved[slot]) : cudaEventQuery(m->moved[slot]);
    if (e == cudaErrorNotReady) {
        (void)cudaGetLastError(); /* it would be taken for that of the next call */
        return BT_ERR_BUSY;
    }
    return ok(m, e, "copy of a KV page") ? BT_OK : BT_ERR_DEVICE;
}
