/* Computes rotary frequencies and caches cos/sin rows. Owns the scaling rules (linear, llama3,
 * yarn); refuses to know where their parameters were written. */

#include "model/rope.h"

#include <math.h>
#include "base/assert.h"
#include "base/mem.h"

static const double pi = 3.14159265358979323846;

/* Llama 3: long wavelengths are slowed by factor, short ones kept, those between interpolated. */
static double llama3_freq(const struct bt_rope_spec *s, double f)
{
    double wavelen = 2.0 * pi / f;

    if (wavelen < s->original_context / s->high_freq_factor) {
        return f;
    }
    if (wavelen > s->original_context / s->low_freq_factor) {
        return f / s->factor;
    }
    double smooth = (s->original_context / wavelen - s->low_freq_factor) /
                    (s->high_freq_factor - s->low_freq_factor);
    return (1.0 - smooth) * f / s->factor + smooth * f;
}

/* The dimension that turns n_rotations times over the original context. */
static double yarn_dim(const struct bt_rope_spec *s, double n_rotations)
{
    return s->dim * log(s->original_context / (n_rotations * 2.0 * pi)) / (2.0 * log(s->theta));
}

/* Bounds of the ramp between kept and interpolated pairs. */
static void yarn_bounds(const struct bt_rope_spec *s, double *low, double *high)
{
    *low = yarn_dim(s, s->beta_fast);
    *high = yarn_dim(s, s->beta_slow);
    if (s->truncate) {
        *low = floor(*low);
        *high = ceil(*high);
    }
    *low = fmax(*low, 0.0);
    *high = fmin(*high, s->dim - 1.0);
    if (*low == *high) {
        *high += 0.001;
    }
}

static double yarn_mscale(double factor, double mscale)
{
    return factor <= 1.0 ? 1.0 : 0.1 * mscale * log(factor) + 1.0;
}

static double yarn_scale(const struct bt_rope_spec *s)
{
    if (s->attention_factor != 0.0) {
        return s->attention_factor;
    }
    if (s->mscale != 0.0 && s->mscale_all_dim != 0.0) {
        return yarn_mscale(s->factor, s->mscale) / yarn_mscale(s->factor, s->mscale_all_dim);
    }
    return yarn_mscale(s->factor, 1.0);
}

static void frequencies(struct bt_rope_table *t, const struct bt_rope_spec *s,
                        const float *divisors)
{
    double low = 0.0, high = 1.0;

    t->scale = s->type == BT_ROPE_YARN ? yarn_scale(s) : 1.0;
    if (s->type == BT_ROPE_YARN) {
        yarn_bounds(s, &low, &high);
    }
    for (uint32_t i = 0; i < t->n_pairs; i++) {
        double f = pow(s->theta, -2.0 * i / s->dim);
        double ramp = fmin(fmax((i - low) / (high - low), 0.0), 1.0);
        switch (s->type) {
        case BT_ROPE_DEFAULT:
            break;
        case BT_ROPE_LINEAR:
            f /= s->factor;
            break;
        case BT_ROPE_LLAMA3:
            f = llama3_freq(s, f);
            break;
        case BT_ROPE_YARN:
            f = f / s->factor * ramp + f * (1.0 - ramp);
            break;
        }
        t->inv_freq[i] = divisors != NULL ? f / (double)divisors[i] : f;
    }
}

enum bt_status bt_rope_table_init(struct bt_rope_table *t, const struct bt_rope_spec *spec,
                                  const float *divisors, uint32_t n_positions)
{
    size_t row;

    *t = (struct bt_rope_table){.n_pairs = spec->dim / 2, .n_positions = n_positions};
    if (!bt_mul_size(spec->dim, sizeof(float), &row)) {
        return BT_ERR_NOMEM;
    }
    t->inv_freq = bt_calloc(t->n_pairs, sizeof(double));
    t->rows = bt_calloc(n_positions, row);
    t->known = bt_calloc(n_positions, 1);
    if (t->inv_freq == NULL || t->rows == NULL || t->known == NULL) {
        bt_rope_table_fini(t);
        return BT_ERR_NOMEM;
    }
    frequencies(t, spec, divisors);
    return BT_OK;
}

void bt_rope_table_fini(struct bt_rope_table *t)
{
    bt_free(t->inv_freq);
    bt_free(t->rows);
    bt_free(t->known);
    *t = (struct bt_rope_table){0};
}

const float *bt_rope_table_row(struct bt_rope_table *t, uint32_t pos)
{
    BT_ASSERT(pos < t->n_positions);
    float *row = t->rows + (size_t)pos * 2 * t->n_pairs;

    if (!t->known[pos]) {
        for (uint32_t i = 0; i < t->n_pairs; i++) {
            double a = pos * t->inv_freq[i];
            row[i] = (float)(cos(a) * t->scale);
            row[t->n_pairs + i] = (float)(sin(a) * t->scale);
        }
        t->known[pos] = 1;
    }
    return row;
}
