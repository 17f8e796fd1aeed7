#ifndef BT_TRANSFER_XFER_H
#define BT_TRANSFER_XFER_H

/* The transfer room: moves KV pages and small control messages between prefilld (P) and decoded (D).
 *
 * A `bt_xfer` has its own thread, which alone touches the wire; it sleeps when nothing happens. All calls below
 * are thread-safe unless they say otherwise: they validate, copy their arguments, queue a command and return.
 * They never block on the wire. Commands of one thread are carried out in the order of the calls (so a landing
 * opened before its grant is sent is open when the first page comes). What happened comes back as events: the
 * `wake` callback says that there are some, bt_xfer_poll() reads them, on one thread (the loop).
 *
 *   D: listens; PEER_UP(P) ... CTRL(started) -> land_open, send_ctrl(grant) -> LANDED ... CTRL(hand-off)
 *      -> land_expect -> LAND_FULL -> land_close -> LAND_CLOSED: pages belong to the caller again.
 *   P: connect(D) -> PEER_UP ... CTRL(grant) -> push per layer and chunk -> PUSHED per push: sources reusable.
 *
 * Limits. New work (connect, send_ctrl, land_open, push) is refused with BT_ERR_BUSY while `commands_max`
 * commands wait; calls that end work (land_expect, land_close, push_cancel, disconnect) are always taken (only
 * BT_ERR_NOMEM). Events are never lost: each has its place from the moment the work is accepted. A peer whose
 * control messages nobody polls is disconnected at `ctrl_bytes_max`.
 *
 * Memory. The thread is sealed (base/mem.h): it calls the heap to make and end connections only. What callers hand over is
 * heap memory of theirs, within the limits, and goes back to them; sends, receives and the control messages that come
 * have their room reserved at create: 65,536 shares in flight, and twice ctrl_bytes_max.
 *
 * A *share* is a page's contiguous part in one layer: the unit on the wire, one active message each.
 * Every share carries ticket, generation, group, layer, page index and size; what does not match an open landing
 * exactly is dropped and counted, never written. Arrival order means nothing. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/status.h"
#include "proto/gate_token.h"

#define BT_XFER_TICKET_BYTES 16
#define BT_XFER_GROUPS_MAX   8
#define BT_XFER_CTRL_MAX     (64u * 1024) /* bytes of one control message */
#define BT_XFER_PAGES_MAX    (1u << 20)   /* pages in one group's table, and in one push */
#define BT_XFER_SHARE_MAX    (64u << 20)  /* bytes of one share */
#define BT_XFER_NAME_MAX     256          /* fingerprint and layout strings, with the NUL */
#define BT_XFER_PORTS_MIN    64
#define BT_XFER_NO_PAGE      UINT32_MAX /* in a landing's page_ids: not wanted, refused if it comes */

#define BT_XFER_REGIONS_MAX 8

struct bt_xfer;
struct bt_xfer_hub; /* transfer/xfer_loop.h: the loopback twin */

/* Copies pages between memory that only a device can touch and slots, blocks of host memory that the wire reads and writes. The
 * functions are called on the transfer thread (manual: the owner's) and do not block. What arg points to lives until
 * bt_xfer_destroy() returns. */
struct bt_xfer_stage {
    void *arg;
    size_t slot_bytes; /* no share is larger */
    uint32_t n_slots;  /* 2 or more */
    void (*enter)(
        void *arg); /* NULL, or: comes first on each thread, also where the wire is opened */
    uint8_t *(*slot)(void *arg, uint32_t slot);
    /* Queues a copy between a slot and device memory; the last one of that slot was asked for and done, or had failed. */
    void (*start)(void *arg, uint32_t slot, void *device, size_t bytes, bool to_device);
    /* Begins what is queued. */
    void (*go)(void *arg);
    /* Of the last copy of a slot: BT_OK: done, and so are all that were queued before it; BT_ERR_BUSY: not yet, or not begun; else
     * it failed. wait: never BT_ERR_BUSY. */
    enum bt_status (*done)(void *arg, uint32_t slot, bool wait);
};

