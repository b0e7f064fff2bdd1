"""The notebook of the main job runs from its first cell to its last, and shows a run that learned."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs/notebooks/main_job.ipynb"


def test_the_notebook_is_committed_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 5 and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert NOTEBOOK.stat().st_size < 20_000


@pytest.mark.slow
@pytest.mark.long
def test_the_notebook_trains_and_shows_a_run_that_learned(tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    # As `uv run jupyter` sets it: the commands of the environment are found by their names.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()

    run = tmp_path / "runs" / "notebook"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == list(range(1, 9))
    assert sum(row["reward/mean"] for row in metrics[-2:]) / 2 > metrics[0]["reward/mean"] + 0.2
    held_out = json.loads((run / "summary.json").read_text())["evaluations"]
    assert held_out["after"]["greedy"]["mean"] > held_out["before"]["greedy"]["mean"] + 0.1
    assert (run / "model" / "model.safetensors").is_file() and (run / "traces" / "step_8.jsonl.gz").is_file()

    environments, training, plot, table, tokens, doctor = [
        cell["outputs"] for cell in notebook.cells if cell["cell_type"] == "code"
    ]
    assert all(name in text_of(environments) for name in ("lookup", "gsm8k", "musique"))
    assert "held-out reward, 64 tasks" in text_of(training)
    assert any("image/png" in output.get("data", {}) for output in plot)
    assert f"{held_out['after']['greedy']['mean']:.3f}" in text_of(table)
    # Sampled tokens, and no others, have a log-probability.
    rows = re.findall(r"^ *\d+  (\w+) +(-?\d\.\d{4})?  ", text_of(tokens), re.MULTILINE)
    assert len(rows) > 20 and all((origin == "sampled") == bool(logprob) for origin, logprob in rows)
    assert {"sampled", "template"} <= {origin for origin, _ in rows}
    assert "No cause found" in text_of(doctor)


def text_of(outputs: list) -> str:
    """What a cell printed."""
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream")
