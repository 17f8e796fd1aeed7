/* Memory of the emulated device, and pinned memory of the host. Device memory is one stretch of address space that nobody may
 * touch but while the device works: a host that reads or writes it ends with SIGSEGV, a system call with EFAULT. Behind each
 * block lies a page that AddressSanitizer watches. Knows no stream. */

#include "kernels/cuda/emulation/emu_memory_int.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "base/mem.h"

#ifdef EMU_ASAN
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(p, n)   ((void)(p), (void)(n))
#define ASAN_UNPOISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#endif

#define PAGE       ((size_t)4096)
#define BLOCKS_MAX (1U << 16)
#define PINNED_MAX 256U
#define SPACE_MAX  ((size_t)1 << 37)
#define SPACE_MIN  ((size_t)1 << 30)
#define FILL_MAX   ((size_t)64 << 20) /* larger blocks are taken from the system when touched */
#define ZERO_MIN   ((size_t)1 << 20)  /* from here on zeros are made by giving pages back */
#define POISON_MAX ((size_t)16 << 20) /* of a freed block: its shadow costs memory */
#define PATTERN    0xa5

struct range {
    size_t at, bytes; /* at: from the beginning of the space, or an address of the host */
};

static struct {
    uint8_t *space;
    size_t bytes, top; /* top: what is in use ends before */
    bool open;
    struct range *blocks; /* by address */
    uint32_t n_blocks;
    struct range pinned[PINNED_MAX];
    uint32_t n_pinned;
} memory;

static size_t up(size_t n)
{
    return (n + PAGE - 1) / PAGE * PAGE;
}

static void broken(const char *what)
{
    fprintf(stderr, "cuda emulation: %s\n", what);
    abort();
}

static void protect(int how)
{
    if (memory.top > 0 && mprotect(memory.space, memory.top, how) != 0) {
        broken("mprotect of device memory failed");
    }
}

void emu_memory_open(void)
{
    if (!memory.open) {
        protect(PROT_READ | PROT_WRITE);
        memory.open = true;
    }
}

void emu_memory_close(void)
{
    if (memory.open) {
        protect(PROT_NONE);
        memory.open = false;
    }
}

