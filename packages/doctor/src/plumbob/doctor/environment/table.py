"""The table of what is true in a healthy environment, in the order in which its rows explain each other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from plumbob.doctor.causes import CAUSES
from plumbob.doctor.environment import grading, tasks, tools
from plumbob.doctor.environment.matrix import Evidence, Matrix
from plumbob.doctor.environment.transcripts import AS_READ, EMPTY, NUMBERS, PERFECT, WORKED
from plumbob.doctor.findings import Finding


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    id: str
    statement: str
    cause: str
    """Id of the cause, if the statement is false."""
    check: Callable[[Matrix], Evidence | None]
    """Evidence that the statement is false; None if it is not."""
    where: Literal["reward", "tool", "tasks"] = "reward"
    """What of the environment's code is to blame."""
    needs: tuple[str, ...] = (PERFECT, EMPTY)
    """Kinds of transcripts without which the statement cannot be examined, and `HELD_OUT`."""

    def lacks(self, matrix: Matrix) -> str:
        """Why the statement cannot be examined; "" if it can."""
        for need in self.needs:
            held = matrix.held_out if need == HELD_OUT else None
            if not (held.kind(EMPTY) if held else matrix.kind(need)):
                none = need == HELD_OUT and not matrix.player.held_out
                return matrix.stopped or ("there are no held-out tasks" if none else f"{need} could not be played")
        return ""


HELD_OUT = "held-out tasks"
HELD = (EMPTY, HELD_OUT)
TABLE: tuple[Row, ...] = (
    # Rollouts end, and their rewards are numbers that stay the same.
    Row("ends", "Rollouts of scripts end, and without errors", "rollouts-fail", grading.ends, needs=()),
    Row("finite", "Every rollout has a finite reward", "not-finite", grading.finite, needs=()),
    Row("twice", "A transcript earns the same when it is played again", "reward-nondeterministic", grading.twice, needs=()),
    # What a rollout earns and reads depends on nothing but itself.
    Row("other-results", "Results do not depend on other rollouts", "tool-results-wrong", tools.unlike_alone, "tool", (PERFECT,)),
    Row("other-rewards", "Rewards do not depend on others", "rewards-of-other-rollouts", grading.unlike_alone, needs=(EMPTY,)),
    # Right answers are paid.
    Row("not-overpaid", "Silence does not earn what right answers do", "reward-exploitable", grading.overpaid),
    Row("paid", "A perfect transcript earns more than an empty reply, in every task", "oracle-fails", grading.unpaid),
    Row("same-range", "Right answers are paid in held-out tasks, too", "evaluation-differs", tasks.same_range, needs=HELD),
    # Tasks differ, and neither they nor their order give anything away.
    Row("distinct", "There are enough different training tasks", "few-distinct-tasks", tasks.distinct, "tasks", (EMPTY,)),
    Row("order", "The order of tasks does not change how hard they are", "task-order-drifts", tasks.order, "tasks", (EMPTY,)),
    Row("hidden", "Prompts do not give answers away", "answer-in-prompt", tasks.hidden, "tasks", (EMPTY,)),
    Row("apart", "No held-out task is a training task", "held-out-in-training", tasks.apart, "tasks", HELD),
    Row("prompted", "Held-out tasks are prompted as training tasks are", "evaluation-differs", tasks.prompted, "tasks", HELD),
    # Tool results are what the tools return, reach the model whole, and hold what answers need.
    Row("own-result", "What is shown is what the tool returns, all of it", "tool-results-wrong", tools.own_result, "tool"),
    Row("no-errors", "The calls of perfect transcripts do not end in errors", "tools-fail", tools.fail, "tool"),
    Row("needed", "Results hold what later calls and answers need", "tool-results-wrong", tools.needed, "tool"),
    Row("own-data", "Answers agree with what their tasks' own data say", "oracle-fails", tasks.contradicted, "tasks", (EMPTY,)),
    # Right answers are read, however they are written, and wrong ones are not paid.
    Row("read", "An answer is read after numbers", "answers-not-parsed", grading.written(NUMBERS, WORKED)),
    Row("as-read", "An answer may have the letters in which it was read", "answers-not-parsed", grading.written(AS_READ)),
    Row("empty", "An empty reply earns little", "reward-exploitable", grading.empty),
    Row("cheap", "Transcripts that solve nothing earn little", "reward-exploitable", grading.cheap),
    Row("near", "Wrong answers that are near to the right one earn less", "reward-exploitable", grading.near),
)  # fmt: skip
"""The first row that is refuted names the cause: what depends on others is asked after them, and what is certain first."""


def judge(matrix: Matrix, only: Collection[str] | None = None) -> Iterator[Finding]:
    """Examine what was played: a finding for each row, in the order of the table. `unsure`: it could not be examined.

    `only`: ids of the rows that are asked, if these transcripts can be played; by default all.
    """
    for row in TABLE if only is None else [row for row in TABLE if row.id in only and not row.lacks(matrix)]:
        stage, why, evidence, verdict = CAUSES[row.cause].stage, row.lacks(matrix), None, "unsure"
        try:
            evidence = None if why else row.check(matrix)
        except Exception as error:  # one check that fails must not take the others with it
            why, verdict = f"the check failed: {type(error).__name__}: {error}", "error"
        if evidence is None:
            yield Finding(row.statement, verdict if why else "pass", why, None, stage)
        else:
            place = matrix.player.place(row.where, evidence.part)
            yield Finding(row.statement, "fail", evidence.text, evidence.cause or row.cause, stage, place=place)
