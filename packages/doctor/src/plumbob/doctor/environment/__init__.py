"""An environment examined without a model: transcripts of scripts, played once, and what must hold of what they earn and read.

`player.py` is what a trainer has to provide; `transcripts.py` says what is played, `matrix.py` plays it, and `table.py` is
the table of what is true in a healthy environment.
"""
