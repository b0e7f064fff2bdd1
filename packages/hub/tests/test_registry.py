from importlib.metadata import EntryPoint

import pytest
from plumbob.hub import UserError, find, installed, registry


class Distribution:
    def __init__(self, name: str) -> None:
        self.metadata = {"Name": name, "Version": "1.0", "Summary": "..."}


def point(name: str, value: str, distribution: str) -> EntryPoint:
    entry = EntryPoint(name, value, registry.GROUP)
    vars(entry)["dist"] = Distribution(distribution)
    return entry


@pytest.fixture
def plugins(monkeypatch):
    def install(*points: EntryPoint) -> None:
        monkeypatch.setattr(registry, "entry_points", lambda group: points if group == registry.GROUP else ())

    return install


@pytest.mark.parametrize("name", ["lookup", "vf-lookup", "vf_lookup", "LOOKUP"])
def test_an_environment_is_found_by_each_of_its_names(name):
    assert find(name).distribution == "vf-lookup"
    assert find(name).load().__name__ == "LookupTaskset"


def test_a_near_miss_gets_a_suggestion():
    with pytest.raises(UserError, match="there is no environment 'lokup'; did you mean 'lookup'?"):
        find("lokup")
    with pytest.raises(UserError, match="installed: gsm8k, lookup"):
        find("xyzzy")


def test_two_claims_to_one_name_are_refused_with_both_owners(plugins):
    plugins(point("math", "a:A", "vf-math"), point("math", "b:B", "evil-math"))
    with pytest.raises(UserError, match="claimed by evil-math 1.0 and vf-math 1.0; uninstall one"):
        find("math")


def test_a_broken_plugin_names_itself_and_harms_no_other(plugins):
    plugins(point("broken", "no_such_module_at_all:A", "vf-broken"), point("fine", "json:JSONDecoder", "vf-fine"))
    assert [e.name for e in installed()] == ["broken", "fine"]
    assert find("fine").load().__name__ == "JSONDecoder"
    with pytest.raises(
        UserError, match="'broken' \\(vf-broken 1.0\\) is installed but does not load: ModuleNotFoundError"
    ):
        find("broken").load()
