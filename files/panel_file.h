#ifndef BT_FILES_PANEL_FILE_H
#define BT_FILES_PANEL_FILE_H

/* A file of packed weights in a cache folder. The first process that wants it fills it; all of one machine map it, so the
 * packed form is in memory once however many daemons serve the model. What the bytes mean is the caller's; the key must
 * name everything that they depend on.
 *
 * A file is believed only if it was completed since the machine was last started: nobody waits for the disk, so a crash
 * may leave holes. It is never cut while it is mapped; whoever deletes it harms nobody.
 *
 * The cache keeps itself small: a file that nobody has opened for 30 days goes, and the oldest unused ones go until the
 * new one leaves a tenth of the file system free; if that cannot be had, the new one is refused (BT_ERR_BUSY).
 *
 * Locks (flock): a user holds the file shared, whoever fills it holds it alone. One process at a time per handle; any
 * thread. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/status.h"

struct bt_panel_file;

struct bt_panel_want {
    const char *dir;   /* made (0700) if it is not there */
    const char *key;   /* at most BT_PANEL_KEY_MAX bytes */
    const char *about; /* for people that look into the file: the model's path; cut at 1 KiB */
    size_t bytes;      /* > 0 */
    /* While another process fills the file: how far it is (0 to 1). May be NULL. */
    void (*waiting)(void *arg, double fraction);
    void *arg;
};

#define BT_PANEL_KEY_MAX 2048

/* Blocks while another process fills the file, as long as that one gets on: BT_ERR_TIMEOUT after 10 s without.
 * BT_ERR_IO, BT_ERR_BUSY (no room), BT_ERR_INVALID (the folder or file is not this user's alone to write): the caller
 * goes on with memory of its own; err says why. */
enum bt_status bt_panel_file_open(const struct bt_panel_want *want, struct bt_panel_file **out,
                                  struct bt_err *err) BT_NODISCARD;
/* NULL is legal. What was not published is deleted. */
void bt_panel_file_close(struct bt_panel_file *f);

/* want.bytes bytes, 4096-byte aligned: read-only when ready, else zeroed and the caller's to fill. */
uint8_t *bt_panel_file_data(struct bt_panel_file *f);
/* While filling: writes into the data at `at`; much faster than through the mapping, which shows it afterwards. Any thread, several
 * at once. False: an error of the file system. */
bool bt_panel_file_put(struct bt_panel_file *f, size_t at, const void *data,
                       size_t bytes) BT_NODISCARD;
bool bt_panel_file_ready(const struct bt_panel_file *f);
const char *bt_panel_file_path(const struct bt_panel_file *f);

/* While filling: tells the waiting ones how many bytes are done. At least every few seconds. */
void bt_panel_file_progress(struct bt_panel_file *f, size_t bytes_done);
/* All bytes are there: read-only from now on, and others may use it. */
enum bt_status bt_panel_file_publish(struct bt_panel_file *f, struct bt_err *err) BT_NODISCARD;
/* The content is wrong: deletes the file (others that map it keep what they have) and closes. */
void bt_panel_file_discard(struct bt_panel_file *f);

#endif