enum bt_xfer_memory { BT_XFER_MEMORY_HOST, BT_XFER_MEMORY_CUDA };

/* A stretch of memory that pages lie in. */
struct bt_xfer_region {
    void *base;
    size_t bytes;
    enum bt_xfer_memory memory;
};

enum bt_xfer_proto {
    BT_XFER_PROTO_AUTO, /* rendezvous over RDMA, else eager */
    BT_XFER_PROTO_EAGER,
    BT_XFER_PROTO_RNDV,
};

/* Zero means the default everywhere. Strings are borrowed for the call. */
struct bt_xfer_opts {
    struct bt_xfer_hub *hub; /* not NULL: loopback inside this process; else UCX */
    const char
        *listen; /* "HOST:PORT", "[V6]:PORT", port 0 = choose; hub: "loop:NAME"; NULL: dial only */
    uint16_t port_min, port_max; /* UCX's own ports lie in [min, max]; 0, 0: anywhere. At least
                                  * BT_XFER_PORTS_MIN of them */
    const char
        *tls; /* NULL or "auto": shared memory where `listen` or the address dialled is a loopback
                              * address, else what UCX finds best but shared memory (RDMA, else TCP); "tcp"; "shm":
                              * shared memory where the peer is on this machine, else TCP; else a UCX_TLS list,
                              * verbatim. The two sides must agree. */
    enum bt_xfer_proto proto;
    uint64_t instance; /* of this daemon; not 0 */
    struct bt_gate_token
        token; /* what peers must say to be let in; none: random, see bt_xfer_token() */
    const char *fingerprint; /* model and numerics class: must be equal at both ends */
    const char *layout;      /* KV layout: must be equal at both ends */

    uint64_t heartbeat_ns;       /* 250 ms */
    uint64_t lease_ns;           /* 3 s: silence after which a peer is down */
    uint64_t connect_timeout_ns; /* 5 s: dial to PEER_UP */
    uint64_t stall_ns; /* 30 s: sends or receives of a peer without progress; then it is reset */
    size_t
        window_bytes; /* page bytes in flight per peer; 4 MiB. At least one share is always sent */
    size_t test_page_bytes; /* size of the checked test page; 64 KiB; at most 1 MiB */
    uint32_t peers_max;     /* 256 */
    uint32_t landings_max;  /* 4096 */
    uint32_t commands_max;  /* 4096 */
    size_t
        ctrl_bytes_max; /* 32 MiB: control bytes waiting, in and out each; of those that came a small one counts
                             * for about 600 */

    /* Called on the transfer thread after events were queued; must be short and thread-safe (uv_async_send).
     * Calls coalesce: after one, poll until false. May come until bt_xfer_destroy()
     * returns. NULL: the caller polls by itself. */
    void (*wake)(void *arg);
    void *wake_arg;

    /* Where the pages of pushes and landings lie, if it should be registered with UCX for transports that read and write
     * remote memory; 0: nothing is. CUDA memory that this UCX cannot register goes through `stage`. */
    struct bt_xfer_region regions[BT_XFER_REGIONS_MAX];
    uint32_t n_regions;
    /* NULL: the host reaches all pages. Else none: they go through slots, but where a connection goes by rendezvous, their memory
     * is registered, and no checksum is asked for. Copied. */
    const struct bt_xfer_stage *stage;

    bool
        checksum; /* P: hash every share, D verifies what carries a hash; a wrong one resets the connection */
    bool
        manual; /* hub only: no thread; the owner calls bt_xfer_step() and time is what it passes */
};

/* Starts the thread. *out is set on BT_OK only. BT_ERR_INVALID: option out of range, or address not usable;
 * BT_ERR_IO: cannot listen; BT_ERR_DEVICE: UCX refuses;
 * BT_ERR_UNSUPPORTED: built without UCX (under ThreadSanitizer). err (NULL allowed) has the reason in words. */
