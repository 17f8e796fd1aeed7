/* The emulated runtime: streams, events, copies of a device that is this machine. A stream is a queue; what is put into it is
 * done when the host waits for it or for an event behind it, and not before: what was not waited for has not happened, a
 * copy reads what is in pinned memory then, and streams meet at events only. One thing runs at a time, whichever thread
 * waits. */

#include "kernels/cuda/emulation/emu_runtime_int.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/queue.h>
#include <unistd.h>
#include "base/clock.h"
#include "base/mem.h"
#include "kernels/cuda/emulation/emu_block_int.h"
#include "kernels/cuda/emulation/emu_memory_int.h"

#define OPS_MAX   2048U /* in a stream; then the host waits for the oldest, as on a device */
#define QUERY_OPS 4U    /* done by a query */

enum op_kind { OP_KERNEL, OP_CALL, OP_COPY, OP_SET, OP_RECORD, OP_GRAPH };

struct op {
    enum op_kind kind;
    union {
        struct {
            struct emu_launch launch;
            _Alignas(16) unsigned char arg[EMU_ARG_MAX];
        } kernel;
        struct {
            void *to;
            const void *from;
            size_t bytes;
        } copy;
        struct {
            void *p;
            int value;
            size_t bytes;
        } set;
        struct {
            cudaEvent_t event;
            uint64_t n;
        } event;
        cudaGraphExec_t graph;
    };
};

/* The kernels of a capture, in a mapping of its own: the thread that captures does not use the heap. */
#define GRAPH_OPS_MAX 16384U
struct emu_graph {
    struct op *ops;
    uint32_t n;
    bool executable;
};

struct emu_stream {
    struct emu_fibers *fibers;
    struct op *ops;            /* [OPS_MAX], a ring */
    uint64_t put, taken;       /* so far */
    pthread_t owner;           /* who captures */
    struct emu_graph *capture; /* NULL: not capturing */
    bool refused;              /* something else was asked for meanwhile */
    LIST_ENTRY(emu_stream) link;
};

struct emu_event {
    cudaStream_t stream;     /* of the last record */
    uint64_t recorded, done; /* records so far, and the last one that was reached */
    uint64_t reached_ns;     /* when */
    bool timing;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static LIST_HEAD(, emu_stream) streams = LIST_HEAD_INITIALIZER(streams);
static struct emu_counts counts;

#define SHARED_DEFAULT (99U << 10)
static struct emu_device wanted; /* of the device, by tests */
static uint64_t n_done;          /* kernels and copies */
static bool lost;                /* one of them failed: nothing is done any more */
static const char *fault_file;   /* NULL: none */
static pthread_once_t told_once = PTHREAD_ONCE_INIT;

void emu_device_set(const struct emu_device *d)
{
    pthread_mutex_lock(&mutex);
    wanted = *d;
    n_done = 0;
    lost = false;
    pthread_mutex_unlock(&mutex);
}

static void read_environment(void)
{
    const char *text = getenv("BT_EMU_DEVICE"), *file = "fault-file=";
    unsigned long long n;

    if (text != NULL && sscanf(text, "shared=%llu", &n) == 1) {
        wanted.shared_max = n;
    } else if (text != NULL && strncmp(text, file, strlen(file)) == 0) {
        fault_file = text + strlen(file);
    }
}

static size_t shared_max(void)
{
    return wanted.shared_max != 0 ? wanted.shared_max : SHARED_DEFAULT;
}

struct emu_fibers *emu_stream_fibers(cudaStream_t s)
{
    return s->fibers;
}

struct emu_counts emu_counts(void)
{
    pthread_mutex_lock(&mutex);
    struct emu_counts c = counts;
    cudaStream_t s;

