/* Colours, only where somebody looks. */

#include <stdlib.h>
#include <unistd.h>
#include "cli/cli.h"

const char *bt_cli_style(int fd, enum bt_cli_style s)
{
    static const char *const codes[] = {"\033[0m",  "\033[1m",  "\033[2m", "\033[31m",
                                        "\033[32m", "\033[33m", "\033[36m"};
    const char *no = getenv("NO_COLOR");

    return isatty(fd) && (no == NULL || no[0] == '\0') ? codes[s] : "";
}
