"""`hub index`, `hub yank`, `hub search` and `hub info`."""

import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from plumbob.console import UserError
from plumbob.hub.index.information import from_index, search
from plumbob.hub.index.location import Location
from plumbob.hub.index.reader import Index
from plumbob.hub.index.replace_directory import recover, replace_directory
from plumbob.hub.index.static_index import add_files, distributions_in, read_catalog, yank


def tree(directory: Path) -> dict[str, str]:
    """Every file and its hash."""
    return {
        str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(directory.rglob("*"))
        if p.is_file()
    }


def test_pages_have_hashes_metadata_and_python_versions(hub_index):
    files = Index(Location("plumbob", (hub_index / "simple").as_uri() + "/")).files("VF_toy")
    assert [f.version for f in files] == ["0.2.0", "0.1.0"]
    for file in files:
        wheel = hub_index / "files" / file.filename
        assert file.digests == {"sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()}
        sidecar = wheel.with_name(f"{wheel.name}.metadata")
        assert file.metadata_digests == {"sha256": hashlib.sha256(sidecar.read_bytes()).hexdigest()}
        assert file.requires_python == ">=3.11, <3.14"


def test_the_catalog_tells_all_that_search_needs(hub_index):
    newest = [e for e in read_catalog(hub_index) if e["name"] == "vf-toy"][-1]
    assert newest | {"sha256": "", "readme": ""} == {
        "name": "vf-toy",
        "version": "0.2.0",
        "summary": "A toy called vf-toy",
        "keywords": ["toy", "test"],
        "entry_points": {"toy": "vf_toy:Toy"},
        "requires_python": ">=3.11, <3.14",
        "dependencies": ["plumbob-shared>=0.1,<0.2"],
        "filename": "vf_toy-0.2.0-py3-none-any.whl",
        "sha256": "",
        "yanked": None,
        "readme": "",
    }
    assert "about penguins" in newest["readme"]


def test_the_same_files_make_the_same_index(hub_index, tmp_path):
    wheels = distributions_in([hub_index / "files"])
    add_files(reversed(wheels), tmp_path / "second")
    assert tree(tmp_path / "second") == tree(hub_index)


def test_an_index_grows_and_a_version_keeps_its_bytes(hub_index, make_wheel):
    (hub_index / "CNAME").write_text("hub.example.org")
    built = add_files(
        [make_wheel("vf-third", "1.0", (), "third"), make_wheel("vf-other", "1.0", (), "other")], hub_index
    )
    assert (built.files, built.added) == (5, ("vf_third-1.0-py3-none-any.whl",))
    assert (hub_index / "CNAME").read_text() == "hub.example.org"
    before = tree(hub_index)
    with pytest.raises(
        UserError, match="vf_other-1.0-py3-none-any.whl is in .* with different bytes; give .* a new version"
    ):
        add_files([make_wheel("vf-other", "1.0", (), "other", "EVIL = 5")], hub_index)
    assert tree(hub_index) == before


def test_only_an_index_is_ever_replaced(make_wheel, tmp_path):
    precious = tmp_path / "home"
    precious.mkdir()
    (precious / "thesis.tex").write_text("...")
    with pytest.raises(UserError, match="is not an index made by `hub index`"):
        add_files([make_wheel("vf-other", "1.0", (), "other")], precious)
    assert tree(precious).keys() == {"thesis.tex"}


@pytest.mark.slow
def test_a_yanked_version_is_passed_over_but_an_exact_pin_gets_it(hub, hub_index, new_python):
    python = new_python()
    done = hub("yank", "vf-toy==0.2.0", "--index", hub_index, "--reason", "wrong split")
    assert done.stdout == "yanked: vf-toy 0.2.0\n"
    assert "vf-toy 0.1.0" in python.run("vf-install", "toy", "--index", hub_index).stdout
    assert "vf-toy 0.2.0" in python.run("vf-install", "toy==0.2.0", "--index", hub_index).stdout
    refused = python.run("vf-install", "toy>=0.2.1", "--index", hub_index, code=2)
    assert "only 0.1.0, 0.2.0 (yanked: wrong split)" in refused.stdout
    hub("yank", "toy==0.2.0", "--index", hub_index, "--undo")
    assert not any(e["yanked"] for e in read_catalog(hub_index))
    missing = hub("yank", "vf-toy==7", "--index", hub_index, "--reason", "x", code=2)
    assert "has no vf-toy 7; its versions are 0.1.0, 0.2.0" in missing.stderr


def test_search_reads_the_catalog(hub_index, serve, tmp_path):
    server = serve(hub_index)
    found, note = search("PENGUINS toy", server.url, tmp_path)
    assert [(e["name"], e["version"]) for e in found] == [("vf-other", "1.0"), ("vf-toy", "0.2.0")] and note == ""
    assert server.requests == ["/catalog.json"]
    yank(hub_index, "vf-toy", "0.2.0", "broken")
    assert [e["version"] for e in search("vf-toy", str(hub_index), tmp_path)[0]] == ["0.1.0"]
    assert search("nothing like it", str(hub_index), tmp_path)[0] == []


def test_info_from_an_index(hub_index, tmp_path):
    found = from_index("vf_toy", str(hub_index), tmp_path)
    assert found["versions"] == ["0.1.0", "0.2.0"] and found["dependencies"] == ["plumbob-shared>=0.1,<0.2"]
    assert found["install"].startswith("vf-install toy==0.2.0 --index file://")
    with pytest.raises(UserError, match="there is no environment 'tyo' on .*; did you mean 'toy'?"):
        from_index("tyo", str(hub_index), tmp_path)


def test_info_of_what_is_nowhere(tmp_path, monkeypatch):
    from plumbob.hub.cli.hub import info

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PLUMBOB_INDEX", raising=False)
    with pytest.raises(UserError, match="vf-nowhere is not installed, and no package index is set"):
        info("vf-nowhere")


def test_info_of_what_is_installed(hub):
    told = json.loads(hub("info", "lookup", "--json").stdout)
    assert told["entry_points"] == {"lookup": "vf_lookup:LookupTaskset"} and told["installed"]
    assert hub("info", "vf-lookup").stdout.startswith("lookup: The minimal multi-step tool environment")


@pytest.fixture
def many_wheels(make_wheel, tmp_path) -> Path:
    """Enough files that a build takes a while."""
    many = tmp_path / "many"
    many.mkdir()
    with_data = make_wheel("vf-other", "1.0", (), "other").read_bytes()
    shutil.copy(make_wheel("vf-third", "1.0", (), "third"), many)
    sdist = tarfile.TarInfo("vf_filler-0/data")
    sdist.size = len(with_data * 200)
    with tarfile.open(tmp_path / "filler.tar.gz", "w") as archive:
        archive.addfile(sdist, io.BytesIO(with_data * 200))
    for i in range(400):
        shutil.copy(tmp_path / "filler.tar.gz", many / f"vf_filler-0.{i}.tar.gz")
    return many


@pytest.mark.slow
def test_a_killed_build_leaves_the_old_index_whole(hub_index, many_wheels):
    """SIGKILL at one moment after another, until the build gets through."""
    old = tree(hub_index)
    command = [Path(sys.executable).parent / "hub", "index", many_wheels, "--output", hub_index]
    killed_while_building = 0
    for attempt in range(8):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while process.poll() is None and not list(hub_index.parent.glob(".hub.building-*")):
            time.sleep(0.002)
        time.sleep(0.02 * attempt)
        process.send_signal(signal.SIGKILL)
        if process.wait() != -signal.SIGKILL:
            break
        if tree(hub_index) != old:  # it was killed after the rename
            break
        killed_while_building += bool(list(hub_index.parent.glob(".hub.building-*")))
    assert killed_while_building >= 3
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    new = tree(hub_index)
    assert len(list((hub_index / "files").glob("*.tar.gz"))) == 400
    assert {k: v for k, v in new.items() if k in old and k.startswith("files/")} == {
        k: v for k, v in old.items() if k.startswith("files/")
    }
    assert not list(hub_index.parent.glob(".hub.building-*"))


@pytest.mark.slow
def test_builds_at_the_same_time_lose_nothing(tmp_path, make_wheel):
    names = ["vf-other", "vf-third", "vf-fourth"]
    command = [Path(sys.executable).parent / "hub", "index"]
    running = [
        subprocess.Popen([*command, make_wheel(n, "1.0", (), n[3:]), "-o", tmp_path / "hub"], stdout=subprocess.DEVNULL)
        for n in names
    ]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert sorted(e["name"] for e in read_catalog(tmp_path / "hub")) == sorted(names)


@pytest.mark.parametrize("exchange", [True, False])
def test_an_index_is_on_the_disk_before_the_one_that_it_replaces_goes(tmp_path, monkeypatch, exchange):
    """What a power cut leaves depends on this order, and nothing but the order of the calls can show it here."""
    from plumbob.hub.index import replace_directory as swap

    old, new, done = tmp_path / "index", tmp_path / "new", []
    for folder in (old, new / "files"):
        folder.mkdir(parents=True)
        (folder / "wheel").write_text("x")
    fsync, rmtree = os.fsync, shutil.rmtree

    def noted(descriptor):
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(tmp_path).as_posix())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(shutil, "rmtree", lambda path, **how: (done.append("gone"), rmtree(path, **how)))
    if not exchange:
        monkeypatch.setattr(swap, "_exchange", lambda a, b: False)
    replace_directory(new, old)
    assert {"new/files/wheel", "new/files", "new", "."} <= set(done[: len(done) - done[::-1].index("gone") - 1])
    assert (old / "files" / "wheel").is_file()


