#ifndef BT_TEXT_TOKENIZER_INT_H
#define BT_TEXT_TOKENIZER_INT_H

/* The inside of a tokenizer, for text/tokenizer*.c and text/detok.c only.
 * A text passes: added tokens cut out (raw) -> normalizers -> added tokens cut out (normalized) ->
 * pre-tokenizers, which cut it into pieces -> BPE on every piece. A tokenizer is built once
 * (tokenizer_json.c, tokenizer_gguf.c), then read-only. */

#include "base/hash.h"
#include "text/tokenizer.h"

/* ---- patterns: a regex or a literal (tokenizer_regex.c) ---- */

struct bt_tok_pattern;
/* Oniguruma syntax as the reference library uses it (Ruby rules, Unicode classes), translated to
 * PCRE2. BT_ERR_UNSUPPORTED / BT_ERR_INVALID: err names the offset in the pattern; the caller
 * prefixes the JSON path. */
enum bt_status bt_tok_pattern_regex(const char *re, size_t len, struct bt_tok_pattern **out,
                                    struct bt_err *err);
/* PCRE2 syntax, for classes of our own. */
enum bt_status bt_tok_pattern_pcre(const char *re, struct bt_tok_pattern **out, struct bt_err *err);
enum bt_status bt_tok_pattern_literal(const char *s, size_t len, struct bt_tok_pattern **out,
                                      struct bt_err *err);
void bt_tok_pattern_destroy(struct bt_tok_pattern *p);

/* One walk over the matches in a text (valid UTF-8, borrowed). */
struct bt_tok_matches {
    const struct bt_tok_pattern *p;
    void *data; /* PCRE2 match data */
    const char *s;
    size_t len, from;
    size_t last_end; /* of the last match; SIZE_MAX: none */
};
bool bt_tok_matches_init(struct bt_tok_matches *m,
                         const struct bt_tok_pattern *p); /* false: out of memory */
void bt_tok_matches_text(struct bt_tok_matches *m, const char *s, size_t len);
/* 1: [*start, *end) is the next match, which may be empty; 0: no more; -1: a resource limit of the
 * matcher. */
int bt_tok_matches_next(struct bt_tok_matches *m, size_t *start, size_t *end);
void bt_tok_matches_fini(struct bt_tok_matches *m);

/* ---- normalizers (tokenizer_norm.c) ---- */

enum bt_tok_norm_kind {
    BT_TOK_NFC,
    BT_TOK_NFD,
    BT_TOK_NFKC,
    BT_TOK_NFKD,
    BT_TOK_LOWERCASE,
    BT_TOK_STRIP,
    BT_TOK_STRIP_ACCENTS,
    BT_TOK_PREPEND,
    BT_TOK_REPLACE,
};
struct bt_tok_norm {
    enum bt_tok_norm_kind kind;
    bool left, right;               /* STRIP */
    struct bt_tok_pattern *pattern; /* REPLACE */
    char *content;                  /* PREPEND, REPLACE */
    size_t content_len;
};
/* Rewrites b, using tmp as the second buffer. */
enum bt_status bt_tok_norm_apply(const struct bt_tok_norm *n, struct bt_buf *b, struct bt_buf *tmp);
/* Appends s to out with every match replaced; used by decoders too. */
enum bt_status bt_tok_replace(const struct bt_tok_pattern *p, const char *content,
                              size_t content_len, const char *s, size_t len, struct bt_buf *out);

/* ---- pre-tokenizers (tokenizer_pre.c) ---- */

enum bt_tok_behavior {
    BT_TOK_REMOVED,
    BT_TOK_ISOLATED,
    BT_TOK_MERGED_PREV,
    BT_TOK_MERGED_NEXT,
    BT_TOK_CONTIGUOUS
};
enum bt_tok_pre_kind {
    BT_TOK_SPLIT,
    BT_TOK_PREFIX_SPACE, /* a space before every piece that does not begin with one */
    BT_TOK_BYTE_MAP,     /* every byte becomes its printable stand-in */
    BT_TOK_METASPACE,    /* spaces become `content`, which may be put before the text too */
};
enum bt_tok_prepend { BT_TOK_PREPEND_NEVER, BT_TOK_PREPEND_FIRST, BT_TOK_PREPEND_ALWAYS };
struct bt_tok_pre {
    enum bt_tok_pre_kind kind;
    struct bt_tok_pattern *pattern; /* SPLIT */
    enum bt_tok_behavior behavior;
    bool invert;
    enum bt_tok_prepend prepend; /* METASPACE */
    char content[8];
    size_t content_len;
};

struct bt_tok_piece {
    uint32_t off, len;
};
struct bt_tok_pieces {
    struct bt_buf text;
    struct bt_tok_piece *v;
    size_t n, cap;
    bool first; /* the text begins the whole input */
};
/* Cuts a->text (one piece, at first) by all steps; the result is in *a, b is scratch. err: resource
 * limits. */
enum bt_status bt_tok_pre_apply(const struct bt_tok_pre *pre, size_t n_pre, struct bt_tok_pieces *a,
                                struct bt_tok_pieces *b, struct bt_err *err);
