/* baton-decoded: takes KV caches over and writes the answers. Wiring and exit code. */

#include "daemon/daemon.h"
#include "node/node.h"

int main(int argc, char **argv)
{
    const struct bt_prog prog = {
        .name = "baton-decoded",
        .summary = "Receives KV caches from prefill nodes and runs the token loop.",
        .opts = bt_node_opts_decode,
        .n_opts = bt_node_n_opts_decode,
        .epilogue = "Example:\n  baton-decoded --router 127.0.0.1:7001 --model "
                    "./SmolLM2-135M-Instruct.gguf\n",
    };

    return bt_daemon_main(&prog, argc, argv);
}
