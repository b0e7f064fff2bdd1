import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from plumbob.console import UserError
from plumbob.hub import find, installed
from plumbob.hub.installed.listing import rows
from plumbob.hub.installed.registry import scan
from plumbob.testing.upstream_style import FOLDER


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Put a plugin on the path: its metadata, as an installer writes it, and no code."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def install(distribution: str, points: str, metadata: bytes | None = None) -> Path:
        info = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.4\nName: {distribution}\nVersion: 1.0\nSummary: A plugin\n\n# README\n"
        (info / "METADATA").write_bytes(text.encode() if metadata is None else metadata)
        (info / "entry_points.txt").write_text(f"[plumbob.environments]\n{points}\n")
        return site

    return install


@pytest.mark.parametrize("name", ["lookup", "vf-lookup", "vf_lookup", "LOOKUP"])
def test_an_environment_is_found_by_each_of_its_names(name):
    assert find(name).distribution == "vf-lookup"
    assert find(name).load().__name__ == "LookupTaskset"


def test_a_near_miss_gets_a_suggestion_and_the_install_line():
    with pytest.raises(UserError, match="there is no environment 'lokup'; did you mean 'lookup'?.*`vf-install lokup`"):
        find("lokup")
    with pytest.raises(UserError, match="installed: gsm8k, lookup.*To install it: `vf-install xyzzy`"):
        find("xyzzy")


def test_two_claims_to_one_name_are_refused_with_both_owners_and_how_to_choose(plugin):
    plugin("vf-math", "math = a:A")
    plugin("evil-math", "vf_math = b:B")
    with pytest.raises(UserError, match="provided by vf-math 1.0 and evil-math 1.0; .*`uv pip uninstall vf-math`"):
        find("math")
    claims = {r["distribution"]: r for r in rows() if r["status"] == "conflict"}
    assert set(claims) == {"vf-math", "evil-math"}
    assert (
        claims["vf-math"]["reason"]
        == "evil-math also provides an environment of this name; uninstall one of these packages"
    )


def test_a_broken_plugin_names_itself_and_harms_no_other(plugin):
    plugin("vf-broken", "broken = no_such_module_at_all:A")
    plugin("vf-exits", "exits = antigravity_of_nobody:A\nfine = json:JSONDecoder")
    names = [e.name for e in installed()]
    assert {"broken", "exits", "fine", "lookup"} <= set(names)
    assert find("fine").load().__name__ == "JSONDecoder"
    with pytest.raises(
        UserError, match="'broken' \\(vf-broken 1.0\\) is installed but does not load: ModuleNotFoundError"
    ):
        find("broken").load()


def test_metadata_that_cannot_be_read_is_listed_as_broken(plugin):
    """importlib's own entry_points() raises for every plugin if one file is like this."""
    plugin("vf-garbage", "a line without an equals sign")
    plugin("vf-fine", "fine = json:JSONDecoder")
    environments, broken = scan()
    assert "fine" in [e.name for e in environments]
    assert [b.distribution for b in broken] == ["vf-garbage"]
    assert "its metadata cannot be read" in next(r for r in rows() if r["status"] == "broken")["reason"]


@pytest.mark.slow
def test_check_loads_each_and_says_which_do_not(new_python, make_wheel):
    python = new_python()
    bad = {
        "raises": "raise RuntimeError('no data here')",
        "exits": "import os; os._exit(7)",
    }
    for name, body in bad.items():
        python.run("vf-install", make_wheel(f"vf-{name}", "0.1.0", (), name, body), code=1)
    python.run("vf-install", make_wheel("vf-other", "1.0", (), "other"))
    unchecked = json.loads(python.run("hub", "list", "--json").stdout)
    assert [(e["name"], e["status"]) for e in unchecked] == [("exits", "ok"), ("other", "ok"), ("raises", "ok")]
    checked = {
        e["name"]: (e["status"], e["reason"]) for e in json.loads(python.run("hub", "list", "--check", "--json").stdout)
    }
    assert checked == {
        "exits": ("broken", "importing it ended the process with exit code 7"),
        "other": ("ok", ""),
        "raises": ("broken", "RuntimeError: no data here"),
    }
    assert "BROKEN: RuntimeError: no data here" in python.run("hub", "list", "--check").stdout


def test_fifty_plugins_are_listed_without_importing_more_than_one_needs(plugin):
    """What makes `hub list` slow is what it imports: their number, unlike seconds, does not depend on a busy machine."""

    def modules(plugins: int) -> int:
        command = [Path(sys.executable).parent / "hub", "list", "--json"]
        environ = {**os.environ, "PYTHONPATH": str(site), "PYTHONPROFILEIMPORTTIME": "1"}
        done = subprocess.run(command, capture_output=True, check=True, text=True, env=environ)
        assert len(json.loads(done.stdout)) >= plugins
        return len(done.stderr.splitlines())

    site = plugin("vf-plugin", "plugin = vf_plugin:Taskset")
    one = modules(1)
    for i in range(50):
        plugin(f"vf-plugin{i}", f"plugin{i} = vf_plugin{i}:Taskset")
    assert modules(51) == one < 300


@pytest.mark.slow
def test_a_taskset_without_an_entry_point_is_found_by_its_id_for_verifiers(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    for name in ("number-game", "number_game", "someone/number-game@1.2"):
        found = find(name)
        assert (found.name, found.module, found.load().__name__) == ("number-game", "number_game", "GameTaskset")
    assert "number-game" not in [e.name for e in installed()]


def test_a_module_that_is_no_taskset_is_not_taken_for_one(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mere_module.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "half_taskset.py").write_text("import verifiers.v1 as vf\n")
    for name in ("mere_module", "json", "no such name", "verifiers", "plumbob"):
        with pytest.raises(UserError, match="there is no environment"):
            find(name)
    with pytest.raises(UserError, match=r'exports 0 subclasses .*add the line `__all__ = \["YourTaskset"\]`'):
        find("half_taskset").load()


def test_upstreams_own_tasksets_are_found():
    """Only found: the one below needs an extra of verifiers, and says which."""
    assert find("textarena").module == "textarena"
    with pytest.raises(UserError, match="textarena requires nltk and textarena"):
        find("textarena").load()