def test_without_an_exchange_in_one_step_a_kill_between_is_healed(tmp_path, monkeypatch):
    from plumbob.hub.index import replace_directory as swap

    old, new = tmp_path / "index", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    (new / "file").touch()
    monkeypatch.setattr(swap, "_exchange", lambda a, b: False)
    replace_directory(new, old)
    assert os.listdir(old) == ["file"] and not new.exists()
    os.rename(old, tmp_path / ".index.old")
    recover(old)
    assert os.listdir(old) == ["file"]


def test_descriptions_in_any_language_are_shown_as_they_were_written(hub, new_python, make_project, tmp_path):
    toy = make_project(tmp_path / "toy", "vf-toy", environment="toy")
    text = (toy / "pyproject.toml").read_text()
    written = ("Größe und 日本語", "مفتاح", "Ein Maß für Mühe: 🐧")
    text = text.replace("A toy called vf-toy", written[0]).replace('"toy", "test"', f'"{written[1]}"')
    (toy / "pyproject.toml").write_text(text)
    (toy / "README.md").write_text(f"# toy\n\n{written[2]}\n")
    hub("publish", toy, "--index", tmp_path / "hub")
    index = ("--index", tmp_path / "hub")
    assert written[0] in hub("search", written[1], *index).stdout
    python = new_python()
    python.run("vf-install", "toy", *index)
    for said in (hub("info", "toy", *index).stdout, python.run("hub", "info", "toy", PYTHONUTF8="1").stdout):
        assert all(part in said for part in written), said
