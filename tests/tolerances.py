"""Every tolerance of the tests, with its reason."""

# Largest error of a GEMM with exact (bf16, int8) inputs, over the largest result. K ≤ 1000 products summed in one
# fp32 chain: the error of a sum is about sqrt(K) * 2^-24 of its size, and results at 4 sigma are the largest.
GEMM_F32 = 2e-6

# The same with the result rounded to bf16, which has 8 bits: half a unit of the last is at most 2^-8 of a value.
GEMM_BF16_OUT = 2.0**-8 + 2e-6

# FP8 x FP8 with Hopper's wgmma: of the 32 products of a step and the sum before, what lies below the 14 bits of the
# largest is cut off, as we read of it, and a run has four steps. At most 3.7e-4 over all cases in emulation.
GEMM_E4M3 = 1e-3

# The same where nothing is negative, so that all cuts add up: 1.2e-3 in emulation, and 9.8e-3 as one sum of 1030.
GEMM_E4M3_POSITIVE = 2e-3

# Largest difference of logits (about ±9) between a dense graph in onnxruntime and transformers, both in fp32 on the
# same weights. Three layers of sums of a hundred products or so, in different orders: at most 8e-6 over all cases. The
# smallest fault that we tried, a norm's epsilon of 1e-5 in place of 1e-6, is 5e-4.
DENSE_LOGITS = 2e-5

# The same with layers that carry a state, from token to token here and in chunks there; measured 2.1e-5.
HYBRID_LOGITS = 1e-4

# The same of a model with a merged adapter of large random numbers, against PEFT, which adds the products of its
# factors to activations: states amplify the different order of sums. Measured 1.3e-4; a factor of 1.001 is 9e-2.
MERGED_HYBRID_LOGITS = 5e-4

# By how much the logits (about ±9) of an engine's draft token may fall short of the largest, in fp32: of those that
# are nearly the same, BFLOAT16 chooses; at most 0.13. With the hidden states of one token before, it is 6.
DRAFT_LOGITS = 0.3

# The same for a graph exported in fp16: 11 bits, so 5e-4 of a value at each of some thirty roundings; measured 6e-3.
DENSE_LOGITS_FP16 = 2e-2

# Largest error of an fp32 RMS norm, over the value or 1. Squares summed in 64 chains, one root, one division and two
# products: a few times 2^-24, on values of at most about 12.
NORM_F32 = 2e-6

# The same of a layer norm, on values of at most about 20 before the mean is taken off, which is off by a few 2^-24.
LAYER_NORM_F32 = 5e-6

# Rounding to bf16 (8 bits), and a little for the fp32 value that was rounded.
BF16_ROUNDING = 2.0**-8 * 1.001

# Largest relative error of cap * tanh(x / cap): a polynomial or an exponential of 2 units, and two roundings.
SOFTCAP_F32 = 6e-7

# Largest error of silu and gelu in fp32, over the value or 1e-3: exponential (2 units, at an argument that is itself
# rounded: |u| * 2^-24 more), sum, division.
TANH_GELU_SILU = 1e-5

# Largest error of attention with fp32 results, over the largest |V|. Weights are rounded to bf16 (2^-9 of each on
# average at most, random signs, and they still add up to one); scores of bf16 queries are off by 1e-6 or so. Over int8
# KV (the rounding of Q, K and V is not counted), weights have 14 bits of their split's largest, and scores are exact
# integers times three scales: at most 2^-15 of V a position, with random signs; measured 1.9e-4 at most. Over FP8 KV,
# weights times the scale of V are rounded to bf16, and the sum is of the weights before that: 2^-8 where one position
# has all the weight; measured 2.8e-3 at most. KV of 4 bits is bf16 again before anything is multiplied.
ATTENTION = {"bf16": 2.0**-9, "i8": 3e-4, "e4m3": 2.0**-8, "u4": 2.0**-9}

# The same on CUDA, where queries stay bf16, and weights are rounded to bf16 after the scale of V with both kinds of
# codes.
CUDA_ATTENTION = {"bf16": 2.0**-9, "i8": 2.0**-8, "e4m3": 2.0**-8, "u4": 2.0**-9}

# The same where all visible positions weigh exactly 1: sums of at most 600 bf16 values and one division; or of weights
# of 14 bits, which are then the scales of V; or of those scales in bf16.
ATTENTION_UNIFORM = {"bf16": 5e-7, "i8": 2.0**-16, "e4m3": 2.0**-8, "u4": 5e-7}

# Largest error of rope's cos and sin, over their scale: cosine and scale rounded to fp32 (2^-25 each), and their
# product (at most 2^-24).
ROPE_TABLE = 2.0**-23

# How far a sampled token's weight / E may lie below the largest: both are fp32, and within 2 units (2^-23).
SAMPLED_SCORE = 1e-6

# Largest error of a log-probability (about -15 … 0): rounded to fp32 (2^-21), over a sum of weights as above.
LOGPROB = 1e-6

