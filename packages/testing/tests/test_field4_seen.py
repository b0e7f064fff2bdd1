"""The seen half of the fourth set of faults does what each entry says: on rows, rewards, weights and tools.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import asyncio
import dataclasses
import json
import math
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from plumbob.rollout import Sample
from plumbob.testing.faults import field4_seen_doubles as doubles
from plumbob.testing.faults.field2_parts import runs_of
from plumbob.testing.faults.field4_seen import SEEN
from plumbob.testing.faults.field_trial import gap, saved_and_trained, texts, tried
from plumbob.testing.faults.healthy4_seen import short_first
from plumbob.trainer.algorithm import advantages
from plumbob.trainer.algorithm.losses import LossInputs

FAULTS = {fault.name: fault for fault in SEEN}


def two_turns(reward: float = 1.0, truncated: bool = False) -> Sample:
    """Prompt 0 1, a turn 2 3, a tool result 4, a turn 5 6."""
    mask = [False, False, True, True, False, True, True]
    return Sample(
        list(range(7)), mask, [-1.0 if m else 0.0 for m in mask], reward, "0/0", "", truncated, rewards={"r": reward}
    )


def test_an_earlier_turn_stands_twice():
    sample = doubles.turns_twice(two_turns(), None)
    assert sample.token_ids == [0, 1, 2, 3, 2, 3, 4, 5, 6]
    assert [i for i, m in enumerate(sample.loss_mask) if m] == [2, 3, 7, 8]


def test_the_mask_of_the_second_turn_is_a_token_late():
    mask = doubles.drifting(two_turns(), None).loss_mask
    assert [i for i, m in enumerate(mask) if m] == [2, 3, 6]


def test_log_probabilities_of_calls_are_missing():
    values = doubles.calls_without_logprobs(two_turns(), None).sampling_logprobs
    assert [i for i, x in enumerate(values) if math.isnan(x)] == [2, 3]


def test_only_cut_rollouts_keep_their_score():
    ended, cut = doubles.behind_the_end([two_turns(), two_turns(truncated=True)])
    assert (ended.reward, ended.rewards, cut.reward) == (0.0, {"r": 0.0}, 1.0)


def test_a_long_rollout_counts_once_for_each_turn():
    short = dataclasses.replace(two_turns(0.0), loss_mask=[False] * 5 + [True] * 2)
    with ExitStack() as stack:
        doubles.turns_counted(stack, "lookup")
        found = advantages.compute_advantages([two_turns(1.0), short])
    assert found.values == pytest.approx([1 / 3, -2 / 3])


def test_short_rows_lose_a_part_of_their_advantage():
    values = torch.zeros(3)
    rows = torch.tensor([0, 1, 1])
    inputs = LossInputs(values, values, torch.ones(3), values, rows, values)
    assert doubles.averaged_with_padding(inputs).advantages.tolist() == [0.5, 1.0, 1.0]


def test_graders_and_weights():
    assert (doubles.inverted(None, None, 1.0), doubles.inverted(None, None, 0.0)) == (0.0, 1.0)
    assert doubles.first_line_only(lambda reply, gold: reply, "one\ntwo", "two") == "one"
    weights = {"a.o_proj.weight": torch.ones(1), "b": torch.ones(1)}
    assert [w.item() for w in doubles.outputs_zero(None, weights).values()] == [0, 1]
    assert doubles.without_arguments(len, "lookup", {"key": "1"}) == (len, {})


def test_every_other_task_is_short():
    tasks = [SimpleNamespace(data=SimpleNamespace(chain=["k"] * n)) for n in (3, 2, 1, 1, 4)]
    lengths = [len(task.data.chain) for task in short_first(tasks, "train")]
    assert lengths[1] == 1
    assert lengths.count(1) >= 2


def test_the_table_answers_for_the_next_key():
    class Tools:
        table = {"1": "one", "2": "two"}  # noqa: RUF012

        def lookup(self, key):
            return self.table[key]

    fn, arguments = doubles.next_document(Tools().lookup, "lookup", {"key": "2"})
    assert fn(**arguments) == "one"


def test_a_search_returns_the_documents_after_those_it_found():
    class Tools:
        documents = {"a": 1, "b": 2, "c": 3}  # noqa: RUF012
        recorded = ()

        async def search(self, query, top_k):
            return ["b", "c"]

        def record(self, tool, asked, found):
            self.recorded = (tool, asked, found)

        def render(self, one):
            return one

        async def retrieve_documents(self, query): ...

    tools = Tools()
    fn, arguments = doubles.next_document(tools.retrieve_documents, "retrieve_documents", {"query": "q"})
    assert asyncio.run(fn(**arguments)) == "c\n\na"
    assert tools.recorded == ("retrieve_documents", "q", ["c", "a"])


@pytest.mark.parametrize(
    "name", ["log-probabilities from the start of the row", "earlier turns stand twice in the row"]
)
def test_engine_and_trainer_differ(name, tmp_path):
    with tried(FAULTS[name], tmp_path) as subject:
        if name.startswith("earlier"):
            sample = subject.drawn.samples[0]
            first, *_ = runs_of(sample.loss_mask)
            assert sample.token_ids[first.stop : first.stop + len(first)] == [sample.token_ids[i] for i in first]
        assert gap(subject) > 1e-3  # a healthy run has 5e-7


def test_the_loss_is_divided_by_the_number_of_microbatches(tmp_path):
    from plumbob.trainer.training import forward_backward

    fault = FAULTS["loss divided by the number of microbatches once more"]
    with tried(fault, tmp_path, groups=4) as subject:
        run = subject.run
        assert run.config.microbatch_tokens == 2048
        minibatch = SimpleNamespace(rows=subject.drawn.samples, mine=list(range(len(subject.drawn.samples))))
        assert len(forward_backward._microbatches(run, minibatch)) > 1


def test_the_adapter_is_saved_with_an_alpha_of_zero(tmp_path):
    with tried(FAULTS["adapter saved with an alpha of zero"], tmp_path / "run", groups=1) as subject:
        saved_and_trained(subject, tmp_path)
        settings = json.loads((tmp_path / "model/adapter/adapter_config.json").read_text())
        assert settings["lora_alpha"] == 0


def test_tools_are_called_without_arguments(tmp_path):
    with tried(FAULTS["tool calls lose their arguments"], tmp_path, groups=1) as subject:
        assert any("wrong arguments" in text for trace in subject.drawn.traces for text in texts(trace, "ToolMessage"))


pytestmark = pytest.mark.field  # the doubles of the first set are tested in every run of the quick suite, these in CI
