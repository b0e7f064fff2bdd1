"""Measure how indexing and searching grow with the number of documents: plumbob.retrieval, rank-bm25 and bm25s.

    uv run python tools/bench/retrieval_growth.py PATH [PATH ...] [--sizes 20,1000,100000] [--only NAME ...] [--encode-at-most 1000]

PATH is a file of MuSiQue-Answerable records (see retrieval.py). A corpus of N documents begins with the records' distinct
paragraphs; where N is larger, further ones are made up: as long as a real paragraph, of words drawn one by one with the
frequencies of the real ones. Such text has no sense, so nothing is said about quality here. Queries are 50 of the records'
questions, which are searched one at a time, tokenising included, top 5.

Columns: seconds to build the index, milliseconds of a search (median of the 50 questions, after one that is not counted) and
how much the process's memory grew while it built the index and searched, in MiB. Each retriever and size is measured in a
process of its own. `semantic` and `hybrid` embed each document once, for which a column has the seconds; they are left out
above `--encode-at-most` documents. Printed as a table of Markdown, one row when it is measured. `--plot FILE` draws a table that
was printed: `retrieval_growth.py TABLE --plot docs/results/retrieval_growth.svg`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import retrieval
from plumbob.retrieval import Document, prefetch

NAMES = ("rank-bm25 default", "bm25s default", "bm25", "semantic", "hybrid/rrf")
QUERIES = 50


def corpus_of(records: list[retrieval.Record], size: int) -> list[Document]:
    """`size` documents: the records' paragraphs in order, then made-up ones, the same in every process."""
    real = retrieval.one_corpus(records)
    frequencies = Counter(word for document in real for word in document.text.split())
    words, weights = list(frequencies), list(frequencies.values())
    draw, made = random.Random(0), []
    for number in range(len(real), size):
        length = len(draw.choice(real).text.split())
        text = draw.choices(words, weights, k=length + 3)
        made.append(Document(str(number), " ".join(text[:3]), " ".join(text[3:])))
    return [*real[:size], *made]


def resident() -> float:
    """MiB of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def measure(name: str, records: list[retrieval.Record], size: int) -> dict[str, Any]:
    """One row of the table."""
    documents = corpus_of(records, size)
    encode = None
    if name not in retrieval.BASELINES:
        # Small corpora first, so that imports and models are loaded before anything is timed.
        prefetch(name, documents[:2])
        start = time.perf_counter()
        prefetch(name, documents)
        encode = time.perf_counter() - start if name.startswith(("semantic", "hybrid")) else None
    retrieval.searcher(name, [Document(f"warm {d.id}", d.title, d.text) for d in documents[:20]])("warm up", 5)
    before, start = resident(), time.perf_counter()
    search = retrieval.searcher(name, documents)
    search("the first search of a retriever may build its index", 5)
    built = time.perf_counter() - start
    took = []
    for record in records[:QUERIES]:
        start = time.perf_counter()
        search(record.question, 5)
        took.append(time.perf_counter() - start)
    return {"encode": encode, "build": built, "search": 1e3 * statistics.median(took), "memory": resident() - before}


def plot(table: str, file: Path) -> None:
    """Draw milliseconds of a search and seconds to build the index over the number of documents, from a printed table."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    cells = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axis, column, title in ((axes[0], 4, "a search, ms"), (axes[1], 3, "building the index, s")):
        for name in dict.fromkeys(row[1] for row in cells):
            points = [(int(row[0]), float(row[column])) for row in cells if row[1] == name]
            axis.loglog(*zip(*points, strict=True), marker="o", label=name)
        axis.set(xlabel="documents", title=title)
    axes[0].legend(fontsize=8)
    figure.savefig(file, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="files of MuSiQue records")
    parser.add_argument("--sizes", default="20,100,1000,10000,100000", help="numbers of documents")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=NAMES, help=f"of {', '.join(NAMES)}")
    parser.add_argument("--encode-at-most", type=int, default=1000, help="largest corpus for semantic and hybrid")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)  # name and size: the process of one row
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the table in PATH to this SVG file, and measure nothing"
    )
    args = parser.parse_args()
    if args.plot:
        plot(args.paths[0].read_text(), args.plot)
        return 0
    records = retrieval.read(args.paths)
    if args.row:
        print(json.dumps(measure(args.row[0], records, int(args.row[1]))))
        return 0
    print("| documents | retriever | embed, s | build, s | search, ms | memory, MiB |\n|---|---|---|---|---|---|")
    for size in map(int, args.sizes.split(",")):
        for name in args.only:
            if name.startswith(("semantic", "hybrid")) and size > args.encode_at_most:
                continue
            command = [sys.executable, __file__, *map(str, args.paths), "--row", name, str(size)]
            with tempfile.TemporaryDirectory() as cache:  # vectors of an earlier run would not be embedded again
                env = {**os.environ, "PLUMBOB_CACHE": cache}
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
            row = json.loads(done.stdout.splitlines()[-1])
            embed = "" if row["encode"] is None else f"{row['encode']:.1f}"
            columns = (size, f"`{name}`", embed, f"{row['build']:.3f}", f"{row['search']:.2f}", f"{row['memory']:.0f}")
            print(f"| {' | '.join(map(str, columns))} |", flush=True)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    raise SystemExit(main())
