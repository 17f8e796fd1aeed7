/* The HTTP front end over a router with fake nodes: whole answers, streams compared byte by byte, errors, disconnects,
 * retries. */

#include <jansson.h>
#include <stdlib.h>
#include "base/clock.h"
#include "base/mem.h"
#include "tests/check.h"
#include "tests/unit/router/fake_cluster.h"

static struct fake_cluster c;
static struct bt_buf body;

static bool has(const char *what)
{
    bool found = body.data != NULL && strstr(body.data, what) != NULL;

    if (!found) {
        fprintf(stderr, "no %s in: %.2000s\n", what, body.data != NULL ? body.data : "(nothing)");
    }
    return found;
}

/* The answer that fake nodes give to a prompt of letters, as text. */
static const char *want(const char *prompt, uint32_t choice, uint32_t n)
{
    static char text[4096];
    uint32_t sum = FAKE_BOS;

    for (const char *p = prompt; *p != '\0'; p++) {
        sum += FAKE_LETTER(*p);
    }
    for (uint32_t i = 0; i < n; i++) {
        text[i] = (char)('a' + (sum + i * 7 + choice * 3) % 26);
    }
    text[n] = '\0';
    return text;
}

/* Replaces what differs from run to run. */
static void normalise(struct bt_buf *b)
{
    static const char *const keys[] = {"\"id\":\"", "\"created\":"};
    struct bt_buf out = {0};

    for (const char *p = b->data; p != NULL && *p != '\0';) {
        bool cut = false;

        for (unsigned i = 0; i < 2; i++) {
            if (strncmp(p, keys[i], strlen(keys[i])) == 0) {
                bt_buf_adds(&out, keys[i]);
                bt_buf_addc(&out, '*');
                p += strlen(keys[i]);
                p += strcspn(p, i == 0 ? "\"" : ",");
                cut = true;
            }
        }
        if (!cut) {
            bt_buf_addc(&out, *p++);
        }
    }
    bt_buf_fini(b);
    *b = out;
}

static json_t *parse(void)
{
    json_t *o = json_loads(body.data != NULL ? body.data : "", 0, NULL);

    CHECK(o != NULL);
    return o;
}

static void test_whole(void)
{
    fake_start(&c, 1, 1);
    CHECK_EQ(fake_post(&c, "/v1/completions", "{\"prompt\":\"abc\",\"max_tokens\":5}", &body), 200);
    normalise(&body);
    char expect[600];

    snprintf(expect, sizeof expect,
             "{\"id\":\"*\",\"object\":\"text_completion\",\"created\":*,\"model\":\"fake\","
             "\"choices\":[{\"index\":0,"
             "\"text\":\"%s\",\"logprobs\":null,\"finish_reason\":\"length\"}],\"usage\":{\"prompt_"
             "tokens\":4,"
             "\"completion_tokens\":5,\"total_tokens\":9,\"prompt_tokens_details\":{\"cached_"
             "tokens\":0},"
             "\"cached_tokens\":0,\"transferred_tokens\":4}}",
             want("abc", 0, 5));
    CHECK_STR(body.data, expect);
    /* EOS is counted and not shown. */
    CHECK_EQ(fake_post(&c, "/v1/completions", "{\"prompt\":\"abz\",\"max_tokens\":50}", &body),
             200);
    CHECK(has("\"completion_tokens\":4,") && has("\"finish_reason\":\"stop\""));
    snprintf(expect, sizeof expect, "\"text\":\"%s\"", want("abz", 0, 3));
    CHECK(has(expect));
    /* One token: nothing reaches the decode node. */
    uint32_t submits = c.nodes[1].n_submits;

    CHECK_EQ(fake_post(&c, "/v1/completions", "{\"prompt\":\"abc\",\"max_tokens\":1}", &body), 200);
    CHECK(has("\"completion_tokens\":1,") && has("\"transferred_tokens\":0"));
    CHECK_EQ(c.nodes[1].n_submits, submits);
    /* max_tokens absent: 16. Ids are verbatim: no BOS. */
    CHECK_EQ(fake_post(&c, "/v1/completions", "{\"prompt\":[260,261]}", &body), 200);
    CHECK(has("\"completion_tokens\":16,") && has("\"prompt_tokens\":2,"));
    /* Several prompts, several choices. */
    CHECK_EQ(fake_post(&c, "/v1/completions",
                       "{\"prompt\":[\"ab\",\"cd\"],\"n\":2,\"max_tokens\":3}", &body),
             200);
    CHECK(has("\"prompt_tokens\":12,\"completion_tokens\":12,")); /* each choice as it ran */
    json_t *o = parse();

    for (size_t i = 0; i < 4; i++) {
        const json_t *ch = json_array_get(json_object_get(o, "choices"), i);

        CHECK_EQ(json_integer_value(json_object_get(ch, "index")), (long long)i);
        CHECK_STR(json_string_value(json_object_get(ch, "text")),
                  want(i < 2 ? "ab" : "cd", i % 2, 3));
    }
    json_decref(o);
    bt_buf_fini(&body);
    fake_stop(&c);
}

