/* grpc.health.v1: a list of services with a status, and the watchers of each. Who sets a status,
 * and why, is not its business. */

#include "net/grpc.h"
#include "net/grpc_int.h"

#include <string.h>

#include "base/mem.h"
#include "net/pb_wire.h"

#define SERVICE_NAME_MAX 256
#define SERVICE_UNKNOWN  3 /* ServingStatus of a name without an entry, in Watch */

struct health_entry {
    struct health_entry *next;
    enum bt_grpc_health status;
    char name[SERVICE_NAME_MAX];
};

struct health_watch {
    struct health_watch *next, *prev;
    struct bt_grpc_server *server;
    struct bt_grpc_call *call;
    unsigned told;
    char name[SERVICE_NAME_MAX];
};

static struct health_entry *find(struct bt_grpc_server *g, const char *name)
{
    struct health_entry *e = g->health;

    while (e != NULL && strcmp(e->name, name) != 0) {
        e = e->next;
    }
    return e;
}

/* HealthCheckRequest{service = 1} */
static bool read_service(const uint8_t *data, size_t len, char name[SERVICE_NAME_MAX])
{
    struct bt_pb_in in = {.p = data, .end = data + len};
    struct bt_pb_field f;

    name[0] = '\0';
    while (bt_pb_next(&in, &f)) {
        if (bt_pb_is(&f, 1, 2)) {
            if (f.len >= SERVICE_NAME_MAX || memchr(f.data, '\0', f.len) != NULL) {
                return false;
            }
            memcpy(name, f.data, f.len);
            name[f.len] = '\0';
        }
    }
    return !in.bad;
}

/* HealthCheckResponse{status = 1} */
static size_t write_status(unsigned status, uint8_t out[2])
{
    out[0] = 1 << 3;
    out[1] = (uint8_t)status;
    return 2;
}

static void check_on_message(struct bt_grpc_call *c, void *user, const uint8_t *data, size_t len)
{
    char name[SERVICE_NAME_MAX];
    uint8_t out[2];

    if (!read_service(data, len, name)) {
        bt_grpc_fail(c, BT_GRPC_INVALID_ARGUMENT, "malformed HealthCheckRequest");
        return;
    }
    const struct health_entry *e = find(user, name);
    if (e == NULL) {
        bt_grpc_fail(c, BT_GRPC_NOT_FOUND, "unknown service %s", name);
        return;
    }
    bt_grpc_reply(c, out, write_status(e->status, out));
}

static void watch_tell(struct health_watch *w, unsigned status)
{
    uint8_t out[2];

    if (w->told != status) {
        w->told = status;
        (void)bt_grpc_send(w->call, out,
                           write_status(status, out)); /* two bytes a change: no bound needed */
    }
}

static void watch_on_message(struct bt_grpc_call *c, void *user, const uint8_t *data, size_t len)
{
    struct health_watch *w = user;

    if (!read_service(data, len, w->name)) {
        bt_grpc_fail(c, BT_GRPC_INVALID_ARGUMENT, "malformed HealthCheckRequest");
        return;
    }
    const struct health_entry *e = find(w->server, w->name);
    watch_tell(w, e != NULL ? e->status : SERVICE_UNKNOWN);
}

static void watch_on_close(struct bt_grpc_call *c, void *user, const struct bt_grpc_end *end)
{
    struct health_watch *w = user;

    (void)c;
    (void)end;
    if (w->prev != NULL) {
        w->prev->next = w->next;
    } else {
        w->server->watches = w->next;
    }
    if (w->next != NULL) {
        w->next->prev = w->prev;
    }
    bt_free(w);
}

static void on_check(struct bt_grpc_call *c, void *arg)
{
    static const struct bt_grpc_events events = {.on_message = check_on_message};

    bt_grpc_bind(c, &events, arg);
}

static void on_watch(struct bt_grpc_call *c, void *arg)
{
    static const struct bt_grpc_events events = {.on_message = watch_on_message,
                                                 .on_close = watch_on_close};
    struct bt_grpc_server *g = arg;
    struct health_watch *w = bt_calloc(1, sizeof *w);

    if (w == NULL) {
        bt_grpc_fail(c, BT_GRPC_RESOURCE_EXHAUSTED, "out of memory");
        return;
    }
    w->server = g;
    w->call = c;
    w->next = g->watches;
    if (g->watches != NULL) {
        g->watches->prev = w;
    }
    g->watches = w;
    bt_grpc_bind(c, &events, w);
}

static const struct bt_grpc_method methods[] = {
    {"/grpc.health.v1.Health/Check", BT_GRPC_UNARY, on_check},
    {"/grpc.health.v1.Health/Watch", BT_GRPC_SERVER_STREAM, on_watch},
};

enum bt_status bt_grpc_health_set(struct bt_grpc_server *g, const char *service,
                                  enum bt_grpc_health status)
{
    struct health_entry *e = find(g, service);

    if (e == NULL) {
        if (strlen(service) >= SERVICE_NAME_MAX) {
            return BT_ERR_INVALID;
        }
        e = bt_calloc(1, sizeof *e);
        if (e == NULL) {
            return BT_ERR_NOMEM;
        }
        memcpy(e->name, service, strlen(service));
        e->next = g->health;
        g->health = e;
    }
    e->status = status;
    for (struct health_watch *w = g->watches; w != NULL; w = w->next) {
        if (w->told != 0 && strcmp(w->name, service) == 0) {
            watch_tell(w, status);
        }
    }
    return BT_OK;
}

enum bt_status bt_grpc_health_init(struct bt_grpc_server *g)
{
    enum bt_status st = bt_grpc_server_add(g, methods, sizeof methods / sizeof methods[0], g);

    return st == BT_OK ? bt_grpc_health_set(g, "", BT_GRPC_HEALTH_SERVING) : st;
}

void bt_grpc_health_fini(struct bt_grpc_server *g)
{
    while (g->health != NULL) {
        struct health_entry *e = g->health;
        g->health = e->next;
        bt_free(e);
    }
}
