"""The taskset as verifiers, the trainer and the evaluation meet it."""

import asyncio
import importlib
import json
import sys
from importlib.metadata import entry_points

import pytest
import verifiers.v1 as vf
import vf_musique
from plumbob.retrieval import Retriever
from plumbob.rollout import tasksets
from vf_musique import MusiqueTaskset
from vf_musique.taskset import MusiqueConfig

STYLES = ["tags", "complete"]


def make(**settings):
    """As the command line makes it: every value is text."""
    return tasksets.make_taskset(MusiqueTaskset, "vf_musique", settings)


def test_the_package_is_found_by_its_entry_point_and_by_verifiers():
    (entry,) = entry_points(group="plumbob.environments", name="musique")
    assert entry.load() is vf_musique.MusiqueTaskset
    assert importlib.import_module(entry.dist.name.replace("-", "_")) is vf_musique
    # The functions in __all__ do not stand in verifiers' way.
    assert isinstance(vf.load_taskset(MusiqueConfig(id="vf-musique")), MusiqueTaskset)
    assert vf.taskset_config_type("vf-musique") is MusiqueConfig


def test_every_setting_is_read_from_text(real):
    chosen = {
        "datasets": f"{real},answerable,train[:50%]",
        "split": "validation",
        "seed": "3",
        "shuffle": "false",
        "curriculum": "true",
        "hops": "2, 3",
        "noise": "0.5",
        "num_examples": "10",
        "retriever": "hybrid/rrf",
        "max_top_k": "3",
        "rerank_url": "http://localhost:8931",
        "rerank_model": "m",
        "answer_style": "complete",
        "reward": "shaped",
        "weights": "f1=0.5,format=0",
        "grounding": "0.25",
        "hop_factor": "true",
        "f1_floor": "0.25",
        "blind_reading_cost": "0.5",
        "max_documents": "7",
        "synthetic_paragraphs": "12",
    }
    assert set(chosen) == set(MusiqueConfig.model_fields) - {"id", "task", "system_prompt"}
    config = make(**chosen).config
    assert config.hops == (2, 3) and config.weights.f1 == 0.5 and config.weights.exact_match == 0.4
    assert (config.shuffle, config.curriculum, config.hop_factor) == (False, True, True)
    (task, *_) = make(**{**chosen, "retriever": "golden"})
    assert task.config.tools.max_top_k == 3 and task.config.tools.retriever == "golden"
    assert (task.config.tools.rerank_url, task.config.tools.rerank_model) == ("http://localhost:8931", "m")
    assert task.config.tools.max_documents == 7
    assert (task.config.scoring.f1_floor, task.config.scoring.blind_reading_cost) == (0.25, 0.5)
    assert task.config.scoring.grounding == 0.25 and task.config.answer_style == "complete"


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"datasets": "a,b,c,d"}, "datasets: datasets part 1 ('a,b,c,d'): has 4 fields"),
        ({"split": "dev"}, "split: Input should be 'train' or 'validation'"),
        ({"hops": "5"}, "hops: hops is a list of 2, 3 and 4"),
        ({"hops": "two"}, "hops: hops is a list of 2, 3 and 4"),
        ({"noise": "2"}, "noise: Input should be less than or equal to 1"),
        ({"num_examples": "0"}, "num_examples: num_examples must be at least 1, or -1 for all, not 0"),
        ({"retriever": "bm52"}, "retriever: there is no retriever 'bm52'; did you mean 'bm25'? The names are bm25"),
        ({"max_top_k": "0"}, "max_top_k: Input should be greater than or equal to 1"),
        ({"answer_style": "tag"}, "answer_style: Input should be 'tags' or 'complete'"),
        ({"weights": "f2=1"}, "weights: there is no reward component 'f2'"),
        ({"grounding": "1.5"}, "grounding: Input should be less than or equal to 1"),
        ({"synthetic_paragraphs": "3"}, "synthetic_paragraphs: Input should be greater than or equal to 4"),
        ({"retreiver": "bm25"}, "there is no setting 'retreiver'; did you mean 'retriever'?"),
    ],
)
def test_a_wrong_setting_is_one_sentence(chosen, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        make(**chosen)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_only_the_hub_imports_datasets(monkeypatch, kit, write):
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it now fails
    assert kit.tasks(num_examples=2)
    assert kit.tasks(datasets=write(kit.record()))


def test_rollouts_share_the_retriever_that_was_prepared(kit, monkeypatch):
    prepared = []
    monkeypatch.setattr(Retriever, "prepare", lambda self: prepared.append(self))
    (task,) = kit.tasks(num_examples=1)
    task.prepare_rollouts()
    toolset = task.toolsets(task.config)[0]
    asyncio.run(toolset.setup_task(task.data))
    assert prepared == [toolset.retriever] and set(toolset.documents) == {d.id for d in task.data.documents}


def test_a_wrong_model_fails_at_load_and_not_in_every_rollout(tmp_path):
    with pytest.raises(ValueError, match="no-model") as error:
        list(make(datasets="synthetic", retriever=f"semantic/{tmp_path}/no-model"))
    assert "\n" not in str(error.value)


def test_a_wrong_reranker_fails_at_load_and_not_in_every_rollout(tmp_path):
    for model, reason in (
        (f"{tmp_path}/no-model", "there is no directory"),
        (str(tmp_path), "does not load as a cross-"),
    ):
        with pytest.raises(ValueError, match=reason) as error:
            list(make(datasets="synthetic", rerank_model=model))
        assert "\n" not in str(error.value)


# --- order ----------------------------------------------------------------------------------------------------------


def keys(kit, **settings):
    return [task.key for task in kit.tasks(**settings)]


def test_the_order_depends_on_the_seed_alone(kit, real):
    everything = keys(kit, datasets=real)
    assert everything == keys(kit, datasets=real) != keys(kit, datasets=real, seed=1)
    assert sorted(everything) == sorted(keys(kit, datasets=real, shuffle=False))
    assert len(set(everything)) == 100
    assert keys(kit, datasets=real, num_examples=7) == everything[:7]
    with open(real) as file:
        assert keys(kit, datasets=real, shuffle=False) == [json.loads(line)["id"] for line in file]


def test_the_curriculum_puts_few_hops_first_in_the_same_shuffled_order(kit, real):
    tasks = kit.tasks(datasets=real, curriculum=True)
    assert [task.data.hops for task in tasks] == [2] * 68 + [3] * 27 + [4] * 5
    shuffled = [task.key for task in kit.tasks(datasets=real) if task.data.hops == 2]
    assert [task.key for task in tasks[:68]] == shuffled


@pytest.mark.slow
def test_hops_are_filtered(kit, real):
    assert {task.data.hops for task in kit.tasks(datasets=real, hops="2,4")} == {2, 4}
    assert len(kit.tasks(datasets=real, hops=3)) == 27
    assert [task.data.hops for task in kit.tasks(hops="4", num_examples=5)] == [4] * 5
    with pytest.raises(ValueError, match=r"has no question with hops=4"):
        kit.tasks(datasets=f"{real},[:1]", hops="4")


def test_synthetic_splits_and_sizes(kit):
    train, held_out = kit.tasks(num_examples=50), kit.tasks(num_examples=50, split="validation")
    assert len(train) == len(held_out) == 50
    assert not {task.data.prompt for task in train} & {task.data.prompt for task in held_out}
    assert len(kit.tasks()) == 1000
    assert [task.key for task in kit.tasks()][:50] == [task.key for task in train]
    assert len(kit.tasks(num_examples=1200)) == 1200
    assert len(kit.tasks(datasets="synthetic,answerable,train[100:200]", num_examples=10)) == 10
    assert len(kit.tasks(datasets="synthetic,answerable,train[:10%]+validation[:5]")) == 105
    assert {len(task.data.documents) for task in kit.tasks(num_examples=3, synthetic_paragraphs=7)} == {7}


def test_ids_survive_noise(kit, real):
    whole = {task.key: task.data for task in kit.tasks(datasets=real)}
    kept = 0
    for task in kit.tasks(datasets=real, noise=0.3):
        documents, all_documents = task.data.documents, whole[task.key].documents
        assert [d for d in all_documents if d in documents] == documents and len(documents) < 20
        assert task.data.supporting == whole[task.key].supporting
        assert {step.support for step in task.data.decomposition} == set(task.data.supporting)
        kept += len(documents)
    assert 6.5 < kept / 100 < 8.5  # 2.4 supporting and 0.3 of the others


def test_the_prompt(small):
    for style in STYLES:
        plain, full = small(answer_style=style), small({"answerable": False}, answer_style=style)
        assert plain.data.prompt == "Where was the author of The Long Song born?"
        assert "unanswerable" not in plain.data.system_prompt and "unanswerable" in full.data.system_prompt
        assert ("<answer>" in plain.data.system_prompt) == (style == "tags")
        assert len(plain.data.system_prompt) < 900
