/* The toy engine: the real scheduler and page accounting, a step that takes virtual time layer by
 * layer, and pages that store hashes. Commands and events cross as in node/engine_thread.c: in
 * order, cancels are seen between layers, everything else between steps. */

#include "plan/sim_int.h"

#include "base/assert.h"
#include "base/mem.h"

#define AUDIT_PPM 100000 /* of the steps, and at the end */

static void on_wake(struct bt_sim *s, struct sim_event *e);
static void on_layer(struct bt_sim *s, struct sim_event *e);

/* ---- life ---- */

void sim_engine_init(struct bt_sim *s, struct sim_node *n)
{
    const struct sim_config *c = &s->cfg;
    struct sim_engine *x = &n->engine;
    struct bt_batch_opts o = {
        .page_tokens = c->page_tokens,
        .chunk_tokens = c->chunk_tokens,
        .max_batch = c->max_batch,
        .max_seqs = n->max_jobs,
        .tokens_max = c->context,
        .prefill_rows = c->chunk_tokens,
        .n_groups = c->n_groups,
        .prefix_cache = c->caches[n->home],
    };

    x->n_pages = c->n_pages[n->home];
    for (uint32_t g = 0; g < c->n_groups; g++) {
        o.groups[g].window = c->window[g];
        o.groups[g].n_pages = x->n_pages;
        x->kv[g] =
            sim_alloc((size_t)c->n_layers[g] * x->n_pages * c->page_tokens * sizeof *x->kv[g]);
    }
    enum bt_status st = bt_batch_create(&o, &x->batch);

    BT_ASSERT(st == BT_OK);
    x->seqs = sim_alloc(n->max_jobs * sizeof *x->seqs);
    x->jobs = sim_alloc(n->max_jobs * sizeof *x->jobs);
    x->seq_job_slot = sim_alloc(n->max_jobs * sizeof *x->seq_job_slot);
}

static void seq_free(struct sim_seq *q)
{
    bt_free(q->tokens);
    bt_free(q->prefix);
    *q = (struct sim_seq){0};
}

void sim_engine_fini(struct sim_node *n)
{
    struct sim_engine *x = &n->engine;

    for (uint32_t i = 0; i < SIM_GROUPS_MAX; i++) {
        bt_free(x->kv[i]);
    }
    for (size_t i = 0; i < x->n_cmds; i++) {
        bt_free(x->cmds[i].req);
    }
    for (uint32_t i = 0; i < n->max_jobs; i++) {
        seq_free(&x->seqs[i]);
    }
    bt_batch_destroy(x->batch);
    bt_free(x->seqs);
    bt_free(x->jobs);
    bt_free(x->seq_job_slot);
    bt_free(x->cmds);
}

uint32_t sim_engine_max_tokens(const struct bt_sim *s, enum bt_role role)
{
    uint32_t pool = s->cfg.n_pages[role] * s->cfg.page_tokens;

    return pool < s->cfg.context ? pool : s->cfg.context;
}

/* ---- events to the loop ---- */

static void emit(struct bt_sim *s, struct sim_node *n, const struct sim_engine_msg *m,
                 const uint32_t *ids, size_t n_ids)
{
    struct sim_engine *x = &n->engine;
    struct sim_engine_msg *copy = sim_alloc(sizeof *copy + n_ids * sizeof *ids);
    uint64_t at = s->now + sim_local(s);

    *copy = *m;
    if (n_ids > 0) {
        memcpy(copy->ids, ids, n_ids * sizeof *ids);
    }
    x->event_at = at > x->event_at ? at : x->event_at;
    sim_post(s, x->event_at, n->proc, sim_node_engine)->p = copy;
}

static void emit_failed(struct bt_sim *s, struct sim_node *n, uint64_t job, enum bt_status st,
                        const char *text)
{
    emit(s, n, &(struct sim_engine_msg){.kind = EV_FAILED, .job = job, .status = st, .text = text},
         NULL, 0);
}

/* ---- jobs and sequences ---- */

static struct sim_engine_job *job_find(const struct sim_node *n, uint64_t job)
{
    struct sim_engine_job *j = &n->engine.jobs[(uint32_t)job];

