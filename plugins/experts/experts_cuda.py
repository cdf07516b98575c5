"""GPU launches around the products of experts: csrc/cuda/experts.cuh."""

from enginewright.dtypes import DTYPES
from enginewright.plan import Launch
from enginewright.plugins.kernel import ONE, Call, CudaKernel, KernelBinding, blocks, ceil_div, cuda_type, expression

ROUTE_THREADS, PLACE_THREADS, THREADS = 512, 1024, 256
ROUTE_TOKENS = 4  # tokens of a block
WARP = 32


def route_on_cuda(binding: KernelBinding) -> CudaKernel:
    """Makes the GPU kernel of routing: two launches, which share the chosen experts' numbers in `scores`."""

    def launches(call: Call) -> tuple[Launch, ...]:
        x, weight, places, share, chosen = (
            call.operands[role] for role in ("x", "weight", "places", "share", "scores")
        )
        experts, rows = weight.rows.constant, call.rows("x")
        top, groups = int(call.attributes["top"]), int(call.attributes["groups"])
        route = expression(
            "route",
            "Route",
            rows=rows,
            columns=x.columns,
            experts=experts,
            top=top,
            groups=groups,
            chosen_groups=int(call.attributes["chosen_groups"]),
            group_best=int(call.attributes["group_best"]),
            softmax=call.attributes["scores"] == "softmax",
            normalized=bool(call.attributes["normalized"]),
            bias="bias" in call.operands,
            correction="correction" in call.operands,
            x_stride=x.stride,
            chosen_stride=chosen.stride,
            share_stride=share.stride,
            scale=float(call.attributes["scale"]),
        )
        place = expression(
            "place_rows",
            "PlaceRows",
            rows=rows,
            experts=experts,
            top=top,
            chosen_stride=chosen.stride,
            places_stride=places.stride,
        )
        of_16 = ceil_div(experts, 16)
        slices = max(ROUTE_THREADS // WARP // of_16, 1)
        route_bytes = ROUTE_TOKENS * (slices * of_16 * 16 + 2 * (experts + groups)) * DTYPES["f32"].bytes
        arguments = ("x", "weight", "bias", "correction", "scores", "share")
        return (
            Launch(route, arguments, (blocks(x.rows, ROUTE_TOKENS), ONE, ONE), ROUTE_THREADS, route_bytes),
            Launch(place, ("scores", "places", "starts"), (ONE, ONE, ONE), PLACE_THREADS, 4 * experts),
        )

    return binding.on_cuda(launches, route="experts", place_rows="experts")


def sort_rows_on_cuda(binding: KernelBinding) -> CudaKernel:
    """Makes the GPU kernel that sorts rows by expert."""

    def launches(call: Call) -> tuple[Launch, ...]:
        x, places, out, scale = (call.operands.get(role) for role in ("x", "places", "out", "scale"))
        assert x is not None and places is not None and out is not None
        kernel = expression(
            "sort_rows",
            "SortRows",
            rows=call.rows("x"),
            type=cuda_type(out.dtype),
            columns=out.columns,
            padded=out.columns if out.dtype == "f32" else out.padded,
            top=places.columns,
            x_stride=x.stride,
            places_stride=places.stride,
            out_stride=out.stride,
            group=int(call.attributes["group"]),
            scale_stride=scale.stride if scale else 0,
        )
        shared_bytes = 2 * THREADS // WARP * DTYPES["f32"].bytes
        arguments = ("x", "places", "out", "scale")
        return (Launch(kernel, arguments, (blocks(x.rows), ONE, ONE), THREADS, shared_bytes),)

    return binding.on_cuda(launches, sort_rows="experts")


def combine_experts_on_cuda(binding: KernelBinding) -> CudaKernel:
    """Makes the GPU kernel that combines the results of experts."""

    def launches(call: Call) -> tuple[Launch, ...]:
        y, places, share, out = (call.operands[role] for role in ("y", "places", "share", "out"))
        shared, gate = call.operands.get("shared"), call.operands.get("gate")
        kernel = expression(
            "combine_experts",
            "CombineExperts",
            rows=call.rows("out"),
            columns=out.columns,
            top=places.columns,
            y_stride=y.stride,
            places_stride=places.stride,
            share_stride=share.stride,
            shared_stride=shared.stride if shared else 0,
            gate_stride=gate.stride if gate else 0,
            out_stride=out.stride,
            shared=shared is not None,
            gate=gate is not None,
        )
        arguments = ("y", "places", "share", "shared", "gate", "out")
        return (Launch(kernel, arguments, (blocks(out.rows), ONE, ONE), THREADS),)

    return binding.on_cuda(launches, combine_experts="experts")
