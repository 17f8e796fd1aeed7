#ifndef BT_FILES_MAP_H
#define BT_FILES_MAP_H

/* A regular file mapped read-only. The file must not shrink while mapped (the process would get
 * SIGBUS): model files are replaced by renaming, never rewritten. Any thread. */

#include <stddef.h>
#include <stdint.h>
#include "base/status.h"

struct bt_file_map {
    const uint8_t *data; /* page aligned */
    size_t bytes;
};

/* Maps the whole file; files shorter than min_bytes are BT_ERR_INVALID. BT_ERR_NOT_FOUND, BT_ERR_IO
 * otherwise. */
enum bt_status bt_file_map_open(struct bt_file_map *m, const char *path, size_t min_bytes,
                                struct bt_err *err) BT_NODISCARD;
/* [p, p + bytes) of a mapping will not be read again soon: its whole pages leave this process's resident memory. Reading
 * them stays legal. */
void bt_file_map_forget(const void *p, size_t bytes);
/* Legal on a zeroed map. */
void bt_file_map_close(struct bt_file_map *m);

#endif
