"""What is decided before uv runs: which index, which versions, which command line."""

import os
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from plumbob.console import UserError
from plumbob.hub.index.location import Location, locate
from plumbob.hub.index.reader import Index
from plumbob.hub.index.static_index import add_files, yank
from plumbob.hub.install import pins as pins_module
from plumbob.hub.install.install import plan
from plumbob.hub.install.pins import Demand, Item, Pin, pin, project_demands
from plumbob.hub.install.save import plan_save
from plumbob.hub.install.sources import parse_target
from plumbob.hub.names import distribution_names, environment_name, near
from plumbob.hub.uv.command import Command, Finished, environment, excludes_newer
from plumbob.hub.uv.credentials import index_credentials
from plumbob.hub.uv.project import read_project

HUB = Location("plumbob", "https://hub.example.org/simple/")


def from_hub(name: str, version: str) -> Item:
    return Item(name, name, HUB.url, (), (), (f"{name}=={version}",))


def test_names():
    assert [environment_name(n) for n in ("gsm8k", "vf-gsm8k", "VF_gsm8k", "my.env")] == [
        "gsm8k",
        "gsm8k",
        "gsm8k",
        "my-env",
    ]
    assert distribution_names("my_env") == ["vf-my-env", "my-env"] and distribution_names("vf_my_env") == ["vf-my-env"]
    assert near("gms8k", ["vf-gsm8k", "vf-lookup"]) == "vf-gsm8k" and near("xyz", ["vf-gsm8k"]) is None


def test_the_command_of_an_install():
    pins = [Pin("vf-toy", "0.2.0", ("ab", "cd")), Pin("plumbob-shared", "0.1.0")]
    command = plan([from_hub("vf-toy", "0.2.0")], pins, uv="uv", python="/v/bin/python", wheels=[Path("/w")])
    begin = ("uv", "pip", "install", "--directory", "/", "--python", "/v/bin/python", "--verify-hashes")
    assert command.argv == (*begin, "--find-links", "/w", "--requirements", "-")
    trusted = plan([from_hub("vf-toy", "0.2.0")], pins, uv="uv", python="/v/bin/python", index=HUB)
    asked = ("--index", "plumbob=https://hub.example.org/simple/", "--index-strategy", "first-index")
    assert trusted.argv == (*begin, *asked, "--requirements", "-")
    assert command.stdin == "vf-toy==0.2.0 --hash=sha256:ab --hash=sha256:cd\nplumbob-shared==0.1.0\n"
    assert command.shown().endswith(f"--requirements - <<'END'\n{command.stdin}END")
    local = Item("./a b", "vf-a", "/x/a b", ("--editable", "/x/a b"), (), ())
    alone = plan([local], [], uv="uv", python="/p", again=["vf-a"]).shown()
    assert alone == (
        "uv pip install --directory / --python /p --verify-hashes --reinstall-package vf-a --editable '/x/a b'"
    )
    dated = plan([], pins, uv="uv", python="p", index=HUB, dated=True)
    assert dated.argv[-4:] == ("--exclude-newer-package", "vf-toy=false", "--requirements", "-")


def test_the_commands_that_save():
    pins = [Pin("vf-toy", "0.2.0", ("ab",)), Pin("plumbob-shared", "0.1.0", ("cd",))]
    add, lock = plan_save([from_hub("vf-toy", "0.2.0")], pins, HUB, Path("/p"), uv="uv", environ={})
    first = ("--index", HUB.argument, "--index-strategy", "first-index")
    assert add.argv == ("uv", "add", "--project", "/p", "--frozen", *first, "vf-toy==0.2.0")
    assert lock.argv == ("uv", "lock", "--project", "/p", *first)
    explicit = Location("plumbob", HUB.url, explicit=True)
    add, _ = plan_save([from_hub("vf-toy", "0.2.0")], pins, explicit, Path("/p"), uv="uv", environ={})
    assert add.argv[-2:] == ("vf-toy==0.2.0", "plumbob-shared==0.1.0")
    local = Item("./a", "vf-a", "/x/a", ("--editable", "/x/a"), (), ("--editable", "/x/a"))
    mirror = {"UV_DEFAULT_INDEX": "https://mirror.example.org"}
    shared, own, _ = plan_save([local], pins[1:], HUB, Path("/p"), uv="uv", environ=mirror)
    assert shared.argv[-1] == "plumbob-shared==0.1.0" and own.argv[-2:] == ("--editable", "/x/a")
    assert shared.argv[:4] == ("env", "-u", "UV_DEFAULT_INDEX", "uv")


@pytest.mark.parametrize("text", ["./x", "../x", "x/y", ".", "x-1.0-py3-none-any.whl", "/abs"])
def test_a_path_is_seen_as_one(text, tmp_path):
    assert parse_target(text, tmp_path).path == (tmp_path / text).resolve()


