#ifndef BT_TRANSFER_XFER_DOOR_H
#define BT_TRANSFER_XFER_DOOR_H

/* Keeps UCX's own TCP ports shut. Besides the listener that we ask for, UCX listens on every address of the machine
 * with every worker, on D and on P, for as long as the worker lives; a dozen bytes to any of them can end the process
 * (seen with 1.13.1), and UCX cannot take its ear off. So the kernel does it: each listening socket has a filter
 * that drops connection requests, except from the addresses of peers that are *due*, each for a few seconds at most,
 * until its connection is up. What is connected already passes.
 *
 * Kernels that let only CAP_NET_ADMIN set such a filter (Linux 6.18) still take a key for TCP's MD5 signatures: a
 * listening socket that has one for every address drops connection requests without a signature. It is taken
 * away while anybody is due, so the ports are open to everyone then. Where neither works they stay open, and a
 * warning says so. RDMA has no such ports.
 * Owns the list of UCX's listening sockets and of who is due. Transfer thread, or the creator before it exists. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include "transfer/xfer_wire.h"

#define DOOR_DUE_MAX   256
#define DOOR_KEY_BYTES 32
/* So long one whose connection is up stays due: some of UCX's lanes are never waited for, and a lost packet of theirs comes
 * again after a second. */
#define DOOR_UP_NS (UINT64_C(1500) * 1000000)

struct door_socket {
    int fd;
    uint64_t inode; /* the number may come to mean another file */
    const void *owner;
    bool v6;
};

struct door_due {
    uint64_t instance;
    uint64_t until_ns;
    bool arrived;
    bool up; /* its place is given up for others */
    uint32_t n_ips;
    struct xfer_ip ips[XFER_IPS_MAX + 1];
};

struct xfer_door {
    struct door_socket *sockets;
    size_t n_sockets, cap;
    struct door_socket *before; /* between begin and end: what listened already */
    size_t n_before, cap_before;
    struct door_due due[DOOR_DUE_MAX];
    uint32_t n_due;
    bool by_key; /* no filters here */
    uint8_t key[DOOR_KEY_BYTES];
    bool warned;
};

void xfer_door_fini(struct xfer_door *d);

/* Around a call that may make UCX listen: what listens afterwards and did not before is the owner's, and is shut. No other
 * bt_xfer of the process is between the two at the same time; nothing else in it should start to listen then. */
void xfer_door_begin(struct xfer_door *d);
void xfer_door_end(struct xfer_door *d, const void *owner);
/* Instead of end: what began to listen is not UCX's. */
void xfer_door_cancel(struct xfer_door *d);
/* The owner's sockets are about to be closed. */
void xfer_door_forget(struct xfer_door *d, const void *owner);

/* For this instance, and from these addresses, connections are let in until then. What was said of the instance before
 * no longer counts. False: too many are due whose connections are not up: more than DOOR_DUE_MAX, or than a filter holds,
 * which has room for some 600 addresses (300 of IPv6), each counted once. */
bool xfer_door_expect(struct xfer_door *d, uint64_t instance, const struct xfer_ip *ips, uint32_t n,
                      uint64_t until_ns) BT_NODISCARD;
/* True, once, if the instance is due: it has come. */
bool xfer_door_arrived(struct xfer_door *d, uint64_t instance);
/* The connection with that instance is up: it is due for DOOR_UP_NS at most, and goes first. */
void xfer_door_up(struct xfer_door *d, uint64_t instance, uint64_t now_ns);
/* Shuts behind those whose time is over. */
bool xfer_door_step(struct xfer_door *d, uint64_t now_ns);
uint64_t xfer_door_deadline(const struct xfer_door *d); /* UINT64_MAX: none */

/* This machine's addresses, at most XFER_IPS_MAX; loopback ones only if asked for. */
uint32_t xfer_door_own_ips(struct xfer_ip ips[XFER_IPS_MAX], bool loopback);
/* False: neither IPv4 nor IPv6. */
bool xfer_door_ip_of(const struct sockaddr_storage *a, struct xfer_ip *out);

#endif
