import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from plumbob.console import UserError
from plumbob.hub.check.check import run_check
from plumbob.hub.check.metadata import metadata
from plumbob.hub.check.target import of_project
from plumbob.hub.publish.scaffold import check_name, create, next_commands, render
from plumbob.hub.uv.command import find_uv
from plumbob.hub.uv.project import read_project

HUB = Path(__file__).parents[1]


def hub(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", "from plumbob.hub.cli.main import hub; hub()", *args]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--tools"]], ids=["single", "tools"])
def test_a_new_environment_passes_the_check_as_it_is(tmp_path, flags):
    made = hub("new", "my-env", "--output", str(tmp_path), *flags)
    assert made.returncode == 0, made.stderr
    directory = tmp_path / "my-env"
    assert f"hub check {directory}\n" in made.stdout and "evaluate my-env --oracle" in made.stdout
    report = run_check(directory)
    assert report.failures == []
    assert {r.check for r in report.results if r.status == "skip"} == set()
    project = directory / "pyproject.toml"
    assert "of `hub new`: say what" in report.text()
    project.write_text(re.sub('description = ".*"', 'description = "Sum the digits"', project.read_text()))
    assert "of `hub new`" not in metadata(of_project(read_project(directory))).measured


@pytest.mark.slow
def test_the_tests_of_new_environments_pass(tmp_path):
    made = [create("one-turn", tmp_path), create("with-tool", tmp_path, tools=True)]
    path = os.pathsep.join(str(directory / "src") for directory in made)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), *map(str, made)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "17 passed" in done.stdout


@pytest.mark.parametrize("tools", [False, True])
def test_a_new_environment_is_formatted_linted_and_builds(tmp_path, tools):
    directory = create("aa-longer-name-for-it", tmp_path, tools=tools)
    settings = ["--line-length", "120", "--no-cache", "--isolated"]
    ruff = [sys.executable, "-m", "ruff"]
    for command in ([*ruff, "format", "--check", *settings], [*ruff, "check", "--select", "E,F,I,UP,B,RUF", *settings]):
        done = subprocess.run([*command, str(directory)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    out = build(directory, tmp_path / "dist")
    assert "vf_aa_longer_name_for_it/taskset.py" in out.namelist()


def build(directory: Path, out: Path) -> zipfile.ZipFile:
    command = [find_uv(), "build", "--wheel", "--no-sources", "--out-dir", str(out), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_the_templates_are_in_the_wheel(tmp_path):
    templates = {str(p.relative_to(HUB / "src")) for p in (HUB / "src").rglob("*.tmpl")}
    assert len(templates) == 10
    assert templates <= set(build(HUB, tmp_path).namelist())


def test_a_new_environment_has_what_an_index_shows(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "user.name")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", 'Ada "the first" Lovelace')
    wheel = build(create("my-env", tmp_path), tmp_path / "dist")
    metadata = wheel.read("vf_my_env-0.1.0.dist-info/METADATA").decode()
    for line in ('Author: Ada "the first" Lovelace', "License-Expression: Apache-2.0", "Classifier: Typing :: Typed"):
        assert f"\n{line}\n" in metadata
    license_text = (HUB.parents[1] / "LICENSE").read_bytes()
    assert wheel.read("vf_my_env-0.1.0.dist-info/licenses/LICENSE") == license_text
    assert wheel.read("vf_my_env/py.typed") == b"" and "](." not in metadata
    assert "authors" not in render("my-env", "single")["pyproject.toml"]


def test_every_name_of_an_environment_gives_the_same_one():
    assert {check_name(name) for name in ("my-env", "My_Env", "vf-my-env", "vf_my.env")} == {"my-env"}
    files = render("my-env", "single")
    project = tomllib.loads(files["pyproject.toml"])["project"]
    assert project["name"] == "vf-my-env"
    assert project["entry-points"]["plumbob.environments"] == {"my-env": "vf_my_env:MyEnvTaskset"}
    assert not [path for path, text in files.items() if "${" in text]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("", "'' is not a valid environment name"),
        ("2048", "a letter first"),
        ("a/b", "'a/b' is not a valid environment name"),
        ("..", "is not a valid environment name"),
        ("x" * 41, "at most 40"),
        ("grüße", "is not a valid environment name"),
        ("lookup", "'lookup' is already installed \\(vf-lookup\\)"),
        ("vf_gsm8k", "'gsm8k' is already installed"),
        ("class", "a Python keyword"),
        ("json", "a module of Python's standard library"),
        ("numpy", "'numpy' is already an installed module"),
    ],
)
def test_names_that_will_not_do(tmp_path, name, told):
    with pytest.raises(UserError, match=told):
        create(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "work.py").write_text("precious")
    with pytest.raises(UserError, match="already exists, and `hub new` overwrites nothing"):
        create("mine", tmp_path)
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["work.py"]
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be created|already exists"):
        create("mine", tmp_path / "file")


def test_the_next_commands_can_be_pasted():
    assert next_commands(Path("my-env")).splitlines()[:2] == ["  hub check ./my-env", "  vf-install ./my-env"]
    assert "hub check ../x/my-env" in next_commands(Path("../x/my-env"))
