#ifndef BT_PLAN_SIM_INT_H
#define BT_PLAN_SIM_INT_H

/* Inside the simulation only. sim_world.c: events, random numbers, log; sim_config.c: a seed's
 * cluster; sim_proc.c: processes and the network between them; sim_session.c: session streams;
 * sim_engine.c: the toy engine; sim_conn.c, sim_land.c, sim_push.c: the transfer room;
 * sim_daemon.c with sim_prefill.c and sim_decode.c: nodes; sim_router.c, sim_client.c: routers and
 * requests; sim_fault.c: faults; sim_quiet.c: when pages must be free; sim_settle.c: what must hold in the end; sim_audit.c:
 * page accounts.
 *
 * Memory: an allocation that fails is a bug of the test machine; sim_alloc() asserts. */

#include "base/arena.h"
#include "base/buf.h"
#include "base/clock.h"
#include "base/hash.h"
#include "decoded/decoded_core.h"
#include "plan/sim.h"
#include "prefilld/prefilld_core.h"
#include "router/router_core.h"
#include "sched/batch.h"
#include "sched/prefix_report.h"

#define SIM_ROUTERS_MAX 3u
#define SIM_NODES_MAX   4u /* of each role */
#define SIM_PROCS_MAX   (SIM_ROUTERS_MAX + 2 * SIM_NODES_MAX)
#define SIM_WORLD       UINT32_MAX /* an event that belongs to no process */
#define SIM_GROUPS_MAX  2u
#define SIM_PAGE_MAX    8u /* tokens of a page */
#define SIM_VOCAB       1000u
#define SIM_CLASSES     2u   /* kinds of models */
#define SIM_SPANS_MAX   128u /* sequences of a node */
#define SIM_MS          BT_NS_PER_MS
#define SIM_LOG_MAX     512u
#define SIM_ARGS        6
#define SIM_TIMER       1u /* k of events that are timers of a loop */

struct sim_event;
/* The handler of an event. e->p is freed afterwards unless sim_hold() took it. */
typedef void sim_fn(struct bt_sim *s, struct sim_event *e);

struct sim_event {
    uint64_t at, seq, order; /* order: seq of the first time that it was posted */
    sim_fn *fn;
    uint32_t proc, incarnation; /* whose event it is: dropped when that one is gone */
    uint32_t i, k;
    uint64_t a, b;
    void *p;
};

/* ---- a seed's cluster ---- */

enum sim_fault {
    SIM_FAULT_KILL_NODE = 1,
    SIM_FAULT_KILL_ROUTER = 2,
    SIM_FAULT_FREEZE = 4,
    SIM_FAULT_CUT = 8,     /* the network between two processes, one way or both */
    SIM_FAULT_STREAM = 16, /* one session stream breaks */
    SIM_FAULT_CONN = 32,   /* one transfer connection breaks */
    SIM_FAULT_SLOW = 64,   /* latencies multiplied for a while */
    SIM_FAULT_DRAIN = 128,
    SIM_FAULT_STALL = 256, /* receives of one connection do not end */
    SIM_FAULT_FORGE = 512, /* control messages that nobody sent, of real tickets among others */
    SIM_FAULT_ALL = 1023,
    SIM_FAULT_KILL_DECODE = 1024, /* not among all: those kill any node */
};

