"""Each notebook can fail: with a fault planted in the package, its check cell raises. The table is in faults.py."""

import ast
import re
from collections import Counter

import nbformat
import pytest
from mutants.faults import FAULTS, Fault
from mutants.runner import NOTEBOOKS, ROOT, copy_packages, package_root, plant, read, run

NAMES = sorted({fault.notebook for fault in FAULTS})


def assert_caught(fault, folder):
    plant(fault, folder)
    stop = run(read(fault.notebook), folder)
    assert stop is not None, f"{fault}: the notebook ran to its end and noticed nothing"
    assert "check" in stop.tags, f"{fault}: stopped outside the check cells: {stop.error}: {stop.text}"
    assert stop.error == "AssertionError", f"{fault}: the check cell crashed, not judged: {stop.error}: {stop.text}"


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.ci], ids=str)
def test_a_quick_fault_is_caught(fault, tmp_path):
    """The few rows that every run of the suite pays for."""
    assert_caught(fault, tmp_path)


@pytest.mark.mutants
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_is_caught(fault, tmp_path):
    assert_caught(fault, tmp_path)


@pytest.mark.mutants
@pytest.mark.parametrize("name", NAMES)
def test_the_notebook_runs_through_against_an_unedited_copy(name, tmp_path):
    """Otherwise the copying, not the fault, could be what its check catches."""
    copy_packages(tmp_path)
    assert run(read(name), tmp_path) is None


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_row_still_fits_the_source(fault):
    """A row whose text is gone from the file, or stands there twice, plants nothing or something else."""
    package_root(fault)
    source = (ROOT / fault.file).read_text()
    edited = fault.edit(source)
    assert ast.dump(ast.parse(edited)) != ast.dump(ast.parse(source)), f"{fault}: only the layout or a comment changes"


def test_every_notebook_has_a_fault_and_a_check_that_can_fail():
    """A notebook without a row, or with a check cell that asserts nothing, is one that nobody has seen fail."""
    present = {path.stem for path in NOTEBOOKS.glob("*.ipynb")}
    assert present <= set(NAMES), f"without a row: {sorted(present - set(NAMES))}"
    assert present >= set(NAMES), f"a row, but no notebook: {sorted(set(NAMES) - present)}"
    for name in NAMES:
        checks = [cell for cell in read(name).cells if "check" in cell.metadata.get("tags", ())]
        assert checks, f"{name}: no cell is tagged 'check'"
        for cell in checks:  # itself, or through a function `check` that the notebook defines with an assert
            assert re.search(r"\bassert\b|^\s*check\(", cell.source, re.MULTILINE), f"{name}: a check cell without an assertion"


def test_ids_are_unique():
    """Two rows of one id could not be told apart, or run alone."""
    assert not [row for row, count in Counter(map(str, FAULTS)).items() if count > 1]


def test_an_edit_that_does_not_fit_is_refused():
    """Text that is absent, text that occurs twice, and a file of no package are named, not planted."""
    twice = Fault("nb", "berrylm_ref/ops/kda.py", "a", "b", "story")
    with pytest.raises(ValueError, match="once in berrylm_ref/ops/kda.py, got 2 times"):
        twice.edit("a + a")
    with pytest.raises(ValueError, match="got 0 times"):
        twice.edit("c")
    with pytest.raises(ValueError, match="expected a file under one of"):
        package_root(Fault("nb", "tests/helpers.py", "a", "b", "story"))


def test_the_runner_tells_a_failed_check_from_a_broken_notebook(tmp_path):
    """The copy is what the kernel imports; a false check, a crash before it and a pass are three different answers."""
    (tmp_path / "berrylm_ref").mkdir()
    (tmp_path / "berrylm_ref" / "__init__.py").write_text("HEADS = 2\n")

    def stop(*sources):
        cells = [nbformat.v4.new_code_cell(source) for source in sources]
        cells[-1].metadata["tags"] = ["check"]
        return run(nbformat.v4.new_notebook(cells=cells), tmp_path)

    assert stop("import berrylm_ref", "assert berrylm_ref.HEADS == 2") is None
    failed = stop("import berrylm_ref", "assert berrylm_ref.HEADS == 3, 'two heads'")
    assert (failed.tags, failed.error, failed.text) == (("check",), "AssertionError", "two heads")
    crashed = stop("from berrylm_ref import missing", "assert True")
    assert (crashed.tags, crashed.error) == ((), "ImportError")
