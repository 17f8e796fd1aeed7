/* Any bytes as a GGUF file with a tokenizer in it: refused, or a tokenizer that takes a nasty text.
 */

#include "files/gguf.h"
#include "tests/fuzz/fuzz_file.h"
#include "text/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static const char text[] = " The 2nd  caf\xc3\xa9 <s>x</s>\n\n\xe2\x96\x81<0x0A> don't abab";
    struct bt_gguf *g = NULL;
    struct bt_tokenizer *t = NULL;
    struct bt_ids ids = {0};
    struct bt_buf out = {0};
    struct bt_err err;

    if (bt_gguf_open(bt_fuzz_path(data, n), &g, &err) != BT_OK) {
        return 0;
    }
    enum bt_status st = bt_tokenizer_open_gguf(g, &t, &err);
    bt_gguf_close(g);
    if (st != BT_OK) {
        return 0;
    }
    for (unsigned flags = 0; flags < 4; flags++) {
        (void)!bt_tokenizer_encode(t, text, sizeof(text) - 1, flags, &ids, &err);
    }
    (void)!bt_tokenizer_decode(t, ids.v, ids.len, 0, &out, &err);
    bt_ids_fini(&ids);
    bt_buf_fini(&out);
    bt_tokenizer_destroy(t);
    return 0;
}
