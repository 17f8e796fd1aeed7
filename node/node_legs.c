/* A node's two legs: which of them an event is for, which of them take work, and the change of that while the node runs.
 * Knows of a leg its hooks; refuses to know what a job is. */

#include "node/node_int.h"

#include "base/log.h"
#include "net/loop.h"

/* ---- events, each to the leg that it is for ---- */

static enum bt_role leg_of_job(const struct bt_node *n, uint64_t job)
{
    return (uint32_t)job < n->cfg.max_jobs ? BT_ROLE_PREFILL : BT_ROLE_DECODE;
}

void bt_node_legs_engine(struct bt_node *n, const struct bt_engine_ev *ev)
{
    if (ev->kind != BT_ENGINE_EV_STEP && ev->kind != BT_ENGINE_EV_BROKEN) {
        const struct bt_node_hooks *h = &n->legs[leg_of_job(n, ev->job)];

        h->on_engine(h->arg, ev);
    }
}

/* The prefill leg dials and pushes, the decode leg accepts and lands. */
void bt_node_legs_xfer(struct bt_node *n, const struct bt_xfer_event *ev)
{
    bool peer = ev->kind == BT_XFER_PEER_UP || ev->kind == BT_XFER_PEER_DOWN;
    bool prefill = peer ? !ev->incoming : ev->kind == BT_XFER_PUSHED;
    const struct bt_node_hooks *h = &n->legs[prefill ? BT_ROLE_PREFILL : BT_ROLE_DECODE];

    h->on_xfer(h->arg, ev);
}

void bt_node_legs_control(struct bt_node *n, uint64_t conn, const struct bt_control *m)
{
    bool to_decode = bt_control_from_prefill(m->kind);
    const struct bt_node_hooks *h = &n->legs[to_decode ? BT_ROLE_DECODE : BT_ROLE_PREFILL];

    h->on_control(h->arg, conn, m);
}

/* A router of version 1 knows no node with two legs. */
static enum bt_role leg_of_submit(const struct bt_node *n, const struct bt_msg_submit *s)
{
    return s->leg != BT_ROLE_BOTH      ? s->leg
           : n->role == BT_ROLE_DECODE ? BT_ROLE_DECODE
                                       : BT_ROLE_PREFILL;
}

static void log_submit(enum bt_role leg, const struct bt_msg_submit *s)
{
    bool traced = s->trace_id != NULL && s->trace_id[0] != '\0';
    char t[9];

    BT_LOG(BT_LOG_DEBUG, leg == BT_ROLE_PREFILL ? "prefilld" : "decoded", s->request_id,
           "ticket %s: %zu tokens%s%s", bt_ticket_text(&s->ticket, t), s->n_tokens,
           traced ? ", trace " : "", traced ? s->trace_id : "");
}

void bt_node_legs_router(struct bt_node *n, uint32_t router, const struct bt_from_router *m)
{
    for (enum bt_role leg = BT_ROLE_PREFILL; leg < BT_LEGS; leg++) {
        const struct bt_node_hooks *h = &n->legs[leg];
        bool submit = m->kind == BT_FROM_ROUTER_SUBMIT;

        if (submit && leg_of_submit(n, &m->submit) != leg) {
            continue;
        }
        if (submit) {
            log_submit(leg, &m->submit);
        }
        h->on_router(h->arg, router, m);
    }
}

void bt_node_legs_router_lost(struct bt_node *n, uint32_t router)
{
    for (unsigned leg = 0; leg < BT_LEGS; leg++) {
        n->legs[leg].on_router_lost(n->legs[leg].arg, router);
    }
}

uint32_t bt_node_legs_jobs(const struct bt_node *n)
{
    return n->legs[0].jobs(n->legs[0].arg) + n->legs[1].jobs(n->legs[1].arg);
}

void bt_node_legs_give_back(struct bt_node *n)
{
    for (unsigned leg = 0; leg < BT_LEGS; leg++) {
        n->legs[leg].give_back(n->legs[leg].arg);
    }
}

void bt_node_legs_load(struct bt_node *n, struct bt_msg_load *out)
{
    for (unsigned leg = 0; leg < BT_LEGS; leg++) {
        n->legs[leg].load(n->legs[leg].arg, out);
    }
}

/* ---- roles ---- */

void bt_node_legs_ready(struct bt_node *n)
{
    for (enum bt_role leg = BT_ROLE_PREFILL; leg < BT_LEGS; leg++) {
        const struct bt_node_hooks *h = &n->legs[leg];

        h->on_ready(h->arg, n);
        if (!bt_role_has(n->role, leg)) {
            h->give_back(h->arg); /* it has nothing, and takes nothing */
        }
    }
}

void bt_node_legs_tell_role(struct bt_node *n)
{
    enum bt_role leaving = n->p->leg[BT_ROLE_PREFILL].leaving  ? BT_ROLE_PREFILL
                           : n->p->leg[BT_ROLE_DECODE].leaving ? BT_ROLE_DECODE
                                                               : BT_ROLE_BOTH;

    bt_router_link_role(n->link, n->role, leaving);
}

static void leg_leaves(struct bt_node *n, enum bt_role leg, uint64_t now)
{
    n->p->leg[leg].leaving = true;
    n->p->leg[leg].gave_back = false;
    n->p->leg[leg].end = now + n->cfg.drain_timeout;
    bt_log_info("node", "the %s leg drains: %u sequences", bt_role_name(leg),
                n->legs[leg].jobs(n->legs[leg].arg));
}

void bt_node_legs_set_role(struct bt_node *n, enum bt_role role)
{
    uint64_t now = bt_net_loop_now(n->loop);

    for (enum bt_role leg = BT_ROLE_PREFILL; leg < BT_LEGS; leg++) {
        bool had = bt_role_has(n->role, leg), has = bt_role_has(role, leg);

        if (had && !has) {
            leg_leaves(n, leg, now);
        } else if (has && !had) {
            n->p->leg[leg].leaving = false;
            n->legs[leg].resume(n->legs[leg].arg);
        }
    }
    n->role = role;
}

/* A leg that goes: at the end of its time what is left goes back to the routers; gone is it when nothing is left. */
static void leg_tick(struct bt_node *n, enum bt_role leg, uint64_t now)
{
    const struct bt_node_hooks *h = &n->legs[leg];
    uint32_t left;

    h->on_tick(h->arg, now);
    if (!n->p->leg[leg].leaving) {
        return;
    }
    left = h->jobs(h->arg);
    if ((left == 0 || now >= n->p->leg[leg].end) && !n->p->leg[leg].gave_back) {
        if (left > 0) {
            bt_log_warn("node", "its time is over: %u sequences go back to their routers", left);
        }
        n->p->leg[leg].gave_back = true;
        h->give_back(h->arg);
        left = h->jobs(h->arg);
    }
    if (left == 0) {
        n->p->leg[leg].leaving = false;
        bt_log_info("node", "the %s leg is gone; this node serves as %s", bt_role_name(leg),
                    bt_role_name(n->role));
        bt_node_legs_tell_role(n);
    }
}

void bt_node_legs_tick(struct bt_node *n, uint64_t now)
{
    leg_tick(n, BT_ROLE_PREFILL, now);
    leg_tick(n, BT_ROLE_DECODE, now);
}
