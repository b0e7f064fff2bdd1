"""The package's face, and what importing it costs."""

import json
import subprocess
import sys
from pathlib import Path

import plumbob.retrieval

HEAVY = ("torch", "transformers", "sentence_transformers", "scipy", "numpy", "bm25s", "rank_bm25", "httpx", "tenacity")


def loaded_by(code: str) -> set[str]:
    """The modules that a process has loaded after `code`, in which `r` is plumbob.retrieval."""
    program = f"import json, sys, plumbob.retrieval as r\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_importing_it_and_checking_names_loads_nothing_heavy():
    loaded = loaded_by("for name in ('bm25', 'semantic', 'hybrid/rrf'): r.check_name(name)")
    assert not loaded & {*HEAVY, "verifiers"}


def test_bm25_loads_neither_torch_nor_scipy():
    loaded = loaded_by("r.build('bm25', [r.Document('1', 'a title', 'some words')]).search('words', 1)")
    assert not loaded & {"torch", "scipy", "sentence_transformers", "httpx", "bm25s"}


def test_a_missing_extra_is_one_sentence_with_the_install_line():
    program = (
        "import importlib.util as u, plumbob.retrieval as r\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'sentence_transformers' else real(name, *rest)\n"
        "try: r.check_name('hybrid')\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'plumbob-retrieval[semantic]'" in done.stdout and done.stdout.count("\n") == 1


def test_all_names_exist_and_are_sorted():
    names = plumbob.retrieval.__all__
    assert names == sorted(names) and len(set(names)) == len(names)
    public = {
        name
        for name, value in vars(plumbob.retrieval).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("plumbob.")
    }
    assert public == set(names)


def test_the_readme_s_example_is_true(capsys):
    readme = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    code = readme.split("```python\n")[1].split("```")[0]
    exec(code, {})
    printed = [line.partition("# ")[2] for line in code.splitlines() if line.startswith("print")]
    assert capsys.readouterr().out.splitlines() == printed
