/* The request log: the file under rotation, full disks and overload, and what its lines say of requests that went well,
 * were tried again, were refused, or were given up. */

#include <jansson.h>
#include <stdio.h>
#include <sys/stat.h>
#include "base/clock.h"
#include "base/mem.h"
#include "router/request_log.h"
#include "router/token_gaps.h"
#include "tests/check.h"
#include "tests/tempfile.h"
#include "tests/unit/router/fake_cluster.h"

static struct fake_cluster c;
static struct bt_buf body;

/* The lines of a file, each parsed. */
static json_t *lines(const char *name)
{
    json_t *all = json_array();
    FILE *f = fopen(bt_temp_path(name), "r");
    static char line[1 << 20];

    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        json_t *o = json_loads(line, 0, NULL);

        CHECK(o != NULL);
        json_array_append_new(all, o != NULL ? o : json_null());
    }
    if (f != NULL) {
        (void)fclose(f);
    }
    return all;
}

static void add(struct bt_request_log *l, const char *text)
{
    struct bt_buf b = {0};

    bt_buf_adds(&b, text);
    bt_request_log_add(l, &b);
    bt_buf_fini(&b);
}

static void drain(struct bt_net_loop *loop, const struct bt_request_log *l, uint64_t n)
{
    uint64_t end = bt_clock_ns() + 5 * BT_NS_PER_S;
    struct bt_request_log_stats s = bt_request_log_stats(l);

    while (s.written + s.lost < n && bt_clock_ns() < end) {
        bt_net_loop_step(loop, BT_NS_PER_MS);
        s = bt_request_log_stats(l);
    }
    CHECK_EQ(s.written + s.lost, n);
}

static void test_gaps(void)
{
    struct bt_token_gaps g = {0};

    CHECK_EQ(bt_token_gaps_quantile(&g, 0.5), 0);
    for (uint64_t i = 1; i <= 1000; i++) {
        bt_token_gaps_add(&g, i * 100000, 1);
    }
    CHECK_NEAR((double)bt_token_gaps_quantile(&g, 0.5), 50e6, 4e6);
    CHECK_NEAR((double)bt_token_gaps_quantile(&g, 0.99), 99e6, 7e6);
    CHECK_EQ(g.max_ns, 100000000);
    CHECK(bt_token_gaps_quantile(&g, 1) <= g.max_ns);
    g = (struct bt_token_gaps){0};
    bt_token_gaps_add(&g, 0, 3);
    bt_token_gaps_add(&g, UINT64_MAX, 1);
    CHECK_EQ(bt_token_gaps_quantile(&g, 0.5) < 20000, 1);
    CHECK(bt_token_gaps_quantile(&g, 1) > UINT64_C(60) * BT_NS_PER_S);
}

static void test_rotation(struct bt_net_loop *loop)
{
    struct bt_request_log *l = NULL;
    struct bt_err err = {0};
    struct stat st;

    CHECK_EQ(bt_request_log_open(loop, "/nonexistent/log", 0, &l, &err), BT_ERR_IO);
    CHECK(strstr(err.msg, "/nonexistent/log") != NULL);
    CHECK_EQ(bt_request_log_open(loop, bt_temp_path("a"), 0, &l, &err), BT_OK);
    CHECK(stat(bt_temp_path("a"), &st) == 0 && (st.st_mode & 07) == 0);
    for (int i = 0; i < 100; i++) {
        add(l, "{\"n\":1}\n");
    }
    drain(loop, l, 100);
    CHECK_EQ(rename(bt_temp_path("a"), bt_temp_path("b")), 0);
    add(l, "{\"n\":2}\n");
    drain(loop, l, 101);
    bt_request_log_reopen(l);
    add(l, "{\"n\":3}\n");
    add(l, "{\"n\":4}\n");
    bt_request_log_close(l); /* writes what waits */
    json_t *old = lines("b"), *new = lines("a");

    CHECK_EQ(json_array_size(old), 101);
    CHECK_EQ(json_array_size(new), 2);
    json_decref(old);
    json_decref(new);
}

