"""The watch: rules that examine the metrics of a run, while it trains or afterwards."""