static void test_stream(void)
{
    fake_start(&c, 1, 1);
    c.nodes[1].per_tick = 2;
    CHECK_EQ(fake_post(&c, "/v1/completions",
                       "{\"prompt\":\"abc\",\"max_tokens\":4,\"stream\":true,\"stream_options\":{"
                       "\"include_usage\":true}}",
                       &body),
             200);
    normalise(&body);
    /* Content may be cut differently: joined, it is the answer. Each event ends in a blank line. */
    char text[64] = "";
    size_t chunks = 0;

    for (const char *p = body.data; (p = strstr(p, "\"text\":\"")) != NULL; chunks++) {
        p += strlen("\"text\":\"");
        strncat(text, p, strcspn(p, "\""));
    }
    CHECK_STR(text, want("abc", 0, 4));
    CHECK(chunks >= 1 && chunks <= 4);
    CHECK(has("\"finish_reason\":\"length\"}],\"usage\":null}\n\n"));
    CHECK(has("\"choices\":[],\"usage\":{\"prompt_tokens\":4,\"completion_tokens\":4,"));
    CHECK(body.len > 14 && strcmp(body.data + body.len - 14, "data: [DONE]\n\n") == 0);
    /* Not asked: no usage anywhere. */
    CHECK_EQ(fake_post(&c, "/v1/completions",
                       "{\"prompt\":\"abc\",\"max_tokens\":4,\"stream\":true}", &body),
             200);
    CHECK(strstr(body.data, "usage") == NULL);
    bt_buf_fini(&body);
    fake_stop(&c);
}

static void test_text(void)
{
    fake_start(&c, 1, 1);
    /* Characters are never split: bytes arrive one by one. The lone 0xff becomes U+FFFD. */
    CHECK_EQ(fake_post(&c, "/v1/completions",
                       "{\"prompt\":\"aby\",\"max_tokens\":11,\"stream\":true}", &body),
             200);
    char text[128] = "";

    for (const char *p = body.data; (p = strstr(p, "\"text\":\"")) != NULL;) {
        p += strlen("\"text\":\"");
        CHECK(p[0] == '"' || (unsigned char)p[0] < 0x80 || ((unsigned char)p[0] & 0xc0) == 0xc0);
        strncat(text, p, strcspn(p, "\""));
    }
    CHECK_STR(text, "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\xef\xbf\xbd!");
    /* Stop strings: cut in front, tokens after it neither sent nor counted. */
    const char *full = want("abc", 0, 20);
    char request[256], expect[64];

    snprintf(request, sizeof request,
             "{\"prompt\":\"abc\",\"max_tokens\":20,\"stop\":[\"%.3s\",\"ZZ\"]}", full + 5);
    c.nodes[1].per_tick = 5;
    CHECK_EQ(fake_post(&c, "/v1/completions", request, &body), 200);
    snprintf(expect, sizeof expect, "\"text\":\"%.5s\"", want("abc", 0, 20));
    CHECK(has(expect) && has("\"finish_reason\":\"stop\"") && has("\"completion_tokens\":8,"));
    CHECK(has("\"transferred_tokens\":4"));
    /* The decode node is told. */
    FAKE_UNTIL(&c, c.nodes[1].n_cancels == 1);
    CHECK_EQ(bt_rt_core_stats(c.router.core)->running, 0);
    bt_buf_fini(&body);
    fake_stop(&c);
}

