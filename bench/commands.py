"""`engine bench offline` and `engine bench serve`: a run, its report and its plot."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from enginewright_bench.offline import OfflineConfig, OfflineReport, run_offline
from enginewright_bench.plot import check_plot, draw, draw_offline
from enginewright_bench.serving import ServeConfig, ServeReport, run_serve


def measure_offline(
    engine: Path,
    config: OfflineConfig,
    print_report: Callable[[OfflineReport], None],
    plot: Path | None,
    **limits: Any,
) -> None:
    """Measures an engine that has all requests at once.

    Args:
        engine: The engine file.
        config: The workload and its rounds.
        print_report: Called with the report, before it is plotted.
        plot: The picture to write, .svg or .png. None: there is none.
        limits: Fields of RuntimeConfig.

    Raises:
        UsageError: The workload, the limits or the name of the plot make no sense.
        EngineError: The engine cannot be run, or the plot cannot be written.
    """
    if plot is not None:
        check_plot(plot)
    report = run_offline(engine, config, **limits)
    print_report(report)
    if plot is not None:
        draw_offline(report, plot)


def measure_server(config: ServeConfig, print_report: Callable[[ServeReport], None], plot: Path | None) -> None:
    """Measures a server under load.

    Args:
        config: The server and the load.
        print_report: Called with the report, before it is plotted.
        plot: The picture to write, .svg or .png. None: there is none.

    Raises:
        UsageError: The load or the name of the plot makes no sense.
        EngineError: The server cannot be reached, requests have failed, or the plot cannot be written.
    """
    if plot is not None:
        check_plot(plot)
    report = run_serve(config)
    print_report(report)
    if plot is not None:
        draw(report, plot)
    report.check()
