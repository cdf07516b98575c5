"""Targets of an engine: how --target says them, and which GPU code runs where."""

import pytest

from enginewright.errors import NoCodeForMachineError, UsageError
from enginewright.targets import architectures, choose_code, parse_targets


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["cpu"], ("cpu",)),
        (["cuda:sm_80"], ("cuda:sm_80",)),
        (["cuda:sm_90a,sm_80", "cpu"], ("cpu", "cuda:sm_80", "cuda:sm_90a")),
        (["cpu+cuda:sm_100a"], ("cpu", "cuda:sm_100a")),
        (["cpu,cuda:sm_120,sm_86"], ("cpu", "cuda:sm_86", "cuda:sm_120")),
        (["cpu", "cpu", "cuda:sm_80", "cuda:sm_80,cuda:sm_80"], ("cpu", "cuda:sm_80")),
        (["cuda:ptx", "cuda:sm_89"], ("cuda:sm_89", "cuda:ptx")),
        ([" CUDA:SM_90A , sm_80"], ("cuda:sm_80", "cuda:sm_90a")),
    ],
)
def test_targets_are_read(values: list[str], expected: tuple[str, ...]) -> None:
    assert parse_targets(values) == expected


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("cuda:sm_90", "'cuda:sm_90' is no target\nDid you mean cuda:sm_90a? There are cpu, cuda:sm_80, "),
        ("cpu+cuda:sm_80,sm90a", "'sm90a' is no target\nDid you mean cuda:sm_90a?"),
        ("cup", "'cup' is no target\nDid you mean cpu?"),
        ("cuda", "'cuda' is no target: it names no GPU architecture\nThere are cpu, cuda:sm_80"),
        ("cuda:", "'cuda:' is no target: it names no GPU architecture"),
        ("sm_80", "'sm_80' is no target\nDid you mean cuda:sm_80?"),
        (
            "cuda:sm_75",
            "'cuda:sm_75' is not supported: GPUs of compute capability 7.5 are older than sm_80, the oldest",
        ),
        ("cuda:sm_80,sm70", "'sm70' is not supported: GPUs of compute capability 7.0 are older than sm_80"),
        ("cuda:sm_87", "Did you mean cuda:sm_86?"),
        (
            "cuda:sm_103",
            "'cuda:sm_103' is not supported: no kernels are compiled for compute capability 10.3\nUse cuda:ptx",
        ),
        ("tpu", "'tpu' is no target\n"),
        ("cpu,", "'' is no target"),
        ("", "'' is no target"),
    ],
)
def test_targets_that_are_none(value: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_targets([value])
    assert said in str(caught.value)
    assert caught.value.exit_code == 2


def test_an_old_gpu_is_not_answered_with_a_newer_one() -> None:
    with pytest.raises(UsageError) as caught:
        parse_targets(["cuda:sm_75"])
    assert "Did you mean" not in str(caught.value)


def test_architectures_of_targets() -> None:
    assert architectures(("cpu", "cuda:sm_80", "cuda:ptx")) == ["sm_80", "ptx"]


ALL = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120", "ptx")


@pytest.mark.parametrize(
    ("capability", "names", "expected"),
    [
        ((8, 0), ALL, "sm_80"),
        ((8, 6), ALL, "sm_86"),
        ((8, 7), ALL, "sm_86"),
        ((8, 9), ALL, "sm_89"),
        ((8, 9), ("sm_80", "sm_90a"), "sm_80"),
        ((9, 0), ALL, "sm_90a"),
        ((9, 0), ("sm_90", "sm_90a"), "sm_90a"),
        ((9, 0), ("sm_89", "sm_90"), "sm_90"),
        ((9, 0), ("sm_89", "ptx"), "ptx"),
        ((10, 0), ALL, "sm_100a"),
        ((10, 3), ALL, "ptx"),
        ((12, 0), ALL, "sm_120"),
        ((12, 1), ALL, "sm_120"),
        ((13, 0), ALL, "ptx"),
    ],
)
def test_code_for_a_gpu(capability: tuple[int, int], names: tuple[str, ...], expected: str) -> None:
    assert choose_code(capability, names) == expected
    assert choose_code(capability, names[::-1]) == expected


@pytest.mark.parametrize(
    ("capability", "names", "fix"),
    [
        ((8, 0), ("sm_86", "sm_90a"), "--target cuda:sm_80."),
        ((10, 3), ("sm_100a",), "There are kernels for sm_80, sm_86"),
        ((9, 0), ("sm_80", "sm_89", "sm_100a", "sm_9", "nonsense"), "--target cuda:sm_90a."),
        ((7, 5), ALL, "There are kernels for sm_80, sm_86"),
        ((12, 1), (), "--target cuda:sm_120."),
    ],
)
def test_a_gpu_without_code(capability: tuple[int, int], names: tuple[str, ...], fix: str) -> None:
    with pytest.raises(NoCodeForMachineError) as caught:
        choose_code(capability, names, "m.engine")
    text = str(caught.value)
    assert caught.value.exit_code == 6
    assert "m.engine has no code for this GPU" in text and ".".join(map(str, capability)) in text
    assert all(name in text for name in names)
    assert fix in text
