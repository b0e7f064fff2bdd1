"""A package may bring only what is its own: refused before anything changes, with the names of both owners."""

import json
import subprocess
import zipfile
from importlib.metadata import distributions

import pytest
import uv
from plumbob.console import UserError
from plumbob.hub.index.contents import COMMANDS, foreign
from plumbob.hub.index.location import locate_target
from plumbob.hub.index.static_index import add_files
from plumbob.hub.index.wheels import read_wheel

SCRIPTS = "[plumbob.environments]\nother = vf_other:Toy\n\n[console_scripts]\n"


@pytest.mark.parametrize(
    ("member", "text", "told"),
    [
        ("torch/__init__.py", "", "it brings torch/__init__.py outside its own package vf_other"),
        ("plumbob/hub/evil.py", "", "it brings plumbob/hub/evil.py outside its own package vf_other"),
        ("plumbob/__init__.py", "", "it brings plumbob/__init__.py outside"),
        ("vf_other_too/__init__.py", "", "it brings vf_other_too/__init__.py outside"),
        ("sitecustomize.py", "", "it brings sitecustomize.py outside"),
        ("numpy-2.0.dist-info/METADATA", "", "it brings numpy-2.0.dist-info/METADATA outside"),
        ("evil.pth", "import os", "it brings evil.pth, whose lines Python runs whenever it starts"),
        (
            "vf_other-1.0.data/scripts/train",
            "#!python",
            "scripts/train, which would be installed outside site-packages",
        ),
        (
            "vf_other-1.0.data/data/etc/x",
            "",
            "it brings vf_other-1.0.data/data/etc/x, which would be installed outside",
        ),
        ("vf_other-1.0.data/headers/x.h", "", "which would be installed outside site-packages"),
        ("vf_other-1.0.data/purelib/torch/x.py", "", "it brings torch/x.py outside its own package"),
        (
            "{info}/entry_points.txt",
            SCRIPTS + "train = vf_other:Toy\n",
            "its command `train` is one of plumbob-trainer",
        ),
        ("{info}/entry_points.txt", SCRIPTS + "hub = vf_other:Toy\n", "its command `hub` is one of plumbob-hub"),
    ],
    ids=lambda value: value[:40],
)
def test_what_is_not_its_own_is_named(member, text, told, make_wheel, repack):
    (problem,) = foreign(read_wheel(repack(make_wheel("vf-other", "1.0", (), "other"), {member: text})))
    assert told in problem


def test_what_record_hides_is_named(make_wheel, repack):
    wheel = make_wheel("vf-other", "1.0", (), "other")
    (unlisted,) = foreign(read_wheel(repack(wheel, {"vf_other/more.py": ""}, unlisted=True)))
    assert "it brings vf_other/more.py, which its RECORD does not list" in unlisted
    (absent,) = foreign(read_wheel(repack(wheel, {}, listed=("torch/__init__.py", "../../../bin/train"))))
    assert "RECORD lists torch/__init__.py, ../../../bin/train, which it does not hold" in absent


@pytest.mark.parametrize("distribution", ["vf-other", "plumbob-shared"])
def test_its_own_package_is_its_own(distribution, make_wheel, repack):
    wheel = make_wheel(distribution, "1.0", (), "other" if distribution == "vf-other" else None)
    module = distribution.replace("-", "_")
    own = {f"{module}/deep/er.py": "", f"{module}-1.0.data/purelib/{module}/y.py": "", "{info}/licenses/LICENSE": "x"}
    own |= {"plumbob/shared/z.py": ""} if distribution == "plumbob-shared" else {}
    assert foreign(read_wheel(repack(wheel, own))) == []


@pytest.fixture
def evil_wheels(make_wheel, repack):
    wheel = make_wheel("vf-other", "1.0", (), "other")
    script = SCRIPTS + "uv = vf_other:Toy\n"
    return {
        "outside its own package": repack(wheel, {"requests/evil.py": "EVIL = 5"}),
        "`uv` is already installed by uv": repack(wheel, {"{info}/entry_points.txt": script, "vf_other/x": ""}),
    }


