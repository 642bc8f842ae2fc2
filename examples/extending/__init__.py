"""How to add a model, a backend, a baseline and an objective: one small file each."""
