/* Inference messages: what one side encodes the other reads back, presence included. */

#include <string.h>
#include "base/arena.h"
#include "base/mem.h"
#include "proto/inference.h"
#include "tests/check.h"

static struct bt_arena arena;
static struct bt_buf buf;
static struct bt_err err;

static void test_generate(void)
{
    const char *stop[] = {"\n\n", "END\0"};
    const size_t stop_len[] = {2, 4};
    uint32_t ids[] = {1, 0, 300000};
    struct bt_inf_bias bias[] = {{7, -1.5f}, {9, 100.0f}};
    struct bt_inf_generate in = {
        .request_id = "r1",
        .input = BT_INF_TOKEN_IDS,
        .n_token_ids = 3,
        .token_ids = ids,
        .has_logprobs = true,
        .timings = true,
        .priority = -3,
        .sampling = {.has_temperature = true, /* 0: present */
                     .has_seed = true,
                     .seed = UINT64_MAX,
                     .has_top_k = true,
                     .top_k = 40,
                     .min_tokens = 2,
                     .ignore_eos = true,
                     .n_stop = 2,
                     .stop = stop,
                     .stop_len = stop_len,
                     .n_stop_token_ids = 3,
                     .stop_token_ids = ids,
                     .n_logit_bias = 2,
                     .logit_bias = bias},
    };
    struct bt_inf_generate out;

    bt_buf_clear(&buf);
    CHECK_EQ(bt_inf_generate_encode(&in, &buf), BT_OK);
    CHECK_EQ(bt_inf_generate_decode(buf.data, buf.len, &arena, &out, &err), BT_OK);
    CHECK_STR(out.request_id, "r1");
    CHECK_STR(out.model, "");
    CHECK_EQ(out.input, BT_INF_TOKEN_IDS);
    CHECK_EQ(out.n_token_ids, 3);
    CHECK_EQ(out.token_ids[2], 300000);
    CHECK(out.has_logprobs && out.logprobs == 0 && out.timings);
    CHECK_EQ(out.priority, -3);
    CHECK(out.sampling.has_temperature && out.sampling.temperature == 0.0f);
    CHECK(!out.sampling.has_top_p && !out.sampling.has_max_tokens && !out.sampling.has_n);
    CHECK(out.sampling.has_seed && out.sampling.seed == UINT64_MAX);
    CHECK_EQ(out.sampling.top_k, 40);
    CHECK_EQ(out.sampling.min_tokens, 2);
    CHECK(out.sampling.ignore_eos);
    CHECK_EQ(out.sampling.n_stop, 2);
    CHECK_STR(out.sampling.stop[1], "END");
    CHECK(out.sampling.stop_len[0] == 2 && out.sampling.stop_len[1] == 4);
    CHECK_EQ(out.sampling.n_stop_token_ids, 3);
    CHECK_EQ(out.sampling.n_logit_bias, 2);
    CHECK(out.sampling.logit_bias[0].token == 7 && out.sampling.logit_bias[0].bias == -1.5f);
}

static void test_chat(void)
{
    struct bt_inf_message messages[] = {
        {.role = "system", .content = "Be brief."},
        {.role = "user", .content = "h\xc3\xa9\0!", .content_len = 5}};
    struct bt_inf_generate out;

    bt_buf_clear(&buf);
    CHECK_EQ(bt_inf_generate_encode(
                 &(struct bt_inf_generate){
                     .model = "m", .input = BT_INF_CHAT, .n_messages = 2, .messages = messages},
                 &buf),
             BT_OK);
    CHECK_EQ(bt_inf_generate_decode(buf.data, buf.len, &arena, &out, &err), BT_OK);
    CHECK_EQ(out.input, BT_INF_CHAT);
    CHECK_EQ(out.n_messages, 2);
    CHECK_STR(out.messages[0].role, "system");
    CHECK_EQ(out.messages[1].content_len, 5);
    CHECK(memcmp(out.messages[1].content, "h\xc3\xa9\0!", 6) == 0);
    CHECK(!out.has_logprobs);
}

static void test_generated(void)
{
    struct bt_inf_logprob top[] = {{5, "a", -0.25f, 1}, {6, "\0b", -2.0f, 2}};
    struct bt_inf_logprobs lp = {{6, "b", -2.0f, 0}, 2, top};
    uint32_t id = 6;
    struct bt_inf_generated in = {
        .index = 3,
        .text = "b\0c",
        .text_len = 3,
        .n_token_ids = 1,
        .token_ids = &id,
        .n_logprobs = 1,
        .logprobs = &lp,
        .finish_reason = "length",
        .has_usage = true,
        .usage = {10, 1, 4, 6},
        .has_timings = true,
        .timings = {.prefill_ms = 1.5, .transferred_bytes = UINT64_C(1) << 40}};
    struct bt_inf_generated out;

    bt_buf_clear(&buf);
    CHECK_EQ(bt_inf_generated_encode(&in, &buf), BT_OK);
    CHECK_EQ(bt_inf_generated_decode(buf.data, buf.len, &arena, &out, &err), BT_OK);
    CHECK_EQ(out.index, 3);
    CHECK_STR(out.finish_reason, "length");
    CHECK(out.text_len == 3 && memcmp(out.text, "b\0c", 4) == 0);
    CHECK_EQ(out.n_logprobs, 1);
    CHECK_EQ(out.logprobs[0].top[1].text_len, 2);
    CHECK_EQ(out.logprobs[0].chosen.id, 6);
    CHECK_STR(out.logprobs[0].top[0].text, "a");
    CHECK(out.logprobs[0].top[1].logprob == -2.0f);
    CHECK(out.has_usage && out.usage.prompt_tokens == 10 && out.usage.transferred_tokens == 6);
    CHECK(out.has_timings && out.timings.prefill_ms == 1.5 &&
          out.timings.transferred_bytes == UINT64_C(1) << 40);
}

