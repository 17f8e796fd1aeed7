/* Where the cache folder is. Reads two environment variables. */

#include "base/cache_dir.h"

#include <stdlib.h>

enum bt_status bt_cache_dir(struct bt_buf *out, const char *sub, struct bt_err *err)
{
    const char *xdg = getenv("XDG_CACHE_HOME"); /* NOLINT(concurrency-mt-unsafe): nobody sets it */
    const char *home = getenv("HOME");          /* NOLINT(concurrency-mt-unsafe) */
    bool ok;

    if (xdg != NULL && xdg[0] == '/') {
        ok = bt_buf_addf(out, "%s/baton", xdg);
    } else if (home != NULL && home[0] == '/') {
        ok = bt_buf_addf(out, "%s/.cache/baton", home);
    } else {
        return bt_err_set(err, BT_ERR_IO,
                          "no cache folder: neither XDG_CACHE_HOME nor HOME is set");
    }
    if (ok && sub != NULL) {
        ok = bt_buf_addf(out, "/%s", sub);
    }
    return ok ? BT_OK : bt_err_set(err, BT_ERR_NOMEM, "out of memory");
}