    LIST_FOREACH(s, &streams, link)
    {
        c.n_queued += s->put - s->taken;
    }
    pthread_mutex_unlock(&mutex);
    return c;
}

static _Thread_local cudaError_t last_error; /* until somebody asks */

static cudaError_t leave(cudaError_t e)
{
    e = lost ? cudaErrorLaunchFailure : e;
    emu_memory_close();
    pthread_mutex_unlock(&mutex);
    last_error = e != cudaSuccess ? e : last_error;
    return e;
}

/* ---- doing what is in a stream ---- */

/* Whether this one fails, or one before it did. */
static bool fails(const struct op *o)
{
    if (o->kind != OP_RECORD && o->kind != OP_GRAPH) {
        lost = lost || (wanted.fault_after != 0 && n_done++ == wanted.fault_after) ||
               (fault_file != NULL && access(fault_file, F_OK) == 0);
    }
    return lost && o->kind != OP_RECORD;
}

static void run_op(cudaStream_t s, struct op *o)
{
    if (fails(o)) {
        return;
    }
    emu_memory_open();
    switch (o->kind) {
    case OP_KERNEL:
        o->kernel.launch.arg = o->kernel.arg;
        emu_run(s, &o->kernel.launch);
        break;
    case OP_CALL:
        o->kernel.launch.thread(o->kernel.arg);
        break;
    case OP_COPY:
        memcpy(o->copy.to, o->copy.from, o->copy.bytes);
        break;
    case OP_SET:
        emu_memory_set(o->set.p, o->set.value, o->set.bytes);
        break;
    case OP_RECORD:
        o->event.event->done = o->event.n;
        o->event.event->reached_ns = bt_clock_ns();
        break;
    case OP_GRAPH:
        for (uint32_t i = 0; i < o->graph->n; i++) {
            run_op(s, &o->graph->ops[i]);
        }
        break;
    }
}

static void run_one(cudaStream_t s)
{
    run_op(s, &s->ops[s->taken++ % OPS_MAX]);
}

static void run_to(cudaEvent_t e, uint64_t n)
{
    while (e->done < n) {
        run_one(e->stream);
    }
}

/* Whether a stream captures; what is asked for now ends the capture in an error. */
static bool capturing(void)
{
    cudaStream_t s;
    bool any = false;

    LIST_FOREACH(s, &streams, link)
    {
        if (s->capture != NULL && pthread_equal(s->owner, pthread_self())) {
            s->refused = any = true;
        }
    }
    return any;
}

static void run_all(cudaStream_t s)
{
    counts.n_waits += s->taken < s->put;
    while (s->taken < s->put) {
        run_one(s);
    }
}

static struct op *put_op(cudaStream_t s, enum op_kind kind)
{
    if (s->put - s->taken == OPS_MAX) {
        run_one(s);
    }
    struct op *o = &s->ops[s->put++ % OPS_MAX];
    o->kind = kind;
    return o;
}

/* What computes goes into the stream, or into the graph that it captures. NULL: no room there. */
static struct op *compute_op(cudaStream_t s, enum op_kind kind)
{
    struct emu_graph *g = s->capture;

    if (g == NULL) {
        return put_op(s, kind);
    }
    if (g->n == GRAPH_OPS_MAX) {
        s->refused = true;
        return NULL;
    }
    g->ops[g->n].kind = kind;
    return &g->ops[g->n++];
}

static cudaError_t queue(cudaStream_t s, enum op_kind kind, const struct emu_launch *l,
                         const void *arg, size_t arg_bytes)
{
    pthread_mutex_lock(&mutex);
    if (l->shared_bytes > shared_max()) {
        return leave(cudaErrorInvalidValue);
    }
    struct op *o = compute_op(s, kind);
    if (o != NULL) {
        o->kernel.launch = *l;
        memcpy(o->kernel.arg, arg, arg_bytes);
    }
    counts.n_launches++;
    return leave(cudaSuccess);
}

cudaError_t emu_queue(cudaStream_t s, const struct emu_launch *l, const void *arg, size_t arg_bytes)
{
    return queue(s, OP_KERNEL, l, arg, arg_bytes);
}

/* The work of a library in place of kernels. */
cudaError_t emu_queue_call(cudaStream_t s, void (*call)(void *arg), const void *arg,
                           size_t arg_bytes)
{
    return queue(s, OP_CALL, &(struct emu_launch){.thread = call}, arg, arg_bytes);
}

/* ---- device ---- */

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
    (void)pthread_once(&told_once, read_environment); /* cannot fail with these */
    *p = (struct cudaDeviceProp){.major = 8, .minor = 9, .sharedMemPerBlockOptin = shared_max()};
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
    case cudaErrorNotReady:
        return "device not ready";
    case cudaErrorLaunchFailure:
        return "unspecified launch failure";
    case cudaErrorStreamCaptureUnsupported:
        return "operation not permitted when stream is capturing";
    case cudaErrorInvalidValue:
    default:
        return "invalid argument";
    }
}

