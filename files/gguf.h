#ifndef BT_FILES_GGUF_H
#define BT_FILES_GGUF_H

/* GGUF model files, versions 2 and 3, little-endian, one file (not split). Mapped, not read.
 * Opening checks the whole header: counts, string and array lengths, value types, duplicate keys
 * and names, tensor shapes, alignment and bounds of the data. Errors name file, key or tensor, and
 * byte. Any thread; read-only after opening. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/status.h"
#include "files/tensor.h"

struct bt_gguf;

enum bt_gguf_type { /* values as in the file */
                    BT_GGUF_U8 = 0,
                    BT_GGUF_I8 = 1,
                    BT_GGUF_U16 = 2,
                    BT_GGUF_I16 = 3,
                    BT_GGUF_U32 = 4,
                    BT_GGUF_I32 = 5,
                    BT_GGUF_F32 = 6,
                    BT_GGUF_BOOL = 7,
                    BT_GGUF_STRING = 8,
                    BT_GGUF_ARRAY = 9,
                    BT_GGUF_U64 = 10,
                    BT_GGUF_I64 = 11,
                    BT_GGUF_F64 = 12,
};

/* Views into the mapping; valid until bt_gguf_close. */
struct bt_gguf_value {
    const char *key; /* NUL-terminated */
    enum bt_gguf_type type;
    enum bt_gguf_type elem_type; /* arrays only */
    uint64_t count;              /* elements; 1 unless an array */
    const uint8_t *data;         /* first element, unaligned, as the file encodes it */
    size_t bytes;                /* of all elements */
};

enum bt_status bt_gguf_open(const char *path, struct bt_gguf **out,
                            struct bt_err *err) BT_NODISCARD;
void bt_gguf_close(struct bt_gguf *g);
const char *bt_gguf_path(const struct bt_gguf *g);

size_t bt_gguf_value_count(const struct bt_gguf *g);
const struct bt_gguf_value *bt_gguf_value_at(const struct bt_gguf *g, size_t i); /* in file order */
/* NULL: no such key. */
const struct bt_gguf_value *bt_gguf_find(const struct bt_gguf *g, const char *key);

/* Typed getters. BT_ERR_NOT_FOUND when the key is absent, BT_ERR_INVALID when its type does not
 * convert without loss; both fill err and leave *out alone. u64: any integer type, not negative.
 * f64: float or integer types. */
enum bt_status bt_gguf_get_u64(const struct bt_gguf *g, const char *key, uint64_t *out,
                               struct bt_err *err) BT_NODISCARD;
enum bt_status bt_gguf_get_f64(const struct bt_gguf *g, const char *key, double *out,
                               struct bt_err *err) BT_NODISCARD;
enum bt_status bt_gguf_get_bool(const struct bt_gguf *g, const char *key, bool *out,
                                struct bt_err *err) BT_NODISCARD;
/* *s is not NUL-terminated and may hold any bytes. */
enum bt_status bt_gguf_get_str(const struct bt_gguf *g, const char *key, const char **s, size_t *n,
                               struct bt_err *err) BT_NODISCARD;

/* Walks an array without copying. Each next returns false at the end, and only then: opening
 * checked the lengths. */
struct bt_gguf_iter {
    const uint8_t *next;
    uint64_t left;
    enum bt_gguf_type elem_type;
};
/* Statuses as above; a value that is no array, or whose elements are not strings / not numbers or
 * bools, is invalid. */
enum bt_status bt_gguf_iter_strings(const struct bt_gguf *g, const char *key,
                                    struct bt_gguf_iter *it, struct bt_err *err) BT_NODISCARD;
enum bt_status bt_gguf_iter_numbers(const struct bt_gguf *g, const char *key,
                                    struct bt_gguf_iter *it, struct bt_err *err) BT_NODISCARD;
bool bt_gguf_next_str(struct bt_gguf_iter *it, const char **s, size_t *n);
bool bt_gguf_next_f64(struct bt_gguf_iter *it, double *out); /* exact up to 2^53 */

/* After a file of model directory dir was not found: adds to the message which .gguf file lies there, since that one
 * would have to be given itself. Nothing is added where there is none. */
void bt_gguf_hint(const char *dir, struct bt_err *err);

size_t bt_gguf_tensor_count(const struct bt_gguf *g);
const struct bt_tensor *bt_gguf_tensor_at(const struct bt_gguf *g, size_t i);
const struct bt_tensor *bt_gguf_tensor_find(const struct bt_gguf *g,
                                            const char *name); /* NULL: no such tensor */

#endif
