#ifndef BT_TESTS_GGUF_WRITER_H
#define BT_TESTS_GGUF_WRITER_H

/* Writes GGUF bytes into one static buffer, right or wrong as the test wants. Call order: gw_begin,
 * the keys, the tensors, gw_align, the data, gw_save. */

#include "files/gguf.h"
#include "tests/tempfile.h"

static uint8_t gw_buf[1 << 20];
static size_t gw_len;

/* The low n bytes of v, zeroes above the eighth. */
static inline void gw_put(uint64_t v, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        gw_buf[gw_len++] = (uint8_t)(i < 8 ? v >> (8 * i) : 0);
    }
}

static inline void gw_bytes(const void *p, size_t n)
{
    memcpy(gw_buf + gw_len, p, n);
    gw_len += n;
}

static inline void gw_str(const char *s)
{
    gw_put(strlen(s), 8);
    gw_bytes(s, strlen(s));
}

static inline void gw_begin(uint64_t n_tensors, uint64_t n_keys)
{
    gw_len = 0;
    gw_bytes("GGUF", 4);
    gw_put(3, 4);
    gw_put(n_tensors, 8);
    gw_put(n_keys, 8);
}

/* A key; its value follows. */
static inline void gw_key(const char *name, uint32_t type)
{
    gw_str(name);
    gw_put(type, 4);
}

static inline void gw_key_u32(const char *name, uint32_t v)
{
    gw_key(name, BT_GGUF_U32);
    gw_put(v, 4);
}

static inline void gw_key_f32(const char *name, float v)
{
    gw_key(name, BT_GGUF_F32);
    gw_bytes(&v, 4);
}

static inline void gw_key_str(const char *name, const char *v)
{
    gw_key(name, BT_GGUF_STRING);
    gw_str(v);
}

/* d0: the contiguous dimension; d1 = 0: a vector. */
static inline void gw_tensor(const char *name, uint32_t type, uint64_t d0, uint64_t d1,
                             uint64_t offset)
{
    gw_str(name);
    gw_put(d1 == 0 ? 1 : 2, 4);
    gw_put(d0, 8);
    if (d1 != 0) {
        gw_put(d1, 8);
    }
    gw_put(type, 4);
    gw_put(offset, 8);
}

static inline void gw_align(size_t align)
{
    while (gw_len % align != 0) {
        gw_buf[gw_len++] = 0;
    }
}

/* n bytes of data 0, 1, 2, … */
static inline void gw_count(size_t n)
{
    for (size_t i = 0; i < n; i++) {
        gw_put(i & 0xff, 1);
    }
}

static inline const char *gw_save(const char *name)
{
    return bt_temp_write(name, gw_buf, gw_len);
}

#endif
