/* Streams over HTTP/1.1, read with as little work as can be: one epoll loop, one connection for each stream. Owns the
 * sockets and the parsing of chunks and events. */

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/clock.h"
#include "base/mem.h"
#include "bench/router/load_shared.h"
#include "net/addr.h"

#define LINE_MAX_BYTES 4096u
#define START_NS       BT_NS_PER_S
#define PAUSE_NS       (50 * BT_NS_PER_MS) /* after a refusal */

enum part { HEAD, SIZE, DATA, DATA_END };

struct conn {
    struct bench_reader r;
    struct conn *next; /* of those that ask later */
    int fd;
    bool busy, failed, done; /* done: [DONE] was seen */
    uint64_t due;            /* when to ask, if not busy */
    int status;
    enum part part;
    size_t left; /* of the chunk */
    char line[LINE_MAX_BYTES];
    uint32_t n_line;
};

struct client {
    struct bench_shared *b;
    struct sockaddr_in to;
    char host[64];
    int epoll;
    struct conn *conns, *idle;
    char buf[65536];
};

static void die(const char *what)
{
    fprintf(stderr, "bench-router: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void conn_open(struct client *c, struct conn *x)
{
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = x};
    int one = 1;

    x->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (x->fd < 0 || connect(x->fd, (struct sockaddr *)&c->to, sizeof c->to) != 0 ||
        setsockopt(x->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) != 0 ||
        epoll_ctl(c->epoll, EPOLL_CTL_ADD, x->fd, &e) != 0) {
        die("connect");
    }
}

static void conn_close(struct conn *x)
{
    if (x->fd >= 0) {
        (void)close(x->fd);
        x->fd = -1;
    }
    x->busy = false;
}

static void ask_later(struct client *c, struct conn *x, uint64_t pause)
{
    x->busy = false;
    x->due = bt_clock_ns() + pause;
    x->next = c->idle;
    c->idle = x;
}

static void conn_ask(struct client *c, struct conn *x)
{
    char body[1024], out[2048];
    size_t len = bench_body(c->b, x->r.slot, body, sizeof body);
    int n = snprintf(out, sizeof out,
                     "POST /v1/%s HTTP/1.1\r\nhost: %s\r\ncontent-type: application/json\r\n"
                     "content-length: %zu\r\n\r\n%s",
                     c->b->chat ? "chat/completions" : "completions", c->host, len, body);

    if (x->fd < 0) {
        conn_open(c, x);
    }
    x->r.index = x->r.bytes = 0;
    x->r.t_ask = bt_clock_ns();
    x->part = HEAD;
    x->n_line = 0;
    x->status = 0;
    x->done = x->failed = false;
    x->busy = true;
    if (send(x->fd, out, (size_t)n, MSG_NOSIGNAL) != n) {
        conn_close(x);
        ask_later(c, x, PAUSE_NS);
        atomic_fetch_add(&c->b->n_failed, 1);
    }
}

/* A data line of an event: its text is what stands after "content":" or "text":". */
static void on_event(struct client *c, struct conn *x, uint64_t now)
{
    const char *key = c->b->chat ? "\"content\":\"" : "\"text\":\"";
    char *text;

    x->line[x->n_line] = '\0';
    if (strcmp(x->line, "data: [DONE]") == 0) {
        x->done = true;
        return;
    }
    text = strstr(x->line, key);
    if (text != NULL) {
        text += strlen(key);
        bench_received(c->b, &x->r, strcspn(text, "\""), now);
    }
}

static void on_bytes(struct client *c, struct conn *x, const char *p, size_t n, uint64_t now)
{
    for (size_t i = 0; i < n; i++) {
        const char *nl = memchr(p + i, '\n', n - i);
        size_t len = nl != NULL ? (size_t)(nl - p) - i : n - i;

        if (x->n_line + len >= LINE_MAX_BYTES) {
            x->failed = true;
            return;
        }
        memcpy(x->line + x->n_line, p + i, len);
        x->n_line += (uint32_t)len;
        i += len;
        if (nl != NULL) {
            if (x->n_line > 6 && memcmp(x->line, "data: ", 6) == 0) {
                on_event(c, x, now);
            }
            x->n_line = 0;
        }
    }
}

static void conn_over(struct client *c, struct conn *x)
{
    uint64_t pause = PAUSE_NS;

    if (x->status == 429 || x->status == 503) {
        atomic_fetch_add(&c->b->n_refused, 1);
    } else if (x->status != 200 || !x->done || x->r.index != c->b->max_tokens) {
        if (atomic_fetch_add(&c->b->n_failed, 1) == 0) {
            fprintf(stderr, "bench-router: the first failure: status %d, %u tokens\n", x->status,
                    x->r.index);
        }
    } else {
        atomic_fetch_add(&c->b->n_done, 1);
        pause = 0;
    }
    ask_later(c, x, pause);
}

/* A line of the head or a chunk's size is complete in x->line. */
static void on_head_line(struct client *c, struct conn *x)
{
    x->line[x->n_line] = '\0';
    if (x->part == SIZE) {
        x->left = strtoul(x->line, NULL, 16);
        x->part = x->left > 0 ? DATA : DATA_END;
        x->n_line = 0;
        return;
    }
    if (x->status == 0) {
        x->status = x->n_line > 12 ? (int)strtol(x->line + 9, NULL, 10) : -1;
    } else if (x->n_line <= 1) { /* an error's body is not read */
        if (x->status != 200) {
            conn_close(x);
            conn_over(c, x);
        }
        x->part = SIZE;
    }
    x->n_line = 0;
}

static void on_input(struct client *c, struct conn *x, const char *p, size_t n, uint64_t now)
{
    size_t i = 0;

    while (i < n && x->busy && !x->failed) {
        if (x->part == DATA) {
            size_t take = n - i < x->left ? n - i : x->left;

            on_bytes(c, x, p + i, take, now);
            x->left -= take;
            i += take;
            if (x->left == 0) {
                x->part = DATA_END;
                x->left = 1;
            }
        } else if (x->part == DATA_END) { /* CRLF; behind the empty chunk the end */
            if (p[i++] == '\n') {
                if (x->left == 0) {
                    conn_over(c, x);
                }
                x->part = SIZE;
            }
        } else {
            char ch = p[i++];

            if (ch == '\n') {
                on_head_line(c, x);
            } else if (x->n_line + 1 < LINE_MAX_BYTES) {
                x->line[x->n_line++] = ch;
            }
        }
    }
}

static void on_readable(struct client *c, struct conn *x)
{
    ssize_t n = recv(x->fd, c->buf, sizeof c->buf, MSG_DONTWAIT);

    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    if (n > 0) {
        on_input(c, x, c->buf, (size_t)n, bt_clock_ns());
    }
    if (n <= 0 || x->failed) {
        bool was = x->busy;

        conn_close(x);
        if (was) {
            conn_over(c, x);
        }
    }
}

static void client_init(struct client *c, struct bench_shared *b, const char *address)
{
    struct bt_hostport hp;
    struct bt_err err = {0};

    if (bt_hostport_parse(address, -1, &hp, &err) != BT_OK ||
        inet_pton(AF_INET, hp.host, &c->to.sin_addr) != 1) {
        fprintf(stderr, "bench-router: %s: not an IPv4 address and port\n", address);
        exit(2);
    }
    c->b = b;
    c->to.sin_family = AF_INET;
    c->to.sin_port = htons(hp.port);
    snprintf(c->host, sizeof c->host, "%s", address);
    c->epoll = epoll_create1(0);
    c->conns = bt_calloc(b->n_streams, sizeof *c->conns);
    if (c->epoll < 0 || c->conns == NULL) {
        die("client");
    }
    for (uint32_t i = 0; i < b->n_streams; i++) {
        c->conns[i] = (struct conn){.r.slot = i, .fd = -1};
        ask_later(c, &c->conns[i], START_NS * i / b->n_streams);
    }
}

static void ask_due(struct client *c)
{
    uint64_t now = bt_clock_ns();
    struct conn *list = c->idle;

    c->idle = NULL;
    while (list != NULL) {
        struct conn *x = list;

        list = x->next;
        if (now >= x->due) {
            conn_ask(c, x);
        } else {
            x->next = c->idle;
            c->idle = x;
        }
    }
}

void bench_client_http(struct bench_shared *b, const char *address)
{
    struct client *c = bt_calloc(1, sizeof *c);
    struct epoll_event events[256];

    if (c == NULL) {
        die("client");
    }
    client_init(c, b, address);
    while (!atomic_load(&b->stop)) {
        int n = epoll_wait(c->epoll, events, 256, 10);

        for (int i = 0; i < n; i++) {
            on_readable(c, events[i].data.ptr);
        }
        ask_due(c);
    }
    for (uint32_t i = 0; i < b->n_streams; i++) {
        conn_close(&c->conns[i]);
    }
    (void)close(c->epoll);
    bt_free(c->conns);
    bt_free(c);
}
