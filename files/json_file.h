#ifndef BT_FILES_JSON_FILE_H
#define BT_FILES_JSON_FILE_H

/* JSON documents from files and memory, with a size limit and errors that name file and byte.
 * The result is a jansson value: a .c file that reads it includes <jansson.h> itself and drops it
 * with json_decref. Duplicate keys in an object are errors; strings may contain U+0000. A document
 * in which some integer does not fit 64 bits is read with all its integers as reals (tokenizer
 * files carry a limit of 1e30), so readers of numbers accept integral reals. Any thread. */

#include <stddef.h>
#include "base/status.h"

struct json_t;

/* Reads the whole file, at most max_bytes. BT_ERR_NOT_FOUND when it does not exist, BT_ERR_IO,
 * BT_ERR_INVALID (too long, not JSON), BT_ERR_NOMEM. */
enum bt_status bt_json_file_read(const char *path, size_t max_bytes, struct json_t **out,
                                 struct bt_err *err) BT_NODISCARD;

/* Parses n bytes of text; name stands for the file in errors. text need not be NUL-terminated. */
enum bt_status bt_json_parse(const char *name, const char *text, size_t n, struct json_t **out,
                             struct bt_err *err) BT_NODISCARD;

#endif
