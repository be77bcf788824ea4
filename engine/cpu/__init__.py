"""The model on a CPU as one native call a step: `step.cpp`, and what lays weights and rows out for it."""