static void test_logprobs(void)
{
    fake_start(&c, 1, 1);
    CHECK_EQ(fake_post(&c, "/v1/completions", "{\"prompt\":\"ab\",\"max_tokens\":2,\"logprobs\":2}",
                       &body),
             200);
    char expect[300];
    const char *w = want("ab", 0, 2);

    snprintf(expect, sizeof expect,
             "\"logprobs\":{\"tokens\":[\"%c\",\"%c\"],\"token_logprobs\":[-0.125,-0.25],\"top_"
             "logprobs\":[{\"%c\":-0.125,"
             "\"b\":-1.125},{\"%c\":-0.25,\"b\":-1.25}],\"text_offset\":[0,1]}",
             w[0], w[1], w[0], w[1]);
    CHECK(has(expect));
    CHECK_EQ(fake_post(&c, "/v1/completions",
                       "{\"prompt\":\"ab\",\"max_tokens\":1,\"logprobs\":0,\"echo\":true}", &body),
             200);
    snprintf(expect, sizeof expect,
             "\"text\":\"ab%c\",\"logprobs\":{\"tokens\":[\"<s>\",\"a\",\"b\",\"%c\"],\"token_"
             "logprobs\":[null,-1,-2,-0.125],"
             "\"top_logprobs\":null,\"text_offset\":[0,0,1,2]}",
             w[0], w[0]);
    CHECK(has(expect));
    CHECK_EQ(fake_post(&c, "/v1/completions", "{\"prompt\":\"ab\",\"max_tokens\":0,\"echo\":true}",
                       &body),
             200);
    CHECK(has("\"text\":\"ab\"") && has("\"completion_tokens\":0,"));
    bt_buf_fini(&body);
    fake_stop(&c);
}

static void test_chat(void)
{
    static const char source[] =
        "{{ bos_token }}{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}g{% endif %}{{ extra }}";
    struct bt_err err = {0};
    char expect[900];

    fake_start(&c, 1, 1);
    CHECK_EQ(bt_template_compile(source, strlen(source), &c.tmpl, &err), BT_OK);
    c.router.tmpl = c.tmpl;
    c.router.bos = "<s>";
    c.nodes[1].hold = false;
    /* "<s>uabg": one BOS, though the tokenizer would add one too. */
    CHECK_EQ(
        fake_post(
            &c, "/v1/chat/completions",
            "{\"messages\":[{\"role\":\"user\",\"content\":\"ab\"}],\"max_completion_tokens\":3,"
            "\"logprobs\":true,\"top_logprobs\":1}",
            &body),
        200);
    normalise(&body);
    const char *w = want("uabg", 0, 3);

    CHECK(has("\"prompt_tokens\":5,"));
    snprintf(expect, sizeof expect,
             "{\"id\":\"*\",\"object\":\"chat.completion\",\"created\":*,\"model\":\"fake\","
             "\"choices\":[{\"index\":0,"
             "\"message\":{\"role\":\"assistant\",\"content\":\"%s\"},\"logprobs\":{\"content\":[{"
             "\"token\":\"%c\","
             "\"logprob\":-0.125,\"bytes\":[%d],\"top_logprobs\":[{\"token\":\"%c\",\"logprob\":-0."
             "125,\"bytes\":[%d]}]},",
             w, w[0], w[0], w[0], w[0]);
    CHECK(has(expect));
    /* Parts, template variables, a stream: the role first, then content, the last chunk with the reason. */
    CHECK_EQ(
        fake_post(
            &c, "/v1/chat/completions",
            "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"ab\"}]}],"
            "\"max_tokens\":1,\"stream\":true,\"chat_template_kwargs\":{\"extra\":\"q\"}}",
            &body),
        200);
    normalise(&body);
    snprintf(expect, sizeof expect,
             "data: "
             "{\"id\":\"*\",\"object\":\"chat.completion.chunk\",\"created\":*,\"model\":\"fake\","
             "\"choices\":[{"
             "\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"
             "\"finish_reason\":null}]}"
             "\n\ndata: "
             "{\"id\":\"*\",\"object\":\"chat.completion.chunk\",\"created\":*,\"model\":\"fake\","
             "\"choices\":[{"
             "\"index\":0,\"delta\":{\"content\":\"%s\"},\"logprobs\":null,\"finish_reason\":"
             "\"length\"}]}\n\n"
             "data: [DONE]\n\n",
             want("uabgq", 0, 1));
    CHECK_STR(body.data, expect);
    CHECK_EQ(fake_post(&c, "/v1/chat/completions", "{\"messages\":[]}", &body), 400);
    CHECK_EQ(
        fake_post(&c, "/v1/chat/completions",
                  "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]}",
                  &body),
        400);
    CHECK(has("only text parts"));
    CHECK_EQ(fake_post(&c, "/v1/chat/completions",
                       "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"tools\":[{\"type\":"
                       "\"function\"}]}",
                       &body),
             400);
    CHECK(has("\"param\":\"tools\""));
    bt_buf_fini(&body);
    fake_stop(&c);
}

