/* Reads quantization_config of config.json: which of the published formats a directory's matrices are in. Owns the
 * refusal of every variant that would be computed wrongly; which matrices are quantised at all is seen from the
 * tensors (quant_bind.c). */

#include <string.h>
#include "base/log.h"
#include "model/model_int.h"

#define QC "quantization_config."
#define CT QC "config_groups.group_0."

enum { GROUP_MAX = 1 << 20 };

/* Set to anything but null, false, 0, "" or an empty list. */
static void refuse_if_set(struct bt_hf *c, const char *key)
{
    if (bt_hf_has(c, key) && !bt_hf_is_empty(c, key)) {
        bt_hf_fail(c, BT_ERR_UNSUPPORTED, key, "is not supported");
    }
}

static bool str_is(struct bt_hf *c, const char *key, const char *def, const char *want)
{
    const char *s = bt_hf_str(c, key, def);

    return s != NULL && strcmp(s, want) == 0;
}

static uint32_t read_bits(struct bt_hf *c, const char *key, bool four_only)
{
    int64_t bits = bt_hf_require_int(c, key, 1, 64);

    if (bits != 4 && (bits != 8 || four_only)) {
        bt_hf_fail(c, BT_ERR_UNSUPPORTED, key, "%lld is not supported, only 4%s", (long long)bits,
                   four_only ? "" : " and 8");
    }
    return (uint32_t)bits;
}

/* -1: a whole row. */
static uint32_t read_group(struct bt_hf *c, const char *key, int64_t def)
{
    int64_t group = bt_hf_int(c, key, -1, GROUP_MAX, def);

    if (group <= 0) {
        return 0;
    }
    if (group % 32 != 0) {
        bt_hf_fail(c, BT_ERR_UNSUPPORTED, key, "%lld is not a multiple of 32", (long long)group);
    }
    return (uint32_t)group;
}

static void read_gptq(struct bt_hf *c, struct bt_quant_config *q)
{
    const char *format = bt_hf_str(c, QC "checkpoint_format", "gptq");

    q->kind = BT_QUANT_GPTQ;
    q->bits = read_bits(c, QC "bits", false);
    q->group = read_group(c, QC "group_size", -1);
    /* The first format stores zero points less one. */
    q->zero_added = strcmp(format, "gptq_v2") == 0 ? 0 : 1;
    if (q->zero_added == 1 && strcmp(format, "gptq") != 0) {
        bt_hf_fail(c, BT_ERR_UNSUPPORTED, QC "checkpoint_format", "\"%.64s\" is not supported",
                   format);
    }
    if (!str_is(c, QC "pack_dtype", "int32", "int32")) {
        bt_hf_fail(c, BT_ERR_UNSUPPORTED, QC "pack_dtype", "is not int32");
    }
    refuse_if_set(c, QC "is_marlin_format");
    refuse_if_set(c, QC "dynamic");
}

static void read_awq(struct bt_hf *c, struct bt_quant_config *q)
{
    const char *version = bt_hf_str(c, QC "version", "gemm");

    q->kind = BT_QUANT_AWQ;
    q->bits = read_bits(c, bt_hf_has(c, QC "w_bit") ? QC "w_bit" : QC "bits", true);
    q->group =
        read_group(c, bt_hf_has(c, QC "q_group_size") ? QC "q_group_size" : QC "group_size", 128);
    if (strcmp(version, "gemm") != 0 && strcmp(version, "GEMM") != 0) {
        bt_hf_fail(c, BT_ERR_UNSUPPORTED, QC "version", "\"%.64s\" is not supported, only gemm",
                   version);
    }
    if (!bt_hf_bool(c, QC "zero_point", true)) {
        bt_hf_fail(c, BT_ERR_UNSUPPORTED, QC "zero_point", "false is not supported");
    }
}

/* Activations that upstream rounds to 8 bits for each token are computed as they are here: nearer to the model that was
 * quantised. */
