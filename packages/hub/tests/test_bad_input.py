"""What people get wrong, and files that others have damaged: one sentence, exit code 2, nothing done."""

import contextlib
import copy
import json
import os
import subprocess
import zipfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plumbob.console import UserError
from plumbob.console.app import run_app
from plumbob.hub.cli import hub as hub_cli
from plumbob.hub.cli import vf_install as install_cli
from plumbob.hub.index.catalog import environment_names, latest, matching
from plumbob.hub.index.entries import checked
from plumbob.hub.installed.registry import GROUP
from plumbob.hub.uv.project import local_sources, read_project, workspace_members

PROJECTS = {
    "not-toml": "this is = not [toml",
    "not-a-table": 'project = "x"',
    "not-points": '[project]\nname = "vf-a"\nversion = "1"\nentry-points = ["a"]',
    "not-a-point": f'[project]\nname = "vf-a"\nversion = "1"\n[project.entry-points."{GROUP}"]\na = 3',
    "not-needs": '[project]\nname = "vf-a"\nversion = "1"\ndependencies = "requests"',
    "not-a-need": '[project]\nname = "vf-a"\nversion = "1"\ndependencies = [3]',
    "nameless": '[project]\nversion = "1"',
}
CATALOGS = {"a-list": "[1, 2]", "nameless": '{"packages": [{"version": "1"}]}', "numbers": '{"packages": [5, null]}',
            "no-list": '{"packages": 7}', "no-json": "<html>"}  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with damaged projects, wheels and indexes."""
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith(("UV_", "PLUMBOB_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "empty").mkdir()
    for name in ("README.md", "x.whl", "x.tar.gz"):
        (tmp_path / name).write_text("text\n")
    zipfile.ZipFile(tmp_path / "vf_x-1.0-py3-none-any.whl", "w").close()
    for name, text in PROJECTS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "pyproject.toml").write_text(text)
    for name, text in CATALOGS.items():
        page = tmp_path / f"index-{name}" / "simple" / "vf-gone"
        page.mkdir(parents=True)
        (page / "index.html").write_bytes(b'<a href="vf_gone-none.whl">vf_gone-none.whl</a>' + bytes(range(256)))
        (page.parent / "index.html").write_text('<a href="vf-gone/">vf-gone</a>')
        (page.parents[1] / "catalog.json").write_text(text)
    return tmp_path


@pytest.fixture
def refused(here, capfd):
    def run(line: list[str]) -> str:
        command, *arguments = line
        app = install_cli.app if command == "vf-install" else hub_cli.app
        before = sorted(here.rglob("*"))
        with pytest.raises(SystemExit) as end:
            run_app(command, app, arguments)
        # What is being done is said first, where git may ask for a passphrase.
        lines = "".join(capfd.readouterr()).strip().splitlines()
        said = "\n".join(line for line in lines if not line.startswith("  cloning "))
        assert end.value.code == 2, said
        assert len(said.splitlines()) == 1 and "Traceback" not in said, said
        assert sorted(p for p in here.rglob("*") if p.suffix != ".lock") == before
        return said

    return run


MISTAKES = [
    ("vf-install", "Missing argument 'NAME'"),
    ("vf-install gsm8k=0.1.0", "'gsm8k=0.1.0' is neither a name, like gsm8k or gsm8k==0.2.0, nor a path"),
    ("vf-install gsm8k==", "'gsm8k==' is neither a name"),
    ("vf-install|", "'' is neither a name"),
    ("vf-install gone>=9 --index empty", "holds no index; make one with `hub index"),
    ("vf-install ./nothing-here", "./nothing-here does not exist"),
    ("vf-install ./README.md", "README.md is not a readable wheel"),
    ("vf-install x.whl", "x.whl is not a readable wheel"),
    ("vf-install ./vf_x-1.0-py3-none-any.whl", "it has no .dist-info directory of its own name"),
    ("vf-install gone --index ftp://example.org/simple", "cannot reach ftp://example.org/simple/"),
    ("vf-install gone --index htp:/example.org", "holds no index"),
    ("hub search gone --index http://[::1:8/", "'http://[::1:8/' is no address: Invalid IPv6 URL"),
    ("hub search gone --index http://h:80a/", "'http://h:80a/' is no address: Port could not be cast"),
    ("vf-install gone --from-repo", "--from-repo needs a repository"),
    ("vf-install gone --from-repo --repo empty", "does not appear to be a git repository"),
    ("vf-install gone --path README.md", "--path README.md is not a directory"),
    ("vf-install gone --idnex x", "No such option"),
    ("vf-install gone -U --index index-a-list", "has no vf-gone, only files that are no wheels"),
    ("vf-install ./empty", "has no pyproject.toml"),
    *((f"vf-install ./{name}", "nameless declares no environment" if name == "nameless" else "pyproject.toml")
      for name in PROJECTS),
    *((f"hub check ./{name}", "pyproject.toml") for name in PROJECTS),
    *((f"hub publish ./{name} --index ./i", "pyproject.toml") for name in PROJECTS),
    ("hub lst", "No such command 'lst'"),
    ("hub info", "Missing argument 'name'"),
    *((f"hub {what} --index index-{c}", "catalog.json is damaged") for c in CATALOGS
      for what in ("search gone", "info gone", "yank gone==1 --reason x")),
    ("hub check nothing-installed", "nothing-installed"),
    ("hub new My-Env!", "is not a valid environment name"),
    ("hub new ../x", "is not a valid environment name"),
    ("hub new xyz --output /proc/x", "cannot be created"),
    ("hub publish ./no-such --index ./i", "has no pyproject.toml"),
    ("hub publish ./nameless --index ./README.md", "README.md holds no index"),
    ("hub index empty -o out", "empty holds no wheel"),
    ("hub index README.md -o out", "README.md is neither a wheel (.whl) nor an sdist (.tar.gz)"),
    ("hub index x.tar.gz -o out", "x.tar.gz cannot be read"),
    ("hub index x.whl -o out", "x.whl cannot be read"),
    ("hub yank gone --index index-a-list --reason x", "names no version; write NAME==VERSION"),
    ("hub yank gone==1 --index index-a-list", "give either --reason to yank the version, or --undo"),
    ("hub check . --setting novalue", "novalue"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "told"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_it_is_one_sentence(line, told, refused):
    assert told in refused([word for part in line.split("|") for word in (part.split() or [""])])


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


def places(value: object, path: tuple = ()) -> list[tuple]:
    """The path of every part of a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(*path, key) for key, _ in inside] + [p for key, v in inside for p in places(v, (*path, key))]