enum bt_status bt_xfer_create(const struct bt_xfer_opts *opts, struct bt_xfer **out,
                              struct bt_err *err) BT_NODISCARD;
/* Closes all connections, waits until no receive or send is in flight, joins the thread, frees unread events.
 * No other call may run at the same time. Buffers given to open landings and pushes may be freed afterwards. */
void bt_xfer_destroy(struct bt_xfer *x);

/* The bound address, "10.0.0.7:41233" or "loop:NAME"; "" when not listening. Valid until destroy; any thread. */
const char *bt_xfer_address(const struct bt_xfer *x);

/* What a peer must say to be let in here; only those who may connect should know it. Valid until destroy; any thread. */
const struct bt_gate_token *bt_xfer_token(const struct bt_xfer *x);

/* How pages get to the wire: "" (the host's memory), "staged" (through slots), or "registered" (device memory that UCX registered is
 * given to it as it is, on connections with a transport that reads remote memory; staged on others. What UCX makes of it, a
 * copy of its own maybe, it does not tell). Valid until destroy; any thread. */
const char *bt_xfer_memory_way(const struct bt_xfer *x);

/* Helpers for the address that is told to others. */
bool bt_xfer_address_is_loopback(const char *address); /* 127.0.0.0/8, ::1, loop:NAME */
bool bt_xfer_address_is_any(const char *address); /* 0.0.0.0, :: : not reachable by that name */

/* ---- peers ---- */

/* Dials. address: numeric, as bt_xfer_address() of the other side gives it. instance: who must be there, not 0.
 * token: bt_xfer_token() of the other side, which lets us in there; copied. *peer is the id of this connection, never
 * reused. Exactly one PEER_UP or PEER_DOWN follows, and after PEER_UP exactly one PEER_DOWN (unless destroyed before). */
enum bt_status bt_xfer_connect(struct bt_xfer *x, const char *address, uint64_t instance,
                               const struct bt_gate_token *token, uint64_t *peer) BT_NODISCARD;
/* Closes the connection (either side): PEER_DOWN with BT_ERR_CANCELLED here. Unknown ids are ignored. */
enum bt_status bt_xfer_disconnect(struct bt_xfer *x, uint64_t peer) BT_NODISCARD;

/* ---- control messages: opaque bytes ---- */

/* Copies n bytes (1 .. BT_XFER_CTRL_MAX) and sends them. Delivered exactly once while the connection lives, in
 * any order; lost with the connection (then PEER_DOWN comes or has come). BT_ERR_BUSY: too much is waiting. */
enum bt_status bt_xfer_send_ctrl(struct bt_xfer *x, uint64_t peer, const void *data,
                                 size_t n) BT_NODISCARD;

/* ---- landing: D ---- */

/* One layer group of a landing. Share (layer l, page index i) is received into
 *     base + l * layer_stride + page_ids[i] * page_stride, page_layer_bytes long.
 * l counts within the group; i is the position in the sequence's page table for this group (first_page is i's
 * origin on the wire: page index first_page is page_ids[0]). */
struct bt_xfer_land_group {
    void *base;
    size_t layer_stride;     /* bytes */
    size_t page_stride;      /* bytes */
    size_t page_layer_bytes; /* 1 .. BT_XFER_SHARE_MAX: every share of this group has this size */
    uint32_t n_layers;
    uint32_t first_page;
    uint32_t n_pages; /* 0 is legal */
    const uint32_t *
        page_ids; /* [n_pages], copied; BT_XFER_NO_PAGE: hole (cached here, or outside the window) */
};

struct bt_xfer_landing {
    uint8_t ticket[BT_XFER_TICKET_BYTES];
    uint64_t generation;
    uint64_t peer; /* only shares from this connection are taken */
    uint32_t n_groups;
    struct bt_xfer_land_group group[BT_XFER_GROUPS_MAX];
};

