/* The decode node's core when it computes prompts itself: a submit without a peer. What it says to the engine and to the
 * router, and that nobody else hears of it. */

#include "decoded/decoded_core.h"

#include <string.h>
#include "tests/check.h"

#define N_PROMPT 20u

static struct bt_dc_core *core;
static uint64_t now;
static const struct bt_ticket ticket = {{7}};

static void start(void)
{
    const struct bt_dc_opts o = {.max_jobs = 4,
                                 .parked_max = 4,
                                 .context = 64,
                                 .n_groups = 1,
                                 .n_layers = {2},
                                 .park_ns = 100,
                                 .transfer_ns = 1000};

    now = 50;
    CHECK_EQ(bt_dc_core_create(&o, &core), BT_OK);
}

static size_t count(enum bt_dc_action_kind kind)
{
    const struct bt_dc_actions *list = bt_dc_core_actions(core);
    size_t n = 0;

    for (size_t i = 0; i < list->n; i++) {
        n += list->items[i].kind == kind;
    }
    return n;
}

static const struct bt_dc_action *only(enum bt_dc_action_kind kind)
{
    const struct bt_dc_actions *list = bt_dc_core_actions(core);

    CHECK_EQ(list->n, 1);
    CHECK_EQ(list->items[0].kind, kind);
    return &list->items[0];
}

/* The job of a submit with n_tokens tokens of which the last ones are answer already. */
static uint64_t submit(uint32_t n_tokens, uint64_t peer, bool prompt_logprobs)
{
    static uint32_t tokens[64];
    const struct bt_msg_submit s = {.ticket = ticket,
                                    .request_id = "r",
                                    .n_tokens = n_tokens,
                                    .tokens = tokens,
                                    .n_prompt = N_PROMPT,
                                    .sampling = {.max_tokens = 9, .logprobs = true},
                                    .prompt_logprobs = prompt_logprobs,
                                    .peer_instance = peer,
                                    .peer_address = ""};

    bt_dc_on_submit(core, now, 3, &s);
    return bt_dc_core_actions(core)->n > 0 ? bt_dc_core_actions(core)->items[0].job : 0;
}

static void token(uint64_t job, uint32_t index, uint32_t finish)
{
    const struct bt_sampled s = {.token = 40 + index};

    bt_dc_on_engine_token(core, now, job, index, &s, finish);
}

static void test_whole_answer(void)
{
    start();
    uint64_t job = submit(N_PROMPT + 2, 0, true);
    const struct bt_dc_action *a = only(BT_DC_ENGINE_SUBMIT);

    CHECK_EQ(a->request->n_tokens, N_PROMPT + 2);
    CHECK_EQ(a->request->n_prompt, N_PROMPT);
    CHECK(a->request->prompt_logprobs);
    now += 10;
    bt_dc_on_engine_started(core, now, job, 8);
    CHECK_EQ(bt_dc_core_actions(core)->n, 0);
    const struct bt_sampled lp[2] = {{.token = 1}, {.token = 2}};

    bt_dc_on_engine_prompt_logprobs(core, now, job, 1, lp, 2);
    CHECK_EQ(only(BT_DC_OUTPUT)->output.n_prompt_logprobs, 2);
    now += 30;
    token(job, 2, 0);
    a = only(BT_DC_OUTPUT);
    CHECK_EQ(a->router, 3);
    CHECK(a->output.index == 2 && a->output.n_tokens == 1 && a->output.tokens[0].token == 42);
    CHECK(a->output.has_stats && a->output.has_logprobs && a->output.finish == 0);
    CHECK_EQ(a->output.stats.queue_ns, 10);
    CHECK_EQ(a->output.stats.prefill_ns, 30);
    CHECK_EQ(a->output.stats.cached_tokens, 8);
    CHECK_EQ(a->output.stats.prefill_tokens, N_PROMPT + 2 - 8);
    CHECK_EQ(a->output.stats.transferred_tokens, 0);
    CHECK_EQ(a->output.stats.grant_ns, 0);
    token(job, 3, 0);
    CHECK(!only(BT_DC_OUTPUT)->output.has_stats);
    now += 5;
    token(job, 4, 2);
    CHECK_EQ(count(BT_DC_ENGINE_RELEASE), 1);
    CHECK_EQ(count(BT_DC_CONTROL), 0);
    a = &bt_dc_core_actions(core)->items[0];
    CHECK(a->kind == BT_DC_OUTPUT && a->output.finish == 2 && a->output.stats.decode_ns == 5);
    CHECK_EQ(bt_dc_core_jobs(core), 0);
    CHECK_EQ(bt_dc_core_stats(core)->local_prefills, 1);
    CHECK_EQ(bt_dc_core_stats(core)->local_prefill_tokens, N_PROMPT + 2 - 8);
    CHECK_EQ(bt_dc_core_stats(core)->transfers, 0);
    bt_dc_core_destroy(core);
}

