"""The gated delta rule and Mamba-2 (gated_delta.py and selective_state.py of plugins/recurrence/) over many tokens of a
sequence, 64 at a time: https://arxiv.org/abs/2412.06464, https://arxiv.org/abs/2405.21060. recurrence.cuh takes single
tokens.

A chunk is 64 positions of a sequence from a multiple of 64 on, or those of them that the step has. With S the state
before it, g the decay of a token, D[i,j] the product of g over tokens j + 1 to i, and D[i,-1] that from the chunk's
start on, the tokens' updates U and results are, of the gated delta rule,

    A[i,j] = b[i] D[i,j] k[i]·k[j] where j < i          U = (1 + A)⁻¹ b (V - D[:,-1] K S)
    P[i,j] = D[i,j] q[i]·k[j] where j ≤ i               out = P U + D[:,-1] Q S;  S ← D[63,-1] S + Kᵀ D[63,:] U

and of Mamba-2, U = dt V, and skip · V is added to the results. `prepare_chunks` computes what does not depend on S,
of all chunks at once; `scan_chunks` goes from chunk to chunk. Sums are in f32, and products too: three of TF32 each.

What the first leaves for the second is a row of floats for each token i and head: P[i,:]; (1 + A)⁻¹ b of the gated
delta rule; four factors, of K S, of Q S, of Kᵀ, and D[i,-1]. Mamba-2 has dt in place of the first of them.
"""

import triton
import triton.language as tl

CHUNK = tl.constexpr(64)
SLICE = tl.constexpr(16)  # columns of queries and keys that are multiplied together
SEARCHED = tl.constexpr(128)  # sequences that are looked at together
FACTORS = tl.constexpr(4)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def product(x, y, onto):
    return tl.dot(x, y, onto, input_precision="tf32x3")


@triton.jit
def chunk_of(index, sequences, query_start, kv_len):
    """The sequence that has chunk `index` of the step, and which of its chunks that is; `sequences` if there is none.

    Sequences with one token in the step have no chunks.
    """
    sequence, chunk, before = 0, index, 0
    for begin in range(0, sequences, SEARCHED):
        places = begin + tl.arange(0, SEARCHED)
        there = places < sequences
        tokens = tl.load(query_start + places + 1, there, 0) - tl.load(query_start + places, there, 0)
        end = tl.load(kv_len + places, there, 0)
        counts = tl.where(tokens > 1, tl.cdiv(end, CHUNK) - (end - tokens) // CHUNK, 0)
        passed = there & (before + tl.cumsum(counts, axis=0) <= index)
        sequence += tl.sum(passed.to(tl.int32), axis=0)
        chunk -= tl.sum(tl.where(passed, counts, 0), axis=0)
        before += tl.sum(counts, axis=0)
    return sequence, chunk


@triton.jit
def products_of_rows(
    x, y, token, there, first_column, X_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, COLUMNS: tl.constexpr
):
    """x yᵀ [CHUNK, CHUNK] of a head of those tokens that are there, and the squares of the rows of x."""
    products, squares = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK,), tl.float32)
    for begin in range(0, COLUMNS, SLICE):
        dim = begin + tl.arange(0, SLICE)
        mask, columns = there[:, None] & (dim < COLUMNS)[None, :], first_column + dim[None, :]
        of_x = tl.load(x + token[:, None] * X_STRIDE + columns, mask, 0.0)
        of_y = tl.load(y + token[:, None] * Y_STRIDE + columns, mask, 0.0)
        squares += tl.sum(of_x * of_x, axis=1)
        products = product(of_x, tl.trans(of_y), products)
    return products, squares


