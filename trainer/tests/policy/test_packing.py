"""Rows into passes: each once, none too large, few, the longest first."""

from hypothesis import given, settings
from hypothesis import strategies as st
from plumbob.trainer.policy.packing import indices_of, pack, pack_evenly, pack_prompts

LENGTHS = st.lists(st.integers(1, 60), max_size=60)


@given(LENGTHS, st.integers(1, 100))
@settings(max_examples=200, deadline=None)
def test_every_row_is_in_exactly_one_pass_and_no_pass_is_too_large(lengths, max_tokens):
    passes = pack(lengths, max_tokens)
    assert sorted(i for rows in passes for i in rows) == list(range(len(lengths)))
    for rows in passes:
        assert rows
        assert sum(lengths[i] for i in rows) <= max_tokens or len(rows) == 1


@given(LENGTHS, st.integers(1, 100))
@settings(max_examples=200, deadline=None)
def test_passes_are_few(lengths, max_tokens):
    """First-fit decreasing needs at most 11/9 OPT + 6/9 bins (Dosa, 2007); OPT is at least the tokens over the room."""
    lengths = [min(n, max_tokens) for n in lengths]
    passes = pack(lengths, max_tokens)
    halves = sum(sum(lengths[i] for i in rows) * 2 <= max_tokens for rows in passes)
    assert halves <= 1  # two passes that are no more than half full would have been one
    assert len(passes) <= 11 / 9 * max(_optimum(lengths, max_tokens), 0) + 6 / 9


def _optimum(lengths: list[int], room: int) -> int:
    """At least so many passes by volume, but at least so many as rows that cannot share one; exact is NP-hard."""
    if not lengths:
        return 0
    volume = -(-sum(lengths) // room)
    return max(volume, sum(n * 2 > room for n in lengths)) if len(lengths) > 12 else _exact(lengths, room)


def _exact(lengths: list[int], room: int) -> int:
    best = len(lengths)

    def place(i: int, bins: list[int]) -> None:
        nonlocal best
        if len(bins) >= best:
            return
        if i == len(lengths):
            best = len(bins)
            return
        for b in {load: b for b, load in enumerate(bins)}.values():
            if bins[b] + lengths[i] <= room:
                place(i + 1, [*bins[:b], bins[b] + lengths[i], *bins[b + 1 :]])
        place(i + 1, [*bins, lengths[i]])

    lengths = sorted(lengths, reverse=True)
    place(0, [])
    return best


def test_the_longest_rows_come_first_and_equal_input_gives_equal_passes():
    lengths = [3, 50, 7, 20, 20, 1, 49]
    passes = pack(lengths, 60)
    assert passes == pack(lengths, 60) == [[1, 2, 0], [6, 5], [3, 4]]


def test_a_row_that_is_longer_than_a_pass_goes_alone():
    assert pack([10, 100, 10], 50) == [[1], [0, 2]]


@given(LENGTHS, st.integers(1, 100))
@settings(max_examples=200, deadline=None)
def test_even_passes_are_as_many_and_the_fullest_is_no_fuller(lengths, max_tokens):
    fewest, even = pack(lengths, max_tokens), pack_evenly(lengths, max_tokens)
    assert sorted(i for rows in even for i in rows) == list(range(len(lengths)))
    assert len(even) == len(fewest)

    def fullest(passes):
        return max((sum(lengths[i] for i in rows) for rows in passes), default=0)

    assert fullest(even) <= fullest(fewest)


def test_no_pass_is_left_with_a_few_rows_only():
    lengths = [300] * 60  # 54 fit into one pass, and 6 are left
    assert [len(rows) for rows in pack(lengths, 16_384)] == [54, 6]
    assert [len(rows) for rows in pack_evenly(lengths, 16_384)] == [30, 30]
    groups = [2_600] * 127  # 6 fit into one pass
    assert sorted(len(rows) for rows in pack_evenly(groups, 16_384)) == [5] * 5 + [6] * 17


@given(
    rows=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30)), max_size=40),
    max_tokens=st.integers(1, 150),
    once=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_rows_of_a_prompt_are_together_and_no_pass_computes_too_much(rows, max_tokens, once):
    """Prompt k has 5 k ids, those of prompts 0 and 1 are not shared; a row is a prompt and some tokens more."""
    prompts = [[k] * 5 * k for k, _ in rows]
    lengths = [5 * k + rest for k, rest in rows]
    passes = pack_prompts(prompts, lengths, max_tokens, shortest=8, once=once)
    assert sorted(i for part in passes for i in part) == list(range(len(rows)))
    for part in passes:
        shared = [k for k in range(2, 6) if once and sum(rows[i][0] == k for i in part) > 1]
        tokens = sum(lengths[i] for i in part)
        tokens -= sum(5 * k * (sum(rows[i][0] == k for i in part) - 1) for k in shared)
        assert tokens <= max_tokens or len(part) == 1
    for k in range(2, 6):
        mine = [i for i, row in enumerate(rows) if row[0] == k]
        whole = 5 * k + sum(rows[i][1] for i in mine) if once else sum(lengths[i] for i in mine)
        if mine and whole <= max_tokens:
            (part,) = [part for part in passes if mine[0] in part]
            places = [part.index(i) for i in mine if i in part]
            assert len(places) == len(mine) == max(places) - min(places) + 1


def test_rows_without_common_prompts_are_packed_as_they_were():
    lengths = [300, 7, 41, 41, 250, 90] * 5
    assert pack_prompts([()] * 30, lengths, 700, shortest=8, once=True) == pack_evenly(lengths, 700)


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 12))))
def test_places_of_ranges_follow_one_another(ranges):
    expected = [start + k for start, length in ranges for k in range(length)]
    assert indices_of([start for start, _ in ranges], [length for _, length in ranges]).tolist() == expected
