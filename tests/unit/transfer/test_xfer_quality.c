/* What is said about transports, on machines with and without RDMA devices: a folder stands for sysfs. */

#include <sys/stat.h>
#include "tests/check.h"
#include "tests/tempfile.h"
#include "transfer/xfer_int.h"

static struct xfer_transport judge(const char *text, const char *folder)
{
    struct xfer_transport t = {.rndv = true, .warning = "stale"};

    snprintf(t.text, sizeof(t.text), "%s", text);
    xfer_transport_judge(&t, folder);
    return t;
}

int main(void)
{
    const char *with = bt_temp_path("infiniband"), *without = bt_temp_path("empty");
    const char *absent = bt_temp_path("absent");
    char one[600], two[600];

    snprintf(one, sizeof(one), "%s/mlx5_0", with);
    snprintf(two, sizeof(two), "%s/mlx5_1", with);
    CHECK(mkdir(with, 0700) == 0 && mkdir(without, 0700) == 0);
    CHECK(mkdir(two, 0700) == 0 && mkdir(one, 0700) == 0);

    /* TCP alone where a device lies idle */
    CHECK_STR(judge("tcp/eth0", with).warning,
              "TCP is used although this machine has the RDMA device mlx5_0");
    CHECK(strstr(judge("tcp/eth0+tcp/eth1", with).warning, "mlx5_0") != NULL);
    /* no device, or no such class of devices */
    CHECK_STR(judge("tcp/eth0", without).warning, "");
    CHECK_STR(judge("tcp/eth0", absent).warning, "");
    /* something better than TCP is in use, or it is not known what is */
    CHECK_STR(judge("rc_mlx5/mlx5_0:1", with).warning, "");
    CHECK_STR(judge("tcp/eth0+rc_verbs/mlx5_0:1", with).warning, "");
    CHECK_STR(judge("sysv/memory", with).warning, "");
    CHECK_STR(judge("", with).warning, "");

    CHECK(judge("rc_mlx5/mlx5_0:1", with).rndv && judge("rc_mlx5/mlx5_0:1", with).rndv_device);
    CHECK(!judge("sysv/memory+cuda_ipc/cuda", with).rndv); /* a slot would go by an emulated put */
    CHECK(judge("sysv/memory+cuda_ipc/cuda", with).rndv_device);
    CHECK(judge("tcp/eth0+dc_mlx5/mlx5_0:1", with).rndv);
    CHECK(!judge("tcp/eth0", with).rndv);
    CHECK(!judge("sysv/memory", with).rndv);
    CHECK(!judge("", with).rndv);

    CHECK(rmdir(one) == 0 && rmdir(two) == 0 && rmdir(with) == 0 && rmdir(without) == 0);
    bt_temp_clean(NULL, 0);
    return bt_test_done();
}