static void test_failing_disk(struct bt_net_loop *loop)
{
    struct bt_request_log *l = NULL;
    struct bt_err err = {0};

    CHECK_EQ(symlink("/dev/full", bt_temp_path("full")), 0);
    CHECK_EQ(bt_request_log_open(loop, bt_temp_path("full"), 0, &l, &err), BT_OK);
    for (uint64_t i = 1; i <= 3; i++) {
        add(l, "{}\n");
        drain(loop, l, i);
    }
    CHECK_EQ(bt_request_log_stats(l).lost, 3);
    CHECK_EQ(unlink(bt_temp_path("full")), 0);
    bt_request_log_reopen(l);
    add(l, "{}\n");
    drain(loop, l, 4);
    CHECK_EQ(bt_request_log_stats(l).written, 1);
    bt_request_log_close(l);
}

static void test_bound(struct bt_net_loop *loop)
{
    struct bt_request_log *l = NULL;
    struct bt_err err = {0};

    CHECK_EQ(bt_request_log_open(loop, bt_temp_path("c"), 64, &l, &err), BT_OK);
    for (int i = 0; i < 1000; i++) { /* the loop does not run: at most one batch leaves */
        add(l, "{\"n\":\"0123456789\"}\n");
    }
    CHECK(bt_request_log_stats(l).lost >= 990);
    drain(loop, l, 1000);
    struct bt_request_log_stats s = bt_request_log_stats(l);

    bt_request_log_close(l);
    json_t *all = lines("c");

    CHECK_EQ(json_array_size(all), s.written);
    json_decref(all);
}

/* ---- lines ---- */

static double number(const json_t *o, const char *name)
{
    const json_t *v = json_object_get(o, name);

    CHECK(json_is_number(v));
    return json_number_value(v);
}

static const char *text(const json_t *o, const char *name)
{
    const char *s = json_string_value(json_object_get(o, name));

    return s != NULL ? s : "(none)";
}

static void check_plain(const json_t *o)
{
    const json_t *seq = json_array_get(json_object_get(o, "sequences"), 0);
    const json_t *a = json_array_get(json_object_get(seq, "attempts"), 0);

    CHECK_STR(text(o, "request_id"), "plain");
    CHECK_STR(text(o, "traceparent"), "00-1-2-01");
    CHECK_STR(text(o, "key"), "alice");
    CHECK_STR(text(o, "endpoint"), "/v1/completions");
    CHECK_STR(text(o, "finish_reason"), "length");
    CHECK_EQ(number(o, "status"), 200);
    CHECK_EQ(number(o, "prompt_tokens"), 4);
    CHECK_EQ(number(o, "completion_tokens"), 5);
    CHECK(json_is_null(json_object_get(o, "error")));
    CHECK(number(o, "duration_ms") > 0 && strlen(text(o, "time")) == 24);
    CHECK_EQ(json_array_size(json_object_get(o, "sequences")), 1);
    CHECK_STR(text(seq, "prefill"), "p1");
    CHECK_STR(text(seq, "decode"), "d2");
    CHECK_EQ(number(seq, "completion_tokens"), 5);
    CHECK(number(json_object_get(seq, "itl_ms"), "max") > 0);
    CHECK(number(seq, "first_token_at_ms") <= number(seq, "last_token_at_ms"));
    CHECK(number(seq, "last_token_at_ms") <= number(o, "duration_ms"));
    CHECK_EQ(number(seq, "n_attempts"), 1);
    CHECK_EQ(json_array_size(json_object_get(seq, "attempts")), 1);
    CHECK(number(a, "start_at_ms") <= number(a, "landed_at_ms"));
    CHECK(json_is_null(json_object_get(a, "end_at_ms")));
}

static void check_retried(const json_t *o)
{
    const json_t *seq = json_array_get(json_object_get(o, "sequences"), 1);
    uint32_t n = 0;

    CHECK_STR(text(o, "finish_reason"), "length");
    CHECK_EQ(json_array_size(json_object_get(o, "sequences")), 2);
    for (size_t i = 0; i < 2; i++) {
        const json_t *list =
            json_object_get(json_array_get(json_object_get(o, "sequences"), i), "attempts");

        for (size_t k = 0; k + 1 < json_array_size(list); k++) {
            CHECK_STR(text(json_array_get(list, k), "reason"), "refused");
            CHECK(strstr(text(json_array_get(list, k), "why"), "decode node d2") != NULL);
            CHECK(number(json_array_get(list, k), "end_at_ms") > 0);
            n++;
        }
    }
    CHECK(n >= 1);
    CHECK_EQ(number(seq, "index"), 1);
}