static void test_errors(void)
{
    static const struct {
        const char *body, *message;
        int status;
    } list[] = {
        {"{", "not valid JSON", 400},
        {"[]", "must be a JSON object", 400},
        {"{\"max_tokens\":3}", "\"param\":\"prompt\"", 400},
        {"{\"prompt\":\"a\",\"max_tokens\":\"3\"}", "\"param\":\"max_tokens\"", 400},
        {"{\"prompt\":\"a\",\"max_tokens\":0}", "\"param\":\"max_tokens\"", 400},
        {"{\"prompt\":\"a\",\"max_tokens\":5000}", "exceed the context of 4096", 400},
        {"{\"prompt\":\"a\",\"temperature\":-1}", "\"param\":\"temperature\"", 400},
        {"{\"prompt\":\"a\",\"top_p\":0}", "\"param\":\"top_p\"", 400},
        {"{\"prompt\":\"a\",\"n\":0}", "\"param\":\"n\"", 400},
        {"{\"prompt\":\"a\",\"stop\":[1]}", "\"param\":\"stop\"", 400},
        {"{\"prompt\":\"a\",\"logprobs\":21}", "\"param\":\"logprobs\"", 400},
        {"{\"prompt\":[285]}", "outside the vocabulary of 285", 400},
        {"{\"prompt\":[]}", "\"param\":\"prompt\"", 400},
        {"{\"prompt\":\"\"}", "prompt: is empty", 400},
        {"{\"prompt\":\"a\",\"model\":\"other\"}", "\"param\":\"model\"", 404},
        {"{\"prompt\":\"a\",\"best_of\":4}", "\"param\":\"best_of\"", 400},
        {"{\"prompt\":\"a\",\"stream_options\":{}}", "\"param\":\"stream_options\"", 400},
        {"{\"prompt\":\"a\",\"response_format\":{\"type\":\"json_object\"}}",
         "\"param\":\"response_format\"", 400},
    };

    fake_start(&c, 1, 1);
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        CHECK_EQ(fake_post(&c, "/v1/completions", list[i].body, &body), list[i].status);
        CHECK(has(list[i].message) && has("{\"error\":{\"message\":"));
    }
    /* Neutral values and unknown fields pass. */
    CHECK_EQ(fake_post(&c, "/v1/completions",
                       "{\"prompt\":\"a\",\"max_tokens\":2,\"best_of\":1,\"suffix\":null,"
                       "\"repetition_penalty\":1.0,"
                       "\"response_format\":{\"type\":\"text\"},\"no_such_field\":[1],\"logit_"
                       "bias\":{\"5\":1},\"user\":\"u\"}",
                       &body),
             200);
    CHECK_EQ(fake_post(&c, "/v1/chat/completions",
                       "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]}", &body),
             400);
    CHECK(has("no chat template"));
    CHECK_EQ(fake_get(&c, "/nothing", &body), 404);
    CHECK_EQ(fake_get(&c, "/v1/completions", &body), 405);
    /* 413 for a body over the limit, in the same shape. */
    char *big = calloc(1, (1 << 20) + 100);

    memset(big, ' ', (1 << 20) + 50);
    CHECK_EQ(fake_post(&c, "/v1/completions", big, &body), 413);
    CHECK(has("{\"error\":{"));
    free(big);
    bt_buf_fini(&body);
    fake_stop(&c);
}

