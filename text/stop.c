/* Stop strings by Knuth-Morris-Pratt, one automaton a string. Held-back text is always a prefix of
 * one of the strings, so it is not stored. Knows nothing of tokens. */

#include "text/stop.h"

#include <string.h>
#include "base/assert.h"
#include "base/mem.h"

struct stop_string {
    char *s;
    uint32_t *fail; /* [len + 1]: longest proper prefix that is a suffix of the first i bytes */
    uint32_t len;
};

struct bt_stop_set {
    uint32_t n;
    struct stop_string v[BT_STOP_STRINGS_MAX];
};

static uint32_t advance(const struct stop_string *p, uint32_t k, char c)
{
    while (k > 0 && (k == p->len || p->s[k] != c)) {
        k = p->fail[k];
    }
    return k + (p->s[k] == c ? 1 : 0);
}

static enum bt_status string_init(struct stop_string *p, const char *s, size_t len)
{
    p->s = bt_alloc(len);
    p->fail = bt_calloc(len + 1, sizeof(*p->fail));
    if (p->s == NULL || p->fail == NULL) {
        return BT_ERR_NOMEM;
    }
    memcpy(p->s, s, len);
    p->len = (uint32_t)len;
    for (uint32_t i = 1; i < p->len; i++) {
        p->fail[i + 1] = advance(p, p->fail[i], s[i]);
    }
    return BT_OK;
}

enum bt_status bt_stop_set_create(const char *const *strings, const size_t *lens, size_t n,
                                  struct bt_stop_set **out, struct bt_err *err)
{
    if (n > BT_STOP_STRINGS_MAX) {
        return bt_err_set(err, BT_ERR_INVALID, "stop: %zu strings, the limit is %d", n,
                          BT_STOP_STRINGS_MAX);
    }
    for (size_t i = 0; i < n; i++) {
        if (lens[i] == 0 || lens[i] > BT_STOP_BYTES_MAX) {
            return bt_err_set(err, BT_ERR_INVALID, "stop[%zu]: %zu bytes; 1 to %d are allowed", i,
                              lens[i], BT_STOP_BYTES_MAX);
        }
    }
    struct bt_stop_set *s = bt_calloc(1, sizeof(*s));
    if (s == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "stop: out of memory");
    }
    for (size_t i = 0; i < n; i++) {
        s->n++;
        if (string_init(&s->v[i], strings[i], lens[i]) != BT_OK) {
            bt_stop_set_destroy(s);
            return bt_err_set(err, BT_ERR_NOMEM, "stop: out of memory");
        }
    }
    *out = s;
    return BT_OK;
}

void bt_stop_set_destroy(struct bt_stop_set *s)
{
    if (s != NULL) {
        for (uint32_t i = 0; i < s->n; i++) {
            bt_free(s->v[i].s);
            bt_free(s->v[i].fail);
        }
        bt_free(s);
    }
}

void bt_stop_init(struct bt_stop *m, const struct bt_stop_set *s)
{
    *m = (struct bt_stop){.set = s, .hit = -1};
}

/* One byte; true when a string completed (m->hit). */
static bool step(struct bt_stop *m, char c)
{
    const struct bt_stop_set *s = m->set;

    m->n_held = 0;
    for (uint32_t i = 0; i < s->n; i++) {
        m->matched[i] = advance(&s->v[i], m->matched[i], c);
        if (m->matched[i] > m->n_held) {
            m->n_held = m->matched[i];
            m->held_of = i;
        }
        if (m->matched[i] == s->v[i].len && (m->hit < 0 || s->v[i].len > s->v[m->hit].len)) {
            m->hit = (int32_t)i;
        }
    }
    return m->hit >= 0;
}

/* Appends the first n bytes of: the first n_before bytes of string `before`, then text. */
static bool release(const struct bt_stop *m, uint32_t before, uint32_t n_before, const char *text,
                    size_t n, struct bt_buf *out)
{
    size_t from_held = n < n_before ? n : n_before;

    if (from_held > 0 && !bt_buf_add(out, m->set->v[before].s, from_held)) {
        return false;
    }
    return n == from_held || bt_buf_add(out, text, n - from_held);
}

enum bt_status bt_stop_feed(struct bt_stop *m, const char *text, size_t len, struct bt_buf *out)
{
    uint32_t before = m->held_of, n_before = m->n_held, n_keep;
    size_t i = 0;

    if (m->hit >= 0) {
        return BT_OK;
    }
    while (i < len) {
        if (step(m, text[i++])) {
            break;
        }
    }
    n_keep = m->hit >= 0 ? m->set->v[m->hit].len : m->n_held;
    BT_ASSERT(n_keep <= n_before + i);
    return release(m, before, n_before, text, n_before + i - n_keep, out) ? BT_OK : BT_ERR_NOMEM;
}

enum bt_status bt_stop_finish(struct bt_stop *m, struct bt_buf *out)
{
    bool ok = m->hit >= 0 || m->n_held == 0 || bt_buf_add(out, m->set->v[m->held_of].s, m->n_held);

    m->n_held = 0;
    return ok ? BT_OK : BT_ERR_NOMEM;
}
