"""How fast the page of a recorded run opens and scrubs, in a real Chromium.

    python -m benchmarks.recording --page run.html
    python -m benchmarks.page run.html [--rounds 5]

Prints milliseconds from the start of the navigation to the end of loading, and frames a second while every step of the
run is drawn once, one a frame (1440 x 1000 pixels, drawn by the processor: the browser runs without a GPU).
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from tests.browser.driver import Browser


def main() -> None:
    """Open and scrub, a few times, and print the figures."""
    parse = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parse.add_argument("page", type=Path)
    parse.add_argument("--rounds", type=int, default=5)
    asked = parse.parse_args()

    browser = Browser()
    opened, frames = [], []
    try:
        browser.resize(1440, 1000)
        for _ in range(asked.rounds):
            browser.open(asked.page)
            opened.append(browser.run("performance.getEntriesByType('navigation')[0].loadEventEnd"))
            steps = browser.run("run.steps.length")
            frames.append(steps / browser.run(f"looks.scrub({steps})") * 1e3)
    finally:
        browser.close()
    print(f"{asked.page.stat().st_size / 1e6:.3f} MB, {steps} steps, {asked.rounds} rounds")
    print(f" opens: median {statistics.median(opened):.0f} ms ({min(opened):.0f} to {max(opened):.0f})")
    print(f"scrubs: median {statistics.median(frames):.0f} frames a second ({min(frames):.0f} to {max(frames):.0f})")


if __name__ == "__main__":
    main()
