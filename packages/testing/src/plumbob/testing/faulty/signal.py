"""Faults of which a run's settings are the reason: too few rollouts or tasks that always fail, so that groups do not differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plumbob.testing.faulty import sites as at
from plumbob.testing.faulty.fault import Fault, table


def only(keep: Callable[[Any], bool]) -> Callable[[list[Any], str], list[Any]]:
    """The training tasks of which `keep(task)` is true."""
    return lambda tasks, split: [task for task in tasks if keep(task)] if split == "train" else tasks


# fmt: off
FAULTS = table("signal",
    Fault("groups of two at low success",
          "With two rollouts per task and a success rate around 0.2, seven groups in ten have no signal.", at.options,
          None, "too-little-signal", "jsboige/CoursIA#10603, huggingface/trl#3017", ("lookup",),
          "--num-generations 2 -a min_hops=4", run_options="--batch-size 8"),
    Fault("one task per step", "A step has eight rollouts of one task: in many steps nothing is trained.", at.options,
          None, "too-little-signal", "huggingface/trl#2872, #3017",
          options="--batch-size 8 --gradient-accumulation-steps 1", steps=10),
    Fault("tasks of eight links and more for a small model",
          "The tasks are too hard for the model: hardly any rollout succeeds, and filtering leaves no group to "
          "train on.", at.options, None, "too-little-signal never-succeeds", "BytedTsinghua-SIA/DAPO#22", ("lookup",),
          "-a difficulty=extreme"),
    Fault("only the hardest tasks left by the filter",
          "A filter by difficulty has kept the tasks that the policy hardly ever solves.", at.tasks,
          only(lambda task: len(task.data.chain) >= 8), "never-succeeds too-little-signal",
          "asuzukosi/post-training-experiments#8, PrimeIntellect-ai/verifiers#363", ("lookup",), "-a max_hops=9"),
    Fault("only tasks that the model solves",
          "The training tasks are those that the model solves already, and all rollouts of a group earn the same.",
          at.tasks, only(lambda task: len(task.data.chain) == 1), "groups-without-variety too-little-signal",
          "modelscope/ms-swift#3130", ("lookup",)),
)
