/* The kernel's filters on UCX's listening sockets: finding the sockets, writing the filter (or setting the key that
 * stands in for it), and the list of who is due.
 * Knows nothing of UCX but that it listens. */

#include "transfer/xfer_door.h"
#include <dirent.h>
#include <errno.h>
#include <ifaddrs.h>
#include <linux/filter.h>
#include <linux/if.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/hash.h"
#include "base/log.h"
#include "base/mem.h"

#define PROGRAM_MAX 2000 /* instructions; the kernel's default limit for a socket is some 2500 */

/* One bt_xfer at a time may look at what listens in this process: theirs would seem ours. */
static pthread_mutex_t looking = PTHREAD_MUTEX_INITIALIZER;

/* ---- the filter ---- */

struct program {
    struct sock_filter code[PROGRAM_MAX];
    unsigned n;
    bool whole; /* false: it did not fit */
};

static void put(struct program *p, struct sock_filter f)
{
    if (p->n == PROGRAM_MAX) {
        p->whole = false;
        return;
    }
    p->code[p->n++] = f;
}

static uint32_t word(const uint8_t *b)
{
    return (uint32_t)b[0] << 24 | (uint32_t)b[1] << 16 | (uint32_t)b[2] << 8 | b[3];
}

/* Passes a packet whose source address is ip; else goes on behind. */
static void put_ip(struct program *p, const struct xfer_ip *ip)
{
    unsigned words = ip->family == 6 ? 4 : 1;
    unsigned from = ip->family == 6 ? 8 : 12; /* of the source address in the IP header */
    for (unsigned i = 0; i < words; i++) {
        unsigned left =
            words - 1 - i; /* pairs of instructions from here to the RET, which is skipped too */
        put(p, (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
                                            (uint32_t)SKF_NET_OFF + from + 4 * i));
        put(p, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, word(ip->b + 4 * i), 0,
                                            (uint8_t)(2 * left + 1)));
    }
    put(p, (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, UINT32_MAX));
}

/* Nodes on one machine have the same addresses. */
static bool is_due_before(const struct xfer_door *d, uint32_t at, uint32_t ip)
{
    const struct xfer_ip *x = &d->due[at].ips[ip];
    for (uint32_t i = 0; i <= at; i++) {
        uint32_t n = i < at ? d->due[i].n_ips : ip;
        for (uint32_t k = 0; k < n; k++) {
            if (d->due[i].ips[k].family == x->family &&
                memcmp(d->due[i].ips[k].b, x->b, sizeof(x->b)) == 0) {
                return true;
            }
        }
    }
    return false;
}

/* A socket's filter sees the packet from its TCP header on, and the IP header at SKF_NET_OFF. */
static void program_write(const struct xfer_door *d, bool v6, struct program *p)
{
    enum { AT_FLAGS = 13, SYN = 0x02, SYN_ACK = 0x12 };
    p->n = 0;
    p->whole = true;
    put(p, (struct sock_filter)BPF_STMT(BPF_LD | BPF_B | BPF_ABS, AT_FLAGS));
    put(p, (struct sock_filter)BPF_STMT(BPF_ALU | BPF_AND | BPF_K, SYN_ACK));
    put(p, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYN, 1, 0));
    put(p, (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, UINT32_MAX)); /* no connection request */
    for (uint32_t i = 0; i < d->n_due && p->whole; i++) {
        for (uint32_t k = 0; k < d->due[i].n_ips && p->whole; k++) {
            if ((d->due[i].ips[k].family == 6) == v6 && !is_due_before(d, i, k)) {
                put_ip(p, &d->due[i].ips[k]);
            }
        }
    }
    put(p, (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, 0));
}

static bool inode_of(int fd, uint64_t *out)
{
    struct stat st;
    if (fstat(fd, &st) != 0) {
        return false;
    }
    *out = (uint64_t)st.st_ino;
    return true;
}

/* Only what is signed with the key gets through, from any address; and nobody has it. */
static bool key_set(const struct xfer_door *d, const struct door_socket *s, bool shut)
{
    struct tcp_md5sig sig = {.tcpm_flags = TCP_MD5SIG_FLAG_PREFIX, .tcpm_prefixlen = 0};
    sig.tcpm_addr.ss_family = s->v6 ? AF_INET6 : AF_INET;
    if (shut) {
        sig.tcpm_keylen = sizeof(d->key);
        memcpy(sig.tcpm_key, d->key, sizeof(d->key));
    }
    return setsockopt(s->fd, IPPROTO_TCP, TCP_MD5SIG_EXT, &sig, sizeof(sig)) == 0 ||
           (!shut && errno == ENOENT);
}