def test_where_the_index_comes_from(tmp_path, hub_index):
    (tmp_path / "pyproject.toml").write_text(
        '[[tool.uv.index]]\nname = "plumbob"\nurl = "https://one.example.org/simple"\npublish-url = "https://up.example.org/"\n'
        '[[tool.uv.index]]\nname = "team"\nurl = "hub"\nexplicit = true\n'
    )
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert locate(None, inner, {}) == Location("plumbob", "https://one.example.org/simple/", "https://up.example.org/")
    assert (
        locate(None, inner, {"PLUMBOB_INDEX": "https://two.example.org/simple"}).url
        == "https://two.example.org/simple/"
    )
    team = locate("team", inner, {"PLUMBOB_INDEX": "https://two.example.org/simple"})
    assert team.explicit and team.directory == hub_index
    for given in (str(hub_index), str(hub_index / "simple"), "../../hub", (hub_index / "simple").as_uri()):
        assert locate(given, inner, {}).directory == hub_index
    with pytest.raises(UserError, match="there is no index 'taem'; .*: plumbob, team"):
        locate("taem", inner, {})
    with pytest.raises(UserError, match="holds no index; make one with `hub index"):
        locate("./a", tmp_path, {})


@pytest.fixture
def index(tmp_path, make_wheel) -> Index:
    wheels = [
        make_wheel("plumbob-shared", "0.1.0"),
        make_wheel("plumbob-shared", "0.1.1"),
        make_wheel("plumbob-shared", "0.2.0"),
        make_wheel("plumbob-shared", "0.3.0rc1"),
        make_wheel("vf-old", "1.0", ("plumbob-shared<0.2",), "old"),
        make_wheel("vf-new", "1.0", ("plumbob-shared>=0.2",), "new"),
        make_wheel("vf-marked", "1.0", ("plumbob-absent; python_version < '3'", "vf-old[x]>=1"), "marked"),
        make_wheel("vf-far", "1.0", ("plumbob-shared @ https://example.org/x-1-py3-none-any.whl",), "far"),
    ]
    add_files(wheels, tmp_path / "pins")
    return Index(Location("plumbob", (tmp_path / "pins" / "simple").as_uri() + "/"))


def chosen(index: Index | None, *requirements: str, **how: bool) -> dict[str, str]:
    return {p.name: p.version for p in pin([Demand(Requirement(r), "you") for r in requirements], index, **how)}


def test_the_newest_that_fits_all_is_pinned(index):
    assert chosen(index, "plumbob-shared") == {"plumbob-shared": "0.2.0"}
    assert chosen(index, "plumbob-shared", prerelease=True) == {"plumbob-shared": "0.3.0rc1"}
    assert chosen(index, "plumbob-shared", "vf-old") == {"plumbob-shared": "0.1.1", "vf-old": "1.0"}
    assert chosen(index, "vf-marked") == {"vf-marked": "1.0", "vf-old": "1.0", "plumbob-shared": "0.1.1"}
    with pytest.raises(
        UserError, match="vf-old 1.0 and vf-new 1.0: file.* has no plumbob-shared<0.2,>=0.2, only 0.1.0, 0.1.1"
    ):
        chosen(index, "vf-old", "vf-new")
    with pytest.raises(UserError, match="vf-far 1.0 is refused: it requires plumbob-shared from the URL"):
        chosen(index, "vf-far")
    with pytest.raises(UserError, match="you needs vf-gone, which is neither installed nor on file"):
        chosen(index, "vf-gone")


