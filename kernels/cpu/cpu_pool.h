#ifndef BT_KERNELS_CPU_POOL_H
#define BT_KERNELS_CPU_POOL_H

/* Compute workers of one CPU context: n_threads - 1 threads and the caller. They sleep in the kernel when there is
 * nothing to do, after a short bounded spin. One owner thread calls run(). */

#include <stdint.h>
#include "base/status.h"

struct bt_pool;

/* Task number task of a run, on thread `thread` (0: the caller; < n_threads). Tasks may run in any order, at once. */
typedef void bt_pool_fn(void *arg, uint32_t task, uint32_t thread);

/* n_threads >= 1. BT_ERR_NOMEM when memory or threads are out. */
enum bt_status bt_pool_create(uint32_t n_threads, struct bt_pool **out) BT_NODISCARD;
void bt_pool_destroy(struct bt_pool *p);
uint32_t bt_pool_threads(const struct bt_pool *p);
/* Runs fn for every task in 0 … n_tasks - 1 and returns when all are done. One task runs on the caller alone. */
void bt_pool_run(struct bt_pool *p, bt_pool_fn *fn, void *arg, uint32_t n_tasks);

#endif
