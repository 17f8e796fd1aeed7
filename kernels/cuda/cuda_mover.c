/* Copies between device memory and slots of pinned host memory, on a stream of their own: KV pages on their way to the wire and
 * from it, while the context's stream computes. What was queued goes in as few launches as it can (cuda_move.cu), each with an
 * event. Shares with the context the device's number and nothing else, for it is used by another thread.
 *
 * Copies are numbered from 1 in the order in which they were queued, which is that of the stream. A slot's next copy is queued
 * when the last one is known to be done only, so that there are never more than n_slots at once: rings of so many places have
 * one for each of them, and none is taken again before the launch that reads it is done. */

#include "kernels/cuda/cuda_mover_int.h"

#include <inttypes.h>
#include "base/log.h"
#include "base/mem.h"

/* Of one launch, so that the first page does not wait for much more than itself: some 80 us on a bus of 50 GB/s. */
#define LAUNCH_BYTES ((size_t)4 << 20)
/* From here on a copy is its own, by one of the device's copy engines: it takes 20 us there, in which the next one's call is
 * over, and leaves the multiprocessors alone. */
#define SINGLE_BYTES ((size_t)1 << 20)
#define SLOT_ALIGN                                                                                 \
    ((size_t)64) /* of slots: 16 for copies by words, and a cache line of their own */

struct copy {
    uint64_t end; /* number of its launch's last one */
    bool to_device;
};

struct mover {
    struct bt_k_mover base;
    uint32_t device, n_slots;
    size_t slot_bytes, stride, single_bytes;
    cudaStream_t stream;
    uint8_t *slots; /* [n_slots][stride], pinned */
    /* By a copy's number modulo n_slots. */
    struct cuda_move *moves; /* pinned */
    struct copy *copies;
    cudaEvent_t *events;             /* by the number of a launch's last copy */
    uint64_t *last;                  /* [n_slots]: number of a slot's last copy; 0: none */
    uint64_t queued, launched, done; /* numbers of the last ones; done: as far as was asked */
    uint64_t good; /* copies with a greater number fail; UINT64_MAX: the device is well */
};

static struct mover *mover_of(struct bt_k_mover *m)
{
    return (struct mover *)(void *)m;
}

/* Copies behind number `good` are given up if e is an error. */
static bool ok(struct mover *m, cudaError_t e, const char *what, uint64_t good)
{
    if (e == cudaSuccess) {
        return true;
    }
    if (m->good == UINT64_MAX) {
        bt_log_error("kernels",
                     "cuda device %" PRIu32 " failed: %s: %s (%s); nothing is copied any more",
                     m->device, what, cudaGetErrorString(e), cudaGetErrorName(e));
    }
    m->good = good < m->good ? good : m->good;
    return false;
}

static void enter(struct mover *m)
{
    (void)ok(m, cudaSetDevice((int)m->device), "device", m->done);
}

void cuda_mover_destroy(struct bt_k_mover *mover)
{
    struct mover *m = mover_of(mover);

    enter(m);
    if (m->stream != NULL) {
        (void)ok(m, cudaStreamSynchronize(m->stream), "end of copies", m->done);
    }
    for (uint32_t i = 0; m->events != NULL && i < m->n_slots; i++) {
        if (m->events[i] != NULL) {
            (void)ok(m, cudaEventDestroy(m->events[i]), "end of copies", m->done);
        }
    }
    if (m->stream != NULL) {
        (void)ok(m, cudaStreamDestroy(m->stream), "end of copies", m->done);
    }
    (void)ok(m, cudaFreeHost(m->slots), "pinned memory", m->done);
    (void)ok(m, cudaFreeHost(m->moves), "pinned memory", m->done);
    bt_free(m->events);
    bt_free(m->copies);
    bt_free(m->last);
    bt_free(m);
}

/* Of the highest priority: blocks that compute would otherwise all go first, and pages wait for the end of a prompt's product.
 * These are few and short. */
static enum bt_status make_stream(struct mover *m, struct bt_err *err)
{
    int least, greatest;
    enum bt_status st =
        cuda_status(cudaDeviceGetStreamPriorityRange(&least, &greatest), "stream", err);

    return st != BT_OK ? st
                       : cuda_status(cudaStreamCreateWithPriority(&m->stream, cudaStreamNonBlocking,
                                                                  greatest),
                                     "stream", err);
}

static enum bt_status prepare(struct mover *m, struct bt_err *err)
{
    size_t bytes;

    m->events = bt_calloc(m->n_slots, sizeof(*m->events));
    m->copies = bt_calloc(m->n_slots, sizeof(*m->copies));
    m->last = bt_calloc(m->n_slots, sizeof(*m->last));
    if (m->events == NULL || m->copies == NULL || m->last == NULL ||
        !bt_add_size(m->slot_bytes, SLOT_ALIGN - 1, &m->stride) ||
        !bt_mul_size(m->n_slots, m->stride / SLOT_ALIGN * SLOT_ALIGN, &bytes)) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory for copies of KV pages");
    }
    m->stride = m->stride / SLOT_ALIGN * SLOT_ALIGN;
    enum bt_status st =
        cuda_status(cudaMallocHost((void **)&m->slots, bytes), "pinned memory", err);
    if (st == BT_OK) {
        st = cuda_status(cudaMallocHost((void **)&m->moves, m->n_slots * sizeof(*m->moves)),
                         "pinned memory", err);
    }
    if (st == BT_OK) {
        st = make_stream(m, err);
    }
    for (uint32_t i = 0; i < m->n_slots && st == BT_OK; i++) {
        st = cuda_status(cudaEventCreateWithFlags(&m->events[i], cudaEventDisableTiming), "event",
                         err);
    }
    return st;
}

