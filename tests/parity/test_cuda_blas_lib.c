/* The cuBLAS that the build found can be opened, and has the calls that the backend makes. Needs no device. */

#include <stdio.h>
#include "kernels/cuda/cuda_blas_api_int.h"
#include "tests/check.h"

int main(void)
{
    struct cuda_blas_api api;
    struct bt_err err = {0};

    CHECK_EQ(cuda_blas_open(&api, &err), BT_OK);
    if (err.status != BT_OK) {
        fprintf(stderr, "%s\n", err.msg);
        return 1;
    }
    printf("cuBLASLt %zu\n", api.version());
    CHECK(api.version() >= 130000);
    CHECK(api.text(CUBLAS_STATUS_SUCCESS) != NULL);
    return bt_test_done();
}
