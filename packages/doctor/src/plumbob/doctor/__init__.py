"""Why a run does not learn: records of training steps, compared stage by stage with an exact reference."""
