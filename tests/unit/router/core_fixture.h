#ifndef BT_TESTS_CORE_FIXTURE_H
#define BT_TESTS_CORE_FIXTURE_H

/* What the tests of the router's core share: usual options, a usual node, and the calls that bring it in. A test changes what it is
 * about before it goes on; the actions are its own to take. */

#include "base/clock.h"
#include "router/router_core.h"
#include "tests/check.h"

#define MS BT_NS_PER_MS

static inline struct bt_rt_opts fixture_opts(void)
{
    return (struct bt_rt_opts){.instance = 9,
                               .name = "r",
                               .seed = {1, 2},
                               .seqs_max = 64,
                               .queue_max = 8,
                               .nodes_max = 16,
                               .attempts_max = 4,
                               .queue_ns = 30000 * MS,
                               .grace_ns = 1000 * MS,
                               .migrate_ns = 5000 * MS,
                               .progress_ns = 60000 * MS,
                               .lease_ns = 3000 * MS,
                               .heartbeat_ns = 250 * MS,
                               .backoff_ns = 20 * MS};
}

/* Of session protocol 1, with room for 8 sequences of 512 tokens. name: borrowed. */
static inline struct bt_msg_hello fixture_hello(enum bt_role role, uint64_t instance,
                                                const char *name)
{
    return (struct bt_msg_hello){.version_min = 1,
                                 .version_max = 1,
                                 .role = role,
                                 .instance = instance,
                                 .name = name,
                                 .fingerprint = 77,
                                 .numerics = "f32",
                                 .kv_layout = "L",
                                 .model_name = "m",
                                 .transfer_address = "127.0.0.1:9",
                                 .backend = "cpu",
                                 .page_tokens = 16,
                                 .n_pages = 1000,
                                 .max_batch = 8,
                                 .max_tokens = 512,
                                 .context = 512,
                                 .vocab = 2000};
}

/* A node says hello; its session. */
static inline uint64_t fixture_join(struct bt_rt_core *core, uint64_t now,
                                    const struct bt_msg_hello *hello)
{
    uint64_t session = bt_rt_on_session(core, now);
    struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_HELLO, .hello = *hello};

    bt_rt_on_message(core, now, session, &m);
    return session;
}

/* A request without a deadline, which is taken or refused as wanted; the sequence. */
static inline uint64_t fixture_ask(struct bt_rt_core *core, uint64_t now, const uint32_t *prompt,
                                   uint32_t n_prompt, uint32_t max_tokens, bool echo,
                                   enum bt_status want)
{
    struct bt_sampling sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = max_tokens};
    struct bt_rt_seq_start start = {.request_id = "r",
                                    .tokens = prompt,
                                    .n_prompt = n_prompt,
                                    .sampling = &sampling,
                                    .prompt_logprobs = echo,
                                    .deadline = UINT64_MAX};
    uint64_t seq = 0;

    CHECK_EQ(bt_rt_seq_start(core, now, &start, &seq), want);
    return seq;
}

#endif
