/* Chat templates: the input is template text, then optionally a NUL byte and the variables as JSON.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "text/template.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static const char vars[] =
        "{\"messages\":[{\"role\":\"user\",\"content\":\"Gr\\u00fc\\u00dfe\"},{\"role\":"
        "\"assistant\",\"content\":\" x\\n\"}],"
        "\"tools\":null,\"add_generation_prompt\":true,\"bos_token\":\"<s>\",\"eos_token\":\"</"
        "s>\",\"n\":7,\"f\":-2.5}";
    const uint8_t *nul = n > 0 ? memchr(data, 0, n) : NULL;
    const char *json = nul != NULL ? (const char *)nul + 1 : vars;
    size_t json_len = nul != NULL ? n - (size_t)(nul - data) - 1 : sizeof vars - 1;
    struct bt_template *t = NULL;
    struct bt_buf out = {0};
    struct bt_err err = {0};

    if (bt_template_compile((const char *)data, nul != NULL ? (size_t)(nul - data) : n, &t, &err) ==
        BT_OK) {
        if (bt_template_render_json(t, json, json_len, 1738328645, &out, &err) != BT_OK &&
            (err.msg[0] == '\0' || out.len != 0)) {
            abort();
        }
    } else if (t != NULL || err.msg[0] == '\0') {
        abort();
    }
    bt_template_destroy(t);
    bt_buf_fini(&out);
    return 0;
}