static void check_activations(struct bt_hf *c)
{
    if (bt_hf_is_object(c, CT "input_activations")) {
        if (!bt_hf_bool(c, CT "input_activations.dynamic", false) ||
            bt_hf_int(c, CT "input_activations.num_bits", 1, 64, 8) != 8 ||
            !str_is(c, CT "input_activations.type", "int", "int")) {
            bt_hf_fail(c, BT_ERR_UNSUPPORTED, CT "input_activations",
                       "only dynamic 8-bit integers are supported");
        }
    }
    refuse_if_set(c, CT "output_activations");
}

static void read_block(struct bt_hf *c, struct bt_quant_config *q, const char *key)
{
    if (bt_hf_array_size(c, key) != 2) {
        bt_hf_fail(c, BT_ERR_INVALID, key, "is not a pair of sizes");
        return;
    }
    q->block_rows = (uint32_t)bt_hf_array_int(c, key, 0, 1, GROUP_MAX);
    q->block_cols = (uint32_t)bt_hf_array_int(c, key, 1, 1, GROUP_MAX);
    if (q->block_cols % 32 != 0) {
        bt_hf_fail(c, BT_ERR_UNSUPPORTED, key, "%u columns are not a multiple of 32",
                   q->block_cols);
    }
}

/* weights of 8 bits of floating point, in compressed-tensors. */
static void read_float(struct bt_hf *c, struct bt_quant_config *q)
{
    const char *strategy = bt_hf_str(c, CT "weights.strategy", "tensor");

    q->kind = BT_QUANT_F8;
    q->bits = read_bits(c, CT "weights.num_bits", false);
    if (q->bits != 8) {
        bt_hf_fail(c, BT_ERR_UNSUPPORTED, CT "weights.num_bits", "is not 8");
    }
    if (!bt_hf_bool(c, CT "weights.symmetric", true)) {
        bt_hf_fail(c, BT_ERR_UNSUPPORTED, CT "weights.symmetric", "false is not supported");
    }
    if (strcmp(strategy, "block") == 0) {
        read_block(c, q, CT "weights.block_structure");
    } else if (strcmp(strategy, "group") == 0) {
        q->block_cols = read_group(c, CT "weights.group_size", 128);
        q->block_rows = q->block_cols != 0 ? 1 : 0;
    } else if (strcmp(strategy, "channel") != 0 && strcmp(strategy, "tensor") != 0) {
        bt_hf_fail(c, BT_ERR_UNSUPPORTED, CT "weights.strategy", "\"%.64s\" is not supported",
                   strategy);
    }
    if (bt_hf_is_object(c, CT "input_activations") &&
        (bt_hf_int(c, CT "input_activations.num_bits", 1, 64, 8) != 8 ||
         !str_is(c, CT "input_activations.type", "float", "float"))) {
        bt_hf_fail(c, BT_ERR_UNSUPPORTED, CT "input_activations",
                   "only 8-bit floating point is supported");
    }
    refuse_if_set(c, CT "output_activations");
}

/* Of vLLM and of Transformers ("fp8"), one scale or one for each block; of fbgemm, one for each row. */
static void read_fp8(struct bt_hf *c, struct bt_quant_config *q)
{
    const char *scheme = bt_hf_str(c, QC "activation_scheme", "dynamic");

    q->kind = BT_QUANT_F8;
    q->bits = 8;
    if (!str_is(c, QC "fmt", "e4m3", "e4m3")) {
        bt_hf_fail(c, BT_ERR_UNSUPPORTED, QC "fmt", "is not e4m3");
    }
    if (strcmp(scheme, "dynamic") != 0 && strcmp(scheme, "static") != 0) {
        bt_hf_fail(c, BT_ERR_UNSUPPORTED, QC "activation_scheme", "\"%.64s\" is not supported",
                   scheme);
    }
    if (bt_hf_has(c, QC "weight_block_size")) {
        read_block(c, q, QC "weight_block_size");
        q->scale_inv = true;
    }
}