@triton.jit
def prepare_chunks(
    sizes,  # of the step: tokens, sequences, ...
    query,  # [tokens, key heads · K] f32, as key
    key,
    decay,  # [tokens, heads] f32, as beta
    beta,
    log_a,  # [heads] f32, as dt_bias
    dt_bias,
    query_start,
    kv_len,
    chunks,  # [tokens, heads · WIDTH] f32
    DELTA: tl.constexpr,  # the gated delta rule, and not Mamba-2
    SHARED: tl.constexpr,  # heads that have queries and keys in common
    K: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,  # elements from one row to the next
    KEY_STRIDE: tl.constexpr,
    DECAY_STRIDE: tl.constexpr,
    BETA_STRIDE: tl.constexpr,
    CHUNKS_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    EPSILON: tl.constexpr,
    DT_MIN: tl.constexpr,
):
    """A program is a head of a chunk. Grid: at least as many as there are chunks, and heads."""
    sequences = tl.load(sizes + 1)
    sequence, chunk = chunk_of(tl.program_id(0), sequences, query_start, kv_len)
    if sequence >= sequences:
        return
    head = tl.program_id(1)
    begin, end = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
    first = tl.load(kv_len + sequence) - (end - begin)  # position of token `begin`
    start = begin - first % CHUNK + chunk * CHUNK
    place = tl.arange(0, CHUNK)
    token = start + place
    there = (token >= begin) & (token < end)
    token = token.to(tl.int64)
    x = tl.load(decay + token * DECAY_STRIDE + head, there, 0.0) + tl.load(dt_bias + head)
    power = tl.exp2(x * LOG2E)
    # log(1 + e): where e is small, its series; where it is large, x.
    dt = tl.where(x > 20.0, x, tl.where(power < 1e-4, power - 0.5 * power * power, tl.log2(1.0 + power) / LOG2E))
    if not DELTA:
        dt = tl.maximum(dt, DT_MIN)
    rate = tl.exp2(tl.load(log_a + head) * LOG2E)
    log_g = tl.where(there, -rate * dt * LOG2E, 0.0)
    # Each sum of its own, since differences of sums from the start on would cancel.
    earlier = place[:, None] > place[None, :]
    sums = tl.cumsum(tl.where(earlier, log_g[:, None], 0.0), axis=0)
    within = tl.where(place[:, None] >= place[None, :], tl.exp2(sums), 0.0)  # D
    from_start = tl.exp2(tl.cumsum(log_g, axis=0))
    to_end = tl.exp2(tl.sum(tl.where(earlier, log_g[:, None], 0.0), axis=0))

    row = chunks + token * CHUNKS_STRIDE + head * WIDTH
    cells = row[:, None] + place[None, :]
    first_column = head // SHARED * K
    of_held, of_query, of_key = dt, from_start, to_end
    if DELTA:
        one = tl.where(there, EPSILON, 1.0)
        shared, squares = products_of_rows(key, key, token, there, first_column, KEY_STRIDE, KEY_STRIDE, K)
        k_length = 1.0 / tl.sqrt(squares + one)
        share = tl.sigmoid(tl.load(beta + token * BETA_STRIDE + head, there, 0.0))
        a = (share * k_length)[:, None] * within * shared * k_length[None, :]
        tl.store(cells, tl.where(earlier, a, 0.0), there[:, None])
        tl.debug_barrier()
        inverse = tl.where(place[:, None] == place[None, :], 1.0, 0.0)
        for i in range(tl.maximum(begin - start, 0) + 1, tl.minimum(end - start, CHUNK)):
            a_row = tl.load(chunks + (start + i).to(tl.int64) * CHUNKS_STRIDE + head * WIDTH + place)
            update = tl.sum(a_row[:, None] * inverse, axis=0)
            inverse -= tl.where(place[:, None] == i, update[None, :], 0.0)
        tl.store(cells + CHUNK, inverse * share[None, :], there[:, None])
        tl.debug_barrier()
        scores, squares = products_of_rows(query, key, token, there, first_column, QUERY_STRIDE, KEY_STRIDE, K)
        q_length = SCALE / tl.sqrt(squares + one)
        scores *= q_length[:, None] * k_length[None, :]
        of_held, of_query, of_key = from_start * k_length, from_start * q_length, to_end * k_length
    else:
        scores, _ = products_of_rows(query, key, token, there, first_column, QUERY_STRIDE, KEY_STRIDE, K)
    tl.store(cells, within * scores, there[:, None])
    factors = row + WIDTH - FACTORS
    tl.store(factors, of_held, there)
    tl.store(factors + 1, of_query, there)
    tl.store(factors + 2, of_key, there)
    tl.store(factors + 3, from_start, there)


