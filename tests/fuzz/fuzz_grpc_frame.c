/* gRPC message framing, whole and in pieces: both ways must give the same messages and the same
 * verdict. Then the small texts and the protobuf walker over the same bytes. */

#include <stdlib.h>
#include <string.h>

#include "net/grpc_int.h"
#include "net/pb_wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static bool collect(void *arg, const uint8_t *data, size_t len)
{
    return bt_grpc_frame(arg, data, len);
}

static enum bt_grpc_deframe run(const uint8_t *data, size_t n, size_t piece, struct bt_buf *out)
{
    struct bt_grpc_deframer d = {.max = 1000};
    enum bt_grpc_deframe st = BT_GRPC_DEFRAME_OK;

    for (size_t at = 0; at < n && st == BT_GRPC_DEFRAME_OK; at += piece) {
        st = bt_grpc_deframe(&d, data + at, n - at < piece ? n - at : piece, collect, out);
    }
    bt_grpc_deframe_fini(&d);
    return st;
}

static void texts(const uint8_t *data, size_t n)
{
    struct bt_pb_in in = {.p = data, .end = data + n};
    struct bt_buf text = {0}, coded = {0}, back = {0};
    struct bt_pb_field f;
    uint64_t ns = 0;

    while (bt_pb_next(&in, &f)) {
        if (f.type == 2 && (f.data < data || f.len > n)) {
            abort();
        }
    }
    bt_buf_add(&text, data, n);
    bt_grpc_message_encode(text.data, &coded);
    bt_grpc_message_decode(coded.data != NULL ? coded.data : "", &back);
    if (strcmp(text.data, back.data != NULL ? back.data : "") != 0) {
        abort();
    }
    bt_buf_clear(&back);
    bt_grpc_message_decode(text.data, &back);
    if (bt_grpc_timeout_parse(text.data, &ns)) {
        char again[16];
        bt_grpc_timeout_text(ns, again);
    }
    bt_buf_fini(&text);
    bt_buf_fini(&coded);
    bt_buf_fini(&back);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct bt_buf whole = {0}, parts = {0};
    enum bt_grpc_deframe a = run(data, n, n > 0 ? n : 1, &whole);
    enum bt_grpc_deframe b = run(data, n, 1 + n % 7, &parts);

    if (a != b || whole.len != parts.len ||
        (whole.len > 0 && memcmp(whole.data, parts.data, whole.len) != 0) ||
        (whole.len > 0 && memcmp(whole.data, data, whole.len) != 0)) {
        abort();
    }
    bt_buf_fini(&whole);
    bt_buf_fini(&parts);
    texts(data, n);
    return 0;
}
