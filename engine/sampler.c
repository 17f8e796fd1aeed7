/* The sampler. It owns scratch arrays of one vocabulary's size and nothing else; sequences, batches
 * and the meaning of tokens are not known here. Nothing sorts the vocabulary: top-k selects by a
 * heap of k, top-p pops a heap until the mass is reached. */

#include "engine/sampler.h"

#include <math.h>
#include <string.h>
#include "base/assert.h"
#include "base/mem.h"
#include "engine/exact_math_int.h"
#include "engine/philox.h"

struct bt_sampler {
    uint32_t vocab;
    float *logits;   /* working copy */
    double *weights; /* e^((logit - max) / temperature), by position in ids or by id */
    uint32_t *ids;
    uint32_t *counts; /* occurrences in the answer; meaningful where stamps is `now` */
    uint32_t *stamps;
    uint32_t now;
};

enum bt_status bt_sampler_create(uint32_t vocab, struct bt_sampler **out)
{
    BT_ASSERT(vocab >= 1);
    struct bt_sampler *s = bt_calloc(1, sizeof(*s));

    if (s == NULL) {
        return BT_ERR_NOMEM;
    }
    s->vocab = vocab;
    s->logits = bt_calloc(vocab, sizeof(*s->logits));
    s->weights = bt_calloc(vocab, sizeof(*s->weights));
    s->ids = bt_calloc(vocab, sizeof(*s->ids));
    s->counts = bt_calloc(vocab, sizeof(*s->counts));
    s->stamps = bt_calloc(vocab, sizeof(*s->stamps));
    if (s->logits == NULL || s->weights == NULL || s->ids == NULL || s->counts == NULL ||
        s->stamps == NULL) {
        bt_sampler_destroy(s);
        return BT_ERR_NOMEM;
    }
    *out = s;
    return BT_OK;
}

void bt_sampler_destroy(struct bt_sampler *s)
{
    if (s != NULL) {
        bt_free(s->logits);
        bt_free(s->weights);
        bt_free(s->ids);
        bt_free(s->counts);
        bt_free(s->stamps);
        bt_free(s);
    }
}

/* Heaps of ids by logit. best_on_top: the root is the first of the descending order; else the last.
 */

static bool precedes(const float *l, uint32_t a, uint32_t b)
{
    return l[a] > l[b] || (l[a] == l[b] && a < b);
}

