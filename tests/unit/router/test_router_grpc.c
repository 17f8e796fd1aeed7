/* baton.v1.Inference over a router with fake nodes. */

#include "base/clock.h"
#include "base/mem.h"
#include "proto/inference.h"
#include "tests/check.h"
#include "tests/unit/router/fake_cluster.h"

static struct fake_cluster c;

struct result {
    bool over;
    enum bt_grpc_status status;
    char message[512];
    char retry[32];
    uint32_t n_messages, n_finished, n_tokens[4];
    char text[4][256], finish[4][8];
    float last_logprob;
    bool usage_last;
    struct bt_inf_usage usage;
    struct bt_inf_timings timings;
    char trailers[128];
    struct bt_buf raw; /* last message, for the other methods */
};

static void on_message(struct bt_grpc_call *call, void *user, const uint8_t *data, size_t len)
{
    struct result *r = user;
    struct bt_arena a;
    struct bt_inf_generated m;
    struct bt_err err = {0};

    (void)call;
    bt_buf_clear(&r->raw);
    bt_buf_add(&r->raw, data, len);
    r->n_messages++;
    bt_arena_init(&a, 1 << 20);
    if (bt_inf_generated_decode(data, len, &a, &m, &err) == BT_OK && m.index < 4) {
        strncat(r->text[m.index], m.text, sizeof r->text[0] - strlen(r->text[m.index]) - 1);
        r->n_tokens[m.index] += (uint32_t)m.n_token_ids;
        if (m.finish_reason[0] != '\0') {
            snprintf(r->finish[m.index], sizeof r->finish[0], "%s", m.finish_reason);
            r->n_finished++;
        }
        r->last_logprob = m.n_logprobs > 0 ? m.logprobs[m.n_logprobs - 1].chosen.logprob : 0;
        r->usage_last = m.has_usage;
        r->usage = m.usage;
        r->timings = m.timings;
    }
    bt_arena_fini(&a);
}

static void on_close(struct bt_grpc_call *call, void *user, const struct bt_grpc_end *end)
{
    struct result *r = user;
    const char *retry =
        bt_http_header_find(end->trailers, end->n_trailers, "grpc-retry-pushback-ms");

    (void)call;
    r->over = true;
    r->status = end->status;
    snprintf(r->message, sizeof r->message, "%s", end->message);
    snprintf(r->retry, sizeof r->retry, "%s", retry != NULL ? retry : "");
    const char *names[] = {"x-baton-prefill", "x-baton-decode", "traceparent"};

    for (unsigned i = 0; i < 3; i++) {
        const char *v = bt_http_header_find(end->trailers, end->n_trailers, names[i]);

        snprintf(r->trailers + strlen(r->trailers), sizeof r->trailers - strlen(r->trailers), "%s,",
                 v != NULL ? v : "");
    }
}

static const struct bt_grpc_events events = {.on_message = on_message, .on_close = on_close};

static struct bt_grpc_call *start(struct result *r, const char *path, const struct bt_buf *request,
                                  uint64_t timeout_ns, const char *key)
{
    struct bt_http_header h[] = {{"traceparent", "00-aa-bb-01"}, {"authorization", key}};
    struct bt_grpc_start s = {
        .path = path, .timeout_ns = timeout_ns, .metadata = h, .n_metadata = key != NULL ? 2 : 1};
    struct bt_grpc_call *call = NULL;

    *r = (struct result){0};
    CHECK_EQ(bt_grpc_call_start(c.client, &s, &events, r, &call), BT_OK);
    (void)bt_grpc_send(call, request->data != NULL ? request->data : "", request->len);
    bt_grpc_half_close(call);
    return call;
}

static void run(struct result *r, const char *path, struct bt_buf *request, uint64_t timeout_ns,
                const char *key)
{
    (void)start(r, path, request, timeout_ns, key);
    FAKE_UNTIL(&c, r->over);
    bt_buf_clear(request);
}

static void generate(struct result *r, const struct bt_inf_generate *m, uint64_t timeout_ns)
{
    struct bt_buf b = {0};

    CHECK_EQ(bt_inf_generate_encode(m, &b), BT_OK);
    run(r, BT_INF_GENERATE, &b, timeout_ns, NULL);
    bt_buf_fini(&b);
    bt_buf_fini(&r->raw);
}