static void test_lines(void)
{
    struct bt_err err = {0};
    const char *keys = "sesame alice\n";

    fake_start(&c, 1, 1);
    CHECK_EQ(bt_router_keys_load(&c.router.keys, "--api-key-file",
                                 bt_temp_write("keys", keys, strlen(keys)), &err),
             BT_OK);
    CHECK_EQ(bt_request_log_open(c.loop, bt_temp_path("lines"), 0, &c.router.request_log, &err),
             BT_OK);
    CHECK_EQ(fake_http_call(&c, "POST", "/v1/completions",
                            "authorization: Bearer sesame\r\nx-request-id: plain\r\n"
                            "traceparent: 00-1-2-01\r\n",
                            "{\"prompt\":\"abc\",\"max_tokens\":5}", &body, NULL, 0),
             200);
    c.nodes[1].refuse = 1;
    CHECK_EQ(fake_http_call(&c, "POST", "/v1/completions", "authorization: Bearer sesame\r\n",
                            "{\"prompt\":\"abc\",\"max_tokens\":5,\"n\":2}", &body, NULL, 0),
             200);
    CHECK_EQ(fake_http_call(&c, "POST", "/v1/chat/completions", "authorization: Bearer sesame\r\n",
                            "{\"top_p\":7", &body, NULL, 0),
             400);
    CHECK_EQ(fake_http_call(&c, "POST", "/v1/completions", "", "{}", &body, NULL, 0), 401);
    struct fake_http h;

    c.nodes[0].hold = c.nodes[1].hold = true;
    fake_http_open(&c, &h, "POST", "/v1/completions",
                   "authorization: Bearer sesame\r\nx-request-id: gone\r\n",
                   "{\"prompt\":\"abc\",\"max_tokens\":5}");
    FAKE_UNTIL(&c, c.router.n_gens == 1 && bt_rt_core_stats(c.router.core)->running == 1);
    fake_http_close(&h);
    FAKE_UNTIL(&c, c.router.n_gens == 0);
    CHECK_EQ(fake_get(&c, "/metrics", &body), 200);
    CHECK(strstr(body.data, "\nbaton_request_log_lost_total 0\n") != NULL);
    bt_request_log_close(c.router.request_log);
    c.router.request_log = NULL;
    bt_router_keys_free(&c.router.keys);
    bt_buf_fini(&body);
    fake_stop(&c);
    json_t *all = lines("lines");

    CHECK_EQ(json_array_size(all), 4);
    check_plain(json_array_get(all, 0));
    check_retried(json_array_get(all, 1));
    CHECK_EQ(number(json_array_get(all, 2), "status"), 400);
    CHECK_STR(text(json_array_get(all, 2), "endpoint"), "/v1/chat/completions");
    CHECK_STR(text(json_array_get(all, 2), "key"), "alice");
    CHECK_STR(text(json_array_get(all, 3), "request_id"), "gone");
    CHECK_EQ(number(json_array_get(all, 3), "status"), 499);
    CHECK_STR(text(json_array_get(all, 3), "error"), "the client went away");
    char *dump = json_dumps(all, 0);

    CHECK(strstr(dump, "sesame") == NULL);
    free(dump);
    json_decref(all);
}

int main(void)
{
    static const char *const files[] = {"a", "b", "c", "full", "keys", "lines"};
    struct bt_net_loop *loop = NULL;

    json_object_seed(1);
    test_gaps();
    CHECK_EQ(bt_net_loop_create(&loop), BT_OK);
    test_rotation(loop);
    test_failing_disk(loop);
    test_bound(loop);
    bt_net_loop_destroy(loop);
    test_lines();
    bt_temp_clean(files, sizeof files / sizeof files[0]);
    CHECK_EQ(fake_failures(), 0);
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
