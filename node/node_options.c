/* The option tables of prefilld and decoded. */

#include "kernels/kv_type.h"
#include "kernels/open.h"
#include "node/node.h"

#define BUCKETS_SECONDS                                                                            \
    "0.00001,0.000025,0.00005,0.0001,0.00025,0.0005,0.001,0.0025,0.005,0.01,0.025,0.05,0.1,0.25,"  \
    "0.5,1,2.5,5,10,30,60"
#define BUCKETS_TOKENS "1,2,4,8,16,32,64,128,256,512,1024,2048,4096"

const char *const bt_node_backends[] = {"cpu", "cuda", "emulated"};

#define ROW(name, type, field, dflt, min, max, choices, arg, help)                                 \
    {name, type, offsetof(struct bt_node_cfg, field), dflt, min, max, choices, arg, help}

#define COMMON_ROWS                                                                                \
    ROW("router", BT_OPT_LIST, router, NULL, 0, 0, NULL, "HOST:PORT[,...]",                        \
        "Session addresses of the routers to serve; every address that a name resolves to is "     \
        "dialled."),                                                                               \
        ROW("model", BT_OPT_STR, model, NULL, 0, 0, NULL, "DIR_OR_GGUF",                           \
            "Model to serve: a Hugging Face directory or a .gguf file."),                          \
        ROW("model-name", BT_OPT_STR, model_name, NULL, 0, 0, NULL, "NAME",                        \
            "Name of the model in status (default: the base name of the path)."),                  \
        ROW("backend", BT_OPT_ENUM, backend, "cpu", 0, 0, "cpu|cuda|emulated", NULL,               \
            "Where the model runs: cpu; cuda in builds that have it."),                            \
        ROW("isa", BT_OPT_ENUM, isa, "auto", 0, 0, BT_K_ISAS, NULL,                                \
            "Instruction set of the CPU kernels; all give the same bits."),                        \
        ROW("numerics", BT_OPT_ENUM, numerics, "auto", 0, 0, "auto|" BT_K_ALL_CLASSES, NULL,       \
            "Numerics class: what matrix products round. cpu-int8: with block-quantised weights, " \
            "activations to 8 bits per 32; cpu-bf16: with BF16 weights, activations to bf16; "     \
            "each faster than cpu-f32, which rounds neither, and in both attention rounds to "     \
            "bf16; auto: by the model's weights, with "                                            \
            "the cuda backend cuda-bf16 for BF16 and quantised ones, else cuda-f32; cuda-cublas: " \
            "cuBLAS for "                                                                          \
            "products of many rows, where answers may depend on batch and chunk; -tf32: with F32 " \
            "weights in TF32; -fp8: with FP8 weights in FP8. Must "                                \
            "be the same on every node."),                                                         \
        ROW("deterministic", BT_OPT_BOOL, deterministic, "false", 0, 0, NULL, NULL,                \
            "One answer whatever else is computed with it: own kernels, as with --numerics auto, " \
            "also where --numerics names a class of cuBLAS."),                                     \
        ROW("threads", BT_OPT_U32, threads, "0", 0, 1024, NULL, "N",                               \
            "Compute threads; 0: every CPU that this process may use."),                           \
        ROW("cpus", BT_OPT_STR, cpus, NULL, 0, 0, NULL, "LIST",                                    \
            "CPUs that this daemon may use, like 0-3,8: for two daemons of one machine that "      \
            "shall "                                                                               \
            "not share any (default: all that the process may use)."),                             \
        ROW("device", BT_OPT_U32, device, "0", 0, 255, NULL, "N", "Index of the device to use."),  \
        ROW("kv-bytes", BT_OPT_SIZE, kv_bytes, "0", 0, 0, NULL, "SIZE",                            \
            "Size of the KV cache; 0: a quarter of the memory that this process may use (cpu "     \
            "only: the cuda backend must be told)."),                                              \
        ROW("page-tokens", BT_OPT_U32, page_tokens, "16", 1, 4096, NULL, "N",                      \
            "Tokens in a KV page; must be the same on every node."),                               \
        ROW("kv-dtype", BT_OPT_ENUM, kv_dtype, "auto", 0, 0, BT_K_KV_TYPES, NULL,                  \
            "Element type of the KV cache; must be the same on every node. auto: bf16 in the "     \
            "classes cpu-int8 and cpu-bf16, where it gives the bits of f32, else f32. fp8: 8 "     \
            "bits (e4m3, no scale), half the memory and transfer of bf16, less exact."),           \
        ROW("chunk-tokens", BT_OPT_U32, chunk_tokens, "512", 1, 65536, NULL, "N",                  \
            "Prompt tokens computed in one step at most."),                                        \
        ROW("max-seqs", BT_OPT_U32, max_jobs, "1024", 1, 65536, NULL, "N",                         \
            "Sequences known at once, waiting ones included; more are refused."),                  \
        ROW("panel-cache", BT_OPT_STR, panel_cache, "auto", 0, 0, NULL, "DIR|auto|off",            \
            "Folder for packed weights, which all daemons of this machine that serve the model "   \
            "share (auto: panels/ in Baton's cache folder; models below 16 MiB never use it)."),   \
        ROW("prefix-cache", BT_OPT_ENUM, prefix_cache, "on", 0, 0, "off|on", NULL,                 \
            "Keep KV pages of finished sequences for later ones that begin alike."),               \
        ROW("max-batch", BT_OPT_U32, max_batch, "64", 1, 4096, NULL, "N",                          \
            "Sequences decoded together in one step."),                                            \
        ROW("transfer", BT_OPT_STR, transfer, NULL, 0, 0, NULL, "HOST[:PORT]",                     \
            "Address on which KV pages arrive when this node decodes; prefill nodes must reach "   \
            "it under this name "                                                                  \
            "(default: 127.0.0.1 when every router is on this machine). A prefill node without "   \
            "one stays one."),                                                                     \
        ROW("name", BT_OPT_STR, name, NULL, 0, 0, NULL, "NAME",                                    \
            "Name of this node in status and metrics (default: HOST-ROLE-N, N the lowest that is " \
            "free on this machine)."),                                                             \
        ROW("heartbeat", BT_OPT_DURATION, heartbeat, "250ms", 1e6, 60e9, NULL, "MS",               \
            "Pause between load reports and between heartbeats to peers, in ms."),                 \
        ROW("lease", BT_OPT_DURATION, lease, "3s", 1e7, 600e9, NULL, "MS",                         \
            "Silence after which a router or peer counts as gone, in ms."),                        \
        ROW("transfer-deadline", BT_OPT_DURATION, transfer_deadline, "30s", 5e8, 3600e9, NULL,     \
            "MS",                                                                                  \
            "A KV transfer is given up when for so long no page came and its prefill node has "    \
            "not "                                                                                 \
            "said that it computes, in ms."),                                                      \
        ROW("drain-timeout", BT_OPT_DURATION, drain_timeout, "30s", 0, 3600e9, NULL, "MS",         \
            "After SIGTERM running requests get so long to end, in ms."),                          \
        ROW("transport", BT_OPT_STR, transport, "auto", 0, 0, NULL, "auto|tcp|shm|LIST",           \
            "Transport of KV pages: auto, tcp, shm, or a UCX_TLS list."),                          \
        ROW("transfer-ports", BT_OPT_STR, transfer_ports, NULL, 0, 0, NULL, "FROM-TO",             \
            "Ports that UCX listens on, besides the one of --transfer; for firewalls between "     \
            "nodes (default: any)."),                                                              \
        ROW("checksum", BT_OPT_BOOL, checksum, "false", 0, 0, NULL, NULL,                          \
            "Hash every KV page that is sent; decode nodes check what carries a hash."),           \
        ROW("buckets-seconds", BT_OPT_STR, buckets_seconds, BUCKETS_SECONDS, 0, 0, NULL, "LIST",   \
            "Histogram buckets of step, queue, prefill and transfer times, in seconds."),          \
        ROW("buckets-tokens", BT_OPT_STR, buckets_tokens, BUCKETS_TOKENS, 0, 0, NULL, "LIST",      \
            "Histogram buckets of tokens computed in one step."),                                  \
        ROW("health", BT_OPT_STR, health, NULL, 0, 0, NULL, "HOST:PORT",                           \
            "Serve /live, /ready, /metrics and grpc.health.v1 here (default: nowhere).")

#define ROLE_ROW(dflt)                                                                             \
    ROW("role", BT_OPT_ENUM, role, dflt, 0, 0, "prefill|decode|both", NULL,                        \
        "Computes prompts, writes answers, or does both; `baton role` changes it while it runs.")

const struct bt_opt bt_node_opts_prefill[] = {COMMON_ROWS, ROLE_ROW("prefill")};
const size_t bt_node_n_opts_prefill = sizeof bt_node_opts_prefill / sizeof bt_node_opts_prefill[0];

const struct bt_opt bt_node_opts_decode[] = {COMMON_ROWS, ROLE_ROW("decode")};
const size_t bt_node_n_opts_decode = sizeof bt_node_opts_decode / sizeof bt_node_opts_decode[0];
