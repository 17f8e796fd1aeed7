#ifndef BT_KERNELS_CUDA_API_INT_H
#define BT_KERNELS_CUDA_API_INT_H

/* CUDA's runtime, or the emulation's twin of the part of it that the backend uses. */

#ifdef BT_CUDA_EMULATED
#include "kernels/cuda/emulation/emu_runtime_int.h"
#else
#include <cuda_runtime_api.h>
#endif

#endif
