/* The numerics classes of all backends, and what the rest of the project must know of each: one table. Makes no context. */

#include <string.h>
#include "kernels/kv_type.h"
#include "kernels/open.h"

const char *const bt_k_all_classes[] = {"cpu-f32",          "cpu-int8",       "cpu-bf16",
                                        "cuda-f32",         "cuda-bf16",      "cuda-cublas",
                                        "cuda-cublas-tf32", "cuda-cublas-fp8"};

struct class
{
    bool one_answer;
    enum bt_dtype
        kv; /* the smallest pages that change no answer, or those that its attention is made for */
};

/* In the same order. */
static const struct class classes[] = {
    {true, BT_DTYPE_F32},  {true, BT_DTYPE_BF16}, {true, BT_DTYPE_BF16}, {true, BT_DTYPE_F32},
    {true, BT_DTYPE_BF16}, {false, BT_DTYPE_F32}, {false, BT_DTYPE_F32}, {false, BT_DTYPE_F32}};

#define N_CLASSES (sizeof(bt_k_all_classes) / sizeof(bt_k_all_classes[0]))
_Static_assert(N_CLASSES == sizeof(classes) / sizeof(classes[0]), "one for each");

/* A context's class may be one of these for one kind of device, with the device's name behind it. NULL: none of ours. */
static const struct class *class_of(const char *numerics)
{
    const struct class *found = NULL;
    size_t longest = 0;

    for (size_t i = 0; i < N_CLASSES; i++) {
        const size_t n = strlen(bt_k_all_classes[i]);

        if (n > longest && strncmp(numerics, bt_k_all_classes[i], n) == 0 &&
            (numerics[n] == '\0' || numerics[n] == '-')) {
            found = &classes[i];
            longest = n;
        }
    }
    return found;
}

bool bt_k_one_answer(const char *numerics)
{
    const struct class *c = numerics != NULL ? class_of(numerics) : NULL;

    return c == NULL || c->one_answer;
}

const enum bt_dtype bt_k_kv_types[] = {BT_DTYPE_AUTO, BT_DTYPE_F32, BT_DTYPE_F16,
                                       BT_DTYPE_BF16, BT_DTYPE_F8,  BT_DTYPE_F8};

enum bt_dtype bt_k_kv_type(enum bt_dtype choice, const char *numerics)
{
    const struct class *c = class_of(numerics);

    return choice != BT_DTYPE_AUTO ? choice : c != NULL ? c->kv : BT_DTYPE_F32;
}
