/* Operations in which the lanes of a warp meet: each gives what it has, the last one to come does the work for all. Layouts
 * of matrices are those of the PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type" and "ldmatrix". */

#include "kernels/cuda/emulation/emu_fibers_int.h"

#include <string.h>
#include "base/float16.h"

typedef void meet_fn(struct emu_meeting *m);

/* Returns when all lanes have come; what they gave and got stays until this lane's next call but one. */
static const struct emu_meeting *meet(enum emu_warp_op op, const uint32_t *in, uint32_t n_in,
                                      meet_fn *work)
{
    uint32_t t = emu_now->running;
    struct emu_fiber *f = &emu_now->threads[t];
    struct emu_warp *w = &emu_now->warps[t / EMU_WARP];
    uint64_t phase = w->phase;
    struct emu_meeting *m = &w->meetings[phase % 2];

    if (w->arrived > 0 && w->op != op) {
        emu_broken(t, "meets other lanes of its warp in another operation than theirs");
    }
    w->op = op;
    memcpy(m->in[t % EMU_WARP], in, n_in * sizeof(*in));
    if (++w->arrived == EMU_WARP) {
        w->arrived = 0;
        w->phase++;
        work(m);
        return m;
    }
    f->phase = phase;
    f->state = EMU_AT_WARP;
    emu_give_way();
    return m;
}

static void nothing(struct emu_meeting *m)
{
    (void)m;
}

void emu_warp_sync(void)
{
    const uint32_t in[1] = {0};
    struct emu_warp *w = &emu_now->warps[emu_now->running / EMU_WARP];
    bool last = w->arrived == EMU_WARP - 1;

    if (last) {
        w->syncs++; /* before any lane goes on */
    }
    (void)meet(EMU_SYNC, in, 1, nothing);
}

static void shuffle(struct emu_meeting *m)
{
    for (uint32_t l = 0; l < EMU_WARP; l++) {
        m->out[l][0] = m->in[(l ^ m->in[l][1]) % EMU_WARP][0];
    }
}

uint32_t emu_shuffle_xor(uint32_t value, uint32_t mask)
{
    const uint32_t in[2] = {value, mask};
    uint32_t lane = emu_now->running % EMU_WARP;

    return meet(EMU_SHUFFLE, in, 2, shuffle)->out[lane][0];
}

static void vote(struct emu_meeting *m)
{
    uint32_t any = 0;

    for (uint32_t l = 0; l < EMU_WARP; l++) {
        any |= m->in[l][0];
    }
    m->out[0][0] = any;
}

bool emu_vote_any(bool yes)
{
    const uint32_t in[1] = {yes};

    return meet(EMU_VOTE, in, 1, vote)->out[0][0] != 0;
}

void emu_load_matrices(const void *row, bool transposed, uint32_t out[4])
{
    uint32_t in[2], lane = emu_now->running % EMU_WARP;
    uint64_t at = (uint64_t)(uintptr_t)row;

    in[0] = (uint32_t)at;
    in[1] = (uint32_t)(at >> 32);
    const struct emu_meeting *m = meet(transposed ? EMU_LOAD_TRANSPOSED : EMU_LOAD, in, 2,
                                       nothing); /* each lane reads its words itself */
    for (uint32_t i = 0; i < 4; i++) {
        uint16_t half[2];
        for (uint32_t j = 0; j < 2; j++) {
            uint32_t r = transposed ? lane % 4 * 2 + j : lane / 4,
                     c = transposed ? lane / 4 : lane % 4 * 2 + j;
            const uint32_t *a = m->in[8 * i + r];
            const uint16_t *p = (const uint16_t *)(uintptr_t)(a[0] | (uint64_t)a[1] << 32);
            if ((uintptr_t)p % 16 != 0) {
                emu_broken(emu_now->running, "loads a matrix row that is not 16-byte aligned");
            }
            emu_shared_read(p + c / 2 * 2, 4);
            half[j] = p[c];
        }
        out[i] = half[0] | (uint32_t)half[1] << 16;
    }
}

static float value_of(uint32_t pair, uint32_t i, bool bf16)
{
    uint16_t h = (uint16_t)(pair >> 16 * i);

    return bf16 ? bt_bf16_to_f32(h) : bt_f16_to_f32(h);
}

/* One chain of f32 over k, for each of 16 x 8. A device's order and rounding inside of one operation are its own. */
static void multiply(struct emu_meeting *m, bool bf16)
{
    float a[16][16], b[16][8], c[16][8];

    for (uint32_t l = 0; l < EMU_WARP; l++) {
        uint32_t g = l / 4, t = l % 4;
        for (uint32_t i = 0; i < 8; i++) {
            a[g + i / 2 % 2 * 8][2 * t + i % 2 + i / 4 * 8] =
                value_of(m->in[l][i / 2], i % 2, bf16);
        }
        for (uint32_t i = 0; i < 4; i++) {
            b[2 * t + i % 2 + i / 2 * 8][g] = value_of(m->in[l][4 + i / 2], i % 2, bf16);
            memcpy(&c[g + i / 2 * 8][2 * t + i % 2], &m->in[l][6 + i], sizeof(float));
        }
    }
    for (uint32_t r = 0; r < 16; r++) {
        for (uint32_t k = 0; k < 16; k++) {
            for (uint32_t n = 0; n < 8; n++) {
                c[r][n] += a[r][k] * b[k][n];
            }
        }
    }
    for (uint32_t l = 0; l < EMU_WARP; l++) {
        for (uint32_t i = 0; i < 4; i++) {
            memcpy(&m->out[l][i], &c[l / 4 + i / 2 * 8][2 * (l % 4) + i % 2], sizeof(float));
        }
    }
}

static void multiply_bf16(struct emu_meeting *m)
{
    multiply(m, true);
}

static void multiply_f16(struct emu_meeting *m)
{
    multiply(m, false);
}

void emu_multiply(const uint32_t a[4], const uint32_t b[2], float c[4], bool bf16)
{
    uint32_t in[EMU_LANE_WORDS], lane = emu_now->running % EMU_WARP;

    memcpy(in, a, 4 * sizeof(uint32_t));
    memcpy(in + 4, b, 2 * sizeof(uint32_t));
    memcpy(in + 6, c, 4 * sizeof(float));
    const struct emu_meeting *m = meet(bf16 ? EMU_MULTIPLY_BF16 : EMU_MULTIPLY_F16, in,
                                       EMU_LANE_WORDS, bf16 ? multiply_bf16 : multiply_f16);
    memcpy(c, m->out[lane], 4 * sizeof(float));
}
