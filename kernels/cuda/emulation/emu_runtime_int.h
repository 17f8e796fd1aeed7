#ifndef BT_KERNELS_EMU_RUNTIME_INT_H
#define BT_KERNELS_EMU_RUNTIME_INT_H

/* The part of CUDA's runtime that the backend uses, on this machine's memory and CPU: one device, whose memory the host cannot
 * touch, and whose streams do nothing before they are waited for. Names, order of arguments and meaning are CUDA's. */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cudaError {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidDevice = 101,
    cudaErrorNotReady = 600,
    cudaErrorLaunchFailure = 719,
    cudaErrorStreamCaptureUnsupported = 900,
} cudaError_t;

typedef struct emu_stream *cudaStream_t;
typedef struct emu_event *cudaEvent_t;
typedef struct emu_graph *cudaGraph_t;
typedef struct emu_graph *cudaGraphExec_t;

enum cudaMemcpyKind {
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3,
};

struct cudaDeviceProp {
    char name[256];
    int major, minor;
    size_t sharedMemPerBlockOptin;
};

enum { cudaStreamNonBlocking = 1, cudaEventDefault = 0, cudaEventDisableTiming = 2 };

cudaError_t cudaGetDeviceCount(int *n);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device);
const char *cudaGetErrorString(cudaError_t e);
const char *cudaGetErrorName(cudaError_t e);
cudaError_t cudaGetLastError(void);

/* Memory is filled with a pattern: nobody may count on zeros. */
cudaError_t cudaMalloc(void **p, size_t bytes);
cudaError_t cudaFree(void *p);
cudaError_t cudaMallocHost(void **p, size_t bytes);
cudaError_t cudaFreeHost(void *p);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t s);
cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t s);

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority);
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest);
cudaError_t cudaStreamDestroy(cudaStream_t s);
cudaError_t cudaStreamSynchronize(cudaStream_t s);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t e);
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s);
cudaError_t cudaEventSynchronize(cudaEvent_t e);
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to); /* of this machine */
cudaError_t cudaEventQuery(cudaEvent_t e); /* does a little of what is in the event's stream */

/* What is put into a capturing stream goes into a graph: kernels; all else that needs the device is refused meanwhile. */
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal = 1 };
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph,
                                 unsigned long long flags);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s);

/* What tests make of the device. Of a program: by BT_EMU_DEVICE, "shared=BYTES" or "fault-file=PATH": the first kernel or copy fails
 * that finds such a file there. */
struct emu_device {
    size_t
        shared_max; /* bytes that a block may ask for; 0: those of sm_86 and sm_89, the least of what is supported */
    /* The kernel or copy after so many fails, as one that touches memory which is not its own does on a device: nothing is done
     * from then on, and every call says so. 0: never. */
    uint64_t fault_after;
};
void emu_device_set(const struct emu_device *d); /* the device is whole again */

/* What tests ask: since the start, of the process. */
struct emu_counts {
    uint64_t n_allocs;             /* calls that take or free memory, pinned or the device's */
    uint64_t n_waits;              /* calls that had to wait for the device */
    uint64_t n_launches;           /* kernels put into streams */
    uint64_t n_captures, n_graphs; /* graphs captured, and put into streams */
    uint64_t n_queued;             /* in all streams now: begun, and not waited for */
};
struct emu_counts emu_counts(void);

#ifdef __cplusplus
}
#endif

#endif
