/* A small server for net_interop.py and for trying things by hand: the services of echo_service.h
 * on 127.0.0.1. Prints its port; SIGTERM ends it, SIGUSR1 flips the health of baton.test.Echo.
 * usage: net_demo [CERT.pem KEY.pem] */

#include <signal.h>
#include <stdio.h>

#include "echo_service.h"
#include "net/loop.h"

struct demo {
    struct bt_net_loop *loop;
    struct bt_grpc_server *grpc;
    bool sick;
};

static void on_term(void *arg, int signum)
{
    struct demo *d = arg;

    (void)signum;
    bt_net_loop_stop(d->loop);
}

static void on_usr1(void *arg, int signum)
{
    struct demo *d = arg;

    (void)signum;
    d->sick = !d->sick;
    if (bt_grpc_health_set(d->grpc, "baton.test.Echo",
                           d->sick ? BT_GRPC_HEALTH_NOT_SERVING : BT_GRPC_HEALTH_SERVING) !=
        BT_OK) {
        fprintf(stderr, "health_set failed\n");
    }
}

int main(int argc, char **argv)
{
    struct demo d = {.sick = false};
    struct echo_stats stats = {0};
    struct bt_http_server *sv = NULL;
    struct bt_net_signal *term = NULL, *usr1 = NULL;
    struct bt_err err = {.msg = ""};
    struct bt_http_server_opts o = {.listen = "127.0.0.1:0",
                                    .on_request = echo_on_request,
                                    .arg = &stats,
                                    .body_bytes_max = 1 << 20};

    if (argc > 2) {
        o.tls_cert = argv[1];
        o.tls_key = argv[2];
    }
    if (bt_net_loop_create(&d.loop) != BT_OK ||
        bt_grpc_server_create(d.loop, NULL, &d.grpc) != BT_OK ||
        bt_grpc_server_add(d.grpc, echo_methods, echo_n_methods, &stats) != BT_OK ||
        bt_grpc_health_set(d.grpc, "baton.test.Echo", BT_GRPC_HEALTH_SERVING) != BT_OK ||
        bt_http_server_create(d.loop, &o, &sv, &err) != BT_OK ||
        bt_net_signal_start(d.loop, SIGTERM, on_term, &d, &term) != BT_OK ||
        bt_net_signal_start(d.loop, SIGUSR1, on_usr1, &d, &usr1) != BT_OK) {
        fprintf(stderr, "cannot start: %s\n", err.msg);
        return 1;
    }
    bt_grpc_server_attach(d.grpc, sv);
    printf("%u\n", (unsigned)bt_http_server_port(sv));
    fflush(stdout);
    bt_net_loop_run(d.loop);
    bt_net_signal_stop(term);
    bt_net_signal_stop(usr1);
    bt_http_server_close(sv);
    bt_grpc_server_destroy(d.grpc);
    bt_net_loop_destroy(d.loop);
    printf("open %d finished %d cancelled %d deadline %d failed %d\n", stats.calls_open,
           stats.calls_finished, stats.calls_cancelled, stats.calls_deadline, stats.calls_failed);
    return stats.calls_open == 0 ? 0 : 1;
}
