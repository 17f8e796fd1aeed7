/* grpc.reflection v1 and v1alpha (the same messages): answers from serialised descriptors that were
 * handed over, without understanding more of them than names. */

#include "net/grpc.h"
#include "net/grpc_int.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "net/pb_wire.h"

#define NEST_MAX   32
#define QUEUED_MAX ((size_t)4 << 20)

extern const unsigned char bt_net_descriptors[];
extern const size_t bt_net_descriptors_bytes;

struct slice {
    const uint8_t *p;
    size_t n;
};

struct reflect_file { /* one FileDescriptorProto, in the set that was handed over */
    struct slice bytes, name, package;
    bool wanted; /* while an answer is built */
};

static struct bt_pb_in in_of(struct slice s)
{
    return (struct bt_pb_in){.p = s.p, .end = s.p + s.n};
}

static bool same(struct slice a, const char *p, size_t n)
{
    return a.n == n && (n == 0 || memcmp(a.p, p, n) == 0);
}

static bool read_file(struct slice bytes, struct reflect_file *out)
{
    struct bt_pb_in in = in_of(bytes);
    struct bt_pb_field f;

    memset(out, 0, sizeof *out);
    out->bytes = bytes;
    while (bt_pb_next(&in, &f)) {
        if (bt_pb_is(&f, 1, 2)) {
            out->name = (struct slice){f.data, f.len};
        } else if (bt_pb_is(&f, 2, 2)) {
            out->package = (struct slice){f.data, f.len};
        }
    }
    return !in.bad && out->name.n > 0;
}

static struct reflect_file *file_by_name(struct bt_grpc_server *g, const char *name, size_t n)
{
    for (size_t i = 0; i < g->n_files; i++) {
        if (same(g->files[i].name, name, n)) {
            return &g->files[i];
        }
    }
    return NULL;
}

enum bt_status bt_grpc_reflection_add(struct bt_grpc_server *g, const uint8_t *descriptor_set,
                                      size_t len)
{
    struct bt_pb_in in = {.p = descriptor_set, .end = descriptor_set + len};
    struct bt_pb_field f;
    struct reflect_file file;

    while (bt_pb_next(&in, &f)) {
        if (!bt_pb_is(&f, 1, 2)) {
            continue;
        }
        if (!read_file((struct slice){f.data, f.len}, &file)) {
            return BT_ERR_INVALID;
        }
        if (file_by_name(g, (const char *)file.name.p, file.name.n) != NULL) {
            continue; /* two sets import the same file */
        }
        struct reflect_file *files = bt_realloc(g->files, (g->n_files + 1) * sizeof *files);
        if (files == NULL) {
            return BT_ERR_NOMEM;
        }
        g->files = files;
        g->files[g->n_files++] = file;
    }
    return in.bad ? BT_ERR_INVALID : BT_OK;
}

/* ---- looking up a symbol ---- */

/* The name (field 1) of a nested descriptor. */
static struct slice name_of(struct slice d)
{
    struct bt_pb_in in = in_of(d);
    struct bt_pb_field f;

    while (bt_pb_next(&in, &f)) {
        if (bt_pb_is(&f, 1, 2)) {
            return (struct slice){f.data, f.len};
        }
    }
    return (struct slice){NULL, 0};
}

/* Does descriptor d define `symbol` (dotted, relative to d's parent)? Which fields of d hold
 * children that have names below d: messages 2,3,4,6,8; enums 2; services 2. Fields with plain
 * numbers in them are no trouble: a child must itself have a name in field 1. */
static bool defines(struct slice d, const char *symbol, size_t n, unsigned depth)
{
    struct slice name = name_of(d);

    if (name.n == 0 || n < name.n || memcmp(symbol, name.p, name.n) != 0) {
        return false;
    }
    if (n == name.n) {
        return true;
    }
    if (symbol[name.n] != '.' || depth == NEST_MAX) {
        return false;
    }
    struct bt_pb_in in = in_of(d);
    struct bt_pb_field f;
    while (bt_pb_next(&in, &f)) {
        bool child = f.type == 2 && (f.number == 2 || f.number == 3 || f.number == 4 ||
                                     f.number == 6 || f.number == 8);
        if (child && defines((struct slice){f.data, f.len}, symbol + name.n + 1, n - name.n - 1,
                             depth + 1)) {
            return true;
        }
    }
    return false;
}

static bool file_defines(const struct reflect_file *file, const char *symbol, size_t n)
{
    size_t skip = file->package.n > 0 ? file->package.n + 1 : 0;

    if (n <= skip ||
        (skip > 0 && (memcmp(symbol, file->package.p, skip - 1) != 0 || symbol[skip - 1] != '.'))) {
        return false;
    }
    struct bt_pb_in in = in_of(file->bytes);
    struct bt_pb_field f;
    while (bt_pb_next(&in, &f)) {
        /* message_type 4, enum_type 5, service 6, extension 7 */
        if (f.type == 2 && f.number >= 4 && f.number <= 7 &&
            defines((struct slice){f.data, f.len}, symbol + skip, n - skip, 0)) {
            return true;
        }
    }
    return false;
}

static struct reflect_file *file_by_symbol(struct bt_grpc_server *g, const char *symbol, size_t n)
{
    for (size_t i = 0; i < g->n_files; i++) {
        if (file_defines(&g->files[i], symbol, n)) {
            return &g->files[i];
        }
    }
    return NULL;
}

/* ---- answers ---- */

static void put_error(struct bt_buf *out, enum bt_grpc_status st, const char *message)
{
    struct bt_buf e = {0};

    bt_pb_put_varint(&e, 1, (uint64_t)st);
    bt_pb_put_str(&e, 2, message);
    bt_pb_put_bytes(out, 7, e.data, e.len);
    bt_buf_fini(&e);
}

