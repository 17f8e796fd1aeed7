#ifndef BT_CLI_QUANTIZE_INT_H
#define BT_CLI_QUANTIZE_INT_H

/* What the files of baton quantize share. */

#include <stdbool.h>
#include <stdint.h>
#include "base/dtype.h"
#include "base/status.h"

struct bt_cli_progress {
    bool terminal;
    int shown; /* percent; -1: none yet */
};
/* arg: a bt_cli_progress. */
void bt_cli_show(void *arg, double fraction);

/* quantize_folder.c: writes model as a Hugging Face directory with weights of type t, and says so. */
enum bt_status bt_cli_quantize_folder(const char *model, const char *folder, enum bt_dtype t,
                                      uint32_t threads, struct bt_err *err) BT_NODISCARD;

#endif