struct sim_config {
    uint32_t n_routers, n_nodes[2]; /* by enum bt_role */
    uint32_t page_tokens, n_groups, n_layers[SIM_GROUPS_MAX], window[SIM_GROUPS_MAX];
    enum bt_role roles[SIM_PROCS_MAX]; /* of nodes, at their start */
    uint32_t n_flips;                  /* roles change so often */
    uint32_t n_pages[2], chunk_tokens, max_batch, max_jobs, context;
    bool caches[2]; /* prefix caches, by enum bt_role */
    uint64_t lease_ns, heartbeat_ns, transfer_ns, alive_ns, connect_ns, drain_ns;
    uint64_t net_min_ns, net_max_ns, local_max_ns; /* latency between processes, and threads */
    uint32_t hiccup_ppm;                           /* one of them takes up to 200 times as long */
    uint64_t start_ns;                             /* processes start in [0, start_ns) */
    uint32_t classes[SIM_PROCS_MAX];               /* of models: only equal ones may be paired */
    uint64_t step_ns, token_ns[2];                 /* of the engine; by the node's pool */
    uint64_t share_ns;
    uint32_t share_window;
    bool rendezvous;
    uint32_t share_drop_ppm, share_twice_ppm, busy_ppm, ctrl_lost_ppm;
    uint32_t seqs_max, queue_max, attempts_max;
    enum bt_rt_local local; /* of all routers */
    uint32_t local_tokens;
    uint64_t queue_ns, grace_ns, migrate_ns, max_ttft_ns;
    uint32_t n_requests, prompt_max, answer_max, cancel_ppm, deadline_ppm;
    uint32_t n_texts, alike_ppm; /* prompts that begin like a text, or like another request */
    uint64_t arrive_ns;          /* requests arrive in [0, arrive_ns) */
    uint32_t n_faults, fault_kinds;
    uint64_t fault_ns; /* faults begin in [0, fault_ns) */
    bool must_finish;  /* every request that nobody cancelled */
    bool together;     /* all faults at nearly the same time */
    uint64_t hold_ns;  /* a job's pages may be held so long after its ticket is over */
};
void sim_config(struct bt_sim *s);

/* ---- the toy model ---- */

/* What a layer stores for the last of n tokens (depends on all of them by `prefix`). */
uint64_t sim_prefix(uint64_t prefix, uint32_t token);
uint64_t sim_kv(uint64_t prefix, uint32_t group, uint32_t layer, uint32_t pos);
uint64_t sim_mix(uint64_t a, uint64_t b);
struct bt_sampled sim_sample(uint64_t sum, uint32_t class, uint64_t seed, uint32_t index);
/* 0, 1 stop, 2 length */
uint32_t sim_finish(const struct sim_config *c, uint32_t token, uint32_t n_prompt, uint32_t index,
                    uint32_t max_tokens);

/* ---- engine ---- */

enum sim_cmd_kind { CMD_SUBMIT, CMD_LAND, CMD_BEGIN, CMD_QUARANTINE, CMD_CANCEL, CMD_RELEASE };

struct sim_req {
    uint32_t n_tokens, n_prompt, max_tokens;
    uint64_t seed;
    bool hold, prompt_logprobs;
    uint32_t tokens[];
};

struct sim_cmd {
    enum sim_cmd_kind kind;
    uint32_t token;
    uint64_t job;
    struct sim_req *req;
};

struct sim_seq {
    uint32_t n_tokens, n_prompt, max_tokens;
    uint64_t seed;
    bool prompt_logprobs;
    uint32_t *tokens; /* NULL: free */
    uint64_t *prefix; /* [n_tokens]: of tokens 0 … i */
};

struct sim_engine_job {
    uint64_t job; /* 0: free */
    uint64_t seq;
};

struct sim_engine {
    struct bt_batch *batch;
    struct sim_seq *seqs;        /* [max_jobs], by batch slot */
    struct sim_engine_job *jobs; /* [max_jobs], by slot of the job id */
    uint32_t *seq_job_slot;
    struct sim_cmd *cmds;
    size_t n_cmds, cap_cmds;
    bool stepping, waking;
    struct bt_batch_plan plan;
    uint32_t layer; /* of the running step */
    uint64_t layer_ns;
    uint64_t n_layers_done; /* of all steps */
    uint64_t event_at;
    uint64_t *kv[SIM_GROUPS_MAX]; /* [layer][page][token] */
    uint32_t n_pages;
};