enum bt_status cuda_mover_create(struct bt_kctx *k, const struct bt_k_mover_opts *o,
                                 struct bt_k_mover **out, struct bt_err *err)
{
    struct mover *m = bt_calloc(1, sizeof(*m));

    if (m == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory for copies of KV pages");
    }
    m->base.ops = k->ops;
    m->device = cuda_of(k)->device;
    m->n_slots = o->n_slots;
    m->slot_bytes = o->slot_bytes;
    m->single_bytes = o->single_bytes != 0 ? o->single_bytes : SINGLE_BYTES;
    m->good = UINT64_MAX;
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
    return mover_of(mover)->slots + slot * mover_of(mover)->stride;
}

void cuda_mover_start(struct bt_k_mover *mover, uint32_t slot, void *dev, size_t bytes,
                      bool to_device)
{
    struct mover *m = mover_of(mover);
    const uint64_t d = (uint64_t)(uintptr_t)dev,
                   host = (uint64_t)(uintptr_t)cuda_mover_slot(mover, slot);

    BT_ASSERT(slot < m->n_slots && bytes <= m->slot_bytes);
    if (m->good != UINT64_MAX) {
        m->last[slot] = UINT64_MAX; /* what is in the rings may be in use still */
        return;
    }
    BT_ASSERT(m->last[slot] <= m->done);
    m->last[slot] = ++m->queued;
    m->copies[m->queued % m->n_slots].to_device = to_device;
    m->moves[m->queued % m->n_slots] = (struct cuda_move){
        .to = to_device ? d : host, .from = to_device ? host : d, .bytes = bytes};
}

/* The next copies that go together, from number `first` on: the last one's number, and the largest of them. */
static uint64_t launch_end(const struct mover *m, uint64_t first, uint64_t *bytes_max)
{
    uint64_t end = first, bytes = m->moves[first % m->n_slots].bytes, sum = bytes;

    *bytes_max = bytes;
    if (bytes >= m->single_bytes) {
        return end;
    }
    while (end < m->queued && end - first + 1 < CUDA_MOVES_MAX) {
        bytes = m->moves[(end + 1) % m->n_slots].bytes;
        if (bytes >= m->single_bytes || sum + bytes > LAUNCH_BYTES) {
            break;
        }
        end++;
        sum += bytes;
        *bytes_max = bytes > *bytes_max ? bytes : *bytes_max;
    }
    return end;
}

static bool launch(struct mover *m, uint64_t first, uint64_t end, uint64_t bytes_max)
{
    const uint32_t at = (uint32_t)(first % m->n_slots);
    const struct cuda_move *one = &m->moves[at];

    if (bytes_max >= m->single_bytes) {
        return ok(m,
                  cudaMemcpyAsync(
                      (void *)(uintptr_t)one->to, (const void *)(uintptr_t)one->from, one->bytes,
                      m->copies[at].to_device ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost,
                      m->stream),
                  "copy of a KV page", m->launched);
    }
    return ok(
        m,
        cuda_move_run(m->stream, m->moves, m->n_slots, at, (uint32_t)(end - first + 1), bytes_max),
        "copies of KV pages", m->launched);
}

void cuda_mover_go(struct bt_k_mover *mover)
{
    struct mover *m = mover_of(mover);

    if (m->launched == m->queued || m->good != UINT64_MAX) {
        return;
    }
    enter(m);
    while (m->launched < m->queued) {
        uint64_t bytes_max, first = m->launched + 1, end = launch_end(m, first, &bytes_max);

        for (uint64_t i = first; i <= end; i++) {
            m->copies[i % m->n_slots].end = end;
        }
        if (!launch(m, first, end, bytes_max) ||
            !ok(m, cudaEventRecord(m->events[end % m->n_slots], m->stream), "copies of KV pages",
                m->launched)) {
            return;
        }
        m->launched = end;
    }
}

enum bt_status cuda_mover_done(struct bt_k_mover *mover, uint32_t slot, bool wait)
{
    struct mover *m = mover_of(mover);
    const uint64_t n = m->last[slot];

    if (n <= m->done) {
        return BT_OK;
    }
    if (wait) {
        cuda_mover_go(mover);
    }
    if (n > m->good) {
        return BT_ERR_DEVICE;
    }
    if (n > m->launched) {
        return BT_ERR_BUSY;
    }
    enter(m);
    const uint64_t end = m->copies[n % m->n_slots].end;
    cudaEvent_t event = m->events[end % m->n_slots];
    cudaError_t e = wait ? cudaEventSynchronize(event) : cudaEventQuery(event);
    if (e == cudaErrorNotReady) {
        (void)cudaGetLastError(); /* it would be taken for that of the next call */
        return BT_ERR_BUSY;
    }
    if (!ok(m, e, "copies of KV pages", m->done)) {
        return BT_ERR_DEVICE;
    }
    m->done = end; /* all before are, too */
    return BT_OK;
}
