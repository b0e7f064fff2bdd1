"""`vf-install` from every source, into clean virtual environments."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_name_from_an_index_over_http_and_from_a_folder(new_python, hub_index, serve):
    server = serve(hub_index)
    python = new_python()
    done = python.run("vf-install", "toy==0.1.0", "vf_other", "--index", server.url)
    assert f"installed      vf-toy 0.1.0 from {server.url}" in done.stdout
    assert "installed      vf-other 1.0" in done.stdout
    assert "train it: train toy    evaluate it: evaluate toy" in done.stdout
    assert python.version("plumbob-shared") == "0.1.0"

    again = python.run("vf-install", "toy==0.1.0", "--index", server.url)
    assert "already there  vf-toy 0.1.0" in again.stdout
    for index in (str(hub_index), (hub_index / "simple").as_uri()):
        upgraded = python.run("vf-install", "toy", "--upgrade", "--index", index)
        assert "vf-toy 0.2.0" in upgraded.stdout
    assert "already there  vf-toy 0.2.0" in upgraded.stdout

    listed = json.loads(python.run("hub", "list", "--json").stdout)
    assert [(e["name"], e["version"], e["status"]) for e in listed] == [("other", "1.0", "ok"), ("toy", "0.2.0", "ok")]


@pytest.mark.slow
def test_several_names_end_in_one_summary(new_python, hub_index):
    python = new_python()
    python.run("vf-install", "other", "--index", hub_index)
    done = python.run("vf-install", "toy", "tyo", "other", "./nowhere", "toy==9", "--index", hub_index, code=2)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("installed      vf-toy 0.2.0 from file://")
    assert lines[1].startswith("failed         tyo: 'tyo' is not on file://") and "did you mean 'toy'?" in lines[1]
    assert lines[2] == "already there  vf-other 1.0"
    assert (
        lines[3]
        == "failed         ./nowhere: ./nowhere does not exist; give the path of a project directory or of a wheel"
    )
    assert lines[4].startswith("failed         toy==9: file://") and lines[4].endswith(
        "has no vf-toy==9, only 0.1.0, 0.2.0"
    )


def test_one_that_uv_cannot_install_does_not_keep_the_others_out(new_python, make_wheel, tmp_path):
    from plumbob.hub.index.static_index import add_files

    needs_nothing_real = make_wheel("vf-torn", "0.1.0", ("a-name-that-nobody-has-9f3b>=1",), "torn")
    add_files([make_wheel("vf-other", "1.0", (), "other"), needs_nothing_real], tmp_path / "hub")
    python = new_python()
    empty = tmp_path / "empty"
    (empty / "simple").mkdir(parents=True)
    done = python.run(
        "vf-install", "torn", "other", "--index", tmp_path / "hub", code=1, UV_DEFAULT_INDEX=empty.as_uri()
    )
    failed, installed = done.stdout.splitlines()[:2]
    assert failed.startswith("failed         torn:") and "a-name-that-nobody-has-9f3b" in failed
    assert installed.startswith("installed      vf-other 1.0")
    assert python.version("vf-torn") is None


def test_it_installs_into_the_interpreter_that_runs_it(new_python, hub_index):
    """A variable of uv's own once sent an installation into another interpreter."""
    python, other = new_python(), new_python()
    python.run(
        "vf-install", "other", "--index", hub_index,
        UV_PYTHON=str(other.root / "bin" / "python"), VIRTUAL_ENV=str(other.root), UV_SYSTEM_PYTHON="1",
        UV_PROJECT_ENVIRONMENT=str(other.root),
    )  # fmt: skip
    assert python.version("vf-other") == "1.0"
    assert other.version("vf-other") is None


@pytest.mark.slow
def test_paths_are_editable_and_a_bare_name_means_the_environment_nearby(new_python, make_project, tmp_path):
    here = tmp_path / "here"
    make_project(here / "environments" / "mine", "vf-mine", environment="mine")
    python = new_python()
    assert "installed      vf-mine 0.1.0 from" in python.run("vf-install", "mine", cwd=here).stdout
    assert (python.site / "vf_mine.pth").read_text().strip() == str(here / "environments" / "mine" / "src")
    make_project(here / "elsewhere" / "other", "vf-second", environment="second")
    assert "vf-second 0.1.0" in python.run("vf-install", "vf_second", "-p", "elsewhere", cwd=here).stdout
    assert "vf-second 0.1.0" in python.run("vf-install", "./elsewhere/other", cwd=here).stdout
    refused = python.run("vf-install", "secnod", "-p", "elsewhere", cwd=here, code=2)
    assert "did you mean 'second'?" in refused.stdout


def test_a_wheel_file(new_python, make_wheel):
    done = new_python().run("vf-install", make_wheel("vf-other", "1.0", (), "other"))
    assert "installed      vf-other 1.0" in done.stdout