/* What the engine tells its loop. */
enum sim_engine_ev {
    EV_FAILED,
    EV_STARTED,
    EV_PAGES,
    EV_TOKEN,
    EV_LOGPROBS,
    EV_PREEMPTED,
    EV_SHORT,
    EV_LANDED
};
struct sim_engine_msg {
    enum sim_engine_ev kind;
    enum bt_status status;
    const char *text; /* static */
    uint64_t job;
    uint32_t group, layer, first, end; /* pages; landed: end pages; landed, started: first
                                          tokens were cached */
    uint32_t index, finish;
    struct bt_sampled sampled;
    uint32_t first_page[SIM_GROUPS_MAX];
    uint32_t n_list; /* prompt log-probabilities: positions first … */
    uint32_t ids[];  /* page ids; landed: [n_groups][end]; log-probabilities: the tokens */
};

/* ---- transfer room ---- */

enum sim_side { SIDE_P, SIDE_D };
enum sim_end { END_NONE, END_DIALING, END_UP, END_CLOSED };

struct sim_conn {
    uint32_t proc[2], incarnation[2]; /* by enum sim_side */
    enum sim_end end[2];
    uint64_t instance; /* D's, wanted */
    struct bt_gate_token gate_token;
    uint64_t rx[2], progress[2];
    bool stalled;       /* its receives do not end */
    uint32_t n_sending; /* shares in the window */
};

/* One share on its way. */
struct sim_op {
    bool used, send_open, recv_open, arriving;
    uint64_t number; /* never reused */
    uint32_t conn, push, landing;
    uint32_t p_incarnation;
    struct bt_ticket ticket;
    uint64_t generation, holder; /* of the source page */
    uint32_t group, layer, page, source;
    uint64_t data[SIM_PAGE_MAX];
};

struct sim_push {
    bool started, over;
    struct bt_ticket ticket;
    uint64_t generation, job, holder;
    uint32_t conn, group, layer, first, n_pages, cursor, in_flight;
    uint32_t *ids;
    enum bt_status status;
};

struct sim_landing {
    bool open, closing, close_asked, close_told, expecting, full, landed_queued;
    struct bt_ticket ticket;
    uint64_t generation, job, holder;
    uint32_t conn, n_pages;
    uint32_t first[SIM_GROUPS_MAX];
    uint32_t *ids; /* [n_groups][n_pages] */
    uint8_t *seen; /* [layer of all][n_pages] */
    uint64_t want[SIM_GROUPS_MAX], got[SIM_GROUPS_MAX];
    uint32_t in_flight;
    uint64_t t_first, t_last;
};

struct sim_xfer {
    uint64_t cmd_at, event_at;
    struct sim_push *pushes;
    uint32_t n_pushes, cap_pushes, push_first;
    struct sim_landing *landings;
    uint32_t n_landings, cap_landings;
};

/* ---- nodes ---- */

enum sim_link_state { LINK_IDLE, LINK_DIALLING, LINK_UP };
struct sim_link {
    enum sim_link_state state;
    uint32_t router; /* its process */
    uint32_t stream;
    uint64_t last_heard, pause_ns;
    struct bt_msg_output *outbox;
    size_t n_outbox, cap_outbox;
    struct bt_arena arena; /* of the outbox */
    bool flush_posted;
    struct bt_msg_peer peers[SIM_NODES_MAX * 2];
    size_t n_peers;
};

/* A job as the core's actions describe it. */
struct sim_job_state {
    uint64_t job; /* 0: none */
    bool gone;    /* the engine said that it forgot it */
    bool begun;
    uint32_t n_pushes; /* not answered yet */
    struct bt_ticket ticket;
    uint32_t request;
};

struct sim_ticket_state {
    struct bt_ticket ticket;
    uint32_t router; /* index of the link */
    bool over;
    uint64_t t_over;
    uint32_t next; /* index of the next token */
    bool began;    /* it had one */
    uint32_t request;
};