@triton.jit
def scan_chunks(
    sizes,
    query,
    key,
    value,  # [tokens, heads · V] f32, as out
    skip,  # [heads] f32, for Mamba-2
    state,  # [slots, heads, K, V] f32
    query_start,
    kv_len,
    slots,
    chunks,
    out,
    DELTA: tl.constexpr,
    SHARED: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,  # f32 from one slot to the next
    CHUNKS_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr,  # columns of a state that a program has
):
    """A program has columns of a head of a sequence. Grid: groups of columns, heads, sequences."""
    sequence, head = tl.program_id(2), tl.program_id(1)
    if sequence >= tl.load(sizes + 1):
        return
    begin, end = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
    if end - begin <= 1:
        return
    first = tl.load(kv_len + sequence) - (end - begin)
    place, dim = tl.arange(0, CHUNK), tl.arange(0, SLICE)
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    own = state + tl.load(slots + sequence).to(tl.int64) * SLOT_STRIDE + head * K * V + column[None, :]
    queries, keys = query + head // SHARED * K, key + head // SHARED * K
    for start in range(begin - first % CHUNK, end, CHUNK):
        token = start + place
        there = (token >= begin) & (token < end)
        token = token.to(tl.int64)
        of_keys = tl.zeros((CHUNK, BLOCK_V), tl.float32)  # K S, and Q S
        of_queries = tl.zeros((CHUNK, BLOCK_V), tl.float32)
        for row in range(0, K, SLICE):
            rows = row + dim
            held = tl.load(own + rows[:, None] * V, (rows < K)[:, None] & (column < V)[None, :], 0.0)
            mask = there[:, None] & (rows < K)[None, :]
            q = tl.load(queries + token[:, None] * QUERY_STRIDE + rows[None, :], mask, 0.0)
            of_queries = product(q, held, of_queries)
            if DELTA:
                k = tl.load(keys + token[:, None] * KEY_STRIDE + rows[None, :], mask, 0.0)
                of_keys = product(k, held, of_keys)
        in_rows = there[:, None] & (column < V)[None, :]
        v = tl.load(value + token[:, None] * VALUE_STRIDE + head * V + column[None, :], in_rows, 0.0)
        left = chunks + token * CHUNKS_STRIDE + head * WIDTH
        cells, factors = left[:, None] + place[None, :], left + WIDTH - FACTORS
        update = tl.load(factors, there, 0.0)[:, None]
        if DELTA:
            inverse = tl.load(cells + CHUNK, there[:, None], 0.0)
            update = product(inverse, v - update * of_keys, tl.zeros((CHUNK, BLOCK_V), tl.float32))
        else:
            update *= v
        result = of_queries * tl.load(factors + 1, there, 0.0)[:, None]
        result = product(tl.load(cells, there[:, None], 0.0), update, result)
        if not DELTA:
            result += tl.load(skip + head) * v
        tl.store(out + token[:, None] * OUT_STRIDE + head * V + column[None, :], result, in_rows)
        update *= tl.load(factors + 2, there, 0.0)[:, None]
        last = tl.minimum(start + CHUNK, end).to(tl.int64) - 1
        kept = tl.load(chunks + last * CHUNKS_STRIDE + head * WIDTH + WIDTH - 1)
        tl.debug_barrier()
        for row in range(0, K, SLICE):
            rows = row + dim
            in_state = (rows < K)[:, None] & (column < V)[None, :]
            held = tl.load(own + rows[:, None] * V, in_state, 0.0)
            mask = (rows < K)[:, None] & there[None, :]
            k = tl.load(keys + token[None, :] * KEY_STRIDE + rows[:, None], mask, 0.0)
            tl.store(own + rows[:, None] * V, product(k, update, kept * held), in_state)
        tl.debug_barrier()
