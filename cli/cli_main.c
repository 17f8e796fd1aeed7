/* baton: one command for people. Picks the subcommand; knows nothing of any of them. */

#include <stdio.h>
#include <string.h>
#include "cli/cli.h"

struct command {
    const char *name, *help;
    int (*run)(int argc, char **argv);
};

static const struct command commands[] = {
    {"up", "start a whole cluster on this machine: router, prefill and decode nodes", bt_cli_up},
    {"fetch", "bring the small model that `up` serves by default; prints its path", bt_cli_fetch},
    {"complete", "continue a text", bt_cli_complete},
    {"chat", "talk to the model", bt_cli_chat},
    {"status", "show the nodes of a cluster: roles, load, pages, transports", bt_cli_status},
    {"drain", "take a node out of service and wait until it has ended", bt_cli_drain},
    {"role", "make a running node serve as prefill, decode or both", bt_cli_role},
    {"bench", "measure a cluster under load (not in this version: use bench/cluster_load.py)",
     NULL},
    {"plan", "find the prefill:decode ratio for a load (not in this version)", NULL},
    {"trace", "draw where the time of one request went, from the router's request log",
     bt_cli_trace},
    {"quantize", "write a model as a GGUF file with smaller weights", bt_cli_quantize},
    {"perplexity", "measure how well a model foretells a text", bt_cli_perplexity},
};

static void print_help(FILE *f)
{
    fprintf(f, "Usage: baton COMMAND [options]\n\n"
               "Disaggregated LLM serving: prompts are read on prefill nodes, answers written on "
               "decode nodes.\n\n"
               "Commands:\n");
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        fprintf(f, "  %-12s%s\n", commands[i].name, commands[i].help);
    }
    fprintf(f, "\n`baton COMMAND --help` lists the options of a command.\n\n"
               "First steps:\n"
               "  baton up                        a cluster with a small model, fetched once\n"
               "  baton chat                      in another terminal\n"
               "  baton complete \"Once upon a time\"\n");
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        print_help(stderr);
        return 2;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 ||
        strcmp(argv[1], "help") == 0) {
        print_help(stdout);
        return 0;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("baton %s\n", BT_VERSION);
        return 0;
    }
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        if (strcmp(argv[1], commands[i].name) != 0) {
            continue;
        }
        if (commands[i].run == NULL) {
            fprintf(stderr, "baton %s: %s\n", argv[1], commands[i].help);
            return 2;
        }
        return commands[i].run(argc - 1, argv + 1);
    }
    fprintf(stderr, "baton: unknown command '%s'; `baton --help` lists them\n", argv[1]);
    return 2;
}
