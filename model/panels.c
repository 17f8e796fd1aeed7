/* Where the packed weights go: into a cache file that every daemon of this machine maps (files/panel_file.h), or into the
 * backend's own memory if there is no folder for it, the model is small, or the file cannot be had. Owns the file's key
 * and the order of weights in it; the backend alone knows what a packed weight looks like. */

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include "base/buf.h"
#include "base/hash.h"
#include "model/model_int.h"

static const size_t ALIGN = 4096; /* a weight begins on a page of its own */

struct bt_k_weight_desc bt_slot_desc(const struct bt_slot *s)
{
    const struct bt_quant *q = s->quant;
    struct bt_k_weight_desc d = {.dtype = s->tensor->dtype,
                                 .n_rows = s->n_rows,
                                 .n_cols = s->n_cols,
                                 .data = s->data,
                                 .for_gemm = s->for_gemm,
                                 .for_embed = s->for_embed,
                                 .expert = s->expert};

    if (q != NULL) {
        d.dtype = bt_quant_dtype(q);
        d.data = NULL;
        d.group = q->group;
        d.perm = q->perm;
    }
    return d;
}

size_t bt_panels_bytes(struct bt_model *m, const struct bt_slot *s)
{
    struct bt_k_weight_desc d = bt_slot_desc(s);

    return s->weight != NULL ? (bt_k_panel_bytes(m->k, &d) + ALIGN - 1) / ALIGN * ALIGN : 0;
}

/* The files as they are now: a file that was replaced or written is another one, even where the fingerprint's samples agree. */
static void add_files(struct bt_buf *key, const struct bt_model *m)
{
    const char *last = "";
    uint64_t h = 0;
    struct stat sb;

    for (size_t i = 0; i < m->n_slots; i++) {
        const char *file = m->slots[i].tensor->file;
        if (strcmp(file, last) == 0 || stat(file, &sb) != 0) {
            continue;
        }
        const uint64_t id[] = {(uint64_t)sb.st_dev, (uint64_t)sb.st_ino, (uint64_t)sb.st_size,
                               (uint64_t)sb.st_mtim.tv_sec, (uint64_t)sb.st_mtim.tv_nsec};
        h = bt_hash64(id, sizeof(id), h);
        last = file;
    }
    bt_buf_addf(key, "files %016" PRIx64 "\n", h);
}

static void use_own(struct bt_model *m, size_t bytes, bool failed, const char *why)
{
    m->own_panels =
        bytes > 0 ? bt_k_alloc(m->k, bytes) : NULL; /* NULL: the backend tries by itself */
    m->own_panel_bytes = bytes;
    m->packed.shared = m->packed.reused = false;
    m->packed.failed = failed;
    (void)snprintf(m->packed.note, sizeof(m->packed.note), "%s", why);
}

void bt_panels_open(struct bt_model *m, const struct bt_model_load_opts *o)
{
    struct bt_buf key = {0};
    struct bt_err err = {0};
    size_t bytes = 0;

    for (size_t i = 0; i < m->n_slots; i++) {
        bytes += bt_panels_bytes(m, &m->slots[i]);
    }
    if (o->panel_dir == NULL || bytes == 0 || bytes < o->panel_bytes_min) {
        use_own(m, bytes, false, o->panel_dir == NULL ? "no cache folder" : "small");
        return;
    }
    bt_buf_addf(&key, "layout %s\nfingerprint %016" PRIx64 "\n", bt_k_panel_layout(m->k),
                m->info.fingerprint);
    add_files(&key, m);
    const struct bt_panel_want want = {.dir = o->panel_dir,
                                       .key = key.data,
                                       .about = m->path,
                                       .bytes = bytes,
                                       .waiting = o->progress,
                                       .arg = o->arg};
    if (key.failed || bt_panel_file_open(&want, &m->panels, &err) != BT_OK) {
        use_own(m, bytes, true, key.failed ? "out of memory" : err.msg);
    } else {
        m->packed.shared = true;
        m->packed.reused = bt_panel_file_ready(m->panels);
        (void)snprintf(m->packed.note, sizeof(m->packed.note), "%s", bt_panel_file_path(m->panels));
    }
    bt_buf_fini(&key);
}

void bt_panels_close(struct bt_model *m, bool wrong)
{
    if (m->panels != NULL && wrong) {
        bt_panel_file_discard(m->panels);
    } else {
        bt_panel_file_close(m->panels);
    }
    m->panels = NULL;
    if (m->own_panels != NULL) {
        bt_k_free(m->k, m->own_panels, m->own_panel_bytes);
        m->own_panels = NULL;
    }
}
