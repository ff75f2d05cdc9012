"""What the demo shows at its end: rows, versions, counters, a plot and the most delayed aircraft
models.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from dagster_adjunct import LakeStreams, application_state, open_dataset, served_versions

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.console import Console

    from dagster_adjunct import Lake

LEAST_FLIGHTS = 100


def show_report(console: Console, lake: Lake, plot: Path) -> None:
    """Print the totals of the applications and draw `plot` from the enriched stream."""
    for application in ("flight-delays", "disruptions", "flights-over-time"):
        console.print(_counters(application, application_state(lake, application)))
    console.print(_versions(lake))
    streams = LakeStreams(lake)
    columns = ["dep_delay", "visib", "wind_speed", "model"]
    enriched = streams.read_arrow(streams.all_ranges("enriched-flights"), columns=columns)
    draw(enriched, plot)
    console.print(f"Mean departure delay by visibility and wind: [bold]{plot}[/]")
    console.print(_models(enriched))


def _counters(application: str, state: Any) -> Table:
    table = Table(
        "output or join", "what", "value", title=f"{application}, all runs", title_justify="left"
    )
    for name, counters in state.totals.items():
        for counter, value in counters.items():
            if value or counter in ("rows", "updates", "unmatched", "defaults_put", "retries"):
                table.add_row(name, counter.replace("_", " "), f"{value:,}")
    return table


def _versions(lake: Lake) -> Table:
    table = Table(
        "dataset",
        "version",
        "entries",
        "batches",
        title="Dataset versions served",
        title_justify="left",
    )
    for dataset, versions in served_versions(lake, "flight-delays").items():
        for version, batches in versions.items():
            rows = open_dataset(lake, dataset, version=version).rows
            entries = "merged when read" if rows is None else f"{rows:,}"
            table.add_row(dataset, version, entries, f"{batches[0]} to {batches[-1]}")
    return table


def _models(enriched: pa.Table) -> Table:
    import pyarrow.compute as pc

    known = enriched.filter(
        pc.and_(pc.is_valid(enriched["model"]), pc.is_valid(enriched["dep_delay"]))
    )
    delays = known.group_by("model").aggregate([("dep_delay", "mean"), ("dep_delay", "count")])
    delays = delays.filter(pc.greater_equal(delays["dep_delay_count"], LEAST_FLIGHTS))
    worst = delays.sort_by([("dep_delay_mean", "descending")]).slice(0, 10)
    table = Table(
        "model",
        "mean delay, min",
        "flights",
        title="The ten most delayed aircraft models",
        title_justify="left",
    )
    for row in worst.to_pylist():
        table.add_row(row["model"], f"{row['dep_delay_mean']:.1f}", f"{row['dep_delay_count']:,}")
    return table


def draw(enriched: pa.Table, target: Path) -> None:
    """Draw the mean departure delay by visibility, one line for calm, breezy and windy hours."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    import pyarrow.compute as pc

    data = enriched.filter(
        pc.and_(
            pc.and_(pc.is_valid(enriched["visib"]), pc.is_valid(enriched["wind_speed"])),
            pc.is_valid(enriched["dep_delay"]),
        )
    )
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    wind = data["wind_speed"]
    for label, low, high in (
        ("under 8 mph", 0, 8),
        ("8 to 16 mph", 8, 16),
        ("over 16 mph", 16, 1000),
    ):
        part = data.filter(pc.and_(pc.greater_equal(wind, low), pc.less(wind, high)))
        part = part.append_column("visibility", pc.round(part["visib"]))
        means = part.group_by("visibility").aggregate([("dep_delay", "mean")]).sort_by("visibility")
        axes.plot(means["visibility"], means["dep_delay_mean"], marker="o", label=f"wind {label}")
    axes.set_xlabel("visibility, miles")
    axes.set_ylabel("mean departure delay, minutes")
    axes.set_title("Flights from New York, 2013")
    axes.grid(alpha=0.3)
    axes.legend()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120)
    plt.close(figure)