/* The pages must stay leased for this landing until LAND_CLOSED. BT_ERR_INVALID: a field out of range.
 * An open landing with the same ticket and generation: LAND_CLOSED with BT_ERR_INVALID follows for the new one
 * at once (do not do this: generations are unique). BT_ERR_BUSY: landings_max are open. */
enum bt_status bt_xfer_land_open(struct bt_xfer *x, const struct bt_xfer_landing *l) BT_NODISCARD;

/* How many shares of each group make the landing complete: pages sent times the group's layers (all zero is
 * legal). LAND_FULL follows when the counts are reached and no receive is in flight; nothing is accepted after.
 * Its status is BT_ERR_PROTOCOL if more came than expected. Called again: the new counts replace the old. */
enum bt_status bt_xfer_land_expect(struct bt_xfer *x, const uint8_t ticket[BT_XFER_TICKET_BYTES],
                                   uint64_t generation,
                                   const uint64_t n_shares[BT_XFER_GROUPS_MAX]) BT_NODISCARD;

/* From when the transfer thread sees it, nothing more is accepted; LAND_CLOSED follows once no receive into the
 * pages is in flight (a receive that does not end within stall_ns is ended by resetting the connection). Every
 * landing opened must be closed, once, also after LAND_FULL or PEER_DOWN. Unknown: ignored, no event. */
enum bt_status bt_xfer_land_close(struct bt_xfer *x, const uint8_t ticket[BT_XFER_TICKET_BYTES],
                                  uint64_t generation) BT_NODISCARD;

/* ---- push: P ---- */

/* Shares of one group: layers [layer, layer + n_layers) x pages. Source of (layer + l, k):
 *     base + l * layer_stride + page_ids[k] * page_stride
 * sent as page index first_page + k, or page_index[k] if page_index is not NULL. */
struct bt_xfer_push {
    uint8_t ticket[BT_XFER_TICKET_BYTES];
    uint64_t generation;
    uint64_t peer;
    uint64_t tag; /* comes back in PUSHED */
    uint32_t group;
    uint32_t layer;
    uint32_t n_layers;
    size_t layer_stride;
    size_t page_stride;
    size_t page_layer_bytes;
    const void *base;
    uint32_t n_pages;
    uint32_t first_page;
    const uint32_t *page_ids;   /* [n_pages], copied */
    const uint32_t *page_index; /* [n_pages], copied; or NULL */
};

/* Queues the shares, layer by layer; they leave in order of the calls under the peer's window. Sources must stay
 * valid and unchanged until PUSHED{tag}, which comes exactly once: BT_OK: all were sent (delivery is what D
 * counts); BT_ERR_CANCELLED; BT_ERR_PEER_LOST (also for a peer that is unknown or not up). Zero shares: PUSHED at
 * once. */
enum bt_status bt_xfer_push(struct bt_xfer *x, const struct bt_xfer_push *p) BT_NODISCARD;
/* Drops what has not left of all pushes of the ticket, on every peer. Their PUSHED still comes, when the sends in
 * flight (at most the window) have ended. */
enum bt_status bt_xfer_push_cancel(struct bt_xfer *x,
                                   const uint8_t ticket[BT_XFER_TICKET_BYTES]) BT_NODISCARD;

/* ---- events ---- */

enum bt_xfer_event_kind {
    BT_XFER_PEER_UP, /* peer, instance, incoming, text: transport, e.g. "tcp/lo" or "posix/memory+cma/memory" */
    BT_XFER_PEER_DOWN, /* peer, instance (0 if never known), status, text: reason. Nothing of this peer follows
                          * but PUSHED and LAND_CLOSED. status: PEER_LOST, TIMEOUT (lease, connect, stall),
                          * PROTOCOL (refused: instance, fingerprint, layout, version, test page), CANCELLED */
    BT_XFER_CTRL, /* peer, instance, data, n_bytes: owned by the event until bt_xfer_event_free() */
    BT_XFER_LANDED, /* landing fields; coalesced: at most one is queued per landing, with the newest counts */
    BT_XFER_LAND_FULL,   /* landing fields, status */
    BT_XFER_LAND_CLOSED, /* landing fields, status */
    BT_XFER_PUSHED,      /* tag, ticket, generation, peer, bytes (sent), status */
};

