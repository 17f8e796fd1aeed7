/* sd_notify(3) without libsystemd: one datagram to the socket named by NOTIFY_SOCKET. */

#include "base/notify.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include "base/log.h"

void bt_notify(const char *state)
{
    const char *path = getenv("NOTIFY_SOCKET");
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    size_t n = path != NULL ? strlen(path) : 0;

    if (n < 2 || n >= sizeof sa.sun_path || (path[0] != '/' && path[0] != '@')) {
        return;
    }
    memcpy(sa.sun_path, path, n);
    if (path[0] == '@') {
        sa.sun_path[0] = '\0';
    }
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);

    if (fd < 0) {
        bt_log_warn("notify", "cannot open a socket for NOTIFY_SOCKET");
        return;
    }
    socklen_t len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n);

    if (sendto(fd, state, strlen(state), 0, (const struct sockaddr *)&sa, len) < 0) {
        bt_log_warn("notify", "cannot notify %s", path);
    }
    close(fd);
}