/* Marks what a marked file imports, until nothing new is marked. */
static void want_imports(struct bt_grpc_server *g)
{
    bool more = true;

    while (more) {
        more = false;
        for (size_t i = 0; i < g->n_files; i++) {
            struct bt_pb_in in = in_of(g->files[i].bytes);
            struct bt_pb_field f;
            while (g->files[i].wanted && bt_pb_next(&in, &f)) {
                struct reflect_file *dep =
                    bt_pb_is(&f, 3, 2) ? file_by_name(g, (const char *)f.data, f.len) : NULL;
                if (dep != NULL && !dep->wanted) {
                    dep->wanted = true;
                    more = true;
                }
            }
        }
    }
}

static void put_file(struct bt_grpc_server *g, struct bt_buf *out, struct reflect_file *file)
{
    struct bt_buf r = {0};

    if (file == NULL) {
        put_error(out, BT_GRPC_NOT_FOUND, "not found");
        return;
    }
    for (size_t i = 0; i < g->n_files; i++) {
        g->files[i].wanted = &g->files[i] == file;
    }
    want_imports(g);
    bt_pb_put_bytes(&r, 1, file->bytes.p, file->bytes.n);
    for (size_t i = 0; i < g->n_files; i++) {
        if (g->files[i].wanted && &g->files[i] != file) {
            bt_pb_put_bytes(&r, 1, g->files[i].bytes.p, g->files[i].bytes.n);
        }
    }
    bt_pb_put_bytes(out, 4, r.data, r.len);
    out->failed = out->failed || r.failed;
    bt_buf_fini(&r);
}

/* Services of the registered methods, each once: "/package.Service/Method". */
static void put_services(struct bt_grpc_server *g, struct bt_buf *out)
{
    struct bt_buf list = {0}, one = {0};
    const char *last = "";
    size_t last_n = 0;

    for (size_t t = 0; t < g->n_tables; t++) {
        for (size_t i = 0; i < g->tables[t].n; i++) {
            const char *name = g->tables[t].methods[i].path + 1;
            size_t n = strcspn(name, "/");
            if (n == last_n && memcmp(name, last, n) == 0) {
                continue; /* tables list a service's methods together */
            }
            last = name;
            last_n = n;
            bt_buf_clear(&one);
            bt_pb_put_bytes(&one, 1, name, n);
            bt_pb_put_bytes(&list, 1, one.data, one.len);
        }
    }
    bt_pb_put_bytes(out, 6, list.data, list.len);
    out->failed = out->failed || list.failed || one.failed;
    bt_buf_fini(&one);
    bt_buf_fini(&list);
}

static void put_answer(struct bt_grpc_server *g, struct bt_buf *out, const struct bt_pb_field *f)
{
    const char *text = (const char *)f->data;

    switch (f->number) {
    case 3:
        put_file(g, out, file_by_name(g, text, f->len));
        break;
    case 4:
        put_file(g, out, file_by_symbol(g, text, f->len));
        break;
    case 7:
        put_services(g, out);
        break;
    default: /* 5 and 6: extensions, of which proto3 files have none */
        put_error(out, BT_GRPC_NOT_FOUND, "no extensions here");
        break;
    }
}

static void on_message(struct bt_grpc_call *c, void *user, const uint8_t *data, size_t len)
{
    struct bt_grpc_server *g = user;
    struct bt_pb_in in = {.p = data, .end = data + len};
    struct bt_pb_field f, asked = {.number = 0};
    struct bt_buf out = {0};

    while (bt_pb_next(&in, &f)) {
        if (f.type == 2 && f.number >= 3 && f.number <= 7) {
            asked = f;
        } else if (bt_pb_is(&f, 1, 2)) {
            bt_pb_put_bytes(&out, 1, f.data, f.len);
        }
    }
    if (in.bad || asked.number == 0) {
        bt_buf_fini(&out);
        bt_grpc_fail(c, BT_GRPC_INVALID_ARGUMENT, "malformed ServerReflectionRequest");
        return;
    }
    bt_pb_put_bytes(&out, 2, data, len);
    put_answer(g, &out, &asked);
    if (out.failed) {
        bt_grpc_fail(c, BT_GRPC_RESOURCE_EXHAUSTED, "out of memory");
    } else if (bt_grpc_send(c, out.data, out.len) > QUEUED_MAX) {
        bt_grpc_fail(c, BT_GRPC_RESOURCE_EXHAUSTED, "answers are not read");
    }
    bt_buf_fini(&out);
}

static void on_half_close(struct bt_grpc_call *c, void *user)
{
    (void)user;
    bt_grpc_finish(c, BT_GRPC_OK, NULL, NULL, 0);
}

static void on_info(struct bt_grpc_call *c, void *arg)
{
    static const struct bt_grpc_events events = {.on_message = on_message,
                                                 .on_half_close = on_half_close};

    bt_grpc_bind(c, &events, arg);
}

static const struct bt_grpc_method methods[] = {
    {"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", BT_GRPC_BIDI, on_info},
    {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", BT_GRPC_BIDI, on_info},
};

enum bt_status bt_grpc_reflection_init(struct bt_grpc_server *g)
{
    enum bt_status st = bt_grpc_server_add(g, methods, sizeof methods / sizeof methods[0], g);

    return st == BT_OK ? bt_grpc_reflection_add(g, bt_net_descriptors, bt_net_descriptors_bytes)
                       : st;
}

void bt_grpc_reflection_fini(struct bt_grpc_server *g)
{
    bt_free(g->files);
}