    return j->job == job ? j : NULL;
}

static uint64_t job_of_seq(const struct sim_engine *x, uint64_t seq)
{
    const struct sim_engine_job *j = &x->jobs[x->seq_job_slot[(uint32_t)seq]];

    BT_ASSERT(j->seq == seq);
    return j->job;
}

uint64_t sim_engine_seq_of(const struct sim_node *n, uint64_t job)
{
    const struct sim_engine_job *j = job_find(n, job);

    return j != NULL ? j->seq : 0;
}

uint64_t *sim_engine_page(const struct bt_sim *s, const struct sim_node *n, uint32_t group,
                          uint32_t layer, uint32_t page)
{
    size_t at = ((size_t)layer * n->engine.n_pages + page) * s->cfg.page_tokens;

    return n->engine.kv[group] + at;
}

static void seq_add(struct sim_seq *q, uint32_t token)
{
    uint64_t before = q->n_tokens > 0 ? q->prefix[q->n_tokens - 1] : 1;

    q->prefix[q->n_tokens] = sim_prefix(before, token);
    q->tokens[q->n_tokens++] = token;
}

static void seq_init(struct sim_seq *q, const struct sim_req *r)
{
    size_t places = (size_t)r->n_prompt + r->max_tokens + 1;

    *q = (struct sim_seq){.n_prompt = r->n_prompt,
                          .max_tokens = r->max_tokens,
                          .seed = r->seed,
                          .prompt_logprobs = r->prompt_logprobs};
    q->tokens = sim_alloc(places * sizeof *q->tokens);
    q->prefix = sim_alloc(places * sizeof *q->prefix);
    for (uint32_t i = 0; i < r->n_tokens; i++) {
        seq_add(q, r->tokens[i]);
    }
}

/* What bt_engine_submit and bt_engine_land check. tokens: of the sequence, as long as it lives. */
static enum bt_status add(struct bt_sim *s, struct sim_node *n, const struct sim_req *r, bool land,
                          const uint32_t *tokens, uint32_t *slot)
{
    uint32_t total = r->n_prompt + r->max_tokens;
    bool grows = land || (!r->hold && r->n_tokens - r->n_prompt + 1 < r->max_tokens);
    struct bt_batch_new b = {.n_tokens = r->n_tokens,
                             .hold = r->hold && !land,
                             .all_rows = r->prompt_logprobs,
                             .tokens = tokens};

    total = total < s->cfg.context ? total : s->cfg.context;
    b.n_tokens_max = b.hold ? r->n_tokens : total - 1;
    if (r->n_tokens < r->n_prompt || r->n_tokens - r->n_prompt >= r->max_tokens ||
        r->n_tokens >= s->cfg.context || r->n_tokens + grows > sim_engine_max_tokens(s, n->home)) {
        return BT_ERR_INVALID;
    }
    return land ? bt_batch_land(n->engine.batch, &b, slot)
                : bt_batch_submit(n->engine.batch, &b, slot);
}

/* The page must be this sequence's: one that is written has no other holder, and none before; one
 * that is read may be shared. */
static void check_holder(struct bt_sim *s, const struct sim_node *n, const struct bt_batch_seq *b,
                         uint32_t group, uint32_t page, bool write)
{
    struct bt_page_info i = page == BT_BATCH_NO_PAGE
                                ? (struct bt_page_info){0}
                                : bt_pages_info(bt_batch_pages(n->engine.batch, group), page);
    bool own = i.holder == b->id && i.n_refs == 1;

    if (i.state != BT_PAGE_LEASED || !(own || (!write && i.holder == BT_PAGE_SHARED))) {
        sim_fail(s, "%s: a step %s page %u of group %u, which is not its own",
                 s->procs[n->proc].name, write ? "writes" : "reads", page, group);
    }
}