static bool reserve(void)
{
    if (memory.space != NULL) {
        return true;
    }
    memory.blocks = mmap(NULL, BLOCKS_MAX * sizeof(*memory.blocks), PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory.blocks == MAP_FAILED) {
        memory.blocks = NULL;
        return false;
    }
    for (size_t n = SPACE_MAX; n >= SPACE_MIN && memory.space == NULL; n /= 2) {
        void *p = mmap(NULL, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        memory.space = p != MAP_FAILED ? p : NULL;
        memory.bytes = n;
    }
    return memory.space != NULL;
}

/* The first gap of so many bytes; its place among the blocks. */
static bool find_gap(size_t bytes, size_t *at, uint32_t *index)
{
    size_t end = 0;
    uint32_t i = 0;

    for (; i < memory.n_blocks && memory.blocks[i].at - end < bytes; i++) {
        end = memory.blocks[i].at + up(memory.blocks[i].bytes) + PAGE;
    }
    *at = end;
    *index = i;
    return end <= memory.bytes && memory.bytes - end >= bytes;
}

void *emu_memory_alloc(size_t bytes)
{
    size_t all, at;
    uint32_t i;

    if (!bt_add_size(bytes, 2 * PAGE, &all) || !reserve() || memory.n_blocks == BLOCKS_MAX ||
        !find_gap(up(bytes) + PAGE, &at, &i)) {
        return NULL;
    }
    memmove(&memory.blocks[i + 1], &memory.blocks[i],
            (memory.n_blocks - i) * sizeof(*memory.blocks));
    memory.blocks[i] = (struct range){.at = at, .bytes = bytes};
    memory.n_blocks++;
    uint8_t *p = memory.space + at;
    if (at + up(bytes) + PAGE > memory.top) {
        memory.top = at + up(bytes) + PAGE;
        memory.open = false;
    }
    emu_memory_open();
    ASAN_UNPOISON_MEMORY_REGION(p, up(bytes));
    if (bytes < FILL_MAX) {
        memset(p, PATTERN, bytes);
    }
    ASAN_POISON_MEMORY_REGION(p + bytes, up(bytes) + PAGE - bytes);
    emu_memory_close();
    return p;
}

/* The block that begins at p; n_blocks: none. */
static uint32_t block_at(const void *p)
{
    uint32_t i = 0;

    while (i < memory.n_blocks && memory.space + memory.blocks[i].at != (const uint8_t *)p) {
        i++;
    }
    return i;
}

bool emu_memory_free(void *p)
{
    uint32_t i = block_at(p);

    if (i == memory.n_blocks) {
        return false;
    }
    size_t bytes = memory.blocks[i].bytes;
    if (up(bytes) > 0) {
        (void)madvise(p, up(bytes), MADV_DONTNEED); /* a block of ours: only its contents go */
    }
    ASAN_POISON_MEMORY_REGION(p, bytes < POISON_MAX ? bytes : POISON_MAX);
    memory.n_blocks--;
    memmove(&memory.blocks[i], &memory.blocks[i + 1],
            (memory.n_blocks - i) * sizeof(*memory.blocks));
    return true;
}

bool emu_memory_is_device(const void *p)
{
    return memory.space != NULL && (const uint8_t *)p >= memory.space &&
           (const uint8_t *)p < memory.space + memory.bytes;
}

bool emu_memory_holds(const void *p, size_t bytes)
{
    if (!emu_memory_is_device(p)) {
        return false;
    }
    size_t at = (size_t)((const uint8_t *)p - memory.space);
    for (uint32_t i = 0; i < memory.n_blocks; i++) {
        const struct range *b = &memory.blocks[i];
        if (at >= b->at && at - b->at <= b->bytes && bytes <= b->bytes - (at - b->at)) {
            return true;
        }
    }
    return false;
}

void emu_memory_set(void *p, int value, size_t bytes)
{
    uint8_t *at = p;
    size_t head = (PAGE - (uintptr_t)p % PAGE) % PAGE;

    /* A large KV pool costs memory where it is used only. */
    if (value == 0 && bytes >= ZERO_MIN &&
        madvise(at + head, (bytes - head) / PAGE * PAGE, MADV_DONTNEED) == 0) {
        size_t done = head + (bytes - head) / PAGE * PAGE;
        memset(at, 0, head);
        memset(at + done, 0, bytes - done);
        return;
    }
    memset(p, value, bytes);
}

void *emu_pinned_alloc(size_t bytes)
{
    void *p = memory.n_pinned < PINNED_MAX ? bt_alloc_aligned(PAGE, up(bytes)) : NULL;

    if (p != NULL) {
        memset(p, PATTERN, bytes < FILL_MAX ? bytes : 0);
        memory.pinned[memory.n_pinned++] = (struct range){.at = (uintptr_t)p, .bytes = bytes};
    }
    return p;
}

bool emu_pinned_free(void *p)
{
    for (uint32_t i = 0; i < memory.n_pinned; i++) {
        if (memory.pinned[i].at == (uintptr_t)p) {
            memory.pinned[i] = memory.pinned[--memory.n_pinned];
            bt_free(p);
            return true;
        }
    }
    return false;
}

bool emu_pinned_holds(const void *p, size_t bytes)
{
    for (uint32_t i = 0; i < memory.n_pinned; i++) {
        size_t at = (uintptr_t)p - memory.pinned[i].at;
        if ((uintptr_t)p >= memory.pinned[i].at && at <= memory.pinned[i].bytes &&
            bytes <= memory.pinned[i].bytes - at) {
            return true;
        }
    }
    return false;
}