struct sim_node {
    uint32_t proc, max_jobs; /* of both legs together */
    enum bt_role home, role; /* whose pool it has; as what it serves */
    struct {
        bool leaving, gave_back;
        uint64_t end;
    } leg[BT_LEGS]; /* that goes */
    struct bt_pf_core *pf;
    struct bt_dc_core *dc;
    struct sim_engine engine;
    uint64_t n_layers_told; /* of the engine, to the prefill core */
    struct sim_xfer xfer;
    struct sim_link links[SIM_ROUTERS_MAX];
    struct sim_job_state *jobs; /* [max_jobs] */
    struct sim_ticket_state *tickets;
    uint32_t n_tickets, cap_tickets;
    struct bt_map by_ticket;
    struct bt_prefix_report *report;
    uint64_t drain_end;
    bool gave_back; /* its time to drain was over */
    struct sim_answer *answers;
    uint32_t n_answers, cap_answers;
};

/* ---- routers and requests ---- */

enum sim_request_state { REQ_NEW, REQ_ASKED, REQ_RUNNING, REQ_DONE, REQ_CANCELLED, REQ_LOST };
struct sim_request {
    enum sim_request_state state;
    uint32_t router; /* process */
    uint64_t t_arrive, t_ask, t_cancel, t_deadline, t_over;
    uint32_t cancel_after;         /* tokens; 0: never */
    uint32_t n_prompt, max_tokens; /* as asked */
    int32_t priority;
    bool logprobs, prompt_logprobs, probe;
    bool dispatched; /* submitted to a node at least once */
    bool landed;     /* a decode node has begun */
    uint32_t computed_at,
        computed_by; /* process and incarnation that began to compute it; by 0: none */
    char id[12];
    uint64_t seed, seq;
    uint32_t *tokens; /* the prompt */
    struct {
        struct bt_sampled *tokens;
        uint32_t n, finish;
    } answer[SIM_CLASSES]; /* of undisturbed runs */
    uint32_t classes;      /* bits: answers that agree with what was delivered */
    uint32_t n_got, logprob_next;
    enum bt_rt_end_kind end;
};

struct sim_router {
    uint32_t proc;
    struct bt_rt_core *core;
};

/* ---- processes ---- */

struct sim_proc {
    bool is_router, alive, frozen, draining;
    uint32_t incarnation;
    uint64_t instance;
    char name[12];
    struct sim_router *router;
    struct sim_node *node;
    struct sim_event *stalled; /* while frozen */
    size_t n_stalled, cap_stalled;
};

struct sim_stream {
    uint32_t proc[2], incarnation[2]; /* 0: the node, 1: the router */
    uint32_t link;                    /* at the node */
    bool open[2];
    uint64_t session;                                   /* at the router; 0: not accepted yet */
    uint64_t last_at[2], n_sent[2], n_seen[2], keep[2]; /* by receiver */
};

struct sim_heap_item {
    uint64_t at, seq;
    uint32_t slot;
};

struct sim_log_entry {
    uint64_t at;
    const char *fmt;
    uint64_t args[SIM_ARGS];
    char text[88];
};

struct bt_sim {
    struct bt_sim_opts opts;
    struct sim_config cfg;
    struct bt_sim_result result;
    uint64_t now, t0, random, seq;
    bool done;
    struct sim_heap_item *heap;
    size_t n_heap, cap_heap;
    struct sim_event *events;
    uint32_t *free_events;
    size_t n_free, n_events;
    struct sim_event *held; /* waits for the network between two processes */
    size_t n_held, cap_held;
    bool cut[SIM_PROCS_MAX][SIM_PROCS_MAX]; /* [from][to] */
    uint32_t slow;                          /* latencies are multiplied */
    struct sim_proc procs[SIM_PROCS_MAX];
    uint32_t n_procs;
    struct sim_stream *streams;
    uint32_t n_streams, cap_streams;
    struct sim_conn *conns;
    uint32_t n_conns, cap_conns;
    struct sim_op *ops;
    uint32_t n_ops, cap_ops;
    uint64_t op_number;
    struct sim_request *requests;
    uint32_t n_requests;
    uint32_t n_open;   /* requests not over yet */
    uint64_t t_over;   /* of the last request */
    uint64_t t_fault;  /* something was broken or put right last; 0: never */
    bool stalled;      /* receives may not end, or messages were forged */
    uint32_t stage;    /* of settling */
    uint32_t n_probed; /* routers */
    uint64_t t_settle, t_stage_end;
    struct bt_arena arena; /* of the message being delivered */
    struct bt_buf buf;
    struct sim_log_entry log[SIM_LOG_MAX];
    uint64_t n_log;
};

