#ifndef BT_TESTS_XFER_SUITE_H
#define BT_TESTS_XFER_SUITE_H

/* What must hold over every wire: run by the loopback test and by the UCX test, two bt_xfer in one process. */

struct world;
int xfer_suite(const struct world *w); /* the number of failed checks */

#endif
