"""The page of ``pagetile view`` in a real Chromium: what it shows is what Python says, and it is usable.

Structure and geometry are compared; pictures are written to the test's folder, to be looked at.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagetile.contracts.visibility import normalize_window, window_from_sliding
from pagetile.inspect import coalesce
from pagetile.inspect.explain import CacheShape, explain_position
from pagetile.inspect.figures import all_figures
from pagetile.inspect.run import Run
from pagetile.inspect.view import page, write_page
from tests.browser.driver import Browser, executable
from tests.inspect.conftest import SHARED, record, tiny_llama, tiny_windowed

RUNS = ("crowded", "windowed", "forked")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    assert executable(), "these tests need Chromium (on Debian and Ubuntu: apt-get install chromium), or $CHROMIUM"
    found = Browser()
    yield found
    found.close()


@pytest.fixture(scope="session")
def runs() -> dict[str, Run]:
    prompts = [SHARED[:19], [*SHARED[:12], 40, 41], [50, 51, 52], SHARED[:9], [60, 61, 62, 1, 2, 3, 4]]
    small = {"block_size": 4, "num_blocks": 12, "max_batch_tokens": 16, "max_num_seqs": 4}
    return {
        "crowded": record(tiny_llama(), prompts, 8, **small)[1],
        "windowed": record(tiny_windowed(), [SHARED[:19], [50, 51, 52]], 10, block_size=4, num_blocks=24)[1],
        "forked": record(tiny_llama(), [SHARED[:6]], 5, n=2, block_size=4, num_blocks=16)[1],
    }


@pytest.fixture(scope="session")
def files(runs: dict[str, Run], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name, run in runs.items():
        write_page(run, folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in runs}


@pytest.fixture
def opened(browser: Browser, files: dict[str, Path]) -> Iterator[Browser]:
    """The crowded run at its beginning, in light colours; afterwards nothing may have gone wrong."""
    browser.resize(1440, 1000)
    browser.dark(False)
    browser.problems.clear()
    browser.open(files["crowded"])
    yield browser
    assert browser.problems == []


def test_it_asks_the_network_for_nothing(browser: Browser, files: dict[str, Path]) -> None:
    browser.problems.clear()
    for name in RUNS:
        browser.open(files[name])
        browser.run("new Promise(done => setTimeout(done, 50))")
    assert browser.problems == []
    text = files["crowded"].read_text()
    assert "http:" not in text.replace("http-equiv", "")
    assert "https:" not in text


@pytest.mark.parametrize("name", RUNS)
def test_the_browser_plays_back_what_python_plays_back(
    name: str, browser: Browser, files: dict[str, Path], runs: dict[str, Run]
) -> None:
    """Owners, cached blocks, slots and figures of every step and group."""
    run = runs[name]
    browser.open(files[name])
    played = browser.run("looks.played()")
    figures = iter(all_figures(run))
    for state, groups in zip(run.states(), played, strict=True):
        for g, found in zip(run.groups, groups, strict=True):
            assert dict(found["owned"]) == state.owned[g.name]
            assert found["cached"] == sorted(state.cached[g.name])
            assert found["slots"] == run.slots(state, g.name).tolist()
            f = next(figures)
            assert found["figures"] == {
                "written": f.written,
                "lookedUp": f.looked_up,
                "read": f.read,
                "writtenBytes": f.written_bytes,
                "readBytes": f.read_bytes,
                "live": f.live,
                "cached": f.cached,
                "free": f.free,
            }


@pytest.mark.parametrize("name", RUNS)
def test_every_block_is_drawn_as_what_it_is(
    name: str, browser: Browser, files: dict[str, Path], runs: dict[str, Run]
) -> None:
    """Class, owner letters, write and read marks of each cell, at every step."""
    run = runs[name]
    browser.open(files[name])
    g, size = run.groups[0], run.block_size
    limits = normalize_window(window_from_sliding(g.window), causal=True)
    for state in run.states():
        cells = browser.run(f"(go({state.index}), looks.cells())")
        assert len(cells) == g.num_blocks
        owners = state.owners(g.name)
        written = {s for s in run.slots(state, g.name).tolist() if s >= 0}
        read = set()
        for row in state.step.rows:
            blocks, length = state.owned[g.name][row.request], row.first + row.count
            first = 0 if limits[0] < 0 else max(0, row.first - limits[0])
            read |= {blocks[p // size] * size + p % size for p in range(first, length)}
        for block, (classes, letters, (w0, w1, r0, r1)) in enumerate(cells):
            own = owners.get(block, [])
            kind = (
                "shared" if len(own) > 1 else "live" if own else "cached" if block in state.cached[g.name] else "free"
            )
            assert kind in classes, (state.index, block)
            assert letters.startswith("".join("ABCDEFG"[o] for o in own[:1]))
            here = set(range(block * size, (block + 1) * size))
            assert ("write" in classes) == bool(here & written)
            assert ("read" in classes) == ("lookup" in classes) == bool(here & read)
            for drawn, marked in (((w0, w1), here & written), ((r0, r1), here & read)):
                inside = {block * size + i for i in range(size) if drawn[0] <= 100 * i / size < drawn[1]}
                assert inside == marked, "the mark covers these slots and no other"


def test_requests_show_their_logical_blocks(opened: Browser, runs: dict[str, Run]) -> None:
    run = runs["crowded"]
    for state in run.states():
        shown = opened.run(f"(go({state.index}), looks.chips())")
        for number, chips in enumerate(shown):
            assert chips == [str(b) for b in state.owned["full"].get(number, [])]


def test_the_tiles_walk_the_block_table(opened: Browser, runs: dict[str, Run]) -> None:
    """Part by part: only the tile's own blocks are marked in the pool, and all of them together are the row's."""
    run = runs["crowded"]
    opened.run("(run.tile = 8, select(0), go(4))")
    state = next(s for s in run.states() if s.index == 4)
    blocks, row = state.owned["full"][0], state.step.rows[0]
    length = row.first + row.count
    opened.press(".")
    assert opened.run(
        "[document.querySelectorAll('.block.write').length, document.querySelectorAll('.block.read').length]"
    ) == [1, 0]
    seen = []
    for first in range(0, length, 8):
        opened.press(".")
        marked = opened.run("[...document.querySelectorAll('.block.lookup')].map(c => +c.dataset.block)")
        assert sorted(marked) == sorted(blocks[first // 4 : -(-min(length, first + 8) // 4)])
        seen += marked
    assert sorted(seen) == sorted(blocks[: -(-length // 4)])
    opened.press(".")
    assert opened.run("view.step") == 5, "after the last tile comes the next step"


def test_hovering_a_slot_explains_it(opened: Browser) -> None:
    """The line under the pointer has the numbers of ``pagetile explain``."""
    opened.run("(go(4), select(0))")
    blocks = opened.run("stateNow().owned.full.get(0)")
    opened.move(f"#block-{blocks[2]}", x=0.4)  # the second of four slots
    line = opened.run("document.getElementById('explain').textContent")
    found = explain_position(blocks, 9, CacheShape(4, 2, 8, "float32"))
    assert f"logical block {found.logical}, offset {found.offset}" in line
    assert f"slot {found.block} × 4 + {found.offset} = {found.slot}" in line
    assert f"bytes {found.addresses['NHD'][0].first} to {found.addresses['NHD'][0].last}" in line
    lit = opened.run("[...document.querySelectorAll('.lit')].map(n => n.dataset.block)")
    assert set(lit) == {str(blocks[2])}
    assert len(lit) >= 2, "the pool's cell and the request's chip"


def test_clicking_a_slot_selects_its_token(opened: Browser) -> None:
    opened.run("(go(4), select(0))")
    other = opened.run("stateNow().owned.full.get(2)[0]")
    opened.move(f"#block-{other}", x=0.6, click=True)
    assert opened.run("[view.request, tokenNow(stateNow())]") == [2, 2]


@pytest.mark.parametrize(
    ("count", "itemsize", "at"), [(64, 4, 0), (128, 2, 0), (128, 2, 4), (7, 4, 8), (80, 2, 18), (3, 1, 31)]
)
def test_packs_are_those_of_the_model(
    browser: Browser, files: dict[str, Path], count: int, itemsize: int, at: int
) -> None:
    browser.open(files["crowded"])
    for name in ("packed", "scalar"):
        drawn = browser.run(f"{name}({count}, {itemsize}, {at}).map(i => [i.part, i.width, i.addresses, sectorsOf(i)])")
        model = getattr(coalesce, name)(count, itemsize, load_at=at).loads
        assert drawn == [[i.part, i.width, list(i.addresses), list(i.sectors)] for i in model]


def test_keys(opened: Browser, runs: dict[str, Run]) -> None:
    at = "[view.step, view.request, view.figure, view.zoom]"
    start = opened.run(at)
    for key, expected in (
        ("ArrowRight", [1, 0, 0, 2]),
        ("End", [len(runs["crowded"].steps) - 1, 0, 0, 2]),
        ("Home", [0, 0, 0, 2]),
        ("ArrowDown", [0, 1, 0, 2]),
        ("ArrowUp", [0, 0, 0, 2]),
        ("3", [0, 0, 2, 2]),
        ("+", [0, 0, 2, 3]),
        ("-", [0, 0, 2, 2]),
    ):
        opened.press(key)
        assert opened.run(at) == expected, key
    assert start == [0, 0, 0, 2]
    before = opened.run("getComputedStyle(document.body).backgroundColor")
    opened.press("t")
    assert opened.run("getComputedStyle(document.body).backgroundColor") != before
    opened.press("?")
    assert opened.run("document.getElementById('help').open") is True
    opened.press("ArrowRight")
    assert opened.run("view.step") == 0, "keys rest while the help is open"
    opened.run("(document.getElementById('help').close(), looks.frame())")
    opened.press(" ")
    assert opened.run("view.timer > 0")
    opened.press(" ")
    assert opened.run("view.timer") == 0


def test_the_pool_is_walked_by_keys(opened: Browser) -> None:
    opened.run("document.getElementById('pool-grid').focus()")
    opened.press("ArrowRight"), opened.press("ArrowRight")
    assert opened.run("document.getElementById('pool-grid').getAttribute('aria-activedescendant')") == "block-1"
    assert opened.run("view.step") == 0
    assert "block 1" in opened.run("document.getElementById('explain').textContent")


def test_everything_a_pointer_can_do_has_a_name(opened: Browser) -> None:
    assert opened.run("looks.nameless()") == []


@pytest.mark.parametrize("figure", range(5))
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_five_figures(opened: Browser, figure: int, dark: bool, tmp_path: Path) -> None:
    """Each has content, nothing overflows its box, and text has a contrast of at least 4.5 to what it stands on."""
    opened.dark(dark)
    opened.run(f"(go(4), select(1), pickFigure({figure}))")
    assert len(opened.run("document.getElementById('figure').textContent")) > 80
    assert opened.run("looks.overflowing('#figure')") == []
    assert opened.run("looks.faint('#figure, #controls, #tiles, #requests, header')") == []
    opened.shot(tmp_path / f"figure-{figure + 1}-{'dark' if dark else 'light'}.png")


def test_figures_speak_of_the_same_numbers(opened: Browser) -> None:
    opened.run("(go(4), select(0), pickFigure(1))")
    blocks, position = opened.run("[stateNow().owned.full.get(0), tokenNow(stateNow())]")
    found = explain_position(blocks, position, CacheShape(4, 2, 8, "float32"))
    values = opened.run("[...document.querySelectorAll('#figure .box b')].map(b => b.textContent)")
    assert values[1:4] == [str(found.slot), str(found.block), str(found.offset)]
    assert values[4] == str(found.addresses["NHD"][0].first)


@pytest.mark.parametrize("width", [1440, 900, 360, 320])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_fits_from_a_desk_to_400_percent(opened: Browser, width: int, dark: bool, tmp_path: Path) -> None:
    """1280 pixels at 400 % are 320 CSS pixels: nothing scrolls sideways, nothing lies on anything else."""
    opened.dark(dark)
    opened.resize(width, 900, scale=1280 / 320 if width == 320 else 1)
    opened.run("(go(4), select(0))")
    for figure in range(5):
        opened.run(f"pickFigure({figure})")
        assert opened.run("document.documentElement.scrollWidth") <= width
        assert opened.run("looks.overflowing('body')") == []
    assert opened.run("looks.overlaps()") == 0
    assert opened.run("looks.smallest()") >= 11
    opened.shot(tmp_path / f"page-{width}-{'dark' if dark else 'light'}.png")


def test_two_groups_can_be_chosen(browser: Browser, files: dict[str, Path], runs: dict[str, Run]) -> None:
    browser.problems.clear()
    browser.open(files["windowed"])
    run = runs["windowed"]
    browser.run("go(9)")
    state = next(s for s in run.states() if s.index == 9)
    for g in run.groups:
        browser.run(f"pickGroup({json.dumps(g.name)})")
        assert browser.run("document.querySelectorAll('.block.live').length") == len(state.owners(g.name))
    assert browser.problems == []


def test_a_link_opens_the_step(browser: Browser, files: dict[str, Path]) -> None:
    browser.open(files["crowded"], "step=5&request=2")
    assert browser.run("[view.step, view.request]") == [5, 2]


def test_text_of_a_run_cannot_leave_its_place(browser: Browser, runs: dict[str, Run], tmp_path: Path) -> None:
    """Prompts are strangers' text: a script in one is shown, not run."""
    bad = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 2'>\u2028@@RUN@@"
    run = Run.from_dict(json.loads(json.dumps(runs["crowded"].to_dict())))
    run.title = run.model = bad
    for request in run.requests:
        request.id = request.id + bad
        request.texts = [bad] * len(request.tokens)
    write_page(run, tmp_path / "bad.html")
    browser.problems.clear()
    browser.open(tmp_path / "bad.html")
    browser.run("(go(3), pickFigure(4), pickFigure(1))")
    assert browser.run("window.broken") is None
    assert browser.run("document.getElementById('title').textContent") == bad
    assert browser.problems == []


