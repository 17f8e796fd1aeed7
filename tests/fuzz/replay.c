/* Runs a fuzz entry without a fuzzer: over every file of the given directories and, for each, over
 * a fixed number of seeded mutations. Passes when nothing crashes (run it under the sanitizers
 * too). usage: PROGRAM MUTATIONS DIR… */

#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

enum { INPUT_BYTES_MAX = 1 << 20 };

static uint64_t rng = 0x9e3779b97f4a7c15;

static uint64_t next_random(void)
{
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return rng;
}

/* One to four edits: a byte changed, a small integer written, a cut, or a piece moved. */
static size_t mutate(uint8_t *p, size_t n)
{
    static const uint64_t odd[] = {0,          1,          0x7f,      0xff,      0xffff,
                                   0x7fffffff, 0xffffffff, INT64_MAX, UINT64_MAX};

    for (uint64_t edits = 1 + next_random() % 4; edits > 0 && n > 0; edits--) {
        size_t at = next_random() % n;
        switch (next_random() % 5) {
        case 0:
            p[at] = (uint8_t)next_random();
            break;
        case 1:
            p[at] ^= (uint8_t)(1U << (next_random() % 8));
            break;
        case 2: {
            size_t width = n - at < 8 ? n - at : 8;
            memcpy(p + at, &odd[next_random() % (sizeof(odd) / sizeof(odd[0]))], width);
            break;
        }
        case 3:
            n = next_random() % 4 == 0 ? at : n;
            break;
        default: {
            size_t from = next_random() % n;
            size_t room = n - (at > from ? at : from);
            memmove(p + at, p + from, room < 16 ? room : 16);
            break;
        }
        }
    }
    return n;
}

/* Inputs live in exact heap blocks, so that reading past the end is seen. */
static void run(const uint8_t *data, size_t n)
{
    uint8_t *copy = malloc(n == 0 ? 1 : n);

    if (copy == NULL) {
        abort();
    }
    memcpy(copy, data, n);
    (void)LLVMFuzzerTestOneInput(copy, n);
    free(copy);
}

static size_t replay_file(const char *path, unsigned long mutations)
{
    static uint8_t original[INPUT_BYTES_MAX], work[INPUT_BYTES_MAX];
    FILE *f = fopen(path, "rb");

    if (f == NULL) {
        perror(path);
        exit(1);
    }
    size_t n = fread(original, 1, sizeof(original), f);
    (void)fclose(f);
    run(original, n);
    for (unsigned long i = 0; i < mutations; i++) {
        memcpy(work, original, n);
        run(work, mutate(work, n));
    }
    return 1 + mutations;
}

int main(int argc, char **argv)
{
    size_t runs = 0;

    if (argc < 3) {
        fprintf(stderr, "usage: %s MUTATIONS DIR...\n", argv[0]);
        return 2;
    }
    for (int i = 2; i < argc; i++) {
        struct dirent **entries;
        int n = scandir(argv[i], &entries, NULL, alphasort);
        if (n < 0) {
            perror(argv[i]);
            return 1;
        }
        for (int k = 0; k < n; k++) {
            char path[4096];
            (void)snprintf(path, sizeof(path), "%s/%s", argv[i], entries[k]->d_name);
            if (entries[k]->d_name[0] != '.') {
                runs += replay_file(path, strtoul(argv[1], NULL, 10));
            }
            free(entries[k]);
        }
        free(entries);
    }
    printf("%zu inputs\n", runs);
    return runs == 0;
}