/* ---- sim_world.c ---- */

void *sim_alloc(size_t n);                                                /* zeroed */
void *sim_grow(void *list, uint32_t n, uint32_t *cap, size_t item_bytes); /* room for one more */
uint64_t sim_random(struct bt_sim *s);
uint64_t sim_between(struct bt_sim *s, uint64_t lo, uint64_t hi); /* lo <= x <= hi */
uint32_t sim_below(struct bt_sim *s, uint32_t n);
bool sim_chance(struct bt_sim *s, uint32_t ppm);
/* Fill i, k, a, b, p at once. */
struct sim_event *sim_post(struct bt_sim *s, uint64_t at, uint32_t proc, sim_fn *fn);
void sim_repost(struct bt_sim *s, uint64_t at, const struct sim_event *e);
void sim_push_event(struct sim_event **list, size_t *n, size_t *cap, struct sim_event *e);
/* The first failure ends the run. */
void sim_fail(struct bt_sim *s, const char *fmt, ...) BT_PRINTF(2, 3);
/* fmt: %u decimal, %x hex, %p the name of a process, %s the text. */
void sim_log_args(struct bt_sim *s, const char *text, const char *fmt, const uint64_t *args);
#define sim_logs(s, text, fmt, ...)                                                                \
    sim_log_args(s, text, fmt, (const uint64_t[SIM_ARGS]){__VA_ARGS__})
#define sim_log(s, ...) sim_logs(s, NULL, __VA_ARGS__)
static inline uint64_t sim_ticket_id(const struct bt_ticket *t)
{
    return bt_ticket_hash(t) & 0xffff;
}

/* ---- sim_proc.c ---- */

void sim_procs_start(struct bt_sim *s); /* all, in some order */
void sim_proc_start(struct bt_sim *s, uint32_t proc);
void sim_proc_stop(struct bt_sim *s, uint32_t proc, bool noticed);
void sim_proc_freeze(struct bt_sim *s, uint32_t proc);
void sim_proc_thaw(struct bt_sim *s, uint32_t proc);
uint64_t sim_latency(struct bt_sim *s);
uint64_t sim_local(struct bt_sim *s); /* between two threads */
/* Keeps a message for when from and to are joined again. */
void sim_hold(struct bt_sim *s, struct sim_event *e);
void sim_cut(struct bt_sim *s, uint32_t from, uint32_t to);
void sim_heal(struct bt_sim *s, uint32_t a, uint32_t b); /* both directions */
bool sim_alive(const struct bt_sim *s, uint32_t proc, uint32_t incarnation);
uint32_t sim_proc_by_name(const struct bt_sim *s, const char *name);

/* ---- sim_session.c ---- */

void sim_links_start(struct bt_sim *s, struct sim_node *n);
void sim_links_fini(struct sim_node *n);
void sim_link_beat(struct bt_sim *s, struct sim_node *n);
void sim_link_send(struct bt_sim *s, struct sim_node *n, uint32_t link,
                   const struct bt_from_daemon *m);
void sim_link_output(struct bt_sim *s, struct sim_node *n, uint32_t link,
                     const struct bt_msg_output *o);
void sim_link_attempt_end(struct bt_sim *s, struct sim_node *n, uint32_t link,
                          const struct bt_msg_attempt_end *m);
void sim_router_send(struct bt_sim *s, struct sim_router *r, uint64_t session,
                     const struct bt_from_router *m);
void sim_router_close(struct bt_sim *s, struct sim_router *r, uint64_t session);
void sim_stream_break(struct bt_sim *s, uint32_t stream);
void sim_streams_of_dead(struct bt_sim *s, uint32_t proc, bool noticed);

/* ---- sim_engine.c ---- */

