"""What must hold for the notebooks as files; nbval runs them and compares their outputs."""

from pathlib import Path

import nbformat

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def faults(notebook):
    """What in this notebook would fail, or mislead, on another machine."""
    found = []
    kernel = notebook.metadata.get("kernelspec", {}).get("name")
    if kernel != "python3":
        found.append(f"kernelspec is {kernel!r}, not 'python3'")
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    if counts != list(range(1, len(counts) + 1)):
        found.append(f"not one run from top to bottom: execution counts {counts}")
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and output.name == "stderr":
                found.append(f"cell {cell.execution_count} wrote to stderr: {output.text[:80]!r}")
    return found


def test_notebooks_were_run_from_top_to_bottom_in_the_common_kernel():
    """NB-1, NB-2: nbval picks the current environment whatever the file says, so a notebook saved in a kernel of its
    author's passes CI and fails with "no such kernel" for a reader. Cells run out of order, or a warning of some
    library that was stored as an output, also show only elsewhere."""
    found = {path.name: faults(nbformat.read(path, as_version=4)) for path in sorted(NOTEBOOKS.glob("*.ipynb"))}
    assert not {name: why for name, why in found.items() if why}


def test_the_check_sees_each_fault():
    """A sound notebook passes, and each single fault is named."""

    def notebook(kernel="python3", **cell):
        metadata = {"kernelspec": {"name": kernel, "display_name": "Python"}}
        code = nbformat.v4.new_code_cell("1", **({"execution_count": 1} | cell))
        return nbformat.v4.new_notebook(cells=[code], metadata=metadata)

    warning = nbformat.v4.new_output("stream", name="stderr", text="DeprecationWarning")
    assert faults(notebook()) == []
    assert "kernelspec" in faults(notebook(kernel="my-env"))[0]
    assert "execution counts" in faults(notebook(execution_count=7))[0]
    assert "stderr" in faults(notebook(outputs=[warning]))[0]
