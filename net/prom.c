/* Prometheus text: histograms as plain values, and the lines of the exposition format. It knows no
 * metric by name. */

#include "net/prom.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"

enum bt_status bt_prom_hist_init(struct bt_prom_hist *h, const double *bounds, size_t n)
{
    if (n > BT_PROM_BUCKETS_MAX) {
        return BT_ERR_INVALID;
    }
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(bounds[i]) || (i > 0 && bounds[i] <= bounds[i - 1])) {
            return BT_ERR_INVALID;
        }
    }
    memset(h, 0, sizeof *h);
    if (n > 0) {
        memcpy(h->bounds, bounds, n * sizeof *bounds);
    }
    h->n_bounds = (uint32_t)n;
    return BT_OK;
}

enum bt_status bt_prom_hist_init_text(struct bt_prom_hist *h, const char *text, struct bt_err *err)
{
    double bounds[BT_PROM_BUCKETS_MAX];
    size_t n = 0;

    for (const char *p = text; *p != '\0';) {
        char *end = NULL;
        if (n == BT_PROM_BUCKETS_MAX) {
            return bt_err_set(err, BT_ERR_INVALID, "buckets \"%s\": more than %d", text,
                              BT_PROM_BUCKETS_MAX);
        }
        bounds[n] = strtod(p, &end);
        if (end == p || (*end != ',' && *end != '\0')) {
            return bt_err_set(err, BT_ERR_INVALID, "buckets \"%s\": no number at byte %zu", text,
                              (size_t)(p - text));
        }
        n++;
        p = *end == ',' ? end + 1 : end;
    }
    if (bt_prom_hist_init(h, bounds, n) != BT_OK) {
        return bt_err_set(err, BT_ERR_INVALID, "buckets \"%s\": must be finite and rise", text);
    }
    return BT_OK;
}

void bt_prom_hist_observe(struct bt_prom_hist *h, double v)
{
    if (isnan(v)) {
        return;
    }
    uint32_t lo = 0, hi = h->n_bounds;
    while (lo < hi) {
        uint32_t mid = (lo + hi) / 2;
        if (v <= h->bounds[mid]) {
            hi = mid;
        } else {
            lo = mid + 1;
        }
    }
    h->counts[lo]++;
    h->sum += v;
    h->count++;
}

void bt_prom_hist_add(struct bt_prom_hist *to, const struct bt_prom_hist *from)
{
    BT_ASSERT(to->n_bounds == from->n_bounds);
    BT_ASSERT(memcmp(to->bounds, from->bounds, to->n_bounds * sizeof to->bounds[0]) == 0);
    for (uint32_t i = 0; i <= to->n_bounds; i++) {
        to->counts[i] += from->counts[i];
    }
    to->sum += from->sum;
    to->count += from->count;
}

double bt_prom_hist_quantile(const struct bt_prom_hist *h, double q)
{
    double rank = q * (double)h->count;
    double seen = 0;

    for (uint32_t i = 0; i < h->n_bounds; i++) {
        double here = (double)h->counts[i];
        if (here > 0 && seen + here >= rank) {
            double low = i > 0 ? h->bounds[i - 1] : (h->bounds[0] > 0 ? 0 : h->bounds[0]);
            return low + (h->bounds[i] - low) * (rank - seen) / here;
        }
        seen += here;
    }
    return h->count > 0 && h->n_bounds > 0 ? h->bounds[h->n_bounds - 1] : 0;
}

/* Shortest text that reads back as the same double. */
static void add_number(struct bt_buf *b, double v)
{
    if (isnan(v)) {
        bt_buf_adds(b, "NaN");
        return;
    }
    if (isinf(v)) {
        bt_buf_adds(b, v > 0 ? "+Inf" : "-Inf");
        return;
    }
    char text[40];
    for (int digits = 6; digits <= 17; digits++) {
        (void)snprintf(text, sizeof text, "%.*g", digits, v);
        if (digits == 17 || !(strtod(text, NULL) < v || strtod(text, NULL) > v)) {
            break;
        }
    }
    bt_buf_adds(b, text);
}

static void add_escaped(struct bt_buf *b, const char *s, bool quotes)
{
    for (; *s != '\0'; s++) {
        if (*s == '\\') {
            bt_buf_adds(b, "\\\\");
        } else if (*s == '\n') {
            bt_buf_adds(b, "\\n");
        } else if (*s == '"' && quotes) {
            bt_buf_adds(b, "\\\"");
        } else {
            bt_buf_addc(b, *s);
        }
    }
}

/* name{labels,le="…"} with a space behind. */
static void add_series(struct bt_buf *b, const char *name, const char *suffix,
                       const struct bt_prom_label *labels, size_t n, const double *le)
{
    bt_buf_adds(b, name);
    bt_buf_adds(b, suffix);
    if (n > 0 || le != NULL) {
        bt_buf_addc(b, '{');
        for (size_t i = 0; i < n; i++) {
            bt_buf_adds(b, i > 0 ? "," : "");
            bt_buf_adds(b, labels[i].name);
            bt_buf_adds(b, "=\"");
            add_escaped(b, labels[i].value, true);
            bt_buf_addc(b, '"');
        }
        if (le != NULL) {
            bt_buf_adds(b, n > 0 ? ",le=\"" : "le=\"");
            add_number(b, *le);
            bt_buf_addc(b, '"');
        }
        bt_buf_addc(b, '}');
    }
    bt_buf_addc(b, ' ');
}

void bt_prom_head(struct bt_buf *b, const char *name, enum bt_prom_type type, const char *help)
{
    static const char *const types[] = {"counter", "gauge", "histogram"};

    bt_buf_addf(b, "# HELP %s ", name);
    add_escaped(b, help, false);
    bt_buf_addf(b, "\n# TYPE %s %s\n", name, types[type]);
}

void bt_prom_f64(struct bt_buf *b, const char *name, const struct bt_prom_label *labels,
                 size_t n_labels, double value)
{
    add_series(b, name, "", labels, n_labels, NULL);
    add_number(b, value);
    bt_buf_addc(b, '\n');
}

void bt_prom_u64(struct bt_buf *b, const char *name, const struct bt_prom_label *labels,
                 size_t n_labels, uint64_t value)
{
    add_series(b, name, "", labels, n_labels, NULL);
    bt_buf_addf(b, "%" PRIu64 "\n", value);
}

void bt_prom_hist_render(struct bt_buf *b, const char *name, const struct bt_prom_label *labels,
                         size_t n_labels, const struct bt_prom_hist *h)
{
    uint64_t total = 0;

    for (uint32_t i = 0; i <= h->n_bounds; i++) {
        double le = i < h->n_bounds ? h->bounds[i] : (double)INFINITY;
        total += h->counts[i];
        add_series(b, name, "_bucket", labels, n_labels, &le);
        bt_buf_addf(b, "%" PRIu64 "\n", total);
    }
    add_series(b, name, "_sum", labels, n_labels, NULL);
    add_number(b, h->sum);
    bt_buf_addc(b, '\n');
    add_series(b, name, "_count", labels, n_labels, NULL);
    bt_buf_addf(b, "%" PRIu64 "\n", h->count);
}
