/* Sampling. A block works on a chunk of a row's logits, or joins what the blocks of a row have found. The arithmetic is the host's
 * (base/sample_math.h), so are the tokens (engine/sampler.h). */

#include "kernels/cuda/cuda_numbers_int.cuh"
#include "kernels/cuda/cuda_sample_int.h"

#include "base/sample_math.h"

#define THREADS    256U
#define PER_THREAD (CUDA_SAMPLE_CHUNK / THREADS)
#define BIN_SHARE  (CUDA_SAMPLE_BINS / THREADS)
#define ROUNDS     3U

static_assert(CUDA_SAMPLE_VOCAB / CUDA_SAMPLE_CHUNK <= THREADS, "a thread for each chunk");
static_assert(BT_LOGPROBS_MAX <= THREADS, "a thread for each of the most likely");

/* ---- keys: integers in the order of logits ---- */

/* NaN is -inf, and both zeros are one. */
static __device__ __forceinline__ uint32_t key_of(float logit)
{
    const uint32_t bits = bits_of_float(bt_sample_clean(logit));

    return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

static __device__ __forceinline__ float logit_of(uint32_t key)
{
    return float_of_bits((key & 0x80000000U) != 0 ? key & 0x7fffffffU : ~key);
}

/* The greatest of them is the largest logit, of those the lowest id. */
static __device__ __forceinline__ uint64_t place_of(float logit, uint32_t id)
{
    return (uint64_t)key_of(logit) << 32 | (uint32_t)~id;
}

static __device__ __forceinline__ uint32_t id_of(uint64_t place)
{
    return ~(uint32_t)place;
}

static __device__ __forceinline__ bool stays(const struct cuda_cut *cut, uint32_t key, uint32_t id)
{
    return key > cut->key || (key == cut->key && id <= cut->last);
}

/* ---- all threads of a block together; room: shared, [THREADS] ---- */

enum block_op { BLOCK_SUM, BLOCK_MAX };

template <enum block_op OP>
static __device__ uint64_t over_block(shared_ptr<uint64_t> room, uint64_t v)
{
    const uint32_t t = threadIdx.x;

    __syncthreads();
    room[t] = v;
    for (uint32_t half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (t < half) {
            const uint64_t a = room[t], b = room[t + half];
            room[t] = OP == BLOCK_SUM ? a + b : a > b ? a : b;
        }
    }
    __syncthreads();
    return room[0];
}

/* The sum over the threads before this one; *all: over all. */
static __device__ uint64_t sum_before(shared_ptr<uint64_t> room, uint64_t v, uint64_t *all)
{
    const uint32_t t = threadIdx.x;

    __syncthreads();
    room[t] = v;
    for (uint32_t step = 1; step < THREADS; step *= 2) {
        __syncthreads();
        const uint64_t left = t >= step ? (uint64_t)room[t - step] : 0;
        __syncthreads();
        room[t] += left;
    }
    __syncthreads();
    *all = room[THREADS - 1];
    return room[t] - v;
}

/* ---- a chunk for each block: grid [n_chunks, n] ---- */

static __device__ __forceinline__ const float *row_of(const struct cuda_sample &s,
                                                      const struct cuda_draw *d)
{
    return s.logits + (size_t)d->row * s.vocab;
}

static __device__ __forceinline__ bool has_edits(const struct cuda_draw *d)
{
    return d->n_bias + d->n_seen + d->n_masked > 0;
}

/* The largest logit that the token is drawn by, and that log-probabilities are computed by. */
static __device__ __forceinline__ uint64_t peak_of(const struct cuda_draw *d)
{
    return d->peaks[has_edits(d) ? 1 : 0];
}

static __device__ __forceinline__ float max_of(uint64_t peak)
{
    return logit_of((uint32_t)(peak >> 32));
}

static __global__ void peaks(struct cuda_sample s, bool edited)
{
    struct cuda_draw *d = &s.draws[blockIdx.y];
    uint64_t best = 0;

    if (edited ? !has_edits(d) : has_edits(d) && d->logprobs == 0) {
        return;
    }
    const float *l = row_of(s, d);
    for (uint32_t j = 0; j < PER_THREAD; j++) {
        const uint32_t id = blockIdx.x * CUDA_SAMPLE_CHUNK + j * THREADS + threadIdx.x;
        const uint64_t place = id < s.vocab ? place_of(l[id], id) : 0;
        best = place > best ? place : best;
    }
    best = over_block<BLOCK_MAX>(shared_as<uint64_t>(0), best);
    if (threadIdx.x == 0) {
        global_max(&d->peaks[edited ? 1 : 0], best);
    }
}

/* What a logit weighs for a cut: its weight, or one. */
static __device__ __forceinline__ uint64_t mass_of(const struct cuda_sample &s,
                                                   const struct cuda_draw *d, uint32_t which,
                                                   float logit, float max)
{
    return which == CUDA_CUT_P ? bt_sample_weight(logit, max, d->inv_temperature, s.point) : 1;
}

static __device__ __forceinline__ uint32_t shift_of(uint32_t round)
{
    return round == 0 ? 21 : round == 1 ? 10 : 0;
}

/* Adds up what the logits weigh whose keys begin with the bits found so far, by the next bits. Shared memory adds 32 bits at once: 16
 * bits of a weight at a time. */
static __global__ void __launch_bounds__(THREADS)
    bins(struct cuda_sample s, uint32_t which, uint32_t round)
{
    shared_ptr<uint32_t> part = shared_as<uint32_t>(0); /* [3][CUDA_SAMPLE_BINS] */
    const struct cuda_draw *d = &s.draws[blockIdx.y];
    const struct cuda_cut *cut = &d->cuts[which];
    const uint32_t shift = shift_of(round), n_parts = which == CUDA_CUT_P ? 3 : 1;

    if (cut->on == 0) {
        return;
    }
    for (uint32_t i = threadIdx.x; i < n_parts * CUDA_SAMPLE_BINS; i += THREADS) {
        part[i] = 0U;
    }
    __syncthreads();
    const float *l = row_of(s, d);
    const float max = max_of(peak_of(d));
    const uint32_t known = round == 0 ? 32 : shift_of(round - 1); /* bits from here on */
    for (uint32_t j = 0; j < PER_THREAD; j++) {
        const uint32_t id = blockIdx.x * CUDA_SAMPLE_CHUNK + j * THREADS + threadIdx.x;
        if (id >= s.vocab) {
            break;
        }
        const uint32_t key = key_of(l[id]);
        if (known < 32 && (key ^ cut->key) >> known != 0) {
            continue;
        }
        const uint64_t mass = mass_of(s, d, which, logit_of(key), max);
        const uint32_t bin = key >> shift & (CUDA_SAMPLE_BINS - 1) & ((1U << (known - shift)) - 1);
        for (uint32_t p = 0; p < n_parts; p++) {
            const uint32_t some = (uint32_t)(mass >> 16 * p) & 0xffffU;
            if (some != 0) {
                shared_add(part + (p * CUDA_SAMPLE_BINS + bin), some);
            }
        }
    }
    __syncthreads();
    uint64_t *all = s.bins + (size_t)blockIdx.y * CUDA_SAMPLE_BINS;
    for (uint32_t i = threadIdx.x; i < CUDA_SAMPLE_BINS; i += THREADS) {
        uint64_t sum = 0;
        for (uint32_t p = 0; p < n_parts; p++) {
            sum += (uint64_t)part[p * CUDA_SAMPLE_BINS + i] << 16 * p;
        }
        if (sum != 0) {
            global_add(&all[i], sum);
        }
    }
}

enum { SUM_RAW, SUM_KEPT, SUM_DRAWN };

/* The cut that decides what may be drawn; NULL: all. */
static __device__ __forceinline__ const struct cuda_cut *last_cut(const struct cuda_draw *d)
{
    return d->cuts[CUDA_CUT_P].on != 0   ? &d->cuts[CUDA_CUT_P]
           : d->cuts[CUDA_CUT_K].on != 0 ? &d->cuts[CUDA_CUT_K]
                                         : NULL;
}

/* Adds up weights: of all logits as they came, of those that top-k keeps, of those that may be drawn (by chunk). */
static __global__ void __launch_bounds__(THREADS) sums(struct cuda_sample s, uint32_t what)
{
    struct cuda_draw *d = &s.draws[blockIdx.y];

    if (what == SUM_RAW    ? d->logprobs == 0
        : what == SUM_KEPT ? d->cuts[CUDA_CUT_P].on == 0
                           : d->draws == 0 || d->greedy != 0) {
        return;
    }
    const float *l = row_of(s, d);
    const float max = max_of(what == SUM_RAW ? d->peaks[0] : peak_of(d));
    const double inv_temperature = what == SUM_RAW ? 1.0 : d->inv_temperature;
    const uint64_t least = what == SUM_DRAWN ? d->least : 0;
    const struct cuda_cut *cut = what == SUM_RAW               ? NULL
                                 : what == SUM_DRAWN           ? last_cut(d)
                                 : d->cuts[CUDA_CUT_K].on != 0 ? &d->cuts[CUDA_CUT_K]
                                                               : NULL;
    uint64_t sum = 0;
    for (uint32_t j = 0; j < PER_THREAD; j++) {
        const uint32_t id = blockIdx.x * CUDA_SAMPLE_CHUNK + j * THREADS + threadIdx.x;
        if (id < s.vocab) {
            const uint32_t key = key_of(l[id]);
            const uint64_t w = cut == NULL || stays(cut, key, id)
                                   ? bt_sample_weight(logit_of(key), max, inv_temperature, s.point)
                                   : 0;
            sum += w >= least ? w : 0;
        }
    }
    sum = over_block<BLOCK_SUM>(shared_as<uint64_t>(0), sum);
    if (threadIdx.x == 0) {
        if (what == SUM_DRAWN) {
            s.sums[(size_t)blockIdx.y * s.n_chunks + blockIdx.x] = sum;
        } else {
            global_add(what == SUM_RAW ? &d->raw_sum : &d->kept, sum);
        }
    }
}

/* Collects the most likely ones, in any order. */
static __global__ void gather_tops(struct cuda_sample s)
{
    struct cuda_draw *d = &s.draws[blockIdx.y];
    const struct cuda_cut *cut = &d->cuts[CUDA_CUT_TOPS];

    if (cut->on == 0) {
        return;
    }
    const float *l = row_of(s, d);
    for (uint32_t j = 0; j < PER_THREAD; j++) {
        const uint32_t id = blockIdx.x * CUDA_SAMPLE_CHUNK + j * THREADS + threadIdx.x;
        if (id < s.vocab && stays(cut, key_of(l[id]), id)) {
            const uint32_t at = global_take(&d->n_found);
            s.tops[(size_t)blockIdx.y * BT_LOGPROBS_MAX + at] = place_of(l[id], id);
        }
    }
}

/* ---- a row for each block: grid [n] ---- */

/* The id of the nth (from 1) logit of a key, by id. found: shared. */
static __device__ uint32_t nth_of_key(const struct cuda_sample &s, const float *l, uint32_t key,
                                      uint64_t nth, shared_ptr<uint64_t> room,
                                      shared_ptr<uint64_t> found)
{
    const uint32_t per = (s.vocab + THREADS - 1) / THREADS, first = threadIdx.x * per;
    const uint32_t end = first + per < s.vocab ? first + per : s.vocab;
    uint64_t n = 0, all;

    for (uint32_t id = first; id < end; id++) {
        n += key_of(l[id]) == key ? 1 : 0;
    }
    uint64_t before = sum_before(room, n, &all);
    if (before < nth && nth <= before + n) {
        uint32_t id = first;
        while (key_of(l[id]) != key || ++before < nth) {
            id++;
        }
        found[0] = (uint64_t)id;
    }
    __syncthreads();
    return (uint32_t)(uint64_t)found[0];
}

/* Finds the bin, from the highest on, into which the cut falls, and clears the bins. */
static __global__ void __launch_bounds__(THREADS)
    narrow(struct cuda_sample s, uint32_t which, uint32_t round)
{
    shared_ptr<uint64_t> room = shared_as<uint64_t>(0);
    shared_ptr<uint64_t> found = room + THREADS; /* [3] */
    struct cuda_draw *d = &s.draws[blockIdx.x];
    struct cuda_cut *cut = &d->cuts[which];
    uint64_t *mine = s.bins + (size_t)blockIdx.x * CUDA_SAMPLE_BINS + CUDA_SAMPLE_BINS - 1 -
                     threadIdx.x * BIN_SHARE; /* and those below */
    uint64_t sum = 0, all;

    if (cut->on == 0) {
        return;
    }
    const uint32_t key = cut->key;
    const uint64_t want =
        which == CUDA_CUT_P && round == 0 ? bt_sample_share(d->top_p, d->kept) : cut->want;
    for (uint32_t i = 0; i < BIN_SHARE; i++) {
        sum += *(mine - i);
    }
    uint64_t before = sum_before(room, sum, &all);
    if (want == 0) { /* nothing weighs anything */
        if (threadIdx.x == 0) {
            cut->on = 0;
        }
        return;
    }
    if (before < want && want <= before + sum) {
        uint32_t i = 0;
        while (before + *(mine - i) < want) {
            before += *(mine - i);
            i++;
        }
        found[0] = (uint64_t)(CUDA_SAMPLE_BINS - 1 - threadIdx.x * BIN_SHARE - i);
        found[1] = want - before;
        found[2] = *(mine - i);
    }
    __syncthreads();
    const uint32_t now = key | (uint32_t)(uint64_t)found[0] << shift_of(round);
    const uint64_t left = found[1], there = found[2];
    uint32_t last = UINT32_MAX;
    for (uint32_t i = 0; i < BIN_SHARE; i++) {
        *(mine - i) = 0;
    }
    if (round == ROUNDS - 1) {
        const uint64_t unit = mass_of(s, d, which, logit_of(now), max_of(peak_of(d)));
        const uint64_t nth = (left + unit - 1) / unit;
        if (nth * unit < there) { /* not all of this key stay */
            __syncthreads();
            last = nth_of_key(s, row_of(s, d), now, nth, room, found);
        }
    }
    if (threadIdx.x == 0) {
        cut->key = now;
        cut->last = last;
        cut->want = left;
    }
}

/* Whether a token stands in a list before place i. */
static __device__ bool listed_before(const struct cuda_edit *list, uint32_t i)
{
    for (uint32_t j = 0; j < i; j++) {
        if (list[j].token == list[i].token) {
            return true;
        }
    }
    return false;
}

/* Bias, penalties, masks; each list's edits of one token are one thread's. */
static __global__ void edit(struct cuda_sample s)
{
    const struct cuda_draw *d = &s.draws[blockIdx.x];
    const struct cuda_edit *bias = s.edits + d->edits_at, *seen = bias + d->n_bias,
                           *masked = seen + d->n_seen;
    float *before = s.before + d->edits_at;
    float *l = s.logits + (size_t)d->row * s.vocab;

    for (uint32_t i = threadIdx.x; i < d->n_bias; i += THREADS) {
        if (listed_before(bias, i)) {
            continue;
        }
        float v = bt_sample_clean(l[bias[i].token]);
        before[i] = v;
        for (uint32_t j = i; j < d->n_bias; j++) {
            if (bias[j].token == bias[i].token) {
                v = bt_sample_clean(v + bias[j].bias);
            }
        }
        l[bias[i].token] = v;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < d->n_seen; i += THREADS) {
        const float v = bt_sample_clean(l[seen[i].token]);
        before[d->n_bias + i] = v;
        l[seen[i].token] =
            bt_sample_penalised(v, seen[i].count, d->repetition, d->presence, d->frequency);
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < d->n_masked; i += THREADS) {
        if (!listed_before(masked, i)) {
            before[d->n_bias + d->n_seen + i] = l[masked[i].token];
            l[masked[i].token] = -INFINITY;
        }
    }
}

/* The id up to which the weights of what may be drawn exceed the target. found: shared, [2]. */
static __device__ uint32_t draw_one(const struct cuda_sample &s, const struct cuda_draw *d,
                                    shared_ptr<uint64_t> room, shared_ptr<uint64_t> found)
{
    const uint32_t t = threadIdx.x;
    const uint64_t peak = peak_of(d);
    const struct cuda_cut *cut = last_cut(d);
    const float *l = row_of(s, d), max = max_of(peak);
    uint64_t mine = t < s.n_chunks ? s.sums[(size_t)blockIdx.x * s.n_chunks + t] : 0, all, none;
    uint64_t before = sum_before(room, mine, &all);

    if (all == 0) {
        return id_of(peak);
    }
    const uint64_t target = bt_sample_target(d->random, all);
    if (before <= target && target < before + mine) {
        found[0] = (uint64_t)t;
        found[1] = before;
    }
    __syncthreads();
    const uint32_t first = (uint32_t)(uint64_t)found[0] * CUDA_SAMPLE_CHUNK + t * PER_THREAD;
    const uint64_t there = found[1];
    uint64_t weights[PER_THREAD];
    mine = 0;
#pragma unroll
    for (uint32_t j = 0; j < PER_THREAD; j++) {
        const uint32_t id = first + j;
        const uint32_t key = id < s.vocab ? key_of(l[id]) : 0;
        const uint64_t w = id < s.vocab && (cut == NULL || stays(cut, key, id))
                               ? bt_sample_weight(logit_of(key), max, d->inv_temperature, s.point)
                               : 0;
        weights[j] = w >= d->least ? w : 0;
        mine += weights[j];
    }
    before = there + sum_before(room, mine, &none);
    if (before <= target && target < before + mine) {
        uint32_t chosen = PER_THREAD;
#pragma unroll
        for (uint32_t j = 0; j < PER_THREAD; j++) {
            before += weights[j];
            chosen = chosen == PER_THREAD && before > target ? j : chosen;
        }
        found[0] = (uint64_t)(first + chosen);
    }
    __syncthreads();
    return (uint32_t)(uint64_t)found[0];
}

/* A logit as it came, before edits. */
static __device__ float raw_logit(const struct cuda_sample &s, const struct cuda_draw *d,
                                  uint32_t token, shared_ptr<uint64_t> room)
{
    const uint32_t n = d->n_bias + d->n_seen + d->n_masked;
    uint64_t at = 0; /* n - i of the first edit i of the token */

    for (uint32_t i = threadIdx.x; at == 0 && i < n; i += THREADS) {
        at = s.edits[d->edits_at + i].token == token ? n - i : 0;
    }
    at = over_block<BLOCK_MAX>(room, at);
    return at > 0 ? s.before[d->edits_at + n - (uint32_t)at] : row_of(s, d)[token];
}

static __global__ void __launch_bounds__(THREADS, 2) finish(struct cuda_sample s)
{
    shared_ptr<uint64_t> room = shared_as<uint64_t>(0);
    const uint32_t t = threadIdx.x;
    const struct cuda_draw *d = &s.draws[blockIdx.x];
    struct bt_sampled *out = &s.out[blockIdx.x];
    const uint32_t token = d->draws == 0    ? d->token
                           : d->greedy != 0 ? id_of(peak_of(d))
                                            : draw_one(s, d, room, room + THREADS);
    float logprob = 0.0F;

    if (d->logprobs != 0) {
        const float max = max_of(d->peaks[0]);
        const uint64_t *tops = s.tops + (size_t)blockIdx.x * BT_LOGPROBS_MAX;
        logprob = bt_sample_logprob(bt_sample_clean(raw_logit(s, d, token, room)), max, d->raw_sum,
                                    s.point);
        if (t < d->n_top) {
            uint32_t rank = 0;
            for (uint32_t i = 0; i < d->n_top; i++) {
                rank += tops[i] > tops[t] ? 1 : 0;
            }
            out->top[rank].token = id_of(tops[t]);
            out->top[rank].logprob = bt_sample_logprob(max_of(tops[t]), max, d->raw_sum, s.point);
        }
    }
    if (t >= d->n_top && t < BT_LOGPROBS_MAX) {
        out->top[t].token = 0;
        out->top[t].logprob = 0.0F;
    }
    if (t == 0) {
        out->token = token;
        out->logprob = logprob;
        out->n_top = d->n_top;
    }
}

/* ---- launches ---- */

static void find_cut(struct cuda_ctx *c, const struct cuda_sample &s, uint32_t which)
{
    const size_t parts = (which == CUDA_CUT_P ? 3 : 1) * CUDA_SAMPLE_BINS * sizeof(uint32_t);

    for (uint32_t round = 0; round < ROUNDS; round++) {
        BT_LAUNCH(c, bins, dim3(s.n_chunks, s.n), THREADS, parts, s, which, round);
        BT_LAUNCH(c, narrow, s.n, THREADS, (THREADS + 3) * sizeof(uint64_t), s, which, round);
    }
}

extern "C" void cuda_sample_run(struct cuda_ctx *c, const struct cuda_sample *sample)
{
    const struct cuda_sample s = *sample;
    const dim3 chunks(s.n_chunks, s.n);
    const size_t room = THREADS * sizeof(uint64_t);
    const bool before = false, after = true;
    const uint32_t raw = SUM_RAW, kept = SUM_KEPT, drawn = SUM_DRAWN;

    if ((s.needs & CUDA_SAMPLE_RAW) != 0) {
        BT_LAUNCH(c, peaks, chunks, THREADS, room, s, before);
    }
    if ((s.needs & CUDA_SAMPLE_LOGPROBS) != 0) {
        BT_LAUNCH(c, sums, chunks, THREADS, room, s, raw);
    }
    if ((s.needs & CUDA_SAMPLE_TOPS) != 0) {
        find_cut(c, s, CUDA_CUT_TOPS);
        BT_LAUNCH(c, gather_tops, chunks, THREADS, 0, s);
    }
    if ((s.needs & CUDA_SAMPLE_EDITED) != 0) {
        BT_LAUNCH(c, edit, s.n, THREADS, 0, s);
        BT_LAUNCH(c, peaks, chunks, THREADS, room, s, after);
    }
    if ((s.needs & CUDA_SAMPLE_K) != 0) {
        find_cut(c, s, CUDA_CUT_K);
    }
    if ((s.needs & CUDA_SAMPLE_P) != 0) {
        BT_LAUNCH(c, sums, chunks, THREADS, room, s, kept);
        find_cut(c, s, CUDA_CUT_P);
    }
    if ((s.needs & CUDA_SAMPLE_RANDOM) != 0) {
        BT_LAUNCH(c, sums, chunks, THREADS, room, s, drawn);
    }
    BT_LAUNCH(c, finish, s.n, THREADS, room + 2 * sizeof(uint64_t), s);
}
