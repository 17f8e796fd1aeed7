#ifndef BT_TEXT_TOKENIZER_EXPORT_H
#define BT_TEXT_TOKENIZER_EXPORT_H

/* The tokenizer and chat template of a Hugging Face directory as keys of a GGUF file, and back. Loading blocks on file reads. */

#include "files/gguf_write.h"
#include "text/tokenizer.h"

struct bt_tok_export_opts {
    uint32_t
        vocab; /* rows of the embedding table: there are as many tokens, made up where the tokenizer has none */
    bool has_bos, has_eos; /* the ids are in the file already */
};

/* Adds tokenizer.ggml.* and tokenizer.chat_template. GGUF names a pre-tokenizer where tokenizer.json describes one: the
 * known names are tried, and one is taken whose tokenizer gives the same ids for probing texts. BT_ERR_UNSUPPORTED when
 * none does; otherwise as bt_tokenizer_load. */
enum bt_status bt_tokenizer_export_gguf(const char *dir, const struct bt_tok_export_opts *opts,
                                        struct bt_gguf_writer *w, struct bt_err *err) BT_NODISCARD;

/* The other way: tokenizer.json and tokenizer_config.json (with the chat template) of an open GGUF file, appended to the
 * buffers. Byte-level vocabularies only; others are BT_ERR_UNSUPPORTED. */
enum bt_status bt_tokenizer_export_hf(const struct bt_gguf *file, struct bt_buf *json,
                                      struct bt_buf *config, struct bt_err *err) BT_NODISCARD;

#endif
