/* Any bytes as a tokenizer.json: refused, or a tokenizer that takes a nasty text and every id. */

#include <stdint.h>
#include "text/detok.h"
#include "text/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static const char text[] = " The 2nd  caf\xc3\xa9 e\xcc\x81\xcc\xa3 "
                               "<s>x</s>\n\n\xe2\x96\x81<0x0A> don't _w\xf0\x9f\x98\x80\0 abab";
    struct bt_tokenizer *t = NULL;
    struct bt_ids ids = {0};
    struct bt_buf out = {0};
    struct bt_err err;

    if (bt_tokenizer_from_json("fuzz", (const char *)data, n, &t, &err) != BT_OK) {
        return 0;
    }
    for (unsigned flags = 0; flags < 4; flags++) {
        (void)!bt_tokenizer_encode(t, text, sizeof(text) - 1, flags, &ids, &err);
    }
    (void)!bt_tokenizer_decode(t, ids.v, ids.len, BT_DETOK_SKIP_SPECIAL, &out, &err);
    bt_ids_clear(&ids);
    for (uint32_t id = 0; id <= bt_tokenizer_vocab_size(t) && id < 4096; id++) {
        (void)!bt_ids_add(&ids, id);
    }
    (void)!bt_tokenizer_decode(t, ids.v, ids.len, 0, &out, &err);
    bt_ids_fini(&ids);
    bt_buf_fini(&out);
    bt_tokenizer_destroy(t);
    return 0;
}
