"""verifiers without its clients' packages: what is put off, and that whoever uses it later finds all of it."""

import importlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from plumbob.rollout.verifiers_import import OnDemand, put_off

REAL = """
import sys
from plumbob.rollout.verifiers_import import OnDemand, import_verifiers
import_verifiers()
from plumbob.rollout.tasksets import setting_names
assert "split" in setting_names("vf_lookup")
off = {name for name, module in sys.modules.items() if type(module) is OnDemand}
assert off == {
    "anthropic", "anthropic.types", "mcp", "mcp.server", "mcp.server.mcpserver", "prime_sandboxes", "verifiers.v1.tasksets"
}, off
unused = ("anthropic._client", "anthropic.types.beta", "mcp.client.client", "mcp.server.lowlevel", "starlette", "uvicorn")
assert not {*unused, "prime_sandboxes.sandbox"} & set(sys.modules)

import anthropic, mcp, prime_sandboxes
from anthropic.types import Message, MessageParam, Usage
from mcp.server.mcpserver import MCPServer
from mcp import *
from verifiers.v1.dialects.anthropic import AnthropicMessage, AnthropicUsage
assert (AnthropicMessage, AnthropicUsage) == (Message, Usage) and anthropic.types.Message is Message
assert anthropic.AsyncAnthropic(api_key="k").messages and set(anthropic.__all__) <= set(dir(anthropic))
assert mcp.ClientSession is ClientSession and prime_sandboxes.AsyncSandboxClient
import verifiers.v1 as vf
from verifiers.v1.tasksets import HarborTaskset
assert vf.import_taskset("harbor").HarborTaskset is HarborTaskset
assert not [name for name in off if type(sys.modules[name]) is OnDemand]
"""


@pytest.mark.slow
def test_verifiers_clients_are_put_off_and_found_when_they_are_used():
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


FILES = {
    "__init__.py": "import threading\nfrom .parts import Part\nfrom . import inner\nsetting = None\nruns = []\n"
    "runs.append(threading.get_ident())\n__all__ = ['Part', 'setting']\n",
    "parts.py": "class Part: pass\n",
    "lone.py": "from .parts import Part\n",
    "inner/__init__.py": "from ..parts import Part\nWide = 1\n",
    "inner/deep.py": "Deep = 2\n",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The name of a made package, which is forgotten afterwards."""
    name = "a_made_package"
    for path, text in FILES.items():
        file = tmp_path / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    for found in [module for module in sys.modules if module.split(".")[0] == name]:
        del sys.modules[found]


def test_submodules_come_without_the_packages_code(package):
    put_off({package: {"Part": f"{package}.parts"}, f"{package}.inner": {}})
    made = importlib.import_module(package)
    deep = importlib.import_module(f"{package}.inner.deep")
    assert type(made) is OnDemand and type(sys.modules[f"{package}.inner"]) is OnDemand
    assert made.Part is sys.modules[f"{package}.parts"].Part and deep.Deep == 2
    assert "runs" not in vars(made) and made.inner.Wide == 1 and made.inner.deep is deep
    part = made.Part
    assert len(made.runs) == 1 and type(made) is type(sys) and made.Part is part
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = made.other


@pytest.mark.parametrize("name", ["threading", "deep"])
def test_asking_for_a_module_runs_a_package_only_if_its_code_or_its_folder_names_it(package, monkeypatch, name):
    put_off({package: {}, f"{package}.inner": {}})
    made = sys.modules[package if name == "threading" else f"{package}.inner"]
    assert not hasattr(made, "pytest") and type(made) is OnDemand  # pickle asks all modules for `torch`
    monkeypatch.setitem(sys.modules, "deep", sys)
    assert hasattr(made, name) == (name == "threading") and type(made) is type(sys)
    assert {"Part", "setting", "runs"} <= set(dir(sys.modules[package]))  # also if it has not run


def test_what_a_user_sets_is_not_lost_when_the_code_runs(package):
    put_off({package: {}})
    made = importlib.import_module(package)
    made.setting = 7
    assert len(made.runs) == 1 and made.setting == 7


def test_the_code_runs_once_for_all_threads(package):
    put_off({package: {}})
    made = importlib.import_module(package)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: made.setting, range(8))) == {None}
    assert len(made.runs) == 1


def test_code_that_fails_fails_each_time(package, monkeypatch):
    monkeypatch.setitem(sys.modules, f"{package}.parts", None)  # Python's mark for what cannot be imported
    put_off({package: {"Part": f"{package}.parts"}})
    made = importlib.import_module(package)
    for _ in range(2):
        with pytest.raises(ImportError):
            _ = made.runs


def test_what_is_imported_stays_as_it_is(package):
    made = importlib.import_module(package)
    put_off({package: {}, f"{package}.inner": {}, f"{package}.no_such_part": {}, "no_such_package": {}})
    assert sys.modules[package] is made and type(made.inner) is type(sys)