struct bt_xfer_event {
    enum bt_xfer_event_kind kind;
    enum bt_status status;
    uint64_t peer;
    uint64_t instance;
    bool incoming;
    char text[200];

    uint8_t *data;
    size_t n_bytes;

    /* landing fields (ticket and generation also for PUSHED) */
    uint8_t ticket[BT_XFER_TICKET_BYTES];
    uint64_t generation;
    uint32_t n_groups;
    uint64_t n_shares[BT_XFER_GROUPS_MAX]; /* received so far */
    uint64_t bytes;
    uint64_t
        move_ns; /* LANDED, LAND_FULL: first to last arrival; PUSHED: from the call to the last completion */
    uint64_t post_ns; /* PUSHED: time spent handing its shares to the transport */

    uint64_t tag;
};

/* false: none. One thread at a time. */
bool bt_xfer_poll(struct bt_xfer *x, struct bt_xfer_event *ev);
void bt_xfer_event_free(
    struct bt_xfer_event *ev); /* frees data; legal for every event; before bt_xfer_destroy() */

/* ---- stats ---- */

struct bt_xfer_stats {
    uint64_t bytes_sent, shares_sent;         /* completed sends of shares */
    uint64_t bytes_received, shares_received; /* placed and counted */
    uint64_t ctrl_sent, ctrl_received;
    uint64_t pushes;                        /* PUSHED events made */
    uint64_t post_ns;                       /* time spent handing shares to the transport */
    uint64_t move_ns;                       /* sum over pushes: call to last completion */
    uint64_t staged_bytes;                  /* copied between device memory and slots */
    uint64_t staged_shares, staged_batches; /* begun, and by how many calls of the stage's go */
    uint64_t direct_bytes; /* given to the wire in device memory, and received into it, without */
    /* dropped shares, by reason */
    uint64_t drop_unknown;    /* no open landing with that ticket (stale, closed, never opened) */
    uint64_t drop_generation; /* ticket open, generation not */
    uint64_t drop_peer;       /* landing belongs to another connection */
    uint64_t drop_range;      /* group, layer, page, hole, size */
    uint64_t drop_duplicate;
    uint64_t drop_checksum;
    uint64_t drop_malformed; /* any message that does not parse or comes out of turn */
    /* turned away at the gate, before UCX heard of them */
    uint64_t gate_garbage; /* what they said was no greeting, or they left before it was whole */
    uint64_t gate_slow;    /* took too long to say it */
    uint64_t gate_crowded; /* the oldest of too many at once */
    uint64_t
        gate_refused; /* a greeting, but for another instance, model, layout or version; or no room */
    /* failures */
    uint64_t fail_peer_lost, fail_lease, fail_stall, fail_connect, fail_refused;
    uint64_t fail_sends, fail_receives;
    /* now: all zero when idle */
    uint64_t peers_up, landings_open, pushes_open, sends_in_flight, receives_in_flight,
        ctrl_bytes_waiting;
    uint64_t sealed_heap_calls; /* of the thread: 0, or a bug */
};

/* A consistent recent copy (at most one round of the thread old). Any thread. */
void bt_xfer_stats(struct bt_xfer *x, struct bt_xfer_stats *out);

/* ---- manual mode (hub) ---- */

/* One round at time now_ns: commands, deliveries due, timers. Returns true if anything was done. */
bool bt_xfer_step(struct bt_xfer *x, uint64_t now_ns);

#endif
