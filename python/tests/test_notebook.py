"""The notebook of the example gallery runs from its first cell to its last."""

import json
import shutil

import pytest
from conftest import ROOT, needs

NOTEBOOK = ROOT / "examples/prune_a_cnn.ipynb"


def test_notebook_runs_and_draws(tmp_path):
    needs("papermill")
    needs("ipykernel")
    needs("matplotlib")
    import papermill

    shutil.copy(NOTEBOOK, tmp_path / "in.ipynb")
    parameters = {"samples": 300, "levels": [0.4, 0.6], "data": str(ROOT / "data")}
    papermill.execute_notebook(
        tmp_path / "in.ipynb", tmp_path / "out.ipynb", parameters=parameters, cwd=tmp_path, progress_bar=False
    )
    done = json.loads((tmp_path / "out.ipynb").read_text())
    outputs = [output for cell in done["cells"] for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert (tmp_path / "sparse.onnx").stat().st_size > 1000


def test_notebook_is_committed_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    if any(cell["outputs"] or cell["execution_count"] for cell in code):
        pytest.fail("clear the outputs of the notebook before committing it")