static void test_generate(void)
{
    struct result r;
    struct bt_inf_generate m = {
        .input = BT_INF_TEXT,
        .text = "abc",
        .has_logprobs = true,
        .logprobs = 1,
        .timings = true,
        .sampling = {.has_max_tokens = true, .max_tokens = 6, .has_n = true, .n = 2}};

    fake_start(&c, 1, 1);
    generate(&r, &m, 0);
    CHECK_EQ(r.status, BT_GRPC_OK);
    CHECK(r.n_tokens[0] == 6 && r.n_tokens[1] == 6);
    CHECK(strlen(r.text[0]) == 6 && strcmp(r.text[0], r.text[1]) != 0);
    CHECK_STR(r.finish[1], "length");
    CHECK_EQ(r.n_finished, 2);
    CHECK(r.usage_last && r.usage.prompt_tokens == 8 && r.usage.completion_tokens == 12);
    CHECK_EQ(r.usage.transferred_tokens, 8);
    CHECK_NEAR(r.last_logprob, -0.75, 1e-6);
    CHECK_NEAR(r.timings.prefill_ms, 2, 1e-6);
    CHECK_NEAR(r.timings.transfer_ms, 3, 1e-6);
    CHECK(r.timings.transferred_bytes == 200 && r.timings.decode_tokens == 10);
    CHECK_STR(r.trailers, "p1,d2,00-aa-bb-01,");
    /* max_tokens absent: what is left of the context. */
    m = (struct bt_inf_generate){.input = BT_INF_TEXT, .text = "abz"};
    generate(&r, &m, 0);
    CHECK(r.status == BT_GRPC_OK && r.n_tokens[0] == 4);
    CHECK_STR(r.finish[0], "stop");
    CHECK_EQ(strlen(r.text[0]), 3);
    fake_stop(&c);
}

static void test_status(void)
{
    struct result r;
    uint32_t ids[] = {5, 400};
    struct bt_inf_generate m = {.model = "other", .input = BT_INF_TEXT, .text = "a"};

    fake_start(&c, 1, 1);
    generate(&r, &m, 0);
    CHECK_EQ(r.status, BT_GRPC_NOT_FOUND);
    m = (struct bt_inf_generate){.input = BT_INF_TEXT, .text = ""};
    generate(&r, &m, 0);
    CHECK_EQ(r.status, BT_GRPC_INVALID_ARGUMENT);
    m = (struct bt_inf_generate){.input = BT_INF_TOKEN_IDS, .n_token_ids = 2, .token_ids = ids};
    generate(&r, &m, 0);
    CHECK(r.status == BT_GRPC_INVALID_ARGUMENT && strstr(r.message, "400") != NULL);
    m = (struct bt_inf_generate){
        .input = BT_INF_TEXT, .text = "a", .sampling = {.has_top_p = true, .top_p = 2}};
    generate(&r, &m, 0);
    CHECK(r.status == BT_GRPC_INVALID_ARGUMENT && strstr(r.message, "top_p") != NULL);
    m = (struct bt_inf_generate){.input = BT_INF_TEXT,
                                 .text = "a",
                                 .sampling = {.has_max_tokens = true, .max_tokens = 9000}};
    generate(&r, &m, 0);
    CHECK(r.status == BT_GRPC_INVALID_ARGUMENT && strstr(r.message, "4096") != NULL);
    /* A deadline stops both legs. */
    c.nodes[0].hold = c.nodes[1].hold = true;
    m = (struct bt_inf_generate){.input = BT_INF_TEXT, .text = "a"};
    generate(&r, &m, 50 * BT_NS_PER_MS);
    CHECK_EQ(r.status, BT_GRPC_DEADLINE_EXCEEDED);
    FAKE_UNTIL(&c, c.nodes[0].n_cancels == 1 && c.nodes[1].n_cancels == 1);
    /* No node. */
    fake_node_stop(&c.nodes[0]);
    FAKE_UNTIL(&c, !bt_rt_core_ready(c.router.core));
    generate(&r, &m, 0);
    CHECK_EQ(r.status, BT_GRPC_UNAVAILABLE);
    CHECK_STR(r.retry, "1000");
    fake_stop(&c);
}

static void test_cancel(void)
{
    struct result r, other;
    struct bt_buf b = {0};
    bool found = false;
    struct bt_arena a;
    struct bt_err err = {0};
    struct bt_inf_generate m = {.request_id = "one", .input = BT_INF_TEXT, .text = "a"};

    fake_start(&c, 1, 1);
    bt_arena_init(&a, 1 << 20);
    c.nodes[1].hold = true;
    CHECK_EQ(bt_inf_generate_encode(&m, &b), BT_OK);
    struct bt_grpc_call *call = start(&r, BT_INF_GENERATE, &b, 0, NULL);

    FAKE_UNTIL(&c, r.n_messages == 1); /* token 0 comes from the prefill node alone */
    generate(&other, &m, 0);
    CHECK(other.status == BT_GRPC_INVALID_ARGUMENT && strstr(other.message, "in use") != NULL);
    bt_grpc_cancel(call);
    FAKE_UNTIL(&c, r.over && c.nodes[1].n_cancels == 1 && c.router.n_gens == 0);
    bt_buf_fini(&r.raw);
    /* Abort by id. */
    (void)start(&r, BT_INF_GENERATE, &b, 0, NULL);
    FAKE_UNTIL(&c, r.n_messages == 1);
    bt_buf_clear(&b);
    CHECK_EQ(bt_inf_abort_encode("one", &b), BT_OK);
    run(&other, BT_INF_ABORT, &b, 0, NULL);
    CHECK_EQ(bt_inf_aborted_decode(other.raw.data, other.raw.len, &a, &found, &err), BT_OK);
    CHECK(found);
    FAKE_UNTIL(&c, r.over);
    CHECK_EQ(r.status, BT_GRPC_CANCELLED);
    bt_buf_fini(&r.raw);
    bt_buf_fini(&other.raw);
    bt_buf_fini(&b);
    bt_arena_fini(&a);
    fake_stop(&c);
}