@pytest.mark.slow
def test_a_repository_at_a_branch(new_python, make_project, tmp_path):
    repository = tmp_path / "repository"
    make_project(repository / "environments" / "deep", "vf-deep", "0.3.0", ["plumbob-shared>=0.1"], "deep")
    make_project(repository / "packages" / "shared", "plumbob-shared")
    (repository / "pyproject.toml").write_text(
        '[project]\nname = "workspace"\nversion = "0"\nrequires-python = ">=3.11"\n[tool.uv]\npackage = false\n'
        '[tool.uv.workspace]\nmembers = ["environments/*", "packages/*"]\n'
        "[tool.uv.sources]\nplumbob-shared = { workspace = true }\n"
    )

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", "-C", str(repository), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet", "--initial-branch", "main")
    git("add", ".")
    git("commit", "--quiet", "-m", "one")
    git("switch", "--quiet", "-c", "next")
    make_project(repository / "environments" / "deep", "vf-deep", "0.4.0", ["plumbob-shared>=0.1"], "deep")
    git("commit", "--quiet", "-am", "two")
    python = new_python()
    done = python.run("vf-install", "deep", "-r", "-b", "main", "--repo", repository)
    assert "installed      vf-deep 0.3.0 from file://" in done.stdout
    assert python.version("plumbob-shared") == "0.1.0"
    python.run("vf-install", "deep", "-r", "--repo", repository, "--branch", "next")
    assert python.version("vf-deep") == "0.4.0"
    refused = python.run("vf-install", "deep", "-r", "-b", "nope", "--repo", repository, code=2)
    assert "cannot read" in refused.stdout and "nope" in refused.stdout


@pytest.mark.slow
def test_saved_in_the_project_uv_sync_keeps_it(new_python, hub_index, make_project, tmp_path, hub_wheels):
    home = make_project(
        tmp_path / "project",
        "my-project",
        needs=[f"plumbob-{wheel.parent.name} @ {wheel.as_uri()}" for wheel in hub_wheels],
    )
    python = new_python(home / ".venv")
    unsaved = python.run("vf-install", "--save", "toy==0.1.0", "--index", hub_index, cwd=tmp_path, code=2)
    assert "no pyproject.toml here or above" in unsaved.stderr
    done = python.run("vf-install", "--save", "toy==0.1.0", "--index", hub_index, cwd=home)
    assert "installed      vf-toy 0.1.0" in done.stdout
    written = (home / "pyproject.toml").read_text()
    assert "vf-toy==0.1.0" in written and 'vf-toy = { index = "plumbob" }' in written
    python.run("uv", "sync", "--locked", cwd=home)
    assert python.version("vf-toy") == "0.1.0" and python.version("plumbob-shared") == "0.1.0"

    told = python.run("vf-install", "other", "--index", hub_index, cwd=home)
    assert "`uv sync` will remove it; --save keeps it" in told.stderr
    python.run("uv", "sync", "--locked", cwd=home)
    assert python.version("vf-other") is None


def test_a_dry_run_prints_the_command_that_does_it(new_python, hub_index):
    python = new_python()
    shown = python.run("vf-install", "toy==0.1.0", "--dry-run", "--index", hub_index).stdout
    assert python.version("vf-toy") is None
    assert (
        f"pip install --directory / --python {python.root}/bin/python" in shown
        and "vf-toy==0.1.0 --hash=sha256:" in shown
    )
    subprocess.run(["bash", "-ec", shown], check=True, capture_output=True)
    assert python.version("vf-toy") == "0.1.0"


def test_an_environment_that_does_not_load_says_why(new_python, make_wheel):
    done = new_python().run(
        "vf-install", make_wheel("vf-broken", "0.1.0", (), "broken", "import no_such_module"), code=1
    )
    assert "broken does not load: ModuleNotFoundError: No module named 'no_such_module'" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["toy"], "no package index is set; give --index URL, set PLUMBOB_INDEX, or add an index named `plumbob`"),
        (["toy", "--index", "nope"], "there is no index 'nope'"),
        (["https://example.org/x.whl"], "https://example.org/x.whl is a URL; give a name or a path"),
        (["a b"], "'a b' is neither a name, like gsm8k or gsm8k==0.2.0, nor a path"),
        (["toy", "-b", "main"], "--branch has an effect only with --from-repo"),
        (["toy", "-r"], "--from-repo needs a repository; give --repo URL or set PLUMBOB_REPO"),
        (["toy", "-r", "--repo", "ext::sh -c id"], "is neither the URL of a git repository nor a directory"),
        (["toy", "--index", "http://127.0.0.1:9/simple/"], "cannot reach http://127.0.0.1:9/simple/vf-toy/"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_sentence(arguments, told, tmp_path, monkeypatch, ended):
    from plumbob.hub.cli.vf_install import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PLUMBOB_INDEX", raising=False)
    code, out, err = ended("vf-install", app, *arguments)
    assert code == 2 and told in out + err
    assert sys.exc_info()[0] is None