def test_a_yanked_library_is_passed_over(index):
    assert index.location.directory is not None
    yank(index.location.directory, "plumbob-shared", "0.2.0", "leaks")
    fresh = Index(index.location)
    assert chosen(fresh, "plumbob-shared") == {"plumbob-shared": "0.1.1"}
    assert chosen(fresh, "plumbob-shared==0.2.0") == {"plumbob-shared": "0.2.0"}


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Packages that are installed, as their metadata says."""

    def install(name: str, version: str, *needs: str) -> None:
        info = tmp_path / "site" / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = [
            "Metadata-Version: 2.4",
            f"Name: {name}",
            f"Version: {version}",
            *(f"Requires-Dist: {n}" for n in needs),
        ]
        (info / "METADATA").write_text("\n".join(lines) + "\n")

    monkeypatch.syspath_prepend(tmp_path / "site")
    return install


def test_what_is_installed_and_fits_is_kept(index, site):
    site("plumbob-shared", "0.1.0")
    (kept,) = pin([Demand(Requirement("plumbob-shared"), "you")], index)
    assert kept == Pin("plumbob-shared", "0.1.0") and kept.line() == "plumbob-shared==0.1.0"
    assert chosen(index, "plumbob-shared", upgrade=True) == {"plumbob-shared": "0.2.0"}
    assert chosen(None, "plumbob-shared>=0.1") == {"plumbob-shared": "0.1.0"}
    site("plumbob-absent", "1.0")
    assert chosen(index, "plumbob-absent", upgrade=True) == {"plumbob-absent": "1.0"}
    with pytest.raises(UserError, match="you needs plumbob-shared>=0.2, which is not installed; give the --index"):
        chosen(None, "plumbob-shared>=0.2")


def test_a_library_is_not_replaced_under_an_environment_that_needs_it(index, site):
    """`uv pip install` would do it without a word."""
    site("plumbob-shared", "0.1.0")
    site("vf-here", "1.0", "plumbob-shared<0.2")
    with pytest.raises(UserError, match="vf-new 1.0 and the installed vf-here 1.0: file.* has no plumbob-shared"):
        chosen(index, "vf-new")


def test_what_an_upgrade_replaces_demands_nothing_any_more(index, site):
    """An environment that pins another package exactly, in each of its versions, can be upgraded."""
    site("plumbob-shared", "0.1.0")
    site("vf-new", "0.9", "plumbob-shared==0.1.0")
    assert chosen(index, "vf-new", upgrade=True) == {"vf-new": "1.0", "plumbob-shared": "0.2.0"}


def test_what_uv_takes_from_this_disk_is_followed_there(make_project, tmp_path):
    make_project(tmp_path / "env", "vf-mine", needs=["plumbob-near>=0.1", "plumbob-far>=0.1", "numpy"])
    make_project(tmp_path / "near", "plumbob-near", needs=["plumbob-deep>=0.3"])
    text = (tmp_path / "env" / "pyproject.toml").read_text()
    (tmp_path / "env" / "pyproject.toml").write_text(text + '[tool.uv.sources]\nplumbob-near = { path = "../near" }\n')
    found = project_demands(read_project(tmp_path / "env"))
    assert sorted((str(d.requirement), d.by) for d in found) == [
        ("plumbob-deep>=0.3", "plumbob-near"),
        ("plumbob-far>=0.1", "vf-mine"),
    ]


def test_uv_runs_without_what_redirects_it(tmp_path, monkeypatch):
    kept = {"UV_DEFAULT_INDEX": "https://mirror.example.org", "UV_CACHE_DIR": "/c", "PATH": "/bin"}
    kept |= {"UV_INDEX_MY_HUB_PASSWORD": "x", "UV_HTTP_TIMEOUT": "9", "UV_CONCURRENT_DOWNLOADS": "2"}
    dropped = {f"UV_{name}": "/evil" for name in ("PYTHON", "NO_VERIFY_HASHES", "FIND_LINKS", "CONFIG_FILE", "PROJECT")}
    dropped |= {f"UV_{name}": "1" for name in ("WORKING_DIR", "OVERRIDE", "EXCLUDE", "INDEX_STRATEGY", "OF_NEXT_YEAR")}
    assert environment({**kept, **dropped}) == kept
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache").mkdir()
    moved = environment({"UV_CACHE_DIR": "cache", "UV_INDEX": "https://a.example.org ./cache"})
    assert moved == {"UV_CACHE_DIR": f"{tmp_path}/cache", "UV_INDEX": f"https://a.example.org {tmp_path}/cache"}
    none = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    assert not excludes_newer(none)
    assert excludes_newer({**none, "UV_EXCLUDE_NEWER": "7 days"})
    (tmp_path / "config" / "uv").mkdir(parents=True)
    (tmp_path / "config" / "uv" / "uv.toml").write_text('exclude-newer = "7 days"\n')
    assert excludes_newer(none)


def test_why_uv_failed_is_one_line():
    said = "Using Python 3.11\nerror: No solution found when resolving dependencies\n  cause: Because x was not found\n"
    assert Finished(1, said).reason() == "No solution found when resolving dependencies; Because x was not found"
    assert Finished(3, "").reason() == "exit code 3" and Finished(1, "odd\n").reason() == "odd"


def test_credentials_from_the_environment_and_from_a_keyring(tmp_path, monkeypatch):
    from plumbob.hub.index import reader as index_module

    assert index_credentials("my-hub", {"UV_INDEX_MY_HUB_USERNAME": "ci", "UV_INDEX_MY_HUB_PASSWORD": "x"}) == (
        "ci",
        "x",
    )
    keyring = tmp_path / "keyring"
    keyring.write_text(
        '#!/bin/sh\n[ "$*" = "--mode creds get https://hub.example.org/simple/" ] && printf "ci\\ns3cret\\n"\n'
    )
    keyring.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("UV_KEYRING_PROVIDER", raising=False)
    assert index_module._keyring(HUB.url) is None
    monkeypatch.setenv("UV_KEYRING_PROVIDER", "subprocess")
    assert index_module._keyring(HUB.url) == ("ci", "s3cret")
    assert index_module._keyring("https://elsewhere.example.org/") is None


def test_a_command_is_shown_as_a_shell_takes_it():
    assert Command(("echo", "a b", "$x")).shown() == "echo 'a b' '$x'"
    assert pins_module.demands_of(["plumbob-x; extra == 'fast'"], "you", {"fast"})[0].requirement.name == "plumbob-x"
    with pytest.raises(UserError, match="it needs 'not a requirement!', which is not a valid requirement"):
        pins_module.demands_of(["not a requirement!"], "you")
