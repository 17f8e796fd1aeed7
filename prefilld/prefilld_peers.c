/* Decode nodes as a prefill node sees them: who is wanted, dialled, up or cut off, and what the routers are told of it.
 * Owns the peers; refuses to know how they are reached. */

#include "prefilld/prefilld_core_int.h"

#include <stdio.h>
#include "base/assert.h"

#define RECONNECT_DOUBLINGS 4

struct pf_peer *bt_pf_peer_by_instance(struct bt_pf_core *c, uint64_t instance)
{
    for (uint32_t i = 0; instance != 0 && i < c->opts.peers_max; i++) {
        if (c->peers[i].instance == instance) {
            return &c->peers[i];
        }
    }
    return NULL;
}

struct pf_peer *bt_pf_peer_by_conn(struct bt_pf_core *c, uint64_t conn)
{
    for (uint32_t i = 0; i < c->opts.peers_max; i++) {
        if (c->peers[i].instance != 0 && c->peers[i].state != PEER_IDLE &&
            c->peers[i].conn == conn) {
            return &c->peers[i];
        }
    }
    return NULL;
}

void bt_pf_peer_dial(struct bt_pf_core *c, struct pf_peer *p)
{
    struct bt_pf_action *a = bt_pf_act(c, BT_PF_CONNECT);

    a->instance = p->instance;
    a->address = p->address;
    a->gate_token = p->gate_token;
    p->state = PEER_CONNECTING;
    p->conn = 0;
}

/* One that is on no list and not connected either makes room for another. */
static bool is_free(const struct pf_peer *p)
{
    return p->instance == 0 || (!p->wanted && p->state == PEER_IDLE);
}

static struct pf_peer *peer_add(struct bt_pf_core *c, uint64_t instance, const char *address,
                                const struct bt_gate_token *token)
{
    struct pf_peer *p = bt_pf_peer_by_instance(c, instance);

    for (uint32_t i = 0; p == NULL && i < c->opts.peers_max; i++) {
        if (is_free(&c->peers[i])) {
            p = &c->peers[i];
            *p = (struct pf_peer){.instance = instance};
        }
    }
    if (p != NULL && p->state == PEER_IDLE) {
        snprintf(p->address, sizeof p->address, "%s", address);
    }
    if (p != NULL && bt_gate_token_is_set(token)) { /* a router from before it tells none */
        p->gate_token = *token;
    }
    return p;
}

static void act_peer_state(struct bt_pf_core *c, const struct pf_peer *p, bool reachable,
                           const char *why)
{
    bt_pf_act(c, BT_PF_PEER_STATE)->peer_state =
        (struct bt_msg_peer_state){p->instance, reachable, why};
}

/* A new peer that is reached is told as well: what was said of it before may still be on its way.
 * Routers that come later hear of it with their next list (bt_pf_on_peers). */
static void tell_peer_state(struct bt_pf_core *c, struct pf_peer *p, bool reachable,
                            const char *why)
{
    enum peer_told told = reachable ? TOLD_REACHABLE : TOLD_UNREACHABLE;

    if (p->told != told) {
        p->told = told;
        act_peer_state(c, p, reachable, why);
    }
}

void bt_pf_send_started(struct bt_pf_core *c, struct pf_job *j, const struct pf_peer *p)
{
    j->started_sent = true;
    j->conn = p->conn;
    bt_pf_act_control(c, p->conn, BT_CONTROL_STARTED, &j->head.ticket)->started.n_tokens =
        j->n_tokens;
}

struct pf_peer *bt_pf_peer_of_submit(struct bt_pf_core *c, uint64_t now,
                                     const struct bt_msg_submit *s)
{
    struct pf_peer *p = peer_add(c, s->peer_instance, s->peer_address, &s->peer_gate_token);

    if (p != NULL && p->state == PEER_IDLE && now >= p->next_dial) {
        bt_pf_peer_dial(c, p);
    }
    return p;
}