static void test_endpoints(void)
{
    fake_start(&c, 0, 0);
    CHECK_EQ(fake_get(&c, "/health", &body), 503);
    CHECK_EQ(fake_get(&c, "/live", &body), 200);
    CHECK_EQ(fake_post(&c, "/tokenize", "{\"prompt\":\"ab\"}", &body), 200);
    CHECK_STR(body.data, "{\"tokens\":[1,259,260],\"count\":3}");
    CHECK_EQ(fake_post(&c, "/tokenize",
                       "{\"prompt\":\"</s>\",\"add_special_tokens\":false,\"parse_special\":true}",
                       &body),
             200);
    CHECK_STR(body.data, "{\"tokens\":[2],\"count\":1}");
    /* NUL is a character like others. */
    CHECK_EQ(fake_post(&c, "/tokenize", "{\"prompt\":\"a\\u0000b\"}", &body), 200);
    CHECK_STR(body.data, "{\"tokens\":[1,259,3,260],\"count\":4}");
    CHECK_EQ(fake_post(
                 &c, "/v1/completions",
                 "{\"prompt\":\"a\\u0000b\",\"max_tokens\":0,\"echo\":true,\"stop\":\"b\\u0000c\"}",
                 &body),
             200);
    CHECK(has("\"text\":\"a\\u0000b\""));
    CHECK_EQ(
        fake_post(&c, "/v1/completions", "{\"prompt\":\"a\",\"model\":\"fake\\u0000x\"}", &body),
        400);
    CHECK(has("model: must be a string without NUL"));
    CHECK_EQ(fake_post(&c, "/detokenize", "{\"tokens\":[259,260]}", &body), 200);
    CHECK(has("\"prompt\":\"ab\""));
    /* No node: a clear refusal, soon. */
    CHECK_EQ(fake_post(&c, "/v1/completions", "{\"prompt\":\"a\"}", &body), 503);
    CHECK(has("no prefill or decode node is connected"));
    fake_node_add(&c, BT_ROLE_PREFILL);
    fake_node_add(&c, BT_ROLE_DECODE);
    FAKE_UNTIL(&c, bt_rt_core_ready(c.router.core));
    CHECK_EQ(fake_get(&c, "/health", &body), 200);
    CHECK_EQ(fake_get(&c, "/v1/models", &body), 200);
    CHECK(has("\"id\":\"fake\"") && has("\"max_model_len\":4096"));
    CHECK_EQ(fake_get(&c, "/v1/cluster", &body), 200);
    CHECK(has("\"name\":\"p1\"") && has("\"pages\":{\"free\":100"));
    CHECK_EQ(fake_get(&c, "/metrics", &body), 200);
    CHECK(has("baton_kv_pages{node=\"d2\",role=\"decode\",state=\"free\"} 100"));
    CHECK(has("baton_requests_refused_total{reason=\"no_node\"} 1"));
    CHECK_EQ(fake_get(&c, "/", &body), 200);
    CHECK(has("<!doctype html>"));
    /* Draining: new work is refused, life goes on. */
    bt_router_drain(&c.router);
    CHECK_EQ(fake_get(&c, "/health", &body), 503);
    CHECK_EQ(fake_get(&c, "/live", &body), 200);
    CHECK_EQ(fake_post(&c, "/v1/completions", "{\"prompt\":\"a\"}", &body), 503);
    bt_buf_fini(&body);
    fake_stop(&c);
}

