/* Any bytes as a safetensors file: refused or opened; of an opened one every tensor byte is
 * readable. */

#include "files/safetensors.h"
#include "tests/fuzz/fuzz_file.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct bt_st *s;
    struct bt_err err;
    volatile uint8_t sum = 0;

    if (bt_st_open(bt_fuzz_path(data, n), &s, &err) != BT_OK) {
        return 0;
    }
    for (size_t i = 0; i < bt_st_count(s); i++) {
        const struct bt_tensor *t = bt_st_at(s, i);
        for (size_t k = 0; k < t->bytes; k++) {
            sum = (uint8_t)(sum + ((const uint8_t *)t->data)[k]);
        }
        if (bt_st_find(s, t->name) != t) {
            abort();
        }
    }
    bt_st_close(s);
    return 0;
}