/* What is on the list keeps its place; the rest may go. */
static void peers_mark(struct bt_pf_core *c, const struct bt_msg_peer *peers, size_t n)
{
    for (uint32_t i = 0; i < c->opts.peers_max; i++) {
        c->peers[i].wanted = false;
    }
    for (size_t i = 0; i < n; i++) {
        struct pf_peer *p = bt_pf_peer_by_instance(c, peers[i].instance);

        if (p != NULL) {
            p->wanted = true;
        }
    }
    for (uint32_t i = 0; i < c->opts.peers_max; i++) {
        if (is_free(&c->peers[i])) {
            c->peers[i].instance = 0;
        }
    }
}

void bt_pf_on_peers(struct bt_pf_core *c, uint64_t now, const struct bt_msg_peer *peers, size_t n)
{
    bt_pf_begin(c);
    peers_mark(c, peers, n);
    for (size_t i = 0; i < n; i++) {
        struct pf_peer *p = peer_add(c, peers[i].instance, peers[i].address, &peers[i].gate_token);

        if (p == NULL) {
            continue; /* more peers than configured: those are dialled when a submit names them and
                         there is room */
        }
        p->wanted = true;
        if (p->told == TOLD_UNREACHABLE) { /* again: the list may be of a router that came later */
            act_peer_state(c, p, false, "still not reached");
        }
        if (p->state == PEER_IDLE && now >= p->next_dial) {
            bt_pf_peer_dial(c, p);
        }
    }
}

/* ---- connections ---- */

void bt_pf_on_connecting(struct bt_pf_core *c, uint64_t now, uint64_t instance, uint64_t conn)
{
    struct pf_peer *p = bt_pf_peer_by_instance(c, instance);

    (void)now;
    bt_pf_begin(c);
    BT_ASSERT(p != NULL && p->state == PEER_CONNECTING);
    p->conn = conn;
}

static void peer_back_off(struct bt_pf_core *c, struct pf_peer *p, uint64_t now)
{
    uint32_t doublings = p->failures < RECONNECT_DOUBLINGS ? p->failures : RECONNECT_DOUBLINGS;

    p->state = PEER_IDLE;
    p->conn = 0;
    p->next_dial = now + (c->opts.reconnect_ns << doublings);
    p->failures++;
}

void bt_pf_on_connect_failed(struct bt_pf_core *c, uint64_t now, uint64_t instance, const char *why)
{
    struct pf_peer *p = bt_pf_peer_by_instance(c, instance);

    bt_pf_begin(c);
    BT_ASSERT(p != NULL && p->state == PEER_CONNECTING);
    peer_back_off(c, p, now);
    snprintf(c->text, sizeof c->text, "%s", why);
    tell_peer_state(c, p, false, c->text);
}

void bt_pf_on_peer_up(struct bt_pf_core *c, uint64_t now, uint64_t conn)
{
    struct pf_peer *p = bt_pf_peer_by_conn(c, conn);
    uint32_t pos = 0;
    struct pf_job *j;

    (void)now;
    bt_pf_begin(c);
    if (p == NULL) {
        bt_pf_act(c, BT_PF_DISCONNECT)->peer = conn;
        return;
    }
    p->state = PEER_UP;
    p->failures = 0;
    tell_peer_state(c, p, true, "");
    while ((j = bt_ticket_table_next(&c->jobs, &pos)) != NULL) {
        bool begun = j->state == JOB_COMPUTING || j->state == JOB_HELD;

        if (begun && !j->kept && j->peer_instance == p->instance && !j->started_sent) {
            bt_pf_send_started(c, j, p);
        }
    }
}

void bt_pf_on_peer_down(struct bt_pf_core *c, uint64_t now, uint64_t conn, const char *why)
{
    struct pf_peer *p = bt_pf_peer_by_conn(c, conn);
    uint32_t pos = 0;
    struct pf_job *j;

    bt_pf_begin(c);
    if (p == NULL) {
        return;
    }
    uint64_t instance = p->instance;
    bool was_up = p->state == PEER_UP;

    peer_back_off(c, p, now);
    snprintf(c->text, sizeof c->text, "connection to the decode node lost: %s", why);
    tell_peer_state(c, p, false, c->text);
    while (was_up && (j = bt_ticket_table_next(&c->jobs, &pos)) != NULL) {
        if (j->state != JOB_ENDING && j->peer_instance == instance && j->started_sent) {
            bt_pf_job_lose_peer(c, j, now, BT_ATTEMPT_RETRY, c->text);
        }
    }
}
