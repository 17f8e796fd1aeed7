#ifndef BT_TEXT_TEMPLATE_H
#define BT_TEXT_TEMPLATE_H

/* Chat templates: the part of the Jinja language that published chat templates use, with the
 * behaviour of the sandboxed, immutable environment they are written for (trim_blocks,
 * lstrip_blocks, loop controls, `tojson` without HTML escapes, `raise_exception`, `strftime_now`,
 * `generation` blocks printed like plain text). Statements: for (else, if, recursive,
 * unpacking, break, continue), if, set, macro, call, filter, with, raw, generation; not include,
 * import, extends, block, trans.
 *
 * A template is compiled once and immutable afterwards: any thread may render it, any number at a
 * time. Rendering takes milliseconds at most for ordinary prompts, but is bounded only by the
 * limits below: long ones belong off the loop.
 *
 * Limits, all errors and never a crash: template text, nesting, steps executed, memory and output
 * (these two grow with the input), depth of values. Integers are 64 bits; a result outside them is
 * an error. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"
#include "base/status.h"

#define BT_TEMPLATE_BYTES_MAX (512u * 1024u) /* template text */
#define BT_TEMPLATE_STEPS_MAX                                                                      \
    20000000u /* expressions and statements evaluated by one render, long strings count more */
#define BT_TEMPLATE_DEPTH_MAX                                                                      \
    200u /* nested expressions and statements; nested values; nested macro calls */

struct bt_template;

/* Compiles n bytes of template text (UTF-8, copied). BT_ERR_INVALID: syntax; BT_ERR_UNSUPPORTED: a
 * statement, filter or test that does not exist here; err names line and column. BT_ERR_NOMEM. */
enum bt_status bt_template_compile(const char *src, size_t n, struct bt_template **out,
                                   struct bt_err *err) BT_NODISCARD;
void bt_template_destroy(struct bt_template *t);

struct bt_chat_msg {
    const char *role; /* UTF-8, not NUL-terminated */
    size_t role_len;
    const char *content;
    size_t content_len;
};

struct bt_template_inputs {
    const struct bt_chat_msg *messages;
    size_t n_messages;
    bool add_generation_prompt;
    const char *bos_token; /* NUL-terminated; NULL: not defined in the template */
    const char *eos_token;
    const char *extra_json; /* a JSON object whose members become variables, replacing the ones
                               above; NULL: none */
    size_t extra_json_len;
    int64_t now_unix; /* seconds; what strftime_now prints, in UTC */
};

/* Appends the text to out; on error out is as it was. BT_ERR_INVALID when the template raises (its
 * own message, as written, ends err->msg), meets a value it cannot handle, or exceeds a limit; also
 * for input that is not UTF-8 or JSON. `tools` and `documents` are none unless extra_json has them.
 * Everything is borrowed for the call. */
enum bt_status bt_template_render(const struct bt_template *t, const struct bt_template_inputs *in,
                                  struct bt_buf *out, struct bt_err *err) BT_NODISCARD;

/* The same with all variables (messages too) as members of one JSON object; nothing is defined
 * beyond them. */
enum bt_status bt_template_render_json(const struct bt_template *t, const char *json, size_t n,
                                       int64_t now_unix, struct bt_buf *out,
                                       struct bt_err *err) BT_NODISCARD;

/* What a model brings: its template and the special tokens that templates print. */
struct bt_template_files {
    struct bt_template *tmpl; /* NULL: the model has no chat template */
    char *source;             /* its text */
    char *bos_token;          /* NULL: none */
    char *eos_token;
};

/* Reads them for a model: a directory (chat_template.jinja, chat_template.json, or `chat_template`
 * in tokenizer_config.json, in this order; a list of named ones: "default"; special tokens from
 * tokenizer_config.json), or a .gguf file (tokenizer.chat_template). A directory without any of
 * these is not an error. Errors name the file. Blocks on file reads. The caller ends with
 * bt_template_files_fini, legal on a zeroed struct. */
enum bt_status bt_template_load(const char *model, struct bt_template_files *out,
                                struct bt_err *err) BT_NODISCARD;
void bt_template_files_fini(struct bt_template_files *f);

#endif
