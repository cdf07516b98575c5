"""What benchmarks/gpu_kernels.py makes of compiled kernels; nothing is compiled here."""

from gpu_kernels import spilling, table

from enginewright.builder.cuda import Compiled, Instance

NARROW, WIDE = (Instance("gemm.cuh", f"gemm<Gemm{{.columns = {columns}}}>") for columns in (64, 576))
ROPE = Instance("rope.cuh", "rope<Rope{}>")
MADE = {
    "sm_80": {
        NARROW: Compiled(b"", "gemm", 64, 0, 0),
        WIDE: Compiled(b"", "gemm", 255, 16, 0),
        ROPE: Compiled(b"", "rope", 20, 32, 128),
    },
    "sm_90a": {
        NARROW: Compiled(b"", "gemm", 64, 0, 0),
        WIDE: Compiled(b"", "gemm", 200, 0, 0),
        ROPE: Compiled(b"", "rope", 20, 0, 128),
    },
}


def test_a_line_a_function() -> None:
    assert table(MADE).splitlines()[2:] == [
        "| `gemm` | 2 | 64 to 255, 0 to 16 B local | 64 to 200 |",
        "| `rope` | 1 | 20, 32 B local, 128 B shared | 20, 128 B shared |",
    ]


def test_a_line_a_specialization() -> None:
    lines = table(MADE, each=True).splitlines()
    assert lines[0] == "| kernel | specializations | sm_80 | sm_90a |"
    assert lines[3] == "| `gemm<Gemm{.columns = 576}>` | 1 | 255, 16 B local | 200 |"
    assert len(lines) == 5


def test_what_spills_is_named_unless_it_is_allowed() -> None:
    assert spilling(MADE, {"rope": "a reason"}) == [
        "sm_80: 16 bytes of local memory a thread in gemm<Gemm{.columns = 576}>"
    ]
    assert len(spilling(MADE, {})) == 2
    assert spilling({"sm_90a": MADE["sm_90a"]}, {}) == []
