#ifndef BT_FILES_HF_CONFIG_H
#define BT_FILES_HF_CONFIG_H

/* config.json and generation_config.json of a Hugging Face model directory. Keys are paths: "a.b"
 * is key b of object a. A key that is absent and one that is null are the same: not set.
 *
 * Getters of a required value (no default) and of a value with a wrong type or range return the
 * default (or 0) and note the first such error, which names file and key; bt_hf_status reports it,
 * so that a reader fetches everything and asks once. One thread. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/status.h"

struct bt_hf;

/* dir/config.json is required, dir/generation_config.json is not. */
enum bt_status bt_hf_open(const char *dir, struct bt_hf **out, struct bt_err *err) BT_NODISCARD;
/* The same from one text in memory, named name in errors. */
enum bt_status bt_hf_open_text(const char *name, const char *text, size_t n, struct bt_hf **out,
                               struct bt_err *err) BT_NODISCARD;
void bt_hf_close(struct bt_hf *c);
const char *bt_hf_path(const struct bt_hf *c); /* of config.json, for messages */

/* BT_OK, or the first error that a getter noted. */
enum bt_status bt_hf_status(const struct bt_hf *c, struct bt_err *err) BT_NODISCARD;
/* Notes an error of the reader's own about key ("path/config.json: key: …"), unless there is one
 * already. */
void bt_hf_fail(struct bt_hf *c, enum bt_status st, const char *key, const char *fmt, ...)
    BT_PRINTF(4, 5);

bool bt_hf_has(const struct bt_hf *c, const char *key);
bool bt_hf_is_object(const struct bt_hf *c, const char *key);
/* The key is there and null: for the few fields whose default is not null. */
bool bt_hf_is_null(const struct bt_hf *c, const char *key);

/* The key is not set, or set to something that says nothing: false, 0, "", [] or {}. */
bool bt_hf_is_empty(const struct bt_hf *c, const char *key);

/* Integers and integral reals. */
int64_t bt_hf_int(struct bt_hf *c, const char *key, int64_t min, int64_t max, int64_t def);
int64_t bt_hf_require_int(struct bt_hf *c, const char *key, int64_t min, int64_t max);
/* Finite numbers. */
double bt_hf_real(struct bt_hf *c, const char *key, double def);
double bt_hf_require_real(struct bt_hf *c, const char *key);
bool bt_hf_bool(struct bt_hf *c, const char *key, bool def);
/* Owned by c. def may be NULL. */
const char *bt_hf_str(struct bt_hf *c, const char *key, const char *def);

/* Arrays. size: -1 when not set; a value that is no array is noted and counts as not set. */
int64_t bt_hf_array_size(struct bt_hf *c, const char *key);
const char *bt_hf_array_str(struct bt_hf *c, const char *key, size_t i);
int64_t bt_hf_array_int(struct bt_hf *c, const char *key, size_t i, int64_t min, int64_t max);

/* A token id or list of ids: from generation_config.json when set there, else from config.json.
 * Returns how many were written to ids; more than max, or an id outside 0 … 2^31-1, is noted. */
size_t bt_hf_token_ids(struct bt_hf *c, const char *key, uint32_t *ids, size_t max);

#endif
