/* Address texts: parsing, printing, classes, and resolving names on the libuv pool. It opens no
 * connection. */

#include "net/addr.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/mem.h"
#include "net/loop_int.h"

static bool port_parse(const char *s, uint16_t *out)
{
    unsigned v = 0;
    size_t n = strlen(s);

    if (n == 0 || n > 5) {
        return false;
    }
    for (size_t i = 0; i < n; i++) {
        if (s[i] < '0' || s[i] > '9') {
            return false;
        }
        v = v * 10 + (unsigned)(s[i] - '0');
    }
    if (v > 65535) {
        return false;
    }
    *out = (uint16_t)v;
    return true;
}

/* Splits text into host [begin, end) and the port text (NULL: none). NULL: fine, else what is
 * wrong. */
static const char *split(const char *text, const char **begin, const char **end, const char **port)
{
    if (text[0] == '[') {
        const char *close = strchr(text, ']');
        struct in6_addr a6;
        char host[INET6_ADDRSTRLEN];
        if (close == NULL) {
            return "missing ']'";
        }
        *begin = text + 1;
        *end = close;
        size_t n = (size_t)(close - *begin);
        if (n >= sizeof host) {
            return "not an IPv6 address between brackets";
        }
        memcpy(host, *begin, n);
        host[n] = '\0';
        if (inet_pton(AF_INET6, host, &a6) != 1) {
            return "not an IPv6 address between brackets";
        }
        if (close[1] != '\0' && close[1] != ':') {
            return "expected ':' after ']'";
        }
        *port = close[1] == ':' ? close + 2 : NULL;
        return NULL;
    }
    if (strstr(text, "://") != NULL) {
        return "expected HOST:PORT, not a URL";
    }
    const char *colon = strchr(text, ':');
    if (colon != NULL && strchr(colon + 1, ':') != NULL) {
        return "an IPv6 address needs brackets";
    }
    *begin = text;
    *end = colon != NULL ? colon : text + strlen(text);
    *port = colon != NULL ? colon + 1 : NULL;
    return NULL;
}

enum bt_status bt_hostport_parse(const char *text, int dflt_port, struct bt_hostport *out,
                                 struct bt_err *err)
{
    const char *begin = text, *end = text, *port = NULL;
    const char *wrong = split(text, &begin, &end, &port);

    if (wrong != NULL) {
        return bt_err_set(err, BT_ERR_INVALID, "address \"%s\": %s", text, wrong);
    }
    size_t n = (size_t)(end - begin);
    if (n >= sizeof out->host) {
        return bt_err_set(err, BT_ERR_INVALID, "address \"%.64s…\": host name too long", text);
    }
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)begin[i];
        if (c <= ' ' || c == 0x7f || c == '/' || c == '@') {
            return bt_err_set(err, BT_ERR_INVALID, "address \"%s\": bad character in host name",
                              text);
        }
    }
    if (n == 0 && port == NULL) {
        return bt_err_set(err, BT_ERR_INVALID, "address is empty, expected HOST:PORT");
    }
    uint16_t p = 0;
    if (port == NULL) {
        if (dflt_port < 0) {
            return bt_err_set(err, BT_ERR_INVALID, "address \"%s\": no port, expected HOST:PORT",
                              text);
        }
        p = (uint16_t)dflt_port;
    } else if (!port_parse(port, &p)) {
        return bt_err_set(err, BT_ERR_INVALID, "address \"%s\": port must be 0 to 65535", text);
    }
    if (n == 0) {
        memcpy(out->host, "0.0.0.0", 8);
    } else {
        memcpy(out->host, begin, n);
        out->host[n] = '\0';
    }
    out->port = p;
    return BT_OK;
}

char *bt_hostport_text(const struct bt_hostport *hp, char out[BT_ADDR_TEXT_MAX])
{
    const char *fmt = strchr(hp->host, ':') != NULL ? "[%.245s]:%u" : "%.255s:%u";

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral" /* one of the two literals above */
    (void)snprintf(out, BT_ADDR_TEXT_MAX, fmt, hp->host, (unsigned)hp->port);
#pragma GCC diagnostic pop
    return out;
}