void sim_engine_init(struct bt_sim *s, struct sim_node *n);
void sim_engine_fini(struct sim_node *n);
void sim_engine_cmd(struct bt_sim *s, struct sim_node *n, const struct sim_cmd *c);
uint32_t sim_engine_max_tokens(const struct bt_sim *s, enum bt_role role);
uint64_t sim_engine_seq_of(const struct sim_node *n, uint64_t job); /* 0: unknown */
uint64_t *sim_engine_page(const struct bt_sim *s, const struct sim_node *n, uint32_t group,
                          uint32_t layer, uint32_t page);

/* ---- sim_conn.c, sim_land.c, sim_push.c ---- */

uint64_t sim_conn_id(uint32_t conn, enum sim_side side);
static inline enum sim_side sim_conn_side(uint64_t id)
{
    return (enum sim_side)(id % 2);
}
/* The connection of an id that this node was told; UINT32_MAX: none such. */
uint32_t sim_conn_find(const struct bt_sim *s, const struct sim_node *n, uint64_t id);
uint64_t sim_connect(struct bt_sim *s, struct sim_node *n, const char *address, uint64_t instance,
                     const struct bt_gate_token *token);
void sim_disconnect(struct bt_sim *s, struct sim_node *n, uint64_t id);
void sim_control(struct bt_sim *s, struct sim_node *n, uint64_t id, const struct bt_control *m);
void sim_conn_break(struct bt_sim *s, uint32_t conn);
void sim_conn_forge(struct bt_sim *s, uint32_t conn, enum sim_side to, const struct bt_control *m);
void sim_conns_tick(struct bt_sim *s, struct sim_node *n);
void sim_conns_of_dead(struct bt_sim *s, uint32_t proc, bool noticed);
struct sim_event *sim_xfer_event(struct bt_sim *s, struct sim_node *n, sim_fn *fn);
struct sim_event *sim_xfer_cmd(struct bt_sim *s, struct sim_node *n, sim_fn *fn);

void sim_land_open(struct bt_sim *s, struct sim_node *n, const struct bt_dc_action *a);
void sim_land_expect(struct bt_sim *s, struct sim_node *n, const struct bt_dc_action *a);
void sim_land_close(struct bt_sim *s, struct sim_node *n, const struct bt_dc_action *a);
bool sim_land_open_of_job(const struct sim_node *n, uint64_t job);
void sim_receives_fail(struct bt_sim *s, uint32_t conn);
void sim_share_arrives(struct bt_sim *s, struct sim_event *e); /* an event of D */
void sim_landings_fini(struct sim_node *n);

void sim_push(struct bt_sim *s, struct sim_node *n, const struct bt_pf_action *a);
void sim_push_cancel(struct bt_sim *s, struct sim_node *n, const struct bt_ticket *t);
void sim_pushes_fail(struct bt_sim *s, struct sim_node *n, uint32_t conn);
void sim_share_sent(struct bt_sim *s, uint32_t op, uint64_t at, bool ok);
bool sim_op_read(struct bt_sim *s, struct sim_op *op); /* the source page, into data */
void sim_op_put(struct bt_sim *s, uint32_t op);        /* frees it when both ends are done */
void sim_pushes_fini(struct sim_node *n);

/* ---- sim_daemon.c, sim_prefill.c, sim_decode.c ---- */

struct sim_node *sim_node_create(struct bt_sim *s, uint32_t proc);
void sim_node_destroy(struct sim_node *n);
void sim_node_drain(struct bt_sim *s, uint32_t proc);
void sim_node_tell_role(struct bt_sim *s, struct sim_node *n, uint32_t link);
void sim_node_set_role(struct bt_sim *s, struct sim_node *n, enum bt_role role);
void sim_node_router_up(struct bt_sim *s, struct sim_node *n, uint32_t link);
void sim_node_router_lost(struct bt_sim *s, struct sim_node *n, uint32_t link);
void sim_node_message(struct bt_sim *s, struct sim_node *n, uint32_t link,
                      const struct bt_from_router *m);
