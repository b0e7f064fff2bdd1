"""How a run is shown and published: the progress table, progress bars, trackers, uploads."""