# relative_error of all logits of a text, engine against transformers in fp32 on the same bf16-exact weights. bf16
# activations have a relative error of 2^-9; a few dozen roundings in tiny random models end at 3.5e-5 at most. A wrong
# rope, mask or layout gives 0.1 and more. int8 rows add 1/254 of each row's largest weight: 5.2e-4 at most. FP8 has 4
# bits of precision and adds 2^-4 of a weight at most: 4.1e-3. Codes of 4 bits are off by half of 1/8 of a run's largest
# weight: 0.062 at most; FP4 numbers by up to a sixth of themselves: 0.125 at most.
ENGINE_LOGITS = {"bf16": 1e-4, "int8-wo": 1e-3, "w8a8": 2e-3, "int4-rtn": 0.12, "mxfp4": 0.2, "fp8": 1e-2}

# The same of what tiny embedding models give.
EMBEDDINGS = {"bf16": 2e-4, "w8a8": 5e-3}

# 1 less the cosine of an engine's vector of all-MiniLM-L6-v2 and transformers' in fp32, whose weights are not rounded:
# 7e-5 and 2.5e-3 measured in bf16 and w8a8, on texts of 1 to 256 tokens; the mean of int4-rtn is 0.055.
MINILM = {"bf16": 2e-4, "int8-wo": 5e-3, "w8a8": 8e-3, "int4-rtn": 0.2}

# Scores of a tiny cross-encoder, from 0 to 1, in bf16: measured 4e-4 at most.
SCORES = 2e-3

# The same of hybrids: what a recurrence holds is as far off as what it has seen. Over 1 to 3000 tokens, which
# it does not depend on, measured 1.1e-3, and 8e-3.
HYBRID_ENGINE_LOGITS = {"bf16": 2e-3, "w8a8": 2e-2}

# The same with K, V and the queries of attention in int8, or K and V in FP8, against KV in bf16. A row of a tiny model
# has 16 numbers, each off by 1/254 of the largest, or 2^-4 of itself, at most: measured 1.1e-4, 1.2e-3. Codes
# of 4 bits are off by 1/30 of a group's span: 1.3e-2.
KV_LOGITS = {"i8": 5e-4, "e4m3": 5e-3, "u4": 3e-2}

# Logits. Where fp32's best token leads by more than this, bf16 arithmetic must choose it, too (from the specification).
CLEAR_MARGIN = 0.25
HYBRID_CLEAR_MARGIN = 0.5  # of hybrids, whose logits are off by as much more

# Mean KL to fp32 in nats, SmolLM2: measured over 10 texts, of which the test takes 5, 0.0046 with int8 weights, 0.0074
# if activations are int8 as well, in runs of 32 (0.0367 with one scale a token, 20 texts), 0.332 with 4 bits, 0.577
# with FP4 (0.668 of the 5), 0.0175 with FP8 weights, 0.0202 with scales by block (0.0220 of the 5).
SMOLLM2_KL = {"int8-wo": 0.01, "w8a8": 0.012, "int4-rtn": 0.4, "mxfp4": 0.75, "fp8": 0.03, "fp8 block": 0.03}

# The same with bf16 weights, by what the KV cache holds: measured 0.0017, 0.0048, 0.047, against 0.00016 with bf16 KV.
# And at how many positions the same token is the likeliest, at least: with int4 KV measured 0.878.
SMOLLM2_KV_KL = {"int8": 0.003, "fp8": 0.008, "int4": 0.06}
SMOLLM2_KV_TOP1 = {"int8": 0.95, "fp8": 0.95, "int4": 0.86}

# At how many of the same positions the same token is the likeliest, at least: measured 0.967, 0.961, 0.725, 0.680
# (0.659 of the 5, whose text is not the same on every instruction set), 0.914 and 0.933.
SMOLLM2_TOP1 = {"int8-wo": 0.95, "w8a8": 0.92, "int4-rtn": 0.65, "mxfp4": 0.62, "fp8": 0.9, "fp8 block": 0.9}

# relative_error of logits, packed sequences over KV pools against each by itself, both in onnxruntime with the same
# roundings to bf16. Sums in another order may turn a rounding (2^-8 of one activation); measured 1e-15 where none does,
# and 1.2e-6 at most (fp8 weights, onnxruntime's AVX2 kernels on a Zen 3). Faults give more than ten
# times this. Where activations are int8, it may turn a code, which is 1/127 of a row's largest: 1.0e-5 measured.
RAGGED_LOGITS = 1.3e-6
RAGGED_INT8_LOGITS = 1e-4

# Largest error of an op's reference in onnxruntime, in fp32 on a handful of numbers, over the largest result: some
# roundings of 2^-24, and exponentials of 2 units; measured 2e-7.
REFERENCE_F32 = 1e-6

# Largest error of a recurrence and its state over the largest result, in fp32 after some ten tokens: sums of up to 128
# products, and what tokens before have left of such errors; measured 8e-7. In chunks, of the token-by-token kernel's
# result: measured 1.2e-6.
RECURRENCE_F32 = 3e-6

