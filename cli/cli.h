#ifndef BT_CLI_CLI_H
#define BT_CLI_CLI_H

/* The `baton` command: one function per subcommand, argv[0] is the subcommand's name. Each returns
 * an exit code. */

#include <stdbool.h>

int bt_cli_up(int argc, char **argv);
int bt_cli_fetch(int argc, char **argv);
int bt_cli_complete(int argc, char **argv);
int bt_cli_chat(int argc, char **argv);
int bt_cli_status(int argc, char **argv);
int bt_cli_trace(int argc, char **argv);
int bt_cli_drain(int argc, char **argv);
int bt_cli_role(int argc, char **argv);
int bt_cli_quantize(int argc, char **argv);
int bt_cli_perplexity(int argc, char **argv);

/* Escape sequences if standard output (error) is a terminal and NO_COLOR is not set, else "". */
enum bt_cli_style {
    BT_CLI_PLAIN,
    BT_CLI_BOLD,
    BT_CLI_DIM,
    BT_CLI_RED,
    BT_CLI_GREEN,
    BT_CLI_YELLOW,
    BT_CLI_CYAN
};
const char *bt_cli_style(int fd, enum bt_cli_style s);
/* Columns of the terminal at fd; of no terminal: $COLUMNS, else 80. 40 to 240. */
int bt_cli_width(int fd);
/* Rows of it, 24 where there is none; at least 3. */
int bt_cli_height(int fd);

#endif
