"""The bundled policies: each is a decent baseline in its environment, with room that training can use."""

import importlib
import shutil
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
import torch
from plumbob.console import UserError
from plumbob.trainer.config.bundled_models import BUNDLED_MODELS
from plumbob.trainer.config.evaluate import EvaluateConfig
from plumbob.trainer.evaluation.results import read_records, rows_of
from plumbob.trainer.evaluation.run import run
from plumbob.trainer.policy import gpu_memory, loading
from plumbob.trainer.policy.gpu_memory import Memory
from plumbob.trainer.policy.loading import load_model, load_tokenizer
from plumbob.trainer.run_files.model_path import model_path

HOME = {
    "tiny": EvaluateConfig(envs=("lookup",), model="tiny"),
    "tiny-gsm8k": EvaluateConfig(envs=("gsm8k",), model="tiny-gsm8k", datasets="synthetic"),
    "tiny-musique": EvaluateConfig(envs=("musique",), model="tiny-musique", datasets="synthetic", env_args=("hops=2",)),
}
"""Where each can do something."""

bundled = pytest.mark.parametrize("name", BUNDLED_MODELS)


def rewards(config: EvaluateConfig, directory: Path) -> list[list[float]]:
    """Of each task's rollouts."""
    config = replace(config, num_examples=64, max_tokens=160, output_dir=str(directory.parent), run_name=directory.name)
    assert run(config, None) == 0
    rows = sorted(rows_of(read_records(directory / f"{config.envs[0]}.jsonl")), key=lambda row: row.key)
    assert all(row.ok for row in rows)
    return [[row.reward for row in group] for _, group in groupby(rows, key=lambda row: row.key)]


def mean(groups: list[list[float]]) -> float:
    values = [reward for group in groups for reward in group]
    return sum(values) / len(values)


def test_each_has_a_home():
    assert set(HOME) == set(BUNDLED_MODELS)


@bundled
def test_it_loads_and_is_small(name):
    model, tokenizer = load_model(name), load_tokenizer(name)
    assert model.num_parameters() < 1_000_000
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer)
    folder = Path(model_path(name))
    assert sum(file.stat().st_size for file in folder.iterdir()) < 3_000_000


@pytest.mark.slow
@pytest.mark.long
@bundled
def test_it_is_a_decent_baseline_whose_groups_have_signal(name, tmp_path):
    greedy = rewards(HOME[name], tmp_path / "greedy")
    sampled = rewards(replace(HOME[name], rollouts_per_example=4), tmp_path / "sampled")
    assert 0.25 <= mean(greedy) <= 0.7 and 0.3 <= mean(sampled) <= 0.7
    with_signal = sum(len(set(group)) > 1 for group in sampled)
    # `tiny` is surer of itself: of eight rollouts, as in training, four groups in five have signal.
    assert with_signal / len(sampled) > (0.25 if name == "tiny" else 0.6)


@pytest.fixture
def tools(repository, monkeypatch):
    """The scripts that make the policies, importable."""
    monkeypatch.syspath_prepend(repository / "tools")
    return importlib.import_module


def test_the_gsm8k_demonstrator_is_right_wherever_it_finishes(tools):
    from vf_gsm8k.answers import is_correct
    from vf_gsm8k.templates import TEMPLATES

    script = tools("make_tiny_gsm8k")
    rows = list(script.generate("train", seed=7, count=400))
    answers = {row["question"]: row["answer"].rpartition("#### ")[2] for row in rows}
    solutions = script.solve(rows)
    # Left out: what a number stands for cannot be told.
    assert len(solutions) > 0.9 * len(answers)
    assert len({script.shape(steps) for steps in solutions.values()}) == len(TEMPLATES)
    assert all(is_correct(script.write(steps), answers[question]) for question, steps in solutions.items())


@pytest.mark.slow
def test_the_musique_demonstrators_queries_find_their_documents_first(tools):
    from plumbob.retrieval import Document, build

    script = tools("make_tiny_musique")
    config = script.MusiqueConfig(id="musique", datasets="synthetic", hops="2", seed=7, num_examples=100)
    for task in script.MusiqueTaskset(config):
        retriever = build("bm25", [Document(id=d.id, title=d.title, text=d.text) for d in task.data.documents])
        for step, hop in zip(script.steps_of(task.data), task.data.decomposition, strict=True):
            (hit,) = retriever.search(step.query, 1)
            (document,) = (d for d in task.data.documents if d.id == hit.doc_id)
            assert hit.doc_id == hop.support and step.fact in document.text


@pytest.mark.parametrize("left", [0, 7, 0.3])
def test_weights_that_are_cut_off_are_one_sentence(tmp_path, left):
    folder = shutil.copytree(model_path("tiny"), tmp_path / "cut")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: int(left * len(whole)) if left < 1 else int(left)])
    with pytest.raises(UserError, match=f"cannot load model '{folder}': "):
        load_model(str(folder))


@pytest.mark.parametrize("full", [False, True])
def test_a_model_is_the_same_read_onto_a_device_and_read_onto_the_cpu_if_that_is_full(monkeypatch, full):
    read, places = loading.AutoModelForCausalLM.from_pretrained, []

    def from_pretrained(path, **given):
        places.append(given.get("device_map"))
        if full and "device_map" in given:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return read(path, **given)

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    expected, device = load_model("tiny"), torch.device("cpu", 0)
    monkeypatch.setattr(gpu_memory, "memory_of", lambda _: Memory(1 << 40, 1 << 40))
    model = load_model("tiny", device)
    assert places == [None, {"": device}, *([None] if full else [])]
    mine, own = ({**m.state_dict(), **dict(m.named_buffers())} for m in (model, expected))
    assert mine.keys() == own.keys() and all(mine[name].equal(own[name]) for name in own)
    assert model.generation_config == expected.generation_config and model.training == expected.training