/* As seq_copy_cached() of engine/seq.c. */
static void copy_cached(struct bt_sim *s, struct sim_node *n, const struct bt_batch_seq *b)
{
    for (uint32_t g = 0; b->n_copied > 0 && g < s->cfg.n_groups; g++) {
        uint32_t to = b->pages[g][b->n_shared];

        check_holder(s, n, b, g, to, true);
        for (uint32_t l = 0; l < s->cfg.n_layers[g]; l++) {
            memmove(sim_engine_page(s, n, g, l, to), sim_engine_page(s, n, g, l, b->copy_from[g]),
                    s->cfg.page_tokens * sizeof(uint64_t));
        }
    }
}

static void do_add(struct bt_sim *s, struct sim_node *n, const struct sim_cmd *c)
{
    struct sim_engine *x = &n->engine;
    bool land = c->kind == CMD_LAND;
    uint32_t slot = 0;
    struct sim_seq q;

    seq_init(&q, c->req);
    enum bt_status st = add(s, n, c->req, land, q.tokens, &slot);

    if (land && st == BT_ERR_BUSY) {
        emit(s, n, &(struct sim_engine_msg){.kind = EV_SHORT}, NULL, 0);
    }
    if (st != BT_OK) {
        seq_free(&q);
        emit_failed(s, n, c->job, st, st == BT_ERR_BUSY ? "no KV pages now" : "does not fit");
        return;
    }
    const struct bt_batch_seq *b = bt_batch_seq(x->batch, slot);

    x->seqs[slot] = q;
    x->jobs[(uint32_t)c->job] = (struct sim_engine_job){c->job, b->id};
    x->seq_job_slot[slot] = (uint32_t)c->job;
    if (land) {
        struct sim_engine_msg m = {.kind = EV_LANDED, .job = c->job, .end = b->n_paged};
        uint32_t ids[SIM_GROUPS_MAX * 128];

        BT_ASSERT(b->n_paged <= 128);
        uint32_t first = b->n_shared + (b->n_copied > 0);

        copy_cached(s, n, b);
        m.first = bt_batch_n_cached(x->batch, b);
        s->result.n_hits[n->home] += m.first > 0;
        for (uint32_t g = 0; g < s->cfg.n_groups; g++) {
            m.first_page[g] = b->first_page[g] > first ? b->first_page[g] : first;
            memcpy(ids + (size_t)g * b->n_paged, b->pages[g], b->n_paged * sizeof *ids);
        }
        emit(s, n, &m, ids, (size_t)s->cfg.n_groups * b->n_paged);
    }
}

static void release(struct sim_engine *x, struct sim_engine_job *j)
{
    uint32_t slot = bt_batch_find(x->batch, j->seq);

    if (slot != BT_BATCH_NO_SLOT) {
        bt_batch_remove(x->batch, slot);
        seq_free(&x->seqs[slot]);
    }
    *j = (struct sim_engine_job){0};
}

static void do_begin(struct bt_sim *s, struct sim_node *n, const struct sim_cmd *c)
{
    struct sim_engine *x = &n->engine;
    struct sim_engine_job *j = job_find(n, c->job);
    uint32_t slot = j != NULL ? bt_batch_find(x->batch, j->seq) : BT_BATCH_NO_SLOT;

    if (slot == BT_BATCH_NO_SLOT) {
        return;
    }
    struct sim_seq *q = &x->seqs[slot];

    if (bt_batch_seq(x->batch, slot)->state != BT_BATCH_LANDING ||
        sim_finish(&s->cfg, c->token, q->n_prompt, q->n_tokens - q->n_prompt, q->max_tokens) != 0) {
        release(x, j);
        emit_failed(s, n, c->job, BT_ERR_INVALID, "the sequence cannot start");
        return;
    }
    seq_add(q, c->token);
    bt_batch_start(x->batch, slot);
}

static void do_cmd(struct bt_sim *s, struct sim_node *n, const struct sim_cmd *c)
{
    struct sim_engine *x = &n->engine;
    struct sim_engine_job *j = job_find(n, c->job);
    uint32_t slot = j != NULL ? bt_batch_find(x->batch, j->seq) : BT_BATCH_NO_SLOT;

    switch (c->kind) {
    case CMD_SUBMIT:
    case CMD_LAND:
        do_add(s, n, c);
        break;
    case CMD_BEGIN:
        do_begin(s, n, c);
        break;
    case CMD_QUARANTINE:
        if (slot != BT_BATCH_NO_SLOT && bt_batch_seq(x->batch, slot)->state == BT_BATCH_LANDING) {
            bt_batch_quarantine(x->batch, slot);
        }
        break;
    case CMD_CANCEL:
        if (slot != BT_BATCH_NO_SLOT) {
            bt_batch_cancel(x->batch, slot);
        }
        break;
    case CMD_RELEASE:
        if (j != NULL) {
            release(x, j);
        }
        break;
    }
    bt_free(c->req);
}