static void test_first_token_ends_it(void)
{
    start();
    uint64_t job = submit(N_PROMPT, 0, false);

    bt_dc_on_engine_started(core, now, job, 0);
    token(job, 0, 1);
    const struct bt_dc_action *a = &bt_dc_core_actions(core)->items[0];

    CHECK(a->kind == BT_DC_OUTPUT && a->output.finish == 1 && a->output.has_stats);
    CHECK_EQ(count(BT_DC_OUTPUT), 1);
    CHECK_EQ(count(BT_DC_ENGINE_RELEASE), 1);
    CHECK_EQ(bt_dc_core_jobs(core), 0);
    bt_dc_core_destroy(core);
}

/* Cancelled while it waits, while it is computed, and while it decodes: engine and core forget it at once. */
static void test_cancel(void)
{
    for (unsigned when = 0; when < 3; when++) {
        start();
        uint64_t job = submit(N_PROMPT, 0, false);

        if (when > 0) {
            bt_dc_on_engine_started(core, now, job, 0);
        }
        if (when > 1) {
            token(job, 0, 0);
        }
        bt_dc_on_cancel(core, now, 2, &ticket); /* of another router: not its own */
        CHECK_EQ(bt_dc_core_actions(core)->n, 0);
        if (when == 1) {
            bt_dc_on_router_lost(core, now, 3);
        } else {
            bt_dc_on_cancel(core, now, 3, &ticket);
        }
        CHECK_EQ(bt_dc_core_actions(core)->n, 2);
        CHECK_EQ(count(BT_DC_ENGINE_CANCEL), 1);
        CHECK_EQ(count(BT_DC_ENGINE_RELEASE), 1);
        CHECK_EQ(bt_dc_core_jobs(core), 0);
        token(job, 1, 0); /* was on its way */
        CHECK_EQ(bt_dc_core_actions(core)->n, 0);
        bt_dc_core_destroy(core);
    }
}

static void test_wait_is_bounded(void)
{
    start();
    uint64_t job = submit(N_PROMPT, 0, false);

    now += 1000;
    bt_dc_on_tick(core, now);
    CHECK_EQ(bt_dc_core_actions(core)->n, 0);
    now += 1;
    bt_dc_on_tick(core, now);
    CHECK_EQ(count(BT_DC_ENGINE_RELEASE), 1);
    CHECK_EQ(bt_dc_core_actions(core)->items[0].end.reason, BT_ATTEMPT_REFUSED);
    job = submit(N_PROMPT, 0, false);
    bt_dc_on_engine_started(core, now, job, 0);
    now += 5000; /* it computes: that is bounded by the prompt */
    bt_dc_on_tick(core, now);
    CHECK_EQ(bt_dc_core_actions(core)->n, 0);
    bt_dc_core_destroy(core);
}

static void test_engine_refuses_or_preempts(void)
{
    start();
    uint64_t job = submit(N_PROMPT, 0, false);

    bt_dc_on_engine_failed(core, now, job, BT_ERR_BUSY, "full");
    CHECK_EQ(only(BT_DC_ATTEMPT_END)->end.reason, BT_ATTEMPT_REFUSED);
    job = submit(N_PROMPT, 0, false);
    bt_dc_on_engine_started(core, now, job, 0);
    token(job, 0, 0);
    bt_dc_on_engine_preempted(core, now, job);
    CHECK_EQ(bt_dc_core_actions(core)->items[0].end.reason, BT_ATTEMPT_PREEMPTED);
    CHECK_EQ(count(BT_DC_ENGINE_RELEASE), 0);
    CHECK_EQ(bt_dc_core_jobs(core), 0);
    bt_dc_core_destroy(core);
}

/* A prefill node that claims the ticket gets a refusal, not the sequence. */
static void test_started_for_it(void)
{
    start();
    const struct bt_control m = {
        .kind = BT_CONTROL_STARTED, .ticket = ticket, .started = {.n_tokens = N_PROMPT}};

    (void)submit(N_PROMPT, 0, false);
    bt_dc_on_control(core, now, 9, &m);
    CHECK_EQ(only(BT_DC_CONTROL)->control.kind, BT_CONTROL_REFUSE);
    CHECK_EQ(bt_dc_core_jobs(core), 1);
    bt_dc_core_destroy(core);
}

int main(void)
{
    test_whole_answer();
    test_first_token_ends_it();
    test_cancel();
    test_wait_is_bounded();
    test_engine_refuses_or_preempts();
    test_started_for_it();
    return bt_test_done();
}
