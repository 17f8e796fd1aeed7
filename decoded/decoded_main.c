/* baton-decoded: takes KV caches over and writes the answers. Wiring and exit code. */

#include <stdio.h>
#include "decoded/decoded_io.h"

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
    struct bt_decoded *d = NULL;

    if (bt_decoded_create(&d) != BT_OK) {
        fprintf(stderr, "baton-decoded: out of memory\n");
        return 1;
    }
    struct bt_node_hooks hooks = bt_decoded_hooks(d);
    int rc = bt_node_main(&prog, argc, argv, &hooks);

    bt_decoded_destroy(d);
    return rc;
}
