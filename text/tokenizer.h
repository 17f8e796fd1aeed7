#ifndef BT_TEXT_TOKENIZER_H
#define BT_TEXT_TOKENIZER_H

/* Text to token ids and back. A tokenizer comes from a Hugging Face tokenizer.json or from GGUF
 * metadata and gives the ids of the reference implementations (the `tokenizers` library;
 * SentencePiece as GGUF readers apply it). Covered: byte-level BPE and SentencePiece-style BPE with
 * byte fallback; what is not covered is refused on loading, with the JSON path in the message,
 * never approximated. Immutable after creation: any number of threads may use one tokenizer at
 * once. Nothing here blocks except loading. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"
#include "base/status.h"

#define BT_TOK_NONE           UINT32_MAX          /* no such token */
#define BT_TOK_FILE_BYTES_MAX ((size_t)256 << 20) /* tokenizer.json */
#define BT_TOK_TEXT_BYTES_MAX ((size_t)64 << 20)  /* one text to encode */
#define BT_TOK_IDS_MAX        (UINT32_C(1) << 24) /* token ids are below this */

struct bt_tokenizer;

/* A growable list of ids. Zero-initialised is empty and valid. One thread. */
struct bt_ids {
    uint32_t *v;
    size_t len;
    size_t cap;
};
enum bt_status bt_ids_add(struct bt_ids *ids,
                          uint32_t id) BT_NODISCARD; /* BT_ERR_NOMEM leaves it as it was */
void bt_ids_clear(struct bt_ids *ids);               /* keeps the memory */
void bt_ids_fini(struct bt_ids *ids);

/* path: a tokenizer.json, or a directory that holds one. A directory's tokenizer_config.json, where
 * there is one, adds BOS, EOS, UNK and PAD ids and, for the classes that obey it, add_bos_token /
 * add_eos_token. Tens of megabytes are read in a fraction of a second. BT_ERR_NOT_FOUND,
 * BT_ERR_INVALID, BT_ERR_UNSUPPORTED, BT_ERR_IO, BT_ERR_NOMEM. */
enum bt_status bt_tokenizer_load(const char *path, struct bt_tokenizer **out,
                                 struct bt_err *err) BT_NODISCARD;
/* The same from the text of a tokenizer.json; name stands for the file in errors. */
enum bt_status bt_tokenizer_from_json(const char *name, const char *text, size_t n,
                                      struct bt_tokenizer **out, struct bt_err *err) BT_NODISCARD;
void bt_tokenizer_destroy(struct bt_tokenizer *t);

/* Token kinds as GGUF files number them (tokenizer.ggml.token_type). */
enum bt_tok_gguf_type {
    BT_TOK_GGUF_NORMAL = 1,
    BT_TOK_GGUF_UNKNOWN = 2,
    BT_TOK_GGUF_CONTROL = 3,
    BT_TOK_GGUF_USER = 4,
    BT_TOK_GGUF_UNUSED = 5,
    BT_TOK_GGUF_BYTE = 6,
};

struct bt_tok_str {
    const char *s; /* not NUL-terminated */
    size_t len;
};

/* The tokenizer part of a GGUF file, borrowed for the call. */
struct bt_tok_gguf {
    const char *model; /* tokenizer.ggml.model: "gpt2" (byte-level BPE) or "llama" (SentencePiece
                          BPE by scores) */
    const char *pre;   /* tokenizer.ggml.pre, "gpt2" only; NULL: "default" */
    const struct bt_tok_str *tokens; /* [n_tokens], the index is the id */
    const float *scores;             /* [n_tokens]; "llama" needs them, else NULL */
    const int32_t *types;            /* [n_tokens] enum bt_tok_gguf_type; NULL: all normal */
    size_t n_tokens;
    const struct bt_tok_str *merges; /* [n_merges] "left right"; "gpt2" needs them */
    size_t n_merges;
    uint32_t bos, eos, unk, pad; /* BT_TOK_NONE: absent */
    bool add_bos, add_eos;       /* what BT_TOK_ADD_SPECIAL adds */
    bool add_space_prefix;       /* "llama": a space before the text */
};
/* name stands for the file in errors. Statuses as bt_tokenizer_load. */
enum bt_status bt_tokenizer_from_gguf(const char *name, const struct bt_tok_gguf *g,
                                      struct bt_tokenizer **out, struct bt_err *err) BT_NODISCARD;

