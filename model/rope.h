#ifndef BT_MODEL_ROPE_H
#define BT_MODEL_ROPE_H

/* Rotary position embedding: frequencies from a model's parameters, and cos/sin rows by position,
 * computed in double. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/status.h"

enum bt_rope_type { BT_ROPE_DEFAULT, BT_ROPE_LINEAR, BT_ROPE_LLAMA3, BT_ROPE_YARN };

struct bt_rope_spec {
    enum bt_rope_type type;
    uint32_t dim; /* values rotated at the front of each head; even */
    double theta;
    double factor;                            /* all but default */
    double original_context;                  /* llama3, yarn: positions of the pre-training */
    double low_freq_factor, high_freq_factor; /* llama3 */
    double beta_fast, beta_slow;              /* yarn */
    double attention_factor;                  /* yarn; 0: derived from factor and mscales */
    double mscale, mscale_all_dim;            /* yarn; 0: not set */
    bool truncate;                            /* yarn: whole correction bounds */
};

struct bt_rope_table {
    uint32_t n_pairs, n_positions;
    double *inv_freq; /* [n_pairs] */
    double scale;     /* on cos and sin */
    float *rows; /* [n_positions][2][n_pairs]: cos, sin; a row is computed when first asked for */
    uint8_t *known; /* [n_positions] */
};

/* divisors: [dim / 2] by which each frequency is divided besides, or NULL (GGUF's
 * rope_freqs.weight). The spec's numbers are finite, positive where they divide. BT_ERR_NOMEM. */
enum bt_status bt_rope_table_init(struct bt_rope_table *t, const struct bt_rope_spec *spec,
                                  const float *divisors, uint32_t n_positions) BT_NODISCARD;
void bt_rope_table_fini(struct bt_rope_table *t); /* legal on a zeroed table */

/* [2][n_pairs]: cos, then sin; valid as long as the table. One thread. pos < n_positions. */
const float *bt_rope_table_row(struct bt_rope_table *t, uint32_t pos);

#endif