static void test_others(void)
{
    static char key[] = "k", root[] = "root";
    struct bt_router_key keys[] = {{key, 1, NULL}}, admins[] = {{root, 4, NULL}};
    struct result r;
    struct bt_buf b = {0};
    struct bt_arena a;
    struct bt_err err = {0};
    struct bt_inf_ids ids;
    struct bt_inf_models models;
    struct bt_inf_cluster cluster;
    const char *text = NULL;
    size_t len = 0;
    uint32_t list[] = {259, 260};

    fake_start(&c, 1, 1);
    bt_arena_init(&a, 1 << 20);
    CHECK_EQ(bt_inf_tokenize_encode(
                 &(struct bt_inf_tokenize){.text = "ab", .add_special_tokens = true}, &b),
             BT_OK);
    run(&r, BT_INF_TOKENIZE, &b, 0, NULL);
    CHECK_EQ(bt_inf_ids_decode(r.raw.data, r.raw.len, &a, &ids, &err), BT_OK);
    CHECK(ids.n_ids == 3 && ids.ids[0] == FAKE_BOS && ids.ids[2] == 260);
    bt_buf_fini(&r.raw);
    CHECK_EQ(bt_inf_detokenize_encode(&(struct bt_inf_detokenize){NULL, 2, list, true}, &b), BT_OK);
    run(&r, BT_INF_DETOKENIZE, &b, 0, NULL);
    CHECK_EQ(bt_inf_text_decode(r.raw.data, r.raw.len, &a, &text, &len, &err), BT_OK);
    CHECK_STR(text, "ab");
    bt_buf_fini(&r.raw);
    /* NUL is a character like others, both ways. */
    CHECK_EQ(bt_inf_tokenize_encode(&(struct bt_inf_tokenize){.text = "a\0b", .text_len = 3}, &b),
             BT_OK);
    run(&r, BT_INF_TOKENIZE, &b, 0, NULL);
    CHECK_EQ(bt_inf_ids_decode(r.raw.data, r.raw.len, &a, &ids, &err), BT_OK);
    CHECK_EQ(ids.n_ids, 3);
    CHECK_EQ(bt_inf_detokenize_encode(
                 &(struct bt_inf_detokenize){.n_ids = ids.n_ids, .ids = ids.ids}, &b),
             BT_OK);
    bt_buf_fini(&r.raw);
    run(&r, BT_INF_DETOKENIZE, &b, 0, NULL);
    CHECK_EQ(bt_inf_text_decode(r.raw.data, r.raw.len, &a, &text, &len, &err), BT_OK);
    CHECK(len == 3 && memcmp(text, "a\0b", 4) == 0);
    bt_buf_fini(&r.raw);
    run(&r, BT_INF_LIST_MODELS, &b, 0, NULL);
    CHECK_EQ(bt_inf_models_decode(r.raw.data, r.raw.len, &a, &models, &err), BT_OK);
    CHECK(models.n_models == 1 && models.models[0].context == 4096);
    bt_buf_fini(&r.raw);
    run(&r, BT_INF_GET_CLUSTER, &b, 0, NULL);
    CHECK_EQ(bt_inf_cluster_decode(r.raw.data, r.raw.len, &a, &cluster, &err), BT_OK);
    CHECK(cluster.n_nodes == 2 && cluster.nodes[1].pages_free == 100);
    CHECK_STR(cluster.nodes[0].state, "ready");
    bt_buf_fini(&r.raw);
    c.router.keys.list = keys;
    c.router.keys.n = 1;
    run(&r, BT_INF_LIST_MODELS, &b, 0, NULL);
    CHECK_EQ(r.status, BT_GRPC_UNAUTHENTICATED);
    run(&r, BT_INF_LIST_MODELS, &b, 0, "Bearer k");
    CHECK_EQ(r.status, BT_GRPC_OK);
    bt_buf_fini(&r.raw);
    c.router.admin_keys = (struct bt_router_keys){admins, 1};
    run(&r, BT_INF_LIST_MODELS, &b, 0, "Bearer root"); /* no client */
    CHECK_EQ(r.status, BT_GRPC_UNAUTHENTICATED);
    run(&r, BT_INF_GET_CLUSTER, &b, 0, NULL);
    CHECK_EQ(r.status, BT_GRPC_UNAUTHENTICATED);
    for (unsigned i = 0; i < 2; i++) { /* the nodes are for both to see */
        run(&r, BT_INF_GET_CLUSTER, &b, 0, i == 0 ? "Bearer root" : "Bearer k");
        CHECK_EQ(r.status, BT_GRPC_OK);
        bt_buf_fini(&r.raw);
    }
    c.router.keys = c.router.admin_keys = (struct bt_router_keys){0};
    bt_buf_fini(&b);
    bt_arena_fini(&a);
    fake_stop(&c);
}

int main(void)
{
    test_generate();
    test_status();
    test_cancel();
    test_others();
    CHECK_EQ(fake_failures(), 0);
    return bt_test_done();
}
