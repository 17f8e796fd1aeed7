/* Control messages between prefilld and decoded, plain structs to protobuf bytes and back.
 * Validates what comes from the wire; refuses to know what it means. */

#include "proto/transfer.h"

#include <stdio.h>

#include "base/assert.h"
#include "baton/transfer/v1/transfer.pb-c.h"
#include "proto/pb_arena_int.h"

const char *bt_control_name(enum bt_control_kind k)
{
    static const char *const names[] = {
        [BT_CONTROL_STARTED] = "started", [BT_CONTROL_GRANT] = "grant",
        [BT_CONTROL_REFUSE] = "refuse",   [BT_CONTROL_REVOKE] = "revoke",
        [BT_CONTROL_HANDOFF] = "handoff", [BT_CONTROL_FORGET] = "forget",
        [BT_CONTROL_DONE] = "done",       [BT_CONTROL_COMPUTING] = "computing",
    };

    return names[k];
}

bool bt_control_from_prefill(enum bt_control_kind k)
{
    return k == BT_CONTROL_STARTED || k == BT_CONTROL_HANDOFF || k == BT_CONTROL_FORGET ||
           k == BT_CONTROL_COMPUTING;
}

static enum bt_status bad(struct bt_err *err, const char *what)
{
    return bt_err_set(err, BT_ERR_PROTOCOL, "control message: %s", what);
}

static enum bt_status get_handoff(const Baton__Transfer__V1__Handoff *p, struct bt_control *out,
                                  struct bt_err *err)
{
    if (p->n_top_tokens > BT_LOGPROBS_MAX || p->n_top_tokens != p->n_top_logprobs) {
        return bad(err, "handoff.top_tokens: more than 20, or not as many as top_logprobs");
    }
    if (p->n_shares > BT_CONTROL_GROUPS_MAX) {
        return bad(err, "handoff.shares: too many groups");
    }
    out->handoff.index = p->index;
    out->handoff.has_logprobs = p->has_logprobs != 0;
    out->handoff.first = (struct bt_sampled){
        .token = p->token, .logprob = p->logprob, .n_top = (uint32_t)p->n_top_tokens};
    for (size_t i = 0; i < p->n_top_tokens; i++) {
        out->handoff.first.top[i] = (struct bt_top_logprob){p->top_tokens[i], p->top_logprobs[i]};
    }
    out->handoff.n_groups = (uint32_t)p->n_shares;
    for (size_t i = 0; i < p->n_shares; i++) {
        out->handoff.n_shares[i] = p->shares[i];
    }
    return BT_OK;
}

static enum bt_status get_body(const Baton__Transfer__V1__Control *m, struct bt_control *out,
                               const ProtobufCBinaryData **ticket, struct bt_err *err)
{
    switch (m->m_case) {
    case BATON__TRANSFER__V1__CONTROL__M_STARTED:
        out->kind = BT_CONTROL_STARTED;
        *ticket = &m->started->ticket;
        out->started.n_tokens = m->started->n_tokens;
        return BT_OK;
    case BATON__TRANSFER__V1__CONTROL__M_GRANT:
        out->kind = BT_CONTROL_GRANT;
        *ticket = &m->grant->ticket;
        out->generation = m->grant->generation;
        if (m->grant->n_first_page > BT_CONTROL_GROUPS_MAX) {
            return bad(err, "grant.first_page: too many groups");
        }
        out->grant.n_groups = (uint32_t)m->grant->n_first_page;
        for (size_t i = 0; i < m->grant->n_first_page; i++) {
            out->grant.first_page[i] = m->grant->first_page[i];
        }
        return BT_OK;
    case BATON__TRANSFER__V1__CONTROL__M_REFUSE:
        out->kind = BT_CONTROL_REFUSE;
        *ticket = &m->refuse->ticket;
        out->refuse.reason = m->refuse->reason;
        out->refuse.text = m->refuse->text;
        return BT_OK;
    case BATON__TRANSFER__V1__CONTROL__M_REVOKE:
        out->kind = BT_CONTROL_REVOKE;
        *ticket = &m->revoke->ticket;
        out->generation = m->revoke->generation;
        out->revoke.reason = m->revoke->reason;
        return BT_OK;
    case BATON__TRANSFER__V1__CONTROL__M_HANDOFF:
        out->kind = BT_CONTROL_HANDOFF;
        *ticket = &m->handoff->ticket;
        out->generation = m->handoff->generation;
        return get_handoff(m->handoff, out, err);
    case BATON__TRANSFER__V1__CONTROL__M_FORGET:
        out->kind = BT_CONTROL_FORGET;
        *ticket = &m->forget->ticket;
        out->generation = m->forget->generation;
        return BT_OK;
    case BATON__TRANSFER__V1__CONTROL__M_DONE:
        out->kind = BT_CONTROL_DONE;
        *ticket = &m->done->ticket;
        out->generation = m->done->generation;
        return BT_OK;
    case BATON__TRANSFER__V1__CONTROL__M_COMPUTING:
        out->kind = BT_CONTROL_COMPUTING;
        *ticket = &m->computing->ticket;
        out->generation = m->computing->generation;
        return BT_OK;
    default:
        return bad(err, "no known message in it");
    }
}

enum bt_status bt_control_decode(const void *data, size_t n, struct bt_arena *arena,
                                 struct bt_control *out, struct bt_err *err)
{
    ProtobufCAllocator pa = bt_pb_arena(arena);
    Baton__Transfer__V1__Control *m = baton__transfer__v1__control__unpack(&pa, n, data);
    const ProtobufCBinaryData *ticket = NULL;