@pytest.mark.slow
def test_it_is_refused_from_an_index_and_from_a_file_before_anything_changes(
    new_python, evil_wheels, unchecked, tmp_path
):
    python = new_python()
    before = sorted(python.site.rglob("*.py")), sorted((python.root / "bin").iterdir())
    for number, (told, wheel) in enumerate(evil_wheels.items()):
        refused = python.run("vf-install", wheel, code=2)
        assert told in refused.stdout and "vf_other-1.0-py3-none-any.whl is refused" in refused.stdout
        add_files([wheel], tmp_path / str(number))
        assert told in python.run("vf-install", "other", "--index", tmp_path / str(number), code=2).stdout
    assert (sorted(python.site.rglob("*.py")), sorted((python.root / "bin").iterdir())) == before


@pytest.mark.slow
def test_a_library_that_an_environment_needs_is_looked_into_as_well(
    new_python, make_wheel, repack, unchecked, tmp_path
):
    shared = repack(make_wheel("plumbob-shared", "0.1.0"), {"torch/__init__.py": "EVIL = 6"})
    toy = make_wheel("vf-toy", "0.1.0", ("plumbob-shared>=0.1,<0.2",), "toy")
    add_files([shared, toy, make_wheel("vf-other", "1.0", (), "other")], tmp_path / "hub")
    python = new_python()
    done = python.run("vf-install", "toy", "other", "--index", tmp_path / "hub", code=2)
    assert "failed         toy: plumbob_shared-0.1.0-py3-none-any.whl is refused: it brings torch" in done.stdout
    assert python.version("vf-toy") is None and python.version("vf-other") == "1.0"


def test_a_project_with_a_command_of_ours_is_refused(new_python, make_project, tmp_path):
    mine = make_project(tmp_path / "mine", "vf-mine", environment="mine")
    text = (mine / "pyproject.toml").read_text()
    (mine / "pyproject.toml").write_text(f'{text}\n[project.scripts]\ntrain = "vf_mine:Toy"\n')
    python = new_python()
    assert "its command `train` is one of plumbob-trainer" in python.run("vf-install", mine, code=2).stdout
    assert python.version("vf-mine") is None and not (python.root / "bin" / "train").exists()


def test_a_repository_whose_wheel_brings_more_is_refused(new_python, make_project, tmp_path):
    repository = tmp_path / "repository"
    mine = make_project(repository / "environments" / "mine", "vf-mine", environment="mine")
    (mine / "src" / "torch").mkdir()
    (mine / "src" / "torch" / "__init__.py").touch()
    backend = '\n[tool.uv.build-backend]\nmodule-name = ["vf_mine", "torch"]\n'
    (mine / "pyproject.toml").write_text((mine / "pyproject.toml").read_text() + backend)
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "--quiet"], ["add", "."], [*identity, "commit", "--quiet", "-m", "one"]):
        subprocess.run(["git", "-C", str(repository), *command], check=True)
    python = new_python()
    refused = python.run("vf-install", "mine", "--from-repo", "--repo", repository, code=2)
    assert "it brings torch/__init__.py outside its own package vf_mine" in refused.stdout
    assert python.version("vf-mine") is None


@pytest.mark.slow
def test_a_taken_name_is_refused_with_both_owners(new_python, make_wheel, make_project, tmp_path):
    add_files(
        [make_wheel("vf-collide", "1.0", (), "other"), make_wheel("vf-other", "1.0", (), "other")], tmp_path / "hub"
    )
    python = new_python()
    both = python.run("vf-install", "collide", "other==1.0", "--index", tmp_path / "hub", code=2)
    assert "installed      vf-collide 1.0" in both.stdout
    assert (
        "failed         other==1.0: vf-other provides the environment 'other', and so does vf-collide; "
        "nothing was changed; install only one of the two" in both.stdout
    )
    project = make_project(tmp_path / "mine", "vf-mine", environment="other")
    sources = {"vf-other": ["other==1.0", "--index", tmp_path / "hub"], "vf-mine": [project]}
    sources["vf-other "] = [make_wheel("vf-other", "1.0", (), "other")]
    for distribution, arguments in sources.items():
        refused = python.run("vf-install", *arguments, code=2)
        assert (
            f"{distribution.strip()} provides the environment 'other', and so does the installed vf-collide 1.0; nothing "
            "was changed; to replace it, first run `uv pip uninstall vf-collide`" in refused.stdout
        )
    assert python.version("vf-other") is None and python.version("vf-mine") is None