/* ---- steps ---- */

static uint32_t n_layers(const struct sim_config *c)
{
    uint32_t n = 0;

    for (uint32_t g = 0; g < c->n_groups; g++) {
        n += c->n_layers[g];
    }
    return n;
}

/* As report_cached() of engine/step.c. */
static void report_cached(struct bt_sim *s, struct sim_node *n, const struct bt_batch_seq *b)
{
    struct sim_engine_msg m = {
        .kind = EV_PAGES, .job = job_of_seq(&n->engine, b->id), .end = b->n_shared};

    for (m.group = 0; b->hold && m.group < s->cfg.n_groups; m.group++) {
        m.first = bt_batch_first_visible(n->engine.batch, m.group, b->n_tokens);
        for (m.layer = 0; m.first < m.end && m.layer < s->cfg.n_layers[m.group]; m.layer++) {
            emit(s, n, &m, b->pages[m.group] + m.first, m.end - m.first);
        }
    }
}

static void tell_plan(struct bt_sim *s, struct sim_node *n)
{
    struct sim_engine *x = &n->engine;

    for (uint32_t i = 0; i < x->plan.n_preempted; i++) {
        uint64_t job = job_of_seq(x, x->plan.preempted[i]);

        seq_free(&x->seqs[(uint32_t)x->plan.preempted[i]]);
        x->jobs[(uint32_t)job] = (struct sim_engine_job){0};
        s->result.n_preempted++;
        emit(s, n, &(struct sim_engine_msg){.kind = EV_PREEMPTED, .job = job}, NULL, 0);
    }
    for (uint32_t i = 0; i < x->plan.n_started; i++) {
        const struct bt_batch_seq *b = bt_batch_seq(x->batch, x->plan.started[i]);
        uint32_t n_cached = bt_batch_n_cached(x->batch, b);

        copy_cached(s, n, b);
        s->result.n_hits[n->home] += n_cached > 0;
        emit(s, n,
             &(struct sim_engine_msg){
                 .kind = EV_STARTED, .job = job_of_seq(x, b->id), .first = n_cached},
             NULL, 0);
        report_cached(s, n, b);
    }
}

static void write_layer(struct bt_sim *s, struct sim_node *n, const struct bt_batch_span *sp,
                        uint32_t group, uint32_t layer)
{
    struct sim_engine *x = &n->engine;
    const struct bt_batch_seq *b = bt_batch_seq(x->batch, sp->slot);
    uint32_t size = s->cfg.page_tokens;

    for (uint32_t pos = sp->pos; pos < sp->pos + sp->n; pos++) {
        uint32_t page = b->pages[group][pos / size];

        check_holder(s, n, b, group, page, true);
        if (page != BT_BATCH_NO_PAGE) {
            sim_engine_page(s, n, group, layer, page)[pos % size] =
                sim_kv(x->seqs[sp->slot].prefix[pos], group, layer, pos);
        }
    }
}

/* As report_pages() of engine/step.c. */
static void report_pages(struct bt_sim *s, struct sim_node *n, const struct bt_batch_span *sp,
                         uint32_t group, uint32_t layer)
{
    struct sim_engine *x = &n->engine;
    const struct bt_batch_seq *b = bt_batch_seq(x->batch, sp->slot);
    uint32_t end_pos = sp->pos + sp->n, size = s->cfg.page_tokens;
    uint32_t needed = bt_batch_first_visible(x->batch, group, b->n_tokens);
    struct sim_engine_msg m = {.kind = EV_PAGES,
                               .job = job_of_seq(x, b->id),
                               .group = group,
                               .layer = layer,
                               .first = sp->pos / size,
                               .end = end_pos / size};

    m.end += sp->last && end_pos % size != 0;
    m.first = m.first > needed ? m.first : needed;
    if (m.first < m.end) {
        emit(s, n, &m, b->pages[group] + m.first, m.end - m.first);
    }
}

