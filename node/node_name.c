/* Default names of nodes. Owns the numbers, which it holds as abstract socket addresses: the kernel takes them back
 * from the dead, and no file is left behind. Knows nothing of what names are used for. */

#include "node/node_name.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define HOST_BYTES_MAX 32
#define NUMBERS_MAX    1024

/* The lowest free number; -1: none, *fd is then -1 too. */
static int take_number(const char *role, int *fd)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};

    *fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    for (int i = 0; *fd >= 0 && i < NUMBERS_MAX; i++) {
        /* the leading zero byte makes it abstract */
        int n = snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "baton-node/%s/%d", role, i);

        if (bind(*fd, (const struct sockaddr *)&a,
                 (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n)) == 0) {
            return i;
        }
    }
    if (*fd >= 0) {
        close(*fd);
        *fd = -1;
    }
    return -1;
}

int bt_node_default_name(const char *role, char name[BT_NODE_NAME_BYTES])
{
    char host[256] = "";
    int fd;
    int number = take_number(role, &fd);

    if (gethostname(host, sizeof host - 1) != 0 || host[0] == '\0' || host[0] == '.') {
        snprintf(host, sizeof host, "node");
    }
    snprintf(name, BT_NODE_NAME_BYTES, "%.*s-%.16s-%ld",
             (int)(strcspn(host, ".") < HOST_BYTES_MAX ? strcspn(host, ".") : HOST_BYTES_MAX), host,
             role, number >= 0 ? (long)number : (long)getpid());
    return fd;
}
