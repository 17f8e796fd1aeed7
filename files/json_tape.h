#ifndef BT_FILES_JSON_TAPE_H
#define BT_FILES_JSON_TAPE_H

/* JSON documents of tens of megabytes (vocabularies), parsed in place into a flat tape: 16 bytes a
 * value, no hash tables. For small documents that are looked up by key, files/json_file.h is the
 * friendlier one. RFC 8259 exactly: valid UTF-8, no lone surrogates, nothing after the value.
 * Strings may contain U+0000. Duplicate keys are kept; bt_tape_get finds the first. A tape is
 * read-only after parsing: any number of threads. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/status.h"

enum bt_tape_type {
    BT_TAPE_NULL,
    BT_TAPE_FALSE,
    BT_TAPE_TRUE,
    BT_TAPE_NUMBER, /* its text */
    BT_TAPE_STRING, /* unescaped, NUL-terminated */
    BT_TAPE_ARRAY,
    BT_TAPE_OBJECT,
};

/* One value. Children follow their container directly; in an object each key (a string) stands
 * before its value. */
struct bt_tape_node {
    const char *s;     /* strings and numbers: the text */
    uint32_t len : 29; /* strings and numbers: bytes; containers: children (pairs for objects) */
    uint32_t type : 3;
    uint32_t span; /* nodes of this value, itself included: the next sibling is node + span */
};

struct bt_tape;

/* Reads and parses a file of at most max_bytes (and below 512 MiB). BT_ERR_NOT_FOUND, BT_ERR_IO,
 * BT_ERR_INVALID (size, syntax: the message names the byte), BT_ERR_NOMEM. */
enum bt_status bt_tape_read(const char *path, size_t max_bytes, struct bt_tape **out,
                            struct bt_err *err) BT_NODISCARD;
/* The same from memory, which is copied; name stands for the file in errors. */
enum bt_status bt_tape_parse(const char *name, const char *text, size_t n, struct bt_tape **out,
                             struct bt_err *err) BT_NODISCARD;
void bt_tape_destroy(struct bt_tape *t);

/* Nodes and strings live until destroy. */
const struct bt_tape_node *bt_tape_root(const struct bt_tape *t);
/* The value of a key; NULL when obj is NULL, no object, or has no such key. Linear in the keys. */
const struct bt_tape_node *bt_tape_get(const struct bt_tape_node *obj, const char *key);
bool bt_tape_is(const struct bt_tape_node *n, enum bt_tape_type type); /* NULL: false */
bool bt_tape_str_eq(const struct bt_tape_node *n, const char *s);      /* false unless a string */
/* A number without fraction or exponent in 0 .. UINT32_MAX. */
bool bt_tape_u32(const struct bt_tape_node *n, uint32_t *out);

#endif
