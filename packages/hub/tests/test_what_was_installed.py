"""What was installed is what was chosen: uv's configuration cannot change it, and it is compared file by file."""

from pathlib import Path

import pytest
from plumbob.hub.index.wheels import read_wheel
from plumbob.hub.install import verify


def configurations(evil: str, links: Path, stolen: Path) -> dict[str, str]:
    """What uv's configuration can do to an installation, as a uv.toml."""
    return {
        "links": f'find-links = ["{links}"]\nno-index = true\n[pip]\nverify-hashes = false\n',
        "overrides": (
            'override-dependencies = ["vf-toy==99.0", "plumbob-shared==99.0"]\n'
            f'[[index]]\nurl = "{evil}"\ndefault = true\n[pip]\nverify-hashes = false\nindex-strategy = "unsafe-best-match"\n'
        ),
        "target": f'[pip]\ntarget = "{stolen}"\n',
        "prefix": f'[pip]\nprefix = "{stolen}"\n',
    }


def as_pyproject(text: str) -> str:
    """A uv.toml as the tables of a pyproject.toml."""
    lines = [
        "[tool.uv]",
        *text.replace("[[index]]", "[[tool.uv.index]]").replace("[pip]", "[tool.uv.pip]").splitlines(),
    ]
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["links", "overrides", "target", "prefix"])
@pytest.mark.parametrize("file", ["uv.toml", "pyproject.toml"])
def test_the_configuration_of_a_checkout_changes_nothing(
    what, file, new_python, hub_index, evil_index, evil_links, tmp_path
):
    checkout, stolen = tmp_path / "checkout", tmp_path / "stolen"
    checkout.mkdir()
    text = configurations(evil_index.url, evil_links, stolen)[what]
    (checkout / file).write_text(text if file == "uv.toml" else as_pyproject(text))
    python = new_python()
    done = python.run("vf-install", "toy==0.1.0", "--index", hub_index, cwd=checkout)
    assert "installed      vf-toy 0.1.0 from file://" in done.stdout
    assert (python.version("vf-toy"), python.version("plumbob-shared")) == ("0.1.0", "0.1.0")
    assert not python.is_evil() and not stolen.exists() and evil_index.requests == []


@pytest.mark.slow
def test_a_target_of_the_user_s_own_configuration_is_not_called_installed(new_python, hub_index, tmp_path):
    home = tmp_path / "home"
    (home / "uv").mkdir(parents=True)
    (home / "uv" / "uv.toml").write_text(f'[pip]\ntarget = "{tmp_path / "elsewhere"}"\n')
    python = new_python()
    done = python.run("vf-install", "other", "--index", hub_index, code=1, XDG_CONFIG_HOME=str(home))
    assert (
        "failed         other: uv did not install what was chosen: vf-other is not installed in this Python; "
        "check your own uv.toml and UV_ variables" in done.stdout
    )
    (home / "uv" / "uv.toml").write_text("[pip]\nverify-hashes = false\n")
    assert "installed      vf-other 1.0" in python.run(
        "vf-install", "other", "--index", hub_index, XDG_CONFIG_HOME=str(home)
    ).stdout  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", ["links", "overrides"])
def test_what_save_records_is_what_was_chosen(
    what, new_python, make_project, hub_index, evil_index, evil_links, tmp_path
):
    home = make_project(tmp_path / "project", "my-project")
    text = configurations(evil_index.url, evil_links, tmp_path / "stolen")[what]
    (home / "uv.toml").write_text(text.replace("no-index = true\n", ""))
    before = (home / "pyproject.toml").read_bytes()
    python = new_python()
    done = python.run("vf-install", "toy==0.1.0", "--save", "--index", hub_index, cwd=home, code=None)
    assert python.version("vf-toy") == "0.1.0" and not python.is_evil()
    lock = (home / "uv.lock").read_text() if (home / "uv.lock").exists() else ""
    assert "99.0" not in lock and str(evil_links) not in lock
    if done.returncode:
        assert "installed, but not recorded" in done.stdout
        assert (home / "pyproject.toml").read_bytes() == before and not lock


@pytest.mark.slow
def test_a_changed_installation_of_the_same_version_is_replaced(new_python, hub_index):
    python = new_python()
    python.run("vf-install", "toy==0.1.0", "--index", hub_index)
    file = python.site / "vf_toy" / "__init__.py"
    original = file.read_text()
    file.unlink()  # it may be a hard link into uv's cache
    file.write_text("EVIL = 7\nclass Toy:\n    pass\n")
    python.run("vf-install", "toy==0.1.0", "--upgrade", "--index", hub_index)
    assert file.read_text() == original


def test_files_are_compared_with_the_wheel_s_record(tmp_path, make_wheel, monkeypatch):
    import zipfile

    path = make_wheel("vf-other", "1.0", (), "other")
    monkeypatch.syspath_prepend(tmp_path)
    assert verify.difference([read_wheel(path)]) == "vf-other is not installed in this Python"
    zipfile.ZipFile(path).extractall(tmp_path)
    assert verify.difference([read_wheel(path)]) is None
    (tmp_path / "vf_other" / "__pycache__").mkdir()
    (tmp_path / "vf_other" / "__pycache__" / "x.cpython-311.pyc").touch()
    (tmp_path / "vf_other" / "scores.json").touch()
    assert verify.difference([read_wheel(path)]) is None
    record = tmp_path / "vf_other-1.0.dist-info" / "RECORD"
    record.write_text(record.read_text() + "torch/__init__.py,,\n")
    assert verify.difference([read_wheel(path)]) == f"torch/__init__.py is not in {path.name}"
    (tmp_path / "vf_other" / "__init__.py").write_text("EVIL = 8")
    assert verify.difference([read_wheel(path)]) == f"vf_other/__init__.py has other bytes than in {path.name}"
    other = make_wheel("vf-other", "1.0", (), "other", "OTHER = 1")
    zipfile.ZipFile(other).extractall(tmp_path)
    assert verify.difference([read_wheel(path), read_wheel(other)]) is None
    (tmp_path / "vf_other" / "__init__.py").unlink()
    assert verify.difference([read_wheel(path)]) == "vf_other/__init__.py is missing"
    assert "vf-other 1.0 is installed, not 2.0" in str(
        verify.difference([read_wheel(make_wheel("vf-other", "2.0", (), "other"))])
    )