/* What attention reads for the token after the last known one. */
static uint64_t read_all(struct bt_sim *s, struct sim_node *n, uint32_t slot)
{
    const struct sim_config *c = &s->cfg;
    const struct bt_batch_seq *b = bt_batch_seq(n->engine.batch, slot);
    uint64_t sum = 0;

    for (uint32_t g = 0; g < c->n_groups; g++) {
        uint32_t w = c->window[g];
        uint32_t from = w == 0 || b->n_tokens < w ? 0 : b->n_tokens - w;

        for (uint32_t l = 0; l < c->n_layers[g]; l++) {
            for (uint32_t pos = from; pos < b->n_tokens; pos++) {
                uint32_t page = b->pages[g][pos / c->page_tokens];

                if (l == 0 && (pos == from || pos % c->page_tokens == 0)) {
                    check_holder(s, n, b, g, page, false);
                }
                if (page != BT_BATCH_NO_PAGE) {
                    sum += sim_mix(sim_engine_page(s, n, g, l, page)[pos % c->page_tokens], pos);
                }
            }
        }
    }
    return sum;
}

static void emit_prompt(struct bt_sim *s, struct sim_node *n, const struct bt_batch_span *sp)
{
    struct sim_engine *x = &n->engine;
    struct sim_seq *q = &x->seqs[sp->slot];
    uint32_t end = sp->pos + sp->n < q->n_prompt - 1 ? sp->pos + sp->n : q->n_prompt - 1;
    uint64_t seq = bt_batch_seq(x->batch, sp->slot)->id;

    if (q->prompt_logprobs && !sp->decode && sp->pos < end) {
        emit(s, n,
             &(struct sim_engine_msg){.kind = EV_LOGPROBS,
                                      .job = job_of_seq(x, seq),
                                      .first = sp->pos + 1,
                                      .n_list = end - sp->pos},
             q->tokens + sp->pos + 1, end - sp->pos);
    }
}

static void deliver(struct bt_sim *s, struct sim_node *n, const uint64_t *sums)
{
    struct sim_engine *x = &n->engine;

    for (uint32_t i = 0; i < x->plan.n_spans; i++) {
        const struct bt_batch_span *sp = &x->plan.spans[i];
        const struct bt_batch_seq *b = bt_batch_seq(x->batch, sp->slot);
        struct sim_seq *q = &x->seqs[sp->slot];

        if (b->cancelled) {
            continue;
        }
        emit_prompt(s, n, sp);
        if (sp->last) {
            struct sim_engine_msg m = {.kind = EV_TOKEN, .index = q->n_tokens - q->n_prompt};

            m.job = job_of_seq(x, b->id);
            m.sampled = sim_sample(sums[i], s->cfg.classes[n->proc], q->seed, m.index);
            m.finish = sim_finish(&s->cfg, m.sampled.token, q->n_prompt, m.index, q->max_tokens);
            seq_add(q, m.sampled.token);
            bt_batch_sampled(x->batch, sp->slot, m.finish != 0);
            emit(s, n, &m, NULL, 0);
        }
    }
}

static void wake(struct bt_sim *s, struct sim_node *n, uint64_t after)
{
    if (!n->engine.waking && !n->engine.stepping) {
        n->engine.waking = true;
        sim_post(s, s->now + after, n->proc, on_wake);
    }
}

static void step_begin(struct bt_sim *s, struct sim_node *n)
{
    struct sim_engine *x = &n->engine;

    bt_batch_plan(x->batch, &x->plan);
    tell_plan(s, n);
    if (bt_batch_load(x->batch).pages_short) {
        emit(s, n, &(struct sim_engine_msg){.kind = EV_SHORT}, NULL, 0);
    }
    if (x->plan.n_spans == 0) {
        if (x->plan.n_preempted > 0) {
            wake(s, n, 1000);
        }
        return;
    }
    x->stepping = true;
    x->layer = 0;
    x->layer_ns =
        (s->cfg.step_ns + s->cfg.token_ns[n->home] * x->plan.n_tokens) / n_layers(&s->cfg);
    sim_post(s, s->now + x->layer_ns, n->proc, on_layer);
}

