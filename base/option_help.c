/* The --help text, laid out from the table: an option column, and the wrapped help with default,
 * range and environment name beside it. */

#include "base/options_int.h"

#include <stdio.h>
#include <string.h>

#define INDENT    2u
#define LABEL_MAX 28u /* a longer label stands on its own line */
#define LABEL_GAP 2u

static const char *arg_name(const struct bt_opt *opt)
{
    if (opt->arg != NULL) {
        return opt->arg;
    }
    switch (opt->type) {
    case BT_OPT_STR:
        return "TEXT";
    case BT_OPT_LIST:
        return "TEXT,...";
    case BT_OPT_U32:
    case BT_OPT_U64:
        return "N";
    case BT_OPT_SIZE:
        return "SIZE";
    case BT_OPT_DURATION:
        return "TIME";
    case BT_OPT_DOUBLE:
        return "X";
    case BT_OPT_ENUM:
        return opt->choices;
    case BT_OPT_BOOL:
        break;
    }
    return "";
}

static void label(const struct bt_opt *opt, struct bt_buf *out)
{
    bool on = opt->type == BT_OPT_BOOL && opt->dflt != NULL && strcmp(opt->dflt, "true") == 0;
    const char *arg = arg_name(opt);
    bt_buf_addf(out, "--%s%s%s%s", on ? "[no-]" : "", opt->name, arg[0] != '\0' ? " " : "", arg);
}

static void details(const struct bt_opt *opt, bool with_env, struct bt_buf *out)
{
    char env[128];
    bt_buf_adds(out, opt->help != NULL ? opt->help : "");
    if (opt->type == BT_OPT_LIST) {
        bt_buf_adds(out, " May be given more than once.");
    }
    if ((opt->min != 0 || opt->max != 0) &&
        (opt->type == BT_OPT_U32 || opt->type == BT_OPT_U64 || opt->type == BT_OPT_DOUBLE)) {
        bt_buf_addf(out, " Range: %.15g to %.15g.", opt->min, opt->max);
    }
    if (opt->dflt != NULL && opt->dflt[0] != '\0' &&
        !(opt->type == BT_OPT_BOOL && strcmp(opt->dflt, "false") == 0)) {
        bt_buf_addf(out, " [default: %s]", opt->dflt);
    }
    if (with_env) {
        bt_opt_env_name(opt->name, env, sizeof(env));
        bt_buf_addf(out, " [env: %s]", env);
    }
}

static void pad(struct bt_buf *out, size_t n)
{
    while (n-- > 0) {
        bt_buf_addc(out, ' ');
    }
}

/* Length of the word at s; what stands in brackets ("[default: 3]") is kept together. */
static size_t word_len(const char *s)
{
    const char *close = s[0] == '[' ? strchr(s, ']') : NULL;
    if (close != NULL && close - s < 48) {
        return (size_t)(close - s) + 1;
    }
    return strcspn(s, " \n");
}

/* Words from column `at` on, later lines begin at `left`; ends the line. */
static void wrap(const char *s, size_t at, size_t left, size_t columns, struct bt_buf *out)
{
    bool first = true;
    while (*s != '\0') {
        if (*s == ' ' || *s == '\n') {
            s++;
            continue;
        }
        size_t n = word_len(s);
        if (!first && at + 1 + n > columns) {
            bt_buf_addc(out, '\n');
            pad(out, left);
            at = left;
            first = true;
        }
        if (!first) {
            bt_buf_addc(out, ' ');
            at++;
        }
        bt_buf_add(out, s, n);
        at += n;
        s += n;
        first = false;
    }
    bt_buf_addc(out, '\n');
}

static void one_option(const struct bt_opt *opt, bool with_env, size_t width, unsigned columns,
                       struct bt_buf *out, struct bt_buf *tmp)
{
    size_t left = INDENT + width + LABEL_GAP;
    bt_buf_clear(tmp);
    label(opt, tmp);
    size_t len = tmp->len;
    pad(out, INDENT);
    bt_buf_add(out, tmp->data, len);
    if (len > width) {
        bt_buf_addc(out, '\n');
        pad(out, left);
    } else {
        pad(out, width - len + LABEL_GAP);
    }
    bt_buf_clear(tmp);
    details(opt, with_env, tmp);
    wrap(tmp->data != NULL ? tmp->data : "", left, left, columns, out);
}

static size_t label_width(const struct bt_opt *opts, size_t n, size_t width, struct bt_buf *tmp)
{
    for (size_t i = 0; i < n; i++) {
        bt_buf_clear(tmp);
        label(&opts[i], tmp);
        if (tmp->len > width && tmp->len <= LABEL_MAX) {
            width = tmp->len;
        }
    }
    return width;
}

void bt_opt_help(const struct bt_prog *prog, const struct bt_opt *common, size_t n_common,
                 unsigned columns, struct bt_buf *out)
{
    struct bt_buf tmp = {0};
    size_t width =
        label_width(common, n_common, label_width(prog->opts, prog->n_opts, 0, &tmp), &tmp);

    bt_buf_addf(out, "Usage: %s %s\n", prog->name, prog->usage != NULL ? prog->usage : "[options]");
    if (prog->summary != NULL) {
        bt_buf_addc(out, '\n');
        wrap(prog->summary, 0, 0, columns, out);
    }
    if (prog->n_opts > 0) {
        bt_buf_adds(out, "\nOptions:\n");
        for (size_t i = 0; i < prog->n_opts; i++) {
            one_option(&prog->opts[i], true, width, columns, out, &tmp);
        }
    }
    bt_buf_adds(out, "\nEvery program has:\n");
    for (size_t i = 0; i < n_common; i++) {
        one_option(&common[i], common[i].type != BT_OPT_BOOL, width, columns, out, &tmp);
    }
    bt_buf_adds(out, "\n");
    wrap("An option wins over its environment variable, that over the line \"name = value\" in the "
         "--config file, "
         "and that over the default.",
         0, 0, columns, out);
    if (prog->epilogue != NULL) {
        bt_buf_addf(out, "\n%s%s", prog->epilogue,
                    prog->epilogue[0] != '\0' && prog->epilogue[strlen(prog->epilogue) - 1] == '\n'
                        ? ""
                        : "\n");
    }
    bt_buf_fini(&tmp);
}