static void sift_down(const float *l, uint32_t *heap, uint32_t n, uint32_t at, bool best_on_top)
{
    uint32_t id = heap[at];

    for (;;) {
        uint32_t child = 2 * at + 1;

        if (child >= n) {
            break;
        }
        if (child + 1 < n && precedes(l, heap[child + 1], heap[child]) == best_on_top) {
            child++;
        }
        if (precedes(l, id, heap[child]) == best_on_top) {
            break;
        }
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = id;
}

static void heapify(const float *l, uint32_t *heap, uint32_t n, bool best_on_top)
{
    for (uint32_t i = n / 2; i-- > 0;) {
        sift_down(l, heap, n, i, best_on_top);
    }
}

/* The k first ids of the descending order, in that order. */
static void select_top(const float *l, uint32_t vocab, uint32_t k, uint32_t *ids)
{
    if (k == 0) {
        return;
    }
    for (uint32_t i = 0; i < k; i++) {
        ids[i] = i;
    }
    heapify(l, ids, k, false);
    for (uint32_t i = k; i < vocab; i++) {
        if (precedes(l, i, ids[0])) {
            ids[0] = i;
            sift_down(l, ids, k, 0, false);
        }
    }
    for (uint32_t n = k; n > 1;) {
        uint32_t last = ids[0];

        n--;
        ids[0] = ids[n];
        ids[n] = last;
        sift_down(l, ids, n, 0, false);
    }
}

static uint32_t argmax(const float *l, uint32_t n)
{
    uint32_t best = 0;

    for (uint32_t i = 1; i < n; i++) {
        if (l[i] > l[best]) {
            best = i;
        }
    }
    return best;
}

static void copy_logits(struct bt_sampler *s, const float *logits)
{
    for (uint32_t i = 0; i < s->vocab; i++) {
        s->logits[i] = isnan(logits[i]) ? -INFINITY : logits[i];
    }
}

/* Log-probabilities from the untouched working copy; the chosen token's are filled by set_chosen.
 * Returns the logarithm of the softmax's denominator. */
static double raw_logprobs(struct bt_sampler *s, uint32_t n_top, struct bt_sampled *out)
{
    const float *l = s->logits;
    double max = l[argmax(l, s->vocab)];
    double sum = 0.0;

    for (uint32_t i = 0; i < s->vocab; i++) {
        s->weights[i] = exact_exp(l[i] - max);
    }
    for (uint32_t i = 0; i < s->vocab; i++) {
        sum += s->weights[i];
    }
    double log_sum = sum > 0.0 ? max + exact_log(sum) : INFINITY;

    out->n_top = n_top < s->vocab ? n_top : s->vocab;
    select_top(l, s->vocab, out->n_top, s->ids);
    for (uint32_t i = 0; i < out->n_top; i++) {
        out->top[i].token = s->ids[i];
        out->top[i].logprob = (float)(l[s->ids[i]] - log_sum);
    }
    return log_sum;
}

static void set_chosen(struct bt_sampled *out, uint32_t token, float logit, double log_sum)
{
    out->token = token;
    out->logprob = isnan(logit) ? -INFINITY : (float)(logit - log_sum);
}

void bt_sampler_logprobs(struct bt_sampler *s, const float *logits, uint32_t token, uint32_t n_top,
                         struct bt_sampled *out)
{
    BT_ASSERT(n_top <= BT_LOGPROBS_MAX && token < s->vocab);
    memset(out, 0, sizeof(*out));
    copy_logits(s, logits);
    double log_sum = raw_logprobs(s, n_top, out);

    set_chosen(out, token, logits[token], log_sum);
}

/* Notes a token of the history; collects distinct ones in s->ids. */
static uint32_t note(struct bt_sampler *s, uint32_t token, uint32_t occurrences,
                     uint32_t n_distinct)
{
    if (s->stamps[token] != s->now) {
        s->stamps[token] = s->now;
        s->counts[token] = 0;
        s->ids[n_distinct++] = token;
    }
    s->counts[token] += occurrences;
    return n_distinct;
}

static void apply_penalties(struct bt_sampler *s, const struct bt_sampler_in *in)
{
    const struct bt_sampling *p = in->params;
    uint32_t n = 0;

    if (p->repetition_penalty == 1.0F && p->presence_penalty == 0.0F &&
        p->frequency_penalty == 0.0F) {
        return;
    }
    if (++s->now == 0) { /* the stamps of 2^32 calls ago would look new */
        memset(s->stamps, 0, s->vocab * sizeof(*s->stamps));
        s->now = 1;
    }
    for (uint32_t i = 0; i < in->n_tokens; i++) {
        n = note(s, in->tokens[i], i >= in->n_prompt, n);
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t t = s->ids[i];
        float l = s->logits[t];

        l = l > 0.0F ? l / p->repetition_penalty : l * p->repetition_penalty;
        if (s->counts[t] > 0) {
            l -= p->presence_penalty;
            l -= p->frequency_penalty * (float)s->counts[t];
        }
        s->logits[t] = l;
    }
}

static void apply_params(struct bt_sampler *s, const struct bt_sampler_in *in)
{
    const struct bt_sampling *p = in->params;

    for (uint32_t i = 0; i < p->n_bias; i++) {
        if (p->bias[i].token < s->vocab) {
            s->logits[p->bias[i].token] += p->bias[i].bias;
        }
    }
    apply_penalties(s, in);
    if (in->n_tokens - in->n_prompt >= p->min_tokens) {
        return;
    }
    for (uint32_t i = 0; i < in->n_eos && !p->ignore_eos; i++) {
        if (in->eos[i] < s->vocab) {
            s->logits[in->eos[i]] = -INFINITY;
        }
    }
    for (uint32_t i = 0; i < p->n_stop_ids; i++) {
        if (p->stop_ids[i] < s->vocab) {
            s->logits[p->stop_ids[i]] = -INFINITY;
        }
    }
}

/* Draws from n weights: position i with probability weights[i] / total. Summed and walked in the
 * order given. */
static uint32_t draw(const double *weights, uint32_t n, double u)
{
    double total = 0.0, cum = 0.0;
    uint32_t last = 0;

    for (uint32_t i = 0; i < n; i++) {
        total += weights[i];
    }
    for (uint32_t i = 0; i < n; i++) {
        cum += weights[i];
        if (weights[i] > 0.0) {
            if (cum > u * total) {
                return i;
            }
            last = i;
        }
    }
    return last;
}

/* How many of n candidates in descending order stay: top-p of total, then min-p; at least one. */
static uint32_t cut(const double *weights, uint32_t n, double total, float top_p, float min_p)
{
    double cum = 0.0;
    uint32_t kept = 0;

    while (kept < n &&
           (kept == 0 || (cum < (double)top_p * total && weights[kept] >= (double)min_p))) {
        cum += weights[kept++];
    }
    return kept;
}

static uint32_t sample_top_k(struct bt_sampler *s, const struct bt_sampling *p, double u)
{
    double total = 0.0;

    select_top(s->logits, s->vocab, p->top_k, s->ids);
    double max = s->logits[s->ids[0]];

    for (uint32_t i = 0; i < p->top_k; i++) {
        s->weights[i] = exact_exp((s->logits[s->ids[i]] - max) / (double)p->temperature);
        total += s->weights[i];
    }
    uint32_t n = cut(s->weights, p->top_k, p->top_p < 1.0F ? total : INFINITY, p->top_p, p->min_p);

    return s->ids[draw(s->weights, n, u)];
}

/* Weights by id; returns their sum. */
static double weigh_all(struct bt_sampler *s, const struct bt_sampling *p)
{
    double max = s->logits[argmax(s->logits, s->vocab)];
    double total = 0.0;

    for (uint32_t i = 0; i < s->vocab; i++) {
        s->weights[i] = exact_exp((s->logits[i] - max) / (double)p->temperature);
    }
    for (uint32_t i = 0; i < s->vocab; i++) {
        total += s->weights[i];
    }
    return total;
}

/* Pops the heap until the mass is reached: the candidates end up, in descending order, at the end
 * of s->ids from the back. */
static uint32_t sample_top_p(struct bt_sampler *s, const struct bt_sampling *p, double u)
{
    double total = weigh_all(s, p);
    double cum = 0.0, kept = 0.0;
    uint32_t n = s->vocab, first = s->vocab;

    for (uint32_t i = 0; i < n; i++) {
        s->ids[i] = i;
    }
    heapify(s->logits, s->ids, n, true);
    while (n > 0 && (n == s->vocab || cum < (double)p->top_p * total)) {
        uint32_t best = s->ids[0];

        if (n < s->vocab && s->weights[best] < (double)p->min_p) {
            break;
        }
        n--;
        s->ids[0] = s->ids[n];
        s->ids[n] = best;
        sift_down(s->logits, s->ids, n, 0, true);
        cum += s->weights[best];
        first = n;
    }
    for (uint32_t i = s->vocab; i-- > first;) {
        kept += s->weights[s->ids[i]];
        if (kept > u * cum) {
            return s->ids[i];
        }
    }
    return s->ids[first];
}

static uint32_t sample_plain(struct bt_sampler *s, const struct bt_sampling *p, double u)
{
    (void)weigh_all(s, p);
    for (uint32_t i = 0; p->min_p > 0.0F && i < s->vocab; i++) {
        if (s->weights[i] < (double)p->min_p) {
            s->weights[i] = 0.0;
        }
    }
    return draw(s->weights, s->vocab, u);
}

void bt_sampler_sample(struct bt_sampler *s, const struct bt_sampler_in *in, struct bt_sampled *out)
{
    const struct bt_sampling *p = in->params;
    uint32_t token;
    double log_sum = 0.0;

    BT_ASSERT(in->n_prompt <= in->n_tokens && p->n_top <= BT_LOGPROBS_MAX);
    memset(out, 0, sizeof(*out));
    copy_logits(s, in->logits);
    if (p->logprobs) {
        log_sum = raw_logprobs(s, p->n_top, out);
    }
    apply_params(s, in);
    if (p->temperature == 0.0F) {
        token = argmax(s->logits, s->vocab);
    } else {
        double u = bt_philox_uniform(p->seed, p->choice, in->n_tokens - in->n_prompt);

        if (p->top_k > 0 && p->top_k < s->vocab) {
            token = sample_top_k(s, p, u);
        } else if (p->top_p < 1.0F) {
            token = sample_top_p(s, p, u);
        } else {
            token = sample_plain(s, p, u);
        }
    }
    out->token = token;
    if (p->logprobs) {
        set_chosen(out, token, in->logits[token], log_sum);
    }
}
