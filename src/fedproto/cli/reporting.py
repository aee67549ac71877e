"""The command that writes or serves the HTML page about runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedproto.cli.analysing import analyse_missing
from fedproto.cli.options import DataRoot, Directories, Metric, Target
from fedproto.cli.tables import echo
from fedproto.report.html import write_page
from fedproto.report.live import LiveReport, LiveServer
from fedproto.report.panels import DataPanels


def report(
    directories: Directories,
    out: Annotated[
        Path | None,
        typer.Option(help="The HTML file; report.html in the directory given by default."),
    ] = None,
    title: Annotated[str | None, typer.Option(help="What to call the page.")] = None,
    metric: Metric = None,
    target: Target = None,
    data: Annotated[
        bool, typer.Option("--data/--no-data", help="Show how the data is spread over clients.")
    ] = True,
    analyse: Annotated[
        bool, typer.Option("--analyse", help="First look into models that were not analysed yet.")
    ] = False,
    live: Annotated[
        bool, typer.Option("--live", help="Serve the page on this machine while runs go on.")
    ] = False,
    port: Annotated[
        int, typer.Option(help="Port of --live; 0 for any free one.", min=0, max=65535)
    ] = 8765,
    data_root: DataRoot = None,
) -> None:
    """Write one self-contained HTML page about runs, or serve it while they go on."""
    del data_root
    name = title or ", ".join(path.resolve().name for path in directories)
    if analyse:
        analyse_missing(directories)
    if live:
        panels = DataPanels() if data else None
        _serve(LiveReport(directories, name, metric=metric, target=target, panels=panels), port)
        return
    file = out or (directories[0] if len(directories) == 1 else Path()) / "report.html"
    problems = write_page(
        directories,
        file,
        title=name,
        metric=metric,
        target=target,
        panels=DataPanels() if data else None,
    )
    for problem in problems:
        echo(f"left out: {problem}", err=True)
    echo(f"wrote {file} ({file.stat().st_size / 1e6:.1f} MB)")


def _serve(live: LiveReport, port: int) -> None:
    with LiveServer(live, port) as server:
        echo(f"live at {server.address} (Ctrl-C ends it)", err=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            echo("stopped; the runs are not affected", err=True)