static bool filter_set(struct xfer_door *d, const struct door_socket *s, struct program *p)
{
    struct sock_fprog prog = {.len = (unsigned short)p->n, .filter = p->code};
    uint64_t inode;
    if (!inode_of(s->fd, &inode) || inode != s->inode) {
        return true; /* closed by UCX: nothing is open there */
    }
    if (!d->by_key && setsockopt(s->fd, SOL_SOCKET, SO_ATTACH_FILTER, &prog, sizeof(prog)) == 0) {
        return true;
    }
    if (!d->by_key) {
        bt_log_info("gate",
                    "UCX's ports open for everyone while a node is expected: no socket filters "
                    "here: %s (CAP_NET_ADMIN may be needed)",
                    strerror(errno));
        bt_random_bytes(d->key, sizeof(d->key));
        d->by_key = true;
    }
    return key_set(d, s, d->n_due == 0);
}

/* Writes the filters of sockets [from, n). False: not all of those who are due fit, and nothing was changed. */
static bool filters_set(struct xfer_door *d, size_t from)
{
    static _Thread_local struct program p4, p6; /* too large for the stack */
    bool set = true;
    program_write(d, false, &p4);
    program_write(d, true, &p6);
    if (!p4.whole || !p6.whole) {
        return false;
    }
    for (size_t i = from; i < d->n_sockets; i++) {
        set = filter_set(d, &d->sockets[i], d->sockets[i].v6 ? &p6 : &p4) && set;
    }
    if (!set && !d->warned) {
        d->warned = true;
        bt_log_warn("gate",
                    "UCX's own ports stay open to everyone: the kernel takes neither filter nor "
                    "key: %s",
                    strerror(errno));
    }
    return true;
}

/* ---- the sockets ---- */

static bool socket_add(struct door_socket **list, size_t *n, size_t *cap,
                       const struct door_socket *s)
{
    if (*n == *cap) {
        size_t more = *cap == 0 ? 32 : 2 * *cap;
        struct door_socket *grown = bt_realloc(*list, more * sizeof(*grown));
        if (grown == NULL) {
            return false;
        }
        *list = grown;
        *cap = more;
    }
    (*list)[(*n)++] = *s;
    return true;
}

/* Whether fd is a listening TCP socket; fills in all but the owner. */
static bool listens(int fd, struct door_socket *s)
{
    struct sockaddr_storage a;
    int on = 0;
    socklen_t len = sizeof(on);
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &on, &len) != 0 || on == 0) {
        return false;
    }
    len = sizeof(a);
    if (getsockname(fd, (struct sockaddr *)&a, &len) != 0 ||
        (a.ss_family != AF_INET && a.ss_family != AF_INET6)) {
        return false;
    }
    *s = (struct door_socket){.fd = fd, .v6 = a.ss_family == AF_INET6};
    return inode_of(fd, &s->inode);
}

static bool is_in(const struct door_socket *list, size_t n, const struct door_socket *s)
{
    for (size_t i = 0; i < n; i++) {
        if (list[i].fd == s->fd && list[i].inode == s->inode) {
            return true;
        }
    }
    return false;
}

/* Calls for every listening socket of the process. False: it cannot be looked at, or no memory. */
static bool each_listening(struct xfer_door *d,
                           bool (*fn)(struct xfer_door *, struct door_socket *, const void *),
                           const void *owner)
{
    DIR *dir = opendir("/proc/self/fd");
    bool done = dir != NULL;
    struct dirent *e;
    while (dir != NULL && (e = readdir(dir)) != NULL) {
        struct door_socket s;
        char *end;
        long fd = strtol(e->d_name, &end, 10);
        if (e->d_name[0] != '.' && *end == 0 && listens((int)fd, &s)) {
            done = fn(d, &s, owner) && done;
        }
    }
    if (dir != NULL) {
        closedir(dir);
    }
    return done;
}

static bool note_before(struct xfer_door *d, struct door_socket *s, const void *owner)
{
    (void)owner;
    return socket_add(&d->before, &d->n_before, &d->cap_before, s);
}

static bool note_new(struct xfer_door *d, struct door_socket *s, const void *owner)
{
    s->owner = owner;
    return is_in(d->before, d->n_before, s) || socket_add(&d->sockets, &d->n_sockets, &d->cap, s);
}

static void cannot_look(struct xfer_door *d)
{
    if (!d->warned) {
        d->warned = true;
        bt_log_warn("gate", "UCX's own ports stay open to everyone: /proc/self/fd cannot be read");
    }
}

void xfer_door_begin(struct xfer_door *d)
{
    pthread_mutex_lock(&looking);
    d->n_before = 0;
    if (!each_listening(d, note_before, NULL)) {
        cannot_look(d);
    }
}

void xfer_door_end(struct xfer_door *d, const void *owner)
{
    size_t from = d->n_sockets;
    if (!each_listening(d, note_new, owner)) {
        cannot_look(d);
    }
    (void)filters_set(d, from); /* who is due fitted before */
    pthread_mutex_unlock(&looking);
}

void xfer_door_cancel(struct xfer_door *d)
{
    (void)d;
    pthread_mutex_unlock(&looking);
}

void xfer_door_forget(struct xfer_door *d, const void *owner)
{
    for (size_t i = d->n_sockets; i-- > 0;) {
        if (d->sockets[i].owner == owner) {
            d->sockets[i] = d->sockets[--d->n_sockets];
        }
    }
}