static void test_headers(void)
{
    static char key[] = "secret", root[] = "root";
    struct bt_router_key keys[] = {{key, 6, NULL}}, admins[] = {{root, 4, NULL}};
    char head[4096];

    fake_start(&c, 1, 1);
    CHECK_EQ(fake_http_call(&c, "POST", "/v1/completions",
                            "x-request-id: my-1\r\ntraceparent: 00-aa-bb-01\r\n",
                            "{\"prompt\":\"a\",\"max_tokens\":3}", &body, head, sizeof head),
             200);
    CHECK(strstr(head, "x-request-id: my-1") != NULL &&
          strstr(head, "traceparent: 00-aa-bb-01") != NULL);
    CHECK(strstr(head, "x-baton-prefill: p1") != NULL &&
          strstr(head, "x-baton-decode: d2") != NULL);
    CHECK(has("\"id\":\"cmpl-my-1\""));
    static const char *const paths[] = {"/health", "/v1/models/none", "/nowhere", "/tokenize"};

    for (unsigned i = 0; i < sizeof paths / sizeof paths[0]; i++) { /* 200, 404, 404, 405 */
        (void)fake_http_call(&c, "GET", paths[i],
                             "x-request-id: my-2\r\ntraceparent: 00-aa-bb-02\r\n", NULL, &body,
                             head, sizeof head);
        CHECK(strstr(head, "x-request-id: my-2") != NULL &&
              strstr(head, "traceparent: 00-aa-bb-02") != NULL);
    }
    c.router.keys.list = keys;
    c.router.keys.n = 1;
    CHECK_EQ(fake_post(&c, "/v1/completions", "{\"prompt\":\"a\"}", &body), 401);
    CHECK(has("\"code\":\"invalid_api_key\""));
    CHECK_EQ(fake_http_call(&c, "GET", "/v1/models", "authorization: Bearer wrong\r\n", NULL, &body,
                            NULL, 0),
             401);
    CHECK_EQ(fake_http_call(&c, "GET", "/v1/models", "authorization: Bearer secret\r\n", NULL,
                            &body, NULL, 0),
             200);
    static const struct {
        const char *path;
        int none, client, admin;
    } who[] = {{"/health", 200, 200, 200},
               {"/metrics", 200, 200, 200},
               {"/", 200, 200, 200},
               {"/v1/cluster", 401, 200, 200},
               {"/v1/models", 401, 200, 401}};

    c.router.admin_keys = (struct bt_router_keys){admins, 1};
    for (unsigned i = 0; i < sizeof who / sizeof who[0]; i++) {
        CHECK_EQ(fake_get(&c, who[i].path, &body), who[i].none);
        CHECK_EQ(fake_http_call(&c, "GET", who[i].path, "authorization: Bearer secret\r\n", NULL,
                                &body, NULL, 0),
                 who[i].client);
        CHECK_EQ(fake_http_call(&c, "GET", who[i].path, "authorization: Bearer root\r\n", NULL,
                                &body, NULL, 0),
                 who[i].admin);
    }
    c.router.keys = c.router.admin_keys = (struct bt_router_keys){0};
    bt_buf_fini(&body);
    fake_stop(&c);
}

static void test_disconnect(void)
{
    struct fake_http h;

    fake_start(&c, 1, 1);
    c.nodes[0].hold = c.nodes[1].hold = true;
    fake_http_open(&c, &h, "POST", "/v1/completions", NULL,
                   "{\"prompt\":\"a\",\"max_tokens\":100}");
    FAKE_UNTIL(&c, c.nodes[1].n_submits == 1);
    fake_http_close(&h);
    FAKE_UNTIL(&c, c.nodes[0].n_cancels == 1 && c.nodes[1].n_cancels == 1);
    CHECK_EQ(c.router.n_gens, 0);
    CHECK_EQ(bt_rt_core_stats(c.router.core)->running, 0);
    bt_buf_fini(&body);
    fake_stop(&c);
}

