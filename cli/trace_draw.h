#ifndef BT_CLI_TRACE_DRAW_H
#define BT_CLI_TRACE_DRAW_H

#include <stddef.h>
#include "base/buf.h"
#include "base/status.h"

/* Draws one line of the request log as a timeline: a row for each phase of each attempt of each sequence, with bars on
 * one time axis, in lines of at most `width` columns (40 or more). line: n bytes of JSON. BT_ERR_INVALID: not such a
 * line. */
enum bt_status bt_trace_draw(const char *line, size_t n, int width, struct bt_buf *out,
                             struct bt_err *err) BT_NODISCARD;

#endif
