/* Frames from an HTTP/2 client, behind a good preface; gRPC requests among them. */

#include "fuzz_conn.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    fuzz_run("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", data, n);
    return 0;
}
