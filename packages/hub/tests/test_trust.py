"""What comes from an index, what is kept if an upgrade does not work, and whose text reaches the terminal."""

import json
import re
import shutil
import subprocess

import pytest
from plumbob.console import UserError, plain
from plumbob.hub.index.contents import foreign
from plumbob.hub.index.static_index import add_files
from plumbob.hub.index.wheels import read_wheel


@pytest.fixture
def two_indexes(tmp_path, make_wheel, serve):
    """The hub has vf-shad, which needs little-helper, and a little-helper 99.0; the public index has its 1.0."""
    shad = make_wheel("vf-shad", "0.1.0", ("little-helper",), "shad", "import little_helper")
    add_files([shad, make_wheel("little-helper", "99.0", (), None, "WHOSE = 'hub'")], tmp_path / "hub")
    add_files([make_wheel("little-helper", "1.0", (), None, "WHOSE = 'public'")], tmp_path / "public")
    (tmp_path / "empty" / "simple").mkdir(parents=True)
    return tmp_path / "hub", serve(tmp_path / "public").url, (tmp_path / "empty" / "simple").as_uri()


@pytest.mark.parametrize("served", [False, True], ids=["folder", "server"])
def test_an_index_gives_environments_and_nothing_else_unless_it_is_trusted(served, new_python, two_indexes, serve):
    hub, public, empty = two_indexes
    index = serve(hub).url if served else str(hub)
    python = new_python()
    refused = python.run("vf-install", "shad", "--index", index, code=2, UV_DEFAULT_INDEX=empty)
    assert "has little-helper, but only environments and plumbob's own packages are taken from there" in refused.stdout
    assert "--trust-index takes all from there" in refused.stdout and python.version("vf-shad") is None
    python.run("vf-install", "shad", "--index", index, UV_DEFAULT_INDEX=public)
    assert (python.version("vf-shad"), python.version("little-helper")) == ("0.1.0", "1.0")
    shutil.rmtree(next(python.site.glob("little_helper-*")))
    trusted = python.run("vf-install", "shad", "-U", "--index", index, "--trust-index", UV_DEFAULT_INDEX=public)
    assert python.version("little-helper") == "99.0"
    assert re.search(r"also from (file|http)://\S+/simple/: little-helper\n", trusted.stderr)


def test_a_build_takes_nothing_from_it_either(new_python, make_project, make_wheel, tmp_path):
    """What a project is built with runs at once: a uv_build 0.13.99 of the index would be the newest that fits."""
    evil = make_wheel("uv-build", "0.13.99", (), None, "raise SystemExit('EVIL')")
    shared = make_wheel("plumbob-shared", "0.1.0")
    add_files([evil, shared], tmp_path / "hub")
    mine = make_project(tmp_path / "mine", "vf-mine", needs=["plumbob-shared>=0.1"], environment="mine")
    python = new_python()
    python.run("vf-install", mine, "--index", tmp_path / "hub")
    assert (python.version("vf-mine"), python.version("plumbob-shared")) == ("0.1.0", "0.1.0")


@pytest.mark.slow
def test_a_project_records_nothing_else_from_it_either(new_python, make_project, two_indexes, tmp_path):
    hub, public, _ = two_indexes
    home = make_project(tmp_path / "project", "my-project")
    before = (home / "pyproject.toml").read_text()
    python = new_python()
    save = ("vf-install", "shad", "-U", "--save", "--index", hub)
    refused = python.run(*save, cwd=home, code=1, UV_DEFAULT_INDEX=public)
    assert "not recorded: uv.lock would take little-helper from the index as well" in refused.stdout
    assert (home / "pyproject.toml").read_text() == before and not (home / "uv.lock").exists()
    table = f'\n[[tool.uv.index]]\nname = "plumbob"\nurl = "{(hub / "simple").as_uri()}"\nexplicit = true\n'
    (home / "pyproject.toml").write_text(before + table)
    python.run("vf-install", "shad", "-U", "--save", cwd=home, UV_DEFAULT_INDEX=public)
    assert re.search(r'name = "little-helper"\nversion = "1.0"', (home / "uv.lock").read_text())
    (home / "pyproject.toml").write_text(before)
    (home / "uv.lock").unlink()
    python.run(*save, "--trust-index", cwd=home, UV_DEFAULT_INDEX=public)
    assert re.search(r'name = "little-helper"\nversion = "99.0"', (home / "uv.lock").read_text())