static void step_end(struct bt_sim *s, struct sim_node *n)
{
    struct sim_engine *x = &n->engine;
    uint64_t sums[SIM_SPANS_MAX];

    BT_ASSERT(x->plan.n_spans <= SIM_SPANS_MAX);
    for (uint32_t i = 0; i < x->plan.n_spans; i++) {
        const struct bt_batch_span *sp = &x->plan.spans[i];

        sums[i] =
            sp->last && !bt_batch_seq(x->batch, sp->slot)->cancelled ? read_all(s, n, sp->slot) : 0;
    }
    x->stepping = false;
    bt_batch_commit(x->batch);
    deliver(s, n, sums);
    if (sim_chance(s, AUDIT_PPM)) {
        sim_audit(s, n);
    }
    wake(s, n, 0);
}

/* Between layers: cancels are seen at once, and carried out with the other commands later. */
static bool all_cancelled(struct sim_node *n)
{
    struct sim_engine *x = &n->engine;

    for (size_t i = 0; i < x->n_cmds; i++) {
        const struct sim_cmd *c = &x->cmds[i];
        const struct sim_engine_job *j = job_find(n, c->job);
        uint32_t slot = j != NULL ? bt_batch_find(x->batch, j->seq) : BT_BATCH_NO_SLOT;

        if ((c->kind == CMD_CANCEL || c->kind == CMD_RELEASE) && slot != BT_BATCH_NO_SLOT) {
            bt_batch_cancel(x->batch, slot);
        }
    }
    for (uint32_t i = 0; i < x->plan.n_spans; i++) {
        if (!bt_batch_seq(x->batch, x->plan.spans[i].slot)->cancelled) {
            return false;
        }
    }
    return true;
}

static void on_layer(struct bt_sim *s, struct sim_event *e)
{
    struct sim_node *n = s->procs[e->proc].node;
    struct sim_engine *x = &n->engine;
    uint32_t group = x->layer < s->cfg.n_layers[0] ? 0 : 1;
    uint32_t layer = group == 0 ? x->layer : x->layer - s->cfg.n_layers[0];

    x->n_layers_done++;
    for (uint32_t i = 0; i < x->plan.n_spans; i++) {
        const struct bt_batch_span *sp = &x->plan.spans[i];
        const struct bt_batch_seq *b = bt_batch_seq(x->batch, sp->slot);

        write_layer(s, n, sp, group, layer);
        if (b->hold && !b->cancelled) {
            report_pages(s, n, sp, group, layer);
        }
    }
    if (all_cancelled(n)) {
        x->stepping = false;
        bt_batch_abandon(x->batch);
        wake(s, n, 0);
    } else if (++x->layer == n_layers(&s->cfg)) {
        step_end(s, n);
    } else {
        sim_post(s, s->now + x->layer_ns, n->proc, on_layer);
    }
}

static void tell_cache(struct sim_node *n)
{
    uint32_t count;
    const struct bt_prefix_change *list = bt_batch_cache_changes(n->engine.batch, &count);

    bt_prefix_report_change(n->report, list, count);
}

static void on_wake(struct bt_sim *s, struct sim_event *e)
{
    struct sim_node *n = s->procs[e->proc].node;
    struct sim_engine *x = &n->engine;

    x->waking = false;
    for (size_t i = 0; i < x->n_cmds; i++) {
        do_cmd(s, n, &x->cmds[i]);
    }
    x->n_cmds = 0;
    step_begin(s, n);
    tell_cache(n);
}

void sim_engine_cmd(struct bt_sim *s, struct sim_node *n, const struct sim_cmd *c)
{
    struct sim_engine *x = &n->engine;

    x->cmds = bt_grow(x->cmds, x->n_cmds, &x->cap_cmds, sizeof *x->cmds);
    x->cmds[x->n_cmds++] = *c;
    wake(s, n, sim_local(s));
}
