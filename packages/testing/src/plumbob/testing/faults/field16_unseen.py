"""The unseen half of the sixteenth set of the field's faults: it is run only to measure.

The set is about the environment's side: threads in the order in which plain searches return them, listed in
docs/results/field16_threads.md.
"""

from __future__ import annotations

from plumbob.testing.faults import field16_unseen_doubles as doubles
from plumbob.testing.faults.field import EVERYWHERE, WITH_TOOLS, FieldFault, ids
from plumbob.testing.faults.field2_parts import module_function
from plumbob.testing.faults.field3_parts import tools_called
from plumbob.testing.faults.field_parts import batches_changed, graded, tasks_changed, tools_answer

UNSEEN = (
    # Reading the answer
    FieldFault(
        "answer shortened before it is graded",
        "The limit on the length of tool results is applied to the submitted answer too, which is then graded.",
        "UKGovernmentBEIS/inspect_ai#5117",
        ids("answers-not-parsed", "oracle-fails", "reward-constant"),
        ("gsm8k",),
        start=module_function("is_correct", doubles.shortened),
        watch_causes=ids("never-succeeds"),
    ),
    FieldFault(
        "gold looked for anywhere in the reply",
        "An answer is right if the gold is a part of the reply, so that a list of guesses is right as well.",
        "PrimeIntellect-ai/verifiers#763",
        ids("reward-exploitable"),
        ("lookup", "gsm8k"),
        start=graded(correct=doubles.anywhere),
        watch_causes=ids("reward-hacked"),
    ),
    FieldFault(
        "golds with a space at the end",
        "Many golds were entered with a space at their end, and the comparison does not remove it.",
        "oaknational/Oak-Web-Application#2936",
        ids("oracle-fails", "answers-not-parsed"),
        EVERYWHERE,
        start=graded(correct=doubles.spaced),
    ),
    FieldFault(
        "judge's words turned into a number or zero",
        "The judge's text is turned into a number, and where that fails the reward is 0 without a word.",
        "manthanguptaa/water#57, llm-jp/llm-jp-judge#40",
        ids("grader-swallows-errors", "answers-not-parsed", "oracle-fails"),
        ("gsm8k", "lookup"),
        start=graded(correct=doubles.words_to_zero),
    ),
    FieldFault(
        "verdict searched for the word correct",
        "The judge's verdict is searched for a word of praise, which verdicts of the opposite meaning have too.",
        "OpenAgentHQ/openagent-eval#74",
        ids("reward-constant", "reward-exploitable"),
        EVERYWHERE,
        start=graded(correct=doubles.word_correct),
    ),
    FieldFault(
        "reward read from a scenario that was never loaded",
        "The environment runs with the wrong scenario, whose reward is 0 whatever the agent does.",
        "openai/retro#40, Princeton-Robot-Planning-and-Learning/prbench#131",
        ids("reward-constant", "oracle-fails"),
        EVERYWHERE,
        start=graded(correct=doubles.never_loaded),
        watch_causes=ids("never-succeeds"),
    ),
    FieldFault(
        "reward that never gets its gold column",
        "The loader drops the column of golds, and the reward function raises an error for every completion.",
        "MakazhanAlpamys/Soup#565, 2U1/Qwen-VL-Series-Finetune#234",
        ids("environment-fails"),
        ("gsm8k", "lookup"),
        start=graded(correct=doubles.no_gold),
    ),
    FieldFault(
        "marks for form and steps above those for the answer",
        "Several rewards for the form of a reply together outweigh the one for the answer, which falls to 0.",
        "huggingface/open-r1#255, huggingface/trl#3903",
        ids("reward-format-dominated", "reward-exploitable"),
        ("lookup", "musique"),
        start=graded(correct=doubles.a_fifth, form=doubles.form, steps=doubles.steps),
    ),
    # Tools
    FieldFault(
        "environment set up once and never reset",
        "The environment is reset once and not before each episode: later tasks are played in the first one's state.",
        "nsidn98/InforMARL#3, cage-challenge/cage-challenge-4#39, marlbenchmark/on-policy#116",
        ids("tool-results-mixed", "oracle-fails", "tools-return-nothing"),
        WITH_TOOLS,
        start=doubles.set_up_once,
        watch_causes=ids("never-succeeds"),
    ),
    FieldFault(
        "hidden table drawn anew without a seed",
        "The environment has a random part that no seed reaches: the same actions lead to another end each time.",
        "Grid2op/grid2op#432, openai/gym#1478",
        ids("oracle-fails", "tool-results-mixed"),
        ("lookup",),
        start=doubles.drawn_anew,
        watch_causes=ids("never-succeeds"),
    ),
    FieldFault(
        "tool results left out of the history",
        "The conversation that the model sees lacks what its tools returned, so that it goes on from nothing.",
        "moltis-org/moltis#319, goruck/home-generative-agent#588, datarobot-oss/datarobot-genai#430",
        ids("tools-return-nothing"),
        WITH_TOOLS,
        start=tools_answer(doubles.left_out),
    ),
    FieldFault(
        "tool results cut at a fixed number of letters",
        "A number in the code cuts each tool result long before its end, whatever the setting says.",
        "ebongard/renfield#299, open-webui/computer#283, verl-project/verl#4918",
        ids("tool-results-cut"),
        ("musique",),
        start=tools_answer(doubles.cut),
    ),
    FieldFault(
        "search that answers with time-outs under load",
        "The search server cannot serve all rollouts, and most calls get the text of an error in place of results.",
        "Agent-RL/ReCall#82",
        ids("tools-fail", "tool-results-mixed"),
        ("musique", "lookup"),
        start=tools_answer(doubles.timed_out),
    ),
    FieldFault(
        "text arguments guessed to be lists",
        "Text arguments are read as lists before the tool gets them, and all but the first piece is lost.",
        "epam/dm.ai#461",
        ids("tool-arguments-changed"),
        ("musique", "lookup"),
        start=tools_called(doubles.to_list),
    ),
    # Tasks
    FieldFault(
        "a single training example",
        "The run trains on one example again and again.",
        "huggingface/trl#2970",
        ids("few-distinct-tasks"),
        EVERYWHERE,
        start=tasks_changed(doubles.one_example),
    ),
    FieldFault(
        "list of tasks written again with each new one",
        "The generator writes the whole list of tasks after each new one, so that the first tasks are there most often.",
        "instructlab/instructlab#1003, JuneFeng/RelationClassification-RL#12, understanding-search/maze-transformer#145",
        ids("duplicate-tasks", "few-distinct-tasks"),
        EVERYWHERE,
        start=tasks_changed(doubles.written_again),
    ),
    FieldFault(
        "test questions among the training data",
        "The training data were made from a set that has the questions of the test in it.",
        "QwenLM/ProcessBench#2, ConsequentAI/fneval#17, marin-community/marin#6742",
        ids("held-out-in-training"),
        EVERYWHERE,
        inject=doubles.tests_among_training,
        watch_options="--eval-examples 32",
    ),
    # Rewards of a batch
    FieldFault(
        "reward inputs repeated once more than the completions",
        "The inputs of the rewards are repeated for each completion although the sampler has repeated them already.",
        "om-ai-lab/VLM-R1#129",
        ids("rewards-of-other-rollouts"),
        EVERYWHERE,
        start=batches_changed(doubles.repeated_twice),
        watch_causes=ids("too-little-signal", "never-succeeds"),
    ),
)