struct bt_gguf;
/* The same, read from an open GGUF file (files/gguf.h), which may be closed afterwards. */
enum bt_status bt_tokenizer_open_gguf(const struct bt_gguf *g, struct bt_tokenizer **out,
                                      struct bt_err *err) BT_NODISCARD;

enum bt_tok_flags {
    BT_TOK_ADD_SPECIAL =
        1, /* put the tokenizer's prefix and suffix ids (BOS, EOS) around the text */
    BT_TOK_PARSE_SPECIAL =
        2, /* text that spells a special token becomes that token; else it stays text */
};

/* Appends the ids of text (len bytes, UTF-8, at most BT_TOK_TEXT_BYTES_MAX) to out. Time is near
 * linear whatever the text. BT_ERR_INVALID (not UTF-8, too long), BT_ERR_NOMEM; after an error out
 * holds the ids that it had before. */
enum bt_status bt_tokenizer_encode(const struct bt_tokenizer *t, const char *text, size_t len,
                                   unsigned flags, struct bt_ids *out,
                                   struct bt_err *err) BT_NODISCARD;

enum bt_detok_flags {
    BT_DETOK_SKIP_SPECIAL = 1, /* special tokens leave no text */
    BT_DETOK_CONTINUE = 2, /* the ids go on from others (an answer after its prompt): the space that
                            * some decoders take from the very start of a text stays */
};

/* Appends the text of n ids to out: valid UTF-8; bytes that form no character become U+FFFD.
 * BT_ERR_INVALID names an id outside the vocabulary (out then holds the text before it),
 * BT_ERR_NOMEM. For streams see text/detok.h. */
enum bt_status bt_tokenizer_decode(const struct bt_tokenizer *t, const uint32_t *ids, size_t n,
                                   unsigned flags, struct bt_buf *out,
                                   struct bt_err *err) BT_NODISCARD;

/* One above the largest id. Ids below it without a token (gaps) decode to nothing. */
uint32_t bt_tokenizer_vocab_size(const struct bt_tokenizer *t);
/* The bytes that a token stands for in the middle of a text, perhaps part of a character: for
 * log-probabilities. Not NUL-terminated; NULL and 0 when there is no such token. Lives as long as
 * t. */
const char *bt_tokenizer_token_text(const struct bt_tokenizer *t, uint32_t id, size_t *len);
/* The token as the vocabulary spells it ("Ġthe", "▁the", "<0x0A>"). */
const char *bt_tokenizer_token_name(const struct bt_tokenizer *t, uint32_t id, size_t *len);
bool bt_tokenizer_is_special(const struct bt_tokenizer *t, uint32_t id);
/* By vocabulary spelling, added tokens first; BT_TOK_NONE. */
uint32_t bt_tokenizer_id_of(const struct bt_tokenizer *t, const char *name, size_t len);
/* BT_TOK_NONE when the model has none, or it was loaded from a bare tokenizer.json. */
uint32_t bt_tokenizer_bos(const struct bt_tokenizer *t);
uint32_t bt_tokenizer_eos(const struct bt_tokenizer *t);
uint32_t bt_tokenizer_unk(const struct bt_tokenizer *t);
uint32_t bt_tokenizer_pad(const struct bt_tokenizer *t);
/* What BT_TOK_ADD_SPECIAL puts before and behind a text. */
const uint32_t *bt_tokenizer_prefix(const struct bt_tokenizer *t, size_t *n);
const uint32_t *bt_tokenizer_suffix(const struct bt_tokenizer *t, size_t *n);

#endif
