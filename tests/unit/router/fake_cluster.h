#ifndef BT_TESTS_FAKE_CLUSTER_H
#define BT_TESTS_FAKE_CLUSTER_H

/* A whole router in this process, with fake nodes that speak the session protocol: what a fake node answers is a pure
 * function of prompt, choice and token index, as from a real one. One per test. */

#include "net/grpc.h"
#include "net/http.h"
#include "net/loop.h"
#include "proto/session.h"
#include "router/router_int.h"

/* Ids of the test vocabulary: single letters, bytes, and a few words. */
#define FAKE_BOS       1u
#define FAKE_EOS       2u
#define FAKE_BYTE(b)   (3u + (b))
#define FAKE_LETTER(c) (259u + (uint32_t)((c) - 'a'))
#define FAKE_VOCAB     285u

#define FAKE_JOBS 256

struct fake_job {
    bool used;
    struct bt_ticket ticket;
    uint32_t index, n_prompt, last_prompt, n_tokens, sum, choice, max_tokens;
    bool logprobs;
    uint32_t n_top;
    bool prompt_logprobs;
    uint64_t peer;
    uint32_t *prompt;
};

struct fake_node {
    struct fake_cluster *c;
    enum bt_role role;
    uint64_t instance;
    struct bt_grpc_channel *channel;
    struct bt_grpc_call *call;
    bool up;
    uint32_t n_submits, n_cancels, n_peers;
    /* How it behaves. */
    uint32_t refuse;    /* submits to refuse */
    bool hold;          /* takes submits and says nothing */
    uint32_t die_after; /* tokens in all, then the session ends; 0: never */
    uint32_t n_tokens_sent;
    uint32_t per_tick; /* decode: tokens of a job in one message; 0: 1 */
    struct fake_job jobs[FAKE_JOBS];
    struct bt_timer timer;
};

struct fake_cluster {
    struct bt_net_loop *loop;
    struct bt_router router;
    struct bt_tokenizer *tok;
    struct bt_template *tmpl; /* set by the test; destroyed by fake_stop */
    struct bt_http_server *http;
    struct bt_grpc_channel *client;
    struct fake_node nodes[4];
    uint32_t n_nodes;
    struct bt_buf buf;
    struct bt_arena arena;
    char address[64], sessions[64];
};

/* Starts router and fake nodes and waits until a pair can serve (n_prefill, n_decode > 0). */
void fake_start(struct fake_cluster *c, uint32_t n_prefill, uint32_t n_decode);
struct fake_node *fake_node_add(struct fake_cluster *c, enum bt_role role);
void fake_node_stop(struct fake_node *n);
void fake_stop(struct fake_cluster *c);
int fake_failures(void); /* checks that failed in here */
void fake_step(struct fake_cluster *c);
/* Steps until the condition holds; false after five seconds. */
#define FAKE_UNTIL(c, cond)                                                                        \
    do {                                                                                           \
        uint64_t until_ = bt_clock_ns() + 30 * BT_NS_PER_S;                                        \
        while (!(cond) && bt_clock_ns() < until_) {                                                \
            fake_step(c);                                                                          \
        }                                                                                          \
        CHECK(cond);                                                                               \
    } while (0)

/* One HTTP request, raw. */
struct fake_http {
    int fd;
    struct bt_buf in; /* everything received */
    bool closed;
};
void fake_http_open(struct fake_cluster *c, struct fake_http *h, const char *method,
                    const char *path, const char *headers, const char *body);
void fake_http_poll(struct fake_http *h);
void fake_http_close(struct fake_http *h);
/* The whole exchange; returns the status and leaves the body (chunks joined) in *body. */
int fake_http_call(struct fake_cluster *c, const char *method, const char *path,
                   const char *headers, const char *body, struct bt_buf *answer, char *head,
                   size_t head_cap);
int fake_post(struct fake_cluster *c, const char *path, const char *body, struct bt_buf *answer);
int fake_get(struct fake_cluster *c, const char *path, struct bt_buf *answer);

#endif
