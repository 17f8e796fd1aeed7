/* The sampler. It owns scratch arrays of one vocabulary's size and nothing else; sequences, batches
 * and the meaning of tokens are not known here. Nothing sorts the vocabulary: top-k selects by a
 * heap of k, top-p pops a heap until the mass is reached, and a set of bits brings what they kept
 * into the order of ids. */

#include "engine/sampler.h"

#include <math.h>
#include <string.h>
#include "base/assert.h"
#include "base/mem.h"
#include "base/sample_math.h"
#include "engine/philox.h"

struct bt_sampler {
    uint32_t vocab;
    uint32_t point;    /* of weights: bt_sample_point(vocab) */
    float *logits;     /* working copy */
    uint64_t *weights; /* by id */
    uint32_t *ids;
    uint64_t *marks;  /* a bit for each id; zero but within by_id */
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
    s->point = bt_sample_point(vocab);
    s->logits = bt_calloc(vocab, sizeof(*s->logits));
    s->weights = bt_calloc(vocab, sizeof(*s->weights));
    s->ids = bt_calloc(vocab, sizeof(*s->ids));
    s->marks = bt_calloc(vocab / 64 + 1, sizeof(*s->marks));
    s->counts = bt_calloc(vocab, sizeof(*s->counts));
    s->stamps = bt_calloc(vocab, sizeof(*s->stamps));
    if (s->logits == NULL || s->weights == NULL || s->ids == NULL || s->marks == NULL ||
        s->counts == NULL || s->stamps == NULL) {
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
        bt_free(s->marks);
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
        s->logits[i] = bt_sample_clean(logits[i]);
    }
}

/* Weights by id; returns their sum. */
static uint64_t weigh_all(struct bt_sampler *s, float max, double inv_temperature)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < s->vocab; i++) {
        s->weights[i] = bt_sample_weight(s->logits[i], max, inv_temperature, s->point);
        sum += s->weights[i];
    }
    return sum;
}

/* The softmax's denominator. */
struct softmax {
    float max;
    uint64_t sum;
};

/* Log-probabilities from the untouched working copy; the chosen token's are filled by set_chosen. */
static struct softmax raw_logprobs(struct bt_sampler *s, uint32_t n_top, struct bt_sampled *out)
{
    const float *l = s->logits;
    struct softmax m = {.max = l[argmax(l, s->vocab)]};

    m.sum = weigh_all(s, m.max, 1.0);
    out->n_top = n_top < s->vocab ? n_top : s->vocab;
    select_top(l, s->vocab, out->n_top, s->ids);
    for (uint32_t i = 0; i < out->n_top; i++) {
        out->top[i].token = s->ids[i];
        out->top[i].logprob = bt_sample_logprob(l[s->ids[i]], m.max, m.sum, s->point);
    }
    return m;
}

static void set_chosen(const struct bt_sampler *s, struct bt_sampled *out, uint32_t token,
                       float logit, struct softmax m)
{
    out->token = token;
    out->logprob = bt_sample_logprob(bt_sample_clean(logit), m.max, m.sum, s->point);
}

void bt_sampler_logprobs(struct bt_sampler *s, const float *logits, uint32_t token, uint32_t n_top,
                         struct bt_sampled *out)
{
    BT_ASSERT(n_top <= BT_LOGPROBS_MAX && token < s->vocab);
    memset(out, 0, sizeof(*out));
    copy_logits(s, logits);
    struct softmax m = raw_logprobs(s, n_top, out);

    set_chosen(s, out, token, logits[token], m);
}

/* Notes a token of a history; collects distinct ones in s->ids. */
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

/* Counts a history; returns how many distinct tokens it has, which are in s->ids. */
static uint32_t count_history(struct bt_sampler *s, const uint32_t *tokens, uint32_t n_tokens,
                              uint32_t n_prompt)
{
    uint32_t n = 0;

    if (++s->now == 0) { /* the stamps of 2^32 calls ago would look new */
        memset(s->stamps, 0, s->vocab * sizeof(*s->stamps));
        s->now = 1;
    }
    for (uint32_t i = 0; i < n_tokens; i++) {
        n = note(s, tokens[i], i >= n_prompt, n);
    }
    return n;
}

bool bt_sampler_penalises(const struct bt_sampling *p)
{
    return p->repetition_penalty != 1.0F || p->presence_penalty != 0.0F ||
           p->frequency_penalty != 0.0F;
}

uint32_t bt_sampler_seen(struct bt_sampler *s, const uint32_t *tokens, uint32_t n_tokens,
                         uint32_t n_prompt, struct bt_k_seen *out, uint32_t n_max)
{
    uint32_t n = count_history(s, tokens, n_tokens, n_prompt);

    for (uint32_t i = 0; i < n && i < n_max; i++) {
        out[i] = (struct bt_k_seen){.token = s->ids[i], .count = s->counts[s->ids[i]]};
    }
    return n;
}

static void apply_penalties(struct bt_sampler *s, const struct bt_sampler_in *in)
{
    const struct bt_sampling *p = in->params;

    if (!bt_sampler_penalises(p)) {
        return;
    }
    uint32_t n = count_history(s, in->tokens, in->n_tokens, in->n_prompt);

    for (uint32_t i = 0; i < n; i++) {
        uint32_t t = s->ids[i];

        s->logits[t] = bt_sample_penalised(s->logits[t], s->counts[t], p->repetition_penalty,
                                           p->presence_penalty, p->frequency_penalty);
    }
}

