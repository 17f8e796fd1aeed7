#ifndef BT_CLI_SAMPLING_OPTIONS_H
#define BT_CLI_SAMPLING_OPTIONS_H

/* The sampling options of `complete` and `chat`. BT_CLI_UNSET means: not given, the router's default. */

#include "base/options.h"
#include "cli/client.h"
#include "proto/inference.h"

#define BT_CLI_UNSET (-1.0)

struct bt_cli_sampling {
    double temperature, top_p, min_p, top_k, repetition_penalty, seed, max_tokens;
    bool ignore_eos;
    char *stop;
};

/* temperature_dflt, min_p_dflt: text, "-1" for the router's own. */
#define BT_CLI_SAMPLING_ROWS(type, temperature_dflt, min_p_dflt)                                   \
    {"max-tokens",                                                                                 \
     BT_OPT_DOUBLE,                                                                                \
     offsetof(type, sampling.max_tokens),                                                          \
     "-1",                                                                                         \
     -1,                                                                                           \
     4e9,                                                                                          \
     NULL,                                                                                         \
     "N",                                                                                          \
     "Longest answer, in tokens; -1: what is left of the context."},                               \
        {"temperature",                                                                            \
         BT_OPT_DOUBLE,                                                                            \
         offsetof(type, sampling.temperature),                                                     \
         temperature_dflt,                                                                         \
         -1,                                                                                       \
         1e6,                                                                                      \
         NULL,                                                                                     \
         "T",                                                                                      \
         "0: always the likeliest token; higher is freer; -1: the router's default, 1."},          \
        {"top-p",                                                                                  \
         BT_OPT_DOUBLE,                                                                            \
         offsetof(type, sampling.top_p),                                                           \
         "-1",                                                                                     \
         -1,                                                                                       \
         1,                                                                                        \
         NULL,                                                                                     \
         "P",                                                                                      \
         "Sample among the likeliest tokens that together have this probability."},                \
        {"top-k", BT_OPT_DOUBLE, offsetof(type, sampling.top_k),        "-1", -1, 4e9,             \
         NULL,    "K",           "Sample among the K likeliest tokens."},                          \
        {"min-p",                                                                                  \
         BT_OPT_DOUBLE,                                                                            \
         offsetof(type, sampling.min_p),                                                           \
         min_p_dflt,                                                                               \
         -1,                                                                                       \
         1,                                                                                        \
         NULL,                                                                                     \
         "P",                                                                                      \
         "Drop tokens less likely than P times the likeliest."},                                   \
        {"repetition-penalty",                                                                     \
         BT_OPT_DOUBLE,                                                                            \
         offsetof(type, sampling.repetition_penalty),                                              \
         "-1",                                                                                     \
         -1,                                                                                       \
         1e6,                                                                                      \
         NULL,                                                                                     \
         "X",                                                                                      \
         "Above 1: tokens already seen become less likely."},                                      \
        {"seed", BT_OPT_DOUBLE, offsetof(type, sampling.seed),         "-1", -1, 9e15,             \
         NULL,   "N",           "The same seed gives the same answer."},                           \
        {"ignore-eos", BT_OPT_BOOL, offsetof(type, sampling.ignore_eos), NULL, 0, 0,               \
         NULL,         NULL,        "Go on after the end-of-text token."},                         \
    {                                                                                              \
        "stop", BT_OPT_STR, offsetof(type, sampling.stop), NULL, 0, 0, NULL, "TEXT",               \
            "End the answer before this text."                                                     \
    }

/* BT_ERR_INVALID: a value that is neither possible nor BT_CLI_UNSET, named. */
enum bt_status bt_cli_sampling_check(const struct bt_cli_sampling *s,
                                     struct bt_err *err) BT_NODISCARD;

/* What was given, as the wire wants it; borrows s. */
struct bt_inf_sampling bt_cli_sampling_resolve(const struct bt_cli_sampling *s);

#endif
