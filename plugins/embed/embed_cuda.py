"""GPU launches of embeddings: csrc/cuda/embed.cuh."""

from enginewright.manifest import packed_bytes
from enginewright.plan import Launch
from enginewright.plugins.kernel import ONE, Call, CudaKernel, KernelBinding, blocks, expression

THREADS = 128


def embed_on_cuda(binding: KernelBinding) -> CudaKernel:
    """Makes the GPU kernel of an embedding."""

    def launches(call: Call) -> tuple[Launch, ...]:
        table, out = call.operands["table"], call.operands["out"]
        kernel = expression(
            "embed",
            "Embed",
            columns=out.columns,
            out_stride=out.stride,
            block_bytes=packed_bytes(table.dtype, (16, table.columns), table.layout),
            int8=table.dtype == "i8",
            scale=float(call.attributes["scale"]),
        )
        arguments = ("tokens", "sampled", "table", "table_scale", "out", "known")
        return (Launch(kernel, arguments, (blocks(out.rows), ONE, ONE), THREADS),)

    return binding.on_cuda(launches, embed="embed")
