"""The parts of a diagnosis: findings, thresholds, and the catalogue of causes that probes and rules can name."""