BROKEN = "raise ValueError('it needs \x1b[31ma GPU')"


@pytest.fixture
def breaking_index(tmp_path, make_wheel):
    """vf-foo 0.1.0 works, 0.3.0 does not import, and needs another version of what it shares with vf-toy."""
    wheels = [
        make_wheel("vf-foo", "0.1.0", ("plumbob-shared",), "foo"),
        make_wheel("vf-foo", "0.3.0", ("plumbob-shared>=0.2",), "foo", BROKEN),
        make_wheel("vf-toy", "0.1.0", ("plumbob-shared",), "toy"),
        make_wheel("vf-toy", "0.2.0", ("plumbob-shared",), "toy"),
        make_wheel("plumbob-shared", "0.1.0"),
    ]
    add_files(wheels, tmp_path / "hub")
    return tmp_path / "hub"


def listed(python) -> dict[str, tuple[str, str]]:
    rows = json.loads(python.run("hub", "list", "--check", "--json").stdout)
    return {row["name"]: (row["version"], row["status"]) for row in rows}


def test_an_upgrade_that_does_not_import_puts_the_old_version_back(new_python, breaking_index, make_wheel):
    python = new_python()
    python.run("vf-install", "foo==0.1.0", "toy==0.1.0", "--index", breaking_index)
    add_files([make_wheel("plumbob-shared", "0.2.0")], breaking_index)
    done = python.run("vf-install", "foo", "toy", "-U", "--index", breaking_index, code=1)
    foo, toy = done.stdout.splitlines()[:2]
    assert foo.startswith("failed         foo: 0.3.0 is not kept: foo does not load: ValueError: it needs")
    assert (
        foo.endswith("; plumbob-shared 0.1.0, vf-foo 0.1.0, vf-toy 0.1.0 were put back") and "\x1b" not in done.stdout
    )
    assert toy.startswith("installed      vf-toy 0.2.0")  # without it, the other is upgraded
    assert listed(python) == {"foo": ("0.1.0", "ok"), "toy": ("0.2.0", "ok")}
    assert not (python.site / ".vf-install-undo").exists()
    timed = python.run("vf-install", "foo==0.3.0", "--timeout", "0.1", "--index", breaking_index, code=1)
    assert "0.3.0 is not kept: foo does not load: " in timed.stdout and "vf-foo 0.1.0 was put back" in timed.stdout
    assert python.version("vf-foo") == "0.1.0"


def test_what_was_not_there_before_stays_to_be_looked_at(
    new_python, breaking_index, make_wheel, make_project, tmp_path
):
    add_files([make_wheel("plumbob-shared", "0.2.0")], breaking_index)
    python = new_python()
    done = python.run("vf-install", "foo", "--index", breaking_index, code=1)
    assert "failed         foo: installed, but foo does not load" in done.stdout and python.version("vf-foo") == "0.3.0"
    mine = make_project(tmp_path / "mine", "vf-mine", environment="mine")
    python.run("vf-install", mine)
    make_project(
        mine, "vf-mine", environment="mine", body="import no_such_module"
    )  # its own directory is nothing older
    assert "installed, but mine does not load" in python.run("vf-install", mine, code=1).stdout
    assert python.version("vf-mine") == "0.1.0"