def test_requests_that_begin_alike_are_told_apart(browser: Browser, tmp_path: Path) -> None:
    """A chat template opens every prompt; the list shows where they begin to differ, the whole text on hovering."""
    template = list(range(3, 33))
    _, run = record(tiny_llama(), [[*template, 40, *range(41, 55)], [*template, 50, *range(41, 55)]], 2)
    for request in run.requests:
        request.texts = [f" w{t}" for t in request.tokens]
    write_page(run, tmp_path / "alike.html")
    browser.open(tmp_path / "alike.html")
    shown = browser.run("[...document.querySelectorAll('.request .prompt')].map(n => n.textContent)")
    assert [text.split()[:2] for text in shown] == [["…", "w40"], ["…", "w50"]]
    titles = browser.run("[...document.querySelectorAll('.request .said')].map(n => n.title)")
    assert all(title.startswith(" w3 w4") for title in titles)


def test_a_run_without_steps(browser: Browser, runs: dict[str, Run], tmp_path: Path) -> None:
    run = Run.from_dict(json.loads(json.dumps(runs["forked"].to_dict())))
    run.steps, run.requests = [], []
    write_page(run, tmp_path / "empty.html")
    browser.problems.clear()
    browser.open(tmp_path / "empty.html")
    assert "no steps" in browser.run("document.getElementById('explain').textContent")
    assert browser.problems == []


def test_a_run_of_32_requests_opens_and_scrubs(browser: Browser, tmp_path: Path) -> None:
    """32 requests x 64 tokens: under 3 MB, and every step of a scrub is drawn."""
    prompts = [[1 + (i * 7 + j) % 60 for j in range(8 + i % 24)] for i in range(32)]
    _, run = record(tiny_llama(), prompts, 64, block_size=16, num_blocks=512, max_batch_tokens=256, max_num_seqs=32)
    run.groups[0].num_blocks = 512
    for request in run.requests:
        request.texts = [f" word{t}" for t in request.tokens]
    assert len(page(run).encode()) < 3_000_000
    path = tmp_path / "big.html"
    write_page(run, path)
    browser.resize(1440, 1000)
    browser.problems.clear()
    browser.open(path)
    assert browser.run("looks.scrub(60)") > 0
    assert browser.problems == []
