"""Targets: the platforms and GPU architectures that engines have code for, and the choice of code for a GPU.

A target is `cpu`, or `cuda:` and a GPU architecture: `cuda:sm_80`. `cpu` and `cuda` are platforms, and an
engine has a plan for each.
"""

import difflib
import re
from collections.abc import Collection, Iterable

from enginewright.errors import NoCodeForMachineError, UsageError

CPU = "cpu"
CUDA = "cuda"
PTX = "ptx"  # in place of an architecture: text that the driver compiles when it loads, on any GPU from _PTX_FROM on
SMS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")  # architectures that GPU kernels are compiled for
TARGETS = (CPU, *(f"{CUDA}:{sm}" for sm in (*SMS, PTX)))
_PTX_FROM = (8, 0)
_SM = re.compile(r"sm_(?P<major>[0-9]{1,2})(?P<minor>[0-9])(?P<exact>a?)")
_SM_AS_TYPED = re.compile(r"(?:cuda:)?(?:sm|compute)_?(?P<major>[0-9]{1,2})(?P<minor>[0-9])[af]?")


def parse_targets(values: Iterable[str]) -> tuple[str, ...]:
    """Parses the targets of an engine, in the order of TARGETS, each once.

    Args:
        values: one target or several: "cpu", "cuda:sm_80,sm_90a", "cpu+cuda:sm_80".

    Raises:
        UsageError: a target is unknown.
    """
    found: set[str] = set()
    for value in values:
        platform = ""  # "cuda:", for the words after one that has it
        for word in re.split(r"[+,]", value.lower()):
            text = word.strip()
            if ":" in text:
                platform = text[: text.index(":") + 1]
            found.add(_known(text if ":" in text or text == CPU else platform + text, text))
    return tuple(target for target in TARGETS if target in found)


def _known(target: str, text: str) -> str:
    if target in TARGETS:
        return target
    if match := _SM_AS_TYPED.fullmatch(target):
        raise _no_kernels(text, (int(match["major"]), int(match["minor"])))
    why = "it names no GPU architecture" if text.rstrip(":") == CUDA else ""
    near = [] if why else difflib.get_close_matches(target, TARGETS, n=1) or _ending_with(text)
    meant = f"Did you mean {near[0]}? " if near else ""
    raise UsageError(f"{text!r} is no target", why, f"{meant}There are {', '.join(TARGETS)}.")


def _no_kernels(text: str, capability: tuple[int, int]) -> UsageError:
    """Makes the error for a GPU architecture that is not in SMS, with one whose code runs on such a GPU."""
    able = [sm for sm in SMS if _rank(sm, capability) is not None]
    if able:
        return UsageError(
            f"{text!r} is no target", fix=f"Did you mean {CUDA}:{able[-1]}? There are {', '.join(TARGETS)}."
        )
    number = "{}.{}".format(*capability)
    if capability < _PTX_FROM:
        why = f"GPUs of compute capability {number} are older than {SMS[0]}, the oldest that kernels are compiled for"
        return UsageError(f"{text!r} is not supported", why, f"There are {', '.join(TARGETS)}.")
    why = f"no kernels are compiled for compute capability {number}"
    fix = f"Use {CUDA}:{PTX}, which the GPU's driver compiles when the engine starts. There are {', '.join(TARGETS)}."
    return UsageError(f"{text!r} is not supported", why, fix)


def _ending_with(text: str) -> list[str]:
    return [target for target in TARGETS if text and target.endswith(f":{text}")]


def platforms_of(targets: Iterable[str]) -> list[str]:
    """Lists the platforms, `cpu` and `cuda`, of targets such as `cuda:sm_90a`, each once."""
    return list(dict.fromkeys(target.partition(":")[0] for target in targets))


def architectures(targets: Iterable[str]) -> list[str]:
    """Lists the GPU architectures among targets."""
    return [target.removeprefix(f"{CUDA}:") for target in targets if target.startswith(f"{CUDA}:")]


def choose_code(capability: tuple[int, int], names: Collection[str], engine: str = "the engine") -> str:
    """Chooses the architecture of an engine whose code runs on a GPU.

    Code for sm_XY runs on compute capability X.Y and on X.Z above it. Code for sm_XYa runs on X.Y alone, and is better
    there. PTX is the last resort.

    Args:
        capability: compute capability of the GPU, major and minor.
        names: architectures that the engine has code for, such as "sm_80".
        engine: name of the engine in messages.

    Raises:
        NoCodeForMachineError: no architecture does.
    """
    fitting = {rank: name for name in names if (rank := _rank(name, capability)) is not None}
    if fitting:
        return fitting[max(fitting)]
    able = [sm for sm in SMS if _rank(sm, capability) is not None]
    fix = f"Build it again with --target {CUDA}:{able[-1]}." if able else f"There are kernels for {', '.join(SMS)}."
    raise NoCodeForMachineError(
        f"{engine} has no code for this GPU",
        "its compute capability is {}.{}, ".format(*capability) + f"and the code is for {', '.join(names) or 'no GPU'}",
        fix,
    )


def _rank(name: str, capability: tuple[int, int]) -> tuple[int, int] | None:
    """Ranks an architecture for a GPU, the highest fits best; None if its code does not run there."""
    if name == PTX:
        return (0, 0) if capability >= _PTX_FROM else None
    match = _SM.fullmatch(name)
    if not match or int(match["major"]) != capability[0]:
        return None
    minor = int(match["minor"])
    if match["exact"]:
        return (2, minor) if minor == capability[1] else None
    return (1, minor) if minor <= capability[1] else None
