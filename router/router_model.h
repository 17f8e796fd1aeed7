#ifndef BT_ROUTER_ROUTER_MODEL_H
#define BT_ROUTER_ROUTER_MODEL_H

/* What the router needs of a model: its tokenizer and chat template. Blocks on file reads. */

#include "base/status.h"
#include "text/template.h"
#include "text/tokenizer.h"

struct bt_router_model {
    struct bt_tokenizer *tok;
    struct bt_template_files tmpl;
    char *name; /* base name of the path, without .gguf */
};

/* path: a model directory, a directory with only tokenizer.json, a tokenizer.json, or a .gguf file. A chat template that
 * does not compile is a warning: only chats are refused then. err names the file. */
enum bt_status bt_router_model_load(const char *path, struct bt_router_model *out,
                                    struct bt_err *err) BT_NODISCARD;
void bt_router_model_fini(struct bt_router_model *m);

#endif
