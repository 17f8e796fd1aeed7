#ifndef BT_NET_PROM_H
#define BT_NET_PROM_H

/* Prometheus text format 0.0.4. Counters and gauges are plain numbers of whoever owns them;
 * histograms are the plain struct below; rendering appends to a buffer. No registry, no lock: each
 * belongs to one thread, and is copied out by message. */

#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"
#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define BT_PROM_CONTENT_TYPE "text/plain; version=0.0.4; charset=utf-8"
#define BT_PROM_BUCKETS_MAX  48

enum bt_prom_type { BT_PROM_COUNTER, BT_PROM_GAUGE, BT_PROM_HISTOGRAM };

struct bt_prom_label {
    const char *name;
    const char *value; /* any UTF-8; escaped when rendered */
};

/* A value: may be copied, sent in a message, added up. Zero-initialised has no bucket but +Inf. */
struct bt_prom_hist {
    uint32_t n_bounds;
    double bounds[BT_PROM_BUCKETS_MAX];       /* upper bounds, strictly rising, without +Inf */
    uint64_t counts[BT_PROM_BUCKETS_MAX + 1]; /* per bucket, not cumulative; the last is +Inf */
    double sum;
    uint64_t count;
};

/* bounds: strictly rising, at most BT_PROM_BUCKETS_MAX. BT_ERR_INVALID otherwise. */
enum bt_status bt_prom_hist_init(struct bt_prom_hist *h, const double *bounds,
                                 size_t n) BT_NODISCARD;
/* From text: "0.001,0.01,0.1" (the value of an option). */
enum bt_status bt_prom_hist_init_text(struct bt_prom_hist *h, const char *text,
                                      struct bt_err *err) BT_NODISCARD;
void bt_prom_hist_observe(struct bt_prom_hist *h, double v); /* NaN is ignored */
/* to += from; both must have the same bounds (asserted). */
void bt_prom_hist_add(struct bt_prom_hist *to, const struct bt_prom_hist *from);
/* Estimate of quantile q in 0..1 by linear interpolation in the bucket, as histogram_quantile()
 * does; 0 if empty. */
double bt_prom_hist_quantile(const struct bt_prom_hist *h, double q);

/* "# HELP" and "# TYPE" lines; once per metric name, before its samples. */
void bt_prom_head(struct bt_buf *b, const char *name, enum bt_prom_type type, const char *help);
void bt_prom_f64(struct bt_buf *b, const char *name, const struct bt_prom_label *labels,
                 size_t n_labels, double value);
void bt_prom_u64(struct bt_buf *b, const char *name, const struct bt_prom_label *labels,
                 size_t n_labels, uint64_t value);
/* _bucket lines, _sum, _count. */
void bt_prom_hist_render(struct bt_buf *b, const char *name, const struct bt_prom_label *labels,
                         size_t n_labels, const struct bt_prom_hist *h);

#ifdef __cplusplus
}
#endif
#endif
