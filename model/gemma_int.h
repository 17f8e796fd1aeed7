#ifndef BT_MODEL_GEMMA_INT_H
#define BT_MODEL_GEMMA_INT_H

/* What gemma 2 and 3 share besides the sandwich layer. */

#include "model/blocks_int.h"

/* Head size, activation, norms stored as w - 1, scaled embeddings, soft caps (their default where
 * the key is absent). */
void bt_gemma_config_hf(struct bt_model *m, struct bt_hf *c, double attn_softcap,
                        double final_softcap);
/* n_layers_27b: the depth of the one size whose scores are scaled by dim / n_heads instead of the
 * head size. */
void bt_gemma_config_gguf(struct bt_model *m, struct bt_meta *g, uint32_t n_layers_27b);
void bt_gemma_bind(struct bt_binder *b, uint32_t layer, bool qk_norm);

#endif
