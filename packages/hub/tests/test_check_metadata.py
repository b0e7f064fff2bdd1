"""Each static check, on a scaffold with one thing broken: it fails, and no other does."""

import pytest
from plumbob.console import UserError
from plumbob.hub.check.metadata import CHECKS
from plumbob.hub.check.target import of_distribution, of_project, resolve
from plumbob.hub.installed.registry import find
from plumbob.hub.publish.scaffold import create
from plumbob.hub.uv.project import read_project

GROUPS = "[dependency-groups]"
DEPENDENCY = '"verifiers>=0.4,<0.5",'


@pytest.fixture
def failures(tmp_path):
    """The failing checks and their problems, after replacing `old` with `new` in a scaffold's pyproject.toml."""

    def check(old: str, new: str) -> dict[str, tuple[str, ...]]:
        directory = create("broken", tmp_path)
        file = directory / "pyproject.toml"
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))
        results = [c(of_project(read_project(directory))) for c in CHECKS]
        return {r.check: r.problems for r in results if r.status == "FAIL"}

    return check


@pytest.mark.parametrize(
    ("old", "new", "check", "told"),
    [
        ('description = "Name', 'description = "" # "Name', "metadata", "has no description"),
        ('description = "Name', 'description = "TODO: Name', "metadata", "has no description"),
        ('license = "Apache-2.0"', "", "metadata", "has no license"),
        ('readme = "README.md"', 'readme = "NONE.md"', "metadata", "there is no README"),
        ('version = "0.1.0"', "", "metadata", "has no version"),
        ('version = "0.1.0"', 'version = "first"', "metadata", "'first' is not written as in PEP 440"),
        (">=3.11,<3.14", ">=3.11", "metadata", "requires-python '>=3.11' has no upper bound"),
        (DEPENDENCY, DEPENDENCY + ' "numpy>=2",', "dependencies", "numpy>=2 has no upper bound"),
        (DEPENDENCY, DEPENDENCY + ' "numpy",', "dependencies", "numpy has no lower and no upper bound"),
        (DEPENDENCY, DEPENDENCY + ' "numpy<3",', "dependencies", "no lower bound: a later release can break it; write numpy>="),
        (DEPENDENCY, DEPENDENCY + ' "not a requirement",', "dependencies", "'not a requirement' cannot be read"),
        (DEPENDENCY, "", "dependencies", "verifiers is not among the dependencies"),
        (GROUPS, '[project.optional-dependencies]\nx = ["numpy"]\n' + GROUPS, "dependencies", "numpy has no"),
        (DEPENDENCY, DEPENDENCY + ' "numpy @ https://example.org/numpy.whl",', "direct-urls", "from https://example.org/numpy.whl"),
        ("vf_broken:", "vf_other:", "names", "in module 'vf_other', and verifiers looks for the distribution vf-broken"),
        ("vf_broken:BrokenTaskset", "vf_broken", "names", "names no class"),
        ('name = "vf-broken"', 'name = "vf-other"', "names", "no module vf_other in src"),
        ("broken = ", 'second = "vf_broken:BrokenTaskset"\nbroken = ', "names", "has 2 entries"),
        ("plumbob.environments", "plumbob.environment", "names", "has no entry"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_by_its_own_check(failures, old, new, check, told):
    found = failures(old, new)
    assert list(found) == [check]
    assert any(told in problem for problem in found[check])


def test_all_that_is_wrong_is_told_at_once(failures):
    found = failures(
        "[project]", '[project]\nname = "vf-broken"\nversion = "one"\ndynamic = ["dependencies"]\n[unused]'
    )
    assert len(found["metadata"]) == 5 and "dependencies are dynamic" in found["dependencies"][0]


def test_an_extra_may_name_again_what_the_project_bounds(failures):
    extra = '[project.optional-dependencies]\nx = ["verifiers[ta]", "vf-broken[y]"]\ny = ["numpy>=2,<3"]\n'
    assert failures("[dependency-groups]", extra + "[dependency-groups]") == {}


@pytest.mark.parametrize("name", ["lookup", "gsm8k", "musique"])
def test_the_metadata_of_what_is_installed_reads_as_its_project(name):
    told = of_distribution(find(name).entry_point.dist)
    results = [check(told) for check in CHECKS]
    # An installed copy may be older than the source, so its bounds are not asked about here.
    assert not [r for r in results if r.status == "FAIL" and r.check != "dependencies"]
    assert told.module == f"vf_{name}" and len(told.readme) > 500


def test_targets_that_are_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no directory ./missing"):
        resolve("./missing")
    with pytest.raises(UserError, match="no pyproject.toml"):
        resolve(str(tmp_path))
    with pytest.raises(UserError, match="did you mean 'lookup'?"):
        resolve("lokup")
    create("mine", tmp_path)
    assert resolve("mine").distribution == resolve("./mine").distribution == "vf-mine"
