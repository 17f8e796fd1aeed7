/* The call object that both sides share: sending, deadlines as data, and the rule that on_close
 * comes once and memory outlives the callbacks on the stack. What a call means on the wire is the
 * server's and the client's file. */

#include "net/grpc.h"
#include "net/grpc_int.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"

struct bt_grpc_call *bt_grpc_call_new(struct bt_net_loop *l, bool client, size_t message_max,
                                      struct bt_grpc_call **list)
{
    struct bt_grpc_call *c = bt_calloc(1, sizeof *c);

    if (c != NULL) {
        c->loop = l;
        c->client = client;
        c->in.max = message_max;
        c->deadline_ns = UINT64_MAX;
        c->list = list;
        c->next = *list;
        if (*list != NULL) {
            (*list)->prev = c;
        }
        *list = c;
    }
    return c;
}

static void unlink_call(struct bt_grpc_call *c)
{
    if (c->prev != NULL) {
        c->prev->next = c->next;
    } else {
        *c->list = c->next;
    }
    if (c->next != NULL) {
        c->next->prev = c->prev;
    }
}

static void call_free(struct bt_grpc_call *c)
{
    bt_grpc_deframe_fini(&c->in);
    bt_buf_fini(&c->held);
    bt_buf_fini(&c->pending);
    bt_hstore_fini(&c->meta);
    bt_free(c);
}

void bt_grpc_call_enter(struct bt_grpc_call *c)
{
    c->busy++;
}

void bt_grpc_call_leave(struct bt_grpc_call *c)
{
    c->busy--;
    if (c->busy == 0 && c->zombie) {
        call_free(c);
    }
}

void bt_grpc_call_detach(struct bt_grpc_call *c)
{
    if (c->s != NULL) {
        bt_http_bind(c->s, NULL, NULL);
        c->s = NULL;
    }
    bt_timer_stop(c->loop, &c->deadline);
}

void bt_grpc_call_report(struct bt_grpc_call *c, const struct bt_grpc_end *end)
{
    if (c->closed) {
        return;
    }
    c->closed = true;
    bt_grpc_call_detach(c);
    bt_task_cancel(c->loop, &c->end_task);
    unlink_call(c);
    bt_grpc_call_enter(c);
    if (c->ev != NULL && c->ev->on_close != NULL) {
        c->ev->on_close(c, c->user, end);
    }
    c->zombie = true;
    bt_grpc_call_leave(c);
}

static void on_end_task(struct bt_task *task, void *arg)
{
    struct bt_grpc_call *c = arg;
    struct bt_grpc_end end = {.status = c->end_status, .message = c->end_message};

    (void)task;
    bt_grpc_call_report(c, &end);
}

void bt_grpc_call_report_all(struct bt_grpc_call **list, enum bt_grpc_status st,
                             const char *message)
{
    while (*list != NULL) {
        struct bt_grpc_call *c = *list;
        struct bt_grpc_end end = {.status = st, .message = message};
        if (c->ending) {
            end.status = c->end_status;
            end.message = c->end_message;
        }
        bt_grpc_call_report(c, &end);
    }
}

void bt_grpc_call_end_later(struct bt_grpc_call *c, enum bt_grpc_status st, const char *message)
{
    if (c->closed || c->ending) {
        return;
    }
    c->ending = true;
    c->end_status = st;
    (void)snprintf(c->end_message, sizeof c->end_message, "%s", message);
    bt_grpc_call_detach(c);
    bt_task_defer(c->loop, &c->end_task, on_end_task, c);
}

bool bt_grpc_call_receive(struct bt_grpc_call *c, const char *data, size_t len,
                          bool (*fn)(void *arg, const uint8_t *data, size_t len),
                          enum bt_grpc_status *st, char *message, size_t message_cap)
{
    switch (bt_grpc_deframe(&c->in, (const uint8_t *)data, len, fn, c)) {
    case BT_GRPC_DEFRAME_OK:
    case BT_GRPC_DEFRAME_STOPPED:
        return true;
    case BT_GRPC_DEFRAME_COMPRESSED:
        *st = BT_GRPC_UNIMPLEMENTED;
        (void)snprintf(message, message_cap, "compressed messages are not supported");
        break;
    case BT_GRPC_DEFRAME_TOO_LARGE:
        *st = BT_GRPC_RESOURCE_EXHAUSTED;
        (void)snprintf(message, message_cap, "message of %zu bytes is over the limit of %zu",
                       c->in.need, c->in.max);
        break;
    case BT_GRPC_DEFRAME_NOMEM:
        *st = BT_GRPC_RESOURCE_EXHAUSTED;
        (void)snprintf(message, message_cap, "out of memory");
        break;
    }
    return false;
}

void *bt_grpc_user(const struct bt_grpc_call *c)
{
    return c->user;
}

const char *bt_grpc_metadata(const struct bt_grpc_call *c, const char *name)
{
    return c->s == NULL ? NULL : bt_http_header_find(c->s->req.headers, c->s->req.n_headers, name);
}

const char *bt_grpc_peer(const struct bt_grpc_call *c)
{
    return c->s == NULL || c->s->req.peer == NULL ? "" : c->s->req.peer;
}

uint64_t bt_grpc_deadline_ns(const struct bt_grpc_call *c)
{
    return c->deadline_ns;
}

size_t bt_grpc_queued(const struct bt_grpc_call *c)
{
    return c->s != NULL ? bt_http_queued(c->s) : c->pending.len;
}

static void respond_headers(struct bt_grpc_call *c)
{
    static const struct bt_http_header headers[] = {
        {"content-type", "application/grpc"},
        {"grpc-accept-encoding", "identity"},
    };

    bt_http_respond(c->s, 200, headers, 2);
}

size_t bt_grpc_send(struct bt_grpc_call *c, const void *data, size_t len)
{
    uint8_t head[5] = {0, (uint8_t)(len >> 24), (uint8_t)(len >> 16), (uint8_t)(len >> 8),
                       (uint8_t)len};

    if (c->finished || c->closed || c->ending || len > UINT32_MAX) {
        return 0;
    }
    if (c->s == NULL) {
        if (!bt_grpc_frame(&c->pending, data, len)) {
            bt_grpc_call_end_later(c, BT_GRPC_RESOURCE_EXHAUSTED, "out of memory");
        }
        c->over_high = c->over_high || c->pending.len >= c->write_high;
        return c->pending.len;
    }
    if (!c->client && !c->s->responded) {
        respond_headers(c);
    }
    (void)bt_http_write(c->s, head, sizeof head);
    return bt_http_write(c->s, data, len);
}
