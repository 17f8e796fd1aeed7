#ifndef BT_BASE_CGROUP_INT_H
#define BT_BASE_CGROUP_INT_H

#include <stdint.h>

/* The tightest limit of this process's control groups, v1 or v2, walking up from its own group to
 * the root. proc: normally "/proc/self/cgroup"; mount: normally "/sys/fs/cgroup". No limit (or
 * nothing readable): UINT64_MAX. */
uint64_t bt_cgroup_memory(const char *proc, const char *mount); /* bytes */
uint64_t bt_cgroup_cpus(const char *proc, const char *mount); /* whole CPUs, a part counts as one */

#endif
