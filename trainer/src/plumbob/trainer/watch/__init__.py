"""The watch: `plumbob.doctor` judges the metrics of a run, while it trains or afterwards."""
