"""The files of a run directory, and how they are written so that an interruption leaves them whole."""
