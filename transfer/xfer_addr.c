/* Addresses of the transfer room: text to socket address and back. Owns the syntax; opens nothing. */

#include "transfer/xfer_int.h"
#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

/* Splits at the last colon, taking brackets off; host must hold 64 bytes. */
static bool split(const char *text, char *host, size_t cap, const char **port)
{
    const char *colon = strrchr(text, ':');
    if (colon == NULL || colon == text) {
        return false;
    }
    const char *from = text;
    size_t n = (size_t)(colon - text);
    if (from[0] == '[') {
        if (n < 3 || from[n - 1] != ']') {
            return false;
        }
        from++;
        n -= 2;
    } else if (memchr(from, ':', n) != NULL) {
        return false;
    }
    if (n >= cap) {
        return false;
    }
    memcpy(host, from, n);
    host[n] = 0;
    *port = colon + 1;
    return **port != 0 && strspn(*port, "0123456789") == strlen(*port) && strlen(*port) <= 5;
}

enum bt_status xfer_addr_parse(const char *text, bool resolve, struct sockaddr_storage *out,
                               uint32_t *len, struct bt_err *err)
{
    char host[256];
    const char *port;
    if (!split(text, host, sizeof(host), &port)) {
        return bt_err_set(err, BT_ERR_INVALID, "transfer address \"%s\": want HOST:PORT", text);
    }
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
    struct addrinfo *found = NULL;
    if (!resolve) {
        hints.ai_flags |= AI_NUMERICHOST;
    }
    int rc = getaddrinfo(host, port, &hints, &found);
    if (rc != 0) {
        return bt_err_set(err, BT_ERR_INVALID, "transfer address \"%s\": %s", text,
                          gai_strerror(rc));
    }
    const struct addrinfo *best = found; /* IPv4 where a name has both */
    while (best->ai_family != AF_INET && best->ai_next != NULL) {
        best = best->ai_next;
    }
    best = best->ai_family == AF_INET ? best : found;
    memset(out, 0, sizeof(*out));
    memcpy(out, best->ai_addr, best->ai_addrlen);
    *len = (uint32_t)best->ai_addrlen;
    freeaddrinfo(found);
    return BT_OK;
}

uint16_t xfer_addr_port(const struct sockaddr_storage *a)
{
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    if (a->ss_family == AF_INET6) {
        memcpy(&v6, a, sizeof(v6));
        return ntohs(v6.sin6_port);
    }
    memcpy(&v4, a, sizeof(v4));
    return ntohs(v4.sin_port);
}

void xfer_addr_set_port(struct sockaddr_storage *a, uint16_t port)
{
    if (a->ss_family == AF_INET6) {
        struct sockaddr_in6 v6;
        memcpy(&v6, a, sizeof(v6));
        v6.sin6_port = htons(port);
        memcpy(a, &v6, sizeof(v6));
    } else {
        struct sockaddr_in v4;
        memcpy(&v4, a, sizeof(v4));
        v4.sin_port = htons(port);
        memcpy(a, &v4, sizeof(v4));
    }
}

void xfer_addr_format(const struct sockaddr_storage *a, char *text, size_t cap)
{
    char host[INET6_ADDRSTRLEN] = "?";
    if (a->ss_family == AF_INET6) {
        struct sockaddr_in6 v6;
        memcpy(&v6, a, sizeof(v6));
        inet_ntop(AF_INET6, &v6.sin6_addr, host, sizeof(host));
        snprintf(text, cap, "[%s]:%u", host, (unsigned)ntohs(v6.sin6_port));
    } else {
        struct sockaddr_in v4;
        memcpy(&v4, a, sizeof(v4));
        inet_ntop(AF_INET, &v4.sin_addr, host, sizeof(host));
        snprintf(text, cap, "%s:%u", host, (unsigned)ntohs(v4.sin_port));
    }
}

bool bt_xfer_address_is_loopback(const char *address)
{
    struct sockaddr_storage a;
    uint32_t len;
    if (strncmp(address, "loop:", 5) == 0) {
        return true;
    }
    if (xfer_addr_parse(address, false, &a, &len, NULL) != BT_OK) {
        return false;
    }
    if (a.ss_family == AF_INET6) {
        struct sockaddr_in6 v6;
        memcpy(&v6, &a, sizeof(v6));
        return IN6_IS_ADDR_LOOPBACK(&v6.sin6_addr);
    }
    struct sockaddr_in v4;
    memcpy(&v4, &a, sizeof(v4));
    return (ntohl(v4.sin_addr.s_addr) >> 24) == 127;
}

bool bt_xfer_address_is_any(const char *address)
{
    struct sockaddr_storage a;
    uint32_t len;
    if (xfer_addr_parse(address, false, &a, &len, NULL) != BT_OK) {
        return false;
    }
    if (a.ss_family == AF_INET6) {
        struct sockaddr_in6 v6;
        memcpy(&v6, &a, sizeof(v6));
        return IN6_IS_ADDR_UNSPECIFIED(&v6.sin6_addr);
    }
    struct sockaddr_in v4;
    memcpy(&v4, &a, sizeof(v4));
    return v4.sin_addr.s_addr == htonl(INADDR_ANY);
}
