/* Added tokens: found in the text before anything else looks at it. A sorted list narrowed byte by
 * byte stands in for a trie; a table by first byte makes the usual miss one load. Knows nothing of
 * normalizers or BPE. */

#include "text/tokenizer_int.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>
#include "base/utf8.h"

static int by_content(const void *pa, const void *pb)
{
    const struct bt_tok_added *a = pa, *b = pb;
    size_t n = a->len < b->len ? a->len : b->len;
    int c = memcmp(a->content, b->content, n);

    if (c != 0) {
        return c;
    }
    if (a->len != b->len) {
        return a->len < b->len ? -1 : 1;
    }
    return a->order < b->order ? -1 : 1;
}

void bt_tok_finder_sort(struct bt_tok_finder *f)
{
    size_t k = 0, kept = 0;

    if (f->n > 0) {
        qsort(f->v, f->n, sizeof(*f->v), by_content);
    }
    for (size_t i = 0; i < f->n; i++) { /* of equal contents only the first can be found */
        if (kept == 0 || f->v[kept - 1].len != f->v[i].len ||
            memcmp(f->v[kept - 1].content, f->v[i].content, f->v[i].len) != 0) {
            f->v[kept++] = f->v[i];
        }
    }
    f->n = kept;
    for (unsigned c = 0; c < 256; c++) {
        f->first[c] = (uint32_t)k;
        while (k < f->n && (uint8_t)f->v[k].content[0] == c) {
            k++;
        }
    }
    f->first[256] = (uint32_t)k;
}

/* The longest token that s begins with. All of v[lo .. hi) agree with s in their first d bytes. */
static const struct bt_tok_added *longest(const struct bt_tok_finder *f, const char *s, size_t len)
{
    const struct bt_tok_added *best = NULL;
    size_t lo = f->first[(uint8_t)s[0]], hi = f->first[(uint8_t)s[0] + 1];

    for (size_t d = 1; lo < hi; d++) {
        if (f->v[lo].len == d) { /* a token that ends here sorts before those that go on */
            best = &f->v[lo++];
        }
        if (d == len || lo == hi) {
            break;
        }
        uint8_t c = (uint8_t)s[d];
        size_t a = lo, b = hi;
        while (a < b) {
            size_t mid = a + (b - a) / 2;
            if ((uint8_t)f->v[mid].content[d] < c) {
                a = mid + 1;
            } else {
                b = mid;
            }
        }
        lo = a;
        b = hi;
        while (a < b) {
            size_t mid = a + (b - a) / 2;
            if ((uint8_t)f->v[mid].content[d] <= c) {
                a = mid + 1;
            } else {
                b = mid;
            }
        }
        hi = a;
    }
    return best;
}

const struct bt_tok_added *bt_tok_finder_next(const struct bt_tok_finder *f, const char *s,
                                              size_t len, size_t from, size_t *start)
{
    for (size_t i = from; i < len && f->n > 0; i++) {
        uint8_t c = (uint8_t)s[i];
        if (f->first[c] != f->first[c + 1]) {
            const struct bt_tok_added *a = longest(f, s + i, len - i);
            if (a != NULL) {
                *start = i;
                return a;
            }
        }
    }
    return NULL;
}

/* ---- what stands around a match ---- */

static bool is_word(uint32_t cp)
{
    switch (utf8proc_category((int32_t)cp)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
        return true;
    default:
        return cp == 0x200C || cp == 0x200D || (cp >= 0x24B6 && cp <= 0x24E9) ||
               (cp >= 0x1F130 && cp <= 0x1F149) || (cp >= 0x1F150 && cp <= 0x1F169) ||
               (cp >= 0x1F170 && cp <= 0x1F189);
    }
}

static bool is_space(uint32_t cp)
{
    return (cp >= 9 && cp <= 13) || cp == ' ' || cp == 0x85 || cp == 0xA0 || cp == 0x1680 ||
           (cp >= 0x2000 && cp <= 0x200A) || cp == 0x2028 || cp == 0x2029 || cp == 0x202F ||
           cp == 0x205F || cp == 0x3000;
}

/* The character that ends at s + end; its start. */
static size_t char_before(const char *s, size_t end, uint32_t *cp)
{
    size_t k = end - 1;

    while (k > 0 && ((uint8_t)s[k] & 0xC0) == 0x80) {
        k--;
    }
    (void)bt_utf8_decode(s + k, end - k, cp); /* the text is valid UTF-8 */
    return k;
}

static bool stands_alone(const char *s, size_t len, size_t start, size_t end)
{
    uint32_t cp;

    if (start > 0) {
        (void)char_before(s, start, &cp);
        if (is_word(cp)) {
            return false;
        }
    }
    if (end < len) {
        (void)bt_utf8_decode(s + end, len - end, &cp); /* as above */
        return !is_word(cp);
    }
    return true;
}

static size_t spaces_before(const char *s, size_t start, size_t floor)
{
    while (start > floor) {
        uint32_t cp;
        size_t k = char_before(s, start, &cp);
        if (!is_space(cp)) {
            break;
        }
        start = k;
    }
    return start < floor ? floor : start;
}

static size_t spaces_behind(const char *s, size_t len, size_t end)
{
    while (end < len) {
        uint32_t cp;
        unsigned n = bt_utf8_decode(s + end, len - end, &cp);
        if (!is_space(cp)) {
            break;
        }
        end += n;
    }
    return end;
}

enum bt_status bt_tok_finder_cut(const struct bt_tok_finder *f, const char *s, size_t len,
                                 bool parse_special, bt_tok_gap_fn *gap, bt_tok_found_fn *found,
                                 void *arg)
{
    size_t done = 0, from = 0, start;
    const struct bt_tok_added *a;
    enum bt_status st = BT_OK;

    while ((a = bt_tok_finder_next(f, s, len, from, &start)) != NULL) {
        size_t end = start + a->len;
        from = end; /* a match that is not wanted is passed over whole, as in the reference */
        if ((a->special && !parse_special) ||
            (a->single_word && !stands_alone(s, len, start, end))) {
            continue;
        }
        if (a->lstrip) {
            start = spaces_before(s, start, done);
        }
        if (a->rstrip) {
            end = spaces_behind(s, len, end);
        }
        if (done < start) {
            st = gap(arg, s + done, done, start - done);
        }
        if (st == BT_OK) {
            st = found(arg, a->id);
        }
        if (st != BT_OK) {
            return st;
        }
        done = end;
    }
    return done < len ? gap(arg, s + done, done, len - done) : BT_OK;
}
