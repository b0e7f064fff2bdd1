"""The report: run directories as one HTML page that opens from disk, with curves, findings and every token.

`run_data` reads a run directory, `rollouts` its traces, `vocabulary` its tokenizer, `page` writes the file, `live` serves
it. The page's own code is in `page/`. Imports neither torch nor verifiers.
"""
