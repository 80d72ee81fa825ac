"""The map, notebook 00, lists the notebooks of the walkthrough."""

import re
from pathlib import Path

import nbformat

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def test_the_map_has_a_line_for_every_notebook():
    """A table of contents typed by hand misses the newest stage, and nobody notices."""
    text = "\n".join(cell.source for cell in nbformat.read(NOTEBOOKS / "00_map.ipynb", as_version=4).cells)
    listed = re.findall(r"^\| (\d\d) \|", text, flags=re.MULTILINE)
    present = sorted(path.name[:2] for path in NOTEBOOKS.glob("*.ipynb"))
    assert listed == sorted(set(listed))
    assert not set(present) - set(listed), "a notebook without its line in 00_map"
