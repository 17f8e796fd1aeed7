#ifndef BT_FILES_OUT_FILE_H
#define BT_FILES_OUT_FILE_H

/* A file that appears whole or not at all: written beside its place under another name, which it gives up in finish. One
 * thread; blocks on the disk. Errors name the file. */

#include <stddef.h>
#include <stdio.h>
#include "base/status.h"

struct bt_out_file {
    char *path, *temp;
    FILE *f; /* NULL after finish */
};

/* Zeroes *o first: close is legal after an error. */
enum bt_status bt_out_file_open(struct bt_out_file *o, const char *path,
                                struct bt_err *err) BT_NODISCARD;
enum bt_status bt_out_file_write(struct bt_out_file *o, const void *p, size_t n,
                                 struct bt_err *err) BT_NODISCARD;
/* What was written can be read under o->temp. */
enum bt_status bt_out_file_flush(struct bt_out_file *o, struct bt_err *err) BT_NODISCARD;
/* On the disk and in its place. */
enum bt_status bt_out_file_finish(struct bt_out_file *o, struct bt_err *err) BT_NODISCARD;
/* Without finish before: nothing is left. */
void bt_out_file_close(struct bt_out_file *o);

/* A whole small file. */
enum bt_status bt_out_file_put(const char *path, const void *p, size_t n,
                               struct bt_err *err) BT_NODISCARD;

#endif
