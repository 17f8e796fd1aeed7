/* Any bytes as config.json of a model directory whose weights are a tiny Llama's: opened or
 * refused, never more. */

#include "model/model.h"
#include "tests/fuzz/fuzz_file.h"
#include "tests/tiny_model.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void clean(void)
{
    tiny_clean();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static bool ready;
    struct bt_model *m;
    struct bt_err err;
    const char *config = bt_fuzz_path(data, n);

    if (!ready) {
        struct tiny_model t;
        tiny_llama(&t);
        (void)tiny_write(&t, tiny_config, 1);
        (void)unlink(bt_temp_path("config.json"));
        if (symlink(config, bt_temp_path("config.json")) != 0 || atexit(clean) != 0) {
            abort();
        }
        ready = true;
    }
    if (bt_model_open(bt_temp_dir(), &m, &err) == BT_OK) {
        bt_model_destroy(m);
    }
    return 0;
}
