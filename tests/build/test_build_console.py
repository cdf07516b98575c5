"""Progress messages of a build."""

import io

import pytest
from rich.console import Console

from enginewright.builder.console import ConsoleProgress


class Clock:
    """Goes when it is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_long_phase_says_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with ConsoleProgress(Console(file=io.StringIO()), clock) as progress:
        progress.phase("quality gate (quick)", 400)
        for second in range(1, 31):
            clock.now = float(second)
            progress.advance(10)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "quality gate (quick)       10.0 s, 25%, up to 30 s more",
        "quality gate (quick)       20.0 s, 50%, up to 20 s more",
        "quality gate (quick)       30.0 s, 75%, up to 10 s more",
        "quality gate (quick)       30.0 s",
    ]


def test_short_phases_and_those_without_a_measure_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with ConsoleProgress(Console(file=io.StringIO()), clock) as progress:
        progress.phase("import the model")
        clock.now = 60.0
        progress.advance(10)
        progress.phase("pack the weights", 100)
        clock.now = 65.0
        progress.advance(60)
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_terminal_has_a_bar_with_the_time_that_is_left() -> None:
    clock, drawn = Clock(), io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=100, color_system=None)
    with ConsoleProgress(console, clock) as progress:
        progress.phase("quality gate (quick)", 100)
        for second in range(1, 5):
            clock.now = float(second)
            progress.advance(5)
        assert progress._bars is not None
        progress._bars.refresh()
    assert "20%" in drawn.getvalue() and "0:00:16" in drawn.getvalue() and "100%" in drawn.getvalue()
