/* The text format line by line, bucket edges, quantiles. */

#include "net/prom.h"

#include <math.h>

#include "tests/check.h"

int main(void)
{
    static const double bounds[] = {0.1, 1, 10};
    static const double falling[] = {1, 1};
    struct bt_prom_label labels[] = {{"node", "a\"b\\c\nd"}, {"role", "prefill"}};
    struct bt_prom_hist h, other, text;
    struct bt_buf b = {0};
    struct bt_err err;

    CHECK_EQ(bt_prom_hist_init(&h, falling, 2), BT_ERR_INVALID);
    CHECK_EQ(bt_prom_hist_init(&h, bounds, 3), BT_OK);
    bt_prom_hist_observe(&h, 0.1);
    bt_prom_hist_observe(&h, 0.5);
    bt_prom_hist_observe(&h, 0.7);
    bt_prom_hist_observe(&h, 100);
    bt_prom_hist_observe(&h, (double)NAN);
    bt_prom_head(&b, "x_seconds", BT_PROM_HISTOGRAM, "Time\nof x.");
    bt_prom_hist_render(&b, "x_seconds", labels, 1, &h);
    bt_prom_head(&b, "y_total", BT_PROM_COUNTER, "Ys.");
    bt_prom_u64(&b, "y_total", NULL, 0, UINT64_MAX);
    bt_prom_u64(&b, "y_total", labels + 1, 1, 3);
    bt_prom_f64(&b, "z", NULL, 0, 0.1);
    bt_prom_f64(&b, "z", NULL, 0, 1e300);
    bt_prom_f64(&b, "z", NULL, 0, (double)INFINITY);
    CHECK_STR(b.data, "# HELP x_seconds Time\\nof x.\n"
                      "# TYPE x_seconds histogram\n"
                      "x_seconds_bucket{node=\"a\\\"b\\\\c\\nd\",le=\"0.1\"} 1\n"
                      "x_seconds_bucket{node=\"a\\\"b\\\\c\\nd\",le=\"1\"} 3\n"
                      "x_seconds_bucket{node=\"a\\\"b\\\\c\\nd\",le=\"10\"} 3\n"
                      "x_seconds_bucket{node=\"a\\\"b\\\\c\\nd\",le=\"+Inf\"} 4\n"
                      "x_seconds_sum{node=\"a\\\"b\\\\c\\nd\"} 101.3\n"
                      "x_seconds_count{node=\"a\\\"b\\\\c\\nd\"} 4\n"
                      "# HELP y_total Ys.\n"
                      "# TYPE y_total counter\n"
                      "y_total 18446744073709551615\n"
                      "y_total{role=\"prefill\"} 3\n"
                      "z 0.1\n"
                      "z 1e+300\n"
                      "z +Inf\n");
    bt_buf_fini(&b);
    CHECK_NEAR(bt_prom_hist_quantile(&h, 0.5), 0.1 + 0.9 * 0.5, 1e-12);
    CHECK_NEAR(bt_prom_hist_quantile(&h, 1), 10, 1e-12);
    CHECK_EQ(bt_prom_hist_init(&other, bounds, 3), BT_OK);
    bt_prom_hist_observe(&other, 5);
    bt_prom_hist_add(&h, &other);
    CHECK_EQ(h.count, 5);
    CHECK_EQ(h.counts[2], 1);
    CHECK_EQ(bt_prom_hist_init_text(&text, "0.001,0.01,2.5", &err), BT_OK);
    CHECK_EQ(text.n_bounds, 3);
    CHECK_EQ(bt_prom_hist_init_text(&text, "1,,2", &err), BT_ERR_INVALID);
    CHECK_EQ(bt_prom_hist_init_text(&text, "2,1", &err), BT_ERR_INVALID);
    CHECK_EQ(bt_prom_hist_init_text(&text, "1,x", &err), BT_ERR_INVALID);
    return bt_test_done();
}