bool bt_tok_pieces_add(struct bt_tok_pieces *p, size_t off, size_t len);
void bt_tok_pieces_fini(struct bt_tok_pieces *p);

/* The stand-in of a byte as a code point (below U+0200), and back (-1: stands for none). */
uint32_t bt_tok_byte_char(uint8_t byte);
int bt_tok_char_byte(uint32_t cp);

/* ---- vocabulary and merges (tokenizer_bpe.c) ---- */

struct bt_tok_token {
    const char *name; /* spelling in the vocabulary; NULL: a gap */
    uint32_t name_len;
    uint32_t text_len; /* what it decodes to */
    const char *text;
    bool special; /* dropped by BT_DETOK_SKIP_SPECIAL; text unless BT_TOK_PARSE_SPECIAL */
};

struct bt_tok_merge { /* slot of an open-addressing table, key (left, right) */
    uint32_t left, right;
    uint32_t rank; /* BT_TOK_NONE: free */
    uint32_t id;
};

#define BT_TOK_CP_PAGES (0x110000 / 256)

struct bt_tok_bpe {
    struct bt_map ids; /* spelling -> id, model tokens only */
    struct bt_tok_merge *merges;
    size_t n_slots; /* power of two */
    size_t n_merges;
    uint32_t *cp_pages[BT_TOK_CP_PAGES]; /* ids of one-character tokens: [cp >> 8][cp & 255] */
    uint32_t byte_ids[256];              /* "<0xNN>" */
    uint32_t unk;
    bool fuse_unk, byte_fallback, ignore_merges;
};

enum bt_status bt_tok_bpe_init(struct bt_tok_bpe *b, size_t n_merges);
/* Empties the merge table and makes room for n. */
enum bt_status bt_tok_bpe_room(struct bt_tok_bpe *b, size_t n_merges);
void bt_tok_bpe_fini(struct bt_tok_bpe *b);
/* name is borrowed. A spelling given twice takes the later id. */
enum bt_status bt_tok_bpe_add(struct bt_tok_bpe *b, const char *name, size_t len, uint32_t id);
void bt_tok_bpe_merge(struct bt_tok_bpe *b, uint32_t left, uint32_t right, uint32_t rank,
                      uint32_t id);
/* By spelling. BT_ERR_INVALID: left, right or both together are no tokens. BT_ERR_NOMEM. */
enum bt_status bt_tok_bpe_merge_names(struct bt_tok_bpe *b, struct bt_tok_str left,
                                      struct bt_tok_str right, uint32_t rank);
uint32_t bt_tok_bpe_id(const struct bt_tok_bpe *b, const char *name, size_t len);
const struct bt_tok_merge *bt_tok_bpe_find(const struct bt_tok_bpe *b, uint32_t left,
                                           uint32_t right);

/* Scratch of one encode call. */
struct bt_tok_work {
    struct bt_tok_sym *syms;
    size_t n_syms, cap_syms;
    uint64_t *heap;
    size_t n_heap, cap_heap;
};
void bt_tok_work_fini(struct bt_tok_work *w);
enum bt_status bt_tok_bpe_encode(const struct bt_tok_bpe *b, struct bt_tok_work *w, const char *s,
                                 size_t len, struct bt_ids *out);

/* ---- added tokens (tokenizer_added.c) ---- */

struct bt_tok_added {
    uint32_t id;
    bool special, lstrip, rstrip, single_word, normalized;
    const char *content; /* what is searched for: after normalizing where `normalized` */
    size_t len;
    uint32_t order; /* in the file: of equal contents the first wins */
};

/* Finds added tokens, leftmost first, of those the longest. */
struct bt_tok_finder {
    struct bt_tok_added *v; /* sorted by content */
    size_t n;
    uint32_t first[257]; /* v[first[c] .. first[c + 1]) begin with byte c */
};
void bt_tok_finder_sort(struct bt_tok_finder *f);
/* The next match that begins at from or later; NULL: none. */
const struct bt_tok_added *bt_tok_finder_next(const struct bt_tok_finder *f, const char *s,
                                              size_t len, size_t from, size_t *start);
typedef enum bt_status bt_tok_gap_fn(void *arg, const char *s, size_t off, size_t len);
typedef enum bt_status bt_tok_found_fn(void *arg, uint32_t id);
/* Walks s: gap for the text between added tokens (never empty), found for each of them, in order.
 */
enum bt_status bt_tok_finder_cut(const struct bt_tok_finder *f, const char *s, size_t len,
                                 bool parse_special, bt_tok_gap_fn *gap, bt_tok_found_fn *found,
                                 void *arg);

/* ---- decoding ---- */

enum bt_tok_decode_kind { BT_TOK_DEC_JOIN_SPACE, BT_TOK_DEC_BYTE_LEVEL, BT_TOK_DEC_TEXT };
struct bt_tok_decoder {
    enum bt_tok_decode_kind kind;
    bool byte_fallback;
    struct bt_tok_norm *steps; /* TEXT: REPLACE, token by token */
    size_t n_steps;
    char meta[8]; /* Metaspace: spelling of the space, "" if none */
    size_t meta_len;
    bool meta_drop_first; /* the first token loses its spaces */
    char strip[8];        /* after fusing: up to strip_start of this character at the start */
    size_t strip_len;
    uint32_t strip_start;
};
/* Fills text and text_len of every token, from the name or from a normalized spelling left in text.
 */
