/* baton-prefilld: reads prompts, builds the KV cache, ships it. Wiring and exit code. */

#include <stdio.h>
#include "prefilld/prefilld_io.h"

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
    struct bt_prefilld *p = NULL;

    if (bt_prefilld_create(&p) != BT_OK) {
        fprintf(stderr, "baton-prefilld: out of memory\n");
        return 1;
    }
    struct bt_node_hooks hooks = bt_prefilld_hooks(p);
    int rc = bt_node_main(&prog, argc, argv, &hooks);

    bt_prefilld_destroy(p);
    return rc;
}
