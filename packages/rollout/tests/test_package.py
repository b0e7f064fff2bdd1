"""The package's face, and what importing it costs."""

import json
import subprocess
import sys

import plumbob.rollout
import pytest
from plumbob.rollout import Completion, Sample

HEAVY = ("torch", "transformers", "tokenizers", "verifiers", "renderers", "mcp", "openai", "pydantic", "numpy")


def test_importing_it_loads_nothing_heavy():
    program = "import json, sys, plumbob.rollout; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert "plumbob.rollout.runner" in loaded
    assert not loaded & set(HEAVY)


def test_all_names_exist_and_are_sorted():
    names = plumbob.rollout.__all__
    assert names == sorted(names) and len(set(names)) == len(names)
    public = {
        name
        for name, value in vars(plumbob.rollout).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("plumbob.")
    }
    assert public == set(names)


def test_rows_and_completions_of_unequal_lengths_are_refused():
    with pytest.raises(ValueError, match="3 tokens needs as many log-probabilities, got 1"):
        Completion((1, 2, 3), (0.0,), "stop")
    with pytest.raises(ValueError, match="must have one length"):
        Sample([1, 2], [True], [0.0, 0.0], 1.0, "g", "agent_completed", False)