static void test_retry(void)
{
    fake_start(&c, 2, 2);
    c.nodes[0].refuse = 1;
    c.nodes[2].refuse = 2;
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(fake_post(&c, "/v1/completions",
                           "{\"prompt\":\"abc\",\"max_tokens\":30,\"stream\":true}", &body),
                 200);
        char text[64] = "";

        for (const char *p = body.data; (p = strstr(p, "\"text\":\"")) != NULL;) {
            p += strlen("\"text\":\"");
            strncat(text, p, strcspn(p, "\""));
        }
        CHECK_STR(text, want("abc", 0, 30));
    }
    /* A decode node dies in the middle: the same bytes. */
    c.nodes[2].die_after = c.nodes[2].n_tokens_sent + 7;
    c.nodes[3].hold = false;
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(fake_post(&c, "/v1/completions", "{\"prompt\":\"abc\",\"max_tokens\":30}", &body),
                 200);
        CHECK(has(want("abc", 0, 30)));
    }
    CHECK_EQ(bt_rt_core_stats(c.router.core)->migrated, 1);
    /* The last one dies: an error, never a stream that looks complete. */
    c.nodes[3].die_after = c.nodes[3].n_tokens_sent + 7;
    CHECK_EQ(fake_post(&c, "/v1/completions",
                       "{\"prompt\":\"abc\",\"max_tokens\":30,\"stream\":true}", &body),
             200);
    CHECK(has("data: {\"error\":{\"message\":\"no decode node is connected"));
    CHECK(strstr(body.data, "[DONE]") == NULL);
    bt_buf_fini(&body);
    fake_stop(&c);
}

static void test_many(void)
{
    static struct fake_http h[64];
    struct bt_buf b = {0};
    char request[128];

    fake_start(&c, 2, 2);
    for (int i = 0; i < 64; i++) {
        snprintf(request, sizeof request, "{\"prompt\":\"%c%c\",\"max_tokens\":%d,\"stream\":%s}",
                 'a' + i % 20, 'a' + i % 7, 5 + i % 9, i % 2 != 0 ? "true" : "false");
        fake_http_open(&c, &h[i], "POST", "/v1/completions", NULL, request);
    }
    for (int i = 0; i < 64; i++) {
        char prompt[3] = {(char)('a' + i % 20), (char)('a' + i % 7), '\0'}, text[64] = "";

        FAKE_UNTIL(&c, (fake_http_poll(&h[i]), h[i].closed));
        for (const char *p = h[i].in.data; p != NULL && (p = strstr(p, "\"text\":\"")) != NULL;) {
            p += strlen("\"text\":\"");
            strncat(text, p, strcspn(p, "\""));
        }
        CHECK_STR(text, want(prompt, 0, (uint32_t)(5 + i % 9)));
        fake_http_close(&h[i]);
    }
    /* A long body is tokenized on the pool. */
    bt_buf_adds(&b, "{\"max_tokens\":2,\"prompt\":\"");
    for (int i = 0; i < 3000; i++) {
        bt_buf_addc(&b, 'a');
    }
    for (int i = 0; i < 3000; i++) {
        bt_buf_addc(&b, ' ');
    }
    bt_buf_adds(&b, "\"}");
    CHECK_EQ(fake_post(&c, "/v1/completions", b.data, &body),
             400); /* 6001 tokens: beyond the context */
    CHECK(has("4096"));
    b.data[b.len - 3000 - 2] = '"';
    b.data[b.len - 3000 - 1] = '}';
    b.data[b.len - 3000] = '\0';
    b.len = strlen(b.data);
    for (int i = 0; i < 2000; i++) {
        bt_buf_addc(&b, ' ');
    }
    CHECK_EQ(fake_post(&c, "/v1/completions", b.data, &body), 200);
    CHECK(has("\"prompt_tokens\":3001,"));
    bt_buf_fini(&b);
    bt_buf_fini(&body);
    fake_stop(&c);
}

static void test_limits(void)
{
    struct fake_http h[20];
    char head[4096];

    /* 16 wait; the next is refused with a time to come back. */
    fake_start(&c, 1, 1);
    c.nodes[0].hold = true;
    c.nodes[1].refuse = 1000;
    for (int i = 0; i < 20; i++) {
        fake_http_open(&c, &h[i], "POST", "/v1/completions", NULL,
                       "{\"prompt\":\"a\",\"max_tokens\":9}");
        fake_step(&c);
    }
    FAKE_UNTIL(&c, c.router.metrics.refused[BT_REFUSED_QUEUE_FULL] >= 1);
    CHECK_EQ(fake_http_call(&c, "POST", "/v1/completions", NULL,
                            "{\"prompt\":\"a\",\"n\":16,\"max_tokens\":9}", &body, head,
                            sizeof head),
             429);
    CHECK(strstr(head, "retry-after: 1") != NULL && has("rate_limit_error"));
    /* Those that found no room in time: 429 too. */
    int n_429 = 0;

    for (int i = 0; i < 20; i++) {
        FAKE_UNTIL(&c, (fake_http_poll(&h[i]), h[i].closed));
        n_429 += h[i].in.data != NULL && strncmp(h[i].in.data, "HTTP/1.1 429", 12) == 0;
        fake_http_close(&h[i]);
    }
    CHECK_EQ(n_429, 20);
    CHECK_EQ(bt_rt_core_stats(c.router.core)->waiting, 0);
    bt_buf_fini(&body);
    fake_stop(&c);
}

