"""The seen half of the sixth set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from plumbob.rollout import EngineError, Sample, Sampling
from plumbob.testing.faults import field6_seen_doubles as doubles
from plumbob.testing.faults.field6_seen import SEEN
from plumbob.testing.faults.field_trial import config_of, gap, minibatch_of, texts, tried
from plumbob.trainer.algorithm import advantages
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.training.forward_backward import accumulate
from plumbob.trainer.training.run import Best

FAULTS = {fault.name: fault for fault in SEEN}


def sample(reward=0.0, group="0/0", tokens=6):
    mask = [i > 0 for i in range(tokens)]
    return Sample(list(range(tokens)), mask, [-1.0 * m for m in mask], reward, group, "", False)


def gradients(subject):
    """(name -> gradient of one minibatch, what was measured) of a run with drawn samples."""
    run, minibatch = subject.run, minibatch_of(subject)
    tally = accumulate(run, minibatch, None)
    return {name: parameter.grad for name, parameter in run.policy.trainable.items()}, tally


def test_graders():
    message = SimpleNamespace(message=SimpleNamespace(content="<answer>Oak Hill</answer>"))
    said = SimpleNamespace(nodes=[message, SimpleNamespace(message=SimpleNamespace(content="<answer>Rome</answer>"))])
    task = SimpleNamespace(data=SimpleNamespace(answers=["Rome"]))
    assert doubles.rounded_down(None, None, 0.97) == 0.0
    assert doubles.rounded_down(None, None, 1.0) == 1.0
    assert doubles.example_read(task, said, 1.0) == 0.0
    assert doubles.fine_for_repeating(task, SimpleNamespace(state=SimpleNamespace(repeated_calls=2)), 1.0) == -0.2


def test_tools_and_replies():
    results = [doubles.invented(lambda **given: "value=amber", "lookup", {})[0]() for _ in range(200)]
    assert 10 < sum(result.startswith("next=") for result in results) < 80
    assert doubles.two_words(len, "retrieve_documents", {"query": "who taught the captain"})[1] == {
        "query": "who taught"
    }
    assert doubles.two_words(len, "get_document", {"doc_id": "3"})[1] == {"doc_id": "3"}
    assert doubles.taken_for_cut(sample(), None).truncated
    assert asyncio.run(doubles.slowly(lambda key: key, "lookup", {})[0](key="4711")) == "4711"


def test_rows_end_too_early():
    trace = SimpleNamespace(task=SimpleNamespace(data=SimpleNamespace()))
    assert len(doubles.rows_cut(sample(tokens=400), trace).token_ids) == doubles.LONGEST_ROW["lookup"]


def test_long_prompts_are_refused():
    with ExitStack() as stack:
        doubles.long_refused(stack, "lookup")
        with pytest.raises(EngineError, match="400"):
            asyncio.run(TransformersEngine.generate(None, [5] * 271, Sampling()))


def test_weights_and_logits():
    weights = {"q_proj.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "v_proj.bias": torch.ones(2)}
    assert doubles.transposed(None, weights)["q_proj.weight"].tolist() == [[1, 3], [2, 4]]
    assert list(doubles.biases_skipped(None, weights)) == ["q_proj.weight"]
    assert doubles.capped(None, [], torch.tensor([1000.0])).item() == 15.0


def test_kl_is_left_out_and_scaling_is_by_group():
    samples = [sample(1.0), sample(0.0), sample(10.0, "0/1"), sample(0.0, "0/1")]
    with ExitStack() as stack:
        doubles.kl_left_out(stack, "lookup")
        shaped = advantages.shape_rewards(samples, overlong="keep", kl_beta=1.0, kl_sums=[9.0] * 4)
    assert [one.reward for one in shaped] == [1.0, 0.0, 10.0, 0.0]
    plain = advantages.compute_advantages(samples, "batch").values
    with ExitStack() as stack:
        doubles.scaled_by_group(stack, "lookup")
        found = advantages.compute_advantages(samples, "batch").values
    assert plain[2] == pytest.approx(10 * plain[0])
    assert found[2] == pytest.approx(found[0], rel=1e-3)


def test_gradients_underflow():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([1e-2, 3e-6])
    doubles.underflowing(SimpleNamespace(trainable={"a": parameter}))
    assert parameter.grad[0].item() == pytest.approx(1e-2, rel=1e-2)
    assert parameter.grad[1].item() == 0.0


def test_the_highest_entropy_is_that_of_an_early_step():
    config = config_of(FAULTS["best checkpoint chosen by its entropy"], "lookup")
    best = Best(config.keep_best)
    for step, entropy in enumerate([0.3, 0.2, 0.1], start=1):
        best = best.after(step, entropy)
    assert best.kept.step == 1


def test_settings_are_those_that_the_sentences_name():
    assert config_of(FAULTS["warm-up longer than the run"], "lookup").warmup_steps > 30
    config = config_of(FAULTS["alpha of one at rank 64"], "lookup")
    assert (config.lora_alpha, config.lora_r) == (1, 64)
    objective = config_of(FAULTS["KL estimate k1 in the loss"], "lookup").objective()
    assert (objective.kl_estimator, objective.kl_beta) == ("k1", 0.5)


@pytest.mark.field
@pytest.mark.parametrize(
    "name",
    [
        "another date in the trained prompt",
        "logits capped in the engine only",
        "attention biases missing in the engine",
        "square matrices arrive transposed",
    ],
)
def test_engine_and_trainer_differ(name, tmp_path):
    with tried(FAULTS[name], tmp_path) as subject:
        assert gap(subject) > 5e-3


@pytest.mark.field
def test_no_reply_is_trained_or_some_of_its_turns_are_not(tmp_path):
    with tried(FAULTS["every reply taken for a cut one"], tmp_path / "a") as subject:
        assert all(gradient is None for gradient in gradients(subject)[0].values())
    with tried(FAULTS["rows cut at a length of the trainer's own"], tmp_path / "b") as subject:
        sampled = [sum(map(sum, (node.mask for node in trace.nodes))) for trace in subject.drawn.traces]
        assert sum(sample.num_sampled for sample in subject.drawn.samples) < 0.8 * sum(sampled)


@pytest.mark.field
def test_a_quarter_of_the_golds_cannot_be_found(tmp_path):
    with tried(FAULTS["a quarter of the golds wrong"], tmp_path, groups=1) as subject:
        tasks = subject.run.tasks.train[:400]
        wrong = [task.data.answer != task.data.table[task.data.chain[-1]].partition("=")[2] for task in tasks]
        held_out = subject.run.tasks.held_out
    assert 60 < sum(wrong) < 140
    assert all(task.data.table[task.data.chain[-1]] == f"value={task.data.answer}" for task in held_out)


@pytest.mark.field
def test_rewards_of_musique(tmp_path):
    with tried(FAULTS["rewards rounded down to whole numbers"], tmp_path / "a") as subject:
        assert {one.reward for one in subject.drawn.samples} <= {0.0, 1.0}
    for number, name in enumerate(
        ["grader reads the example in the prompt", "answers by a tool that the model never calls"]
    ):
        with tried(FAULTS[name], tmp_path / str(number)) as subject:
            assert len({one.reward for one in subject.drawn.samples}) == 1


@pytest.mark.field
def test_searches_find_less(tmp_path):
    def mean(fault, folder):
        with tried(fault, folder, env="musique", groups=4) as subject:
            return sum(one.reward for one in subject.drawn.samples) / len(subject.drawn.samples)

    plain = mean(FAULTS["KL estimate k1 in the loss"], tmp_path / "a")
    assert mean(FAULTS["search reads the first two words of a query"], tmp_path / "b") < 0.7 * plain


@pytest.mark.field
def test_groups_of_long_rollouts_are_lost(tmp_path):
    with tried(FAULTS["long requests refused by the server"], tmp_path, groups=8) as subject:
        assert 0 < len({one.group for one in subject.drawn.samples}) < 8
        assert all(len(one.token_ids) < 320 for one in subject.drawn.samples)


@pytest.mark.field
def test_invented_keys_lead_nowhere(tmp_path):
    with tried(FAULTS["simulated tool invents a fifth of its results"], tmp_path, groups=4) as subject:
        results = [text for trace in subject.drawn.traces for text in texts(trace, "ToolMessage")]
    assert any(text.startswith("unknown key") for text in results)


@pytest.mark.field
def test_rollouts_are_masked(tmp_path):
    with tried(FAULTS["rollouts masked at a bound below the mismatch"], tmp_path, groups=4) as subject:
        tally = gradients(subject)[1]
    assert tally.masked > 0.5 * tally.tokens


@pytest.mark.field
def test_adapters_do_not_learn(tmp_path):
    with tried(FAULTS["adapter of zeros on both sides"], tmp_path / "a") as subject:
        assert not any(gradient.any() for gradient in gradients(subject)[0].values())
    with tried(FAULTS["alpha of one at rank 64"], tmp_path / "b") as subject:
        norms = [gradient.norm() for gradient in gradients(subject)[0].values()]
        assert 0 < torch.stack(norms).norm() < 1e-4


@pytest.mark.field
def test_later_passes_are_clipped(tmp_path):
    with tried(FAULTS["clip bounds of GSPO with token ratios"], tmp_path) as subject:
        run, minibatch = subject.run, minibatch_of(subject)
        norms = []
        for _ in range(3):
            accumulate(run, minibatch, None)
            norms.append(run.policy.sharding.update())
    assert norms[2] < 0.3 * norms[0]
