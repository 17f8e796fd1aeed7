/* Bytes from a client that may speak HTTP/1.1 (or, by luck, HTTP/2). */

#include "fuzz_conn.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    fuzz_run(NULL, data, n);
    return 0;
}