static void test_small(void)
{
    const char *s = NULL;
    size_t len = 0;
    bool found = false;
    struct bt_inf_tokenize tok;
    struct bt_inf_detokenize detok;
    struct bt_inf_ids got;
    uint32_t ids[] = {4, 5};

    bt_buf_clear(&buf);
    CHECK_EQ(bt_inf_abort_encode("x", &buf), BT_OK);
    CHECK_EQ(bt_inf_abort_decode(buf.data, buf.len, &arena, &s, &err), BT_OK);
    CHECK_STR(s, "x");
    bt_buf_clear(&buf);
    CHECK_EQ(bt_inf_aborted_encode(true, &buf), BT_OK);
    CHECK_EQ(bt_inf_aborted_decode(buf.data, buf.len, &arena, &found, &err), BT_OK);
    CHECK(found);
    bt_buf_clear(&buf);
    CHECK_EQ(bt_inf_text_encode("t\0u", 3, &buf), BT_OK);
    CHECK_EQ(bt_inf_text_decode(buf.data, buf.len, &arena, &s, &len, &err), BT_OK);
    CHECK(len == 3 && memcmp(s, "t\0u", 4) == 0);
    bt_buf_clear(&buf);
    CHECK_EQ(bt_inf_tokenize_encode(
                 &(struct bt_inf_tokenize){.text = "abc", .add_special_tokens = true}, &buf),
             BT_OK);
    CHECK_EQ(bt_inf_tokenize_decode(buf.data, buf.len, &arena, &tok, &err), BT_OK);
    CHECK(tok.add_special_tokens && !tok.parse_special);
    CHECK_STR(tok.text, "abc");
    bt_buf_clear(&buf);
    CHECK_EQ(bt_inf_detokenize_encode(&(struct bt_inf_detokenize){NULL, 2, ids, true}, &buf),
             BT_OK);
    CHECK_EQ(bt_inf_detokenize_decode(buf.data, buf.len, &arena, &detok, &err), BT_OK);
    CHECK(detok.n_ids == 2 && detok.ids[1] == 5 && detok.skip_special_tokens);
    bt_buf_clear(&buf);
    CHECK_EQ(bt_inf_ids_encode(&(struct bt_inf_ids){2, ids}, &buf), BT_OK);
    CHECK_EQ(bt_inf_ids_decode(buf.data, buf.len, &arena, &got, &err), BT_OK);
    CHECK(got.n_ids == 2 && got.ids[0] == 4);
}

static void test_cluster(void)
{
    struct bt_inf_transport t = {"d0", "tcp/lo"};
    struct bt_inf_node nodes[] = {{.name = "p0",
                                   .role = "prefill",
                                   .state = "ready",
                                   .pages_free = 5,
                                   .n_transports = 1,
                                   .transports = &t},
                                  {.name = "d0",
                                   .role = "decode",
                                   .running = 2,
                                   .decode_step_ms = 1.5,
                                   .local_prefills_total = 9,
                                   .transferred_bytes_total = 1ull << 40}};
    struct bt_inf_cluster out;
    struct bt_inf_model model = {"m", 512};
    struct bt_inf_models models;

    bt_buf_clear(&buf);
    CHECK_EQ(bt_inf_cluster_encode(
                 &(struct bt_inf_cluster){"m", "00ff", "auto", 2, nodes, 3, 4, 5, 6, 7}, &buf),
             BT_OK);
    CHECK_EQ(bt_inf_cluster_decode(buf.data, buf.len, &arena, &out, &err), BT_OK);
    CHECK_EQ(out.n_nodes, 2);
    CHECK_STR(out.nodes[0].transports[0].description, "tcp/lo");
    CHECK_EQ(out.nodes[0].pages_free, 5);
    CHECK_STR(out.nodes[1].backend, "");
    CHECK_EQ(out.nodes[1].running, 2);
    CHECK(out.nodes[1].decode_step_ms == 1.5 && out.nodes[0].prefill_tokens_per_s == 0);
    CHECK_EQ(out.nodes[1].transferred_bytes_total, 1ull << 40);
    CHECK(out.requests_running == 3 && out.requests_waiting == 4);
    CHECK(out.requests_total == 5 && out.prompt_tokens_total == 6);
    CHECK_EQ(out.generated_tokens_total, 7);
    CHECK_STR(out.local_prefill, "auto");
    CHECK_EQ(out.nodes[1].local_prefills_total, 9);
    bt_buf_clear(&buf);
    CHECK_EQ(bt_inf_models_encode(&(struct bt_inf_models){1, &model}, &buf), BT_OK);
    CHECK_EQ(bt_inf_models_decode(buf.data, buf.len, &arena, &models, &err), BT_OK);
    CHECK(models.n_models == 1 && models.models[0].context == 512);
}

static void test_bad(void)
{
    struct bt_inf_generate out;
    size_t len = 0;

    CHECK_EQ(bt_inf_generate_decode("\xff\xff\xff", 3, &arena, &out, &err), BT_ERR_PROTOCOL);
    CHECK(strstr(err.msg, "GenerateRequest") != NULL);
    CHECK(bt_inf_descriptor(&len) != NULL && len > 1000);
}

int main(void)
{
    bt_arena_init(&arena, 1 << 20);
    test_generate();
    test_chat();
    test_generated();
    test_small();
    test_cluster();
    test_bad();
    bt_arena_fini(&arena);
    bt_buf_fini(&buf);
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
