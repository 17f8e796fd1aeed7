#ifndef BT_PROTO_INFERENCE_H
#define BT_PROTO_INFERENCE_H

/* Messages of baton.v1.Inference as plain structs, both directions: the router decodes requests and
 * encodes answers, clients the reverse (baton/v1/inference.proto has the meaning of each field).
 * What a decoder returns lives in the caller's arena until that is reset; encoders append to a
 * bt_buf. No string is NULL after decoding; NULL encodes as "". Texts are not checked to be UTF-8,
 * and may hold NUL: their lengths are told. To encode a text up to its first NUL, leave its length 0.
 * Any thread. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/arena.h"
#include "base/buf.h"
#include "base/status.h"

#define BT_INF_GENERATE    "/baton.v1.Inference/Generate"
#define BT_INF_ABORT       "/baton.v1.Inference/Abort"
#define BT_INF_TOKENIZE    "/baton.v1.Inference/Tokenize"
#define BT_INF_DETOKENIZE  "/baton.v1.Inference/Detokenize"
#define BT_INF_LIST_MODELS "/baton.v1.Inference/ListModels"
#define BT_INF_GET_CLUSTER "/baton.v1.Inference/GetCluster"
#define BT_INF_SERVICE     "baton.v1.Inference"

struct bt_inf_bias {
    uint32_t token;
    float bias;
};

/* has_x false: x was absent (and is ignored when encoding). */
struct bt_inf_sampling {
    bool has_temperature, has_top_p, has_top_k, has_min_p, has_repetition_penalty,
        has_presence_penalty;
    bool has_frequency_penalty, has_seed, has_max_tokens, has_n;
    float temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
    uint32_t top_k, max_tokens, min_tokens, n;
    uint64_t seed;
    bool ignore_eos;
    size_t n_stop;
    const char *const *stop;
    const size_t *stop_len; /* NULL when encoding: each ends at its NUL */
    size_t n_stop_token_ids;
    const uint32_t *stop_token_ids;
    size_t n_logit_bias;
    const struct bt_inf_bias *logit_bias;
};

struct bt_inf_message {
    const char *role, *content;
    size_t role_len, content_len;
};

enum bt_inf_input { BT_INF_NO_INPUT, BT_INF_TEXT, BT_INF_TOKEN_IDS, BT_INF_CHAT };

struct bt_inf_generate {
    const char *request_id, *model;
    enum bt_inf_input input;
    const char *text; /* TEXT */
    size_t text_len;
    size_t n_token_ids; /* TOKEN_IDS */
    const uint32_t *token_ids;
    size_t n_messages; /* CHAT */
    const struct bt_inf_message *messages;
    struct bt_inf_sampling sampling; /* no message: nothing is set */
    bool has_logprobs;
    uint32_t logprobs;
    bool timings;
    int32_t priority;
};

struct bt_inf_logprob {
    uint32_t id;
    const char *text;
    float logprob;
    size_t text_len;
};
struct bt_inf_logprobs {
    struct bt_inf_logprob chosen;
    size_t n_top;
    const struct bt_inf_logprob *top;
};

struct bt_inf_usage {
    uint32_t prompt_tokens, completion_tokens, cached_tokens, transferred_tokens;
};

struct bt_inf_timings {
    double tokenize_ms, queue_ms, prefill_ms, first_token_ms, transfer_ms, transfer_tail_ms,
        decode_ms, detokenize_ms;
    uint32_t prefill_tokens, decode_tokens, transferred_tokens, local_prefills;
    uint64_t transferred_bytes;
};

struct bt_inf_generated {
    uint32_t index;
    const char *text;
    size_t text_len;
    size_t n_token_ids;
    const uint32_t *token_ids;
    size_t n_logprobs;
    const struct bt_inf_logprobs *logprobs;
    const char *finish_reason; /* "", "stop", "length" */
    bool has_usage;
    struct bt_inf_usage usage;
    bool has_timings;
    struct bt_inf_timings timings;
};

struct bt_inf_tokenize {
    const char *model, *text;
    size_t text_len;
    bool add_special_tokens, parse_special;
};
struct bt_inf_detokenize {
    const char *model;
    size_t n_ids;
    const uint32_t *ids;
    bool skip_special_tokens;
};
struct bt_inf_ids {
    size_t n_ids;
    const uint32_t *ids;
};

struct bt_inf_model {
    const char *id;
    uint32_t context;
};
struct bt_inf_models {
    size_t n_models;
    const struct bt_inf_model *models;
};

struct bt_inf_transport {
    const char *peer, *description;
};
struct bt_inf_node {
    const char *name, *role, *instance, *state, *backend, *numerics, *transfer_address, *kv_layout,
        *fingerprint;
    uint32_t page_tokens, pages_free, pages_cached, pages_leased, pages_quarantined, waiting,
        running;
    double prefill_tokens_per_s, decode_step_ms;
    uint64_t transferred_bytes_total, local_prefills_total;
    size_t n_transports;
    const struct bt_inf_transport *transports;
};
struct bt_inf_cluster {
    const char *model, *router_instance, *local_prefill;
    size_t n_nodes;
    const struct bt_inf_node *nodes;
    uint32_t requests_running, requests_waiting;
    uint64_t requests_total, prompt_tokens_total, generated_tokens_total;
};

/* Decoders: BT_ERR_PROTOCOL: not such a message, or larger than the arena; err says which. */
#define BT_INF_CODEC(name, type)                                                                   \
    enum bt_status bt_inf_##name##_encode(const type *m, struct bt_buf *out) BT_NODISCARD;         \
    enum bt_status bt_inf_##name##_decode(const void *data, size_t n, struct bt_arena *arena,      \
                                          type *out, struct bt_err *err) BT_NODISCARD

BT_INF_CODEC(generate, struct bt_inf_generate);     /* GenerateRequest */
BT_INF_CODEC(generated, struct bt_inf_generated);   /* GenerateResponse */
BT_INF_CODEC(tokenize, struct bt_inf_tokenize);     /* TokenizeRequest */
BT_INF_CODEC(ids, struct bt_inf_ids);               /* TokenizeResponse */
BT_INF_CODEC(detokenize, struct bt_inf_detokenize); /* DetokenizeRequest */
BT_INF_CODEC(models, struct bt_inf_models);         /* ListModelsResponse */
BT_INF_CODEC(cluster, struct bt_inf_cluster);       /* GetClusterResponse */

/* AbortRequest, AbortResponse, DetokenizeResponse: one member each. */
enum bt_status bt_inf_abort_encode(const char *request_id, struct bt_buf *out) BT_NODISCARD;
enum bt_status bt_inf_abort_decode(const void *data, size_t n, struct bt_arena *arena,
                                   const char **request_id, struct bt_err *err) BT_NODISCARD;
enum bt_status bt_inf_aborted_encode(bool found, struct bt_buf *out) BT_NODISCARD;
enum bt_status bt_inf_aborted_decode(const void *data, size_t n, struct bt_arena *arena,
                                     bool *found, struct bt_err *err) BT_NODISCARD;
enum bt_status bt_inf_text_encode(const char *text, size_t len, struct bt_buf *out) BT_NODISCARD;
enum bt_status bt_inf_text_decode(const void *data, size_t n, struct bt_arena *arena,
                                  const char **text, size_t *len, struct bt_err *err) BT_NODISCARD;
/* ListModelsRequest and GetClusterRequest are empty: send no bytes. */

/* Serialised FileDescriptorSet of inference.proto, for reflection. Static storage. */
const uint8_t *bt_inf_descriptor(size_t *len);

#endif
