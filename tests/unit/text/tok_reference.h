#ifndef BT_TESTS_TOK_REFERENCE_H
#define BT_TESTS_TOK_REFERENCE_H

/* Compares a tokenizer with a reference file: {"special_prefix_ids", "special_suffix_ids", "cases":
 * [{"name", "ids", "ids_specials_as_text"?, "decoded"?, "decoded_skip_special"?, "stream"?}]};
 * texts stand in a corpus
 * [{"name", "text"}]. Absent fields: the same as the one before, as the text for `decoded`. */

#include "files/json_tape.h"
#include "text/tokenizer.h"

/* A JSON file, .gz through gzip(1); NULL when it is not there. Caller destroys. */
struct bt_tape *tok_ref_read(const char *path);
/* Counts failures in bt_test_failures style: returns the number of failed cases, prints each. */
int tok_ref_check(const char *label, const struct bt_tokenizer *t, const struct bt_tape *ref,
                  const struct bt_tape *corpus);

#endif
