"""Draw a table of ``benchmarks.cpu.bench``: for each case, how many times pagetile's time everybody took.

    python -m benchmarks.cpu.plot benchmarks/results/cpu.csv cpu.svg

Needs matplotlib, which nothing else here does.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path


def main() -> int:
    """One row of bars a case; whiskers are the tenth and the ninetieth percentile."""
    if len(sys.argv) != 3:
        print(__doc__)
        return 2
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("matplotlib is not installed; pip install 'pagetile[plot]'")
        return 1
    with Path(sys.argv[1]).open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["who"] != "pagetile"]
    names = [f"{row['case']}: {row['who']}" for row in rows]
    middle = [float(row["ratio"]) for row in rows]
    low = [m - float(row["p10"]) for m, row in zip(middle, rows, strict=True)]
    high = [float(row["p90"]) - m for m, row in zip(middle, rows, strict=True)]
    figure = Figure(figsize=(9, 0.24 * len(rows) + 1), layout="constrained")
    axes = figure.add_subplot()
    axes.barh(names, middle, xerr=[low, high], color="#4c78a8", ecolor="#333333", height=0.7)
    axes.axvline(1, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("time / pagetile's time (above 1: pagetile is faster)")
    figure.savefig(sys.argv[2])
    return 0


if __name__ == "__main__":
    sys.exit(main())
