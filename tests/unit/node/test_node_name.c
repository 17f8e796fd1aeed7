/* Default names: unique while they are held, the same again afterwards, short whatever the machine is called. */

#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "node/node_name.h"
#include "tests/check.h"

static long number_of(const char *name)
{
    const char *dash = strrchr(name, '-');

    return dash != NULL ? strtol(dash + 1, NULL, 10) : -1;
}

int main(void)
{
    char first[BT_NODE_NAME_BYTES], second[BT_NODE_NAME_BYTES], again[BT_NODE_NAME_BYTES];
    char role[32], host[256] = "", *dot;

    /* a role of this test's own: daemons may run beside it */
    snprintf(role, sizeof role, "test%ld", (long)getpid());
    int a = bt_node_default_name(role, first);
    int b = bt_node_default_name(role, second);

    CHECK(a >= 0 && b >= 0);
    CHECK(strstr(first, role) != NULL);
    CHECK(gethostname(host, sizeof host - 1) == 0);
    dot = strchr(host, '.');
    if (dot != NULL) {
        *dot = '\0';
    }
    CHECK(strncmp(first, host, strlen(host) < 32 ? strlen(host) : 32) == 0);
    CHECK_EQ(number_of(first), 0);
    CHECK_EQ(number_of(second), 1);
    close(a);
    a = bt_node_default_name(role, again);
    CHECK_STR(again, first);

    /* a process that ends gives its number back */
    close(b);
    pid_t child = fork();

    if (child == 0) {
        _exit(bt_node_default_name(role, second) >= 0 && number_of(second) == 1 ? 0 : 1);
    }
    int status = -1;

    CHECK(waitpid(child, &status, 0) == child && status == 0);
    b = bt_node_default_name(role, second);
    CHECK_EQ(number_of(second), 1);
    close(a);
    close(b);
    return bt_test_done();
}