enum bt_status bt_tok_decoder_compile(struct bt_tokenizer *t);

/* ---- the whole ---- */

struct bt_tokenizer {
    struct bt_tok_token *tokens; /* [n_tokens] */
    uint32_t n_tokens;
    char *names; /* storage of the spellings */
    char *texts; /* storage of decoded texts that differ from the spelling */
    struct bt_tok_bpe bpe;
    struct bt_tok_finder raw, normalized; /* added tokens searched before and after normalizing */
    char *normalized_names;               /* contents of the latter */
    struct bt_map added_ids;              /* spelling -> id */
    struct bt_tok_norm *norms;
    size_t n_norms;
    struct bt_tok_pre *pres;
    size_t n_pres;
    struct bt_tok_decoder decoder;
    uint32_t *prefix, *suffix;
    size_t n_prefix, n_suffix;
    uint32_t bos, eos, unk, pad;
};

void bt_tok_norm_fini(struct bt_tok_norm *n);

/* ---- building (tokenizer_build.c): vocabulary first, then added tokens, then finish ---- */

/* An empty tokenizer with room for ids below n_ids and names_bytes bytes of spellings. */
enum bt_status bt_tok_build_begin(uint32_t n_ids, size_t names_bytes, size_t n_merges_max,
                                  struct bt_tokenizer **out);
/* Copies a spelling into the tokenizer's storage; *used counts the bytes taken so far. */
const char *bt_tok_build_name(struct bt_tokenizer *t, size_t *used, const char *s, size_t len);
/* Adds a->content as a token to be found in texts, by a->normalized before or after normalizing; v
 * has room. */
enum bt_status bt_tok_build_added(struct bt_tokenizer *t, const struct bt_tok_added *a);
enum bt_status bt_tok_build_finish(struct bt_tokenizer *t);
/* Appends a zeroed element to a growing array; NULL: out of memory. */
struct bt_tok_pre *bt_tok_build_pre(struct bt_tokenizer *t);
struct bt_tok_norm *bt_tok_build_norm(struct bt_tok_norm **v, size_t *n);
/* Appends the parts of a byte-level pre-tokenizer: an optional prefix space, an optional GPT-2
 * split, the map. */
enum bt_status bt_tok_build_byte_level(struct bt_tokenizer *t, bool prefix_space, bool split,
                                       struct bt_err *err);
/* Appends a split by a regex in the files' syntax. */
enum bt_status bt_tok_build_split(struct bt_tokenizer *t, const char *regex,
                                  enum bt_tok_behavior behavior, struct bt_err *err);

/* ---- components of tokenizer.json (tokenizer_steps.c, tokenizer_ends.c) ---- */

struct bt_tape_node;
/* path: the JSON path of node, for errors. NULL or null nodes mean that there is none. */
enum bt_status bt_tok_read_normalizer(struct bt_tokenizer *t, const struct bt_tape_node *node,
                                      const char *path, struct bt_err *err);
enum bt_status bt_tok_read_pre_tokenizer(struct bt_tokenizer *t, const struct bt_tape_node *node,
                                         const char *path, struct bt_err *err);
enum bt_status bt_tok_read_decoder(struct bt_tokenizer *t, const struct bt_tape_node *node,
                                   const char *path, struct bt_err *err);
enum bt_status bt_tok_read_post_processor(struct bt_tokenizer *t, const struct bt_tape_node *node,
                                          const char *path, struct bt_err *err);

/* tokenizer_gguf.c: one way to cut text before merging. */
struct bt_tok_gguf_pre {
    const char *names; /* of tokenizer.ggml.pre, each between bars */
    bool nfc, ignore_merges;
    const char *splits[4];
};
/* The first name of the ith; NULL behind the last. */
const char *bt_tok_gguf_pre_name(size_t i);
const struct bt_tok_gguf_pre *bt_tok_gguf_find_pre(const char *name); /* NULL: none of that name */

/* What a bt_tok_gguf points to when it was read from a file, whose bytes the strings are. */
struct bt_tok_gguf_arrays {
    char *model, *pre;
    struct bt_tok_str *tokens, *merges;
    float *scores;
    int32_t *types;
};
enum bt_status bt_tok_gguf_collect(const struct bt_gguf *f, struct bt_tok_gguf_arrays *a,
                                   struct bt_tok_gguf *g, struct bt_err *err) BT_NODISCARD;
void bt_tok_gguf_arrays_fini(struct bt_tok_gguf_arrays *a); /* also after an error of collect */

/* tokenizer_export.c: both give the same ids for texts that tokenizers are apt to differ in. */
bool bt_tok_same_ids(const struct bt_tokenizer *a, const struct bt_tokenizer *b);

#endif
