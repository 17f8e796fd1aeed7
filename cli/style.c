/* Colours, only where somebody looks, and how much fits there. */

#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include "cli/cli.h"

const char *bt_cli_style(int fd, enum bt_cli_style s)
{
    static const char *const codes[] = {"\033[0m",  "\033[1m",  "\033[2m", "\033[31m",
                                        "\033[32m", "\033[33m", "\033[36m"};
    const char *no = getenv("NO_COLOR");

    return isatty(fd) && (no == NULL || no[0] == '\0') ? codes[s] : "";
}

int bt_cli_width(int fd)
{
    struct winsize w = {0};
    const char *env = getenv("COLUMNS");
    int width = ioctl(fd, TIOCGWINSZ, &w) == 0 ? w.ws_col : 0;

    if (width == 0 && env != NULL) {
        width = (int)strtol(env, NULL, 10);
    }
    width = width <= 0 ? 80 : width;
    return width < 40 ? 40 : width > 240 ? 240 : width;
}

int bt_cli_height(int fd)
{
    struct winsize w = {0};
    int height = ioctl(fd, TIOCGWINSZ, &w) == 0 && w.ws_row > 0 ? w.ws_row : 24;

    return height < 3 ? 3 : height;
}