void xfer_door_fini(struct xfer_door *d)
{
    bt_free(d->sockets);
    bt_free(d->before);
    memset(d, 0, sizeof(*d));
}

/* ---- who is due ---- */

static void due_remove(struct xfer_door *d, uint32_t i)
{
    d->due[i] = d->due[--d->n_due];
}

/* One that is up, the one that has been for longest. False: there is none. */
static bool due_yield(struct xfer_door *d)
{
    uint32_t first = d->n_due;
    for (uint32_t i = 0; i < d->n_due; i++) {
        if (d->due[i].up && (first == d->n_due || d->due[i].until_ns < d->due[first].until_ns)) {
            first = i;
        }
    }
    if (first == d->n_due) {
        return false;
    }
    due_remove(d, first);
    return true;
}

bool xfer_door_expect(struct xfer_door *d, uint64_t instance, const struct xfer_ip *ips, uint32_t n,
                      uint64_t until_ns)
{
    for (uint32_t i = d->n_due; i-- > 0;) {
        if (d->due[i].instance == instance) {
            due_remove(d, i);
        }
    }
    struct door_due due = {.instance = instance, .until_ns = until_ns};
    due.n_ips = n <= XFER_IPS_MAX + 1 ? n : XFER_IPS_MAX + 1;
    memcpy(due.ips, ips, due.n_ips * sizeof(*ips));
    if (d->n_due == DOOR_DUE_MAX && !due_yield(d)) {
        (void)filters_set(d, 0); /* what was said of it before */
        return false;
    }
    d->due[d->n_due++] = due;
    while (!filters_set(d, 0)) {
        d->n_due--;
        if (!due_yield(d)) {
            (void)filters_set(d, 0); /* fewer fit */
            return false;
        }
        d->due[d->n_due++] = due;
    }
    return true;
}

void xfer_door_up(struct xfer_door *d, uint64_t instance, uint64_t now_ns)
{
    for (uint32_t i = 0; i < d->n_due; i++) {
        struct door_due *due = &d->due[i];
        if (due->instance == instance && !due->up) {
            due->up = true;
            due->until_ns =
                due->until_ns < now_ns + DOOR_UP_NS ? due->until_ns : now_ns + DOOR_UP_NS;
        }
    }
}

bool xfer_door_arrived(struct xfer_door *d, uint64_t instance)
{
    for (uint32_t i = 0; i < d->n_due; i++) {
        if (d->due[i].instance == instance && !d->due[i].arrived) {
            d->due[i].arrived = true; /* its lanes are still to connect: it stays due */
            return true;
        }
    }
    return false;
}

bool xfer_door_step(struct xfer_door *d, uint64_t now_ns)
{
    uint32_t n = d->n_due;
    for (uint32_t i = n; i-- > 0;) {
        if (now_ns >= d->due[i].until_ns) {
            due_remove(d, i);
        }
    }
    return n != d->n_due && filters_set(d, 0);
}

uint64_t xfer_door_deadline(const struct xfer_door *d)
{
    uint64_t t = UINT64_MAX;
    for (uint32_t i = 0; i < d->n_due; i++) {
        t = d->due[i].until_ns < t ? d->due[i].until_ns : t;
    }
    return t;
}

/* ---- addresses ---- */

bool xfer_door_ip_of(const struct sockaddr_storage *a, struct xfer_ip *out)
{
    memset(out, 0, sizeof(*out));
    if (a->ss_family == AF_INET) {
        struct sockaddr_in v4;
        memcpy(&v4, a, sizeof(v4));
        out->family = 4;
        memcpy(out->b, &v4.sin_addr, 4);
        return true;
    }
    if (a->ss_family == AF_INET6) {
        struct sockaddr_in6 v6;
        memcpy(&v6, a, sizeof(v6));
        out->family = 6;
        memcpy(out->b, &v6.sin6_addr, 16);
        return true;
    }
    return false;
}

uint32_t xfer_door_own_ips(struct xfer_ip ips[XFER_IPS_MAX], bool loopback)
{
    struct ifaddrs *all = NULL;
    uint32_t n = 0;
    if (getifaddrs(&all) != 0) {
        return 0;
    }
    for (const struct ifaddrs *i = all; i != NULL && n < XFER_IPS_MAX; i = i->ifa_next) {
        struct sockaddr_storage a;
        if (i->ifa_addr == NULL || (i->ifa_flags & IFF_UP) == 0 ||
            (!loopback && (i->ifa_flags & IFF_LOOPBACK) != 0)) {
            continue;
        }
        memset(&a, 0, sizeof(a));
        if (i->ifa_addr->sa_family == AF_INET) {
            memcpy(&a, i->ifa_addr, sizeof(struct sockaddr_in));
        } else if (i->ifa_addr->sa_family == AF_INET6) {
            memcpy(&a, i->ifa_addr, sizeof(struct sockaddr_in6));
        }
        n += xfer_door_ip_of(&a, &ips[n]);
    }
    freeifaddrs(all);
    return n;
}
