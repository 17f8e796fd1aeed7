/* baton-prefilld: reads prompts, builds the KV cache, ships it. Wiring and exit code. */

#include "daemon/daemon.h"
#include "node/node.h"

int main(int argc, char **argv)
{
    const struct bt_prog prog = {
        .name = "baton-prefilld",
        .summary = "Computes prompts and hands their KV caches to decode nodes.",
        .opts = bt_node_opts_prefill,
        .n_opts = bt_node_n_opts_prefill,
        .epilogue = "Example:\n  baton-prefilld --router 127.0.0.1:7001 --model "
                    "./SmolLM2-135M-Instruct.gguf\n",
    };

    return bt_daemon_main(&prog, argc, argv);
}