/* A client that does not read: its answer waits as tokens, others go on. */
static void test_slow_client(void)
{
    struct fake_http h;
    char text[8192] = "";
    uint64_t most = 0;

    fake_start(&c, 1, 1);
    c.nodes[1].per_tick = 60;
    fake_http_open(
        &c, &h, "POST", "/v1/completions", NULL,
        "{\"prompt\":\"abc\",\"max_tokens\":4000,\"n\":12,\"stream\":true,\"logprobs\":20}");
    FAKE_UNTIL(&c, bt_rt_core_stats(c.router.core)->running == 0 && c.nodes[1].n_submits == 12);
    CHECK_EQ(fake_post(&c, "/v1/completions", "{\"prompt\":\"abc\",\"max_tokens\":3}", &body), 200);
    CHECK(has(want("abc", 0, 3)));
    CHECK_EQ(c.router.n_gens, 1); /* the slow one still has something to say */
    for (uint64_t end = bt_clock_ns() + 20 * BT_NS_PER_S; !h.closed && bt_clock_ns() < end;) {
        fake_step(&c);
        fake_http_poll(&h);
        most = h.in.len > most ? h.in.len : most;
    }
    CHECK(h.closed && most > ((size_t)8 << 20));
    CHECK(h.in.data != NULL && strstr(h.in.data, "[DONE]") != NULL);
    for (const char *p = h.in.data;
         p != NULL && (p = strstr(p, "\"index\":3,\"text\":\"")) != NULL;) {
        p += strlen("\"index\":3,\"text\":\"");
        strncat(text, p, strcspn(p, "\""));
    }
    CHECK_STR(text, want("abc", 3, 4000));
    fake_http_close(&h);
    bt_buf_fini(&body);
    fake_stop(&c);
}

#define TRACE  "4bf92f3577b34da6a3ce929d0e0e4736"
#define PARENT "00f067aa0ba902b7"

/* What of a traceparent goes on to the nodes; anything else is carried through to the client and the log as it came. */
static void test_trace_id(void)
{
    static const struct {
        const char *parent;
        bool ok;
    } cases[] = {{"00-" TRACE "-" PARENT "-01", true},
                 {"cc-" TRACE "-" PARENT "-01", true}, /* a later version */
                 {"cc-" TRACE "-" PARENT "-01-more", true},
                 {"cc-" TRACE "-" PARENT "-01more", false},
                 {"00-" TRACE "-" PARENT "-01-more", false},
                 {"ff-" TRACE "-" PARENT "-01", false},
                 {"00-" TRACE "-" PARENT "-1", false},
                 {"00-" TRACE "-" PARENT, false},
                 {"00-" TRACE "-0000000000000000-01", false},
                 {"00-00000000000000000000000000000000-" PARENT "-01", false},
                 {"00-4BF92F3577B34DA6A3CE929D0E0E4736-" PARENT "-01", false},
                 {"00_" TRACE "-" PARENT "-01", false},
                 {"00-a-b-01", false},
                 {"", false}};

    CHECK(bt_api_trace_id(NULL) == NULL);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *id = bt_api_trace_id(cases[i].parent);

        CHECK_EQ(id != NULL, cases[i].ok);
        CHECK(id == NULL || strncmp(id, TRACE, 32) == 0);
    }
}

int main(void)
{
    test_trace_id();
    test_whole();
    test_stream();
    test_text();
    test_logprobs();
    test_chat();
    test_errors();
    test_endpoints();
    test_headers();
    test_disconnect();
    test_retry();
    test_many();
    test_limits();
    test_slow_client();
    CHECK_EQ(fake_failures(), 0);
    return bt_test_done();
}