static bool v6_of(const char *host, struct in6_addr *a6)
{
    return inet_pton(AF_INET6, host, a6) == 1;
}

bool bt_hostport_is_loopback(const struct bt_hostport *hp)
{
    struct in_addr a4;
    struct in6_addr a6;

    if (strcasecmp(hp->host, "localhost") == 0) {
        return true;
    }
    if (inet_pton(AF_INET, hp->host, &a4) == 1) {
        return ntohl(a4.s_addr) >> 24 == 127;
    }
    if (v6_of(hp->host, &a6)) {
        return IN6_IS_ADDR_LOOPBACK(&a6) || (IN6_IS_ADDR_V4MAPPED(&a6) && a6.s6_addr[12] == 127);
    }
    return false;
}

bool bt_hostport_is_any(const struct bt_hostport *hp)
{
    struct in_addr a4;
    struct in6_addr a6;

    if (inet_pton(AF_INET, hp->host, &a4) == 1) {
        return a4.s_addr == 0;
    }
    return v6_of(hp->host, &a6) && IN6_IS_ADDR_UNSPECIFIED(&a6);
}

void bt_hostport_from_sockaddr(const struct sockaddr *sa, struct bt_hostport *out)
{
    memset(out, 0, sizeof *out);
    if (sa->sa_family == AF_INET) {
        struct sockaddr_in in;
        memcpy(&in, sa, sizeof in);
        (void)inet_ntop(AF_INET, &in.sin_addr, out->host,
                        sizeof out->host); /* the buffer suffices */
        out->port = ntohs(in.sin_port);
    } else if (sa->sa_family == AF_INET6) {
        struct sockaddr_in6 in;
        memcpy(&in, sa, sizeof in);
        (void)inet_ntop(AF_INET6, &in.sin6_addr, out->host, sizeof out->host);
        out->port = ntohs(in.sin6_port);
    }
}

struct resolve {
    uv_getaddrinfo_t req;
    bt_resolve_fn *done;
    void *arg;
    uint16_t port;
};

static void on_resolved(uv_getaddrinfo_t *req, int status, struct addrinfo *res)
{
    struct resolve *r = req->data;
    struct bt_hostport addrs[BT_RESOLVE_MAX];
    size_t n = 0;

    for (struct addrinfo *ai = res; ai != NULL && n < BT_RESOLVE_MAX; ai = ai->ai_next) {
        bool seen = false;
        bt_hostport_from_sockaddr(ai->ai_addr, &addrs[n]);
        addrs[n].port = r->port;
        for (size_t i = 0; i < n; i++) {
            seen = seen || strcmp(addrs[i].host, addrs[n].host) == 0;
        }
        if (!seen && addrs[n].host[0] != '\0') {
            n++;
        }
    }
    uv_freeaddrinfo(res);
    if (status != 0 || n == 0) {
        r->done(r->arg, status == UV_EAI_MEMORY ? BT_ERR_NOMEM : BT_ERR_NOT_FOUND, NULL, 0,
                status != 0 ? uv_strerror(status) : "no address");
    } else {
        r->done(r->arg, BT_OK, addrs, n, "");
    }
    bt_free(r);
}

enum bt_status bt_net_resolve(struct bt_net_loop *l, const struct bt_hostport *hp,
                              bt_resolve_fn *done, void *arg)
{
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct resolve *r = bt_calloc(1, sizeof *r);

    if (r == NULL) {
        return BT_ERR_NOMEM;
    }
    r->req.data = r;
    r->done = done;
    r->arg = arg;
    r->port = hp->port;
    int rc = uv_getaddrinfo(&l->uv, &r->req, on_resolved, hp->host, NULL, &hints);
    if (rc != 0) {
        bt_free(r);
        return rc == UV_ENOMEM ? BT_ERR_NOMEM : BT_ERR_INVALID;
    }
    return BT_OK;
}
