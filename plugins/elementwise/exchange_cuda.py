"""GPU launches around an exchange between ranks (all_gather@1): csrc/cuda/exchange.cuh.

A rank copies what it has computed to a buffer of its own, which the others get, and what it has got from each of them
to where it belongs. So whatever carries the bytes sees buffers without gaps.
"""

from math import gcd

from enginewright.dtypes import DTYPES
from enginewright.plan import Launch
from enginewright.plugins.kernel import ONE, Call, blocks, expression

EXCHANGE_SOURCES = {"copy_rows": "exchange.cuh"}
THREADS = 128
WORD_BYTES = 16  # most bytes that a thread copies at once


def copy_launch(call: Call, source: str, to: str) -> Launch:
    """Makes the launch that copies rows.

    Args:
        call: the exchange.
        source: role of the rows that are read.
        to: role of where they are written, with zeros up to its `padded`.
    """
    x, y = call.operands[source], call.operands[to]
    item = DTYPES[x.dtype].bytes
    padded = y.columns if y.dtype == "f32" else y.padded
    word = WORD_BYTES
    for elements in (x.columns, padded, x.stride, y.stride, x.column, y.column):
        word = gcd(word, elements * item)
    rows, copies = call.copies(source)
    kernel = expression(
        "copy_rows",
        "CopyRows",
        rows=rows,
        copies=copies,
        word=word,
        columns=x.columns * item // word,
        padded=padded * item // word,
        from_stride=x.stride * item // word,
        to_stride=y.stride * item // word,
    )
    return Launch(kernel, (source, to), (blocks(x.rows), ONE, ONE), THREADS)
