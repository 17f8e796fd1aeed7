/* Any bytes as the body of an HTTP request: refused with a message, or parsed. The first byte picks the kind. */

#include <string.h>
#include "router/openai_request.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct bt_openai_request q;
    struct bt_openai_tokens t;
    struct bt_api_err e = {0};
    const char *body = (const char *)data + 1;

    if (n == 0) {
        return 0;
    }
    switch (data[0] % 4) {
    case 0:
    case 1:
        if (bt_openai_parse(body, n - 1, data[0] % 4 == 1, &q, &e)) {
            (void)bt_params_check(&q.params, 1000, &e);
        }
        bt_openai_request_free(&q);
        break;
    case 2:
        (void)bt_openai_parse_tokenize(body, n - 1, &t, &e);
        bt_openai_tokens_free(&t);
        break;
    default:
        (void)bt_openai_parse_detokenize(body, n - 1, &t, &e);
        bt_openai_tokens_free(&t);
        break;
    }
    return 0;
}
