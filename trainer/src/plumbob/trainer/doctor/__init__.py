"""The doctor: controlled experiments on a run that is set up but not started. What would keep it from learning?"""
