#ifndef BT_KERNELS_EMU_MEMORY_INT_H
#define BT_KERNELS_EMU_MEMORY_INT_H

/* The emulated device's memory. Callers take care that one thread at a time is in here (emu_runtime.c's mutex). */

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Between these the memory can be touched; by everybody, so that the device opens it for its own work only. */
void emu_memory_open(void);
void emu_memory_close(void);

/* Filled with a pattern, as nobody may count on zeros. NULL: no room. */
void *emu_memory_alloc(size_t bytes);
bool emu_memory_free(void *p);            /* false: no block begins there */
bool emu_memory_is_device(const void *p); /* an address of the device, of a block or not */
bool emu_memory_holds(const void *p, size_t bytes);    /* all of it in one block */
void emu_memory_set(void *p, int value, size_t bytes); /* while open */

void *emu_pinned_alloc(size_t bytes);
bool emu_pinned_free(void *p);
bool emu_pinned_holds(const void *p, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
