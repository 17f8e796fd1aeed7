/* Options to wire: absent stays absent. */

#include "cli/sampling_options.h"

#include <math.h>

enum bt_status bt_cli_sampling_check(const struct bt_cli_sampling *s, struct bt_err *err)
{
    const struct {
        const char *name;
        double value;
        bool whole;
    } all[] = {
        {"max-tokens", s->max_tokens, true},
        {"temperature", s->temperature, false},
        {"top-p", s->top_p, false},
        {"top-k", s->top_k, true},
        {"min-p", s->min_p, false},
        {"repetition-penalty", s->repetition_penalty, false},
        {"seed", s->seed, true},
    };

    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        double v = all[i].value;

        if (v < 0 && v != BT_CLI_UNSET) {
            return bt_err_set(err, BT_ERR_INVALID,
                              "--%s %g: want 0 or more, or -1 for the router's default",
                              all[i].name, v);
        }
        if (all[i].whole && v != floor(v)) {
            return bt_err_set(err, BT_ERR_INVALID, "--%s %g: want a whole number", all[i].name, v);
        }
    }
    return BT_OK;
}

struct bt_inf_sampling bt_cli_sampling_resolve(const struct bt_cli_sampling *s)
{
    struct bt_inf_sampling r = {
        .has_temperature = s->temperature >= 0,
        .temperature = (float)s->temperature,
        .has_top_p = s->top_p >= 0,
        .top_p = (float)s->top_p,
        .has_min_p = s->min_p >= 0,
        .min_p = (float)s->min_p,
        .has_top_k = s->top_k >= 0,
        .top_k = s->top_k >= 0 ? (uint32_t)s->top_k : 0,
        .has_repetition_penalty = s->repetition_penalty >= 0,
        .repetition_penalty = (float)s->repetition_penalty,
        .has_seed = s->seed >= 0,
        .seed = s->seed >= 0 ? (uint64_t)s->seed : 0,
        .has_max_tokens = s->max_tokens >= 0,
        .max_tokens = s->max_tokens >= 0 ? (uint32_t)s->max_tokens : 0,
        .ignore_eos = s->ignore_eos,
    };

    if (s->stop != NULL) {
        r.n_stop = 1;
        r.stop = (const char *const *)&s->stop;
    }
    return r;
}
