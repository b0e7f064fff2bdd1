"""The page in headless Chromium: its numbers, its colours, its filters, its links, and what it never does.

The fixture `page` also asserts, after each test, that nothing was written to the console and nobody was asked anything.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import threading
from pathlib import Path

import pytest
from plumbob.testing.handmade_runs import GROUP, HOSTILE, make_run, metrics_of, node, stored, tiny_tokenizer, trace
from plumbob.trainer.report.live import serve
from plumbob.trainer.report.write import read, write
from plumbob.trainer.run_files.token_record import run_lengths

SPANS = "return [...document.querySelectorAll('.tokens .t')].map((e) => %s)"
COUNT = "return Number(document.querySelector('.count').textContent.split(' ')[0].replaceAll(',', ''))"


def numbers_of(page, chart: str) -> list[list[str]]:
    """The table under a chart."""
    page.js("document.querySelector(`[data-chart='${arguments[0]}'] details`).open = true", chart)
    page.until("return document.querySelector(`[data-chart='${arguments[0]}'] table`)", chart)
    rows = "[...document.querySelectorAll(`[data-chart='${arguments[0]}'] tr`)]"
    return page.js(f"return {rows}.map((r) => [...r.children].map((c) => c.textContent))", chart)


def choose(page, name: str, value: str, event: str = "change") -> None:
    """Set a field of the page, as a person would."""
    page.js(
        "const e = document.getElementById(arguments[0]); e.value = arguments[1]; e.dispatchEvent(new Event(arguments[2]))",
        name,
        value,
        event,
    )


@pytest.mark.slow
def test_charts_have_the_numbers_of_the_run(page, runs):
    page.open(runs.page)
    assert page.texts("h1") == ["one"]
    rows = [json.loads(line) for line in (runs.one / "metrics.jsonl").read_text().splitlines()]
    head, *body = numbers_of(page, "Training reward")
    assert head == ["step", "reward/mean"]
    assert [int(row[0]) for row in body] == [1, 2, 3, 4]
    for cells, row in zip(body, rows, strict=True):
        mean, low, high = map(float, re.findall(r"-?[\d.]+", cells[1]))
        assert mean == row["reward/mean"]
        assert (low, high) == pytest.approx((mean - 1.96 * 0.5 / 2, mean + 1.96 * 0.5 / 2), rel=1e-3)
    # What is drawn: the heights of the points are the values, on one straight scale.
    drawn = page.js(
        "const points = document.querySelectorAll('[data-chart=\"Training reward\"] circle');"
        "return [...points].map((c) => Number(c.getAttribute('cy')))"
    )
    values = [row["reward/mean"] for row in rows]
    slopes = [(drawn[i] - drawn[0]) / (values[i] - values[0]) for i in range(1, 4)]
    assert slopes == pytest.approx([slopes[0]] * 3, rel=0.01) and slopes[0] < 0
    held = numbers_of(page, "Held-out reward")
    assert held[1:] == [["0", "0.5 [0.3, 0.7]"], ["4", "0.75 [0.55, 0.9]"]]
    assert numbers_of(page, "Reward components")[0] == ["step", "reward/correct"]  # and no other number about rewards
    assert not re.search(r"\b(null|undefined|NaN)\b", page.js("return document.body.innerText"))


def test_runs_of_several_seeds_get_a_mean_with_an_interval(page, runs):
    page.open(runs.both)
    head, first, *_ = numbers_of(page, "Training reward")
    assert head == ["step", "one", "two", "mean of 2 seeds"]
    assert float(first[2].split()[0]) == 0.4375
    mean, low, high = map(float, re.findall(r"-?[\d.]+", first[3]))
    # Student's t with one degree of freedom: 12.706 x standard deviation / sqrt(2), which is 12.706 x half the distance.
    assert mean == 0.40625 and high - low == pytest.approx(12.706 * 0.0625, rel=1e-3)
    page.go("#view=settings")
    page.until("return document.querySelector('td strong')")
    assert page.js("return document.querySelector('tbody td').textContent") == "seed"


def test_the_parts_of_a_start_follow_each_other(page, runs):
    page.open(runs.page)
    page.go("#view=settings")
    page.until("return document.querySelector('.start')")
    assert "end of the first step: 12.0 s" in page.js("return document.querySelector('section h2').textContent")
    bars = page.js(
        "return [...document.querySelectorAll('.start')].map((box) => [box.firstChild, box].map((b) => b.getBoundingClientRect()))"
        ".map(([bar, box]) => [(bar.left - box.left) / box.width, bar.width / box.width])"
    )
    assert [x for bar in bars for x in bar] == pytest.approx([0, 0.5, 0.5, 0.125, 0.625, 0.375], abs=0.01)


def test_smoothing_changes_the_line_and_not_the_numbers(page, runs):
    page.open(runs.page)
    before = numbers_of(page, "Training reward")
    line = "return document.querySelector('[data-chart=\"Training reward\"] .line').getAttribute('d')"
    raw = page.js(line)
    choose(page, "smoothing", "0.9", "input")
    assert page.js(line) != raw
    assert page.js("return document.querySelector('[data-chart=\"Training reward\"] .raw').getAttribute('d')") == raw
    assert numbers_of(page, "Training reward") == before


DRAG = """
const box = document.querySelector(`[data-chart='${arguments[0]}'] svg`), area = box.getBoundingClientRect();
const at = (share) => area.left + area.width * (52 + share * (440 - 52 - 10)) / 440;  // the plot, without its margins
const send = (kind, share, buttons) => box.dispatchEvent(new PointerEvent(kind, { clientX: at(share), buttons, bubbles: true }));
send("pointerdown", arguments[1], 1); send("pointermove", arguments[2], 1); send("pointerup", arguments[2], 0);
"""
TICKS = (
    "return [...document.querySelectorAll(`[data-chart='${arguments[0]}'] .tick[text-anchor='middle']`)]"
    ".map((t) => t.textContent)"
)
POINTS = "return document.querySelectorAll(`[data-chart='${arguments[0]}'] circle`).length"


def test_dragging_over_one_chart_zooms_all_and_a_double_click_shows_all_again(page, runs):
    page.open(runs.page)
    assert page.js(TICKS, "Advantages") == ["1", "2", "3", "4"]
    page.js(DRAG, "Training reward", 0.3, 1.0)  # from step 1.9 to 4
    assert page.js(TICKS, "Advantages") == page.js(TICKS, "Training reward") == ["2", "3", "4"]
    assert page.js(POINTS, "Advantages") == 3 and len(numbers_of(page, "Advantages")) == 1 + 4
    page.js(DRAG, "Training reward", 0.3, 0.301)  # a click
    assert page.js(POINTS, "Advantages") == 3
    page.js("document.querySelector('figure svg').dispatchEvent(new MouseEvent('dblclick', { bubbles: true }))")
    assert page.js(POINTS, "Advantages") == 4


def test_one_cursor_for_all_charts(page, runs):
    page.open(runs.page)
    page.js(DRAG.replace("pointerup", "nothing"), "Training reward", 0.66, 0.66)
    told = page.js("return [...document.querySelectorAll('.chart .read')].map((e) => e.textContent)")
    assert len(told) > 4 and {text.split(":")[0] for text in told if "greedy" not in text} == {"step 3"}
    assert "step 4:  greedy 0.75" in told  # the nearest evaluation
    crosses = page.js("return [...document.querySelectorAll('.cross')].map((e) => e.getAttribute('visibility'))")
    assert set(crosses) == {"visible"}
    page.js("document.querySelector('figure svg').dispatchEvent(new PointerEvent('pointerleave', { bubbles: true }))")
    assert page.js("return document.querySelector('.cross').getAttribute('visibility')") == "hidden"


def test_axes_in_seconds_and_tokens_and_shares_within_one(page, tmp_path):
    directory = make_run(tmp_path, "axes")
    own = {"rollout/sampled_tokens": 125.0, "groups/zero_signal_share": 1.0, "reward/smallest": 0.0, "reward/std": 4.0}
    rows = [metrics_of(step, **own) for step in range(1, 5)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write(read([directory], checked=False), tmp_path / "axes.html")
    page.open(tmp_path / "axes.html")
    choose(page, "axis", "tokens")  # 8 rollouts of 125 tokens in each step
    assert page.js(TICKS, "Advantages") == ["1K", "1.5K", "2K", "2.5K", "3K", "3.5K", "4K"]
    page.js(DRAG.replace("pointerup", "nothing"), "Advantages", 0.34, 0.34)
    assert page.texts("[data-chart=Advantages] .read")[0].startswith("step 2 (2K sampled tokens):  ")
    choose(page, "axis", "seconds")
    assert page.js(TICKS, "Held-out reward")[::2] == ["0", "2", "4", "6"]  # before the first step, to 4 steps of 1.5 s
    for chart in ("Groups without a signal", "Training reward"):
        marks = page.js(TICKS.replace("middle", "end"), chart)
        assert min(map(float, marks)) >= 0 and max(map(float, marks)) <= 1
    _, low, high = map(float, re.findall(r"-?[\d.]+", numbers_of(page, "Training reward")[4][1]))
    assert (low, high) == (0, 1)  # the interval of a mean ends where rewards end
    # A run that does not tell its tokens is left out along them, and the others are not.
    write(read([directory, make_run(tmp_path, "silent")], checked=False), tmp_path / "axes.html")
    page.open(tmp_path / "axes.html")
    assert page.js(POINTS, "Training reward") == 8  # runs of one seed have no mean
    choose(page, "axis", "tokens")
    assert page.js(POINTS, "Training reward") == 4


def test_with_several_runs_a_colour_is_a_run_in_every_chart(page, runs):
    page.open(runs.both)
    colours = (
        "return [...document.querySelectorAll(`[data-chart='${arguments[0]}'] .legend li`)]"
        ".map((e) => [e.textContent, e.firstChild.style.color])"
    )
    for chart in ("Training reward", "Held-out reward", "Time per phase", "Reward components"):
        for name, colour in page.js(colours, chart):
            assert colour == ("var(--c0)" if "one" in name else "var(--c1)" if "two" in name else "var(--text)")


@pytest.mark.parametrize("number", range(GROUP))
def test_colours_of_the_tokens_equal_the_mask(page, runs, number):
    page.open(runs.page, f"#step=2&task=again&rollout={number}")
    page.until("return document.querySelector('.tokens .t')")
    whole = stored(runs.one, 2)[number]
    mask = [value for node in whole["nodes"] for value in node["mask"]]
    content = [(node["message"]["role"], value) for node in whole["nodes"] for value in node["is_content"]]
    assert page.js(SPANS % "e.classList.contains('trained')") == mask
    assert page.js(SPANS % "e.classList.contains('masked')") == [not value for value in mask]
    origins = page.js(SPANS % "[...e.classList].find((c) => c.startsWith('o-')).slice(2)")
    assert origins == [role if inside else "template" for role, inside in content]
    # As they are drawn: green without a pattern, red with stripes.
    colours = page.js(SPANS % "[getComputedStyle(e).backgroundColor, getComputedStyle(e).backgroundImage.slice(0, 9)]")
    assert {tuple(c) for c, trained in zip(colours, mask, strict=True) if trained} == {("rgb(191, 232, 198)", "none")}
    assert {tuple(c) for c, trained in zip(colours, mask, strict=True) if not trained} == {
        ("rgba(0, 0, 0, 0)", "repeating")
    }
    ids = [token for node in whole["nodes"] for token in node["token_ids"]]
    text = "".join(page.js(SPANS % "e.textContent")).replace("↵\n", "\n")
    assert text == tiny_tokenizer().decode(ids, skip_special_tokens=False)


def test_a_token_in_the_loss_that_was_not_sampled_is_seen_and_found(page, tmp_path):
    """The tool's result is in the loss, and the first sampled token is not."""
    directory = make_run(tmp_path, "odd", steps=1)
    whole = trace("again", 1.0, "cedar", advantage=0.5)
    mask = [value for node in whole["nodes"] for value in node["mask"]]
    places = [i for i, node in enumerate(whole["nodes"]) for _ in node["mask"]]
    loss = [
        (sampled or node == 3) and i != mask.index(True)
        for i, (sampled, node) in enumerate(zip(mask, places, strict=True))
    ]
    whole["info"]["training"]["loss_mask"] = run_lengths(loss)
    lines = [json.dumps(trace("again", 0.0, "pepper", advantage=-0.5)), json.dumps(whole)]
    (directory / "traces" / "step_1.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    finding = {"check": "c", "verdict": "fail", "evidence": "e", "cause": "loss-mask-wrong", "step": 1, "command": ""}
    (directory / "warnings.jsonl").write_text(json.dumps(finding) + "\n")
    write(read([directory], checked=False), tmp_path / "odd.html")
    page.open(tmp_path / "odd.html")
    assert "In 1 of 2 stored rollouts, the loss was not on exactly the tokens" in page.texts(".alarm")[0]
    page.go("#view=findings")
    page.until("return document.querySelector('.finding a')")
    page.js("document.querySelector('.finding a').click()")
    page.until("return document.querySelector('.t.chosen')")
    first = next(i for i in range(len(mask)) if mask[i] != loss[i])
    assert page.js("return location.hash") == f"#step=1&task=again&rollout=1&token={first}"
    assert page.js(SPANS % "e.classList.contains('trained')") == loss
    assert page.js(SPANS % "e.classList.contains('odd')") == [a != b for a, b in zip(mask, loss, strict=True)]
    colours = page.js(SPANS % "getComputedStyle(e).backgroundColor + e.matches('.trained')")
    both = {c for c, s in zip(colours, mask, strict=True) if s and c.endswith("true")}
    assert both.isdisjoint(c for c, s in zip(colours, mask, strict=True) if not s) and len(both) == 1
    results = sum(node["mask"].__len__() for node in whole["nodes"][3:4])
    said = [" ".join(text.split()) for text in page.texts(".alarm")]
    assert f"{results} tokens in the loss that the model did not sample" in said[0] and "1 sampled token not" in said[0]
    page.go(f"#step=1&task=again&rollout=1&token={places.index(3)}")
    page.until("return document.querySelector('.inspector .chip')?.textContent === 'in the loss, not sampled'")
    page.go("#view=rollouts")
    page.until("return document.querySelector('.row')")
    assert [("wrong loss mask" in text) for text in page.texts(".row")] == [False, True]


def test_a_rollout_outside_the_gradient_is_not_called_trained(page, tmp_path):
    directory = make_run(tmp_path, "flat", steps=1)
    lines = [json.dumps(trace("again", 1.0, "cedar", advantage=advantage)) for advantage in (0.0, 0.5)]
    (directory / "traces" / "step_1.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    write(read([directory], checked=False), tmp_path / "flat.html")
    colours, chips = [], []
    for number in (0, 1):
        page.open(tmp_path / "flat.html", f"#step=1&task=again&rollout={number}")
        page.until("return document.querySelector('.tokens .trained')")
        colours.append(page.js("return getComputedStyle(document.querySelector('.tokens .trained')).backgroundColor"))
        page.js("document.querySelector('.tokens .trained').click()")
        chips.append([page.texts(".key .chip")[0], page.texts(".inspector .chip")[0]])
    assert chips == [["sampled, not trained"] * 2, ["trained"] * 2]
    assert colours[0] != colours[1]


def test_a_token_tells_its_numbers_and_has_an_address(page, runs):
    whole = stored(runs.one, 2)[0]
    mask = [value for node in whole["nodes"] for value in node["mask"]]
    at = [i for i, value in enumerate(mask) if value][2]
    page.open(runs.page, f"#step=2&task=again&rollout=0&token={at}")
    page.until("return document.querySelector('.t.chosen')")
    assert page.js("return document.querySelector('.t.chosen').dataset.at") == str(at)
    fields = dict(zip(page.texts(".inspector dt"), page.texts(".inspector dd"), strict=True))
    assert fields["log-probability, engine"] == "-0.3" and fields["log-probability, trainer"] == "-0.28"
    assert fields["gap (trainer - engine)"] == "+0.02" and fields["ratio (trainer / engine)"] == "1.02"
    assert fields["advantage"] == "+0.5"
    assert fields["push: advantage x (1 - probability)"] == "+0.1221"  # 0.5 x (1 - exp(-0.28))
    page.js(
        "document.querySelector('.tokens').dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight', bubbles: true }))"
    )
    assert page.js("return location.hash") == f"#step=2&task=again&rollout=0&token={at + 1}"
    # Engine and trainer as two lines under each turn, one point per token.
    sampled = [sum(node["mask"]) for node in whole["nodes"] if node["sampled"]]
    for kind in ("engine", "trainer"):
        paths = page.js(f"return [...document.querySelectorAll('.lines .{kind}')].map((p) => p.getAttribute('d'))")
        assert [len(re.findall("[ML]", path)) for path in paths] == [
            max(n, 2) for n in sampled
        ]  # a point alone is a short line
    # The token that moved the policy most is the least likely one.
    trainer = [value for node in whole["nodes"] for value in node["trainer_logprobs"] or ()]
    least = [i for i, value in enumerate(mask) if value][trainer.index(min(trainer))]
    assert page.js("return document.querySelector('.movers td a').textContent") == str(least)
    choose(page, "mode", "gap")
    assert page.js(SPANS % "e.style.backgroundColor !== ''")[at] is True


def test_filters_and_histogram(page, runs):
    page.open(runs.page, "#view=rollouts")
    assert page.js(COUNT) == 4 * 2 * GROUP
    wanted = {"filter-step": ("2", 8), "filter-stop": ("1", 2)}
    for name, (value, count) in wanted.items():
        choose(page, name, value)
        assert page.js(COUNT) == count
    page.js("document.getElementById('clear').click()")
    assert page.js(COUNT) == 32
    page.js("document.getElementById('filter-errors').click()")
    assert page.js(COUNT) == 8
    page.js("document.getElementById('clear').click()")
    bins = page.js("return [...document.querySelectorAll('.bin')].map((b) => Number(b.dataset.count))")
    assert bins == [16, *[0] * 10, 16]
    page.js("document.querySelectorAll('.bin')[11].click()")
    assert page.js(COUNT) == 16 and set(page.texts(".row .reward")) == {"1"}
    page.js("document.querySelectorAll('.bin')[11].click()")
    assert page.js(COUNT) == 32
    choose(page, "filter-order", "high")
    assert page.texts(".row .reward")[:3] == ["1", "1", "1"]


def test_groups_without_a_signal_are_filtered_and_the_list_tells_group_and_advantage(page, tmp_path):
    directory = make_run(tmp_path, "dull", steps=1)
    told = [
        ("even", 0.0, 0.0),
        ("even", 0.0, 0.0),
        ("odd", 0.0, -0.5),
        ("odd", 0.0, 0.5),
        ("same", 0.0, None),
        ("same", 0.0, None),
    ]
    lines = [json.dumps(trace(task, reward, "pepper", advantage=pull)) for task, reward, pull in told]
    (directory / "traces" / "step_1.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    write(read([directory], checked=False), tmp_path / "dull.html")
    page.open(tmp_path / "dull.html", "#view=rollouts")
    rows = "return [...document.querySelectorAll('.row')].map((e) => e.lastChild.innerText.split('\\n'))"
    assert page.js(rows)[1:4] == [
        ["no signal", "group mean 0"],
        ["advantage -0.5", "group mean 0"],
        ["advantage +0.5", "group mean 0"],
    ]
    # Nobody earned anything: no badge is green, though each reward is the largest.
    assert set(
        page.js("return [...document.querySelectorAll('.row .reward')].map((e) => e.style.getPropertyValue('--share'))")
    ) == {"0%"}
    page.js("document.getElementById('filter-flat').click()")
    assert page.js(COUNT) == 4 and [text[:4] for text in page.texts(".row b")] == ["even", "even", "same", "same"]
    assert page.js("return [...document.querySelectorAll('.row.begins b')].map((e) => e.textContent.slice(0, 4))") == [
        "same"
    ]


def test_a_rollout_is_read_as_messages(page, tmp_path):
    directory = make_run(tmp_path, "read", steps=1)
    whole = trace("again", 1.0, "cedar", advantage=0.5)
    call = {"id": "c", "type": "function", "name": "lookup", "arguments": '{"key": "again"}'}
    whole["nodes"][2]["message"] |= {"content": "", "tool_calls": [call]}
    (directory / "traces" / "step_1.jsonl.gz").write_bytes(gzip.compress(json.dumps(whole).encode()))
    write(read([directory], checked=False), tmp_path / "read.html")
    page.open(tmp_path / "read.html", "#step=1&task=again&rollout=0")
    page.until("return document.querySelector('.tokens .t')")
    sizes = "return ['messages', 'tokens', 'inspector'].map((c) => document.querySelector('.' + c).offsetHeight > 0)"
    assert page.js(sizes) == [False, True, True]
    page.js("document.querySelector('.switch button').click()")
    assert page.js(sizes) == [True, False, False]
    assert page.texts(".messages .plain") == ["Look up the start key.", "Start key: again", "next=17", "cedar"]
    assert page.texts(".messages summary") == ["result: next=17"] and page.texts(".call") == ['lookup {"key": "again"}']
    page.go("#step=1&task=again&rollout=0&token=3")  # an address of a token shows tokens
    page.until("return document.querySelector('.t.chosen')")
    page.until(f"return String((() => {{ {sizes} }})()) === 'false,true,true'")


def find(page, text: str) -> int:
    """Type into the search box; returns the number of hits."""
    choose(page, "search", text, "input")
    page.until("return document.querySelector('.searching').dataset.done === arguments[0]", text)
    return page.js(COUNT)


def test_search_reads_every_token_of_every_rollout(page, runs):
    page.open(runs.page, "#view=rollouts")
    assert find(page, "task-3-1") == GROUP
    assert find(page, "NEXT=17") == 32  # a tool's result, in no reply
    assert find(page, "onerror='window") == 4
    assert find(page, "nowhere at all") == 0


def test_what_a_model_wrote_stays_text(page, runs):
    page.open(runs.page, "#step=1&task=again&rollout=1")
    page.until("return document.querySelector('.tokens .t')")
    assert HOSTILE in "".join(page.js(SPANS % "e.textContent"))
    page.go("#view=group&step=1&task=again")
    page.until("return document.querySelector('.column')")
    page.go("#view=rollouts")
    page.until("return document.querySelector('.row')")
    assert HOSTILE[:20] in " ".join(page.texts(".row"))
    assert page.js(
        "return [window.hurt === undefined, document.images.length, document.querySelectorAll('b').length > 0]"
    )[:2] == [True, 0]


def test_a_group_side_by_side_and_the_task_in_another_step(page, runs):
    page.open(runs.page, "#view=group&step=3&task=again")
    page.until("return document.querySelectorAll('.group').length === 2")
    rows = [[t for node in r["nodes"] for t in node["token_ids"]] for r in stored(runs.one, 3)[:GROUP]]
    shared = next(i for i in range(999) if len({row[i] for row in rows}) > 1)
    assert page.js("return Number(document.querySelector('.group').dataset.shared)") == shared
    # Two rollouts have the same tokens, so they share a column; the best reward is the first.
    first = "document.querySelector('.group')"
    assert page.js(
        f"return [...{first}.querySelectorAll('.column header span:first-child')].map((e) => e.textContent)"
    ) == ["rollouts 0, 2", "rollout 1", "rollout 3"]
    assert page.js(f"return [...{first}.querySelectorAll('.column .reward')].map((e) => e.textContent)") == [
        "1",
        "0",
        "0",
    ]
    parting = page.js(f"return [...{first}.querySelectorAll('.part')].map((e) => Number(e.dataset.at))")
    assert parting == [next(i for i in range(999) if rows[k][i] != rows[0][i]) for k in (1, 3)]
    assert page.js(f"return getComputedStyle({first}.querySelector('.part')).opacity") == "1"
    assert page.texts(".group h3")[1].startswith("Step 1:")
    page.js("[...document.querySelectorAll('td a')].find((a) => a.textContent === 'compare').click()")
    page.until("return document.querySelectorAll('.group h3')[1]?.textContent.startsWith('Step 2')")


def test_findings_and_links_to_tokens(page, runs):
    page.open(runs.page, "#view=findings")
    assert page.texts(".finding h3") == ["the tools work"]
    assert page.texts(".finding .verdict")[0].endswith("first in step 2")
    page.go("#step=2&task=again&rollout=1&token=30")
    page.until("return document.querySelector('.t.chosen')")
    assert page.js(
        "return [document.querySelector('.t.chosen').dataset.at, document.querySelector('h2').textContent]"
    ) == ["30", "Step 2, task again, rollout 1"]
    page.go("#step=77&task=again&rollout=0")
    page.until("return document.querySelector('main .alarm')")
    assert "does not hold rollout 0 of task again in step 77" in page.texts("main .alarm")[0]
    assert page.js("return document.querySelectorAll('main .browser').length") == 1  # the others can be chosen


@pytest.fixture(scope="module")
def several(tmp_path_factory) -> Path:
    """The page of a folder of runs: "low", "high" with a wrong loss mask and a flat group, and "other"."""
    folder = tmp_path_factory.mktemp("several")
    for number, (name, after) in enumerate([("low", 0.6), ("high", 0.9), ("other", None)]):
        directory = make_run(folder, name, seed=number)
        before = {"mean": 0.5, "low": 0.4, "high": 0.6, "n": 16}
        both = {"before": {"greedy": before}, "after": {"greedy": {**before, "mean": after}}} if after else {}
        (directory / "summary.json").write_text(json.dumps({"evaluations": both}))
        rows = [metrics_of(step) for step in range(1, 5)]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [trace("even", 1.0, "cedar", advantage=0.0)] * 2 + [trace("odd", 0.0, "x", advantage=-0.5, errors=1)]
    lines.append(trace("odd", 1.0, "cedar", advantage=0.5))
    mask = [value for node in lines[3]["nodes"] for value in node["mask"]]
    lines[3]["info"]["training"]["loss_mask"] = run_lengths([i >= mask.index(True) for i in range(len(mask))])
    text = "\n".join(map(json.dumps, lines))
    (folder / "high" / "traces" / "step_4.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    write(read([folder], checked=False), folder / "report.html")
    return folder / "report.html"


def test_runs_are_compared_chosen_and_filtered(page, several):
    page.open(several)
    names = "return [...document.querySelectorAll('.runs tbody tr')].map((e) => e.children[1].innerText.trim())"
    assert page.js(names) == ["high ★ best", "low", "other"]
    assert page.texts(".runs td:last-child") == ["seed 1", "", "seed 2"]  # the first of equally common ones is usual
    assert numbers_of(page, "Training reward")[0] == ["step", "low", "high", "other", "mean of 3 seeds"]
    page.js("document.querySelectorAll('.runs input')[1].click()")
    assert numbers_of(page, "Training reward")[0] == ["step", "high", "other"]
    choose(page, "runs-filter", "SEED 1", "input")
    assert page.js(names) == ["high ★ best"] and numbers_of(page, "Training reward")[0] == ["step", "high"]
    choose(page, "runs-filter", "", "input")
    assert page.js(names) == ["high ★ best", "low", "other"]
    assert numbers_of(page, "Training reward")[0] == ["step", "low", "high", "other", "mean of 3 seeds"]


def test_a_wrong_loss_mask_is_not_called_nothing_wrong_and_one_seed_is_not_two(page, several):
    folder = several.parent / "again"
    for name in ("low", "high"):
        make_run(folder, name, seed=1)
    shutil.copytree(several.parent / "high" / "traces", folder / "high" / "traces", dirs_exist_ok=True)
    write(read([folder]), folder / "report.html")
    page.open(folder / "report.html")
    assert numbers_of(page, "Training reward")[0] == ["step", "low", "high"]  # without "mean of 2 seeds"
    page.go("#view=findings")
    page.until("return document.querySelector('.findings summary')")
    assert "loss was not on exactly" in page.texts("main .alarm")[0]
    assert not [said for said in page.texts(".findings summary") if "Nothing is wrong" in said]


def test_five_questions_are_answered_from_the_page(page, several):
    def links(selector: str) -> list[str]:
        return page.js(
            "return [...document.querySelectorAll(arguments[0])].map((e) => e.getAttribute('href'))", selector
        )

    page.open(several)
    # Which run of several was best?
    assert "high ★ best" in page.js("return document.querySelector('.runs tbody tr').innerText")
    # How did held-out reward move?
    head, first, last = numbers_of(page, "Held-out reward")
    at = head.index("greedy, high")
    assert (first[at], last[at]) == ("0.5 [0.4, 0.6]", "0.9 [0.4, 0.6]")
    # Which token was trained and should not be? One click on the first screen.
    page.js("document.querySelector('.alarm a').click()")
    page.until("return document.querySelector('.t.chosen')")
    assert page.js("return document.querySelector('h2').textContent") == "Step 4, task odd, rollout 1 of high"
    assert page.texts(".inspector .chip")[0] == "in the loss, not sampled"
    assert page.js("return document.querySelector('.t.chosen').closest('.node').matches('.o-tool')")
    # Which group had no signal?
    page.go("#view=rollouts")
    page.until("return document.getElementById('filter-flat')")
    page.js("document.getElementById('filter-flat').click()")
    assert page.js(COUNT) == 2 and links(".row") == [f"#run=high&step=4&task=even&rollout={i}" for i in (0, 1)]
    # Which tool calls failed?
    page.js("document.getElementById('clear').click()")
    page.js("document.getElementById('filter-errors').click()")
    choose(page, "filter-run", "1")
    choose(page, "filter-step", "4")
    assert links(".row") == ["#run=high&step=4&task=odd&rollout=0"] and "1 tool error" in page.texts(".row")[0]
    page.js("document.querySelector('.row').click()")
    page.until("return document.querySelector('h2').textContent.startsWith('Step 4, task odd, rollout 0')")
    page.js("document.querySelector('.switch button').click()")
    assert page.texts(".messages summary") == ["result: next=17"]


def test_what_holds_is_one_line(page, tmp_path):
    directory = make_run(tmp_path, "healthy")
    verdicts = ["pass", "pass", "unsure", "pass"]
    lines = [{"check": f"check {i}", "verdict": verdict, "evidence": "e"} for i, verdict in enumerate(verdicts)]
    (directory / "warnings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write(read([directory], checked=False), tmp_path / "healthy.html")
    page.open(tmp_path / "healthy.html", "#view=findings")
    assert page.texts(".findings summary") == ["✓ Nothing is wrong: 3 of 4 checks hold, 1 cannot be judged yet"]
    assert page.js("return document.querySelector('.finding').checkVisibility()") is False
    page.js("document.querySelector('.findings summary').click()")
    assert page.js("return document.querySelector('.finding').checkVisibility()") is True


def test_keys_go_through_the_list(page, runs):
    page.open(runs.page, "#view=rollouts")
    page.until("return document.querySelector('h2')?.textContent === 'Step 1, task again, rollout 0'")  # the first one
    page.js("document.getElementById('filter-step').focus()")  # which does not take the keys
    for key, wanted in (("j", "1"), ("j", "2"), ("k", "1")):
        page.key(key)
        page.until(
            "return document.querySelector('h2')?.textContent === arguments[0]", f"Step 1, task again, rollout {wanted}"
        )
    page.until("return document.querySelector('.row.current')")
    page.key("g")
    page.until("return document.querySelectorAll('.group').length === 2")
    page.key("/")
    page.until("return document.activeElement.id === 'search'")


def test_a_rollout_can_be_replayed(page, runs):
    """The command that the page shows takes the very line of the rollout."""
    page.open(runs.page, "#step=3&task=task-3-1&rollout=2")
    page.until("return document.querySelector('.command code')")
    shown = page.texts(".command code")[0]
    path, line, target = re.fullmatch(
        r"gzip -dc (\S+) \| sed -n (\d+)p > (\S+) && evaluate lookup --replay \3", shown
    ).groups()  # ty: ignore[unresolved-attribute]
    assert Path(path) == runs.one / "traces" / "step_3.jsonl.gz" and Path(target) == runs.one / "replay.jsonl"
    assert json.dumps(stored(runs.one, 3)[int(line) - 1]).count("task-3-1") and int(line) == GROUP + 3


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize(
    "fragment",
    [
        "",
        "#view=findings",
        "#view=rollouts",
        "#view=settings",
        "#step=2&task=again&rollout=1&token=30",
        "#view=group&step=2&task=again",
    ],
)
def test_nothing_is_wider_than_the_screen(page, runs, width, fragment):
    page.width(width)
    page.open(runs.both, fragment)
    assert page.js("return document.documentElement.scrollWidth") <= width
    assert page.js("return document.getElementById('main').textContent.length") > 50


@pytest.mark.parametrize("width", [500, 1400])
def test_the_token_of_an_address_is_in_sight(page, tmp_path, width):
    """Below messages whose height the browser only guesses until they are in sight."""
    directory = make_run(tmp_path, "long", steps=1)
    whole = trace("again", 1.0, "cedar", advantage=0.5)
    whole["nodes"][1:2] = [node("user", "a key of the table\n" * 12)]
    whole["nodes"] += [node("tool", "a value of the table\n" * 12) for _ in range(6)]
    (directory / "traces" / "step_1.jsonl.gz").write_bytes(gzip.compress(json.dumps(whole).encode()))
    write(read([directory], checked=False), tmp_path / "long.html")
    page.width(width)
    at = sum(len(node["token_ids"]) for node in whole["nodes"][:3])
    page.open(tmp_path / "long.html", "#view=findings")
    page.go(f"#step=1&task=again&rollout=0&token={at}")
    page.until("return document.querySelector('.t.chosen')")
    page.js("let n = 0; const count = () => { window.drawn = ++n; requestAnimationFrame(count); }; count();")
    page.until("return window.drawn > 10")
    assert page.js(
        "const { left, top, width, height } = document.querySelector('.t.chosen').getBoundingClientRect();"
        "return document.elementFromPoint(left + width / 2, top + height / 2)?.dataset.at"  # nothing lies over it
    ) == str(at)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(page, runs, scheme, chromium):
    """Contrast of at least 4.5 to 1 (WCAG 2.2, 1.4.3) between text and what lies behind it."""
    chromium.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    page.open(runs.page, "#step=2&task=again&rollout=1")
    page.until("return document.querySelector('.tokens .t')")
    names = ["--text", "--soft", "--link", "--alarm", "--bg", "--panel", "--trained", "--masked", "--odd"]
    values = page.js(
        "const s = getComputedStyle(document.documentElement); return arguments[0].map((n) => s.getPropertyValue(n).trim())",
        names,
    )
    color = dict(zip(names, values, strict=True))

    def luminance(value: str) -> float:
        parts = [int(value[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    pairs = [(front, back) for front in names[:4] for back in ("--bg", "--panel")] + [
        ("--text", "--trained"),
        ("--text", "--masked"),
        ("--text", "--odd"),
    ]
    for front, back in pairs:
        low, high = sorted((luminance(color[front]), luminance(color[back])))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (front, back)
    assert (luminance(color["--bg"]) < 0.1) == (scheme == "dark")


@pytest.mark.slow
@pytest.mark.long
def test_ten_thousand_rollouts(page, tmp_path):
    """However many rollouts there are, opening the page unpacks no step, and draws only the rows in sight."""
    directory = make_run(tmp_path, "large", steps=100, groups=25)
    write(read([directory], checked=False), tmp_path / "large.html")
    page.open(tmp_path / "large.html", "#view=rollouts")
    assert page.js(COUNT) == 10_000
    page.until("return document.querySelector('.tokens .t')")  # the first rollout, of the first step
    assert page.js("return [window.unpacked, document.querySelectorAll('.row').length < 40]") == [2, True]
    page.js("document.querySelector('.list').scrollTop = 58 * 7000")
    page.until("return document.querySelector('[data-row=\"7000\"]')")
    assert page.js("return document.querySelectorAll('.row').length") < 40
    page.js("document.querySelector('[data-row=\"7000\"]').click()")
    page.until("return document.querySelector('h2').textContent.startsWith('Step 71,')")
    assert page.js("return window.unpacked") == 3
    assert page.js("return document.querySelectorAll('*').length") < 1500
    assert find(page, "task-93-7") == GROUP


@pytest.mark.slow
def test_a_run_in_progress_is_served_and_shows_its_next_step(page, tmp_path):
    directory = make_run(tmp_path, "going")
    make_run(tmp_path, "other", seed=1)
    server = serve([tmp_path], 0, None)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        page.open(f"http://127.0.0.1:{server.server_port}/")
        assert len(numbers_of(page, "Advantages")) == 1 + 4
        page.js("document.querySelectorAll('.runs input')[1].click()")
        left = numbers_of(page, "Training reward")[0]
        choose(page, "axis", "seconds")
        page.until("return performance.getEntriesByType('resource').some((e) => e.name.endsWith('/state'))")
        with (directory / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics_of(5)) + "\n")
        page.until(
            "return document.documentElement.dataset.ready === 'yes'"
            " && document.querySelector('.runs')?.textContent.includes('5 of 4')"
        )
        # What was chosen stays chosen.
        assert numbers_of(page, "Training reward")[0] == left and len(left) == 2
        assert page.js("return document.getElementById('axis').value") == "seconds"
    finally:
        page.browser.get("about:blank")  # the page would go on asking the server
        server.shutdown()
        server.server_close()


def test_characters_of_several_tokens_can_be_searched(page, tmp_path):
    directory = make_run(tmp_path, "words", steps=1)
    line = json.dumps(trace("again", 1.0, "Grüße 🌲", advantage=0.5))
    (directory / "traces" / "step_1.jsonl.gz").write_bytes(gzip.compress((line + "\n").encode()))
    write(read([directory], checked=False), tmp_path / "words.html")
    page.open(tmp_path / "words.html", "#view=rollouts")
    assert find(page, "grüße 🌲") == 1
