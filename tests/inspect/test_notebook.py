"""What a notebook shows of a pool, a cache and a batch's metadata: well-formed, true, and safe."""

from __future__ import annotations

from html.parser import HTMLParser

from pagetile.cache import BlockPool, LayerGroup, PagedKVCache
from pagetile.contracts import figure
from pagetile.contracts.metadata import build_metadata


class Reader(HTMLParser):
    """Reads cells and titles, and insists that every element is closed by its own end."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.tips: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        if tag == "td":
            self.cells.append("")
        self.tips += [value or "" for name, value in attrs if name == "title"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["td"]:
            self.cells[-1] += data


def test_pool() -> None:
    pool = BlockPool(num_blocks=5, block_size=2)
    blocks = pool.allocate(3)
    pool.share(blocks[:1])
    pool.register_tokens(blocks[1:2], [1, 2])
    pool.free(blocks[1:2])
    kinds = [tip.split(": ")[1].split(",")[0] for tip in Reader(pool._repr_html_()).tips]
    assert kinds == ["shared", "cached", "live", "free", "free"]


def test_large_pools_are_counted() -> None:
    shown = BlockPool(num_blocks=5000, block_size=2)._repr_html_()
    assert len(Reader(shown).tips) == figure.MAX_CELLS
    assert "and 3976 more" in shown


def test_cache() -> None:
    groups = [LayerGroup("full", (0, 2)), LayerGroup("<b>local", (1,), window=4)]
    cache = PagedKVCache(groups=groups, num_blocks=6, block_size=4, num_kv_heads=2, head_size=8, layout="HND")
    cells = Reader(cache._repr_html_()).cells
    assert cells[:6] == ["full", "2", "-", "6", "(6, 4, 2, 8)", "(64, 8, 32, 1)"]
    assert cells[8:11] == ["<b>local", "1", "4"], "names are text"


def test_metadata() -> None:
    meta = build_metadata([[7, 2, 9], [4]], [37, 5], [3, 1], 16, pad_seqs=3, pad_tokens=6)
    cells = Reader(meta._repr_html_()).cells
    assert cells[:5] == ["0", "37", "3", "7, 2, 9", "146, 147, 148"]
    assert cells[5:10] == ["1", "5", "1", "4", "68"]
    assert cells[10:] == ["2", "0", "0", "", ""]
