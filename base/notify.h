#ifndef BT_BASE_NOTIFY_H
#define BT_BASE_NOTIFY_H

/* Tells systemd (or whoever set NOTIFY_SOCKET) a state: "READY=1", "STOPPING=1". Nothing happens
 * without it. */
void bt_notify(const char *state);

#endif
