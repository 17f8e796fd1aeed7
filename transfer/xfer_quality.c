/* Judges what the wire chose to carry a connection: whether rendezvous pays, and whether something better lies idle.
 * Reads names and sysfs; knows no library. */

#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include "transfer/xfer_int.h"

/* Transports that read remote memory by themselves, so that rendezvous saves copies: any memory, or only a device's. TCP and
 * shared memory do not: there UCX would emulate a put, and a killed peer can take the survivor down with it. */
static const char *const rdma[] = {"rc", "dc", "ud", "gga", NULL};
static const char *const device_rdma[] = {"rc",       "dc",       "ud",  "gga",
                                          "cuda_ipc", "rocm_ipc", "gdr", NULL};

static bool is_one_of(const char *name, const char *const *prefixes)
{
    for (; *prefixes != NULL; prefixes++) {
        if (strncmp(name, *prefixes, strlen(*prefixes)) == 0) {
            return true;
        }
    }
    return false;
}

/* The first device in the order of their names. false: none. */
static bool find_rdma_device(const char *folder, char *name, size_t cap)
{
    DIR *d = opendir(folder);
    struct dirent *e;

    name[0] = '\0';
    while (d != NULL && (e = readdir(d)) != NULL) {
        if (e->d_name[0] != '.' && (name[0] == '\0' || strcmp(e->d_name, name) < 0)) {
            snprintf(name, cap, "%.63s", e->d_name);
        }
    }
    if (d != NULL) {
        closedir(d);
    }
    return name[0] != '\0';
}

void xfer_transport_judge(struct xfer_transport *t, const char *rdma_folder)
{
    bool only_tcp = t->text[0] != '\0';
    char device[64];

    t->rndv = t->rndv_device = false;
    t->warning[0] = '\0';
    for (const char *at = t->text; at != NULL && *at != '\0'; at = strchr(at, '+')) {
        at += *at == '+';
        t->rndv = t->rndv || is_one_of(at, rdma);
        t->rndv_device = t->rndv_device || is_one_of(at, device_rdma);
        only_tcp = only_tcp && strncmp(at, "tcp", 3) == 0;
    }
    if (only_tcp && find_rdma_device(rdma_folder, device, sizeof(device))) {
        snprintf(t->warning, sizeof(t->warning),
                 "TCP is used although this machine has the RDMA device %s", device);
    }
}
