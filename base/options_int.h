#ifndef BT_BASE_OPTIONS_INT_H
#define BT_BASE_OPTIONS_INT_H

/* What options.c (sources and precedence), option_values.c (text to value and back) and
 * option_help.c share. */

#include "base/buf.h"
#include "base/options.h"

/* Checks text against type and range and stores it at base + opt->offset. add: LIST values join
 * what is there, otherwise strings are replaced. where: names the option as the user wrote it,
 * begins the message. */
enum bt_status bt_opt_store(const struct bt_opt *opt, void *base, const char *text, bool add,
                            const char *where, struct bt_err *err) BT_NODISCARD;
/* Writes the value as text that bt_opt_store takes back. false: a string that is not set. */
bool bt_opt_format(const struct bt_opt *opt, const void *base, struct bt_buf *out);

void bt_opt_env_name(const char *name, char *out, size_t cap); /* "a-b" -> "BATON_A_B" */

/* The whole --help text. common: the options that every program has. columns: 80..100. */
void bt_opt_help(const struct bt_prog *prog, const struct bt_opt *common, size_t n_common,
                 unsigned columns, struct bt_buf *out);

#endif
