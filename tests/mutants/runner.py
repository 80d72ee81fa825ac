"""Runs a notebook against a copy of the packages, and says where it stopped."""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import nbformat
from mutants.faults import Fault
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
PACKAGES = ("berrylm_ref", "kernels/berrylm_kernels")
DATA = (Path("tests/golden"), Path("kernels/benchmarks/results"))  # looked for upwards of the working directory
CELL_TIMEOUT = 120  # seconds; a fault may not hang a run

# The hidden first cell. find_spec imports nothing, so the notebook still decides when the package is loaded.
FIRST_CELL = """
import sys, importlib.util
assert sys.executable == {python!r}, "this kernel runs another Python: " + sys.executable
sys.path.insert(0, {folder!r})
assert importlib.util.find_spec("berrylm_ref").origin.startswith({folder!r}), "the edited copy is not what is imported"
"""


@dataclass(frozen=True)
class Stop:
    """The cell that raised: its tags, the exception's name and text."""

    tags: tuple[str, ...]
    error: str
    text: str


def copy_packages(folder: Path) -> None:
    """Both packages as importable copies in ``folder``, official tensors and measurements where a notebook finds them."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / Path(package).name, ignore=shutil.ignore_patterns("__pycache__"))
    for data in DATA:
        shutil.copytree(ROOT / data, folder / data)


def plant(fault: Fault, folder: Path) -> None:
    """Both packages in ``folder``, one of them with ``fault`` in it."""
    copy_packages(folder)
    source = (ROOT / fault.file).read_text()
    (folder / Path(fault.file).relative_to(package_root(fault))).write_text(fault.edit(source))


def package_root(fault: Fault) -> Path:
    """The folder that holds the package of ``fault.file``. Raises ValueError for a file of neither package."""
    for package in PACKAGES:
        if Path(package) in Path(fault.file).parents:
            return Path(package).parent
    raise ValueError(f"Fault '{fault}': file: expected a file under one of {PACKAGES}, got {fault.file!r}")


def run(notebook: nbformat.NotebookNode, folder: Path) -> Stop | None:
    """Run ``notebook`` with the packages in ``folder`` before any installed ones, up to the first cell that raises."""
    first = nbformat.v4.new_code_cell(FIRST_CELL.format(python=sys.executable, folder=str(folder)))
    notebook = nbformat.v4.new_notebook(cells=[first, *notebook.cells], metadata=notebook.metadata)
    client = NotebookClient(
        notebook, timeout=CELL_TIMEOUT, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    try:
        client.execute()
    except CellExecutionError as error:
        outputs = [(cell, output) for cell in notebook.cells for output in cell.get("outputs", [])]
        stopped = next(cell for cell, output in outputs if output.output_type == "error")
        return Stop(tuple(stopped.metadata.get("tags", ())), error.ename, error.evalue)
    return None


def read(name: str) -> nbformat.NotebookNode:
    """The notebook called ``name`` (without .ipynb)."""
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
