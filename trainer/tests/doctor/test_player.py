"""Verifiers tasksets as the environment's matrix plays them."""

import asyncio

import pytest
import verifiers.v1 as vf
from plumbob.doctor.environment.matrix import play
from plumbob.doctor.environment.player import Call, Script, Turn
from plumbob.doctor.environment.table import judge
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.doctor.player import VerifiersPlayer
from plumbob.trainer.rollouts.tasks import load_environments
from vf_lookup.taskset import LookupTask

SYNTHETIC = ("datasets=synthetic", "num_examples=200")
HEALTHY = [
    ("lookup", ("num_examples=400",)),
    ("gsm8k", SYNTHETIC),
    ("musique", (*SYNTHETIC, "noise=0")),
    ("lookup", ("difficulty=trivial", "num_examples=400")),
    ("lookup", ("difficulty=extreme", "num_examples=100")),
    ("gsm8k", (*SYNTHETIC, "answer_style=boxed")),
    ("musique", SYNTHETIC),
    ("musique", (*SYNTHETIC, "answer_style=complete", "weights=f1=0.5,format=0")),
]
UNREAD = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
<invoke name="{{ call.function.name }}">{{ call.function.arguments | tojson }}</invoke>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


@pytest.fixture
def player_of():
    """A player of an environment with these settings."""
    with asyncio.Runner() as runner:

        def made(env="lookup", args=("num_examples=200",), **settings):
            config = TrainConfig(env=[env], env_args=args, eval_examples=16, max_steps=20, **settings)
            return VerifiersPlayer(config, load_environments(config)[0], runner)

        yield made


@pytest.mark.parametrize(
    ("env", "args"),
    # The first of each environment in every run of the tests.
    [pytest.param(*case, marks=[pytest.mark.slow] if k > 2 else []) for k, case in enumerate(HEALTHY)],
    ids=lambda part: part if isinstance(part, str) else part[0],
)
def test_healthy_environments_give_no_alarm(player_of, env, args):
    found = judge(play(player_of(env, args)))
    assert not [finding for finding in found if finding.verdict in ("fail", "error")]


def test_a_rollout_has_its_messages_and_reward(player_of):
    player = player_of()
    task = player.train[0]
    (played,) = player.play([Script(task, player.oracle(task))])
    assert (played.ok, played.reward, played.components) == (True, 1.0, {"correct": 1.0})
    assert [message.role for message in played.opening] == ["system", "user"]
    assert played.last == task.fields["answer"]
    calls = [message.answers for message in played.messages if message.role == "tool"]
    assert player.direct(task, calls) == played.results
    assert player.direct(task, [Call("lookup", "no object"), Call("other", {})]) == [None, None]


def test_rollouts_at_the_same_time_are_those_that_are_played_alone(player_of):
    player = player_of()
    scripts = [Script(task, player.oracle(task)) for task in player.train[:6]]
    assert [p.results for p in player.play(scripts)] == [player.play([script])[0].results for script in scripts]


def test_what_an_environment_raises_is_the_rollouts_error(player_of, monkeypatch):
    async def correct(self, trace):
        raise RuntimeError("out of\n memory")

    monkeypatch.setattr(LookupTask, "correct", vf.reward(weight=1.0)(correct))
    player = player_of()
    (played,) = player.play([Script(player.train[0], (Turn(),))])
    assert played.failure == "fails" and played.error.endswith("RuntimeError: out of memory")


def test_places_name_file_and_function(player_of):
    player = player_of()
    assert player.place("reward", "correct").partition(" ")[2] == "LookupTask.correct"
    assert player.place("tool", "lookup").startswith("tools.py:")
    assert player.place("tasks").partition(" ")[2] == "LookupTaskset.load"