# Mean KL (nats) between a tiny model and its rescaled copy, in float64: each weight is rounded to bf16 once more, which
# changes logits as bf16 weights do; measured 1.4e-6. A scale that is forgotten in one place gives 7e-4 or more.
RESCALED_KL = 2e-5

# A weight of a quantized checkpoint against the value that its producer restores, relative to it: the same code times
# a scale that is rounded to bf16, and the producer's own rounding of the product to bf16 or fp16.
STORED_SCALES = 2.0**-8 * 1.01

# relative_error of all logits, engine against transformers on what a quantized checkpoint stands for: the arithmetic of
# ENGINE_LOGITS without its rounding of weights. Activations are bf16 (6.2e-5 measured at most), or int8 with a scale
# for each run of columns (4.2e-4) or each token (3.9e-4).
STORED_LOGITS = {"bf16": 1e-4, "int4": 1e-3, "int8": 1e-3}

# Nats, the quality gate's KL and losses against double precision: logits around ±40 in fp32, the largest of which is
# subtracted (2^-19 of error each at most, with random signs), summed in double precision; measured 3e-7.
GATE_NATS = 1e-6

# relative_error of all logits, an engine against its own graph in onnxruntime: the same roundings in the same places,
# but sums in another order and attention's weights in bf16, which turn some of them: measured 1.9e-5 at most with bf16
# activations, and 2.0e-4 with int8. One row's scale doubled gives 1.6e-3. With KV in FP8, weights are off by 2^-8 at
# most and no longer add up to one (ATTENTION): 8.5e-5; with KV in int8 1.5e-5;
# in int4 a rounding that turns is a fifteenth of a group's span: 3.8e-4. Latent attention gives vectors that are yet to
# be expanded to values: 5.4e-5 on the CPU, and 5.0e-5 on the emulated GPU, which differ by 8e-6.
ENGINE_GRAPH = {
    "bf16": 5e-5,
    "latent": 1.5e-4,
    "int8": 5e-4,
    "fp8 KV": 2e-4,
    "int8 KV": 5e-5,
    "int4 KV": 3e-3,
}

# Activations in FP8, on GPUs, turn by a sixteenth of themselves, and the next layer's with them: some models are 50
# times as sensitive as others. So the bound is a share of what the graph itself makes of attention that is off by a
# rounding to BF16: engines of 21 families gave 0.5 to 1.24 of it, and 0 in a text's first row, which attends to itself.
ENGINE_GRAPH_FP8 = 1.5

# An engine on the emulated GPU against the CPU, where activations or KV have another precision (bf16 in place of int8
# for 4-bit weights, scales of tokens in place of groups): measured 3.3e-4 at most, of w8a8; of fp8, whose activations
# are bf16 on the CPU, 4.5e-3, and 6.5e-3 with latent attention.
GPU_CPU = {"bf16": 1e-3, "int8": 1e-3, "fp8": 6e-3, "fp8 latent": 1.3e-2}
HYBRID_GPU_CPU = 4e-3  # of models with states, which keep such differences: measured 1.9e-3 with int8 activations

# The same of SmolLM2, which has ten times as many layers to turn roundings in: 7.5e-5 with fp8 and bf16 activations;
# with int8 activations 2.7e-4 for int8 weights, 4.8e-4 for int4, 5.4e-4 of it without calibration, and 7.6e-4 for FP4
# numbers, whose steps are the largest, on VNNI and AVX2 alike.
ENGINE_GRAPH_SMOLLM2 = {"bf16": 1.2e-4, "int8": 5e-4, "int4-rtn": 8e-4, "mxfp4": 1.2e-3}

# Difference of log-probabilities a token, of an engine with activations and KV in bf16 to transformers in fp32 on the
# same weights, over 12 tokens of a tiny model whose logits are about ±9; measured 3.2e-3.
BEAM_SCORE = 1e-2

# Nats, log-probability of the few tokens of a choice that lm-eval gets from SmolLM2 in int8-wo, against transformers
# in fp32 on the source's weights; measured 0.38, of a sum that is -7. A token too many or too few is more than 1.
LM_EVAL_NATS = 0.6

# Relative error of a mean wait of 60,000 simulated requests against the formula of the queue: waits of neighbours are
# correlated, so the standard deviation over seeds is about 1.5 %.
SIMULATED_WAIT = 0.05

# Relative difference of computed prompt tokens between real replicas and simulated ones: the latter find prefixes in
# keys of 128 bytes, here 32 tokens, and the former in blocks of 16, of turns of 128 tokens.
SIMULATED_TOKENS = 0.1

# Largest difference of a prompt's log-probabilities (about -15 … 0) between an engine with an adapter of large random
# numbers, and PEFT's model in fp32; the base has at most half of it. With bf16, A and B are rounded to 8 bits; what an
# adapter adds is computed from activations as the base has them, int8 or bf16 (on GPUs also fp8, and w8a8 has one scale
# for a token). A factor of 1.05 on B is 0.2.
ADAPTED_LOGPROBS = {"bf16": 0.08, "fp8": 0.5, "int8-wo": 0.2, "int8-sq": 0.2, "w8a8": 0.3, "int4-rtn": 1.2}
