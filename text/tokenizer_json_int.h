#ifndef BT_TEXT_TOKENIZER_JSON_INT_H
#define BT_TEXT_TOKENIZER_JSON_INT_H

/* What the readers of tokenizer.json components share. `path` is always the JSON path of `node`.
 * Every function that returns a status other than BT_OK has filled err. */

#include "text/tokenizer_int.h"

struct bt_tape_node;

#define BT_TOK_PATH_BYTES 256 /* a longer path is cut, which is no harm in a message */
#define BT_TOK_STEPS_MAX  64  /* elements of a sequence */
#define BT_TOK_NEST_MAX   8

bool bt_tok_json_absent(const struct bt_tape_node *n); /* missing or null */
enum bt_status bt_tok_json_nomem(struct bt_err *err);
enum bt_status bt_tok_json_bad(struct bt_err *err, const char *path, const char *key,
                               const char *want);
enum bt_status bt_tok_json_unsupported(struct bt_err *err, const char *path, const char *type);
enum bt_status bt_tok_json_type(const struct bt_tape_node *node, const char *path,
                                const char **type, struct bt_err *err);
enum bt_status bt_tok_json_str(const struct bt_tape_node *node, const char *path, const char *key,
                               const struct bt_tape_node **out, struct bt_err *err);
/* Gives each element of a Sequence's list to read, with its own path. */
typedef enum bt_status bt_tok_json_fn(struct bt_tokenizer *t, const struct bt_tape_node *node,
                                      const char *path, unsigned depth, struct bt_err *err);
enum bt_status bt_tok_json_each(struct bt_tokenizer *t, const struct bt_tape_node *node,
                                const char *path, const char *key, unsigned depth,
                                bt_tok_json_fn *read, struct bt_err *err);
/* The types that are normalizers or pre-tokenizers and decoders: Replace, Metaspace. */
enum bt_status bt_tok_json_replace(const struct bt_tape_node *node, const char *path,
                                   struct bt_tok_norm *n, struct bt_err *err);
enum bt_status bt_tok_json_meta(const struct bt_tape_node *node, const char *path,
                                const struct bt_tape_node **replacement,
                                enum bt_tok_prepend *prepend, struct bt_err *err);

#endif