const char *cudaGetErrorName(cudaError_t e)
{
    switch (e) {
    case cudaSuccess:
        return "cudaSuccess";
    case cudaErrorMemoryAllocation:
        return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidDevice:
        return "cudaErrorInvalidDevice";
    case cudaErrorNotReady:
        return "cudaErrorNotReady";
    case cudaErrorLaunchFailure:
        return "cudaErrorLaunchFailure";
    case cudaErrorStreamCaptureUnsupported:
        return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorInvalidValue:
    default:
        return "cudaErrorInvalidValue";
    }
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t e = last_error;

    last_error = cudaSuccess;
    return e;
}

/* ---- memory ---- */

cudaError_t cudaMalloc(void **p, size_t bytes)
{
    pthread_mutex_lock(&mutex);
    if (capturing()) {
        return leave(cudaErrorStreamCaptureUnsupported);
    }
    counts.n_allocs++;
    *p = lost ? NULL : emu_memory_alloc(bytes);
    return leave(*p != NULL ? cudaSuccess : cudaErrorMemoryAllocation);
}

/* The device is waited for first, as CUDA's does. */
cudaError_t cudaFree(void *p)
{
    cudaStream_t s;

    if (p == NULL) {
        return cudaSuccess;
    }
    pthread_mutex_lock(&mutex);
    if (capturing()) {
        return leave(cudaErrorStreamCaptureUnsupported);
    }
    counts.n_allocs++;
    LIST_FOREACH(s, &streams, link)
    {
        run_all(s);
    }
    return leave(emu_memory_free(p) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaMallocHost(void **p, size_t bytes)
{
    pthread_mutex_lock(&mutex);
    if (capturing()) {
        return leave(cudaErrorStreamCaptureUnsupported);
    }
    counts.n_allocs++;
    *p = lost ? NULL : emu_pinned_alloc(bytes);
    return leave(*p != NULL ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaFreeHost(void *p)
{
    if (p == NULL) {
        return cudaSuccess;
    }
    pthread_mutex_lock(&mutex);
    if (capturing()) {
        return leave(cudaErrorStreamCaptureUnsupported);
    }
    counts.n_allocs++;
    return leave(emu_pinned_free(p) ? cudaSuccess : cudaErrorInvalidValue);
}

/* Whether p is memory of the side that the copy means. */
static bool is_side(const void *p, size_t bytes, bool device)
{
    return device ? emu_memory_holds(p, bytes) : !emu_memory_is_device(p);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t s)
{
    bool to_device = kind != cudaMemcpyDeviceToHost, from_device = kind != cudaMemcpyHostToDevice;

    pthread_mutex_lock(&mutex);
    if (capturing()) {
        return leave(cudaErrorStreamCaptureUnsupported);
    }
    if (!is_side(to, bytes, to_device) || !is_side(from, bytes, from_device)) {
        return leave(cudaErrorInvalidValue);
    }
    struct op *o = put_op(s, OP_COPY);
    o->copy.to = to;
    o->copy.from = from;
    o->copy.bytes = bytes;
    /* Memory that is not pinned is read, or written, before the call returns. */
    if ((!to_device && !emu_pinned_holds(to, bytes)) ||
        (!from_device && !emu_pinned_holds(from, bytes))) {
        run_all(s);
    }
    return leave(cudaSuccess);
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t s)
{
    pthread_mutex_lock(&mutex);
    if (capturing()) {
        return leave(cudaErrorStreamCaptureUnsupported);
    }
    if (!emu_memory_holds(p, bytes)) {
        return leave(cudaErrorInvalidValue);
    }
    struct op *o = put_op(s, OP_SET);
    o->set.p = p;
    o->set.value = value;
    o->set.bytes = bytes;
    return leave(cudaSuccess);
}

/* ---- streams and events ---- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags)
{
    struct emu_stream *made = bt_calloc(1, sizeof(*made));

    (void)flags;
    *s = NULL;
    if (made == NULL) {
        return cudaErrorMemoryAllocation;
    }
    made->fibers = emu_fibers_create();
    made->ops = bt_calloc(OPS_MAX, sizeof(*made->ops));
    if (made->fibers == NULL || made->ops == NULL) {
        emu_fibers_destroy(made->fibers);
        bt_free(made->ops);
        bt_free(made);
        return cudaErrorMemoryAllocation;
    }
    pthread_mutex_lock(&mutex);
    LIST_INSERT_HEAD(&streams, made, link);
    pthread_mutex_unlock(&mutex);
    *s = made;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority)
{
    (void)priority; /* one thing runs at a time */
    return cudaStreamCreateWithFlags(s, flags);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -1;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    pthread_mutex_lock(&mutex);
    run_all(s);
    LIST_REMOVE(s, link);
    emu_fibers_destroy(s->fibers);
    bt_free(s->ops);
    bt_free(s);
    return leave(cudaSuccess);
}

cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    pthread_mutex_lock(&mutex);
    if (capturing()) {
        return leave(cudaErrorStreamCaptureUnsupported);
    }
    run_all(s);
    return leave(cudaSuccess);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags)
{
    *e = bt_calloc(1, sizeof(**e));
    if (*e == NULL) {
        return cudaErrorMemoryAllocation;
    }
    (*e)->timing = (flags & cudaEventDisableTiming) == 0;
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    pthread_mutex_lock(&mutex);
    run_to(e, e->recorded);
    bt_free(e);
    return leave(cudaSuccess);
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    pthread_mutex_lock(&mutex);
    if (capturing()) {
        return leave(cudaErrorStreamCaptureUnsupported);
    }
    if (e->stream != s) {
        run_to(e, e->recorded); /* of the stream before */
    }
    struct op *o = put_op(s, OP_RECORD);
    o->event.event = e;
    o->event.n = ++e->recorded;
    e->stream = s;
    return leave(cudaSuccess);
}

cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    pthread_mutex_lock(&mutex);
    if (capturing()) {
        return leave(cudaErrorStreamCaptureUnsupported);
    }
    counts.n_waits += e->done < e->recorded;
    run_to(e, e->recorded);
    return leave(cudaSuccess);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    pthread_mutex_lock(&mutex);
    if (!from->timing || !to->timing || from->recorded == 0 || to->recorded == 0) {
        return leave(cudaErrorInvalidValue);
    }
    if (from->done < from->recorded || to->done < to->recorded) {
        return leave(cudaErrorNotReady);
    }
    *ms = (float)(to->reached_ns - from->reached_ns) * 1e-6F;
    return leave(cudaSuccess);
}

cudaError_t cudaEventQuery(cudaEvent_t e)
{
    pthread_mutex_lock(&mutex);
    if (capturing()) {
        return leave(cudaErrorStreamCaptureUnsupported);
    }
    for (unsigned i = 0; i < QUERY_OPS && e->done < e->recorded; i++) {
        run_one(e->stream);
    }
    return leave(e->done < e->recorded ? cudaErrorNotReady : cudaSuccess);
}

/* ---- graphs ---- */

cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode)
{
    struct emu_graph *g = mmap(NULL, 64 + GRAPH_OPS_MAX * sizeof(*g->ops), PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    (void)mode;
    if (g == MAP_FAILED) {
        return cudaErrorMemoryAllocation;
    }
    g->ops = (struct op *)(void *)((unsigned char *)g + 64);
    pthread_mutex_lock(&mutex);
    s->capture = g;
    s->owner = pthread_self();
    s->refused = false;
    counts.n_captures++;
    return leave(cudaSuccess);
}

static void graph_free(struct emu_graph *g)
{
    /* a whole mapping of ours */
    (void)munmap(g, 64 + GRAPH_OPS_MAX * sizeof(*g->ops));
}

cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph)
{
    pthread_mutex_lock(&mutex);
    bool refused = s->refused;
    *graph = refused ? NULL : s->capture;
    if (refused) {
        graph_free(s->capture);
    }
    s->capture = NULL;
    return leave(refused ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
}

/* An executable graph is the graph; who destroys it, lets go of the kernels. */
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags)
{
    (void)flags;
    *exec = graph;
    graph->executable = true;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    if (!graph->executable) {
        graph_free(graph);
    }
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    cudaStream_t s;

    pthread_mutex_lock(&mutex);
    LIST_FOREACH(s, &streams, link)
    {
        run_all(s); /* it may be in one of them */
    }
    graph_free(exec);
    return leave(cudaSuccess);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s)
{
    pthread_mutex_lock(&mutex);
    put_op(s, OP_GRAPH)->graph = exec;
    counts.n_graphs++;
    return leave(cudaSuccess);
}