@pytest.mark.parametrize(
    ("member", "told"),
    [
        ({"torch/__init__.py": ""}, "it brings torch/__init__.py outside its own package"),
        ({"evil.pth": "import os"}, "it brings evil.pth, whose lines Python runs whenever it starts"),
        ({"vf_other-1.0.data/scripts/x": "#!python"}, "which would be installed outside site-packages"),
    ],
    ids=["package", "pth", "script"],
)
def test_what_is_refused_when_it_is_installed_is_refused_when_it_is_indexed(
    member, told, make_wheel, repack, hub, tmp_path
):
    wheel = repack(make_wheel("vf-other", "1.0", (), "other"), member)
    index = tmp_path / "hub"
    add_files([make_wheel("vf-toy", "0.1.0", (), "toy")], index)
    before = (index / "catalog.json").read_bytes()
    said = hub("index", wheel, "--output", index, code=2).stderr
    assert f"hub: {wheel.name} is not added to {index}: " in said and told in said and len(said.splitlines()) == 1
    assert (index / "catalog.json").read_bytes() == before
    phantom = repack(make_wheel("vf-other", "1.0", (), "other"), {}, listed=("torch/__init__.py",))
    with pytest.raises(UserError, match=r"RECORD lists torch/__init__.py, which it does not hold: uninstalling would"):
        add_files([phantom], index)


def test_another_s_package_may_be_named_otherwise_but_not_bring_what_is_ours(make_wheel, repack):
    """An index may hold what environments need: such a package is not judged by its name."""
    helper = make_wheel("little-helper", "1.0")
    free = {"yaml/__init__.py": "", "helper.py": "", "little_helper-1.0.data/scripts/tool": "#!python"}
    assert foreign(read_wheel(repack(helper, free))) == []
    for member in ("plumbob/hub/evil.py", "vf_gsm8k/__init__.py", "numpy-2.0.dist-info/METADATA", "evil.pth"):
        (problem,) = foreign(read_wheel(repack(helper, {member: ""})))
        assert f"it brings {member}" in problem
    (phantom,) = foreign(read_wheel(repack(helper, {}, listed=("../../../bin/train",))))
    assert "RECORD lists ../../../bin/train, which it does not hold" in phantom


EVIL = "\x1b]0;pwned\x07\x1b[2J\x9b31mred\x1b[0m\u202egnirts\u2066\rinstalled      vf-bank 1.0\x08\x00"


def test_others_text_cannot_control_the_terminal(hub, make_project, tmp_path, capfd):
    """Descriptions, keywords, READMEs and reasons of yanks are written by whoever made or runs an index."""
    toy = make_project(tmp_path / "toy", "vf-toy", environment="toy")
    text = (toy / "pyproject.toml").read_text()
    # JSON's escapes are TOML's; metadata cannot hold NUL or a line's end.
    evil = EVIL.replace("\x00", "").replace("\r", "")
    text = text.replace('"A toy called vf-toy"', json.dumps(evil)).replace('"toy", "test"', json.dumps(f"a{evil}"))
    (toy / "pyproject.toml").write_text(text)
    (toy / "README.md").write_text(f"# toy\n\nvery\t{EVIL}\n")
    subprocess.run(["uv", "build", "-q", "--wheel", "--out-dir", tmp_path / "dist", toy], check=True)
    hub("index", tmp_path / "dist", "-o", tmp_path / "hub")
    index = ("--index", tmp_path / "hub")
    hub("yank", "toy==0.1.0", *index, "--reason", EVIL)
    from plumbob.console.app import run_app
    from plumbob.hub.cli.vf_install import app

    with pytest.raises(SystemExit):
        run_app("vf-install", app, ["toy", *map(str, index)])  # says why there is no version
    install = "".join(capfd.readouterr())
    assert "pwned" in install
    search, info = hub("search", *index).stdout, hub("info", "toy", *index).stdout
    for said in (search, info, hub("search", "--json", *index).stdout, install):
        assert "pwned" in said and not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", said)
    assert not any(line.startswith("installed") for line in f"{search}\n{install}".splitlines())


def test_plain_text_keeps_what_people_write():
    text = "Größe 7 · \u65e5\u672c\u8a9e · \u0645\u0631\u062d\u0628\u0627 · e\u0301 · \U0001f600\n\ttab"
    assert plain(text) == text and plain("a\nb", keep="") == "a\ufffdb"