static void apply_params(struct bt_sampler *s, const struct bt_sampler_in *in)
{
    const struct bt_sampling *p = in->params;

    for (uint32_t i = 0; i < p->n_bias; i++) {
        if (p->bias[i].token < s->vocab) {
            float *l = &s->logits[p->bias[i].token];

            *l = bt_sample_clean(*l + p->bias[i].bias);
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

/* Draws one of n ids, given in ascending order (NULL: 0 … n - 1); those that weigh less than `least`
 * are not there. Returns BT_NONE if nothing weighs anything. */
#define BT_NONE UINT32_MAX
static uint32_t draw(const struct bt_sampler *s, const uint32_t *ids, uint32_t n, uint64_t least,
                     uint64_t random)
{
    uint64_t total = 0, cum = 0;

    for (uint32_t i = 0; i < n; i++) {
        uint64_t w = s->weights[ids != NULL ? ids[i] : i];

        total += w >= least ? w : 0;
    }
    if (total == 0) {
        return BT_NONE;
    }
    uint64_t target = bt_sample_target(random, total);

    for (uint32_t i = 0;; i++) {
        uint32_t id = ids != NULL ? ids[i] : i;
        uint64_t w = s->weights[id];

        cum += w >= least ? w : 0;
        if (cum > target) {
            return id;
        }
    }
}

/* Brings n distinct ids into ascending order. */
static void by_id(struct bt_sampler *s, uint32_t *ids, uint32_t n)
{
    uint32_t at = 0;

    for (uint32_t i = 0; i < n; i++) {
        s->marks[ids[i] / 64] |= UINT64_C(1) << ids[i] % 64;
    }
    for (uint32_t word = 0; at < n; word++) {
        for (; s->marks[word] != 0; s->marks[word] &= s->marks[word] - 1) {
            ids[at++] = word * 64 + (uint32_t)__builtin_ctzll(s->marks[word]);
        }
    }
}

/* Leaves the ids that top-k and then top-p keep, ascending, in the first places of s->ids; returns how many. *best: that of the
 * largest logit. */
static uint32_t keep_top_k(struct bt_sampler *s, const struct bt_sampling *p,
                           double inv_temperature, uint32_t *best)
{
    uint64_t total = 0, before = 0;
    uint32_t n = 0;

    select_top(s->logits, s->vocab, p->top_k, s->ids);
    *best = s->ids[0];
    for (uint32_t i = 0; i < p->top_k; i++) {
        uint32_t id = s->ids[i];

        s->weights[id] =
            bt_sample_weight(s->logits[id], s->logits[*best], inv_temperature, s->point);
        total += s->weights[id];
    }
    uint64_t share = bt_sample_share(p->top_p, total);

    while (n < p->top_k && (p->top_p >= 1.0F || before < share)) {
        before += s->weights[s->ids[n++]];
    }
    by_id(s, s->ids, n);
    return n;
}

/* Pops the heap until the mass is reached: the candidates, in ascending order of ids, end up behind the ids [0, first). */
static uint32_t keep_top_p(struct bt_sampler *s, uint64_t share)
{
    uint64_t before = 0;
    uint32_t first = s->vocab;

    for (uint32_t i = 0; i < s->vocab; i++) {
        s->ids[i] = i;
    }
    heapify(s->logits, s->ids, s->vocab, true);
    while (first > 0 && before < share) {
        uint32_t best = s->ids[0];

        first--;
        s->ids[0] = s->ids[first];
        s->ids[first] = best;
        sift_down(s->logits, s->ids, first, 0, true);
        before += s->weights[best];
    }
    by_id(s, s->ids + first, s->vocab - first);
    return first;
}

static uint32_t sample(struct bt_sampler *s, const struct bt_sampling *p, uint64_t random)
{
    double inv_temperature = 1.0 / (double)p->temperature;
    uint64_t least = bt_sample_share(p->min_p, UINT64_C(1) << s->point);
    uint32_t best, token;

    if (p->top_k > 0 && p->top_k < s->vocab) {
        uint32_t n = keep_top_k(s, p, inv_temperature, &best);

        token = draw(s, s->ids, n, least, random);
    } else {
        best = argmax(s->logits, s->vocab);
        uint64_t total = weigh_all(s, s->logits[best], inv_temperature);

        if (p->top_p < 1.0F) {
            uint32_t first = keep_top_p(s, bt_sample_share(p->top_p, total));

            token = draw(s, s->ids + first, s->vocab - first, least, random);
        } else {
            token = draw(s, NULL, s->vocab, least, random);
        }
    }
    return token != BT_NONE ? token : best;
}

void bt_sampler_sample(struct bt_sampler *s, const struct bt_sampler_in *in, struct bt_sampled *out)
{
    const struct bt_sampling *p = in->params;
    struct softmax m = {0};

    BT_ASSERT(in->n_prompt <= in->n_tokens && p->n_top <= BT_LOGPROBS_MAX);
    memset(out, 0, sizeof(*out));
    copy_logits(s, in->logits);
    if (p->logprobs) {
        m = raw_logprobs(s, p->n_top, out);
    }
    apply_params(s, in);
    out->token =
        p->temperature == 0.0F
            ? argmax(s->logits, s->vocab)
            : sample(s, p, bt_philox_bits(p->seed, p->choice, in->n_tokens - in->n_prompt));
    if (p->logprobs) {
        set_chosen(s, out, out->token, in->logits[out->token], m);
    }
}