@pytest.mark.slow
def test_an_installed_conflict_is_named_by_every_command(new_python, make_wheel, hub_index):
    python = new_python()
    for name in ("vf-collide", "vf-other"):
        wheel = make_wheel(name, "1.0", (), "other")
        python.run("uv", "pip", "install", "--python", python.root / "bin" / "python", wheel)
    told = "environment 'other' is provided by"
    for command in (["vf-install", "other"], ["hub", "info", "other"], ["hub", "check", "other"]):
        done = python.run(*command, code=2)
        said = done.stdout + done.stderr
        assert told in said and "vf-collide 1.0" in said and "vf-other 1.0" in said and "already there" not in said
    upgraded = python.run("vf-install", "other", "--upgrade", "--index", hub_index, code=2)
    assert "and so does the installed vf-collide 1.0" in upgraded.stdout
    rows = json.loads(python.run("hub", "list", "--json").stdout)
    assert [row["status"] for row in rows] == ["conflict", "conflict"]


def test_our_commands_are_those_of_the_projects():
    import tomllib
    from pathlib import Path

    root = Path(__file__).parents[3]
    projects = [tomllib.loads(file.read_text())["project"] for file in root.glob("packages/*/pyproject.toml")]
    projects.append(tomllib.loads((root / "trainer" / "pyproject.toml").read_text())["project"])
    assert {script: p["name"] for p in projects for script in p.get("scripts", {})} == COMMANDS


def test_hub_check_names_it_too(make_project, tmp_path, monkeypatch):
    from plumbob.hub.check.contents import contents
    from plumbob.hub.check.target import of_distribution, of_project
    from plumbob.hub.publish.publish import publish, publishing_to
    from plumbob.hub.uv.project import read_project

    mine = make_project(tmp_path / "mine", "vf-mine", environment="mine")
    assert contents(of_project(read_project(mine)), 600).status == "ok"
    text = (mine / "pyproject.toml").read_text()
    backend = '\n[tool.uv.build-backend]\nmodule-name = ["vf_mine", "torch"]\n'
    (mine / "pyproject.toml").write_text(f'{text}\n[project.scripts]\ntrain = "vf_mine:Toy"\n{backend}')
    (mine / "src" / "torch").mkdir()
    (mine / "src" / "torch" / "__init__.py").touch()
    found = contents(of_project(read_project(mine)), 600)
    assert found.status == "FAIL" and len(found.problems) == 2
    assert "it brings torch/__init__.py outside its own package vf_mine" in found.problems[0]
    assert "its command `train` is one of plumbob-trainer" in found.problems[1]
    with pytest.raises(UserError, match="mine is not published: it brings torch/__init__.py outside"):
        publish([mine], publishing_to(locate_target("./hub", tmp_path), None), None)
    (wheel,) = [built for built in [_built(mine, tmp_path / "dist")] if built.name.startswith("vf_mine")]
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (here,) = distributions(path=[str(tmp_path / "site")])
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert len(contents(of_distribution(here), 600).problems) == 2
    (mine / "pyproject.toml").write_text(text.replace("uv_build>=0.9,<0.14", "a-backend-9f3b"))
    (cannot,) = contents(of_project(read_project(mine)), 600).problems
    assert " cannot be built: " in cannot and "a-backend-9f3b" in cannot


def _built(project, out):
    subprocess.run([uv.find_uv_bin(), "build", "--quiet", "--wheel", "--out-dir", out, project], check=True)
    return next(out.glob("*.whl"))