static void read_compressed(struct bt_hf *c, struct bt_quant_config *q)
{
    const char *format = bt_hf_str(c, QC "format", "int-quantized");
    const char *strategy = bt_hf_str(c, CT "weights.strategy", "channel");
    bool naive = strcmp(format, "naive-quantized") == 0;
    bool packed = strcmp(format, "pack-quantized") == 0;

    q->kind = packed ? BT_QUANT_CT_PACKED : BT_QUANT_CT_INT;
    bool is_float = strcmp(format, "float-quantized") == 0 ||
                    (naive && str_is(c, CT "weights.type", "int", "float"));
    if (!packed && !is_float && !naive && strcmp(format, "int-quantized") != 0) {
        bt_hf_fail(c, BT_ERR_UNSUPPORTED, QC "format", "\"%.64s\" is not supported", format);
    }
    if (!bt_hf_is_object(c, QC "config_groups.group_0") ||
        bt_hf_has(c, QC "config_groups.group_1")) {
        bt_hf_fail(c, BT_ERR_UNSUPPORTED, QC "config_groups", "only one, group_0, is supported");
        return;
    }
    if (!str_is(c, QC "sparsity_config.format", "dense", "dense")) {
        refuse_if_set(c, QC "sparsity_config.format");
    }
    if (is_float) {
        if (!str_is(c, CT "weights.type", "float", "float")) {
            bt_hf_fail(c, BT_ERR_UNSUPPORTED, CT "weights.type", "is not float");
        }
        read_float(c, q);
        return;
    }
    q->bits = read_bits(c, CT "weights.num_bits", false);
    if (!packed && q->bits != 8) {
        bt_hf_fail(c, BT_ERR_UNSUPPORTED, CT "weights.num_bits", "is not 8");
    }
    if (!str_is(c, CT "weights.type", "int", "int")) {
        bt_hf_fail(c, BT_ERR_UNSUPPORTED, CT "weights.type", "is not int");
    }
    if (strcmp(strategy, "group") == 0) {
        q->group = read_group(c, CT "weights.group_size", 128);
    } else if (strcmp(strategy, "channel") != 0 && strcmp(strategy, "tensor") != 0) {
        bt_hf_fail(c, BT_ERR_UNSUPPORTED, CT "weights.strategy", "\"%.64s\" is not supported",
                   strategy);
    }
    if (packed && !bt_hf_bool(c, CT "weights.symmetric", true)) {
        bt_hf_fail(c, BT_ERR_UNSUPPORTED, CT "weights.symmetric",
                   "false is not supported for pack-quantized");
    }
    check_activations(c);
}

void bt_quant_config_read(struct bt_model *m, struct bt_hf *c)
{
    const char *method;

    if (!bt_hf_has(c, "quantization_config")) {
        return;
    }
    if (!bt_hf_is_object(c, "quantization_config")) {
        bt_hf_fail(c, BT_ERR_INVALID, "quantization_config", "not an object");
        return;
    }
    method = bt_hf_str(c, QC "quant_method", "");
    if (strcmp(method, "gptq") == 0) {
        read_gptq(c, &m->quant);
    } else if (strcmp(method, "awq") == 0) {
        read_awq(c, &m->quant);
    } else if (strcmp(method, "compressed-tensors") == 0) {
        read_compressed(c, &m->quant);
    } else if (strcmp(method, "fp8") == 0 || strcmp(method, "fbgemm_fp8") == 0) {
        read_fp8(c, &m->quant);
    } else {
        bt_hf_fail(c, BT_ERR_UNSUPPORTED, QC "quant_method", "\"%.64s\" is not supported", method);
    }
    if (bt_hf_has(c, QC "kv_cache_scheme") && !bt_hf_is_empty(c, QC "kv_cache_scheme")) {
        bt_log_info("model",
                    "%s: kv_cache_scheme and its scales are not used: keys and values are "
                    "kept as --kv-dtype says",
                    bt_hf_path(c));
    }
}