void sim_node_hello(struct bt_sim *s, const struct sim_node *n, struct bt_msg_hello *h);
struct bt_gate_token sim_gate_token(const struct sim_proc *p); /* of its instance */
void sim_node_load(struct bt_sim *s, struct sim_node *n, uint32_t link, struct bt_msg_load *l);
void sim_node_engine(struct bt_sim *s, struct sim_event *e);
void sim_node_peer_up(struct bt_sim *s, struct sim_node *n, uint64_t conn);
void sim_node_peer_down(struct bt_sim *s, struct sim_node *n, uint64_t conn, const char *why);
void sim_node_control(struct bt_sim *s, struct sim_node *n, uint64_t conn,
                      const struct bt_control *m);
uint32_t sim_node_jobs(const struct sim_node *n);

/* Checks of what a core does with a job. */
void sim_job_new(struct bt_sim *s, struct sim_node *n, uint64_t job, const struct bt_ticket *t);
struct sim_job_state *sim_job(struct bt_sim *s, struct sim_node *n, uint64_t job, const char *what);
void sim_job_gone(struct sim_node *n, uint64_t job);
void sim_ticket_new(struct bt_sim *s, struct sim_node *n, uint32_t link,
                    const struct bt_msg_submit *m);
void sim_ticket_over(struct bt_sim *s, struct sim_node *n, uint32_t link,
                     const struct bt_ticket *t); /* t NULL: all of the link */
void sim_ticket_output(struct bt_sim *s, struct sim_node *n, uint32_t link,
                       const struct bt_msg_output *o);
void sim_ticket_end(struct bt_sim *s, struct sim_node *n, uint32_t link,
                    const struct bt_msg_attempt_end *m);

void sim_prefill_start(struct bt_sim *s, struct sim_node *n);
void sim_prefill_run(struct bt_sim *s, struct sim_node *n); /* carries the core's list out */
void sim_prefill_engine(struct bt_sim *s, struct sim_node *n, const struct sim_engine_msg *m);
void sim_prefill_message(struct bt_sim *s, struct sim_node *n, uint32_t link,
                         const struct bt_from_router *m);
void sim_prefill_router_lost(struct bt_sim *s, struct sim_node *n, uint32_t link);
void sim_prefill_pushed(struct bt_sim *s, struct sim_node *n, uint64_t job,
                        const struct bt_ticket *t, enum bt_status st);

void sim_decode_start(struct bt_sim *s, struct sim_node *n);
void sim_decode_run(struct bt_sim *s, struct sim_node *n);
void sim_decode_engine(struct bt_sim *s, struct sim_node *n, const struct sim_engine_msg *m);

/* ---- sim_router.c, sim_client.c ---- */

struct sim_router *sim_router_create(struct bt_sim *s, uint32_t proc);
void sim_router_destroy(struct sim_router *r);
void sim_router_pump(struct bt_sim *s, struct sim_router *r);

void sim_clients_start(struct bt_sim *s);
void sim_clients_fini(struct bt_sim *s);
void sim_client_tokens(struct bt_sim *s, struct sim_router *r, const struct bt_rt_action *a);
void sim_client_prompt(struct bt_sim *s, struct sim_router *r, const struct bt_rt_action *a);
void sim_client_end(struct bt_sim *s, struct sim_router *r, const struct bt_rt_action *a);
void sim_client_submitted(struct bt_sim *s, struct sim_router *r, const struct bt_msg_submit *m);
void sim_clients_lost(struct bt_sim *s, uint32_t router);
void sim_client_probe(struct bt_sim *s, uint32_t router);

/* ---- sim_audit.c ---- */

void sim_audit(struct bt_sim *s,
               const struct sim_node *n); /* fails unless the pages' holders are right */

/* ---- sim_fault.c, sim_quiet.c, sim_settle.c ---- */

void sim_faults_start(struct bt_sim *s);
void sim_drain(struct bt_sim *s, uint32_t proc); /* and replaces it afterwards */
void sim_quiet_start(struct bt_sim *s);
void sim_settle_start(struct bt_sim *s); /* after the last fault */

#endif