def replaced(value: dict, path: tuple, by: object) -> dict:
    value = copy.deepcopy(value)
    at = value
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = by
    return value


PROJECT = {
    "project": {
        "name": "vf-a", "version": "1.0", "description": "x", "dependencies": ["requests"], "scripts": {"a": "vf_a:b"},
        "optional-dependencies": {"x": ["six"]}, "entry-points": {GROUP: {"a": "vf_a:A"}}, "dynamic": ["urls"],
    },
    "tool": {
        "uv": {
            "index": [{"name": "plumbob", "url": "https://hub.example.org/simple"}],
            "sources": {"six": {"path": "../six"}},
            "workspace": {"members": ["packages/*"]},
        }
    },
}  # fmt: skip


@example(("tool", "uv", "sources", "six", "path"), "\0")
@given(st.sampled_from(places(PROJECT)), VALUES)
@settings(max_examples=300, deadline=None)
def test_a_project_with_any_part_of_another_kind_is_read_or_refused(path, value):
    import plumbob.hub.uv.project as module

    data = replaced(PROJECT, path, value)
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(UserError):
        patch.setattr(module.tomllib, "loads", lambda text: data)
        project = read_project(Path(__file__).parents[1])
        assert all(isinstance(v, str) for v in (project.name, *project.scripts, *project.requires(["x"])))
        assert all(isinstance(v, str) for v in project.entry_points(GROUP).values())
        local_sources(project)
        workspace_members(project) if "workspace" in project.uv else None


ENTRY = {
    "name": "vf-a", "version": "1.0", "summary": "a", "keywords": ["k"], "entry_points": {"a": "vf_a:A"}, "readme": "",
    "requires_python": None, "dependencies": [], "filename": "a.whl", "sha256": "0", "yanked": None,
}  # fmt: skip


@given(st.sampled_from([*places({"packages": [ENTRY]}), ("packages", 0, "missing")]), VALUES)
@settings(max_examples=300, deadline=None)
def test_a_catalog_with_any_part_of_another_kind_is_used_or_refused(path, value):
    catalog = replaced({"packages": [ENTRY]}, path, value)
    with contextlib.suppress(UserError):
        entries = checked(catalog["packages"], "catalog.json")
        json.dumps([matching(entries, "a"), [environment_names(e) for e in latest(entries)]])


def test_an_unknown_name_in_a_repository_that_is_none(refused, here):
    subprocess.run(["git", "init", "--quiet", str(here / "empty")], check=True)
    said = refused(["vf-install", "gone", "--from-repo", "--repo", str(here / "empty")])
    assert f"there is no environment 'gone' in {(here / 'empty').as_uri()}/environments" in said