    if (m == NULL) {
        return bad(err, "not a Control message, or too large");
    }
    memset(out, 0, sizeof *out);
    enum bt_status st = get_body(m, out, &ticket, err);

    if (st != BT_OK) {
        return st;
    }
    if (ticket->len != BT_TICKET_BYTES) {
        return bad(err, "ticket: must be 16 bytes");
    }
    memcpy(out->ticket.b, ticket->data, BT_TICKET_BYTES);
    return BT_OK;
}

static enum bt_status pack_handoff(const struct bt_control *m, Baton__Transfer__V1__Control *w,
                                   ProtobufCBinaryData ticket, struct bt_buf *out)
{
    Baton__Transfer__V1__Handoff p = BATON__TRANSFER__V1__HANDOFF__INIT;
    uint32_t tokens[BT_LOGPROBS_MAX];
    float logprobs[BT_LOGPROBS_MAX];
    uint64_t shares[BT_CONTROL_GROUPS_MAX];

    for (uint32_t i = 0; i < m->handoff.first.n_top; i++) {
        tokens[i] = m->handoff.first.top[i].token;
        logprobs[i] = m->handoff.first.top[i].logprob;
    }
    for (uint32_t i = 0; i < m->handoff.n_groups; i++) {
        shares[i] = m->handoff.n_shares[i];
    }
    p.ticket = ticket;
    p.generation = m->generation;
    p.token = m->handoff.first.token;
    p.logprob = m->handoff.first.logprob;
    p.n_top_tokens = p.n_top_logprobs = m->handoff.first.n_top;
    p.top_tokens = tokens;
    p.top_logprobs = logprobs;
    p.n_shares = m->handoff.n_groups;
    p.shares = shares;
    p.index = m->handoff.index;
    p.has_logprobs = m->handoff.has_logprobs;
    w->m_case = BATON__TRANSFER__V1__CONTROL__M_HANDOFF;
    w->handoff = &p;
    return bt_pb_pack(&w->base, out);
}

enum bt_status bt_control_encode(const struct bt_control *m, struct bt_buf *out)
{
    Baton__Transfer__V1__Control w = BATON__TRANSFER__V1__CONTROL__INIT;
    Baton__Transfer__V1__Started started = BATON__TRANSFER__V1__STARTED__INIT;
    Baton__Transfer__V1__Grant grant = BATON__TRANSFER__V1__GRANT__INIT;
    Baton__Transfer__V1__Refuse refuse = BATON__TRANSFER__V1__REFUSE__INIT;
    Baton__Transfer__V1__Revoke revoke = BATON__TRANSFER__V1__REVOKE__INIT;
    Baton__Transfer__V1__Forget forget = BATON__TRANSFER__V1__FORGET__INIT;
    Baton__Transfer__V1__Done done = BATON__TRANSFER__V1__DONE__INIT;
    Baton__Transfer__V1__Computing computing = BATON__TRANSFER__V1__COMPUTING__INIT;
    uint8_t bytes[BT_TICKET_BYTES];
    ProtobufCBinaryData ticket = {BT_TICKET_BYTES, bytes};
    char text[256];
    uint32_t first_page[BT_CONTROL_GROUPS_MAX];

    memcpy(bytes, m->ticket.b, sizeof bytes);
    switch (m->kind) {
    case BT_CONTROL_STARTED:
        started.ticket = ticket;
        started.n_tokens = m->started.n_tokens;
        w.m_case = BATON__TRANSFER__V1__CONTROL__M_STARTED;
        w.started = &started;
        break;
    case BT_CONTROL_GRANT:
        memcpy(first_page, m->grant.first_page, sizeof first_page);
        grant.ticket = ticket;
        grant.generation = m->generation;
        grant.n_first_page = m->grant.n_groups;
        grant.first_page = first_page;
        w.m_case = BATON__TRANSFER__V1__CONTROL__M_GRANT;
        w.grant = &grant;
        break;
    case BT_CONTROL_REFUSE:
        snprintf(text, sizeof text, "%s", m->refuse.text != NULL ? m->refuse.text : "");
        refuse.ticket = ticket;
        refuse.reason = m->refuse.reason;
        refuse.text = text;
        w.m_case = BATON__TRANSFER__V1__CONTROL__M_REFUSE;
        w.refuse = &refuse;
        break;
    case BT_CONTROL_REVOKE:
        revoke.ticket = ticket;
        revoke.generation = m->generation;
        revoke.reason = m->revoke.reason;
        w.m_case = BATON__TRANSFER__V1__CONTROL__M_REVOKE;
        w.revoke = &revoke;
        break;
    case BT_CONTROL_HANDOFF:
        return pack_handoff(m, &w, ticket, out);
    case BT_CONTROL_FORGET:
        forget.ticket = ticket;
        forget.generation = m->generation;
        w.m_case = BATON__TRANSFER__V1__CONTROL__M_FORGET;
        w.forget = &forget;
        break;
    case BT_CONTROL_DONE:
        done.ticket = ticket;
        done.generation = m->generation;
        w.m_case = BATON__TRANSFER__V1__CONTROL__M_DONE;
        w.done = &done;
        break;
    case BT_CONTROL_COMPUTING:
        computing.ticket = ticket;
        computing.generation = m->generation;
        w.m_case = BATON__TRANSFER__V1__CONTROL__M_COMPUTING;
        w.computing = &computing;
        break;
    case BT_CONTROL_KINDS:
        BT_ASSERT(false);
        break;
    }
    return bt_pb_pack(&w.base, out);
}
